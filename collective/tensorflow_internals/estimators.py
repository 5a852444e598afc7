"""Names what Estimators are made of, inside tensorflow-estimator.

`api` is what TensorFlow up to 2.15 has as `tf.estimator` (`tf.compat.v1.estimator`).
"""

# The gaps are filled before the package is imported.
# ruff: noqa: E402, I001

from __future__ import annotations

from typing import Any

from collective.tensorflow_internals import estimator_gaps

estimator_gaps.fill()

from tensorflow_estimator.python.estimator.api._v1 import estimator as _api
from tensorflow_estimator.python.estimator import estimator as estimator
from tensorflow_estimator.python.estimator import exporter as exporter
from tensorflow_estimator.python.estimator import run_config as run_config
from tensorflow_estimator.python.estimator import training as training
from tensorflow_estimator.python.estimator.mode_keys import ModeKeys as ModeKeys

api: Any = _api
