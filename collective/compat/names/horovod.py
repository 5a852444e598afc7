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
_STANDS_IN = "collective.compat.horovod_stand_in"
_GRAPHS = "needs Horovod itself, except in scripts of TensorFlow 2"
_JSON = "in a script of TensorFlow 2; what JSON can hold"
_MOMENTUM = "in a script of TensorFlow 2; corrects the momentum of legacy optimizers"

HOROVOD = Framework(
    "horovod",
    "Horovod",
    marks=("horovod",),
    names=(
        *(
            same_numbers(f"hvd.{name}", f"horovod.tensorflow.{name}", note)
            for name, note in (
                ("DistributedOptimizer", _REDUCED),
                ("DistributedGradientTape", f"{_REDUCED}; {_GRAPHS}"),
            )
        ),
        *(
            works(f"hvd.{name}", f"horovod.tensorflow.{name}", note)
            for names, note in (
                (("BroadcastGlobalVariablesHook", "broadcast_global_variables"), _STARTS),
                (("broadcast_variables",), _STARTS),
                (("allreduce", "allgather", "broadcast"), _AGREED),
                (("alltoall",), f"{_AGREED}; needs Horovod itself"),
                (("init", "rank", "size", "local_rank", "Compression"), ""),
            )
            for name in names
        ),
        *(
            works(f"hvd.{name}", f"{_STANDS_IN}.training.{name}", _JSON, "0.2.0")
            for name in ("broadcast_object", "allgather_object")
        ),
        same_numbers(
            "horovod.tensorflow.keras.DistributedOptimizer",
            f"{_STANDS_IN}.keras.DistributedOptimizer",
            "in a script of TensorFlow 2, the optimizer as it is: gradients are reduced once",
            "0.2.0",
        ),
        *(
            works(f"horovod.tensorflow.keras.{name}", f"{_STANDS_IN}.keras.{name}", note, "0.2.0")
            for name, note in (
                ("allreduce", "in a script of TensorFlow 2"),
                ("allgather", "in a script of TensorFlow 2"),
                ("broadcast", "in a script of TensorFlow 2"),
                ("load_model", "in a script of TensorFlow 2; all ranks call it"),
            )
        ),
        *(
            make(
                f"horovod.tensorflow.keras.callbacks.{name}",
                f"{_STANDS_IN}.keras_callbacks.{name}",
                note,
                "0.2.0",
            )
            for make, name, note in (
                (works, "BroadcastGlobalVariablesCallback", "tables are left alone"),
                (works, "MetricAverageCallback", "logs are of all ranks without it"),
                (same_numbers, "LearningRateWarmupCallback", _MOMENTUM),
                (same_numbers, "LearningRateScheduleCallback", _MOMENTUM),
            )
        ),
        refused(
            "tf.enable_eager_execution",
            "a script as it is builds a graph: leave it out, and run the model in a session.",
        ),
        *ESTIMATORS,
        *CONTRIB,
    ),
)
