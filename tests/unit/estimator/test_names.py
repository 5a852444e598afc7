"""`collective.estimator` has the names of `tf.estimator`, next to any TensorFlow."""

from __future__ import annotations

import subprocess
import sys

import pytest
import tensorflow.compat.v1 as tf

import collective
from collective import estimator as estimators

# Documented by TensorFlow 2.15 as tf.compat.v1.estimator.
DOCUMENTED = """BaselineClassifier BestExporter DNNClassifier DNNRegressor Estimator EstimatorSpec
EvalSpec Exporter FinalExporter LatestExporter LinearClassifier ModeKeys RunConfig TrainSpec
VocabInfo WarmStartSettings add_metrics experimental export inputs train_and_evaluate""".split()


def test_the_documented_names_are_here():
    assert not [name for name in DOCUMENTED if getattr(estimators, name, None) is None]
    assert {*DOCUMENTED} <= {*dir(estimators)} and collective.estimator is estimators
    assert estimators.export.ServingInputReceiver
    own = getattr(tf, "estimator", None)  # none from TensorFlow 2.16 on
    if own is not None:
        assert own.EstimatorSpec is estimators.EstimatorSpec
        assert {name for name in dir(own) if name[0] != "_"} <= {*dir(estimators)}
    assert estimators.RunConfig is collective.RunConfig


def test_other_names_are_not():
    with pytest.raises(AttributeError, match="collective.estimator.*'EstimatorSpecs'.*has none"):
        estimators.EstimatorSpecs  # noqa: B018


@pytest.mark.slow
def test_a_script_of_another_framework_finds_them_as_tf_estimator(tmp_path):
    program = tmp_path / "script.py"
    program.write_text(
        "from collective.compat.names.deeprec import DEEPREC\n"
        "from collective.compat.script_modules import INSTALLATION\n"
        "import tensorflow\n"
        "for version in (tensorflow.compat.v1, tensorflow):\n"
        "    vars(version).pop('estimator', None)\n"
        "INSTALLATION.add(DEEPREC)\n"
        "import tensorflow as tf\n"
        "from tensorflow import estimator\n"
        "print(estimator is tf.estimator, tf.estimator.EstimatorSpec.__name__)\n"
        "print(tf.estimator.Estimator.__module__)\n"
    )
    done = subprocess.run([sys.executable, program], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout == "True EstimatorSpec\ncollective.compat.estimators\n"
