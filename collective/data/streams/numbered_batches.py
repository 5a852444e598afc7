"""Makes a stream's batches ahead, and gives them by number, again if need be.

              dropped     kept for slower ranks      made ahead
    numbers ─────────┬──────────── window ───────────┬─ ahead ─┬──────▶
                     highest number asked - window    highest asked + ahead

A number outside begins the user's batches again, at that number: after a restart of the job, say.
"""

from __future__ import annotations

import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from collective.data.batches.batch import Batch

Batches = Callable[[int], Iterable[Any]]


class LoaderError(Exception):
    """Says why a batch can't be made."""


class NumberedBatches:
    """Gives the batches of a stream by number. Threads may call it at the same time.

    Args:
        make: returns the batches from a number on.
        window: how many batches before the last one are kept.
        ahead: how many are made before they are asked for.
    """

    def __init__(self, make: Batches, window: int, ahead: int):
        self._make, self._window, self._ahead = make, window, ahead
        self._changed = threading.Condition()
        self._made: dict[int, Batch] = {}
        self._next = 0  # the number of the batch that is made next
        self._highest = 0  # of the numbers asked for
        self._beginning = 0  # counts how often the batches were begun
        self._is_over = False  # they came to their end
        self._error: tuple[int, str] | None = None
        self._is_told = False  # the error was raised: who asks again gets another try
        self._length: int | None = None
        self._seen = 0  # so many batches exist for sure
        self._counting = threading.Lock()
        self._thread: threading.Thread | None = None
        self._is_closed = False

    def close(self) -> None:
        """Makes no batch any more, and ends the iterator, so that it closes its files.

        It doesn't wait for a batch that is being made. Nothing is there yet for who
        asks afterwards.
        """
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def take(self, number: int, patience: float) -> Batch | None:
        """Returns a batch; None if the stream has fewer.

        Args:
            number: of the batch.
            patience: seconds to wait for it.

        Raises:
            TimeoutError: it isn't there yet.
            LoaderError: it can't be made.
        """
        deadline = time.monotonic() + patience
        with self._changed:
            if not self._is_closed:
                self._come_to(number)
            while True:
                if self._is_closed:
                    raise TimeoutError  # another loader may take this one's place
                if number in self._made:
                    return self._made[number]
                if self._has_ended_before(number):
                    return None
                if self._error is not None:
                    self._is_told = True
                    raise LoaderError(self._error[1])
                if not self._changed.wait(deadline - time.monotonic()):
                    raise TimeoutError

    def count(self, limit: int) -> int:
        """Returns how many batches the stream has, `limit` at most.

        If they were never made so far, it begins them a few times to find the end.

        Raises:
            LoaderError: a batch can't be made.
        """
        with self._counting:
            if self._length is None and self._seen < limit and not self._exists(limit - 1):
                least, most = self._seen, limit - 1  # batches below `least` exist, `most` doesn't
                while least < most:
                    middle = (least + most) // 2
                    if self._exists(middle):
                        least = middle + 1
                    else:
                        most = middle
                self._length = least
            return min(limit, self._seen if self._length is None else self._length)

    def first_batch(self) -> Batch | None:
        """Returns the batch of number 0, or any that is there; None if the stream is empty.

        Raises:
            LoaderError: it can't be made.
        """
        with self._changed:
            known = next(iter(self._made.values()), None)
        return known or self._one_batch(0)

    def _exists(self, number: int) -> bool:
        if number < self._seen:
            return True
        if self._one_batch(number) is None:
            return False
        self._saw(number)
        return True

    def _one_batch(self, number: int) -> Batch | None:
        try:
            batches = iter(self._make(number))
            batch = next(batches, None)
            _close(batches)
        except Exception as error:
            raise LoaderError(_text(number, error)) from error
        return None if batch is None else _checked(number, batch)

    def _saw(self, number: int) -> None:
        with self._changed:
            self._seen = max(self._seen, number + 1)

    def _has_ended_before(self, number: int) -> bool:
        if self._length is not None and number >= self._length:
            return True
        return self._is_over and number >= self._next

    def _is_coming(self, number: int) -> bool:
        return number in self._made or (
            self._next <= number <= self._next + self._window + self._ahead
        )

    def _come_to(self, number: int) -> None:
        """Has the batches made up to a number; begins them there if they are elsewhere."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="batches", daemon=True)
            self._next, self._highest, self._beginning = number, number, 1
            self._thread.start()
        elif self._has_ended_before(number):
            return
        elif self._is_told or not self._is_coming(number):
            self._begin(number)
        elif number > self._highest:
            self._highest = number
        for old in [each for each in self._made if each < self._highest - self._window]:
            del self._made[old]
        self._changed.notify_all()

    def _begin(self, number: int) -> None:
        self._made.clear()
        self._next = self._highest = number
        self._beginning += 1
        self._is_over, self._error, self._is_told = False, None, False

    def _work(self) -> None:
        """Makes batches, in a thread of its own."""
        batches: Iterator[Any] | None = None
        began = 0
        while True:
            with self._changed:
                while not self._is_closed and self._beginning == began and not self._is_wanted():
                    self._changed.wait()
                if self._is_closed:
                    break
                if self._beginning != began:
                    began, left, batches = self._beginning, batches, None
                    _close(left)
                number = self._next
            batch, text = None, ""
            try:
                batches = iter(self._make(number)) if batches is None else batches
                batch = next(batches, None)
                batch = None if batch is None else _checked(number, batch)
            except Exception as error:
                traceback.print_exc()
                text = error.args[0] if isinstance(error, LoaderError) else _text(number, error)
            with self._changed:
                if self._beginning == began:
                    self._store(number, batch, text)
                    self._changed.notify_all()
        _close(batches)

    def _is_wanted(self) -> bool:
        is_far = self._next > self._highest + self._ahead
        return not (is_far or self._is_over or self._error)

    def _store(self, number: int, batch: Batch | None, text: str) -> None:
        if text:
            self._error = number, text
        elif batch is None:
            self._is_over = True
            if number == self._seen:  # else the end may be further back
                self._length = number
        else:
            self._made[number] = batch
            self._next = number + 1
            self._seen = max(self._seen, self._next)


def _checked(number: int, batch: Any) -> Batch:
    if not isinstance(batch, Batch):
        raise LoaderError(f"batch {number} is no collective.data.Batch, but {type(batch).__name__}")
    return batch


def _text(number: int, error: Exception) -> str:
    return f"batch {number} can't be made: {type(error).__name__}: {error}"


def _close(batches: Any) -> None:
    """Ends a generator, so that it closes its files now."""
    close = getattr(batches, "close", None)
    if close is not None:
        close()
