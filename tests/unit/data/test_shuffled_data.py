"""Data come in the order of a later epoch, as if the epochs before had been trained."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from collective.data import shuffled_data
from collective.tensorflow_internals.keras import package as keras

SIZE = 12


def numbers():
    return tf.data.Dataset.range(SIZE)


def shuffled(data):
    return data.shuffle(SIZE, seed=5)


class Shuffling(keras.utils.Sequence):
    def __init__(self):
        self.order, self.random = np.arange(SIZE), np.random.RandomState(1)

    def __len__(self):
        return SIZE

    def __getitem__(self, place):
        return self.order[place]

    def on_epoch_end(self):
        self.random.shuffle(self.order)


KINDS = {
    "not shuffled": numbers,
    "shuffled": lambda: shuffled(numbers()).batch(3),
    "always alike": lambda: numbers().shuffle(SIZE, seed=5, reshuffle_each_iteration=False),
    "twice": lambda: numbers().shuffle(SIZE, seed=1).batch(2).shuffle(6, seed=2).unbatch(),
    "repeated": lambda: shuffled(numbers()).repeat(2),
    "concatenated": lambda: shuffled(numbers()).concatenate(shuffled(numbers())),
    "cached": lambda: shuffled(numbers()).cache(),
    "cached before": lambda: shuffled(numbers().cache()),
    "interleaved": lambda: numbers().interleave(lambda x: tf.data.Dataset.from_tensors(x), 3),
    "random": lambda: tf.data.Dataset.random(3, rerandomize_each_iteration=True).take(4),
    "zipped": lambda: tf.data.Dataset.zip((shuffled(numbers()), shuffled(numbers()))),
}


def epoch_of(data):
    """Returns an epoch as Keras takes it, after it has made an iterator at its start."""
    return [str(x) for x in data.as_numpy_iterator()]


@pytest.mark.parametrize("kind", KINDS)
def test_a_dataset(kind):
    data = KINDS[kind]()
    iter(data)
    want = [epoch_of(data) for _ in range(3)]
    data = KINDS[kind]()
    for _ in range(2):
        shuffled_data.pass_over(data, None)
    iter(data)
    assert epoch_of(data) == want[2]


def test_a_part_of_an_epoch():
    """Of which the rest is never read."""

    def begin():
        return shuffled(numbers()).repeat(2)

    data = begin()
    iter(data)
    for _ in range(2):
        list(data.take(15))
    want = epoch_of(data)
    data = begin()
    for _ in range(2):
        shuffled_data.pass_over(data, 15)
    iter(data)
    assert epoch_of(data) == want


def test_an_evaluation_makes_an_iterator_more():
    data = shuffled(numbers())
    for _ in range(2):
        iter(data)
    want = epoch_of(data)
    data = shuffled(numbers())
    shuffled_data.pass_over(data, None, iterators=2)
    assert epoch_of(data) == want


def test_a_sequence():
    data, passed = Shuffling(), Shuffling()
    data.on_epoch_end()
    shuffled_data.pass_over(passed, None)
    np.testing.assert_array_equal(passed.order, data.order)
    shuffled_data.pass_over(np.arange(3), None)  # and arrays stay as they are
