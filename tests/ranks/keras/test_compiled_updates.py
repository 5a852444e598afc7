"""Compiled operations update tables as Keras's new optimizers do, many tables in one."""

from __future__ import annotations

import pytest
import tensorflow as tf2

from collective import keras as collective_keras
from tests.ranks.keras.models import keras
from tests.ranks.keras.test_functions import equals

pytestmark = pytest.mark.either_backend

new, legacy = keras.optimizers, keras.optimizers.legacy
# How many operations update three tables.
OPERATIONS = {
    "Adagrad": (lambda: new.Adagrad(0.05), 1),
    "Adam": (lambda: new.Adam(0.003), 1),
    "AdamW": (lambda: new.AdamW(0.003), 1),
    # Averages are taken after each table's update, and clipping reads the sums.
    "Adam with averages": (lambda: new.Adam(0.003, use_ema=True), 3),
    "Adagrad, clipped": (lambda: new.Adagrad(0.05, clipnorm=0.1), 3),
    "Adam, amsgrad": (lambda: new.Adam(0.003, amsgrad=True), 0),
    "legacy SGD": (lambda: legacy.SGD(0.05, momentum=0.9), 0),
}
OPTIMIZERS = {
    "a schedule": lambda: new.Adam(keras.optimizers.schedules.ExponentialDecay(0.01, 3, 0.7)),
    "other betas": lambda: new.Adam(0.003, beta_1=0.3, beta_2=0.5, epsilon=0.1),
    "amsgrad": lambda: new.Adam(0.003, amsgrad=True),
    "numbers that are tensors": lambda: new.Adam(
        0.003, beta_1=tf2.constant(0.8), epsilon=tf2.Variable(1e-3, trainable=False)
    ),
    "weight decay": lambda: new.AdamW(0.003, weight_decay=0.1),
    "averages": lambda: new.Adam(0.003, use_ema=True, ema_overwrite_frequency=3),
    "Adagrad with weight decay": lambda: new.Adagrad(0.05, weight_decay=0.1),
}


def static_tables():
    layers = [keras.layers.Embedding(9, 2, name=f"table{i}") for i in range(3)]
    for layer in layers:
        layer.build([])
    return layers


def dynamic_tables():
    layers = [collective_keras.layers.Embedding(2, name=f"keys{i}") for i in range(3)]
    for layer in layers:
        layer.build([])
    return layers


CASES = [(static_tables, name) for name in OPERATIONS]
# Averages of dynamic tables are refused; their weights decay before each update of rows.
CASES += [(dynamic_tables, n) for n in OPERATIONS if n not in ("Adam with averages", "AdamW")]


@pytest.mark.parametrize("make_tables, name", CASES, ids=[f"{m.__name__}, {n}" for m, n in CASES])
def test_one_operation_updates_all_tables(strategy, make_tables, name):
    make, operations = OPERATIONS[name]
    kinds: list[str] = []
    with strategy.scope():
        with strategy.embedding_scope():
            layers = make_tables()
        optimizer, tables = make(), [layer.embeddings for layer in layers]

        @tf2.function
        def step():
            with tf2.GradientTape() as tape:
                ids = tf2.constant([1, 3, 3])
                loss = tf2.add_n([tf2.reduce_sum(layer(ids)) for layer in layers])
            before = tf2.compat.v1.get_default_graph().get_operations()
            optimizer.apply_gradients(zip(tape.gradient(loss, tables), tables))
            made = tf2.compat.v1.get_default_graph().get_operations()
            kinds.extend(op.type for op in made[len(before) :])

        step()
    assert not {"Unique", "UnsortedSegmentSum"} & {*kinds}
    updates = [kind for kind in kinds if kind.startswith("CollectiveSparse")]
    assert len(updates) == operations, updates


@pytest.mark.matrix
@pytest.mark.double
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_numbers_equal_one_process(strategy, rank, size, name):
    equals(strategy, rank, size, OPTIMIZERS[name])
