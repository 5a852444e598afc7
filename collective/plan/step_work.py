"""Determines from a graph how much work a training step is, for an estimate of its time."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import tensorflow.compat.v1 as tf

from collective.coordination.run_analysis import RunFootprint
from collective.ops import kernel_device
from collective.ops.communication import carrier_choice, collectives
from collective.plan import step_estimate
from collective.plan.step_estimate import StepWork
from collective.strategies import Lookup
from collective.tables.table import is_replicated

# Operations that take an unknown number of steps with each parameter, or compute what the
# parameters don't tell.
UNKNOWN_WORK = (
    "BatchMatMul",
    "Conv",
    "CudnnRNN",
    "DepthwiseConv",
    "Einsum",
    "Enter",
    "PartitionedCall",
    "StatefulPartitionedCall",
    "StatelessWhile",
    "While",
)
# The ids of a sample where the graph doesn't tell: rather too many, which speaks for sharding.
IDS_OF_A_SAMPLE = 10


def of_step(
    graph: tf.Graph, footprint: RunFootprint, lookups: Sequence[Lookup], exchanges: int
) -> StepWork | None:
    """Returns the work of a training step; None if it can't be determined.

    Args:
        graph: the graph.
        footprint: that of the training run.
        lookups: the lookups that the run needs.
        exchanges: the collectives of the run.
    """
    if kernel_device.chosen() != "cpu" or tf.config.list_physical_devices("GPU"):
        return None
    for op in footprint.operations:
        # A product of more than two dimensions takes its parameters for each of them.
        if op.type.startswith(UNKNOWN_WORK) or "Tensordot" in op.name:
            return None
    variables = graph.get_collection(tf.GraphKeys.TRAINABLE_VARIABLES)
    sizes = [v.shape.num_elements() for v in variables if is_replicated(v)]
    row_bytes = sum(_row_bytes_of_sample(lookup) for lookup in lookups)
    if None in sizes or row_bytes == 0:
        return None
    samples = samples_of(lookups)
    ranks = collectives.size()
    return StepWork(
        ranks=ranks,
        exchanges=exchanges,
        row_bytes=row_bytes,
        parameters=sum(sizes),
        samples=None if samples is None else samples * ranks,
        wire=_wire(),
    )


def _wire() -> step_estimate.Wire:
    is_shared = carrier_choice.in_force() == carrier_choice.SHARED_MEMORY
    return step_estimate.SHARED_MEMORY if is_shared else step_estimate.HOROVOD


def samples_of(lookups: Sequence[Lookup]) -> int | None:
    """Returns a rank's samples of a step; None if the graph doesn't determine them.

    A lookup of flattened ids gives too high a number, which favours sharding.
    """
    most = 0
    for lookup in lookups:
        shape = lookup.ids.shape
        if lookup.sparse_ids is not None or not shape.rank:
            return None
        # A list: items of a shape are never None where a script has disabled version 2.
        samples = shape.as_list()[0]
        if samples is None:
            return None
        most = max(most, samples)
    return most


def _row_bytes_of_sample(lookup: Lookup) -> int:
    """Returns the bytes of the rows that a sample's ids name."""
    ids = IDS_OF_A_SAMPLE
    shape = lookup.ids.shape
    if lookup.sparse_ids is None and shape.rank is not None:
        ids_of_sample = shape[1:].num_elements()
        ids = IDS_OF_A_SAMPLE if ids_of_sample is None else ids_of_sample
    return int(np.prod([ids, lookup.table.dim, lookup.table.dtype.base_dtype.size]))
