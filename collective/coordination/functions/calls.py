"""Lets ranks agree on each call of a `tf.function`, as they agree on each run of a session.

When a function with collectives is traced to its end, `close` gives it an agreement, for which its
gate waits, and with it every collective and every write:

    data, bounds of ids ──► agreement ──► gate ──► collectives ──► updates

The agreement is an operation of the call itself that calls Python: a call whose data end before it
never comes to it, and this rank then tells its peers from outside, as for a run. Other writes
(metrics, an optimizer's number of steps) wait, too: a refused call changes nothing.
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

from collective.coordination import agreement, coordinator, milestones, run_analysis
from collective.coordination.agreement import (
    CHECK_STRIDE,
    ENDED,
    EVALUATING,
    IDLE,
    INVALID,
    RUNNING,
    Header,
)
from collective.coordination.functions import deciders, stops
from collective.coordination.functions.answers import answer_of
from collective.coordination.functions.eager_values import make_equal
from collective.coordination.prepared_run import Membership, peers_are_idle
from collective.errors import RankError
from collective.job.progress_board import Label, Phase
from collective.ops.communication import collectives
from collective.ops.communication.gate import Check, gates_of
from collective.ops.graph import (
    device_scopes,
    graph_analysis,
    graph_state,
    graphs,
    training_flag,
)
from collective.tables import traced_lookups
from collective.tables.policies import call_evictions, eager_steps
from collective.tables.table import is_replicated, shard_of

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
        signature: 63 bits of these names.
        trains: whether it updates a table or a trainable variable.
        checks: of the ids of its lookups.
        variables: the replicated variables that it uses.
        label: its description for the launcher.
        graph: the function's.
        executed: what a call executes.
        chooses: whether ranks compare which branches they take.
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


def check_traced_outside(graph: Any) -> None:
    """Checks a function that was traced while no scope() was open, and is called in one.

    Raises:
        NotImplementedError: it updates a trainable variable: by this rank's gradients alone.
    """
    known = graph_state.of(graph, Plans)
    if known.is_harmless or collectives.size() == 1:
        return
    # A plain assignment restores a saved model's values, or copies others.
    changes = [
        op for op in _writes(graph, set(graph.get_operations())) if op.type != "AssignVariableOp"
    ]
    updated = _updated(graph, changes)
    if updated:
        raise NotImplementedError(
            f"The function '{graph.name}' was traced outside of `with strategy.scope():`, where it "
            f"updates the variable '{updated[0].name}' by the data of a single rank. Call it in "
            "the scope from its first call on, or make another tf.function of it there."
        )
    known.is_harmless = True


def note_part_of_step(graph: tf.Graph) -> None:
    """Notes that a function is called within steps that have begun: all of it is done, or none."""
    graph_state.of(graph, Plans).is_part = True


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
        call_evictions.after_training(graph)


# While a function is traced


def close(graph: Any) -> None:
    """Gives a function that was traced to its end an agreement, if it has collectives.

    Raises:
        NotImplementedError: ids depend on what is exchanged; or ranks can't make sure that they
            take the same branches, in which they exchange something.
    """
    gates = gates_of(graph)
    ends = [*(x.op for x in graph.outputs), *graph.control_outputs]
    executed = graph_analysis.upstream(ends)
    if collectives.size() == 1:
        _close_alone(graph, executed, gates.checked)
        return
    if not gates.gates:
        return
    zero = gates.gates[0].zero
    if zero.op.inputs[0].op.type != "PlaceholderWithDefault":
        return  # It answers calls of another one, and ranks agree outside of it.
    gates.changed()
    for check in gates.checks:
        if gates.level(check.bounds.op):
            gates.at(2)  # says why not
    written = _writes(graph, executed)
    updating = _updating_branches(graph, written)
    choices = deciders.compare(graph, executed, set(written), updating)
    executed = graph_analysis.upstream(ends)
    may_end = _sources(graph, executed)
    sources = [op for op in may_end if not (gates.level(op) or op in updating)]
    deciding = [x for tensors in choices.values() for x in tensors]
    known = [x.op for x in (*deciding, *(check.bounds for check in gates.checks))]
    before = graph_analysis.upstream([*sources, *known])
    with graph.as_default(), graphs.outside(), device_scopes.on_host(), tf.name_scope(None):
        with tf.name_scope("collective/agreement"):
            bounds = [check.bounds for check in gates.checks]
            header = tf.concat(bounds or [tf.zeros([0, 2], tf.int64)], 0)
            with tf.control_dependencies(sources):
                plans = graph_state.of(graph, Plans)
                counts = {name: len(tensors) for name, tensors in choices.items()}
                # TensorFlow keeps an operation's Python function as long as the process.
                agree = functools.partial(_agree, weakref.ref(plans), counts)
                agreed = tf.numpy_function(agree, [header, *deciding], tf.int32, stateful=True)
                agreed.set_shape([])
    zero.op._update_input(0, agreed)
    own = [op for op in graph.get_operations() if collectives.is_scripts_own(op)]
    for op in [*written, *own]:
        # What a branch does by itself doesn't wait for all that the branch gets.
        if op not in before and (op.type in graph_analysis.CALLS or not gates.level(op)):
            op._add_control_input(zero.op)
    gates.changed()
    plan = dataclasses.replace(_plan(graph, executed, written), chooses=bool(choices))
    graph_state.of(graph, Plans).plan = plan
    _note_step(graph, executed, plan.trains)


def _note_step(graph: Any, executed: set[tf.Operation], trains: bool) -> None:
    if trains:
        traced_lookups.refuse_half_precision(f"the function '{graph.name}' trains")
    training_flag.set_in_function(graph, trains)
    eager_steps.settle(graph, trains)
    plans = graph_state.of(graph, Plans)
    plans.step = stops.Step(trains, run_analysis.takes_batch(executed))


def _close_alone(graph: Any, executed: set[tf.Operation], checks: Sequence[tf.Operation]) -> None:
    """Lets all writes of a function that trains wait for its data and checks, on one rank.

    TensorFlow itself counts a step in a call that finds the data at their end.

    Args:
        graph: the function's.
        executed: what a call executes.
        checks: of the ids of its lookups.
    """
    written = _writes(graph, executed)
    trains = bool(_updated(graph, written))
    _note_step(graph, executed, trains)
    updating = _updating_branches(graph, written)
    first = [op for op in _sources(graph, executed) if op not in updating]
    first += [op for op in checks if op in executed]
    if not first or not trains:
        return
    before = graph_analysis.upstream(first)
    for op in written:
        if op not in before:
            op._add_control_inputs(first)


def _updating_branches(graph: Any, written: Sequence[tf.Operation]) -> set[tf.Operation]:
    """Returns the branches among the writes that update variables, as averages of weights are."""
    return {op for op in written if op.type in deciders.BRANCHES and _updated(graph, [op])}


def _sources(graph: Any, executed: set[tf.Operation]) -> list[tf.Operation]:
    return [
        op for op in graph.get_operations() if op in executed and op.type in graph_analysis.SOURCES
    ]


def _writes(graph: Any, operations: set[tf.Operation]) -> list[tf.Operation]:
    """Returns the operations that write variables, calls of functions that do included."""
    return [
        op
        for op in graph.get_operations()
        if op in operations
        and (
            graph_analysis.WRITES.match(op.type)
            or op.type in graph_analysis.CALLS
            and graph_analysis.has_inside(graph, op, graph_analysis.WRITES.match)
        )
    ]


@dataclasses.dataclass
class Handles:
    """Records what a function calls the handles of variables outside, by their ids.

    TensorFlow forgets those of a function's arguments when it is traced to its end, and doesn't
    count arguments among the graph's variables.

    Attributes:
        inside: the handles, by the ids of those outside.
        arguments: the tables that the function gets; a function is traced for each table.
    """

    inside: dict[int, tf.Tensor] = dataclasses.field(default_factory=dict)
    arguments: list[weakref.ref[tf.Variable]] = dataclasses.field(default_factory=list)


def note_handles(graph: tf.Graph, arguments: Any = ()) -> None:
    """Notes the handles of the variables that a function uses so far.

    Args:
        graph: the function's.
        arguments: what it gets, nested.
    """
    handles = graph_state.of(graph, Handles)
    handles.inside.update({id(external): inner for external, inner in graph.captures})
    tables = [x for x in tf.nest.flatten(arguments) if shard_of(x) is not None]
    handles.arguments += map(weakref.ref, tables)


def _updated(graph: Any, written: Sequence[tf.Operation]) -> list[Any]:
    """Returns the tables and trainable variables that operations of a function write."""
    note_handles(graph)
    handles = graph_state.of(graph, Handles)
    inside, arguments = handles.inside, [table() for table in handles.arguments]
    holders = {graph_analysis.holder(x) for op in written for x in op.inputs}
    return [
        v
        for v in {id(v): v for v in [*graph.variables, *arguments] if v is not None}.values()
        if id(v.handle) in inside
        and inside[id(v.handle)].op in holders
        # Keras's counters of steps are trainable, too, as far as TensorFlow knows.
        and (v.trainable and v.dtype.is_floating or shard_of(v) is not None)
    ]


def _plan(graph: Any, executed: set[tf.Operation], written: Sequence[tf.Operation]) -> FunctionPlan:
    shared = tuple(sorted(run_analysis.shared_names(graph, executed, ())))
    variables = {id(v): v for v in graph.variables}
    updated = _updated(graph, written)
    trains = bool(updated)
    description = f"calls the function '{graph.name}'"
    if not graph_state.of(graph, Plans).is_part:
        for variable in updated:
            variable._collective_trained_by = weakref.ref(graph)
    return FunctionPlan(
        description,
        shared,
        run_analysis.signature_of(shared, trains, False),
        trains,
        gates_of(graph).checks,
        sorted((v for v in variables.values() if is_replicated(v)), key=order),
        Label(description, shared),
        graph,
        frozenset(executed),
    )


def order(variable: Any) -> tuple[str, int]:
    """Returns by what variables are ordered alike on all ranks: name, and order of creation."""
    return str(variable.name), int(str(variable._unique_id).rpartition("_")[2])


# While it is called


def carry_out(plan: FunctionPlan, execute: Callable[[], Any]) -> Any:
    """Executes a call on all ranks or on none, and returns its values.

    The steps are those of a run (`collective.coordination.coordinator`).

    Args:
        plan: the function's.
        execute: calls TensorFlow.
    """
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


def _agree(
    own: Callable[[], Plans | None],
    choices: Mapping[str, int],
    bounds: np.ndarray,
    *deciding: np.ndarray,
) -> np.ndarray:
    """Exchanges headers with the peers: an operation of the function.

    Args:
        own: the function's.
        choices: branches and loops that all ranks have to take alike, and on how many of `deciding`
            each depends.
        bounds: [n, 2], the smallest and the largest of the values that the checks compare.
        deciding: what they depend on.
    """
    plans = own()
    if plans is None or not _current or _current[-1].plan is not plans.plan:
        raise RuntimeError(CLOSED)
    call, ranks = _current[-1], coordinator.instance()
    call.started = True
    values = iter(deciding)
    call.choices = tuple(
        f"{name} depends on {', '.join(_shown(next(values)) for _ in range(count))}"
        for name, count in choices.items()
    )
    header, signature = _header(call.plan, bounds), call.plan.signature
    if choices and header.status == RUNNING:
        digest = hashlib.blake2b(str(call.choices).encode(), digest_size=8).digest()
        header = dataclasses.replace(header, id=int.from_bytes(digest, "little") >> 1)
    headers = ranks.exchange_headers(header)
    while header.status == RUNNING and peers_are_idle(headers, signature):
        if plans.is_refused:
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
    return np.array(0, np.int32)


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


def _header(plan: FunctionPlan, bounds: np.ndarray) -> Header:
    """Returns this rank's header, with the first value outside of its range."""
    place = 0
    for number, check in enumerate(plan.checks):
        for i, rows in enumerate(check.rows):
            low, high = (int(x) for x in bounds[place])
            if low <= high and (low < 0 or high >= rows):
                value = low if low < 0 else high
                return plan.header(INVALID, number * CHECK_STRIDE + i, value)
            place += 1
    return plan.header(RUNNING)


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
