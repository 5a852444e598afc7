"""Trains DLRM on clicks by a session: bottom network, interaction, top network.

    COLLECTIVE_STRATEGY=hb collective launch -np 2 modelzoo/dlrm/train.py

Without the launcher it is one rank. The model is that of Naumov et al., Deep Learning
Recommendation Model for Personalization and Recommendation Systems (2019): the bottom network makes
a vector of the counts, the tables one of each id, and the top network takes the products of all
pairs of these vectors.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # this folder and common/ lie there

import tensorflow.compat.v1 as tf

from common import click_session, layers
from common.click_log import CATEGORICAL
from common.click_model import ClickModel, Features, levels
from common.click_options import Defaults

BOTTOM, TOP = (64, 32), (64, 32)


class Dlrm(ClickModel):
    defaults = Defaults(
        "Trains DLRM on clicks, evaluates it, exports it or predicts with it.",
        learning_rates={"adagrad": 0.05, "adam": 0.005, "sgd": 0.1},
        optimizer="adam",
    )

    def logits(self, features: Features) -> tf.Tensor:
        dim = self.options.dim
        counts = layers.network("bottom", levels(features), (*BOTTOM, dim))
        vectors = tf.stack([counts, *self.embedded(features, range(CATEGORICAL), dim)], axis=1)
        top_input = tf.concat([counts, interactions(vectors)], axis=1)
        hidden = layers.network("top", top_input, TOP)
        return tf.squeeze(layers.dense("logit", hidden, 1), axis=1)


def interactions(vectors: tf.Tensor) -> tf.Tensor:
    """Computes the product of each pair of F vectors [B, F, D], once: [B, F (F - 1) / 2]."""
    count = int(vectors.shape[1])
    products = tf.matmul(vectors, vectors, transpose_b=True)
    pairs = [first * count + second for first in range(count) for second in range(first)]
    return tf.gather(tf.reshape(products, [-1, count * count]), pairs, axis=1)


if __name__ == "__main__":
    sys.exit(click_session.main(Dlrm))
