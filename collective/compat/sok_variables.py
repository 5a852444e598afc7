"""Defines SparseOperationKit's variables: tables that show a rank the same part as SOK does.

In SOK a variable is a rank's part of the rows: reading it returns that part, and assigning sets it.
SOK's own lookups use the rows of all ranks.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import tensorflow.compat.v1 as tf

from collective.compat.framework import say_once
from collective.compat.sok_rows import TimeOfUse, exported, imported
from collective.embedding_variable import check_scope
from collective.errors import TableError
from collective.ops.communication import collectives
from collective.ops.rows import dynamic_rows
from collective.options import EmbeddingOptions
from collective.tables.dynamic_table import DynamicTable
from collective.tables.rows import rows_by_python
from collective.tables.table import Table, in_shard_view
from collective.tables.variable_getter import table_getter
from collective.tensorflow_internals.keras import base_layer_utils
from collective.tensorflow_internals.variables import resource_variable_ops

_PLAIN = resource_variable_ops.ResourceVariable
_numbers = itertools.count(), itertools.count()  # for static and for dynamic variables


def make_table(
    kind: type[Table],
    name: str,
    shape: Any,
    initializer: Any,
    placement: str = "rows",
    **kwargs: Any,
) -> Any:
    """Makes a table under the first of the names `name`, `name_1`, … that isn't taken."""
    check_scope(f"sok makes the variable '{name}', which")
    # Eager code's variables take no names in a graph.
    is_eager = tf.executing_eagerly()
    name = tf.get_default_graph().unique_name(name, mark_as_used=is_eager)
    with tf.name_scope(None):
        return table_getter(
            base_layer_utils.make_variable,
            name,
            shape=shape,
            initializer=initializer,
            options=EmbeddingOptions(placement=placement),
            kind=kind,
            **kwargs,
        )


class _Static(Table):
    """Holds [V, D], of which a rank sees only a part: in its shape, its value and assignments.

    Attributes:
        target_gpu: k for mode 'localized:k', else -1.
    """

    shows_shard = True
    target_gpu = -1

    @classmethod
    def _variable_call(cls, *args: Any, **kwargs: Any) -> Any:
        """Makes a table of SparseOperationKit's arguments: TensorFlow asks before it makes one."""
        if "shape" in kwargs and "dtype" in kwargs and kwargs.get("name") and not args:
            return None
        return make(cls, *args, **kwargs)

    @property
    def global_shape(self) -> tuple[int, int]:
        """Returns (V, D)."""
        return self.rows, self.dim

    @property
    def global_gpu_id(self) -> int:
        return collectives.rank()

    @property
    def num_gpus(self) -> int:
        return collectives.size()

    def check_is_looked_up(self) -> None:
        """Refuses TensorFlow's lookups on several ranks: in SOK they see only a rank's part."""
        if collectives.size() > 1 and not in_shard_view():
            raise NotImplementedError(
                f"a lookup by TensorFlow's functions of '{self.op.name}', made by sok.Variable, "
                "would count the rows of this rank's part: look rows of all ranks up by "
                "sok.lookup_sparse or sok.all2all_dense_embedding, or read the part by "
                "variable.read_value()."
            )

    def sparse_read(self, indices: Any, name: str | None = None) -> tf.Tensor:
        self.check_is_looked_up()
        return _PLAIN.sparse_read(self, indices, name)

    def gather_nd(self, indices: Any, name: str | None = None) -> tf.Tensor:
        self.check_is_looked_up()
        return _PLAIN.gather_nd(self, indices, name)

    def _refuse_if_not_whole(self, doing: str) -> None:
        if collectives.size() > 1:
            raise TableError(
                f"{doing} '{self.op.name}', made by sok.Variable, isn't possible: a rank sees only "
                "its part of the rows. Save it by sok.dump, and restore it by sok.load."
            )

    def _serialize_to_tensors(self) -> Any:
        self._refuse_if_not_whole("A tf.train.Checkpoint of")
        return super()._serialize_to_tensors()

    def _restore_from_tensors(self, restored_tensors: Any) -> Any:
        self._refuse_if_not_whole("Restoring a tf.train.Checkpoint of")
        return super()._restore_from_tensors(restored_tensors)

    def _export_to_saved_model_graph(self, *args: Any, **kwargs: Any) -> Any:
        self._refuse_if_not_whole("A SavedModel of")
        return super()._export_to_saved_model_graph(*args, **kwargs)

    def key_map(self, indices: Any) -> Any:
        """Returns the places of the rows `indices`, which this rank has, in its part."""
        return self.row_placement.row(indices)


class DistributedVariable(_Static):
    """Shows rank r the rows r, r + N, r + 2N, …: [ceil((V - r) / N), D]."""


class LocalizedVariable(_Static):
    """For mode 'localized:k', shows rank k all rows, [V, D], and the other ranks none, [0, D].

    So they are placed, too.
    """


def Variable(*args: Any, mode: str | None = None, **kwargs: Any) -> Any:  # noqa: N802 (sok's name)
    """Makes a static table, sharded by rows, that shows each rank its part.

    Args:
        *args, **kwargs: those of `make`.
        mode: 'distributed' (the default), or 'localized:k': rank k sees all rows, the others
            none.

    Raises:
        ValueError: the mode is unknown, there is no rank k, or see `make`.
    """
    owner = _owner("Variable", mode)
    if owner is None:
        return make(DistributedVariable, *args, **kwargs)
    kwargs["target_gpu"] = owner
    return make(LocalizedVariable, *args, **kwargs)


def _made_by(kind: str, mode: str) -> str:
    """Describes a 'localized:k' variable to ranks that haven't made it."""
    return f"sok.{kind}(mode={mode!r}), which all ranks make"


def _owner(kind: str, mode: str | None) -> int | None:
    """Returns the rank of a mode 'localized:k'; None if rows are on all ranks.

    Raises:
        ValueError: the mode is unknown, or there is no rank k.
    """
    if mode is None or mode == "distributed":
        return None
    word, _, number = mode.partition(":")
    if word != "localized" or not number.isdigit():
        raise ValueError(
            f"sok.{kind}(mode={mode!r}): a mode is 'distributed' or 'localized:k', with a rank k."
        )
    if int(number) >= collectives.size():
        raise ValueError(
            f"sok.{kind}(mode={mode!r}): there are ranks 0 to {collectives.size() - 1} only."
        )
    return int(number)


def make(
    kind: type[_Static],
    initial_value: Any = None,
    trainable: bool | None = None,
    collections: Any = None,
    validate_shape: bool = True,
    caching_device: Any = None,
    name: str | None = None,
    dtype: Any = None,
    variable_def: Any = None,
    import_scope: str | None = None,
    constraint: Any = None,
    distribute_strategy: Any = None,
    synchronization: Any = None,
    aggregation: Any = None,
    shape: Any = None,
    initializer: Any = None,
    global_gpu_id: int | None = None,
    num_gpus: int | None = None,
    target_gpu: int = 0,
) -> Any:
    """Makes a static table from the arguments of `sok.DistributedVariable`.

    Args:
        kind: its class.
        initial_value: [V, D], or one row [D]: an array, a list or a tensor, of numbers. Integers
            become float32, as rows are trained.
        trainable, collections, constraint, synchronization, aggregation: as for `tf.Variable`.
        validate_shape, caching_device, distribute_strategy: no effect.
        name: the default is sok_static_Variable_0, and so on.
        dtype: the default is that of the initial value, or float32.
        variable_def, import_scope: refused.
        shape: [V, D]; it is given together with
        initializer: fills the rows, instead of an initial value.
        global_gpu_id, num_gpus: this rank and N.
        target_gpu: k, for LocalizedVariable.

    Raises:
        NotImplementedError: it is to be made from a protocol buffer. ValueError: there is no
        initial value, it isn't a matrix, or the ranks differ from the job's.
    """
    del validate_shape, caching_device, distribute_strategy
    if variable_def is not None or import_scope is not None:
        raise NotImplementedError(
            "sok.Variable(variable_def=, import_scope=) is not supported: build the graph again."
        )
    rank, ranks = collectives.rank(), collectives.size()
    if global_gpu_id not in (None, rank) or num_gpus not in (None, ranks):
        raise ValueError(
            f"sok.Variable(global_gpu_id={global_gpu_id}, num_gpus={num_gpus}): this is rank "
            f"{rank} of {ranks}; leave them out."
        )
    _owner("Variable", f"localized:{target_gpu}" if target_gpu >= 0 else None)
    if initial_value is None and (shape is None or initializer is None):
        raise ValueError("sok.Variable is given an initial_value, or a shape and an initializer.")
    if initial_value is not None:
        shape, initializer = None, _matrix(initial_value, dtype)
    made = make_table(
        kind,
        name or f"sok_static_Variable_{next(_numbers[0])}",
        shape,
        initializer,
        f"whole:{target_gpu}" if kind is LocalizedVariable else "rows",
        dtype=None if shape is None else dtype or tf.float32,
        trainable=trainable is not False,
        collections=collections,
        constraint=constraint,
        synchronization=synchronization or tf.VariableSynchronization.AUTO,
        aggregation=aggregation or tf.VariableAggregation.NONE,
    )
    made.target_gpu = target_gpu if kind is LocalizedVariable else -1
    if kind is LocalizedVariable:
        made.made_by = _made_by("Variable", f"localized:{target_gpu}")
    return made


def _matrix(value: Any, dtype: Any) -> Any:
    """Returns an initial value as floating-point numbers [V, D]."""
    value = value if isinstance(value, tf.Tensor) else np.asarray(value)
    wanted = tf.as_dtype(dtype or value.dtype)
    if not wanted.is_floating:
        say_once(f"sok.Variable of {wanted.name} becomes float32: rows are trained")
        wanted = tf.float32
    is_tensor = isinstance(value, tf.Tensor)
    value = tf.cast(value, wanted) if is_tensor else value.astype(wanted.as_numpy_dtype)
    value = value[None] if len(value.shape) == 1 else value
    if len(value.shape) != 2:
        raise ValueError(f"sok.Variable is a matrix, not of shape {value.shape}.")
    return value


# Fills new rows, by var_type and the initializer's name; any other name is a number.
_UNIFORM, _NORMAL = tf.random_uniform_initializer(-0.05, 0.05), tf.random_normal_initializer()
INITIALIZERS: dict[str, dict[str, Any]] = {
    "hbm": {
        "": _UNIFORM,
        "random": _UNIFORM,
        "ones": tf.ones_initializer(),
        "zeros": tf.zeros_initializer(),
    },
    "hybrid": {
        "": _NORMAL,
        "random": _NORMAL,
        "normal": _NORMAL,
        "uniform": tf.random_uniform_initializer(0.0, 1.0),
    },
}


class DynamicVariable(DynamicTable):
    """Holds rows for any integer keys; a rank sees those that it owns.

    For mode 'localized:k', rank k owns and sees all of them. A lookup gives a key its row in every
    run. `tf.nn.embedding_lookup` reads rows of all ranks; of a 'localized:k' variable it is refused
    where there are several (`check_is_looked_up`).

    Attributes:
        backend_type: 'hbm' or 'hybrid'; only affects initial values and
        times: when rows were last looked up, for a 'hybrid' variable in host memory.
        config_dict: the tuning arguments, without effect.
        dimension, key_type, mode, initializer_str: as given.
        indices: None.
    """

    inserts_always = True
    indices = None
    backend_type = "hybrid"
    times: TimeOfUse | None = None
    _rows: tf.Tensor | None = None
    mode: str | None = None
    initializer_str: Any = ""
    key_type = tf.int64

    @classmethod
    def _variable_call(cls, *args: Any, **kwargs: Any) -> Any:
        """Makes a table of SparseOperationKit's arguments: TensorFlow asks before it makes one."""
        return None if "shape" in kwargs else make_dynamic(cls, *args, **kwargs)

    @property
    def dimension(self) -> int:
        return self.dim

    @property
    def handle_dtype(self) -> tf.DType:
        return self.dtype.base_dtype

    @property
    def num_gpus(self) -> int:
        return collectives.size()

    @property
    def target_gpu(self) -> int:
        _, _, rank = (self.mode or "").partition(":")
        return int(rank) if rank else -1

    def is_static(self) -> bool:
        return False

    def key_map(self, indices: Any) -> Any:
        return indices

    def check_is_looked_up(self) -> None:
        """Refuses TensorFlow's lookups of 'localized:k' on several ranks: SOK's are rank k's."""
        if collectives.size() > 1 and self.target_gpu >= 0:
            raise NotImplementedError(
                f"TensorFlow's lookups of '{self.op.name}', made by "
                f"sok.DynamicVariable(mode={self.mode!r}), are not supported on several ranks: in "
                f"SparseOperationKit rank {self.target_gpu} looks its rows up alone. Here a lookup "
                "is an exchange in which all ranks take part. Remove "
                f"`if hvd.rank() == {self.target_gpu}` around the lookup, and use "
                "sok.lookup_sparse or sok.all2all_dense_embedding; or read the rows by sok.export."
            )

    @property
    def size(self) -> tf.Tensor:
        """Returns [rows on this rank, D], int32 [2]."""
        counting = dynamic_rows if self.compiled else rows_by_python
        return tf.stack([tf.cast(counting.count(self.number), tf.int32), self.dim])

    def exported(self) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns this rank's keys, ascending, [R], and their rows, [R, D]."""
        keys, rows = exported(self, self)
        return tf.cast(keys, self.key_type), rows

    def imported(self, keys: Any, rows: Any) -> tf.Operation | None:
        """Returns an operation that gives keys [b] the rows [b, D], from every rank."""
        return imported(self, self, keys, rows)

    def _marked(self, rows: tf.Tensor, training: tf.Tensor) -> tf.Tensor:
        rows = super()._marked(rows, training)
        return rows if self.times is None else self.times.mark(rows)

    def _as_graph_element(self) -> Any:
        """Returns this rank's rows, for a fetch."""
        if self._rows is None:
            with self.graph.as_default(), tf.init_scope():
                self._rows = self.exported()[1]
        return self._rows


def make_dynamic(
    kind: type[DynamicVariable],
    dimension: int,
    initializer: Any = None,
    var_type: str | None = None,
    name: str | None = None,
    constraint: Any = None,
    trainable: bool = True,
    key_type: Any = None,
    dtype: Any = None,
    mode: str | None = None,
    **tuning: Any,
) -> Any:
    """Makes a dynamic table from the arguments of `sok.DynamicVariable`.

    Args:
        kind: its class.
        dimension: D.
        initializer: a name of INITIALIZERS, or a number as text. Default 'random'.
        var_type: 'hbm' or 'hybrid' (the default).
        name: the default is sok_dynamic_Variable_0, and so on.
        constraint: refused.
        trainable, dtype: as for `tf.Variable`; the default type is float32.
        key_type: tf.int64 (the default), or tf.int32, which 'hybrid' doesn't have.
        mode: 'distributed' (the default), or 'localized:k': all rows are on rank k, and on several
            ranks TensorFlow's lookups are refused.
        **tuning: sizes and places, without effect: the table grows.

    Raises:
        NotImplementedError: it is given a constraint.
        ValueError: another argument has an invalid value.
    """
    if constraint is not None:
        raise NotImplementedError(
            "sok.DynamicVariable(constraint=…) is not supported: bound weights by "
            "collective.TablePolicy(weight_bound=…)."
        )
    var_type = var_type or "hybrid"
    if var_type not in INITIALIZERS:
        raise ValueError(f"sok.DynamicVariable(var_type={var_type!r}) is 'hbm' or 'hybrid'.")
    keys = tf.as_dtype(key_type or tf.int64)
    if keys not in ((tf.int64, tf.int32) if var_type == "hbm" else (tf.int64,)):
        raise ValueError(
            f"sok.DynamicVariable(key_type={keys.name}, var_type={var_type!r}): keys are int64, or "
            "with 'hbm' int32."
        )
    owner = _owner("DynamicVariable", mode)
    if tuning:
        say_once(
            f"sok.DynamicVariable({', '.join(sorted(tuning))}) has no effect here: a table lies in "
            "the GPU's memory where tables are on a GPU, and grows"
        )
    filled = initializer
    if initializer is None or isinstance(initializer, str):
        text = initializer or ""
        filled = INITIALIZERS[var_type].get(text)
        if filled is None:
            filled = tf.constant_initializer(_number(text))
    made = make_table(
        kind,
        name or f"sok_dynamic_Variable_{next(_numbers[1])}",
        [None, dimension],
        filled,
        "rows" if owner is None else f"whole:{owner}",
        dtype=dtype or tf.float32,
        trainable=trainable is not False,
    )
    if var_type == "hybrid" and isinstance(made, DynamicVariable) and made.bridge is None:
        made.times = TimeOfUse(made)
    made.backend_type, made.mode, made.key_type = var_type, mode, keys
    made.initializer_str, made.config_dict = initializer or "", tuning
    if mode is not None and made.target_gpu >= 0:
        made.made_by = _made_by("DynamicVariable", mode)
    return made


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError(
            f"sok.DynamicVariable(initializer={text!r}) is a number as text, or one of "
            f"{', '.join(repr(name) for kind in INITIALIZERS.values() for name in kind if name)}."
        ) from None
