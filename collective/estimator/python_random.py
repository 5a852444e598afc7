"""Gives all ranks rank 0's random numbers of Python and NumPy while an input is made.

    rank 0   ──state──► input_fn ──► its state goes on, as without other ranks
    rank 1   rank 0's ► input_fn ──► its own again (or rank 0's, if it had the same)

So `random.shuffle` and `np.random.permutation` give the same order on all ranks, by the script's
own seed if it has set one, and a different order at the next call. A generator of
`tf.data.Dataset.from_generator` draws later, in a thread that reads the data. It has its own
states, which start from input_fn's, as long as it draws: from one element to the next, until an
element needs no number. The next pass continues where the previous one has ended.

The script's own generators (`np.random.default_rng()`), which it has to seed, and functions of
`tf.py_function` are out of reach. `collective.data.dealt_input` finds the differences then.
"""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import hashlib
import pickle
import random
import threading
from collections.abc import Iterator
from typing import Any, Callable

import numpy as np

# For how long one generator's element is waited for by another's. They may wait for each other.
_PATIENCE = 1.0

_drawing = threading.Lock()
_making: list[list[Draws]] = []


@dataclasses.dataclass(frozen=True)
class States:
    """Holds the states of Python's generator and of NumPy's."""

    of_python: Any
    of_numpy: Any

    @classmethod
    def now(cls) -> States:
        return cls(random.getstate(), np.random.get_state())

    def text(self) -> str:
        """Returns both as text, the same for the same states."""
        states = (self.of_python, self.of_numpy)
        return base64.b64encode(pickle.dumps(states, protocol=4)).decode()

    @classmethod
    def of_text(cls, text: str) -> States:
        return cls(*pickle.loads(base64.b64decode(text)))

    def put(self) -> None:
        """Lets both generators go on from here."""
        random.setstate(self.of_python)
        np.random.set_state(self.of_numpy)

    def equals(self, other: States) -> bool:
        return self.of_python == other.of_python and bool(
            pickle.dumps(self.of_numpy) == pickle.dumps(other.of_numpy)
        )

    def elsewhere(self, where: str) -> States:
        """Returns other states, which these and `where` decide."""
        digest = hashlib.blake2b(f"{where} {self.text()}".encode(), digest_size=16).digest()
        of_numpy = self.of_numpy
        if of_numpy[0:1] == ("MT19937",):  # else the script has given NumPy another generator
            of_numpy = np.random.RandomState(np.frombuffer(digest, np.uint32)).get_state()
        return States(random.Random(digest).getstate(), of_numpy)


class Draws:
    """Calls a generator, which goes on with states of its own.

    Where nobody else draws in between, they are those of the process, which go on, too.

    Attributes:
        first: from which the next pass starts; set when input_fn is over.
    """

    def __init__(self, generator: Callable[..., Any]):
        self._generator = generator
        self.first: States | None = None

    def __call__(self, *args: Any) -> Iterator[Any]:
        """Starts a pass over the elements."""
        states = self.first or States.now()
        # A pass may begin before this one has ended.
        self.first = next_pass = states.elsewhere("pass")
        elements: Iterator[Any] | None = None
        draws, is_over = True, False
        while True:
            with _in_place(states) if draws else contextlib.nullcontext() as place:
                try:
                    if elements is None:
                        elements = iter(self._generator(*args))
                    element = next(elements)
                except StopIteration:
                    is_over = True
            if place is not None:
                draws, states = not place[0].equals(states), place[0]
            if is_over:
                break
            yield element
        if self.first is next_pass:
            self.first = states


@contextlib.contextmanager
def _in_place(states: States) -> Iterator[list[States]]:
    """Lets the program draw from `states` inside.

    Yields:
        A list, which has the final states once it is left.
    """
    final = [states]
    if not _drawing.acquire(timeout=_PATIENCE):
        yield final
        return
    try:
        outside = States.now()
        is_own = outside.equals(states)
        if not is_own:
            states.put()
        try:
            yield final
        finally:
            final[0] = States.now()
            if not is_own:
                outside.put()
    finally:
        _drawing.release()


@contextlib.contextmanager
def of_rank_0(text: str) -> Iterator[None]:
    """Lets the program draw rank 0's numbers inside, and generators that are made inside later.

    Args:
        text: of rank 0's states.
    """
    own = States.now()
    is_own = own.text() == text
    if not is_own:
        States.of_text(text).put()
    _making.append([])
    try:
        yield
    finally:
        states = States.now()
        for draws in _making.pop():
            draws.first, states = states, states.elsewhere("generator")
        if not is_own:
            own.put()


def from_generator(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Stands in for `tf.data.Dataset.from_generator`: its generator draws alike on all ranks.

    It does where an input_fn is called; elsewhere it is TensorFlow's.
    """
    generator = args[0] if args else kwargs.pop("generator", None)
    if _making and callable(generator):
        generator = Draws(generator)
        _making[-1].append(generator)
    return original(generator, *args[1:], **kwargs)
