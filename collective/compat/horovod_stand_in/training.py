"""Has Horovod's optimizer, and its ways to give all ranks the variables of one."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterable, Sequence
from typing import Any

import tensorflow.compat.v1 as tf

from collective.compat.horovod_stand_in import eager, process, reductions
from collective.compat.horovod_stand_in.compression import Compression
from collective.coordination import barrier
from collective.ops.graph import graphs
from collective.scope import SCOPES
from collective.tables.table import is_replicated
from collective.tensorflow_internals.keras import OptimizerV2
from collective.tensorflow_internals.keras import optimizer as keras_optimizer
from collective.wrappers import horovod


class GradientReduction:
    """Reduces the gradients of an optimizer over ranks, unless scope() has done so already.

    Args:
        options: arguments of `hvd.DistributedOptimizer`, or of `hvd.DistributedGradientTape`.

    Raises:
        NotImplementedError: they ask for something that only Horovod has.
        ValueError: they don't fit together.
    """

    def __init__(self, **options: Any):
        self._op = options.pop("op", process.Average)
        self._divisor = options.pop("gradient_predivide_factor", 1.0)
        self._compression = options.pop("compression", Compression.none)
        self._is_dense = options.pop("sparse_as_dense", False)
        self._devices = [options.pop(f"device_{kind}", "") for kind in ("dense", "sparse")]
        process.check_process_set(options.pop("process_set", process.global_process_set))
        # How tensors are grouped doesn't change a number, nor what concerns local variables alone.
        for name in ("num_groups", "groups", "scale_local_gradients"):
            options.pop(name, None)
        options.pop("average_aggregated_gradients", None)  # of the passes of a step
        if options.pop("backward_passes_per_step", 1) != 1:
            raise NotImplementedError(
                process.unavailable("hvd.DistributedOptimizer(backward_passes_per_step=…)")
            )
        if options:
            raise TypeError(f"hvd.DistributedOptimizer has no argument {sorted(options)}")
        if self._op not in (process.Average, process.Sum):
            raise NotImplementedError(
                process.unavailable("hvd.DistributedOptimizer(op=…) other than Average and Sum")
            )
        if self._divisor != 1.0 and self._op != process.Average:
            raise ValueError("gradient_predivide_factor not supported with op != Average")

    def __call__(self, gradients: Iterable[Any], name: str) -> list[Any]:
        """Returns the reduced gradients; None stays None.

        Args:
            gradients: tensors, `tf.IndexedSlices`, or None.
            name: begins the names of the exchanges.
        """
        gradients = list(gradients)
        if SCOPES.is_open:
            self.check_scope()
            return gradients
        with tf.name_scope(f"{name}_Allreduce"):
            if self._is_dense:
                # With one rank, too: some optimizers also move the rows that have no gradient.
                gradients = [g if g is None else tf.convert_to_tensor(g) for g in gradients]
            if process.size() == 1:
                return gradients
            places = [place for place, gradient in enumerate(gradients) if gradient is not None]
            dense, sparse = self._devices
            for place, is_sparse in self._parts(gradients, places):
                before, after = (1.0, 1.0) if is_sparse else (1.0 / self._divisor, self._divisor)
                reduced = reductions.grouped_allreduce(
                    [gradients[p] for p in place],
                    device_dense=dense,
                    device_sparse=sparse,
                    compression=self._compression,
                    op=self._op,
                    prescale_factor=before,
                    postscale_factor=after,
                )
                for p, gradient in zip(place, reduced):
                    gradients[p] = gradient
        return gradients

    @staticmethod
    def _parts(gradients: Sequence[Any], places: Sequence[int]) -> list[tuple[list[int], bool]]:
        """Returns the places of the gradients that are reduced together, sparse ones last."""
        sparse = [p for p in places if isinstance(gradients[p], tf.IndexedSlices)]
        dense = [p for p in places if p not in sparse]
        return [(part, part is sparse) for part in (dense, sparse) if part]

    def check_scope(self) -> None:
        """Refuses or warns of what has no place in scope(), as with Horovod itself."""
        if process.size() == 1:
            return
        if self._op != process.Average:
            horovod.refuse_sums()
        if self._compression is not Compression.none:
            warnings.warn(horovod.NO_COMPRESSION, stacklevel=2)


class ReducingOptimizer(tf.train.Optimizer):
    """Wraps an optimizer: its gradients are reduced before it applies them."""

    def __init__(self, optimizer: Any, name: str | None, use_locking: bool, reduce: Any):
        super().__init__(use_locking, name or f"Distributed{type(optimizer).__name__}")
        self._optimizer, self._reduce = optimizer, reduce

    def compute_gradients(self, *args: Any, **kwargs: Any) -> list[Any]:
        """See `tf.train.Optimizer`; the gradients are those of all ranks."""
        gradients, variables = zip(*self._optimizer.compute_gradients(*args, **kwargs))
        return list(zip(self._reduce(gradients, self.get_name()), variables))

    def apply_gradients(self, *args: Any, **kwargs: Any) -> Any:
        """See `tf.train.Optimizer`."""
        return self._optimizer.apply_gradients(*args, **kwargs)

    def get_slot(self, *args: Any, **kwargs: Any) -> Any:
        """See `tf.train.Optimizer`."""
        return self._optimizer.get_slot(*args, **kwargs)

    def get_slot_names(self, *args: Any, **kwargs: Any) -> Any:
        """See `tf.train.Optimizer`."""
        return self._optimizer.get_slot_names(*args, **kwargs)

    def variables(self, *args: Any, **kwargs: Any) -> Any:
        """See `tf.train.Optimizer`."""
        return self._optimizer.variables(*args, **kwargs)


def DistributedOptimizer(
    optimizer: Any, name: str | None = None, use_locking: bool = False, *args: Any, **options: Any
) -> Any:
    """Wraps an optimizer of `tf.train`: its gradients are reduced over ranks.

    Inside scope() it returns an optimizer of Keras as it is. The arguments are those of
    `horovod.tensorflow.DistributedOptimizer`.

    Raises:
        NotImplementedError: an option needs Horovod itself; or it isn't an optimizer of `tf.train`.
    """
    options.update(zip(("device_dense", "device_sparse", "compression", "sparse_as_dense"), args))
    if len(args) > 4:
        raise TypeError("hvd.DistributedOptimizer: name the arguments after sparse_as_dense")
    if SCOPES.is_open and isinstance(optimizer, (keras_optimizer.Optimizer, OptimizerV2)):
        _check_kept("hvd.DistributedOptimizer", **options)
        return optimizer
    if not isinstance(optimizer, tf.train.Optimizer):
        raise NotImplementedError(
            process.unavailable(f"hvd.DistributedOptimizer of {type(optimizer).__name__}")
            + " For optimizers of Keras use horovod.tensorflow.keras"
        )
    return ReducingOptimizer(optimizer, name, use_locking, GradientReduction(**options))


def DistributedGradientTape(
    gradtape: Any,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    **options: Any,
) -> Any:
    """Returns a tape as it is: inside scope() its gradients are of all ranks.

    The arguments are those of `horovod.tensorflow.DistributedGradientTape`.

    Raises:
        RuntimeError: no scope() is open.
        NotImplementedError: an option needs Horovod itself, or would change results.
    """
    if not SCOPES.is_open:
        raise RuntimeError(process.unavailable("hvd.DistributedGradientTape outside of scope()"))
    del device_dense, device_sparse
    _check_kept(
        "hvd.DistributedGradientTape",
        compression=compression,
        sparse_as_dense=sparse_as_dense,
        **options,
    )
    return gradtape


def _check_kept(wrapper: str, **options: Any) -> None:
    """Refuses options of a wrapper that would change results where there is none.

    Raises:
        NotImplementedError: one does.
    """
    if options.get("sparse_as_dense"):
        raise NotImplementedError(
            f"{wrapper}(sparse_as_dense=True) in a script of TensorFlow 2: optimizers get the "
            "gradients of tables and embeddings as TensorFlow has them. Leave it out; in a loop of "
            "your own, tf.convert_to_tensor(gradient) makes one dense."
        )
    GradientReduction(**options).check_scope()


def broadcast_object(obj: Any, root_rank: int = 0, **_: Any) -> Any:
    """Returns an object of rank `root_rank` on all ranks; JSON has to be able to hold it.

    Raises:
        TypeError: JSON can't hold it.
        ValueError: there is no such rank.
    """
    process.needed()
    process.check_root(root_rank)
    sent = {"object": obj} if process.rank() == root_rank else {}
    json.dumps(sent)
    name = f"hvd.broadcast_object from rank {root_rank}"
    return barrier.exchange(None, name, sent)[root_rank]["object"]


def allgather_object(obj: Any, **_: Any) -> list[Any]:
    """Returns the objects of all ranks, in their order; JSON has to be able to hold them.

    Raises:
        TypeError: JSON can't hold it.
    """
    process.needed()
    sent = {"object": obj}
    json.dumps(sent)
    return [each["object"] for each in barrier.exchange(None, "hvd.allgather_object", sent)]


def broadcast_variables(
    variables: Iterable[Any],
    root_rank: int,
    process_set: Any = process.global_process_set,
    inplace: bool = False,
) -> tf.Operation:
    """Returns the operation that gives variables rank `root_rank`'s values.

    Inside scope() it skips tables and their slots: every rank has other rows of them.
    """
    process.needed()
    process.check_process_set(process_set)
    if callable(variables):  # optimizer.variables, which is a method or a list
        variables = variables()
    variables = [v for v in variables if not SCOPES.is_open or is_replicated(v)]
    if process.size() == 1 or not variables:
        return tf.no_op()
    if graphs.is_eager():
        return eager.broadcast_variables(variables, root_rank)
    if SCOPES.is_open and graphs.is_traced(graphs.outermost(tf.get_default_graph())):
        if root_rank != 0:
            raise NotImplementedError(
                f"hvd.broadcast_variables(root_rank={root_rank}) in a tf.function: there variables "
                "have rank 0's values. Call it before the function."
            )
        return tf.no_op()  # A function's variables are equal on all ranks from its first call on.
    values = reductions.broadcast_alike(
        [tf.convert_to_tensor(v) for v in variables],
        root_rank,
        [reductions.broadcast_name(v) for v in variables],
    )
    return tf.group(*(v.assign(value) for v, value in zip(variables, values)))


def broadcast_global_variables(root_rank: int) -> tf.Operation:
    """Returns the operation that gives all global variables rank `root_rank`'s values."""
    return broadcast_variables(tf.global_variables(), root_rank)


class BroadcastGlobalVariablesHook(tf.train.SessionRunHook):
    """Gives all ranks rank `root_rank`'s variables when a session begins.

    Args:
        root_rank: the rank whose variables all get.
        device: where the variables are sent from.
    """

    def __init__(self, root_rank: int, device: str = ""):
        super().__init__()
        self.root_rank, self.device = root_rank, device
        self.bcast_op: Any = None

    def begin(self) -> None:
        """See `tf.train.SessionRunHook`."""
        if self.bcast_op is None or self.bcast_op.graph is not tf.get_default_graph():
            with tf.device(self.device):
                self.bcast_op = broadcast_global_variables(self.root_rank)

    def after_create_session(self, session: Any, coord: Any) -> None:
        """See `tf.train.SessionRunHook`."""
        session.run(self.bcast_op)
