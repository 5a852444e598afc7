"""The table of the Horovod names that the library changes inside scope().

All other names of Horovod are Horovod's own, inside and outside. Where Horovod isn't installed,
`collective.compat.horovod_stand_in` has its common functions.
"""

from __future__ import annotations

from collective.compat.framework import Framework, refused, same_numbers, works
from collective.compat.names.contrib import CONTRIB
from collective.compat.names.estimator import ESTIMATORS

_REDUCED = "inside scope() gradients are reduced once, and stay as they are"
_STARTS = "inside scope() replicated variables are equal anyway; tables aren't broadcast"
_AGREED = "inside scope() it waits for the ranks' agreement on the run"
_ITSELF = "needs Horovod itself"

HOROVOD = Framework(
    "horovod",
    "Horovod",
    marks=("horovod",),
    names=(
        *(
            same_numbers(f"hvd.{name}", f"horovod.tensorflow.{name}", note)
            for name, note in (
                ("DistributedOptimizer", _REDUCED),
                ("DistributedGradientTape", f"{_REDUCED}; {_ITSELF}"),
            )
        ),
        *(
            works(f"hvd.{name}", f"horovod.tensorflow.{name}", note)
            for names, note in (
                (("BroadcastGlobalVariablesHook", "broadcast_global_variables"), _STARTS),
                (("broadcast_variables",), _STARTS),
                (("allreduce", "allgather", "broadcast"), _AGREED),
                (("alltoall",), f"{_AGREED}; {_ITSELF}"),
                (("init", "rank", "size", "local_rank", "Compression"), ""),
            )
            for name in names
        ),
        refused(
            "tf.enable_eager_execution",
            "a script as it is builds a graph: leave it out, and run the model in a session.",
        ),
        *ESTIMATORS,
        *CONTRIB,
    ),
)
