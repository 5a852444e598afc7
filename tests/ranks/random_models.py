"""Draws models from a seed: tables, lookups, feature columns, a dense network, optimizers.

    model = draw(seed)              plain data, whose text is all that a failure needs to say
    batches(model)                  STEPS global batches, which it is fed

`random_model_graph.Built` makes its graph.

Some models are never drawn, because plain TensorFlow is ill-conditioned there or says nothing that
could be compared:

- `max_norm` for rows of one number: their gradient is zero except for rounding, which Adam makes a
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
import os
import random
from typing import Any

import numpy as np
import tensorflow.compat.v1 as tf

from tests.ranks.grouped import B

STEPS = 6


def seeds(variable: str) -> range:
    """Reads which models a variable names: how many, or first:last, of seeds first to last - 1."""
    first, _, last = os.environ.get(variable, "4").rpartition(":")
    return range(int(first or 0), int(last))


def text_of(drawn: Any) -> str:
    """Writes a dataclass as its own repr does, without fields that have their defaults."""
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
    """Describes one table.

    `kind` is static, dynamic, or replicated: an embedding outside of embedding_scope() or, if it
    has an odd number of rows, inside with that placement.
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
        return text_of(self)


@dataclasses.dataclass(frozen=True, repr=False)
class Lookup:
    """Describes one lookup in a table, or a feature column that has a table of its own.

    `kind` names a way to look up, or is "column".
    """

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
        return text_of(self)


@dataclasses.dataclass(frozen=True)
class Optimizer:
    name: str
    decay: str | None
    clip: str | None
    use: str | None = None  # what the script makes of the rows of tables' gradients


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
    metrics: tuple[str, ...] = ()
    uneven: bool = False  # whether ranks have different numbers of samples
    taped: bool = False  # whether a tape takes the gradients

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
USES: dict[str, Any] = {
    "decayed rows": lambda g, table: _with_values(
        g, g.values + 0.1 * tf.nn.embedding_lookup(table, g.indices)
    ),
    "clipped values": lambda g, _: _with_values(g, tf.clip_by_norm(g.values, 0.05)),
    "values clipped together": lambda g, _: _with_values(
        g, tf.clip_by_global_norm([g.values], 0.05)[0][0]
    ),
    "clipped by hand": lambda g, _: _with_values(
        g, g.values * tf.minimum(0.05 / (tf.sqrt(tf.reduce_sum(g.values**2)) + 1e-3), 1.0)
    ),
    "less the mean row": lambda g, _: _with_values(g, g.values - tf.reduce_mean(g.values, 0)),
    "accumulated by hand": lambda g, table: _accumulated(g, table),
}


def _with_values(g: tf.IndexedSlices, values: tf.Tensor) -> tf.IndexedSlices:
    return tf.IndexedSlices(values, g.indices, g.dense_shape)


def _accumulated(g: tf.IndexedSlices, table: Any) -> tf.Tensor:
    """Adds half of the gradients so far to the gradient: a matrix."""
    name = f"{table.op.name}/accumulated"
    kept = tf.Variable(tf.zeros(table.shape, table.dtype), trainable=False, name=name)
    return kept.assign(0.5 * kept + tf.convert_to_tensor(g))


METRICS = ("mean", "auc", "keras mean", "keras auc", "count", "largest", "smallest")
COLUMNS = (
    "identity",
    "hash",
    "hash of strings",
    "vocabulary",
    "vocabulary and more",
    "crossed",
    "embedding",
)


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
    # Drawn apart, as they came later: seeds keep their models.
    later = random.Random(f"uses of gradients, and metrics, of {seed}")
    optimizers = tuple(
        Optimizer(
            r.choice(list(OPTIMIZERS)),
            r.choice([None, *DECAYS]),
            r.choice(clips),
            later.choice([None, *USES]),
        )
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
        tuple(name for name in METRICS if later.random() < 0.3),
        random.Random(f"parts of {seed}").random() < 0.4,
        random.Random(f"tape of {seed}").random() < 0.3,
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
    # Of a dynamic table, ragged keys are refused except for those of integers in embedding_lookup.
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
    """Draws the global batches: arrays of B samples by name."""
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
