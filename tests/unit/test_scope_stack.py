"""Tests open scopes: which options are in force, in which thread; the first scope and the last."""

from __future__ import annotations

import threading
from typing import Any, Callable

import pytest

from collective.embedding_variable import get_embedding_variable
from collective.options import EmbeddingOptions, ScopeOptions
from collective.scope import ScopeStack


@pytest.fixture
def stack() -> ScopeStack:
    return ScopeStack()


def in_thread(function: Callable[[], Any]) -> Any:
    """Returns what `function` returns in a thread of its own."""
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(function()))
    thread.start()
    thread.join()
    (result,) = results
    return result


class ScopesOfAnotherThread:
    """Enters and leaves scopes in one other thread, at the test's word."""

    def __init__(self, stack: ScopeStack):
        self._stack = stack
        self._work: list[Callable[[], Any]] = []
        self._asked, self._answered = threading.Semaphore(0), threading.Semaphore(0)
        self._results: list[Any] = []
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            self._asked.acquire()
            self._results.append(self._work.pop()())
            self._answered.release()

    def _do(self, work: Callable[[], Any]) -> Any:
        self._work.append(work)
        self._asked.release()
        assert self._answered.acquire(timeout=10)
        return self._results.pop()

    def enter(self, **given: Any) -> None:
        self._do(lambda: self._stack.enter(given))

    def leave(self) -> None:
        self._do(self._stack.leave)

    @property
    def options(self) -> ScopeOptions:
        return self._do(lambda: self._stack.options)


def test_outside_of_scopes_defaults_are_in_force(stack: ScopeStack):
    assert not stack.is_open
    assert stack.options == stack.defaults == ScopeOptions()
    assert stack.given == {}


def test_a_nested_scope_inherits_what_is_not_given(stack: ScopeStack):
    stack.enter({"local_steps": 3, "grouping": False})
    stack.enter({"grouping": True, "plan": "quiet"})
    assert stack.options == ScopeOptions(local_steps=3, grouping=True, plan="quiet")
    assert stack.given["local_steps"] == 3


def test_leaving_restores_the_options_around(stack: ScopeStack):
    stack.enter({"local_steps": 3})
    stack.enter({"local_steps": 4})
    stack.leave()
    assert stack.options.local_steps == 3 and stack.is_open
    stack.leave()
    assert stack.options.local_steps == 1 and not stack.is_open


def test_given_options_open_an_equal_scope(stack: ScopeStack):
    stack.enter({"local_steps": 3, "check": 7})
    given, inside = stack.given, stack.options
    stack.leave()
    stack.enter(given)
    assert stack.options == inside


def test_a_scope_that_is_refused_is_not_open(stack: ScopeStack):
    with pytest.raises(ValueError, match="local_steps"):
        stack.enter({"local_steps": 0})
    assert not stack.is_open


def test_other_defaults_are_inherited(stack: ScopeStack):
    stack.defaults = ScopeOptions(grouping=False)
    assert not stack.options.grouping
    stack.enter({"local_steps": 2})
    assert stack.options == ScopeOptions(grouping=False, local_steps=2)


def test_a_thread_with_a_scope_does_not_see_anothers_options(stack: ScopeStack):
    other = ScopesOfAnotherThread(stack)
    stack.enter({"local_steps": 2})
    other.enter(local_steps=5)
    assert (stack.options.local_steps, other.options.local_steps) == (2, 5)


def test_threads_leave_their_own_scopes_in_any_order(stack: ScopeStack):
    """Two threads' scopes overlap without nesting: each leaves its own, not the one opened last."""
    other = ScopesOfAnotherThread(stack)
    stack.enter({"local_steps": 2})
    other.enter(local_steps=5)
    stack.leave()
    assert other.options.local_steps == 5 and stack.is_open
    other.leave()
    assert not stack.is_open


def test_a_thread_without_a_scope_is_in_the_one_opened_last(stack: ScopeStack):
    stack.enter({"local_steps": 2})
    stack.enter({"local_steps": 3})
    assert in_thread(lambda: stack.options.local_steps) == 3
    stack.leave()
    assert in_thread(lambda: stack.options.local_steps) == 2


def test_a_thread_without_a_scope_may_leave_the_one_opened_last(stack: ScopeStack):
    """A generator that holds a scope may be closed by another thread."""
    stack.enter({"local_steps": 2})
    stack.enter({"local_steps": 3})
    in_thread(stack.leave)
    assert in_thread(lambda: stack.options.local_steps) == 2


def test_embedding_scopes_nest_and_inherit(stack: ScopeStack):
    assert stack.embedding_options is None
    stack.enter({})
    stack.enter_embedding({"min_rows": 9})
    stack.enter_embedding({})
    assert stack.embedding_options == EmbeddingOptions(min_rows=9)
    stack.enter_embedding({"min_rows": 0})
    assert stack.embedding_options == EmbeddingOptions()
    for _ in range(3):
        stack.leave_embedding()
    assert stack.embedding_options is None


def test_an_embedding_scope_is_its_threads_alone(stack: ScopeStack):
    stack.enter({})
    stack.enter_embedding({})
    assert in_thread(lambda: stack.embedding_options) is None


def test_an_embedding_scope_outside_of_scopes_is_refused(stack: ScopeStack):
    with pytest.raises(RuntimeError, match=r"embedding_scope\(\) .* inside scope\(\)"):
        stack.enter_embedding({})
    assert stack.embedding_options is None


def test_the_first_and_the_last_scope_of_the_process_are_told(stack: ScopeStack):
    events: list[Any] = []
    stack.connect(
        first=lambda: events.append(("first", stack.is_open)),
        last=lambda: events.append(("last", stack.is_open)),
        changed=lambda options: events.append(options and options.local_steps),
    )
    stack.enter({"local_steps": 2})
    stack.enter({"local_steps": 3})
    in_thread(lambda: stack.enter({"local_steps": 4}))
    in_thread(stack.leave)
    stack.leave()
    stack.leave()
    assert events == [("first", False), 2, 3, 4, 3, 2, None, ("last", False)]


def test_a_first_scope_that_can_not_open_leaves_none_open(stack: ScopeStack):
    def fail() -> None:
        raise OSError("no patches")

    stack.connect(first=fail, last=lambda: None, changed=lambda options: None)
    with pytest.raises(OSError, match="no patches"):
        stack.enter({})
    assert not stack.is_open


def test_a_dynamic_table_outside_of_scope_says_how_to_open_one() -> None:
    with pytest.raises(ValueError, match="'user'") as error:
        get_embedding_variable("user", 4)
    for way in ("with strategy.scope()", "--as … --embedding-scope auto"):
        assert way in str(error.value)
