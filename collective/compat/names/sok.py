"""The table of SparseOperationKit's names.

Source: `sparse_operation_kit/__init__.py` and its tests, for TensorFlow 1 and 2.
"""

from __future__ import annotations

from collective.compat.framework import Framework, no_effect, refused, same_numbers, works
from collective.compat.names.contrib import CONTRIB
from collective.compat.names.estimator import ESTIMATORS

_HERE = "collective.compat.sok_functions"
_VARIABLES = "collective.compat.sok_variables"

SOK = Framework(
    "sok",
    "SparseOperationKit",
    marks=("sparse_operation_kit",),
    # The second API was first called experiment. The other aliases are where names are defined.
    aliases=tuple(
        (f"sok.{module}", "sok")
        for module in (
            "experiment",
            "distributed_variable",
            "dynamic_variable",
            "lookup",
            "optimizer",
            "dump_load",
            "communication",
            "core.initialize",
            "embeddings.distributed_embedding",
            "embeddings.all2all_dense_embedding",
            "embeddings.tf_distributed_embedding",
            "optimizers.utils",
        )
    ),
    names=(
        works("sok.init", f"{_HERE}.init", "opens scope(embedding_gradients='sum')"),
        works("sok.Variable", f"{_VARIABLES}.Variable", "shape and value are a rank's part"),
        works(
            "sok.DynamicVariable",
            f"{_VARIABLES}.DynamicVariable",
            "first rows are drawn by the same distribution; it grows",
        ),
        works("sok.DistributedVariable", f"{_VARIABLES}.DistributedVariable"),
        works(
            "sok.LocalizedVariable",
            f"{_VARIABLES}.LocalizedVariable",
            "rank k has all rows; all ranks make it",
        ),
        same_numbers("sok.lookup_sparse", f"{_HERE}.lookup_sparse"),
        same_numbers("sok.all2all_dense_embedding", f"{_HERE}.all2all_dense_embedding"),
        works(
            "sok.OptimizerWrapper",
            f"{_HERE}.OptimizerWrapper",
            "the optimizer; Adam, and in TensorFlow 2 each one, moves the rows of the batch",
        ),
        works("sok.SGD", f"{_HERE}.SGD"),
        works("sok.filter_variables", f"{_HERE}.filter_variables"),
        works(
            "sok.dump",
            f"{_HERE}.dump",
            "a checkpoint of TensorFlow's kind, in a session or eagerly",
        ),
        works("sok.load", f"{_HERE}.load", "reads what dump has written here"),
        no_effect(
            "sok.set_comm_tool", "ranks exchange by Horovod.", "collective.compat.no_effect.nothing"
        ),
        works("sok.assign", f"{_HERE}.assign", "all ranks run it"),
        works("sok.export", f"{_HERE}.export", "this rank's keys, ascending"),
        works(
            "sok.sparse_read_and_evict",
            f"{_HERE}.sparse_read_and_evict",
            "evicts none: a table grows",
        ),
        works(
            "sok.incremental_model_dump",
            "collective.compat.sok_rows.incremental_model_dump",
            "of variables in the host's memory",
        ),
        refused("sok.raw_ops", "call the functions of sok."),
        works(
            "sok.tf_version",
            f"{_HERE}.tf_version",
            "of the TensorFlow that the script sees",
            since="0.2.0",
        ),
        # The first API.
        works("sok.Init", f"{_HERE}.Init", "opens scope(embedding_gradients='sum')"),
        works(
            "sok.split_embedding_variable_from_others",
            f"{_HERE}.split_embedding_variable_from_others",
        ),
        no_effect(
            "sok.OptimizerScope",
            "one optimizer updates tables and all else.",
            "collective.compat.no_effect.scope",
        ),
        *(
            works(f"sok.{name}", f"collective.compat.sok_layers.{name}", "a table and its lookup")
            for name in ("DistributedEmbedding", "All2AllDenseEmbedding")
        ),
        refused(
            "sok.TFDistributedEmbedding",
            "make a sok.Variable, and look up rows by sok.all2all_dense_embedding.",
        ),
        *(
            refused(f"{module}.Adam", "use tf.train.AdamOptimizer; in TensorFlow 2 Keras's Adam.")
            for module in ("sok.optimizers", "sok.tf.keras.optimizers")
        ),
        refused(
            "sok.tf.keras.optimizers.lazy_adam.LazyAdamOptimizer",
            "use collective.train.LazyAdamOptimizer; in TensorFlow 2 sok.OptimizerWrapper of Adam.",
        ),
        refused(
            "sok.tf.keras.mixed_precision.LossScaleOptimizer",
            "use tf.keras.mixed_precision.LossScaleOptimizer.",
        ),
        refused("sok.Saver", "use sok.dump and sok.load, or tf.train.Saver."),
        *ESTIMATORS,
        *CONTRIB,
    ),
)
