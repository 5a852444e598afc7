"""Lists what scope() replaces in Horovod, and why (see `collective.interception.patches`).

Horovod looks these functions up whenever it needs them: a script may have made a wrapper, or
imported Horovod's functions, before scope() opens.
"""

from __future__ import annotations

import horovod.tensorflow as hvd
from horovod.tensorflow import functions as hvd_functions
from horovod.tensorflow import gradient_aggregation as hvd_aggregation
from horovod.tensorflow.mpi_ops import MPI_LIB

from collective.interception.patching import OperationPatch, Patch
from collective.wrappers import horovod

REDUCED_TWICE = "Gradients would be reduced once more."
NO_ADASUM = "Adasum of gradients that are already reduced isn't Adasum."
RANK_0_SHARDS = "A broadcast would give all ranks rank 0's shards."
UNKNOWN_BRANCH = "It reduces in a branch that other ranks may not take."
AGREE_FIRST = "A script's own collective would not wait for the ranks' agreement."
HOROVOD = (
    Patch(hvd, "hvd._allreduce_cond", horovod.allreduce, REDUCED_TWICE),
    Patch(hvd, "hvd._grouped_allreduce_cond", horovod.allreduce, REDUCED_TWICE),
    Patch(
        hvd._DistributedOptimizer,
        "hvd.DistributedOptimizer.compute_gradients",
        horovod.compute_gradients,
        REDUCED_TWICE,
    ),
    *(
        Patch(hvd._DistributedAdasumOptimizer, name, horovod.adasum, NO_ADASUM)
        for name in (
            "hvd._DistributedAdasumOptimizer.compute_gradients",
            "hvd._DistributedAdasumOptimizer.apply_gradients",
        )
    ),
    Patch(
        hvd_aggregation.LocalGradientAggregationHelper,
        "hvd_aggregation.LocalGradientAggregationHelper.compute_gradients",
        horovod.aggregate,
        UNKNOWN_BRANCH,
    ),
    Patch(
        hvd_functions,
        "hvd_functions._make_broadcast_group_fn",
        horovod.broadcast_group,
        RANK_0_SHARDS,
    ),
    Patch(
        hvd_functions,
        "hvd_functions._make_inplace_broadcast_group_fn",
        horovod.broadcast_groups,
        RANK_0_SHARDS,
    ),
    *(
        OperationPatch(MPI_LIB, f"MPI_LIB.horovod_{name}", horovod.gated_collective, AGREE_FIRST)
        for name in (
            *("allreduce", "grouped_allreduce", "allgather", "grouped_allgather"),
            *("broadcast", "alltoall", "reducescatter", "grouped_reducescatter"),
        )
    ),
)
