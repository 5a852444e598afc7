"""Replaces the methods by which a session ends inside scope() (see `patches`).

`original` is always TensorFlow's method itself.
"""

from __future__ import annotations

import sys
from typing import Any

from collective.coordination import coordinator
from collective.coordination.preemption import PREEMPTION
from collective.coordination.run_analysis import is_shared
from collective.coordination.session_state import is_end, state_of_session
from collective.errors import Preempted
from collective.ops.communication import collectives


def close(original: Any, session: Any) -> None:
    """Stands in for `Session.close`: tells the peers first.

    The `with` statement of a monitored session or a `finally` may call it because of an error.
    """
    try:
        _leave_peers(session, _error_since_start(session))
    finally:
        try:
            original(session)
        finally:
            state_of_session(session).close()


def _error_since_start(session: Any) -> BaseException | None:
    """Returns the error that is being handled now, unless `session` was made during its handling.

    A session may be made in an `except`, for example on a first start without a checkpoint.
    """
    error = sys.exc_info()[1]
    return None if id(error) == state_of_session(session).handled_error else error


def leave(original: Any, session: Any, kind: Any, error: Any, traceback: Any) -> Any:
    """Stands in for `Session.__exit__`: tells the peers first.

    TensorFlow closes the session in another thread, which knows nothing of the error.
    """
    try:
        _leave_peers(session, error)
    except BaseException as elsewhere:
        original(session, type(elsewhere), elsewhere, elsewhere.__traceback__)
        raise
    return original(session, kind, error, traceback)


def _leave_peers(session: Any, error: BaseException | None) -> None:
    """Ends the session's background work, and tells the peers that this rank leaves."""
    try:
        _end_background_work(session, error)
    finally:
        state_of_session(session).part.leave()
        if coordinator.started():
            coordinator.instance().leave(session, error)


def _end_background_work(session: Any, error: BaseException | None) -> None:
    """Waits for work that still goes on during the session, before it is closed.

    Args:
        session: the session.
        error: the error with which it is left; the other ranks are then elsewhere.
    """
    work = state_of_session(session).background_save
    if work is None:
        return
    if error is not None and not is_end(error):
        work.wait_alone()
        return
    if coordinator.started():
        # Ranks may come to the end of a session at different times.
        coordinator.instance().end(session)
    work.settle()


def end(original: Any, session: Any, exception_type: Any = None) -> None:
    """Stands in for `_MonitoredSession._close_internal`: waits for all ranks at the end.

    Hooks that run something at the end do so on all ranks together. If the ranks are preempted,
    they do the same, and the program ends.
    """
    plain_session = session._coordinated_creator.tf_sess
    if plain_session is None:
        # It is already closed; TensorFlow's method says so.
        return original(session, exception_type)
    # In a `finally` it isn't told of the error.
    error = exception_type or _error_since_start(plain_session)
    if isinstance(exception_type, type) and issubclass(exception_type, Preempted):
        error = exception_type = None
    ends_well = error is None or is_end(error)
    if ends_well and coordinator.started():
        try:
            coordinator.instance().end(plain_session)
        except BaseException as error:
            original(session, type(error))
            raise
    if ends_well:
        PREEMPTION.ends(state_of_session(plain_session))
    original(session, exception_type)
    if ends_well:
        PREEMPTION.raise_if_decided()


def run_once(original: Any, session: Any, *args: Any, **kwargs: Any) -> Any:
    """Stands in for `_RecoverableSession.run`: with several ranks an error ends the session.

    After an AbortedError or an UnavailableError, TensorFlow silently closes it and continues in a
    new session from the last checkpoint. The peers would still be in the old one.
    """
    if _goes_on_alone(session):
        return original(session, *args, **kwargs)
    return session._sess.run(*args, **kwargs)


def step_once(
    original: Any, session: Any, step_fn: Any, raw_session: Any, run_with_hooks: Any
) -> Any:
    """Stands in for `_RecoverableSession.run_step_fn`, as `run_once` does for `run`."""
    if _goes_on_alone(session):
        return original(session, step_fn, raw_session, run_with_hooks)
    return session._sess.run_step_fn(step_fn, raw_session, session._sess.run)


def _goes_on_alone(session: Any) -> bool:
    """Tells whether this rank may replace a `_RecoverableSession`'s session by a new one."""
    if collectives.size() == 1 or not session._sess:
        return True
    return not is_shared(session.graph)
