"""Names the optimizers of `tf.train` inside TensorFlow."""

from __future__ import annotations

from tensorflow.python.ops import clip_ops as clip_ops
from tensorflow.python.training import adagrad as adagrad
from tensorflow.python.training import adam as adam
from tensorflow.python.training import ftrl as ftrl
from tensorflow.python.training import gradient_descent as gradient_descent
from tensorflow.python.training import momentum as momentum
from tensorflow.python.training import optimizer as optimizer
from tensorflow.python.training import rmsprop as rmsprop
from tensorflow.python.training.experimental import loss_scale as loss_scale
