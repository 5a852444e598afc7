"""Names what Estimators are made of, inside tensorflow-estimator.

`api` is what TensorFlow up to 2.15 has as `tf.estimator` (`tf.compat.v1.estimator`). Later ones get
it from here, too: scripts find it where they look for it.
"""

# The gaps are filled before the package is imported.
# ruff: noqa: E402, I001

from __future__ import annotations

from typing import Any

from collective.tensorflow_internals import estimator_gaps

estimator_gaps.fill()

import tensorflow as tf2
import tensorflow.compat.v1 as tf
from tensorflow_estimator.python.estimator.api._v1 import estimator as _api
from tensorflow_estimator.python.estimator.api._v2 import estimator as _api_of_version_2
from tensorflow_estimator.python.estimator import estimator as estimator
from tensorflow_estimator.python.estimator import exporter as exporter
from tensorflow_estimator.python.estimator import run_config as run_config
from tensorflow_estimator.python.estimator import training as training
from tensorflow_estimator.python.estimator.mode_keys import ModeKeys as ModeKeys

api: Any = _api
for _module, _names in ((tf, _api), (tf2, _api_of_version_2)):
    if not hasattr(_module, "estimator"):
        setattr(_module, "estimator", _names)  # noqa: B010 (mypy knows no such attribute)
