"""collective.load gives a trained model outside of training; stored code runs only if asked."""

from __future__ import annotations

import re
import sys

import numpy as np
import pytest
import tensorflow.compat.v1 as tf
import tensorflow.compat.v2 as tf2

import collective
from tests.jobs import pool

# The script says so where it is imported.
PROGRAM = """
import sys
import numpy as np
import tensorflow.compat.v1 as tf
import tensorflow.compat.v2 as tf2
import collective
import sizes
from collective.trainer import Batch

print("imported", __name__)

def records():
    ids = np.arange(30) % 10
    return tf2.data.Dataset.from_tensor_slices(({"id": ids}, (ids % 2).astype(np.float32)))

def model_fn(features, labels, mode, params):
    with collective.CollectiveStrategy().embedding_scope():
        table = tf.get_variable("t", [sizes.ROWS, 2])
    score = tf.reduce_sum(tf.nn.embedding_lookup(table, features["id"]), axis=1) * params["scale"]
    if mode == collective.estimator.ModeKeys.PREDICT:
        return collective.estimator.EstimatorSpec(mode, predictions={"score": score})
    loss = tf.reduce_mean(tf.square(score - labels))
    step = tf.train.get_or_create_global_step()
    train = tf.train.AdagradOptimizer(0.1).minimize(loss, global_step=step)
    return collective.estimator.EstimatorSpec(mode, loss=loss, train_op=train)

if __name__ == "__main__":
    with collective.CollectiveStrategy().scope(plan="quiet", save_code=True):
        params = {"scale": 2.0, "global_batch_size": 6}
        trainer = collective.Trainer(model_fn, params, model_dir=sys.argv[1])
    print("trained", trainer.fit(records, records, max_length=Batch(7)).metrics["loss"])
"""


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_a_model_outside_of_training(tmp_path, capfd):
    (tmp_path / "job").mkdir()
    script, folder = tmp_path / "job" / "train.py", str(tmp_path / "model")
    script.write_text(PROGRAM)
    (tmp_path / "job" / "sizes.py").write_text("ROWS = 10\n")
    done = pool.launch("-np", "2", "--device", "cpu", script, folder, timeout=150)
    assert done.returncode == 0, done.stdout
    (tmp_path / "job" / "sizes.py").write_text("ROWS = 99\n")
    loss = float(re.findall("trained (.*)", done.stdout)[0])

    def data():
        ids = np.arange(30) % 10
        return tf2.data.Dataset.from_tensor_slices(({"id": ids}, (ids % 2).astype(np.float32)))

    capfd.readouterr()
    for path in (folder, f"{folder}/best", f"{folder}/model.ckpt-7"):
        model = collective.load(path)
        assert (model.step, model.params["scale"]) == (7, 2.0)
        assert model.metrics["loss"] == pytest.approx(loss)
    with pytest.raises(ValueError, match="run_code=True, which executes the code"):
        next(model.predict(data))
    assert "imported" not in capfd.readouterr().out and "sizes" not in sys.modules
    rows = np.asarray(model.values["t"])

    model = collective.load(f"{folder}/best", run_code=True)
    assert "imported train" in capfd.readouterr().out and "sizes" not in sys.modules
    scores = [float(each["score"]) for each in model.predict(data)]
    np.testing.assert_allclose(scores, 2 * rows[np.arange(30) % 10].sum(1), rtol=1e-5)
    assert model.evaluate(data)["loss"] == pytest.approx(loss, rel=1e-5)

    def own(features, labels, mode):
        with collective.CollectiveStrategy().embedding_scope():
            table = tf.get_variable("t", [10, 2])
        score = tf.reduce_sum(tf.nn.embedding_lookup(table, features["id"]), axis=1)
        return collective.estimator.EstimatorSpec(mode, predictions={"score": score})

    halves = [float(each["score"]) for each in collective.load(folder, model_fn=own).predict(data)]
    np.testing.assert_allclose(np.array(halves) * 2, scores, rtol=1e-5)


def test_what_is_missing_is_named(tmp_path):
    with pytest.raises(ValueError, match="There is no checkpoint"):
        collective.load(str(tmp_path))
    with tf.Graph().as_default(), tf.Session() as session:
        tf.train.get_or_create_global_step()
        session.run(tf.global_variables_initializer())
        path = tf.train.Saver().save(session, str(tmp_path / "model.ckpt"))
    with pytest.raises(ValueError, match="there is no code in"):
        collective.load(path, run_code=True)
    model = collective.load(path)
    assert (model.step, model.metrics, model.params) == (0, {}, {})
