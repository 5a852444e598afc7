"""Takes and applies gradients eagerly, outside of any `tf.function`, on all ranks together.

A tape knows the rows that lookups have returned (`collective.tables.eager_lookups`). From there on
one function computes for all ranks what a traced one would:

    loss ── tape ──► rows of lookups, variables ── function ──► shards, means over ranks
                                                     │
    optimizer ── function ◄── EagerTableGradient ◄───┘

Each function is an agreement: what one rank refuses, all refuse, and no rank updates alone. Kept
functions are called again where the same variables get gradients of the same kinds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow.compat.v1 as tf
import tensorflow.compat.v2 as tf2

from collective.coordination.functions import calls, first_values
from collective.gradients import traced_gradients
from collective.gradients.eager_table_gradient import (
    Parcel,
    called,
    functions_of,
    packed,
    refuse_moved,
)
from collective.ops.communication import collectives
from collective.ops.counting import counted
from collective.ops.graph import graphs, training_flag
from collective.scope import SCOPES
from collective.tables import eager_lookups, traced_lookups
from collective.tables.table import Sharded
from collective.tensorflow_internals.graphs import pywrap_tfe
from collective.tensorflow_internals.keras import package
from collective.tensorflow_internals.variables import variables

# What a tape calls


def take(
    original: Callable[..., Any], tape: Any, target: Any, sources: Any, *args: Any, **kwargs: Any
) -> Any:
    """Stands in for `tf.GradientTape.gradient` in eager code: returns gradients of all ranks.

    Raises:
        NotImplementedError: zeros are asked for, and a table is among the sources; or another tape
            records.
        RuntimeError: Horovod wrapped the tape.
        ValueError: a variable that was made outside of scope() differs between ranks.
        RankError: another rank takes gradients of other variables.
    """
    flat = tf.nest.flatten(sources)
    tables = {id(x): x for x in flat if isinstance(x, Sharded)}
    watched = [x for x in flat if isinstance(x, variables.Variable)]
    if not watched or collectives.size() == 1 and not tables:
        return original(tape, target, sources, *args, **kwargs)
    _refuse_wrapper(tape, "takes gradients")
    refuse_options("gradients are taken")
    traced_gradients.check(flat, *args, **kwargs)
    # One rank may have read a whole table, from the variable itself.
    read = list(tables.values())
    lookups = [written for table in tables.values() for written in eager_lookups.taped(table)]
    others = [x for x in flat if id(x) not in tables]
    taken = original(
        tape, target, [*others, *read, *(written.out for written in lookups)], *args, **kwargs
    )
    of_others, of_lookups = taken[: len(others)], taken[len(others) + len(read) :]
    for table, gradient in zip(read, taken[len(others) :]):
        if gradient is not None and collectives.size() > 1:
            raise NotImplementedError(
                f"The gradient with respect to table '{table.op.name}' comes from something else "
                "than its lookups (a tf.custom_gradient around one, tf.recompute_grad), where "
                "ranks can't exchange it. Look the table up outside of that."
            )
    by_variable = [
        (x, gradient)
        for x, gradient in zip([*others, *read], taken)
        if gradient is not None and isinstance(x, variables.Variable)
    ]
    by_lookup = [(w, gradient) for w, gradient in zip(lookups, of_lookups) if gradient is not None]
    reduced = _reduced(by_variable, by_lookup)
    left = iter(of_others)
    own = [None if id(x) in tables else next(left) for x in flat]
    return tf.nest.pack_sequence_as(
        sources,
        [
            reduced.get(id(x)) if isinstance(x, variables.Variable) else gradient
            for x, gradient in zip(flat, own)
        ],
    )


def _reduced(
    by_variable: Sequence[tuple[Any, Any]], by_lookup: Sequence[tuple[Any, Any]]
) -> dict[int, Any]:
    """Returns the gradients of all ranks, by the ids of variables.

    A function takes them, of what has this rank's gradients: variables as they are, and lookups
    that it makes again.
    """
    found = {id(x): x for x, _ in by_variable}
    found.update({id(w.table): w.table for w, _ in by_lookup})
    sources = sorted(found.values(), key=calls.order)
    if not sources:
        return {}
    if not pywrap_tfe.TFE_Py_TapeSetIsEmpty():
        raise NotImplementedError(
            f"The gradient of '{str(sources[0].name).partition(':')[0]}' is taken while a "
            "tf.GradientTape records, which doesn't see what ranks exchange for it. Take it after "
            "the tape's `with` block, and inside no other tape's."
        )
    for w, _ in by_lookup:
        if w.is_stale and w.key[1] is not None:
            raise NotImplementedError(
                f"The gradient of a lookup in table '{w.table.op.name}' with max_norm={w.key[1]:g} "
                "is taken after an optimizer has updated the table, and depends on the rows that "
                "were there before. Take it before the update."
            )
        refuse_moved(w.table, w.moves, "A lookup")
        if w.is_counted:
            raise NotImplementedError(
                f"A second gradient of a lookup in table '{w.table.op.name}' is taken, and the "
                "first one has counted its keys for filter_freq. Take all gradients of the lookup "
                "in one call of tape.gradient, or in a tf.function."
            )
    first_values.check([x for x, _ in by_variable])
    gradients = [_of_rows(gradient) for _, gradient in by_lookup]
    gradients += [packed(gradient) for _, gradient in by_variable]
    look_ups, watched = [w.look_up for w, _ in by_lookup], [x for x, _ in by_variable]
    first = len(look_ups)
    keys = [("lookup", id(w.table), *w.key) for w, _ in by_lookup]
    keys += [("variable", id(x)) for x, _ in by_variable]

    def work(arguments: list[Any]) -> Sequence[Any]:
        training_flag.set_always(tf.get_default_graph())
        of_rows, of_variables = arguments[:first], arguments[first : first + len(watched)]
        targets, upstream = [], []
        with tf2.GradientTape() as inner:
            for look_up, ids in zip(look_ups, arguments[first + len(watched) :]):
                targets.append(look_up(*ids))
            for variable, gradient in zip(watched, of_variables):
                is_sparse = isinstance(gradient, tf.IndexedSlices)
                targets.append(
                    tf.gather(variable, gradient.indices) if is_sparse else tf.identity(variable)
                )
        for gradient in [*of_rows, *of_variables]:
            upstream.append(gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient)
        taken: Sequence[Any] = inner.gradient(targets, sources, upstream)
        return taken

    parcels = [*gradients, *(_lookup_parcel(w.inputs) for w, _ in by_lookup)]
    others = f" and {counted(len(sources) - 1, 'other')}" if sources[1:] else ""
    name = f"gradients of {str(sources[0].name).partition(':')[0]}{others}"
    results = called(functions_of(sources[0]), tuple(keys), name, work, parcels)
    for w, _ in by_lookup:
        w.is_counted = w.table.counts_keys
    return {id(x): gradient for x, gradient in zip(sources, results)}


def _of_rows(gradient: Any) -> Parcel:
    """Describes the gradient of what a lookup returned, of any number of ids."""
    tensor = tf.convert_to_tensor(gradient)
    spec = tf.TensorSpec([*[None] * (tensor.shape.rank - 1), tensor.shape[-1]], tensor.dtype)
    return Parcel(("rows", spec), [tensor], [spec], lambda x: x)


def _lookup_parcel(arguments: Sequence[Any]) -> Parcel:
    """Describes ids and weights of a lookup, dense or sparse."""
    tensors = tf.nest.flatten(list(arguments), expand_composites=True)
    structure = [
        tf.SparseTensorSpec([None, None], x.dtype)
        if isinstance(x, tf.SparseTensor)
        else tf.TensorSpec(None, x.dtype)
        for x in arguments
    ]
    specs = [tf.TensorSpec([None] * x.shape.rank, x.dtype) for x in tensors]
    return Parcel(
        ("ids", *specs),
        tensors,
        specs,
        lambda *given: tf.nest.pack_sequence_as(structure, given, expand_composites=True),
    )


# What takes gradients


def apply(
    optimizer: Any, grads_and_vars: Sequence[tuple[Any, Any]], update: Callable[[list[Any]], Any]
) -> Any:
    """Has all ranks update variables by a Keras optimizer, in a function.

    Args:
        optimizer: the optimizer.
        grads_and_vars: gradients of all ranks, with their variables.
        update: gets the pairs in the function, and updates.

    Returns:
        The optimizer's number of steps.

    Raises:
        RuntimeError: Horovod wrapped the optimizer.
        RankError: another rank updates other variables, or does something else.
    """
    if not grads_and_vars:
        return optimizer.iterations
    _refuse_wrapper(optimizer, "updates variables")
    refuse_options("gradients are applied")
    updated = [variable for _, variable in grads_and_vars]

    first_values.share(updated)

    def work(gradients: list[Any]) -> Sequence[Any]:
        # An optimizer that reads no variable is not seen to write one.
        training_flag.set_always(tf.get_default_graph())
        update(list(zip(gradients, updated)))
        return []

    functions = functions_of(optimizer)
    if functions.get("numbers") != _numbers_of(optimizer):
        functions.clear()
    key = tuple(id(variable) for variable in updated)
    name = f"update by {type(optimizer).__name__}"
    called(functions, key, name, work, [packed(g) for g, _ in grads_and_vars])
    for table in updated:
        for lookup in eager_lookups.taped(table) if isinstance(table, Sharded) else ():
            lookup.is_stale = True
    functions["numbers"] = _numbers_of(optimizer)  # which the first update may change
    return optimizer.iterations


def _numbers_of(optimizer: Any) -> dict[str, Any]:
    """Returns what an optimizer has as Python's numbers, which its updates have as constants."""
    hypers = vars(optimizer).get("_hyper", {})
    functions = {
        name: float(value())
        for name, value in hypers.items()
        if callable(value)
        and not isinstance(value, package.optimizers.schedules.LearningRateSchedule)
    }
    plain = {n: x for n, x in vars(optimizer).items() if isinstance(x, (int, float, str))}
    return {**plain, "_hyper": functions}


def refuse_options(action: str, where: str = "eagerly") -> None:
    """Refuses options of scope() that would be ignored without a word.

    Args:
        action: what is done.
        where: "eagerly", or "in a tf.function".

    Raises:
        NotImplementedError: one of them is given.
    """
    traced_lookups.refuse_half_precision(action)
    steps = SCOPES.options.local_steps
    if steps > 1:
        raise NotImplementedError(
            f"scope(local_steps={steps}) is for graphs, but {action} {where}. Build the model "
            f"inside {traced_lookups.IN_GRAPH}, or leave the option out."
        )


def _refuse_wrapper(wrapper: Any, action: str) -> None:
    """Refuses an optimizer or a tape that Horovod wrapped, which would reduce gradients itself."""
    if hasattr(wrapper, "_allreduce_grads"):
        advice = " Or leave Horovod's wrapper out."
        graphs.refuse_eager("scope()", f"{type(wrapper).__name__} {action}", advice)
