"""Draws Keras models from a seed: tables, features, an architecture, an optimizer, how it is fit.

    model = draw(seed)              plain data, whose text is all that a failure needs to say
    records(model, first, count)    what it is trained with and evaluated by

`random_keras_networks.Built` makes its layers.

Some models are never drawn:

- Ftrl and weight decay on dynamic tables: they move a static table's rows before their first
  gradient. With new rows at the first step they are in `keras/test_open_keys.py`.
- Lion, whose step is the sign of a sum, and Adam's own epsilon: gradients that cancel leave
  rounding, of which they make a step. New Nadam depends on how often a function was traced.
- normalisation by batches and dropout: a rank's batch is its own.
"""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import numpy as np

from tests.ranks.random_models import text_of

BATCH, STEPS, EPOCHS = 12, 10, 2


@dataclasses.dataclass(frozen=True, repr=False)
class Table:
    """Describes one table.

    `kind` is keras (its own layer, in embedding_scope()), static or dynamic (this library's), or
    replicated (Keras's layer outside of embedding_scope()).
    """

    name: str
    rows: int
    dim: int
    kind: str
    keys: str = "ids"  # of a dynamic one: how ids become keys
    placement: str = "rows"
    trainable: bool = True
    regularized: bool = False
    constrained: bool = False
    masked: bool = False  # id 0 is padding
    combiner: str | None = None  # of this library's layer

    def __repr__(self) -> str:
        return text_of(self)


@dataclasses.dataclass(frozen=True, repr=False)
class Feature:
    """Describes one lookup; `way` names a function of TensorFlow, or is the layer."""

    name: str
    table: Table
    form: str  # one, several, ragged, sparse
    width: int = 1
    combiner: str | None = None
    weighted: bool = False
    least: int = 1
    way: str = "layer"
    skewed: bool = False
    pooled: str = "sum"  # how rows that stay apart become one

    def __repr__(self) -> str:
        return text_of(self)


@dataclasses.dataclass(frozen=True, repr=False)
class Optimizer:
    name: str
    rate: float
    schedule: str | None = None
    clip: tuple[str, float] | None = None
    decay: float | None = None
    averaged: bool = False

    def __repr__(self) -> str:
        return text_of(self)


@dataclasses.dataclass(frozen=True)
class Model:
    seed: int
    kind: str  # functional, nested, sequential, subclassed
    network: str  # deep, towers, crossed
    features: tuple[Feature, ...]
    hidden: tuple[int, ...]
    activation: str
    losses: tuple[str, ...]  # one for each output
    metrics: tuple[str, ...]
    optimizer: Optimizer
    weighted: bool  # samples have weights
    own_step: bool  # the model has a train_step of its own
    added_loss: bool  # the model adds a loss by itself
    executions: int | None  # steps of a call
    data: str  # known, unknown (length), endless
    eager: bool  # without functions
    uneven: bool  # rank 0 has more records of each batch than the others

    def __str__(self) -> str:
        lines = [f"seed {self.seed}: COLLECTIVE_TEST_KERAS_MODELS={self.seed}:{self.seed + 1}"]
        for field in dataclasses.fields(self)[1:]:
            value = getattr(self, field.name)
            of_several = field.name == "features"
            lines += [f"  {field.name}: {one}" for one in (value if of_several else (value,))]
        return "\n".join(lines)


# Of new optimizers and legacy ones: their rates.
RATES = {
    "Adagrad": 0.05,
    "Adam": 0.01,
    "AMSGrad": 0.01,
    "AdamW": 0.01,
    "Adamax": 0.01,
    "Adadelta": 0.5,
    "RMSprop": 0.003,
    "SGD": 0.05,
    "momentum": 0.03,
    "nesterov": 0.03,
    "Ftrl": 0.05,
    "legacy Adagrad": 0.05,
    "legacy Adam": 0.01,
    "legacy AMSGrad": 0.01,
    "legacy Adamax": 0.01,
    "legacy Adadelta": 0.5,
    "legacy RMSprop": 0.003,
    "legacy Nadam": 0.01,
    "legacy SGD": 0.05,
    "legacy momentum": 0.03,
    "legacy nesterov": 0.03,
    "legacy Ftrl": 0.05,
}
MOVE_UNSEEN_ROWS = ("Ftrl", "AdamW")
SCHEDULES = ("exponential", "piecewise", "polynomial", "cosine", "by callback")
CLIPS = (("clipnorm", 0.05), ("global_clipnorm", 0.1), ("clipvalue", 0.01))
METRICS = ("auc", "mae", "accuracy", "rmse", "precision", "mean")
LOSSES = ("binary_crossentropy", "mse", "huber", "focal", "log_cosh")


def draw(seed: int) -> Model:
    r = random.Random(f"Keras model {seed}")
    kind = r.choice(["functional", "functional", "nested", "sequential", "subclassed"])
    tables = [_table(r, f"t{i}") for i in range(1 if kind == "sequential" else r.randint(1, 3))]
    features = [
        _feature(r, table, kind)
        for table in tables
        for _ in range(1 if kind == "sequential" else r.choice([1, 1, 2]))
    ]
    dynamic = any(table.kind == "dynamic" for table in tables)
    optimizer = _optimizer(r, dynamic)
    features = [
        dataclasses.replace(feature, name=f"f{i}", table=_possible(feature.table, optimizer))
        for i, feature in enumerate(features)
    ]
    own_step = r.random() < 0.2 and kind != "sequential"
    losses = [r.choice(LOSSES) for _ in range(1 if kind == "sequential" or own_step else 2)]
    return Model(
        seed,
        kind,
        "deep" if kind == "sequential" else r.choice(["deep", "towers", "crossed"]),
        tuple(features),
        tuple(r.choice([3, 6]) for _ in range(r.randint(0, 2))),
        r.choice(["relu", "tanh", "elu"]),
        tuple(losses if r.random() < 0.3 else losses[:1]),
        tuple(name for name in METRICS if r.random() < 0.4),
        optimizer,
        not own_step and r.random() < 0.25,
        own_step,
        kind == "subclassed" and r.random() < 0.5,
        r.choice([None, None, None, 2, 5]),
        r.choice(["known", "known", "unknown", "endless"]),
        r.random() < 0.2 and not own_step,  # which computes with gradients of tables
        r.random() < 0.4 and not own_step,  # whose own loss counts alike on each rank
    )


def _table(r: random.Random, name: str) -> Table:
    kind = r.choice(["keras", "keras", "static", "dynamic", "dynamic", "replicated"])
    rows, shown = r.choice([1, 2, 3, 5, 20, 60]), r.random()
    placements = ["rows", "rows", "rows", "whole", "whole:1", "replicated"]
    in_keras = kind in ("keras", "replicated")
    return Table(
        name,
        rows,
        r.choice([1, 3, 4, 8]),
        kind,
        r.choice(["ids", "huge", "strings"]) if kind == "dynamic" else "ids",
        r.choice(placements) if kind in ("keras", "static") else _placement(kind, rows),
        r.random() < 0.9,
        in_keras and shown < 0.2,
        in_keras and 0.2 < shown < 0.35,
        in_keras and shown > 0.85 and rows > 2,
        None if in_keras else r.choice([None, "sum", "mean", "sqrtn"]),
    )


def _placement(kind: str, rows: int) -> str:
    """Returns where a table is that needs no draw: a dynamic one by its rows."""
    return ("rows", "whole", "whole:1")[rows % 3] if kind == "dynamic" else "rows"


def _possible(table: Table, optimizer: Optimizer) -> Table:
    """Returns a table as the optimizer can train it.

    Legacy optimizers refuse constraints. Gradients of replicated tables have each occurrence of an
    id in a rank's batch by itself, and clipping tells them apart.
    """
    if optimizer.name.startswith("legacy"):
        table = dataclasses.replace(table, constrained=False)
    if optimizer.clip and table.kind == "replicated":
        table = dataclasses.replace(table, kind="keras")
    if optimizer.clip and table.placement == "replicated":
        table = dataclasses.replace(table, placement="rows")
    return table


def _feature(r: random.Random, table: Table, kind: str) -> Feature:
    ways = ["layer"]
    if kind == "subclassed" and table.kind != "dynamic" and not table.masked:
        ways += ["gather", "lookup", "lookup_sparse", "safe"]
    way = r.choice(ways)
    combiner = table.combiner if way == "layer" else None
    forms = ["several", "ragged", "sparse"] if combiner else ["one", "several", "ragged"]
    if way == "gather" or table.masked:
        forms = ["several"]
    elif way in ("lookup_sparse", "safe"):
        forms, combiner = ["sparse"], r.choice(["sum", "mean", "sqrtn"])
    form = r.choice(forms)
    return Feature(
        "",
        table,
        form,
        1 if form == "one" else r.choice([1, 3, 4]),
        combiner,
        combiner is not None and kind != "sequential" and r.random() < 0.4,
        # TensorFlow touches row 0 for samples without ids.
        r.choice([0, 1]) if way == "layer" else 1,
        way,
        r.random() < 0.5,
        "masked mean" if table.masked else r.choice(["sum", "mean"]),
    )


def _optimizer(r: random.Random, dynamic: bool) -> Optimizer:
    names = [name for name in RATES if not (dynamic and name in MOVE_UNSEEN_ROWS)]
    name = r.choice(names)
    is_new = not name.startswith("legacy")
    clip = r.choice(CLIPS) if r.random() < 0.3 else None
    # Legacy Nadam takes no schedule, and FTRL no rate of 0, at which this one ends.
    schedule = r.choice(SCHEDULES) if r.random() < 0.4 and name != "legacy Nadam" else None
    return Optimizer(
        name,
        RATES[name],
        None if schedule == "cosine" and name.endswith("Ftrl") else schedule,
        clip,
        0.01 if is_new and not dynamic and r.random() < 0.2 else None,
        is_new and not dynamic and r.random() < 0.2,
    )


def records(model: Model, count: int, held_out: bool = False) -> dict[str, np.ndarray]:
    """Draws records: arrays of `count` by name; `ids`, `weights` and `lengths` of each feature.

    Those that are held out have no keys of dynamic tables that training hasn't.
    """
    rng = np.random.default_rng([model.seed, held_out])
    trained = records(model, BATCH * STEPS) if held_out else {}
    out: dict[str, Any] = {
        "x": rng.normal(size=(count, 2)).astype(np.float32),
        "y": rng.integers(0, 2, (count, len(model.losses))).astype(np.float32),
        "sample_weight": rng.uniform(0.2, 2, count).astype(np.float32),
    }
    for feature in model.features:
        rows, shape = feature.table.rows, (count, feature.width)
        ids = rng.integers(0, rows, shape)
        if feature.skewed:
            ids = np.minimum(rng.zipf(1.5, shape) - 1, rows - 1)
        if feature.table.masked:
            ids[:, 0] = np.maximum(ids[:, 0], 1)
        out[f"{feature.name}/ids"] = ids
        out[f"{feature.name}/weights"] = rng.uniform(0.5, 2, shape).astype(np.float32)
        out[f"{feature.name}/lengths"] = rng.integers(feature.least, feature.width + 1, count)
        if held_out and feature.table.kind == "dynamic":
            for name in (f"{feature.name}/ids", f"{feature.name}/lengths"):
                out[name] = trained[name][:count]
    return out
