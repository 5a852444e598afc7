"""Names metrics and lookup tables of `tf.metrics` and `tf.lookup` inside TensorFlow."""

from __future__ import annotations

from tensorflow.python.ops import lookup_ops as lookup_ops
from tensorflow.python.ops import metrics_impl as metrics_impl
