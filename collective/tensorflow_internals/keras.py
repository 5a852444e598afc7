"""Keras 2 inside the package `keras`."""

from __future__ import annotations

from keras.src import backend as backend
from keras.src.engine import base_layer_utils as base_layer_utils
from keras.src.engine.training import Model as Model
from keras.src.feature_column.dense_features_v2 import DenseFeatures as DenseFeatures
from keras.src.layers import Embedding as Embedding
from keras.src.layers.normalization.batch_normalization import (
    BatchNormalizationBase as BatchNormalizationBase,
)
from keras.src.metrics import Metric as Metric
from keras.src.mixed_precision.loss_scale_optimizer import LossScaleOptimizer as LossScaleOptimizer
from keras.src.optimizers import optimizer as optimizer
from keras.src.optimizers.legacy import adadelta as adadelta
from keras.src.optimizers.legacy import adagrad as adagrad
from keras.src.optimizers.legacy import adamax as adamax
from keras.src.optimizers.legacy import ftrl as ftrl
from keras.src.optimizers.legacy import gradient_descent as gradient_descent
from keras.src.optimizers.legacy.adam import Adam as Adam
from keras.src.optimizers.legacy.optimizer_v2 import OptimizerV2 as OptimizerV2
