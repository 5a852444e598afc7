"""Models drawn from a seed: tables, lookups and feature columns, a dense network, optimizers.

    model = draw(seed)              what it is: plain data, whose text is all that a failure needs
    to say
    batches(model)                  what it is fed: STEPS global batches
    Built(model, scope, ranks)      its graph; in plain TensorFlow, or with tables inside `scope`

Drawn around, because plain TensorFlow is ill-conditioned there or says nothing that could be
compared:

- `max_norm` for rows of one number: their gradient is zero but for rounding, which Adam makes a
  step of. Adam's epsilon is 1e-3 for the same reason: gradients that cancel leave rounding.
- samples without keys of dynamic tables, unless there is a default_id: TensorFlow touches row 0 for
  them, which moves it where momentum is left. (So it does for sequences' padding, of which every
  rank has some here.)
- one optimizer counting steps while another's learning rate reads them: they do so in any order.
  Gradients are all taken before the first update for the same reason.
- the norm of a gradient with repeated ids: TensorFlow takes each occurrence by itself. The
  reference sums them first. Of replicated embeddings it can't: those are looked up by
  `embedding_lookup` alone, which has one occurrence for each id.
"""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import numpy as np
import tensorflow.compat.v1 as tf
import tensorflow.compat.v2 as tf2
from tensorflow.python.training import optimizer as optimizer_lib

import collective
from collective.ops import key_hashing as key_ops
from tests.ranks import reference
from tests.ranks.grouped import B

STEPS = 6


def _text(drawn: Any) -> str:
    """As a dataclass's own, without what is as by default."""
    fields = {
        field.name: (getattr(drawn, field.name), field.default)
        for field in dataclasses.fields(drawn)
    }
    told = ", ".join(
        f"{name}={value!r}" for name, (value, default) in fields.items() if value != default
    )
    return f"{type(drawn).__name__}({told})"


@dataclasses.dataclass(frozen=True, repr=False)
class Table:
    """One table; `kind` is static, dynamic, or replicated: an embedding outside of
    embedding_scope().
    """

    name: str
    rows: int
    dim: int
    kind: str
    keys: str = "ids"  # of a dynamic one: how ids become keys
    dtype: str = "float32"
    trained: str = "yes"  # or no (trainable=False), or left out (of var_list)
    scope: str | None = None
    partitioned: bool = False  # has no effect
    alike: bool = False  # all rows start alike

    def __repr__(self) -> str:
        return _text(self)


@dataclasses.dataclass(frozen=True, repr=False)
class Lookup:
    """One lookup in a table, or, `kind` naming one, a feature column, which has a table of its own."""

    kind: str
    table: Table
    api: str = "v1"
    reuse: bool = False  # gets the variable once more, by its name
    dtype: str = "int64"
    inner: tuple[int, ...] = ()
    least: int = 1
    ragged: bool = False
    weighted: bool = False
    combiner: str = "mean"
    max_norm: float | None = None
    default_id: int | None = None
    invalid: bool = False  # some ids are negative, some weights aren't positive
    deep: bool = False  # a sparse tensor of rank 3
    skewed: bool = False
    column: str = ""
    layer: str = ""
    within: str = ""  # a branch that all ranks take, or a function, which may be called twice

    def __repr__(self) -> str:
        return _text(self)


@dataclasses.dataclass(frozen=True)
class Optimizer:
    name: str
    decay: str | None
    clip: str | None


@dataclasses.dataclass(frozen=True)
class Model:
    seed: int
    lookups: tuple[Lookup, ...]
    hidden: tuple[int, ...]
    activation: str
    losses: tuple[str, ...]
    optimizers: tuple[Optimizer, ...]
    grouping: bool
    source: str  # feeds, a dataset, or a dataset whose keys are exchanged ahead

    def __str__(self) -> str:
        lines = [f"seed {self.seed}: COLLECTIVE_TEST_MODELS={self.seed}:{self.seed + 1}"]
        for field in dataclasses.fields(self)[1:]:
            value = getattr(self, field.name)
            lines += [
                f"  {field.name}: {one}"
                for one in (value if isinstance(value, tuple) else (value,))
            ]
        return "\n".join(lines)


OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda rate, _: tf.train.GradientDescentOptimizer(rate),
    "momentum": lambda rate, _: tf.train.MomentumOptimizer(rate, 0.9),
    "nesterov": lambda rate, _: tf.train.MomentumOptimizer(rate, 0.8, use_nesterov=True),
    "adam": lambda rate, _: tf.train.AdamOptimizer(rate, epsilon=1e-3),
    "adagrad": lambda rate, _: tf.train.AdagradOptimizer(rate, initial_accumulator_value=0.2),
    "adagrad_da": lambda rate, step: tf.train.AdagradDAOptimizer(rate, step),
    "adadelta": lambda rate, _: tf.train.AdadeltaOptimizer(10 * rate, epsilon=1e-3),
    "ftrl": lambda rate, _: tf.train.FtrlOptimizer(
        rate, l1_regularization_strength=0.001, l2_regularization_strength=0.01
    ),
    "rmsprop": lambda rate, _: tf.train.RMSPropOptimizer(0.1 * rate, momentum=0.5),
    "centered_rmsprop": lambda rate, _: tf.train.RMSPropOptimizer(0.1 * rate, centered=True),
    "proximal_sgd": lambda rate, _: tf.train.ProximalGradientDescentOptimizer(rate, 0.001, 0.01),
    "proximal_adagrad": lambda rate, _: tf.train.ProximalAdagradOptimizer(
        rate, l1_regularization_strength=0.001
    ),
}
RATE = 0.1
DECAYS: dict[str, Any] = {
    "exponential": lambda step: tf.train.exponential_decay(RATE, step, 2, 0.7),
    "staircase": lambda step: tf.train.exponential_decay(RATE, step, 3, 0.5, staircase=True),
    "polynomial": lambda step: tf.train.polynomial_decay(RATE, step, 5, 0.01, power=2.0),
    "piecewise": lambda step: tf.train.piecewise_constant(step, [1, 3], [RATE, RATE / 2, RATE / 5]),
}
CLIPS: dict[str, Any] = {
    "norm": lambda g: tf.clip_by_norm(g, 0.05),
    "value": lambda g: tf.clip_by_value(g, -0.02, 0.01),
}
COLUMNS = (
    "identity",
    "hash",
    "hash of strings",
    "vocabulary",
    "vocabulary and more",
    "crossed",
    "embedding",
)


# ---- What is drawn


def draw(seed: int) -> Model:
    r = random.Random(seed)
    tables = [_table(r, f"t{i}") for i in range(r.randint(1, 4))]
    lookups = [_lookup(r, table) for table in tables for _ in range(r.randint(1, 3))]
    lookups += [_column(r, i) for i in range(r.choice([0, 0, 1, 2]))]
    r.shuffle(lookups)
    # TensorFlow's global norm is of gradients of one type.
    clips = [
        None,
        None,
        *CLIPS,
        *(["global"] if all(table.dtype == "float32" for table in tables) else []),
    ]
    optimizers = tuple(
        Optimizer(r.choice(list(OPTIMIZERS)), r.choice([None, *DECAYS]), r.choice(clips))
        for _ in range(r.choice([1, 1, 2]))
    )
    return Model(
        seed,
        tuple(lookups),
        tuple(r.choice([2, 5]) for _ in range(r.randint(0, 2))),
        r.choice(["relu", "tanh"]),
        tuple(r.choice(["square", "sigmoid"]) for _ in range(r.choice([1, len(optimizers)]))),
        optimizers,
        r.random() < 0.75,
        r.choice(["feeds", "feeds", "dataset", "keys ahead"]),
    )


def _table(r: random.Random, name: str, column: bool = False) -> Table:
    kind = r.choice(["static", "static", "static", "dynamic", "dynamic", "replicated"])
    dtype = r.choice(["float32"] * 5 + ["float64"])
    return Table(
        name,
        r.choice([1, 2, 3, 5, 20, 100]),
        r.choice([1, 3, 4, 8]),
        "static" if column and kind == "replicated" else kind,
        r.choice(["ids", "huge", "strings"]) if kind == "dynamic" else "ids",
        "float32" if column else dtype,
        r.choice(["yes"] * 4 + ["no", "left out"]),
        None if column else r.choice([None, None, "one", "one/two"]),
        r.random() < 0.3,
        r.random() < 0.2,
    )


def _lookup(r: random.Random, table: Table) -> Lookup:
    dynamic = table.kind == "dynamic"
    kind = (
        "rows"
        if table.kind == "replicated"
        else r.choice(["rows", "rows", "gather", "pooled", "safe"])
    )
    default_id = r.choice([None, r.randrange(table.rows)]) if kind == "safe" else None
    # Of a dynamic table, ragged keys are refused but for those of integers in embedding_lookup.
    ragged = (
        r.random() < 0.3
        and kind != "gather"
        and (not dynamic or kind == "rows" and table.keys != "strings")
    )
    return Lookup(
        kind,
        table,
        r.choice(["v1", "v2"]),
        r.random() < 0.3,
        r.choice(["int32", "int64"]),
        tuple(
            r.choice([(), (1,), (3,), (2, 2)])
            if kind in ("rows", "gather") and not ragged
            else (r.choice([1, 3, 5]),)
        ),
        1 if dynamic and kind == "safe" and default_id is None else r.choice([0, 1]),
        ragged,
        r.random() < 0.5,
        r.choice(["sum", "mean", "sqrtn"]),
        r.choice([None, 0.7]) if table.dim > 1 and kind != "gather" else None,
        default_id,
        kind == "safe" and not dynamic and r.random() < 0.5,
        not ragged and r.random() < 0.2,
        r.random() < 0.5,
        within="" if dynamic else r.choice([""] * 9 + ["branch", "function", "function twice"]),
    )


def _column(r: random.Random, number: int) -> Lookup:
    table = _table(r, f"column{number}", column=True)
    dynamic = table.kind == "dynamic"
    column = r.choice(["embedding"] if dynamic else COLUMNS[:-1])
    layer = r.choice(
        [
            "input_layer",
            "DenseFeatures",
            "shared",
            *(["SequenceFeatures"] if column == "identity" else []),
        ]
    )
    return Lookup(
        "column",
        table,
        column=column,
        layer=layer,
        inner=(r.choice([1, 3]),),
        least=int(dynamic or r.random() < 0.5),
        weighted=layer in ("input_layer", "DenseFeatures")
        and column != "crossed"
        and r.random() < 0.5,
        combiner=r.choice(["sum", "mean", "sqrtn"]),
        max_norm=r.choice([None, 0.7]) if table.dim > 1 else None,
        invalid=column in ("hash", "hash of strings", "vocabulary and more"),
        skewed=r.random() < 0.5,
    )


def batches(model: Model) -> list[dict[str, np.ndarray]]:
    """Global batches: arrays of B samples by name."""
    return [_batch(model, np.random.default_rng([model.seed, step])) for step in range(STEPS)]


def _batch(model: Model, rng: np.random.Generator) -> dict[str, np.ndarray]:
    out: dict[str, np.ndarray] = {
        "x": rng.normal(size=(B, 2)).astype(np.float32),
        "y": rng.integers(0, 2, (B, 1)).astype(np.float32),
    }
    for i, lookup in enumerate(model.lookups):
        shape = (B, *lookup.inner)
        rows = lookup.table.rows + (3 if lookup.kind == "column" and lookup.invalid else 0)
        ids = (
            np.minimum(rng.zipf(1.5, shape) - 1, rows - 1)
            if lookup.skewed
            else rng.integers(0, rows, shape)
        )
        weights = rng.uniform(0.5, 2, shape).astype(np.float32)
        if lookup.kind == "safe" and lookup.invalid:
            ids, weights = (
                np.where(rng.random(shape) < 0.2, -1, ids),
                np.where(rng.random(shape) < 0.1, -0.5, weights),
            )
        lengths = rng.integers(lookup.least, (lookup.inner or (1,))[0] + 1, B)
        if lookup.layer == "SequenceFeatures":
            lengths = 1 + np.arange(B) % 2 * (lookup.inner[0] - 1)
        out.update(
            {
                f"ids{i}": ids.astype(lookup.dtype),
                f"weights{i}": weights.astype(np.float32),
                f"lengths{i}": lengths,
            }
        )
    return out


# ---- What is built


def initial_rows(table: Table) -> np.ndarray:
    rows = reference.table_values(table.rows, table.dim, len(table.name)) / 2
    return np.repeat(rows[:1], table.rows, 0) if table.alike or table.kind == "dynamic" else rows


def keys_of(table: Table, ids: tf.Tensor) -> tf.Tensor:
    """The keys of a dynamic table that take the place of ids."""
    if table.keys == "strings":
        return tf.strings.join(["key ", tf.strings.as_string(ids)])
    return tf.cast(ids, tf.int64) * (2**59 + 1) - 2**61 if table.keys == "huge" else ids


def ids_of(table: Table, keys: np.ndarray) -> np.ndarray:
    """The ids whose keys a table holds as int64 `keys`."""
    if table.kind != "dynamic":
        return keys
    with tf.Graph().as_default(), tf.Session() as session:
        all_keys = keys_of(table, tf.range(table.rows, dtype=tf.int64))
        found = session.run(key_ops.of_strings(all_keys) if table.keys == "strings" else all_keys)
    ids = {key: i for i, key in enumerate(found.tolist())}
    return np.array([ids[key] for key in keys.tolist()], np.int64)


class Built:
    """A model's graph.

    Args:
        model: what was drawn.
        embedding_scope: in which tables are made.
        ranks: of how many this is one; None: plain TensorFlow.
        data: [STEPS, samples, …] by name.

    Attributes:
        feeds: placeholders by name; none where the graph has the data.
        train: the update.
        losses: before it.
        rows: all rows of every table, by lookups, by the table's name.
        tables: by the name of their variables.
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
        """[samples, F] float32."""
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
        # behind the last that has ids
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
        with self._scope(), tf.variable_scope(f"layer{i}", partitioner=partitioner):
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
        return [
            tf.reduce_mean(
                tf.square(out - self._p["y"])
                if kind == "square"
                else tf.nn.sigmoid_cross_entropy_with_logits(labels=self._p["y"], logits=out)
            )
            for i, kind in enumerate(self.model.losses)
            for out in [dense(x, 1, f"loss{i}")]
        ]

    def _train(self, step: Any) -> Any:
        left_out = {name for name, table in self.tables.items() if table.trained == "left out"}
        variables = sorted(
            (v for v in tf.trainable_variables() if v.op.name not in left_out),
            key=lambda v: v.op.name,
        )
        count, pairs = len(self.model.optimizers), []
        for k, drawn in enumerate(self.model.optimizers):
            made = OPTIMIZERS[drawn.name](DECAYS[drawn.decay](step) if drawn.decay else RATE, step)
            taken = made.compute_gradients(self.losses[k % len(self.losses)], variables[k::count])
            pairs.append(
                (made, self._clipped(drawn.clip, [(g, v) for g, v in taken if g is not None]))
            )
        if count == 1:
            return pairs[0][0].apply_gradients(pairs[0][1], global_step=step)
        with tf.control_dependencies(
            [getattr(g, "values", g) for _, some in pairs for g, _ in some]
        ):
            applied = [made.apply_gradients(some) for made, some in pairs]
        with tf.control_dependencies(applied):
            return tf.assign_add(step, 1).op

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
        if self._ranks is not None or table is None or table.kind == "replicated":
            return gradient
        return tf.IndexedSlices(
            *optimizer_lib._deduplicate_indexed_slices(gradient.values, gradient.indices),
            gradient.dense_shape,
        )
