"""Writes SavedModels by plain TensorFlow, whose answers are known."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import tensorflow.compat.v1 as tf


def write(folder: Any, number: int, width: int = 1) -> str:
    """Writes version `number`: `score` is the sum of `x` [B, width] times `number`.

    It appears complete, as an export's does.

    Returns:
        The version's path.
    """
    os.makedirs(folder, exist_ok=True)
    hidden, path = os.path.join(folder, f"temp-{number}"), os.path.join(folder, str(number))
    with tf.Graph().as_default(), tf.Session() as session:
        x = tf.placeholder(tf.float32, [None, width])
        weights = tf.get_variable("weights", initializer=np.full([width, 1], number, np.float32))
        score = tf.matmul(x, weights)[:, 0]
        session.run(tf.global_variables_initializer())
        tf.saved_model.simple_save(session, hidden, {"x": x}, {"score": score})
    os.rename(hidden, path)
    return path


def write_types(folder: Any, number: int = 1) -> str:
    """Writes a version with inputs of each form and type, and outputs that repeat them.

    Returns:
        The version's path.
    """
    path = os.path.join(folder, str(number))
    with tf.Graph().as_default(), tf.Session() as session:
        inputs = {
            "id": tf.placeholder(tf.int64, [None]),
            "few": tf.placeholder(tf.int32, [None, 2]),
            "number": tf.placeholder(tf.float32, [None]),
            "double": tf.placeholder(tf.float64, [None]),
            "flag": tf.placeholder(tf.bool, [None]),
            "word": tf.placeholder(tf.string, [None]),
            "list": tf.ragged.placeholder(tf.int64, 1, []),
            "sparse": tf.sparse_placeholder(tf.float32, [None, None]),
        }
        outputs = {
            name: tensor * 1 if name in ("id", "few") else tf.identity(tensor)
            for name, tensor in inputs.items()
            if name not in ("list", "sparse")
        }
        outputs["list"] = inputs["list"].with_values(inputs["list"].values + 0)
        outputs["length"] = inputs["list"].row_lengths()
        outputs["total"] = tf.sparse_reduce_sum(inputs["sparse"], axis=1)
        outputs["word_bytes"] = tf.identity(inputs["word"])
        info = tf.saved_model.build_tensor_info
        signatures = {
            "serving_default": tf.saved_model.build_signature_def(
                {name: info(tensor) for name, tensor in inputs.items()},
                {name: info(tensor) for name, tensor in outputs.items()},
                "predict",
            ),
            "words": tf.saved_model.predict_signature_def(
                {"word": inputs["word"]}, {"length": tf.strings.length(inputs["word"])}
            ),
        }
        builder = tf.saved_model.Builder(path)
        builder.add_meta_graph_and_variables(session, ["serve"], signatures)
        builder.save()
    return path
