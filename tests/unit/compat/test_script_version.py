"""Scripts of TensorFlow 2 are told from those of TensorFlow 1, and get Horovod's names."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from collective.compat import script_version

ROOT = Path(__file__).resolve().parents[3]
LOOP = "import tensorflow as tf\nwith tf.GradientTape() as tape: pass\n"


@pytest.mark.parametrize(
    "text, is_2",
    [
        (LOOP, True),
        ("model.fit(data)", True),
        ("@tf.function\ndef step(): pass", True),
        (f"from absl import app\n{LOOP}app.run(main)", True),
        (f"{LOOP}tf.app.run(main)", False),
        ("f = backend.function([x], [y])", False),
        ("print(hvd.rank())", False),
        (f"{LOOP}tf.compat.v1.disable_eager_execution()", False),
        ("from tensorflow import Session\nmodel.fit(data)", False),
        ("K.set_session(tf.Session())\nmodel.fit(data)", False),
        ("print 'a script of Python 2', tf.GradientTape", False),
        (f"import requests\n{LOOP}requests.Session()", True),
        (f"{LOOP}parser.placeholder", True),
        (f"import tensorflow.compat.v1 as v1\n{LOOP}v1.train.MonitoredTrainingSession()", False),
        (f"from tensorflow.compat.v1 import train\n{LOOP}train.MonitoredTrainingSession()", False),
        (f"{LOOP}class A:\n def f(self): self.tf.Session()", False),
        (f"import tensorflow.keras.backend as KB\n{LOOP}KB.get_session()", False),
        (f"{LOOP}tf.estimator.Estimator(f)", False),
        (f"import boto3 as K\n{LOOP}K.Session()", True),
        ("from tensorflow.compat.v1 import *\nscaler.fit(x)\nwith Session(): pass", False),
        ("scaler.fit(x)\nwith tf.train.Supervisor().managed_session(): pass", False),
        ("model.train_on_batch(x)", True),
    ],
)
def test_by_what_it_names(text, is_2):
    assert script_version.is_2(text) == is_2


def test_modules_next_to_it_and_scripts_of_neither_kind(tmp_path):
    (tmp_path / "training").mkdir()
    (tmp_path / "training" / "steps.py").write_text(f"import main\n{LOOP}")
    (tmp_path / "sessions.py").write_text("tf.Session()")
    main = "from training.steps import step\nstep()"
    assert script_version.is_2(main, tmp_path) and not script_version.is_2(main)
    assert not script_version.is_2(f"import sessions\n{main}", tmp_path)
    for start in ("from training import steps", "from .training import steps"):
        assert script_version.is_2(start, tmp_path)
    (tmp_path / "training" / "__init__.py").write_text("from ..shared import step")
    (tmp_path / "shared.py").write_text(LOOP)
    assert script_version.is_2("import training", tmp_path)
    assert script_version.is_2("from . import steps", Path(), package=tmp_path / "training")
    assert script_version.is_2("print(sok.Variable([[1.0]]))", tmp_path, unless_1=True)
    assert not script_version.is_2("import sessions", tmp_path, unless_1=True)
    assert not script_version.is_2("print 'a script of Python 2'", tmp_path, unless_1=True)


# A package is there in Horovod's place, and only scripts get what stands in for it.
PROGRAM = """
import sys, types
import collective
from collective.compat.horovod_stand_in import process
from collective.compat.script_modules import INSTALLATION
from collective.scope import SCOPES

process.missing_horovod = lambda: ""
sys.modules["horovod"] = real = types.ModuleType("horovod")
sys.modules["horovod.tensorflow"] = real.tensorflow = types.ModuleType("horovod.tensorflow")
INSTALLATION.use_version_2()
import collective.compat.horovod

import horovod.tensorflow as hvd
import horovod.tensorflow.keras as of_keras
from horovod.tensorflow.keras import callbacks
from horovod.tensorflow.keras.callbacks import MetricAverageCallback
import tensorflow as tf
assert tf.executing_eagerly() and tf.__version__ != "1.15.5"
assert hvd is not real.tensorflow and hvd.DistributedGradientTape
assert of_keras.callbacks is callbacks and callbacks.MetricAverageCallback is MetricAverageCallback
assert hvd.mpi_ops.Sum == hvd.Sum and hvd.compression.NoneCompressor is hvd.Compression.none
library = {"__name__": "tensorflow.library"}
exec("import horovod.tensorflow as hvd", library)
assert library["hvd"] is real.tensorflow
for line in ("from horovod.tensorflow import elastic", "import horovod.torch"):
    try:
        exec(line)
    except ImportError as error:
        assert "needs Horovod itself: a script of TensorFlow 2" in str(error), error
    else:
        raise AssertionError(line)
INSTALLATION.remove()
exec("import horovod.tensorflow as hvd")
assert hvd is real.tensorflow
"""


@pytest.mark.matrix
def test_scripts_get_horovods_names_where_it_is_installed(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(PROGRAM)
    done = subprocess.run(
        [sys.executable, script],
        cwd=ROOT,
        env={"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
