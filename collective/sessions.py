"""Sessions of scope(): each run is agreed on by all ranks, variables start equal, leaving is a message to the peers.

These functions stand in for methods of TensorFlow's sessions (see `collective.patches`); `original` is the method itself.
A run that uses no collective, and every run with one rank, goes straight to it.
"""
from __future__ import annotations

import atexit
import dataclasses
import re
import sys
from typing import Any, Dict, List, Optional, Sequence, Set, Tuple

import tensorflow.compat.v1 as tf

from collective import agreement, runs
from collective.agreement import ENDED, FAILED, INVALID, LEFT, RUNNING, Header
from collective.errors import RankError
from collective.gradients import is_replicated
from collective.ops import communication
from collective.ops.gate import Check, gates_of
from collective.table import Table

_NODE = re.compile(r'\{\{(?:function_)?node ([^\s}]+)')


@dataclasses.dataclass
class Run:
    """A way of running a graph, prepared once and used at every step.

    Attributes:
        reach: what it executes.
        keep: the fetches themselves, so that their identities, by which a run is found again, stay theirs.
        targets: the agreement operations that run beside the fetches, one per level.
        tickets: the gates' placeholders.
        checks: those of every level, one level after the other.
        before: names of what runs before the first agreement.
        variables: global variables that it initializes.
        disagreement: (level, headers) if the gate stayed closed, set while it runs.
    """
    reach: runs.Reach
    keep: Any
    targets: List[tf.Operation] = dataclasses.field(default_factory=list)
    tickets: List[tf.Tensor] = dataclasses.field(default_factory=list)
    checks: List[List[Check]] = dataclasses.field(default_factory=list)
    before: Set[str] = dataclasses.field(default_factory=set)
    variables: List[Any] = dataclasses.field(default_factory=list)
    disagreement: Optional[Tuple[int, List[Header]]] = None


class Membership:
    """This rank's part in a session that all ranks have.

    Attributes:
        number: counts the sessions that ranks share; the same on every rank.
        over: why nothing can be run in it any more, once a peer or this rank has left.
    """

    def __init__(self, number: int):
        self.number = number
        self.over: Optional[BaseException] = None


class Protocol:
    """This rank's side of the agreement, over all of its sessions."""

    def __init__(self) -> None:
        self.channel = agreement.SideChannel()
        self.members: Dict[Any, Membership] = {}
        self.count = 0
        self.failure: Optional[Tuple[Membership, str]] = None      # said to the peers when they next wait for this rank
        self.broken: Optional[str] = None                           # a run failed half-way: peers can't be answered
        atexit.register(self.leave_all)
        self._hook, sys.excepthook = sys.excepthook, self._dying
        self._dead = False

    def _dying(self, *error: Any) -> None:
        self._dead = True                   # the launcher ends the job; peers in a collective can't be told
        self._hook(*error)

    # -- one run ----------------------------------------------------------------------------------------------------------

    def run(self, original: Any, session: Any, run: Run, fetches: Any, feeds: Any, options: Any, metadata: Any) -> Any:
        member = self.member(session)
        self.say_failure()
        if self.broken:
            raise RankError(f'An earlier run failed half-way on rank {communication.rank()} and left its peers waiting; '
                            f'start again. It failed with: {self.broken}')
        if member.over is not None:
            raise member.over
        doing = 'runs ' + ', '.join(sorted(str(getattr(f, 'name', f)) for f in runs.flatten(fetches)))
        if run.variables:
            self.settle(Header(RUNNING, member.number, run.reach.signature), member, run, doing)
        ticket = [1, member.number, run.reach.signature]
        feeds = {**(feeds or {}), **{placeholder: ticket for placeholder in run.tickets}}
        run.disagreement = None
        try:
            out = original(session, [fetches, run.targets], feeds, options, metadata)[0]
        except tf.errors.OpError as error:
            raise self.after(error, member, run, doing) from None
        except Exception as error:          # TensorFlow never started it: a feed of a wrong shape, say
            self.failure = (member, f'failed with {type(error).__name__}: {error}')
            raise
        if run.variables:
            make_equal(original, session, [v for v in run.variables if is_replicated(v)])
        return out

    def after(self, error: tf.errors.OpError, member: Membership, run: Run, doing: str) -> BaseException:
        """What to raise for a run that failed with `error`, once the peers know what they must know."""
        if run.disagreement is not None:
            level, headers = run.disagreement
            return self.judged(headers, run.checks[level - 1], member, run, doing) or error
        if not _names(error) & run.before:
            if run.targets:
                self.broken = f'{type(error).__name__}: {error.message}'
            return error
        if isinstance(error, tf.errors.OutOfRangeError):
            headers = self.channel.headers(Header(ENDED, member.number, run.reach.signature))
            judged = self.judged(headers, run.checks[0] if run.checks else [], member, run, doing)
            return error if isinstance(judged, tf.errors.OutOfRangeError) else judged or error
        self.failure = (member, f'failed with {type(error).__name__}: {error.message}')
        return error

    def settle(self, header: Header, member: Membership, run: Run, doing: str) -> None:
        """Agrees outside of any run; raises what all ranks raise."""
        judged = self.judged(self.channel.headers(header), [], member, run, doing)
        if judged is not None:
            raise judged

    def judged(self, headers: List[Header], checks: Sequence[Check], member: Membership, run: Optional[Run],
               doing: str) -> Optional[BaseException]:
        names = list(run.reach.collectives) if run else []
        judged = agreement.verdict(headers, checks, lambda: self.channel.texts({'doing': doing, 'collectives': names}))
        if any(h.status in (LEFT, FAILED) for h in headers) or isinstance(judged, RankError):
            member.over = judged or tf.errors.OutOfRangeError(None, None, 'this session is closed')
        return judged

    # -- coming and going ---------------------------------------------------------------------------------------------------

    def member(self, session: Any) -> Membership:
        if session not in self.members:
            self.count += 1
            self.members[session] = Membership(self.count)
        return self.members[session]

    def leave(self, session: Any, error: Optional[BaseException] = None) -> None:
        """Tells the peers that this rank runs nothing more in `session`: their next run there ends as if out of data.

        `error` is what it is left with, if anything.
        """
        member = self.members.pop(session, None)
        if member is None or member.over is not None or self.broken:
            return
        if error is not None and not _is_end(error):
            # Most likely the end of this program. Should it go on, the peers hear of it when they next wait for this rank.
            self.failure = self.failure or (member, f'left its session with {type(error).__name__}: {error}')
            return
        self.judged(self.channel.headers(Header(LEFT, member.number)), [], member, None, 'left its session')

    def say_failure(self) -> None:
        """Delivers a failure that this rank survived."""
        if self.failure is None:
            return
        (member, doing), self.failure = self.failure, None
        if member.over is None:
            headers = self.channel.headers(Header(FAILED, member.number))
            judged = self.judged(headers, [], member, None, doing)
            if judged is not None and any(h.status in (RUNNING, ENDED, INVALID) for h in headers):
                raise judged

    def leave_all(self) -> None:
        """At the end of the program: whoever still waits for this rank in an open session is told."""
        if self._dead or self.broken:
            return
        try:
            self.say_failure()
        except RankError:
            return
        for session in list(self.members):
            self.leave(session)


def _is_end(error: BaseException) -> bool:
    if isinstance(error, SystemExit):
        return error.code in (None, 0)
    return isinstance(error, (tf.errors.OutOfRangeError, StopIteration, GeneratorExit))


def _names(error: tf.errors.OpError) -> Set[str]:
    """The operations that an error names."""
    names = set(_NODE.findall(error.message or ''))
    return names | {error.op.name} if getattr(error, 'op', None) is not None else names


_protocol: List[Protocol] = []


def protocol() -> Protocol:
    """The process's own; made at the first need."""
    if not _protocol:
        _protocol.append(Protocol())
    return _protocol[0]


# -- what stands in for TensorFlow's methods --------------------------------------------------------------------------------


def run(original: Any, session: Any, fetches: Any, feed_dict: Any = None, options: Any = None,
        run_metadata: Any = None) -> Any:
    """`Session.run`."""
    if communication.size() == 1 or not (gates_of(session.graph).gates or _has_tables(session.graph)):
        return original(session, fetches, feed_dict, options, run_metadata)
    prepared = _prepare(session, fetches, feed_dict)
    if prepared is None or not (prepared.targets or prepared.variables):
        return original(session, fetches, feed_dict, options, run_metadata)
    return protocol().run(original, session, prepared, fetches, feed_dict, options, run_metadata)


def make_callable(original: Any, session: Any, fetches: Any, feed_list: Any = None, accept_options: bool = False) -> Any:
    """`Session.make_callable`: with several ranks a plain `run` in disguise."""
    if communication.size() == 1:
        return original(session, fetches, feed_list, accept_options)

    def call(*feeds: Any, options: Any = None, run_metadata: Any = None) -> Any:
        return session.run(fetches, dict(zip(feed_list or [], feeds)), options, run_metadata)
    return call


def partial_run_setup(original: Any, session: Any, *args: Any, **kwargs: Any) -> Any:
    """`Session.partial_run_setup`."""
    if communication.size() > 1 and gates_of(session.graph).gates:
        raise NotImplementedError('partial_run is not possible with several ranks, which agree on whole runs: use run().')
    return original(session, *args, **kwargs)


def close(original: Any, session: Any) -> None:
    """`Session.close`, which a `with` statement of a monitored session or a `finally` may call for an error."""
    if _protocol:
        _protocol[0].leave(session, sys.exc_info()[1])
    original(session)


def leave(original: Any, session: Any, kind: Any, error: Any, traceback: Any) -> Any:
    """`Session.__exit__`, which closes the session in a thread that knows nothing of the error."""
    if _protocol:
        _protocol[0].leave(session, error)
    return original(session, kind, error, traceback)


def prepare_session(original: Any, manager: Any, *args: Any, **kwargs: Any) -> Any:
    """`SessionManager.prepare_session`: an init_fn may have given variables values of its own."""
    session = original(manager, *args, **kwargs)
    if communication.size() > 1 and kwargs.get('init_fn') is not None:
        make_equal(type(session).run, session, [
            v for v in session.graph.get_collection(tf.GraphKeys.GLOBAL_VARIABLES) if is_replicated(v)])
    return session


def _has_tables(graph: tf.Graph) -> bool:
    return any(isinstance(v, Table) for v in graph.get_collection_ref(tf.GraphKeys.GLOBAL_VARIABLES))


def _prepare(session: Any, fetches: Any, feed_dict: Any) -> Optional[Run]:
    """The `Run` for these fetches and feeds; None if TensorFlow would refuse them, which it then does itself."""
    leaves, fed = runs.flatten(fetches), list(feed_dict or {})
    cache = session.__dict__.setdefault('_collective_runs', {})
    for table in (leaf for leaf in leaves if isinstance(leaf, Table)):
        table.refuse('Fetching the value')
    gates = gates_of(session.graph)
    key = (tuple(map(_identity, leaves)), tuple(map(_identity, fed)), len(gates.gates))
    if key not in cache:
        try:
            reach = runs.reach(session.graph, leaves, fed)
        except Exception:
            return None
        cache[key] = _plan(session.graph, reach, (leaves, fed))
    prepared: Run = cache[key]
    return prepared


def _identity(leaf: Any) -> Any:
    return leaf if isinstance(leaf, str) else id(leaf)


def _plan(graph: tf.Graph, reach: runs.Reach, keep: Any) -> Run:
    gates = gates_of(graph)
    out = Run(reach, keep, variables=reach.initialized(graph))
    finalized = graph.finalized
    graph._unsafe_unfinalize()
    try:
        for level in reach.levels(gates):
            checks = reach.checks(gates, level)
            after = reach.sources(gates) if level == 1 else reach.exchanged_below(gates, level)

            def disagreed(headers: List[Header], level: int = level) -> None:
                out.disagreement = (level, headers)

            out.checks.append(checks)
            out.targets.append(agreement.agree(gates.gates[level - 1], checks, after, disagreed))
            out.tickets.append(gates.gates[level - 1].ticket)
            if level == 1:
                out.before = runs.upstream_names([*after, *(check.bounds.op for check in checks)])
    finally:
        if finalized:
            graph.finalize()
    return out


def make_equal(original: Any, session: Any, variables: Sequence[Any]) -> None:
    """Gives every rank rank 0's values of `variables`. Called on every rank with the same variables."""
    movable = [v for v in variables if v.dtype.base_dtype not in (tf.string, tf.variant, tf.resource)]
    if not movable:
        return
    if not hasattr(session.graph, '_collective_broadcasts'):
        session.graph._collective_broadcasts = {}
    cache = session.graph._collective_broadcasts
    key = tuple(v.name for v in movable)
    if key not in cache:
        finalized = session.graph.finalized
        session.graph._unsafe_unfinalize()
        with session.graph.as_default(), tf.init_scope(), tf.name_scope('collective/make_equal'):
            cache[key] = [tf.assign(v, communication.broadcast(
                v.read_value(), communication.unique_name(f'{v.op.name}/broadcast'))).op for v in movable]
        if finalized:
            session.graph.finalize()
    original(session, cache[key])
