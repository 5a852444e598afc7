"""Builds the graph of a drawn model, in plain TensorFlow or with tables."""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np
import tensorflow.compat.v1 as tf
import tensorflow.compat.v2 as tf2
from tensorflow.python.training import optimizer as optimizer_lib

import collective
from collective.ops import key_hashing as key_ops
from tests.ranks import reference
from tests.ranks.random_models import (
    CLIPS,
    DECAYS,
    OPTIMIZERS,
    RATE,
    USES,
    Lookup,
    Model,
    Table,
)


def initial_rows(table: Table) -> np.ndarray:
    rows = reference.table_values(table.rows, table.dim, len(table.name)) / 2
    return np.repeat(rows[:1], table.rows, 0) if table.alike or table.kind == "dynamic" else rows


def keys_of(table: Table, ids: tf.Tensor) -> tf.Tensor:
    """Makes the keys of a dynamic table that take the place of ids."""
    if table.keys == "strings":
        return tf.strings.join(["key ", tf.strings.as_string(ids)])
    return tf.cast(ids, tf.int64) * (2**59 + 1) - 2**61 if table.keys == "huge" else ids


def ids_of(table: Table, keys: np.ndarray) -> np.ndarray:
    """Finds the ids whose keys a table holds as int64 `keys`."""
    if table.kind != "dynamic":
        return keys
    with tf.Graph().as_default(), tf.Session() as session:
        all_keys = keys_of(table, tf.range(table.rows, dtype=tf.int64))
        found = session.run(key_ops.of_strings(all_keys) if table.keys == "strings" else all_keys)
    ids = {key: i for i, key in enumerate(found.tolist())}
    return np.array([ids[key] for key in keys.tolist()], np.int64)


def metric_variable_from(start: float, name: str) -> Any:
    """Makes a metric's state by hand."""
    collections = [tf.GraphKeys.LOCAL_VARIABLES, tf.GraphKeys.METRIC_VARIABLES]
    return tf.Variable(start, trainable=False, collections=collections, name=f"metric/{name}")


class Built:
    """Builds and holds a model's graph.

    Args:
        model: a drawn model.
        embedding_scope: makes the scope in which tables are made.
        ranks: how many ranks there are; None: plain TensorFlow.
        data: [STEPS, samples, …] by name.

    Attributes:
        feeds: placeholders by name; none where the graph has the data.
        train: the update.
        losses: the losses before it.
        rows: lookups of all rows of every table, by the table's name.
        metrics: the values of metrics of the predictions, by the metrics' names.
        updates: updates them by a batch.
        starts: what initializes them.
        tables: the tables, by the name of their variables.
    """

    def __init__(
        self, model: Model, embedding_scope: Any, ranks: int | None, data: dict[str, np.ndarray]
    ):
        self.model, self._scope, self._ranks = model, embedding_scope, ranks
        self.tables: dict[str, Table] = {}
        self._made: dict[str, Any] = {}
        self.feeds = (
            {}
            if model.source != "feeds"
            else {
                name: tf.placeholder(value.dtype, [None, *value.shape[2:]], name)
                for name, value in data.items()
            }
        )
        self._p = (
            self.feeds
            or tf.data.make_one_shot_iterator(tf.data.Dataset.from_tensor_slices(data)).get_next()
        )
        step = tf.train.get_or_create_global_step()
        self.metrics: dict[str, Any] = {}
        self.updates: list[Any] = []
        self.starts: list[Any] = []
        self._tape = tf2.GradientTape(persistent=True) if model.taped else None
        with self._tape or contextlib.nullcontext():
            features = [self._features(i, lookup) for i, lookup in enumerate(model.lookups)]
            self.losses = self._network(tf.concat([*features, self._p["x"]], 1))
        self.rows = {}
        for name, table in self.tables.items():
            ids = tf.range(table.rows, dtype=tf.int64)
            found = next(v for v in tf.global_variables() if v.op.name == name)
            self.rows[name] = tf.nn.embedding_lookup(
                found, keys_of(table, ids) if self._is_dynamic(table) else ids
            )
        self.train = self._train(step)

    def _is_dynamic(self, table: Table) -> bool:
        return self._ranks is not None and table.kind == "dynamic"

    def _initializer(self, table: Table) -> Any:
        rows = initial_rows(table).astype(table.dtype)
        return tf.constant_initializer(rows[0].tolist() if self._is_dynamic(table) else rows)

    def _placement(self, table: Table) -> str:
        """Returns where a table of a column, or a dynamic one, is."""
        is_dynamic = self._is_dynamic(table)
        return ("rows", "whole", "whole:1")[table.rows % 3] if is_dynamic else "rows"

    def _variable(self, table: Table, reuse: bool) -> Any:
        if table.name in self._made and not reuse:
            return self._made[table.name]
        # Plain TensorFlow would split the variable, and look ids up in it in another order.
        partitioner = (
            tf.fixed_size_partitioner(3)
            if table.partitioned and self._ranks and table.kind != "replicated"
            else None
        )
        outer = self._scope() if table.kind != "replicated" else tf.name_scope("replicated")
        if self._ranks and table.kind == "replicated" and table.rows % 2:
            outer = self._scope(placement="replicated")
        if self._ranks and table.kind == "static" and table.rows % 3 == 0:
            outer = self._scope(placement="whole")
        if self._is_dynamic(table):
            outer = self._scope(placement=self._placement(table))
        again = table.name in self._made
        with (
            outer,
            tf.variable_scope(
                table.scope or tf.get_variable_scope(), partitioner=partitioner, reuse=again or None
            ),
        ):
            made = tf.get_variable(
                table.name,
                [None if self._is_dynamic(table) else table.rows, table.dim],
                table.dtype,
                self._initializer(table),
                trainable=table.trained != "no",
            )
        assert not again or made is self._made[table.name]
        self._made[table.name] = made
        self.tables[made.op.name] = table
        return made

    def _ids(self, lookup: Lookup, i: int, other: bool = False) -> tf.Tensor:
        ids = self._p[f"ids{i}"]
        ids = lookup.table.rows - 1 - ids if other else ids
        if lookup.column == "hash of strings":
            return tf.strings.as_string(ids)
        return keys_of(lookup.table, ids) if self._is_dynamic(lookup.table) else ids

    def _ragged(
        self, lookup: Lookup, i: int, other: bool = False, weights: bool = False
    ) -> tf.RaggedTensor:
        values = self._p[f"weights{i}"] if weights else self._ids(lookup, i, other)
        return tf.RaggedTensor.from_tensor(values, self._p[f"lengths{i}"])

    def _features(self, i: int, lookup: Lookup) -> tf.Tensor:
        """Looks a lookup's or a column's rows up: [samples, F] float32."""
        if lookup.kind == "column":
            return self._of_column(lookup, i)
        table = self._variable(lookup.table, lookup.reuse)
        width = (
            int(np.prod(lookup.inner, dtype=int))
            if lookup.kind in ("rows", "gather") and not lookup.ragged
            else 1
        ) * lookup.table.dim

        def looked_up() -> tf.Tensor:
            return self._looked_up(i, lookup, table)

        if lookup.within == "branch":
            out = tf.cond(tf.size(self._p["x"]) > 0, looked_up, lambda: tf.zeros([0, width]))
        elif lookup.within:
            function = tf.function(looked_up)
            out = (
                function() if lookup.within == "function" else 0.75 * function() + 0.25 * function()
            )
        else:
            out = looked_up()
        return tf.ensure_shape(out, [None, width])

    def _looked_up(self, i: int, lookup: Lookup, table: Any) -> tf.Tensor:
        nn = (tf if lookup.api == "v1" else tf2).nn
        samples, width = (
            tf.shape(self._p["x"])[0],
            int(np.prod(lookup.inner, dtype=int)) * lookup.table.dim,
        )
        if lookup.kind in ("rows", "gather"):
            if lookup.ragged:
                return tf.cast(
                    tf.reduce_sum(
                        nn.embedding_lookup(
                            table, self._ragged(lookup, i), max_norm=lookup.max_norm
                        ),
                        1,
                    ),
                    tf.float32,
                )
            ids = self._ids(lookup, i)
            rows = (
                tf.gather(table, ids)
                if lookup.kind == "gather"
                else nn.embedding_lookup(table, ids, max_norm=lookup.max_norm)
            )
            return tf.reshape(tf.cast(rows, tf.float32), [-1, width])
        ids, weights = (
            self._ragged(lookup, i),
            self._ragged(lookup, i, weights=True) if lookup.weighted else None,
        )
        if weights is not None:
            # else a table is cast whole, which is refused
            weights = tf.cast(weights, lookup.table.dtype)
        if not lookup.ragged:
            ids, weights = ids.to_sparse(), None if weights is None else weights.to_sparse()
        if lookup.kind == "pooled":
            out = nn.embedding_lookup_sparse(
                table, ids, weights, combiner=lookup.combiner, max_norm=lookup.max_norm
            )
        else:
            if lookup.deep:
                ids, weights = (
                    x if x is None else tf.sparse.expand_dims(x, 1) for x in (ids, weights)
                )
            default = lookup.default_id
            if default is not None and self._is_dynamic(lookup.table):
                default = keys_of(lookup.table, tf.constant(default))
            out = nn.safe_embedding_lookup_sparse(
                table,
                ids,
                weights,
                combiner=lookup.combiner,
                default_id=default,
                max_norm=lookup.max_norm,
            )
            out = out[:, 0] if lookup.deep else out
        # after the last that has ids
        out = tf.pad(tf.cast(out, tf.float32), [[0, samples - tf.shape(out)[0]], [0, 0]])
        return tf.reshape(out, [-1, lookup.table.dim])

    def _of_column(self, lookup: Lookup, i: int) -> tf.Tensor:
        before, table, fc, key = (
            set(tf.global_variables()),
            lookup.table,
            tf.feature_column,
            f"feature{i}",
        )
        embedding = {
            "dimension": table.dim,
            "combiner": lookup.combiner,
            "initializer": self._initializer(table),
            "max_norm": lookup.max_norm,
            "trainable": table.trained != "no",
        }
        features = {
            key: self._ragged(lookup, i).to_sparse(),
            "other": self._ragged(lookup, i, other=True).to_sparse(),
            "weight": self._ragged(lookup, i, weights=True).to_sparse(),
            "word": tf.strings.as_string(self._p[f"ids{i}"]),
        }
        make = (
            fc.sequence_categorical_column_with_identity
            if lookup.layer == "SequenceFeatures"
            else None
        )
        column = self._category(lookup, key) if make is None else make(key, table.rows)
        partitioner = tf.fixed_size_partitioner(2) if table.partitioned and self._ranks else None
        # Plain TensorFlow has no scope of tables, and no options of one.
        placed = self._scope(placement=self._placement(table)) if self._ranks else self._scope()
        with placed, tf.variable_scope(f"layer{i}", partitioner=partitioner):
            if lookup.layer == "shared":
                del embedding["combiner"]
                columns = fc.shared_embedding_columns(
                    [column, self._category(lookup, "other")], combiner=lookup.combiner, **embedding
                )
            else:
                columns = [
                    fc.embedding_column(
                        fc.weighted_categorical_column(column, "weight")
                        if lookup.weighted
                        else column,
                        **embedding,
                    )
                ]
            if lookup.layer == "SequenceFeatures":
                out = tf.reduce_sum(tf.keras.experimental.SequenceFeatures(columns)(features)[0], 1)
            elif lookup.layer == "DenseFeatures":
                out = tf.keras.layers.DenseFeatures(columns)(features)
            else:
                out = fc.input_layer(features, columns)
        for made in set(tf.global_variables()) - before:
            self.tables[made.op.name] = table
        return tf.reshape(out, [-1, table.dim * len(columns)])

    def _category(self, lookup: Lookup, key: str) -> Any:
        fc, rows = tf.feature_column, lookup.table.rows
        if self._is_dynamic(lookup.table):
            return collective.feature_column.categorical_column_with_embedding(
                key, tf.string if lookup.table.keys == "strings" else tf.int64
            )
        return {
            "identity": lambda: fc.categorical_column_with_identity(key, rows),
            "embedding": lambda: fc.categorical_column_with_identity(key, rows),
            "hash": lambda: fc.categorical_column_with_hash_bucket(key, rows, tf.int64),
            "hash of strings": lambda: fc.categorical_column_with_hash_bucket(key, rows),
            "vocabulary": lambda: fc.categorical_column_with_vocabulary_list(
                key, range(rows), tf.int64
            ),
            "vocabulary and more": lambda: fc.categorical_column_with_vocabulary_list(
                key, range(3, 3 + max(rows - 2, 1)), tf.int64, num_oov_buckets=min(2, rows - 1)
            ),
            "crossed": lambda: fc.crossed_column(
                [fc.categorical_column_with_identity(key, rows), "word"], rows
            ),
        }[lookup.column]()

    def _network(self, x: tf.Tensor) -> list[tf.Tensor]:
        def dense(x: tf.Tensor, units: int, name: str) -> tf.Tensor:
            start = reference.table_values(int(x.shape[1]), units, 5) / int(x.shape[1]) ** 0.5
            return tf.layers.dense(
                x, units, name=name, kernel_initializer=tf.constant_initializer(start)
            )

        for i, units in enumerate(self.model.hidden):
            x = getattr(tf.nn, self.model.activation)(dense(x, units, f"hidden{i}"))
        outs = [dense(x, 1, f"loss{i}") for i in range(len(self.model.losses))]
        for name in self.model.metrics:
            self._add_metric(name, tf.sigmoid(outs[0]))
        return [
            tf.reduce_mean(
                tf.square(out - self._p["y"])
                if kind == "square"
                else tf.nn.sigmoid_cross_entropy_with_logits(labels=self._p["y"], logits=out)
            )
            for kind, out in zip(self.model.losses, outs)
        ]

    def _add_metric(self, name: str, predictions: tf.Tensor) -> None:
        labels, metrics = self._p["y"], tf.keras.metrics
        if name in ("mean", "auc"):
            value, update = (
                tf.metrics.mean(predictions)
                if name == "mean"
                else tf.metrics.auc(labels, predictions)
            )
        elif name.startswith("keras"):
            metric = metrics.Mean() if name == "keras mean" else metrics.AUC()
            update = metric.update_state(
                *([predictions] if "mean" in name else [labels, predictions])
            )
            value = metric.result()
            self.starts += [v.initializer for v in metric.variables]
        else:
            start = {"count": 0.0, "largest": -1.0, "smallest": 2.0}[name]
            value = metric_variable_from(start, name)
            update = {
                "count": lambda: value.assign_add(tf.reduce_sum(tf.round(predictions))),
                "largest": lambda: value.assign(tf.maximum(value, tf.reduce_max(predictions))),
                "smallest": lambda: value.assign(tf.minimum(value, tf.reduce_min(predictions))),
            }[name]()
        self.metrics[name] = tf.identity(value)
        self.updates.append(tf.group(update))

    def _train(self, step: Any) -> Any:
        left_out = {name for name, table in self.tables.items() if table.trained == "left out"}
        variables = sorted(
            (v for v in tf.trainable_variables() if v.op.name not in left_out),
            key=lambda v: v.op.name,
        )
        count, pairs = len(self.model.optimizers), []
        for k, drawn in enumerate(self.model.optimizers):
            made = OPTIMIZERS[drawn.name](DECAYS[drawn.decay](step) if drawn.decay else RATE, step)
            loss, mine = self.losses[k % len(self.losses)], variables[k::count]
            taken = (
                zip(self._tape.gradient(loss, mine), mine)
                if self._tape
                else made.compute_gradients(loss, mine)
            )
            taken = [(g, v) for g, v in taken if g is not None]
            pairs.append((made, self._clipped(drawn.clip, self._used(drawn.use, taken))))
        if count == 1:
            return pairs[0][0].apply_gradients(pairs[0][1], global_step=step)
        with tf.control_dependencies(
            [getattr(g, "values", g) for _, some in pairs for g, _ in some]
        ):
            applied = [made.apply_gradients(some) for made, some in pairs]
        with tf.control_dependencies(applied):
            return tf.assign_add(step, 1).op

    def _used(self, use: str | None, pairs: list[Any]) -> list[Any]:
        """Returns gradients, of which those of tables are what the script makes of them."""
        used = []
        for g, v in pairs:
            table = self.tables.get(v.op.name)
            is_of_table = table is not None and table.kind != "replicated"
            if use is None or not is_of_table or not isinstance(g, tf.IndexedSlices):
                used.append((g, v))
            elif use == "accumulated by hand" and table.kind == "dynamic":
                used.append((g, v))
            else:
                used.append((USES[use](self._summed(g, v), v), v))
        return used

    def _clipped(self, clip: str | None, pairs: list[Any]) -> list[Any]:
        if clip is None:
            return pairs
        gradients = [self._summed(g, v) for g, v in pairs]
        gradients = (
            tf.clip_by_global_norm(gradients, 0.1)[0]
            if clip == "global"
            else [CLIPS[clip](g) for g in gradients]
        )
        return [(g, v) for g, (_, v) in zip(gradients, pairs)]

    def _summed(self, gradient: Any, variable: Any) -> Any:
        table = self.tables.get(variable.op.name)
        is_slices = isinstance(gradient, tf.IndexedSlices)
        if self._ranks is not None or table is None or table.kind == "replicated" or not is_slices:
            return gradient
        return tf.IndexedSlices(
            *optimizer_lib._deduplicate_indexed_slices(gradient.values, gradient.indices),
            gradient.dense_shape,
        )
