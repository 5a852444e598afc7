"""Keras models drawn at random are fit as in plain Keras: weights, losses, metrics."""

from __future__ import annotations

import numpy as np
import pytest

from collective.tables.dynamic_table import DynamicTable
from collective.tables.table import Sharded, shard_view
from tests.ranks import grouped, random_keras_networks, reference
from tests.ranks.keras.models import keras
from tests.ranks.random_keras_models import BATCH, EPOCHS, STEPS, draw, records
from tests.ranks.random_models import seeds

pytestmark = pytest.mark.double

HELD_OUT = 30
# How far weights may be off. A crossed network subtracts squares from the square of a sum, which
# leaves few digits: plain Keras that adds up each sample's rows in two parts, as two owners do,
# is 2.0e-6 off plain Keras that adds them in their order (seed 35).
ATOL = {"crossed": 3e-6}


def of_rank(drawn, arrays, rank, size):
    """Returns (this rank's part of each global batch, the size of a part)."""
    cuts = np.arange(size + 1) * BATCH // size
    if drawn.uneven:
        cuts = (BATCH * np.linspace(0, 1, size + 1) ** 0.6).astype(int)
    first, last = cuts[rank : rank + 2]

    def own(x):
        return x.reshape(-1, BATCH, *x.shape[1:])[:, first:last].reshape(-1, *x.shape[1:])

    return {name: own(x) for name, x in arrays.items()}, int(last - first)


def evaluated_by(drawn, arrays, rank, size):
    """Returns what a rank evaluates: rank 0 has the most, if ranks may have different numbers.

    A rank without data can't answer others that evaluate a table's regularizer.
    """
    if drawn.executions is not None or any(f.table.regularized for f in drawn.features):
        return {name: reference.part(x, rank, size) for name, x in arrays.items()}
    cuts = [0, *(HELD_OUT * 2 // 3 + 3 * r for r in range(size - 1)), HELD_OUT]
    return {name: x[cuts[rank] : cuts[rank + 1]] for name, x in arrays.items()}


def trained(drawn, built, train, held_out, batch, with_keys):
    """Fits a model; returns its history, and what it is evaluated as."""
    model = random_keras_networks.compiled(built, summing=not with_keys)
    model.run_eagerly = drawn.eager and with_keys  # Plain Keras's numbers are a function's.
    train, held_out = (
        random_keras_networks.dataset_of(drawn, arrays, size, with_keys)
        for arrays, size in ((train, batch), (held_out, 5))
    )
    history = model.fit(
        **random_keras_networks.fit_arguments(drawn, train, with_keys),
        epochs=EPOCHS,
        verbose=0,
        validation_data=held_out,
        callbacks=random_keras_networks.callbacks_of(drawn),
    )
    return history.history, model.evaluate(held_out, verbose=0, return_dict=True)


def in_plain_keras(drawn, all_records, held_out, rank):
    """Returns (history, scores, weights) of one process: rank 0."""
    want = None
    if rank == 0:
        try:
            built = random_keras_networks.Built(drawn)
            scores = trained(drawn, built, all_records, held_out, BATCH, False)
            want = (*scores, [v.numpy() for v in built.model.weights])
        except Exception as error:
            want = f"plain Keras: {error}"
    # Models of ranks have the same names.
    keras.backend.clear_session()
    want = grouped.everyone(want)[0]
    assert not isinstance(want, str), want
    return want


def rows_of(variable, table, want, rank, size):
    """Returns this rank's rows of a table, and the same rows of plain Keras."""
    if isinstance(variable, DynamicTable):
        ids = {key: i for i, key in enumerate(random_keras_networks.stored_keys(table))}
        blocks = list(variable.export())
        keys = np.concatenate([np.zeros(0, np.int64), *(keys for keys, _ in blocks)])
        rows = np.concatenate([np.zeros([0, table.dim]), *(rows for _, rows in blocks)])
        assert variable.placement.holder in (None, rank) or not len(rows)
        return rows, want[[ids[key] for key in keys.tolist()]], [ids[k] for k in keys.tolist()]
    with shard_view():
        rows = variable.read_value().numpy()
    holder = variable.placement.holder
    if holder is None:
        return rows, want[rank::size], range(rank, table.rows, size)
    return rows, want[: table.rows * (rank == holder)], range(table.rows * (rank == holder))


def close(got, want, name, atol=1e-6):
    np.testing.assert_allclose(got, want, rtol=2e-6, atol=atol, err_msg=name)


def check(strategy, rank, size, drawn):
    all_records, held_out = records(drawn, BATCH * STEPS), records(drawn, HELD_OUT, held_out=True)
    want_history, want_scores, want_weights = in_plain_keras(drawn, all_records, held_out, rank)
    with strategy.scope(plan="quiet"):
        built = random_keras_networks.Built(drawn, strategy.embedding_scope)
        own, batch = of_rank(drawn, all_records, rank, size)
        evaluated = evaluated_by(drawn, held_out, rank, size)
        history, scores = trained(drawn, built, own, evaluated, batch, True)
    tables = {
        id(built.layers[feature.table.name].embeddings): feature.table for feature in drawn.features
    }
    assert len(built.model.weights) == len(want_weights)
    held = {
        tables[id(variable)]: rows_of(variable, tables[id(variable)], want, rank, size)
        for variable, want in zip(built.model.weights, want_weights)
        if isinstance(variable, Sharded)
    }
    # Before anything is compared: a failure of one rank is all ranks' failure.
    everyone = grouped.everyone({table.name: list(ids) for table, (_, _, ids) in held.items()})
    atol = ATOL.get(drawn.network, 1e-6)
    for variable, want in zip(built.model.weights, want_weights):
        if not isinstance(variable, Sharded):
            close(variable.numpy(), want, variable.name, atol)
            continue
        table = tables[id(variable)]
        rows, want_rows, _ = held[table]
        close(rows, want_rows, f"{table.name} on this rank", atol)
        there = np.concatenate([np.array(each[table.name], int) for each in everyone])
        assert len(set(there.tolist())) == len(there), table.name
        never = np.setdiff1d(np.arange(table.rows), there)
        assert table.kind == "dynamic" or not len(never), table.name
        np.testing.assert_array_equal(
            want[never], random_keras_networks.initial_rows(table)[never], table.name
        )
    assert history.keys() == want_history.keys()
    for name, values in want_history.items():
        close(history[name], values, name)
    assert scores.keys() == want_scores.keys()
    for name, value in want_scores.items():
        close(scores[name], value, f"evaluated {name}")
    assert int(built.model.optimizer.iterations.numpy()) == STEPS * EPOCHS


@pytest.mark.spread
@pytest.mark.parametrize("seed", seeds("COLLECTIVE_TEST_KERAS_MODELS"))
def test_fit_as_in_plain_keras(strategy, rank, size, seed):
    drawn = draw(seed)
    print(drawn)  # what a case that hangs has to say
    try:
        check(strategy, rank, size, drawn)
    except Exception as error:
        raise AssertionError(f"{error}\nof {drawn}") from error
