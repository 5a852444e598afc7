"""`strategy.plan` and `Model.summary` say which weights of a Keras model are tables, and where."""

from __future__ import annotations

import pytest
import tensorflow as tf2

import collective
from collective.tables.table import Sharded
from tests.ranks.keras.models import BATCH, USERS, WORDS, data, dataset, keras, make_model, part

pytestmark = pytest.mark.double

tf = tf2.compat.v1


def summary_of(model):
    lines = []
    model.summary(print_fn=lambda line, *_: lines.append(line))
    return [line for text in lines for line in text.splitlines()]


def test_the_plan_of_a_model(strategy, rank, size):
    keras.backend.clear_session()
    plain = summary_of(make_model())
    keras.backend.clear_session()
    with strategy.scope():
        model = make_model(strategy.embedding_scope)
        other = collective.keras.layers.Embedding(3, name="open")
        plan = strategy.plan(model)
        assert [(t.name, t.rows, t.dim) for t in plan.tables] == [
            ("embedding/embeddings", USERS, 8),
            ("embedding_1/embeddings", WORDS, 4),
        ]
        assert not plan.tables[0].slots and not plan.exchanges
        assert ("exchanges" in plan.notes) == (size > 1)
        model.compile("adam", "mse")
        model.fit(dataset(part(data(BATCH * 2), rank, size), BATCH // size), verbose=0)
        plan = strategy.plan(model)
        assert len(plan.tables[0].slots) == 2 and plan.tables[0].row_bytes == 3 * 8 * 4
        assert plan.tables[0].shard_rows == tuple(len(range(r, USERS, size)) for r in range(size))
        if size > 1:
            (group,) = plan.groups
            assert group.lookups == 2 and plan.tables[0].groups == (group.name,)
            phases = [exchange.phase for exchange in plan.exchanges]
            assert phases.count("keys") == 1 and phases.count("gradients") == 1, phases
        assert "embedding/embeddings" in str(plan) and "exchanges" not in plan.notes

        # A dynamic table, and one that is replicated; not built yet.
        later = keras.Sequential([other, keras.layers.Dense(1)], name="later")
        assert (
            not strategy.plan(later).tables and "isn't built" in strategy.plan(later).notes["model"]
        )
        later(tf2.constant([1, 2]))
        (table,) = strategy.plan(later).tables
        assert table.rows is None and table.shard_rows[rank] == 0
        with strategy.embedding_scope(placement="replicated"):
            small = keras.layers.Embedding(5, 2, name="small")
            small.build([None])
        (table,) = strategy.plan(small).tables
        assert table.placement == "replicated" and table.shard_rows == (5,) * size
        # All that eager code has made.
        names = {table.name for table in strategy.plan().tables}
        assert {"embedding/embeddings", "open/embeddings", "small/embeddings"} <= names
        with pytest.raises(ValueError, match="is for a graph"):
            strategy.plan(model, devices="2 x H100-80GB")

        # A line more, and nothing else.
        lines = summary_of(model)
        assert lines[:-1] == plain
        ranks = "1 rank" if size == 1 else f"{size} ranks"
        assert lines[-1] == (
            f"Tables on {ranks}: embedding/embeddings ({USERS} x 8), "
            f"embedding_1/embeddings ({WORDS} x 4)"
        )
        assert summary_of(later)[-1] == f"Tables on {ranks}: open/embeddings (dynamic x 3)"


def test_layers_that_embedding_scope_made_are_tables_wherever_they_are_built(strategy):
    with strategy.scope():
        with strategy.embedding_scope():
            layer = keras.layers.Embedding(11, 3)
        outside = keras.layers.Embedding(11, 3)
        model = keras.Sequential([layer, keras.layers.Dense(1)])
        model(tf2.constant([[1, 2]]))
        outside(tf2.constant([1]))
        assert isinstance(layer.embeddings, Sharded)
        assert not isinstance(outside.embeddings, Sharded)
        assert keras.Sequential.from_config(model.get_config()).layers[0].input_dim == 11


def test_the_plan_of_a_model_in_a_graph(strategy):
    with strategy.scope(), tf.Graph().as_default():
        model = make_model(strategy.embedding_scope)
        assert strategy.plan(model).to_dict() == strategy.plan().to_dict()
        assert summary_of(model)[-1].startswith("Tables on ")
