"""Models drawn at random train as in plain TensorFlow: their losses, and all their variables."""

import contextlib

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from collective.tables.table import shard_of
from tests.ranks import grouped, random_model_graph, random_models, reference


def trained(model, embedding_scope, ranks, batches):
    """Trains a model and leaves its session open.

    Returns (the graph's model, the losses of each step, all rows of its tables and its metrics, the
    session).
    """
    stacked = {name: np.stack([batch[name] for batch in batches]) for name in batches[0]}
    built = random_model_graph.Built(model, embedding_scope, ranks, stacked)
    session = tf.Session()
    session.run([tf.global_variables_initializer(), tf.tables_initializer()])
    session.run([tf.local_variables_initializer(), *built.starts])
    losses = [
        session.run(
            [built.losses, built.train, built.updates],
            {built.feeds[name]: batch[name] for name in built.feeds},
        )[0]
        for batch in batches
    ]
    return built, np.array(losses), session.run([built.rows, built.metrics]), session


def in_plain_tensorflow(model, batches):
    """Returns (losses, rows, {variable: value})."""
    with tf.Graph().as_default():
        tf.set_random_seed(7)
        _, losses, rows, session = trained(model, contextlib.nullcontext, None, batches)
        with session:
            return losses, rows, session.run({v.op.name: v for v in tf.global_variables()})


def held(session, rank, size):
    """Reads {variable: (the keys that this rank has, its rows of them)}, past all lookups.

    Keys are None where it has all.
    """
    keys, values = {}, {}
    for v in tf.global_variables():
        name, table = v.op.name, shard_of(v)
        if table is None:
            keys[name], values[name] = None, v.read_value()
        elif table.rows is None:
            table.initialize_slot_rows(session, [] if v is table else [v])
            blocks = [(np.zeros(0, np.int64),) * 2, *table.ascending(session, 1000)]
            keys[name], local = (np.concatenate(x) for x in zip(*blocks))
            values[name] = tf.raw_ops.ResourceGather(
                resource=v.handle, indices=local, dtype=v.dtype
            )
        else:
            holder = table.placement.holder
            keys[name] = np.arange(rank, table.rows, size)
            local = keys[name] // size
            if holder is not None:
                keys[name] = local = np.arange(table.rows * (rank == holder))
            values[name] = tf.raw_ops.ResourceGather(
                resource=v.handle, indices=local, dtype=v.dtype
            )
    return {name: (keys[name], value) for name, value in session.run(values).items()}


def on_ranks(strategy, rank, size, model, batches):
    """Returns (the tables by their variables' names, losses, rows, this rank's part of them).

    The losses are multiplied by the numbers of this rank's samples.
    """
    options = {
        "grouping": model.grouping,
        "prefetch_keys": model.source == "keys ahead",
        "plan": "quiet",
    }
    with strategy.scope(**options), tf.Graph().as_default():
        tf.set_random_seed(7)
        part = reference.uneven_part if model.uneven else reference.part
        mine = [
            {name: part(value, rank, size) for name, value in batch.items()} for batch in batches
        ]
        built, losses, rows, session = trained(model, strategy.embedding_scope, size, mine)
        with session:
            return built.tables, losses * len(mine[0]["y"]), rows, held(session, rank, size)


def close(got, want, name, rtol=2e-4):
    """Allows for the rounding of numbers that are small compared with others of their array."""
    np.testing.assert_allclose(
        got, want, rtol=rtol, atol=2e-6 * max(np.abs(want).max(initial=0), 1e-3), err_msg=name
    )


def check(strategy, rank, size, model):
    batches = random_models.batches(model)
    want_losses, (want_rows, want_metrics), want = in_plain_tensorflow(model, batches)
    tables, losses, (rows, metrics), got = on_ranks(strategy, rank, size, model, batches)
    everyone = grouped.everyone((losses, {name: keys for name, (keys, _) in got.items()}))
    sums = np.sum([losses for losses, _ in everyone], 0)
    np.testing.assert_allclose(sums / random_models.B, want_losses, rtol=2e-5, err_msg="losses")
    for name, value in want_metrics.items():
        np.testing.assert_allclose(metrics[name], value, rtol=1e-3, atol=1e-5, err_msg=name)
    assert got.keys() == want.keys() and rows.keys() == want_rows.keys() == tables.keys()
    for name, (keys, value) in got.items():
        # of a slot, whose name begins with its table's
        table = next((tables[of] for of in tables if f"{name}/".startswith(f"{of}/")), None)
        close(
            value,
            want[name] if keys is None else want[name][random_model_graph.ids_of(table, keys)],
            f"{name} on this rank",
        )
    for name, table in tables.items():
        there = np.arange(table.rows)
        if table.kind != "replicated":
            there = random_model_graph.ids_of(
                table, np.concatenate([keys[name] for _, keys in everyone])
            )
            assert len(np.unique(there)) == len(there), name
        close(rows[name][there], want_rows[name][there], f"{name} looked up")
        # a dynamic table has no row of these, and zeros for them
        never = np.setdiff1d(np.arange(table.rows), there)
        assert table.kind == "dynamic" or not len(never), name
        assert not rows[name][never].any(), name
        np.testing.assert_array_equal(
            want_rows[name][never], random_model_graph.initial_rows(table)[never], name
        )


@pytest.mark.slow
@pytest.mark.spread
@pytest.mark.parametrize("seed", random_models.seeds("COLLECTIVE_TEST_MODELS"))
def test_trained_as_in_plain_tensorflow(strategy, rank, size, seed):
    model = random_models.draw(seed)
    print(model)  # what a case that hangs has to say
    try:
        check(strategy, rank, size, model)
    except Exception as error:
        raise AssertionError(f"{error}\nof {model}") from error
