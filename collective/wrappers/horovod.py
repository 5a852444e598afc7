"""Lets scripts keep Horovod's wrappers, and refuses options that would change results.

Inside scope() gradients are already reduced over all ranks, and every rank starts with the same
replicated variables. Horovod's `DistributedOptimizer` and `DistributedGradientTape` therefore skip
their own reduction, and its broadcasts skip what differs between ranks: tables and their slots.
Options of these wrappers that only say how numbers are sent have no effect; options that would
change results raise errors that name the library's own option. So does `SyncReplicasOptimizer`.
"""

from __future__ import annotations

import warnings
from typing import Any, Callable, NoReturn

import tensorflow.compat.v1 as tf

from collective.gradients.table_gradients import is_of_table
from collective.ops.communication import collectives
from collective.ops.communication.gate import gates_of
from collective.ops.communication.horovod_library import hvd
from collective.ops.graph import control_flow, graphs
from collective.tables.table import is_replicated

NO_COMPRESSION = (
    "Horovod's compression has no effect inside strategy.scope(), where gradients travel "
    "otherwise: strategy.scope(dense_compression='fp16') is what halves their bytes."
)


# Not empty while a wrapper reduces gradients in a function that all ranks call.
_reducing: list[Any] = []


def _refuse(feature: str, advice: str) -> NoReturn:
    raise NotImplementedError(
        f"Horovod's {feature} inside strategy.scope(), where gradients are the means over all "
        f"ranks already: {advice}"
    )


def refuse_sums() -> NoReturn:
    """Refuses a wrapper that asks for sums of gradients."""
    _refuse(
        "op=Sum or op=Adasum",
        "leave op out. (Sums are N times the gradients of one process with the batches of "
        "all: if that is meant, multiply the loss by hvd.size().)",
    )


def allreduce(original: Callable[..., Any], gradients: Any, **kwargs: Any) -> Any:
    """Replaces `hvd._allreduce_cond` and `hvd._grouped_allreduce_cond`: reduces nothing.

    All of Horovod's wrappers reduce gradients with them. In eager mode they still reduce: scope()
    refuses gradients with respect to variables there, and doesn't touch any others.

    Raises:
        NotImplementedError: the script asks for something other than means over all ranks.
    """
    # Its wrappers also reduce, eagerly, in functions of their own.
    is_own = graphs.is_traced(tf.get_default_graph()) and not _reducing
    if graphs.is_eager() or is_own:
        return original(gradients, **kwargs)
    if collectives.size() > 1:
        if kwargs.get("op", hvd.Average) != hvd.Average:
            refuse_sums()
        every = hvd.global_process_set
        if kwargs.get("process_set", every).process_set_id != every.process_set_id:
            _refuse("process_set", "all ranks train together; leave it out.")
        if kwargs.get("compression", hvd.Compression.none) is not hvd.Compression.none:
            warnings.warn(NO_COMPRESSION, stacklevel=2)
    return gradients


def compute_gradients(original: Callable[..., Any], wrapper: Any, *args: Any, **kwargs: Any) -> Any:
    """Replaces `compute_gradients` of Horovod's wrappers and of optimizers.

    It takes gradients, before a wrapper reduces them.

    Raises:
        RuntimeError: it is called eagerly, and Horovod wrapped the optimizer.
    """
    if tf.executing_eagerly() and hasattr(wrapper, "_allreduce_grads"):
        graphs.refuse_eager("scope()", f"{type(wrapper).__name__} takes gradients")
    take_over(wrapper)
    return original(wrapper, *args, **kwargs)


def take_over(wrapper: Any) -> None:
    """Makes an optimizer or tape that Horovod wrapped reduce in the graph, as others do.

    One that was wrapped outside a graph reduces in a `tf.function`, which would return a table's
    gradient like any other.

    Args:
        wrapper: any optimizer or tape.

    Raises:
        NotImplementedError: it is to leave some gradients local, and would divide them by N once
            more.
    """
    if graphs.is_eager():
        return
    reduce = getattr(wrapper, "_allreduce_grads", None)
    if reduce is not None and not hasattr(reduce, "leaves_tables_alone"):
        wrapper._allreduce_grads = _leaving_tables_alone(getattr(reduce, "python_function", reduce))
    if collectives.size() > 1 and (
        getattr(wrapper, "_local_vars", None) or getattr(wrapper, "_local_sources", None)
    ):
        _refuse(
            "register_local_var (PartialDistributedOptimizer, PartialDistributedGradientTape)",
            "leave it out. A variable made by tf.get_variable inside strategy.embedding_scope() is "
            "sharded instead.",
        )


def _leaving_tables_alone(reduce: Callable[..., Any]) -> Callable[..., Any]:
    """Returns Horovod's reduction of gradients, without the gradients of tables.

    With `sparse_as_dense=True` it would convert them to matrices for Horovod's allreduce. They are
    reduced already.
    """

    def of_others(gradients: Any, *args: Any, **kwargs: Any) -> list[Any]:
        # Horovod forms groups by numbers: a number stands for each that is left out.
        stand_ins = [tf.zeros([]) if is_of_table(gradient) else gradient for gradient in gradients]
        _reducing.append(stand_ins)
        try:
            reduced = reduce(stand_ins, *args, **kwargs)
        finally:
            _reducing.pop()
        return [
            gradient if is_of_table(gradient) else other
            for gradient, other in zip(gradients, reduced)
        ]

    of_others.leaves_tables_alone = True  # type: ignore[attr-defined]
    return of_others


def aggregate(original: Callable[..., Any], helper: Any, *args: Any, **kwargs: Any) -> Any:
    """Replaces `LocalGradientAggregationHelper.compute_gradients`: refuses it.

    It sums gradients of several batches for each update, and would exchange the sums in a branch;
    the other ranks can't know whether it is taken.
    """
    if collectives.size() > 1 and not graphs.is_eager():
        steps = helper.backward_passes_per_step
        _refuse(
            f"backward_passes_per_step={steps}",
            f"leave it out and use strategy.scope(local_steps={steps}), which updates by the mean "
            "of the batches.",
        )
    return original(helper, *args, **kwargs)


def adasum(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Replaces what `hvd.DistributedOptimizer(op=hvd.Adasum)` does: refuses it."""
    if collectives.size() > 1 and not tf.executing_eagerly_outside_functions():
        _refuse("op=Adasum", "leave op out.")
    return original(*args, **kwargs)


def broadcast_group(original: Callable[..., Any]) -> Callable[..., Any]:
    """Replaces `horovod.tensorflow.functions._make_broadcast_group_fn`: skips tables.

    `hvd.broadcast_variables` creates its operation with it.
    """
    broadcast = original()

    def only_replicated(variables: Any, *args: Any) -> Any:
        return broadcast([v for v in variables if is_replicated(v)], *args)

    return broadcast if graphs.is_eager() else only_replicated


def broadcast_groups(original: Callable[..., Any]) -> Callable[..., Any]:
    """Replaces `horovod.tensorflow.functions._make_inplace_broadcast_group_fn`: skips tables, too.

    It broadcasts in place, device by device.
    """
    broadcast = original()

    def only_replicated(lists: Any, *args: Any) -> Any:
        kept = [[v for v in variables if is_replicated(v)] for variables in lists]
        return broadcast([variables for variables in kept if variables], *args)

    return broadcast if graphs.is_eager() else only_replicated


def gated_collective(
    original: Callable[..., Any], tensors: Any, *args: Any, name: str | None = None, **kwargs: Any
) -> Any:
    """Replaces an operation of `mpi_ops.MPI_LIB`: makes a script's collective wait, too.

    All of Horovod's functions end in these operations. They start when all ranks have agreed on the
    run, so that no rank waits in them for a rank whose data has ended. In eager mode they work as
    in Horovod.
    """
    if graphs.is_eager():
        return original(tensors, *args, name=name, **kwargs)
    control_flow.one_at_a_time()
    graph = tf.get_default_graph()
    if graphs.is_traced(graph):
        # If ranks agree on calls of the function, it waits for that (`coordination.functions`).
        return original(tensors, *args, name=name, **kwargs)
    is_librarys = str(name).startswith(collectives.PREFIX)
    if collectives.size() == 1 or is_librarys or graphs.is_function(graph):
        return original(tensors, *args, name=name, **kwargs)
    several = isinstance(tensors, (list, tuple))
    inputs = [tf.convert_to_tensor(x) for x in (tensors if several else [tensors])]
    opened = tf.equal(gates_of(graph).of_collective(inputs).zero, 0)
    gated = [tf.where(opened, x, tf.zeros_like(x)) for x in inputs]
    return original(gated if several else gated[0], *args, name=name, **kwargs)


def sync_replicas(original: Callable[..., Any], optimizer: Any, *args: Any, **kwargs: Any) -> Any:
    """Replaces `SyncReplicasOptimizer.apply_gradients`: refuses it with several ranks.

    Its workers would wait for tokens from a chief, but none of them is the chief.
    """
    if collectives.size() > 1:
        raise NotImplementedError(
            "tf.train.SyncReplicasOptimizer synchronizes workers by queues on parameter servers. "
            "Inside strategy.scope() there are none, and training is synchronous already: use the "
            "optimizer that it wraps, without make_session_run_hook()."
        )
    return original(optimizer, *args, **kwargs)
