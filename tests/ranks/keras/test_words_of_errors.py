"""What one rank alone does with a Keras model, or can't be done, is an error that says the way."""

from __future__ import annotations

import pytest
import tensorflow as tf2

from collective.coordination import barrier
from collective.errors import RankError
from tests.ranks.keras.models import (
    BATCH,
    batches,
    data,
    dataset,
    keras,
    make_model,
    part,
    train_step,
)


def test_a_save_of_one_rank(strategy, folder, rank, size):
    """The others train on; all of them are told that all ranks save."""
    own = dataset(part(data(4 * BATCH), rank, size), BATCH // size)
    with strategy.scope():
        model = make_model(strategy.embedding_scope)
        model.compile("adagrad", "mse")
        model.fit(own, verbose=0)
        if size == 1:
            return
        said = "Rank 0: .*saving the Keras model .*, which all ranks call, and rank 0 writes"
        with pytest.raises(RankError, match=said):
            model.fit(own, verbose=0) if rank else model.save_weights(f"{folder}/m.weights.h5")
        if rank:  # Rank 0 says once more that its save has failed.
            with pytest.raises(RankError, match="saving the Keras model"):
                barrier.exchange(None, "what comes next", {})


def test_functions_that_xla_compiles(strategy, rank, size):
    """Those that exchange nothing stay possible."""
    with strategy.scope():
        model = make_model(strategy.embedding_scope)
        step = train_step(model, keras.optimizers.SGD(0.1))
        compiled = tf2.function(step.python_function, jit_compile=True)
        batch = batches(part(data(BATCH), rank, size), size)[0]
        with pytest.raises(NotImplementedError, match="'step' is made with jit_compile=True"):
            compiled(*batch)
        step(*batch)
        assert float(tf2.function(lambda x: x + 1, jit_compile=True)(1.0)) == 2


def test_exports(strategy, folder, rank, size):
    with strategy.scope():
        model = make_model(strategy.embedding_scope)
        if size > 1:
            with pytest.raises(NotImplementedError, match="strategy.export_saved_model"):
                model.export(f"{folder}/export-{rank}")


def test_tables_outside_of_scope(strategy):
    with pytest.raises(RuntimeError, match=r"with strategy.scope\(\): with strategy.embedding"):
        with strategy.embedding_scope():
            pass
