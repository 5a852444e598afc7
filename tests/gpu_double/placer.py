"""Tells where a session would place the operations of a graph on a machine with a GPU.

TensorFlow's placer asks for the names and the types of devices only, and it has its kernels for
GPUs also where there is none.
"""

from __future__ import annotations

import ctypes
import functools
import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import tensorflow.compat.v1 as tf

from collective.ops import kernel_device

_SOURCE = Path(__file__).with_name("placer.cc")
_ROOM = 1 << 24


def use(choice: str) -> None:
    """Has graphs be built from now on as where the kernels' `choice` is 'gpu' or 'cpu'.

    Sessions run them with the emulator's kernels, as `tests.gpu_double.use` does. They must place
    softly: no GPU is there.
    """
    kernel_device.use(_device_operations)
    kernel_device.chosen = lambda: choice


def _device_operations() -> Any:
    from collective.ops.gpu.tensorflow_binding import DeviceOperations
    from tests.kernels.gpu.emulator.bridge import EmulatedBridge

    class PlacedBridge(EmulatedBridge):
        placed, _stream = "/gpu:0", 0

    return DeviceOperations(PlacedBridge())


def devices(graph: tf.Graph) -> dict[str, str]:
    """Returns the types of the devices, 'CPU' or 'GPU', by the operations' names.

    Raises:
        ValueError: a session without soft placement would refuse the graph; TensorFlow's words.
    """
    definition = graph.as_graph_def()
    for of_function in (definition.node, *(f.node_def for f in definition.library.function)):
        for node in of_function:
            node.attr.pop("_kernel", None)  # of the emulator's, which are for CPUs
    serialized = definition.SerializeToString()
    text = ctypes.create_string_buffer(_ROOM)
    length = _library().placer_place(serialized, len(serialized), text, _ROOM)
    if length < 0:
        raise ValueError(text.value.decode())
    assert length < _ROOM
    pairs = (line.split("\t") for line in text.value.decode().splitlines())
    return {name: tf.DeviceSpec.from_string(device).device_type for name, device in pairs}


@functools.cache
def _library() -> ctypes.CDLL:
    flags = [re.sub("^-I", "-isystem", flag) for flag in tf.sysconfig.get_compile_flags()]
    # As TensorFlow itself: containers of its headers are others with assertions.
    options = ["-shared", "-fPIC", "-O1", "-DNDEBUG", "-fvisibility=hidden"]
    with tempfile.TemporaryDirectory() as folder:
        built = Path(folder) / "placer.so"
        command = ["g++", *options, *flags, "-o", built, _SOURCE, *tf.sysconfig.get_link_flags()]
        subprocess.run(command, check=True)
        loaded = ctypes.CDLL(str(built))
    place = loaded.placer_place
    place.argtypes = [ctypes.c_char_p, ctypes.c_size_t, ctypes.c_char_p, ctypes.c_size_t]
    place.restype = ctypes.c_long
    return loaded
