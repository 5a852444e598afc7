"""Models of the zoo train as plain TensorFlow trains them on the global batch."""

import contextlib
import re

import horovod.tensorflow as hvd
import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from common import click_log, click_model, click_options, optimizers
from din.train import Din
from dlrm.train import Dlrm
from features.grouped_embedding.dcnv2.train import DcnV2
from features.grouped_embedding.deepfm.train import DeepFm
from tests.ranks import reference
from two_tower import clicked_items
from two_tower.train import TwoTower

pytestmark = pytest.mark.ranks(1, 3)

STEPS, BATCH, HISTORY = 5, 24, 4
SMALL = ("--dim", "4", "--optimizer", "adagrad")
EXCEPT = r"\bC(?!1\b|14\b)"  # of the tables two are compared
LOG = click_log.generate(200, history=HISTORY).train
OTHERS = {
    "dcnv2": (DcnV2, ()),
    "dcnv2 by columns": (DcnV2, ("--use-feature-columns",)),
    "deepfm": (DeepFm, ()),
    "din": (Din, ("--history", str(HISTORY))),
    "two_tower": (TwoTower, ("--sampled", "20")),
}


def check(strategy, rank, size, monkeypatch, model_class, options, plain_options=None):
    """Compares losses of steps, and variables after them.

    Args:
        model_class: the model.
        options: of its command line.
        plain_options: in plain TensorFlow; None: the same.
    """
    # Random first rows are drawn by the library's own generator.
    monkeypatch.setattr(click_model, "first_rows", lambda: tf.constant_initializer(0.05))
    with_history = model_class is Din
    if model_class is TwoTower:
        rows, table_rows = clicked_items.generate(200).train, clicked_items.TABLE_ROWS
    else:
        rows, table_rows = LOG, click_log.CARDINALITIES
    names = ["dense", "categorical", "label", *(["history"] if with_history else [])]

    def build_with(arguments):
        chosen = click_options.parse(model_class.defaults, [*SMALL, *arguments], 0)

        def build(embedding_scope):
            is_plain = embedding_scope is contextlib.nullcontext
            model = model_class(chosen, table_rows, embedding_scope)
            feeds = {**model.placeholders(), "label": tf.placeholder(tf.float32, [None])}
            with tf.variable_scope(tf.get_variable_scope(), reuse=tf.AUTO_REUSE):
                loss = model.loss(feeds)
            optimizer = optimizers.create(chosen.optimizer, chosen.learning_rate)
            step = tf.train.get_or_create_global_step()
            train_op = optimizer.minimize(loss, global_step=step)
            variables = {
                v.op.name: tf.identity(v)
                for v in tf.trainable_variables()
                if not re.search(EXCEPT, v.op.name)
            }
            mean = tf.identity(loss) if is_plain else hvd.allreduce(loss)
            return {"mean": mean, "train": train_op, "variables": variables}, feeds

        return build

    def runs(part):
        steps = []
        for step in range(STEPS):
            batch = slice(step * BATCH, (step + 1) * BATCH)
            steps.append((["mean", "train"], {name: part(rows[name][batch]) for name in names}))
        return [*steps, (["variables"], {})]

    plain = build_with(options if plain_options is None else plain_options)
    want = reference.plain(plain, runs(lambda batch: batch))
    got = reference.sharded(
        strategy, build_with(options), runs(lambda batch: reference.part(batch, rank, size))
    )
    for step in range(STEPS):
        np.testing.assert_allclose(got[step]["mean"], want[step]["mean"], rtol=2e-5)
    assert want[0]["mean"] != want[-2]["mean"]
    assert set(got[-1]["variables"]) == set(want[-1]["variables"])
    for name, value in want[-1]["variables"].items():
        np.testing.assert_allclose(
            got[-1]["variables"][name], value, rtol=5e-4, atol=2e-5, err_msg=name
        )


@pytest.mark.slow
def test_dlrm(strategy, rank, size, monkeypatch):
    check(strategy, rank, size, monkeypatch, Dlrm, ())


@pytest.mark.matrix
@pytest.mark.sample(2)
@pytest.mark.ranks(3)
@pytest.mark.either_backend
@pytest.mark.parametrize("name", OTHERS)
def test_other_models(strategy, rank, size, monkeypatch, name):
    check(strategy, rank, size, monkeypatch, *OTHERS[name])
