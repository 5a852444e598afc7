"""Lists what is replaced of `tf.distribute`, and of what counts replicas."""

from __future__ import annotations

import tensorflow
import tensorflow.compat.v1 as tf
import tensorflow.compat.v2 as tf2

from collective.interception.patching import Patch, ReplacedValue
from collective.tensorflow_internals.graphs import distribute_lib, summary_op_util
from collective.tensorflow_internals.keras import OptimizerV2
from collective.tensorflow_internals.keras import optimizer as keras_optimizer
from collective.wrappers import distribution

TWO_STRATEGIES = "TensorFlow would say that variables are not of its strategy."
DIVIDED_TWICE = "A mean over ranks would be divided by the samples of all ranks."
ONE_REPLICA = "It would be of this rank's batch only, without a word."
SUMMED_ALREADY = "It would be refused: nobody could tell that it is of gradients."
DISTRIBUTION = (
    *(
        Patch(owner, f"{name}.Strategy.scope", distribution.scope, TWO_STRATEGIES)
        for owner, name in (
            (tf.distribute.Strategy, "tf.distribute"),
            (tf2.distribute.Strategy, "tf2.distribute"),
        )
    ),
    *(
        Patch(
            owner,
            f"{name}.nn.compute_average_loss",
            distribution.compute_average_loss,
            DIVIDED_TWICE,
        )
        for owner, name in ((tf.nn, "tf"), (tf2.nn, "tf2"), (tensorflow.nn, "tensorflow"))
    ),
    Patch(
        distribute_lib.ReplicaContextBase,
        "tf.distribute.ReplicaContext.all_reduce",
        distribution.all_reduce,
        ONE_REPLICA,
    ),
    Patch(
        tf2.distribute.ReplicaContext,
        "tf.distribute.ReplicaContext.all_gather",
        distribution.all_gather,
        ONE_REPLICA,
    ),
    # Keras's steps have a context of the first class, by Strategy.run.
    *(
        ReplacedValue(
            owner,
            f"{name}.replica_id_in_sync_group",
            property(distribution.replica_id),
            ONE_REPLICA,
        )
        for owner, name in (
            (distribute_lib.ReplicaContextBase, "tf.distribute.ReplicaContext"),
            (distribute_lib._DefaultReplicaContext, "distribute_lib._DefaultReplicaContext"),
        )
    ),
    Patch(
        summary_op_util,
        "summary_op_util.skip_summary",
        distribution.skip_summary,
        "Ranks would build different graphs.",
    ),
    Patch(
        OptimizerV2,
        "tf.keras.optimizers.legacy.Optimizer._aggregate_gradients",
        distribution.aggregate_gradients,
        SUMMED_ALREADY,
    ),
    Patch(
        keras_optimizer.Optimizer,
        "tf.keras.optimizers.Optimizer.aggregate_gradients",
        distribution.aggregate_gradients,
        SUMMED_ALREADY,
    ),
)
