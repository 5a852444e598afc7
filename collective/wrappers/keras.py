"""Makes Keras work in graphs: legacy optimizers, its embeddings, seeds of its initializers.

`tf.keras.optimizers.legacy.…` (in `tf.compat.v1` these are `tf.keras.optimizers.…`) create slots
and updates with their own methods, not with those of `tf.train`. The new `tf.keras.optimizers.…`
don't train in such a graph, with or without this library.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import sys
from collections.abc import Iterator
from importlib import metadata
from typing import Any, Callable

import tensorflow.compat.v1 as tf
import tensorflow.compat.v2 as tf2

from collective.gradients import eager_gradients, loss_scaling
from collective.gradients.reduction import of_shards, updating_shards
from collective.ops.graph import graph_state, graphs, library_operations
from collective.options import EmbeddingOptions
from collective.replication import assignments
from collective.scope import SCOPES
from collective.tables.dynamic_table import DynamicTable
from collective.tables.rows.reserved_variable import ReservedVariable
from collective.tables.table import Table
from collective.tables.updates import row_writes, update_kernels, weight_bound
from collective.tables.updates.optimizer_slots import settled, sharded_as
from collective.tables.updates.slots import Slot
from collective.tables.variable_getter import table_getter
from collective.tensorflow_internals.keras import (
    PACKAGE,
    DenseFeatures,
    Embedding,
    backend,
    base_layer_utils,
)
from collective.wrappers import keras_rows, keras_updates

# Whose weights are embeddings. (The DenseFeatures of tf.compat.v1 calls tf.get_variable.)
EMBEDDING_LAYERS = (Embedding, DenseFeatures)


def apply_gradients(
    original: Callable[..., Any],
    optimizer: Any,
    grads_and_vars: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Replaces `legacy.Optimizer.apply_gradients`: updates the shards of tables.

    Raises:
        NotImplementedError: scope(local_steps=…), or it would update all rows of a dynamic table.
    """
    grads_and_vars = list(grads_and_vars)
    if tf.executing_eagerly():

        def update(pairs: list[Any]) -> Any:
            return apply_gradients(original, optimizer, pairs, *args, **kwargs)

        return eager_gradients.apply(optimizer, grads_and_vars, update)
    if tf.executing_eagerly_outside_functions():
        grads_and_vars = keras_updates.shards_of(optimizer, grads_and_vars)
    return loss_scaling.if_finite(
        grads_and_vars,
        lambda: _apply_to_shards(original, optimizer, grads_and_vars, *args, **kwargs),
    )


def _apply_to_shards(
    original: Callable[..., Any],
    optimizer: Any,
    grads_and_vars: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    name = type(optimizer).__name__
    if not tf.executing_eagerly_outside_functions():
        grads_and_vars = assignments.sync_gradients(of_shards(grads_and_vars))
    tables = [v for g, v in grads_and_vars if g is not None and isinstance(v, Table)]
    advice = f"Use an optimizer of tf.compat.v1.train in the place of the Keras optimizer {name}"
    local_steps = SCOPES.options.local_steps
    if local_steps > 1:
        raise NotImplementedError(f"{advice}: scope(local_steps={local_steps}) is for these.")
    dynamic = [table for table in tables if isinstance(table, DynamicTable)]
    in_function = tf.executing_eagerly_outside_functions()
    in_place = keras_rows.updates_in_place(optimizer) and (
        in_function or type(optimizer) in keras_rows.ROW_BY_ROW
    )
    if dynamic and not in_place and not (in_function and keras_rows.is_possible(optimizer)):
        raise NotImplementedError(
            f"{advice}, which computes with all rows of the dynamic table '{dynamic[0].op.name}'."
        )

    def create_slot(next_creator: Callable[..., Any], **kwargs: Any) -> Any:
        table_name = str(kwargs.get("name")).rpartition("/")[0]
        for table in tables:
            if table._shared_name == table_name:
                if isinstance(table, DynamicTable):
                    first_row = tf.convert_to_tensor(kwargs["initial_value"]())
                    return Slot(table, first_row, kwargs["name"], kwargs.get("collections"))
                return sharded_as(table, table.dim, next_creator, **kwargs)
        return next_creator(**kwargs)

    noted = library_operations.noted_as_optimizers(tf.get_default_graph(), optimizer)
    with noted, updating_shards(grads_and_vars), _writing_rows(optimizer):
        # Here, and not where it applies the gradients: that may be inside a branch, and a scope of
        # a branch's graph knows nothing of variables, which are made outside of it.
        named = contextlib.nullcontext() if dynamic else backend.name_scope(optimizer._name)
        with tf.init_scope(), tf.variable_creator_scope(create_slot), named:
            optimizer._create_all_weights([v for g, v in grads_and_vars if g is not None])
        if dynamic and in_place:
            grads_and_vars = [
                (settled(g, v) if isinstance(v, DynamicTable) and g is not None else g, v)
                for g, v in grads_and_vars
            ]
        with keras_rows.updating_legacy(optimizer) if dynamic else contextlib.nullcontext():
            applied = original(optimizer, grads_and_vars, *args, **kwargs)
        for table in tables:
            update_kernels.check(optimizer, table)
        return weight_bound.with_clipping(applied, grads_and_vars)


@contextlib.contextmanager
def _writing_rows(optimizer: Any) -> Iterator[None]:
    """Keeps an optimizer's updates of rows from returning the whole variable."""

    def of_rows(
        name: str, write: Callable[..., Any], of_others: Callable[..., Any]
    ) -> Callable[..., Any]:
        def scatter(x: Any, rows: Any, values: Any) -> Any:
            if not isinstance(x, ReservedVariable):
                return of_others(x, rows, values)
            if x.view is None:
                return write(x, rows, values)
            return getattr(x.view, f"scatter_{name}")(tf.IndexedSlices(values, rows))

        return scatter

    for name, write in (("add", row_writes.add), ("update", row_writes.write)):
        method = f"_resource_scatter_{name}"
        setattr(optimizer, method, of_rows(name, write, getattr(optimizer, method)))
    try:
        yield
    finally:
        del optimizer._resource_scatter_add, optimizer._resource_scatter_update


def refuse_keras_3(original: Callable[..., Any], made: Any, *args: Any, **kwargs: Any) -> Any:
    """Replaces what builds with Keras 3, which TensorFlow brings from 2.16 on: refuses it.

    Raises:
        NotImplementedError: always.
    """
    raise NotImplementedError(
        f"{type(made).__name__} is of Keras {metadata.version('keras')}, which scope() doesn't "
        "support: ranks would not share its variables and updates. Use Keras 2 in the whole "
        "script: tf.keras, with TF_USE_LEGACY_KERAS=1 or CollectiveStrategy imported before the "
        "first use of tf.keras; or `import tf_keras` instead of `import keras`."
    )


def refuse_second_package() -> None:
    """Refuses a second package of Keras 2, whose layers and optimizers nothing would replace.

    Raises:
        ImportError: `tf_keras` is imported, and isn't what `tf.keras` is.
    """
    if PACKAGE != "tf_keras" and "tf_keras" in sys.modules:
        raise ImportError(
            "this script imports tf_keras, and tf.keras is another package here, keras "
            f"{metadata.version('keras')}: in scope() ranks would not share what tf_keras makes. "
            "Import tensorflow.keras instead of tf_keras everywhere, or set TF_USE_LEGACY_KERAS=1, "
            "which makes tf_keras what tf.keras is."
        )


@dataclasses.dataclass
class DrawnSeeds:
    """Records how many seeds Keras has got in a graph."""

    count: int = 0


def create_seed(original: Callable[..., int], generator: Any, seed: int | None) -> int:
    """Replaces `RandomGenerator._create_seed`: draws Keras's seeds from `tf.set_random_seed`.

    Keras's initializers, which `tf.layers` uses, too, draw them from Python's random numbers. With
    scope(deterministic=True) each seed depends on the graph's seed and on how many were drawn
    before, and uses none of the numbers that TensorFlow gives its own operations.

    Args:
        generator: Keras's `RandomGenerator`.
        seed: the initializer's own, if a script gave one.

    Raises:
        RuntimeError: neither the graph nor the initializer has a seed.
    """
    is_seeded = seed is not None or getattr(backend._SEED_GENERATOR, "generator", None) is not None
    if is_seeded or not SCOPES.options.deterministic:
        return original(generator, seed)
    graph = tf.get_default_graph()
    if tf.executing_eagerly():
        text = str(tf.random.get_seed(None))
    elif graph.seed is None:
        raise RuntimeError(
            f"scope(deterministic=True): initial values in '{graph.get_name_scope()}' need a seed: "
            "Keras's initializers, which tf.layers takes, too, would draw it from Python's random "
            "numbers. Call tf.set_random_seed(…) in the graph first, or give the initializer a "
            "seed of its own."
        )
    else:
        drawn = graph_state.of(graphs.outermost(graph), DrawnSeeds)
        drawn.count += 1
        text = f"{graph.seed}/{drawn.count}"
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") % (2**31 - 1)


def make_layer(original: Callable[..., Any], layer: Any, *args: Any, **kwargs: Any) -> None:
    """Replaces the constructor of EMBEDDING_LAYERS: notes the options of embedding_scope().

    Keras may build the layer anywhere, where a `Sequential` or subclassed model is called first.
    """
    original(layer, *args, **kwargs)
    layer._collective_options = SCOPES.embedding_options


def add_weight(original: Callable[..., Any], layer: Any, *args: Any, **kwargs: Any) -> Any:
    """Replaces `add_weight` of EMBEDDING_LAYERS: creates a table if embedding_scope() is open, or
    was where the layer was made.

    Keras creates weights without `tf.get_variable`.

    Args:
        original: not called: Keras gives its layers a different base class in graphs.
        layer: the layer.
    """
    options = SCOPES.embedding_options or getattr(layer, "_collective_options", None)
    if options is not None:
        kwargs.setdefault("getter", functools.partial(get_table, options, layer.name))
    kind: Any = next(kind for kind in EMBEDDING_LAYERS if isinstance(layer, kind))
    return super(kind, layer).add_weight(*args, **kwargs)


def get_table(options: EmbeddingOptions, layer: str, name: str, **kwargs: Any) -> Any:
    """Makes a table in the place of a layer's weight: a getter for `add_weight`.

    Args:
        options: of the table.
        layer: the layer's name. A table that a script makes eagerly by `layer.build(…)`, outside of
            all name scopes, has it in its name, as if the layer had been called.
        name: the weight's.
        **kwargs: what Keras's own getter takes.
    """
    # Initial values of rows depend on the name: it must be the one that the variable will have.
    if tf.executing_eagerly():
        with tf2.name_scope(name) as scope:
            name = scope.rstrip("/")
        if "/" not in name:
            name = f"{layer}/{name}"
    else:
        name = tf.get_default_graph().unique_name(name, mark_as_used=False)
    with tf.name_scope(None):
        return table_getter(base_layer_utils.make_variable, name, options=options, **kwargs)
