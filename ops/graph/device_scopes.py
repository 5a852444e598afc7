"""Places the library's operations, whatever devices a script is written for.

A script may build its model inside `tf.device("/gpu:0")`, and TensorFlow makes a variable's initial
values, slots and updates next to it. An operation that has no kernel for a GPU must be in neither
place: a session would refuse the graph, or move the table to the CPU.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import tensorflow.compat.v1 as tf


@contextlib.contextmanager
def on(device: str | None) -> Iterator[None]:
    """Places operations that are made inside on `device`; None: TensorFlow chooses."""
    graph = tf.get_default_graph()
    # A variable that is being made colocates its initial value through this attribute.
    colocating = {"_class": None} if "_class" in graph._attr_scope_map else {}
    with (
        graph._attr_scope(colocating),
        graph.colocate_with(None, ignore_existing=True),
        tf.device(device),
    ):
        yield


def anywhere() -> contextlib.AbstractContextManager[None]:
    """Lets TensorFlow choose the devices of operations that are made inside."""
    return on(None)


def on_host() -> contextlib.AbstractContextManager[None]:
    """Places operations that are made inside on the CPU."""
    return on("/cpu:0")


def on_host_like(x: tf.Tensor) -> contextlib.AbstractContextManager[None]:
    """Places operations that are made inside on the CPU if `x` was placed there, else anywhere."""
    is_on_host = tf.DeviceSpec.from_string(x.device).device_type == "CPU"
    return on_host() if is_on_host else anywhere()
