"""Names a Keras model's variables in checkpoints: as a session with the same model names them.

| variable | name | also read |
|---|---|---|
| a weight | `dense/kernel`, the variable's own | |
| how often the keys of a table came | `users/embeddings/frequency` | |
| when its rows were last used | `users/embeddings/last_used` | |
| a slot, of new and legacy optimizers | `Adam/dense/kernel/m` | `training/Adam/dense/kernel/m`, \
`dense/kernel/Adam` |
| the steps of an optimizer | `Adam/iter` | `training/Adam/iter`, `global_step` |
| the learning rate, and other numbers | `Adam/learning_rate` | `training/Adam/learning_rate` |

These are the names of a legacy optimizer whose updates a session runs. Below `training/` are those
of `fit` in a graph; the third form is that of the optimizers of tf.compat.v1.train. With dynamic
tables a session's names lack the optimizer's (`dense/kernel/m`, `iter`), and so do these.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow.compat.v2 as tf2

from collective.checkpoint.functions.entries import Entry
from collective.tables.dynamic_table import DynamicTable
from collective.tables.policies import eager_steps
from collective.tensorflow_internals.keras import OptimizerV2, optimizer

GLOBAL_STEP = "global_step"

# What new optimizers call a slot, and legacy ones: {optimizer: {new: legacy}}.
LEGACY_SLOTS = {
    "SGD": {"m": "momentum"},
    "RMSprop": {"velocity": "rms", "average_gradient": "mg"},
    "Adadelta": {"accumulated_grad": "accum_grad", "accumulated_delta_var": "accum_var"},
    "Adamax": {"u": "v"},
}
# What tf.compat.v1.train calls a slot that has the same meaning: {optimizer: {legacy: there}}.
# (Momentum isn't the same: Keras's slot includes the learning rate.)
V1_SLOTS = {
    "Adagrad": {"accumulator": "Adagrad"},
    "Adam": {"m": "Adam", "v": "Adam_1"},
    "Adadelta": {"accum_grad": "Adadelta", "accum_var": "Adadelta_1"},
    "Ftrl": {"accumulator": "Ftrl", "linear": "Ftrl_1"},
}
# The numbers that are variables of a legacy optimizer, next to `learning_rate` and `decay`, and
# attributes of a new one.
NUMBERS = {
    "SGD": ("momentum",),
    "RMSprop": ("rho", "momentum"),
    "Adam": ("beta_1", "beta_2"),
    "Adamax": ("beta_1", "beta_2"),
    "Nadam": ("beta_1", "beta_2"),
    "Adadelta": ("rho",),
    "Adagrad": (),
    "Ftrl": (
        "learning_rate_power",
        "beta",
        "l1_regularization_strength",
        "l2_regularization_strength",
    ),
}


def optimizers_of(model: Any) -> dict[str, Any]:
    """Returns a model's optimizers: that of `compile` by the name '', others by their attributes.

    A model with a `train_step` of its own may have several.
    """
    found = {}
    compiled = getattr(model, "optimizer", None)
    if isinstance(compiled, (list, tuple)):
        raise NotImplementedError(
            f"The Keras model '{model.name}' is compiled with several optimizers, whose variables "
            "a checkpoint couldn't tell apart. Make them attributes of a model of your own."
        )
    if compiled is not None:
        found[""] = compiled
    for name, value in vars(model).items():
        if isinstance(value, (optimizer._BaseOptimizer, OptimizerV2)) and value is not compiled:
            found[name] = value
    return found


def build_optimizers(model: Any) -> None:
    """Makes the slots of a model's optimizers, which Keras makes at the first step.

    Raises:
        ValueError: it isn't known yet which variables there are.
    """
    if not model.built:
        raise ValueError(
            f"The Keras model '{model.name}' has no weights yet, which a checkpoint has: build it "
            "before fit (in embedding_scope(): model.build(shape), or call it with a batch)."
        )
    for name, each in optimizers_of(model).items():
        inner = _unwrapped(each)
        if name == "":
            build(inner, model.trainable_variables)
        elif not _is_legacy(inner) and not getattr(inner, "_built", False):
            raise ValueError(
                f"The optimizer '{name}' of the Keras model '{model.name}' has no slots yet, "
                f"which a checkpoint has: call model.{name}.build(variables) before fit."
            )


def build(given: Any, variables: Sequence[Any]) -> None:
    """Makes the slots that an optimizer has for variables, unless they are there."""
    if _is_legacy(given):
        with tf2.name_scope(given._name):
            given._create_all_weights(variables)
    elif not getattr(given, "_built", False):
        given.build(variables)


def entries_of(model: Any) -> list[Entry]:
    """Returns a model's variables, with their names in checkpoints: metrics aren't among them."""
    weights = _weights_of(model)
    entries = [Entry(_name(v), v) for v in weights]
    for v in weights:
        if not isinstance(v, DynamicTable):
            continue
        if v.counts_keys:
            of_keys = v.admission.frequencies
            entries.append(Entry(f"{_name(v)}/frequency", of_keys, is_optional=True))
        if v.last_used is not None:
            entries.append(Entry(f"{_name(v)}/last_used", v.last_used, is_optional=True))
    for prefix, each in optimizers_of(model).items():
        inside = f"{prefix}/" if prefix else ""
        entries += entries_of_optimizer(each, weights, inside)
    return list({id(entry.variable): entry for entry in entries}.values())


def _weights_of(model: Any) -> list[Any]:
    metrics = {id(v) for metric in model.metrics for v in metric.variables}
    return [v for v in model.variables if id(v) not in metrics]


def step_of(model: Any) -> int:
    """Returns how many steps a model has trained, by its optimizer; that of the most, of several.

    Raises:
        ValueError: it has no optimizer.
    """
    optimizers = optimizers_of(model).values()
    if not optimizers:
        raise ValueError(
            f"The Keras model '{model.name}' has no optimizer, whose steps are a checkpoint's "
            "name: compile it with one, or make one its attribute."
        )
    return max(int(each.iterations.numpy()) for each in optimizers)


def follow_steps(model: Any, restoring: bool) -> None:
    """Lets tables whose policies need the step follow the steps of the model's optimizers.

    Args:
        model: the model.
        restoring: whether these are restored; else a table goes on by those that have trained it.

    Raises:
        NotImplementedError: it is saved, and has several, which have made different numbers of
            steps.
    """
    tables = [v for v in _weights_of(model) if eager_steps.is_registered(v)]
    counters = {name: each.iterations for name, each in optimizers_of(model).items()}
    if not tables or not counters:
        return
    steps = {name or "of compile": int(c.numpy()) for name, c in counters.items()}
    if not restoring and len(set(steps.values())) > 1:
        raise NotImplementedError(
            f"The policy of table '{tables[0].op.name}' counts steps, and the optimizers of the "
            f"Keras model '{model.name}' have made different numbers of them, {steps}: a "
            "checkpoint has one. Let each step apply gradients by each of them."
        )
    for table in tables:
        is_known = any(table.iterations is each for each in counters.values())
        if table.iterations is None or restoring and not is_known:
            eager_steps.follow(table, next(iter(counters.values())))


def numbers_of(model: Any) -> dict[str, Any]:
    """Returns what sessions need in a checkpoint, and the model has no variables of: by name."""
    notes: dict[str, Any] = {GLOBAL_STEP: np.int64(step_of(model))}
    for prefix, each in optimizers_of(model).items():
        inner = _unwrapped(each)
        if _is_legacy(inner) or type(inner).__name__ not in NUMBERS:
            continue
        scope = _scopes(f"{prefix}/" if prefix else "", inner.name, _weights_of(model))[0]
        notes[f"{scope}decay"] = np.float32(0)
        for number in NUMBERS[type(inner).__name__]:
            notes[f"{scope}{number}"] = np.float32(getattr(inner, number))
    taken = {entry.name for entry in entries_of(model)}
    return {name: value for name, value in notes.items() if name not in taken}


def entries_of_optimizer(given: Any, weights: Sequence[Any], inside: str = "") -> Iterator[Entry]:
    """Yields an optimizer's variables, with their names in checkpoints.

    Args:
        given: the optimizer.
        weights: the variables that it trains.
        inside: what precedes the names of one of several optimizers.
    """
    inner = _unwrapped(given)
    if inner is not given:
        state = getattr(given._loss_scale, "_weights", {})
        for name, variable in sorted(state.items()):
            yield Entry(f"{inside}{name}", variable, is_optimizers=True, is_optional=True)
    legacy = _is_legacy(inner)
    name = inner._name if legacy else inner.name
    scopes = _scopes(inside, name, weights)
    steps = inner.iterations
    counters = [*(f"{scope}iter" for scope in scopes), GLOBAL_STEP]
    yield Entry(counters[0], steps, tuple(counters[1:]), is_optimizers=True)
    for variable in inner.weights if legacy else inner.variables:
        if variable is steps:
            continue
        weight, slot = _slot_of(variable, weights, name, legacy)
        if weight is None:
            yield _number(scopes, slot, variable)
            continue
        kind = type(inner).__name__
        slot = slot if legacy else LEGACY_SLOTS.get(kind, {}).get(slot, slot)
        own, *others = (f"{scope}{weight}/{slot}" for scope in scopes)
        if slot in V1_SLOTS.get(kind, {}):
            others.append(f"{weight}/{V1_SLOTS[kind][slot]}")
        yield Entry(own, variable, tuple(others), is_optimizers=True)
    attributes = inner._hyper if legacy else vars(inner)
    for attribute, value in sorted(attributes.items()):
        if isinstance(value, tf2.Variable) and value is not steps:
            yield _number(scopes, attribute.lstrip("_"), value)


def _scopes(inside: str, name: str, weights: Sequence[Any]) -> list[str]:
    """Returns what precedes the names of an optimizer's variables: own names first, then others.

    Args:
        inside: what precedes those of one of several optimizers.
        name: the optimizer's.
        weights: of the model.
    """
    named = [f"{inside}{name}/", f"training/{inside}{name}/"]
    return [inside, *named] if any(isinstance(v, DynamicTable) for v in weights) else named


def _number(scopes: Sequence[str], name: str, variable: Any) -> Entry:
    """Names an optimizer's variable that is no slot: the checkpoint may lack it."""
    own, *others = (f"{scope}{name}" for scope in scopes)
    return Entry(own, variable, tuple(others), is_optimizers=True, is_optional=True)


def _slot_of(
    variable: Any, weights: Sequence[Any], name: str, legacy: bool
) -> tuple[str | None, str]:
    """Returns the name of a slot's weight, and which slot it is; None for no slot.

    Legacy optimizers name a slot `Adam/dense/kernel/m`, new ones `Adam/m/dense/kernel`.
    """
    own = _name(variable)
    own = own[len(name) + 1 :] if own.startswith(f"{name}/") else own
    slot, _, of = own.rpartition("/")[::-1] if legacy else own.partition("/")
    for weight in sorted((_name(v) for v in weights), key=len, reverse=True):
        if of == weight:
            return weight, slot
    return None, own


def _name(variable: Any) -> str:
    return str(variable.name).rpartition(":")[0]


def _unwrapped(given: Any) -> Any:
    """Returns the optimizer inside of one that scales losses."""
    scales = hasattr(given, "_loss_scale") and hasattr(given, "inner_optimizer")
    return given.inner_optimizer if scales else given


def _is_legacy(given: Any) -> bool:
    return isinstance(given, OptimizerV2) or hasattr(given, "_hyper")
