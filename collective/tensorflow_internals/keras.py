"""Finds the package of Keras 2 that `tf.keras` is.

Next to TensorFlow 2.15 it is `keras`, and `tf_keras` where TF_USE_LEGACY_KERAS=1 asks for it; next
to later ones it is `tf_keras`.
"""

from __future__ import annotations

import importlib
import os
from typing import Any

from collective.tensorflow_internals import BRINGS_KERAS_2

_IS_ASKED_FOR = os.environ.get("TF_USE_LEGACY_KERAS") in ("1", "true", "True")
PACKAGE = "keras" if BRINGS_KERAS_2 and not _IS_ASKED_FOR else "tf_keras"

# What Keras 3's models, metrics and optimizers call in a script: (class, method).
KERAS_3: tuple[tuple[Any, str], ...] = ()
if not BRINGS_KERAS_2:
    keras_3 = importlib.import_module("keras")
    KERAS_3 = (
        (keras_3.layers.Layer, "__call__"),
        (keras_3.metrics.Metric, "add_variable"),
        (importlib.import_module("keras.src.optimizers.base_optimizer").BaseOptimizer, "__init__"),
    )


def _module(name: str) -> Any:
    return importlib.import_module(f"{PACKAGE}.src.{name}")


package = importlib.import_module(PACKAGE)
backend = _module("backend")
base_layer_utils = _module("engine.base_layer_utils")
Callback: Any = _module("callbacks").Callback
TerminateOnNaN = _module("callbacks").TerminateOnNaN
LossesContainer = _module("engine.compile_utils").LossesContainer
Layer: Any = package.layers.Layer
Model = _module("engine.training").Model
# By these `Model.save` and `tf.keras.models.save_model` write files.
savers = [_module("saving.saving_lib"), _module("saving.legacy.save")]
pickle_utils = _module("saving.pickle_utils")
tf_utils = _module("utils.tf_utils")
losses_utils = _module("utils.losses_utils")
print_message = _module("utils.io_utils").print_msg
# Models in a graph are of this class.
GraphModel = _module("engine.training_v1").Model
DenseFeatures = _module("feature_column.dense_features_v2").DenseFeatures
Embedding = _module("layers").Embedding
BatchNormalizationBase = _module("layers.normalization.batch_normalization").BatchNormalizationBase
PreprocessingLayer = _module("engine.base_preprocessing_layer").PreprocessingLayer
Metric = _module("metrics").Metric
metrics_utils = _module("utils.metrics_utils")
loss_scale_optimizer = _module("mixed_precision.loss_scale_optimizer")
LossScaleOptimizer = loss_scale_optimizer.LossScaleOptimizer
optimizer = _module("optimizers.optimizer")
adadelta = _module("optimizers.legacy.adadelta")
adagrad = _module("optimizers.legacy.adagrad")
adamax = _module("optimizers.legacy.adamax")
ftrl = _module("optimizers.legacy.ftrl")
gradient_descent = _module("optimizers.legacy.gradient_descent")
legacy_adam = _module("optimizers.legacy.adam")
legacy_nadam = _module("optimizers.legacy.nadam")
rmsprop = _module("optimizers.legacy.rmsprop")
Adam = legacy_adam.Adam
WorkerTrainingState: Any = _module("distribute.worker_training_state").WorkerTrainingState
legacy_optimizer = _module("optimizers.legacy.optimizer_v2")
OptimizerV2 = legacy_optimizer.OptimizerV2
