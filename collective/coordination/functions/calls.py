"""Lets ranks agree on each call of a `tf.function`, as they agree on each run of a session.

A function with collectives has an agreement, for which its gate waits (`traces`):

    data, bounds of ids ──► header ──► allgather of headers ──► gate ──► collectives ──► updates

These are operations of the call itself, of which two call Python: a call whose data end before them
never comes to them, and this rank then tells its peers from outside, as for a run.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow.compat.v1 as tf

from collective.coordination import agreement, coordinator, milestones
from collective.coordination.agreement import (
    CHECK_STRIDE,
    ENDED,
    EVALUATING,
    IDLE,
    INVALID,
    RUNNING,
    Header,
)
from collective.coordination.functions import dealing, stops
from collective.coordination.functions.answers import answer_of
from collective.coordination.functions.eager_values import make_equal
from collective.coordination.prepared_run import Membership, peers_are_idle
from collective.errors import RankError
from collective.job.progress_board import Label, Phase
from collective.ops.communication import collectives
from collective.ops.communication.gate import Check
from collective.ops.graph import graph_state, graphs
from collective.tables import eager_lookups
from collective.tables.policies import call_evictions
from collective.tables.rows import rows_in_file

CLOSED = (
    "A tf.function uses tables or gradients of several ranks, and isn't called by eager code "
    "inside `with strategy.scope():`, but outside of it, or by TensorFlow itself (a dataset, a "
    "tf.py_function). Call it inside."
)
# Of what no session has.
NUMBER = 0


@dataclasses.dataclass
class FunctionPlan:
    """Describes a traced function that ranks call together.

    Attributes:
        description: says what a call does, for peers, the launcher and errors.
        shared: the names of everything that all ranks must run, sorted.
        signature: 63 bits of these names and the description.
        trains: whether it updates a table or a trainable variable.
        checks: of the ids of its lookups.
        variables: the replicated variables that it uses.
        label: its description for the launcher.
        graph: the function's.
        executed: what a call executes.
        chooses: whether ranks compare which branches they take.
        unweighed: the names of what counts alike on all ranks in its loss.
    """

    description: str
    shared: tuple[str, ...]
    signature: int
    trains: bool
    checks: list[Check]
    variables: list[Any]
    label: Label
    graph: Any
    executed: frozenset[tf.Operation]
    chooses: bool = False
    unweighed: tuple[str, ...] = ()

    @functools.cached_property
    def ends(self) -> np.ndarray:
        """Returns the ends of the ranges of all values that the checks compare."""
        return np.array([rows for check in self.checks for rows in check.rows], np.int64)

    @property
    def member(self) -> Membership:
        """Returns this rank's part in one call."""
        return Membership(NUMBER, self.checks)

    def header(self, status: int, check: int = 0, value: int = 0) -> Header:
        return Header(status, NUMBER, self.signature, check, value)


@dataclasses.dataclass
class Plans:
    """Records what a traced function's calls need.

    Attributes:
        plan: None where ranks needn't call it together.
        step: what a call does of a step.
        is_part: whether a call is a part of a step that has begun.
        is_harmless: whether a function that was traced outside of scope() updates no variable.
    """

    plan: FunctionPlan | None = None
    step: stops.Step = stops.Step(trains=False, takes_data=False)
    is_part: bool = False
    is_harmless: bool = False

    @property
    def is_refused(self) -> bool:
        """Tells whether no call begins any more, because the ranks stop."""
        return not self.is_part and stops.is_due(self.step)


@dataclasses.dataclass
class _Call:
    """Holds the state of a call.

    Attributes:
        plan: the function's.
        started: whether it came to its agreement.
        is_refused: whether the ranks stop, as it found out there.
        choices: what its branches and loops depend on.
        disagreement: the headers that kept the gate closed.
    """

    plan: FunctionPlan
    started: bool = False
    is_refused: bool = False
    choices: tuple[str, ...] = ()
    disagreement: list[Header] | None = None


# The call that this process carries out; ranks make one at a time.
_current: list[_Call] = []


def plan_of(graph: tf.Graph) -> FunctionPlan | None:
    """Returns the plan of a traced function; None if ranks needn't call it together."""
    return graph_state.of(graph, Plans).plan if graphs.is_traced(graph) else None


def training_of(variable: Any) -> FunctionPlan | None:
    """Returns the plan of the function that was traced last to train a variable; None for none."""
    reference = getattr(variable, "_collective_trained_by", None)
    graph = None if reference is None else reference()
    return None if graph is None else plan_of(graph)


def note_part_of_step(graph: tf.Graph) -> None:
    """Notes that a function is called within steps that have begun: all of it is done, or none."""
    graph_state.of(graph, Plans).is_part = True


def is_part_of_step(graph: tf.Graph) -> bool:
    """Tells whether a function is called within steps that have begun."""
    return graph_state.of(graph, Plans).is_part


@contextlib.contextmanager
def as_step(graph: Any) -> Iterator[None]:
    """Does what is due before and after a call of a traced function by eager code.

    Raises:
        Preempted: it would begin a step, and the ranks stop.
    """
    plans = graph_state.of(graph, Plans)
    if not plans.is_part:
        stops.begin(plans.step)
    yield
    if plans.step.trains:
        milestones.poster().trained()
        if plans.plan is not None:
            dealing.after_training()
    try:
        if plans.step.trains:
            call_evictions.after_training(graph)
        if not plans.is_part or plans.step.trains:
            rows_in_file.limit_memory(rows_in_file.tables_of(graph))
    except Exception as error:
        if collectives.size() > 1:
            words = f"failed after a call with {type(error).__name__}: {error}"
            coordinator.instance().failure = Membership(NUMBER, []), words
        raise


def order(variable: Any) -> tuple[str, int]:
    """Returns by what variables are ordered alike on all ranks: name, and order of creation."""
    return str(variable.name), int(str(variable._unique_id).rpartition("_")[2])


def carry_out(plan: FunctionPlan, execute: Callable[[], Any]) -> Any:
    """Executes a call on all ranks or on none, and returns its values.

    The steps are those of a run (`collective.coordination.coordinator`).

    Args:
        plan: the function's.
        execute: calls TensorFlow.
    """
    # A call in a Python function of another call would wait for that one to end.
    eager_lookups.refuse_own_threads(f"the function '{plan.graph.name}' is called")
    ranks = coordinator.instance()
    with ranks.one_at_a_time, ranks.progress:
        ranks.deliver_failure()
        ranks.refuse_if_broken()
        ranks.progress.does(plan.label)
        _equalise(ranks, plan)
        call = _Call(plan)
        _current.append(call)
        ranks.progress.enters(Phase.RUNNING)
        try:
            values = execute()
        except tf.errors.OpError as error:
            raise _error_for_all(ranks, call, error) from None
        except Exception as error:
            ranks.failure = (plan.member, f"failed with {type(error).__name__}: {error}")
            raise
        finally:
            _current.remove(call)
        return values


def _equalise(ranks: Any, plan: FunctionPlan) -> None:
    """Makes variables equal that the ranks haven't shared before."""
    new = [v for v in plan.variables if not getattr(v, "_collective_equal", False)]
    if new:
        description = f"{plan.description} for the first time"
        make_variables_equal(ranks, new, plan.signature, plan.member, plan.shared, description)


def make_variables_equal(
    ranks: Any,
    new: Sequence[Any],
    signature: int,
    member: Membership,
    shared: Sequence[str],
    description: str,
) -> None:
    """Gives all ranks rank 0's values of variables, once they have agreed.

    Args:
        ranks: the coordinator.
        new: the variables, in the same order on all ranks.
        signature: of the function that uses them, 0 for none.
        member: this rank's part.
        shared: what a call of the function needs.
        description: says what this rank does.
    """
    names = "\n".join(f"{v.name} {v.shape} {v.dtype.name}" for v in new)
    digest = hashlib.blake2b(f"{signature}\n{names}".encode(), digest_size=8).digest()
    header = Header(RUNNING, NUMBER, int.from_bytes(digest, "little") >> 1)
    shared = [*shared, *(f"{agreement.INITIALIZE}{v.name}" for v in new)]
    ranks.agree(header, member, shared, description)
    ranks.progress.enters(Phase.EQUALISING)
    make_equal(new)
    for variable in new:
        variable._collective_equal = True
    dealing.begin_again()


def agreement_on(
    plans: Plans,
    bounds: tf.Tensor,
    choices: Mapping[str, Sequence[tf.Tensor]],
    records: tf.Tensor | None = None,
) -> tuple[tf.Tensor, tf.Tensor]:
    """Makes the operations of a function by which ranks agree on a call.

    Args:
        plans: the function's.
        bounds: [n, 2], the smallest and the largest of the values that the checks compare.
        choices: branches and loops that all ranks have to take alike, and what each depends on.
        records: int64 scalar, how many records this rank's batch has; None if nothing asks.

    Returns:
        0, once all ranks carry out the call; and N times the share of this rank's records.
    """
    # TensorFlow keeps an operation's Python function as long as the process.
    own = weakref.ref(plans)
    counts = {name: len(tensors) for name, tensors in choices.items()}
    deciding = [x for tensors in choices.values() for x in tensors]
    begin = functools.partial(_begin, own, counts)
    records = tf.constant(agreement.UNWEIGHED, tf.int64) if records is None else records
    header = tf.numpy_function(begin, [bounds, records, *deciding], tf.int64, stateful=True)
    header.set_shape([1, agreement.WIDTH])
    headers = agreement.gathered(header, agreement.NAME)
    opened, weight = tf.numpy_function(_open, [headers], [tf.int32, tf.float64], stateful=True)
    opened.set_shape([])
    weight.set_shape([])
    return opened, weight


def _begin(
    own: Callable[[], Plans | None],
    choices: Mapping[str, int],
    bounds: np.ndarray,
    records: np.ndarray,
    *deciding: np.ndarray,
) -> np.ndarray:
    """Returns this rank's header in a call: an operation of the function."""
    plans = own()
    if plans is None or not _current or _current[-1].plan is not plans.plan:
        raise RuntimeError(CLOSED)
    call, ranks = _current[-1], coordinator.instance()
    values = iter(deciding)
    call.choices = tuple(
        f"{name} depends on {', '.join(_shown(next(values)) for _ in range(count))}"
        for name, count in choices.items()
    )
    header = _header(call.plan, bounds, int(records))
    if choices and header.status == RUNNING:
        digest = hashlib.blake2b(str(call.choices).encode(), digest_size=8).digest()
        header = dataclasses.replace(header, id=int.from_bytes(digest, "little") >> 1)
    call.started = True
    ranks.progress.enters(Phase.AGREEING)
    return agreement.as_rows(header)


def _open(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Lets a call that has begun go on if all ranks carry it out: an operation of the function.

    Args:
        rows: the headers of all ranks.

    Returns: 0, and N times the share of this rank's records: 0 if no rank has any, 1 if one says of
    none how many it has.
    """
    call, ranks = _current[-1], coordinator.instance()
    headers = ranks.hear(agreement.as_headers(rows))
    header, signature = headers[collectives.rank()], call.plan.signature
    while header.status == RUNNING and peers_are_idle(headers, signature):
        if graph_state.of(call.plan.graph, Plans).is_refused:
            call.is_refused = True
            raise RuntimeError("the ranks stop")
        headers = ranks.exchange_headers(header)
    ranks.progress.enters(Phase.RUNNING)
    if any(
        h.status not in (RUNNING, IDLE) or h.session != NUMBER or h.signature != signature
        for h in headers
    ) or _choose_differently(headers):
        call.disagreement = headers
        raise RuntimeError("the ranks do not agree on this call")
    records = [h.check for h in headers if h.status == RUNNING]
    weight = _weight(header.check, records)
    if call.plan.trains:
        agreement.warn_of_unweighed(call.plan.unweighed, records)
    return np.array(0, np.int32), np.array(weight, np.float64)


def _weight(own: int, records: Sequence[int]) -> float:
    """Returns N times the share of a rank's records in those of all ranks that run."""
    if agreement.UNWEIGHED in records:
        return 1.0
    return collectives.size() * own / sum(records) if any(records) else 0.0


def _choose_differently(headers: Sequence[Header]) -> bool:
    """Tells whether ranks that run would take different branches, or turns of a loop."""
    return len({h.id for h in headers if h.status == RUNNING}) > 1


def _differences(plan: FunctionPlan, said: Sequence[dict[str, Any]]) -> str:
    """Says by what ranks would take different branches."""
    choices = [each["made"] for each in said]
    differing = [named for named in zip(*choices) if len(set(named)) > 1]
    named = "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(differing[0]))
    return (
        f"A rank {plan.description}, and ranks would exchange or update something in different "
        f"branches or turns of a loop: {named}. Let that depend on what is the same on all ranks."
    )


def _shown(value: Any) -> str:
    """Returns a value for people; a large one is told apart from others by a digest."""
    value = np.asarray(value)
    if value.size == 1:
        return str(value.item())
    return hashlib.blake2b(value.tobytes(), digest_size=8).hexdigest()


def _header(plan: FunctionPlan, bounds: np.ndarray, records: int) -> Header:
    """Returns this rank's header, with the first value outside of its range."""
    low, high = bounds.T
    wrong = (low <= high) & ((low < 0) | (high >= plan.ends))
    if not wrong.any():
        return plan.header(RUNNING, records)
    first = int(wrong.argmax())
    places = [
        number * CHECK_STRIDE + i
        for number, check in enumerate(plan.checks)
        for i in range(len(check.rows))
    ]
    value = int(low[first] if low[first] < 0 else high[first])
    return plan.header(INVALID, places[first], value)


def _error_for_all(ranks: Any, call: _Call, error: tf.errors.OpError) -> BaseException:
    """Returns the error of a call that failed, after telling the peers."""
    plan = call.plan
    if call.is_refused:
        return stops.error()
    if call.disagreement is not None:
        verdict = _judged(ranks, plan, call.disagreement)
        if verdict is None and _choose_differently(call.disagreement):
            verdict = RankError(_differences(plan, ranks.channel.texts({"made": call.choices})))
        return verdict or error
    if call.started:
        ranks.broken = error = coordinator.failure_half_way(error)
        return error
    if isinstance(error, tf.errors.OutOfRangeError):
        answerable = not (plan.trains or plan.chooses)
        answer = answer_of(plan.graph, plan.shared) if answerable else None
        if answer is not None:
            return _answer_until_all_end(ranks, call, answer, error)
        headers = ranks.exchange_headers(plan.header(ENDED, 0 if plan.trains else EVALUATING))
        verdict = _judged(ranks, plan, headers)
        return verdict if isinstance(verdict, RankError) else error
    ranks.failure = (plan.member, f"failed with {type(error).__name__}: {error.message}")
    return error


def _answer_until_all_end(
    ranks: Any, call: _Call, answer: Any, error: tf.errors.OutOfRangeError
) -> BaseException:
    """Answers the peers' calls until they are out of data, too, or go on to something else.

    Returns: The error that this rank then raises: `error` if all goes well.
    """
    plan = call.plan
    while True:
        headers = ranks.exchange_headers(plan.header(IDLE))
        running = {h.signature for h in headers if h.status == RUNNING}
        idle = {h.signature for h in headers if h.status == IDLE}
        all_well = all(h.status in (RUNNING, IDLE) and h.session == NUMBER for h in headers)
        if all_well and running == {plan.signature} == idle:
            ranks.progress.enters(Phase.ANSWERING)
            try:
                answer(tf.constant(0))
            except tf.errors.OpError as failed:
                ranks.broken = failed = coordinator.failure_half_way(failed)
                return failed
            if graph_state.of(plan.graph, Plans).is_refused:  # so the peers ask no more
                return stops.error()
        elif all_well and len(running) == 1 and idle == {plan.signature}:
            return error
        else:
            verdict = _judged(ranks, plan, headers)
            return verdict if isinstance(verdict, RankError) else error


def _judged(ranks: Any, plan: FunctionPlan, headers: list[Header]) -> BaseException | None:
    verdict: BaseException | None = ranks.judge(headers, plan.member, plan.shared, plan.description)
    return verdict
