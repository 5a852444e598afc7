"""Random numbers of Python and NumPy are rank 0's where an input is made, and later each rank's."""

from __future__ import annotations

import random
import threading

import numpy as np
import pytest

from collective.estimator import python_random
from collective.estimator.python_random import States


@pytest.fixture(autouse=True)
def own_numbers():
    before = States.now()
    yield
    before.put()


def seeded(seed):
    random.seed(seed)
    np.random.seed(seed)


def drawn():
    return random.random(), float(np.random.random_sample()), random.sample(range(9), 9)


class Rank:
    """Stands for a process with its own states."""

    def __init__(self, seed):
        seeded(seed)
        self._states = States.now()

    def __enter__(self):
        self._outside = States.now()
        self._states.put()

    def __exit__(self, *error):
        self._states = States.now()
        self._outside.put()

    def text(self):
        with self:
            return States.now().text()


def made_alike(ranks, make):
    """Returns what `make` makes on each rank, while an input_fn is called."""
    text, out = ranks[0].text(), []
    for rank in ranks:
        with rank, python_random.of_rank_0(text):
            out.append(make())
    return out


def generator_of(body):
    """Returns the generator that `tf.data.Dataset.from_generator` would get."""
    return python_random.from_generator(lambda generator: generator, body)


@pytest.mark.parametrize("seeds", [(1, 2, 3), (1, 1, 1), (1, 1, 2)])
def test_all_ranks_draw_rank_0s_numbers_and_then_their_own(seeds):
    ranks = [Rank(seed) for seed in seeds]
    numbers = made_alike(ranks, drawn)
    following = made_alike(ranks, drawn)
    seeded(seeds[0])
    assert numbers == [drawn()] * 3 and following == [drawn()] * 3, "those of one process"
    for rank, seed in zip(ranks, seeds):
        seeded(seed)
        if seed == seeds[0]:
            drawn(), drawn()
        with rank:
            own = drawn()
        assert own == drawn(), "as if the others weren't there"


def test_an_error_gives_a_rank_its_own_numbers_back():
    seeded(5)
    text = States.now().text()
    seeded(6)
    with pytest.raises(KeyError), python_random.of_rank_0(text):
        raise KeyError
    numbers = drawn()
    seeded(6)
    assert numbers == drawn()


def shuffles_at_first():
    yield from np.random.permutation(7)


def draws_for_each():
    for x in range(20):
        if random.random() < 0.5:
            yield x


def shuffles():
    values = list(range(7))
    random.shuffle(values)
    return values


@pytest.mark.parametrize("body", [shuffles_at_first, draws_for_each, shuffles])
@pytest.mark.parametrize("seeds", [(1, 2), (1, 1)])
def test_a_generator_draws_alike_in_each_pass(body, seeds):
    ranks = [Rank(seed) for seed in seeds]
    generators = made_alike(ranks, lambda: generator_of(body))
    passes = []
    for rank, generator in zip(ranks, generators):
        with rank:
            passes.append([[int(x) for x in generator()] for _ in range(3)])
    seeded(seeds[0])
    alone = [[int(x) for x in body()] for _ in range(3)]
    assert passes == [alone, alone], "those of one process, which go on from pass to pass"
    assert alone[0] != alone[1]


def test_what_a_rank_draws_in_between_does_not_matter():
    ranks = [Rank(1), Rank(2)]
    passes = []
    for i, (rank, generator) in enumerate(
        zip(ranks, made_alike(ranks, lambda: generator_of(shuffles_at_first)))
    ):
        with rank:
            passes.append([])
            for _ in range(2):
                for x in generator():
                    passes[-1].append(int(x))
                    np.random.random_sample(i + 1)
    assert passes[0] == passes[1]


def test_the_next_input_fn_has_other_numbers_after_a_generator_that_drew():
    ranks = [Rank(1), Rank(2)]
    firsts = []
    for _ in range(2):
        generators = made_alike(ranks, lambda: generator_of(shuffles_at_first))
        firsts.append([])
        for rank, generator in zip(ranks, generators):
            with rank:
                firsts[-1].append([int(x) for x in generator()])
    assert firsts[0][0] == firsts[0][1] and firsts[1][0] == firsts[1][1]
    assert firsts[0] != firsts[1]


def test_passes_at_one_time_and_several_generators():
    def body():
        return zip(np.random.permutation(7).tolist(), np.random.permutation(7).tolist())

    ranks, seen = [Rank(1), Rank(2)], []
    for rank, (a, b) in zip(
        ranks, made_alike(ranks, lambda: (generator_of(body), generator_of(body)))
    ):
        with rank:
            seen.append(list(zip(a(), b(), a())))
    assert seen[0] == seen[1]
    assert len({tuple(column) for column in zip(*seen[0])}) == 3


def test_a_generator_that_waits_for_another_one_gets_its_element(monkeypatch):
    monkeypatch.setattr(python_random, "_PATIENCE", 0.05)
    has_come = threading.Event()
    ranks = [Rank(1)]

    def waits():
        assert has_come.wait(20)
        yield 1

    def lets_go():
        yield 2
        has_come.set()

    (pair,) = made_alike(ranks, lambda: (generator_of(waits), generator_of(lets_go)))
    elements = []
    thread = threading.Thread(target=lambda: elements.extend(pair[0]()))
    thread.start()
    elements.extend(pair[1]())
    thread.join(20)
    assert sorted(elements) == [1, 2]


def test_an_error_of_a_generator_is_its_own():
    def body():
        yield 1
        raise KeyError("a")

    (generator,) = made_alike([Rank(1)], lambda: generator_of(body))
    elements = generator()
    assert next(elements) == 1
    with pytest.raises(KeyError):
        next(elements)


def test_elsewhere_a_generator_is_the_scripts():
    assert generator_of(shuffles) is shuffles
