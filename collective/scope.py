"""Tracks which scopes are open, and which options are in force."""

from __future__ import annotations

import dataclasses
import os
import threading
from typing import Any, Callable, Generic, TypeVar

from collective.job import job_file
from collective.options import EmbeddingOptions, ScopeOptions
from collective.options.declaration import names

Strategy = TypeVar("Strategy")


class OpenScope:
    """Stands for one entry into scope(): the options in force until it is left.

    Attributes:
        options: in force inside.
    """

    def __init__(self, options: ScopeOptions):
        self.options = options


class Scope(Generic[Strategy]):
    """Opens and closes a scope; it can be entered again, and inside itself.

    Args:
        strategy: the value of `with … as`.
        enter: opens the scope.
        leave: closes the scope that this thread opened last.
    """

    def __init__(
        self,
        strategy: Strategy,
        enter: Callable[[], None],
        leave: Callable[[], None],
    ):
        self._strategy, self._enter, self._leave = strategy, enter, leave

    def __enter__(self) -> Strategy:
        self._enter()
        return self._strategy

    def __exit__(self, kind: type[BaseException] | None, error: Any, traceback: Any) -> None:
        self._leave()


class _OfThread(threading.local):
    """Holds what one thread has opened.

    Attributes:
        scopes: each scope(), the innermost last.
        embedding_scopes: the options of each embedding_scope().
    """

    def __init__(self) -> None:
        self.scopes: list[OpenScope] = []
        self.embedding_scopes: list[EmbeddingOptions] = []


def _with_job_file(given: dict[str, Any]) -> dict[str, Any]:
    """Returns the options of the outermost scope(), with those of a job file that it leaves out.

    Raises:
        ValueError: both give an option, and its values differ.
    """
    found = job_file.read(os.environ).get("strategy", {})
    options = {name: value for name, value in found.items() if name in names(ScopeOptions)}
    for name in options.keys() & given.keys():
        value = list(given[name]) if isinstance(given[name], tuple) else given[name]
        if value != options[name]:
            raise ValueError(
                f"scope({name}={given[name]!r}), but the job file has strategy.{name}: "
                f"{options[name]!r}. Leave it out of the script, which the job file then decides, "
                "or out of the file."
            )
    return {**options, **given}


class ScopeStack:
    """Tracks the scopes of a process, whichever `CollectiveStrategy` object opened them.

    Each thread has its own scopes. A thread that has opened none is in the scope that any other
    thread opened last: threads of hooks, of queues and of Keras work for the program that started
    them. embedding_scope() is in effect only for the thread that opened it.

    Attributes:
        defaults: the options in force if nothing else was given.
    """

    def __init__(self) -> None:
        self.defaults = ScopeOptions()
        self._lock = threading.RLock()
        self._open: list[OpenScope] = []
        self._of_thread = _OfThread()
        self._first: Callable[[], None] = lambda: None
        self._last: Callable[[], None] = lambda: None
        self._changed: Callable[[ScopeOptions | None], None] = lambda options: None

    def connect(
        self,
        first: Callable[[], None],
        last: Callable[[], None],
        changed: Callable[[ScopeOptions | None], None],
    ) -> None:
        """Sets what happens when the process's first scope opens, its last one closes, and between.

        Args:
            first: called before the first scope is open.
            last: called after the last one was closed.
            changed: called with the options in force after each; None if no scope is open.
        """
        self._first, self._last, self._changed = first, last, changed

    @property
    def is_open(self) -> bool:
        """Tells whether any scope of the process is open."""
        return bool(self._open)

    @property
    def options(self) -> ScopeOptions:
        """Returns the options in force for the thread that asks."""
        entered = self._of_thread.scopes or self._open
        return entered[-1].options if entered else self.defaults

    @property
    def given(self) -> dict[str, Any]:
        """Returns the options in force as another scope would be given them; none outside."""
        if not self.is_open:
            return {}
        # `dataclasses.asdict` would make dictionaries of the options that are objects, too.
        return {name: getattr(self.options, name) for name in names(ScopeOptions)}

    @property
    def embedding_options(self) -> EmbeddingOptions | None:
        """Returns the options of embedding_scope() in force; None outside of it."""
        entered = self._of_thread.embedding_scopes
        return entered[-1] if entered else None

    def enter(self, given: dict[str, Any]) -> None:
        """Opens a scope; what isn't given stays what it is outside."""
        with self._lock:
            if not self._open:
                given = _with_job_file(given)
                self._first()
            scope = OpenScope(dataclasses.replace(self.options, **given))
            self._open.append(scope)
            self._of_thread.scopes.append(scope)
            try:
                self._changed(scope.options)
            except BaseException:  # The requested options can't take effect.
                self.leave()
                raise

    def leave(self) -> None:
        """Closes the scope that this thread opened last."""
        with self._lock:
            # A thread that didn't open it leaves the scope that was opened last.
            self._open.remove((self._of_thread.scopes or list(self._open)).pop())
            entered = self._of_thread.scopes or self._open
            self._changed(entered[-1].options if entered else None)
            if not self._open:
                self._last()

    def enter_embedding(self, given: dict[str, Any]) -> None:
        """Opens an embedding_scope(); what isn't given stays what it is outside.

        Raises:
            RuntimeError: no scope is open.
            ValueError: COLLECTIVE_PLACEMENT is no placement.
        """
        if not self.is_open:
            raise RuntimeError(
                "embedding_scope() has its effect inside scope() only: with strategy.scope(): "
                "with strategy.embedding_scope(): … (for a session: with strategy.scope(), "
                "tf.Graph().as_default(): …)"
            )
        around = self.embedding_options or EmbeddingOptions.by_default(os.environ)
        # A script that opens one knows itself what is a table.
        self._of_thread.embedding_scopes.append(
            dataclasses.replace(around, **{"chosen": False, **given})
        )

    def leave_embedding(self) -> None:
        """Closes the embedding_scope() that this thread opened last."""
        self._of_thread.embedding_scopes.pop()


SCOPES = ScopeStack()
