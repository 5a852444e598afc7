"""Names what Estimators are made of, inside tensorflow-estimator."""

# The gaps are filled before the package is imported.
# ruff: noqa: E402, I001

from __future__ import annotations

from collective.tensorflow_internals import estimator_gaps

estimator_gaps.fill()

from tensorflow_estimator.python.estimator import estimator as estimator
from tensorflow_estimator.python.estimator import exporter as exporter
from tensorflow_estimator.python.estimator import run_config as run_config
from tensorflow_estimator.python.estimator import training as training
from tensorflow_estimator.python.estimator.mode_keys import ModeKeys as ModeKeys
