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

import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, NoReturn

import tensorflow.compat.v1 as tf
import tensorflow.compat.v2 as tf2

from collective.coordination.functions import calls, first_values
from collective.gradients import table_gradients, traced_gradients
from collective.ops.communication import collectives
from collective.ops.communication.gate import gates_of
from collective.ops.counting import counted
from collective.ops.exchange import shard_gradients
from collective.ops.graph import graphs, training_flag
from collective.scope import SCOPES
from collective.tables import eager_lookups, traced_lookups
from collective.tables.table import Sharded
from collective.tensorflow_internals.graphs import pywrap_tfe, record
from collective.tensorflow_internals.keras import package
from collective.tensorflow_internals.variables import variables


class EagerTableGradient(tf.IndexedSlices):
    """Holds this rank's part of the gradient of a table that was taken eagerly.

    An optimizer applies it, and TensorFlow's functions clip it. Other operations would compute with
    the rows of one rank, so it doesn't show its values.

    Args:
        table: the table.
        values: [K, D].
        rows: [K] int64, the rows of this rank's shard, each once.
    """

    def __init__(self, table: Sharded, values: tf.Tensor, rows: tf.Tensor):
        shape = None if table.rows is None else tf.constant([table.rows, table.dim], tf.int64)
        super().__init__(values, rows, shape)
        self.table, self.moves = table, table.moves

    @property
    def dtype(self) -> tf.DType:
        return self._values.dtype

    @property
    def values(self) -> tf.Tensor:
        """Isn't shown.

        Raises:
            NotImplementedError: always.
        """
        self._refuse("values")

    @property
    def indices(self) -> tf.Tensor:
        """Isn't shown.

        Raises:
            NotImplementedError: always.
        """
        self._refuse("indices")

    def _refuse(self, what: str) -> NoReturn:
        raise NotImplementedError(
            f"The {what} of the gradient of table '{self.table.op.name}', which was taken eagerly, "
            "would be those of a single rank. Pass it to an optimizer, tf.clip_by_global_norm, "
            "tf.clip_by_norm, tf.clip_by_value or tf.linalg.global_norm, or take gradients and "
            "compute with them in a tf.function."
        )


class _Parcel(NamedTuple):
    """Describes a gradient as arguments of a function.

    Attributes:
        kind: tells gradients apart that need other functions.
        tensors: the arguments.
        specs: of these.
        unpack: makes the gradient of the arguments in a function.
    """

    kind: tuple[Any, ...]
    tensors: list[tf.Tensor]
    specs: list[tf.TensorSpec]
    unpack: Callable[..., Any]


def _of_rows(gradient: Any) -> _Parcel:
    """Describes the gradient of what a lookup returned, of any number of ids."""
    tensor = tf.convert_to_tensor(gradient)
    spec = tf.TensorSpec([*[None] * (tensor.shape.rank - 1), tensor.shape[-1]], tensor.dtype)
    return _Parcel(("rows", spec), [tensor], [spec], lambda x: x)


def _packed(gradient: Any) -> _Parcel:
    if gradient is None:
        return _Parcel(("none",), [], [], lambda: None)
    if isinstance(gradient, EagerTableGradient):
        table: Any = gradient.table
        _refuse_moved(table, gradient.moves, "A gradient")

        def of_table(values: tf.Tensor, rows: tf.Tensor) -> Any:
            if table.rows is None:
                # TensorFlow sees no use of a dynamic table where its rows are updated.
                tf.get_default_graph().watch_variable(table)
                if table.last_used is not None:  # Only an update knows the step.
                    rows = table.last_used.mark(rows, tf.constant(True))
            rows = shard_gradients.mark_distinct(tf.identity(rows))
            own = table_gradients.ShardGradient(tf.identity(values), rows)
            return table_gradients.present(own, table, 1)

        tensors = [gradient._values, gradient._indices]
        return _Parcel(("table", id(table)), tensors, _of_any_length(tensors), of_table)
    if isinstance(gradient, tf.IndexedSlices):
        tensors = [gradient.values, gradient.indices]
        if gradient.dense_shape is not None:
            tensors.append(tf.convert_to_tensor(gradient.dense_shape))
        specs = _of_any_length(tensors)
        return _Parcel(("slices", *specs), tensors, specs, tf.IndexedSlices)
    tensor = tf.convert_to_tensor(gradient)
    spec = tf.TensorSpec(tensor.shape, tensor.dtype)
    return _Parcel(("tensor", spec), [tensor], [spec], lambda x: x)


def _of_any_length(tensors: Sequence[tf.Tensor]) -> list[tf.TensorSpec]:
    return [tf.TensorSpec([None, *x.shape[1:]], x.dtype) for x in tensors]


def _called(
    functions: dict[Any, Any],
    key: tuple[Any, ...],
    name: str,
    work: Callable[[list[Any]], Sequence[Any]],
    parcels: Sequence[_Parcel],
) -> list[Any]:
    """Has all ranks call the same function of gradients, and returns its results.

    Args:
        functions: those that are kept, by `key` and the kinds of gradients.
        key: tells functions of the same `functions` apart.
        name: says what it does.
        work: gets the gradients in the function; gradients of tables among its results are of the
            tables' kind here, too.
        parcels: the gradients.
    """
    eager_lookups.refuse_own_threads(name)
    key = (*key, *(parcel.kind for parcel in parcels), eager_lookups.options_in_force())
    if key not in functions:
        tables: list[Sharded | None] = []
        unpack = [(parcel.unpack, len(parcel.specs)) for parcel in parcels]  # and no tensors

        def in_function(*tensors: tf.Tensor) -> list[Any]:
            calls.note_part_of_step(tf.get_default_graph())
            if collectives.size() > 1:
                gates_of(tf.get_default_graph()).at(1)  # ranks agree, whatever it exchanges
            arguments, left = [], iter(tensors)
            for make, count in unpack:
                arguments.append(make(*(next(left) for _ in range(count))))
            results = list(work(arguments))
            found = [table_gradients.rows_of(x) if _is_slices(x) else None for x in results]
            tables[:] = [None if rows is None else rows.table for rows in found]
            return [x if rows is None else (x.values, rows.rows) for x, rows in zip(results, found)]

        in_function.__name__ = re.sub(r"\W", "_", name)
        specs = [spec for parcel in parcels for spec in parcel.specs]
        made = tf2.function(in_function, input_signature=specs, autograph=False)
        # Where the tape of `work` can record. A function is itself called eagerly after
        # tf.config.run_functions_eagerly(True).
        functions[key] = made.get_concrete_function(), tables
    function, tables = functions[key]
    with record.stop_recording():
        results = function(*(x for parcel in parcels for x in parcel.tensors))
    return [
        x if table is None else EagerTableGradient(table, *x) for x, table in zip(results, tables)
    ]


def _is_slices(x: Any) -> bool:
    return isinstance(x, tf.IndexedSlices)


_KEPT = "_collective_eager_functions"


def _functions_of(owner: Any) -> dict[Any, Any]:
    """Returns the functions that are kept for a variable or an optimizer."""
    kept: dict[Any, Any] = vars(owner).setdefault(_KEPT, {})
    return kept


def forget_functions(copied: Any) -> None:
    """Takes the functions that are kept for an optimizer from a copy of it: they update by it."""
    vars(copied).pop(_KEPT, None)


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
    _refuse_options("gradients are taken")
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
        _refuse_moved(w.table, w.moves, "A lookup")
        if w.is_counted:
            raise NotImplementedError(
                f"A second gradient of a lookup in table '{w.table.op.name}' is taken, and the "
                "first one has counted its keys for filter_freq. Take all gradients of the lookup "
                "in one call of tape.gradient, or in a tf.function."
            )
    first_values.check([x for x, _ in by_variable])
    gradients = [_of_rows(gradient) for _, gradient in by_lookup]
    gradients += [_packed(gradient) for _, gradient in by_variable]
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
                is_sparse = _is_slices(gradient)
                targets.append(
                    tf.gather(variable, gradient.indices) if is_sparse else tf.identity(variable)
                )
        for gradient in [*of_rows, *of_variables]:
            upstream.append(gradient.values if _is_slices(gradient) else gradient)
        taken: Sequence[Any] = inner.gradient(targets, sources, upstream)
        return taken

    parcels = [*gradients, *(_lookup_parcel(w.inputs) for w, _ in by_lookup)]
    others = f" and {counted(len(sources) - 1, 'other')}" if sources[1:] else ""
    name = f"gradients of {str(sources[0].name).partition(':')[0]}{others}"
    results = _called(_functions_of(sources[0]), tuple(keys), name, work, parcels)
    for w, _ in by_lookup:
        w.is_counted = w.table.counts_keys
    return {id(x): gradient for x, gradient in zip(sources, results)}


def _refuse_moved(table: Sharded, moves: int, what: str) -> None:
    """Refuses what knows rows by places where they aren't any more, on all ranks alike.

    Raises:
        NotImplementedError: rows of the table may have been evicted, removed or restored since.
    """
    if moves != table.moves:
        raise NotImplementedError(
            f"{what} of table '{table.op.name}' was made before rows were evicted or moved to a "
            "file, as the policy of the table says, removed or restored. Take and apply gradients "
            "before an update, a save or another function does so: make one update of them, or "
            "train in a tf.function."
        )


def _lookup_parcel(arguments: Sequence[Any]) -> _Parcel:
    """Describes ids and weights of a lookup, dense or sparse."""
    tensors = tf.nest.flatten(list(arguments), expand_composites=True)
    structure = [
        tf.SparseTensorSpec([None, None], x.dtype)
        if isinstance(x, tf.SparseTensor)
        else tf.TensorSpec(None, x.dtype)
        for x in arguments
    ]
    specs = [tf.TensorSpec([None] * x.shape.rank, x.dtype) for x in tensors]
    return _Parcel(
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
    _refuse_options("gradients are applied")
    updated = [variable for _, variable in grads_and_vars]

    first_values.share(updated)

    def work(gradients: list[Any]) -> Sequence[Any]:
        # An optimizer that reads no variable is not seen to write one.
        training_flag.set_always(tf.get_default_graph())
        update(list(zip(gradients, updated)))
        return []

    functions = _functions_of(optimizer)
    if functions.get("numbers") != _numbers_of(optimizer):
        functions.clear()
    key = tuple(id(variable) for variable in updated)
    name = f"update by {type(optimizer).__name__}"
    _called(functions, key, name, work, [_packed(g) for g, _ in grads_and_vars])
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


def _refuse_options(action: str) -> None:
    """Refuses options of scope() that would be ignored without a word.

    Raises:
        NotImplementedError: one of them is given.
    """
    traced_lookups.refuse_half_precision(action)
    steps = SCOPES.options.local_steps
    if steps > 1:
        raise NotImplementedError(
            f"scope(local_steps={steps}) is for graphs, but {action} eagerly. Build the model "
            f"inside {traced_lookups.IN_GRAPH}, or leave the option out."
        )


def _refuse_wrapper(wrapper: Any, action: str) -> None:
    """Refuses an optimizer or a tape that Horovod wrapped, which would reduce gradients itself."""
    if hasattr(wrapper, "_allreduce_grads"):
        advice = " Or leave Horovod's wrapper out."
        graphs.refuse_eager("scope()", f"{type(wrapper).__name__} {action}", advice)


def is_one(x: Any) -> bool:
    """Tells whether `x` is the gradient of a table that was taken eagerly."""
    return isinstance(x, EagerTableGradient)


def computed(
    name: str, function: Callable[[list[Any]], Sequence[Any]], gradients: Sequence[Any]
) -> list[Any]:
    """Has all ranks compute something of gradients, of which one at least is a table's.

    Args:
        name: of what is computed, with the numbers that `function` has by itself.
        function: computes it in a function.
        gradients: its arguments.
    """
    table = next(x.table for x in gradients if is_one(x))
    return _called(
        _functions_of(table), (name,), name, function, [_packed(gradient) for gradient in gradients]
    )
