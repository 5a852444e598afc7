"""Decides where kernels run and where tables are: in a GPU's memory or in the host's."""

from __future__ import annotations

import functools
import importlib.util
import os
from collections.abc import Callable
from typing import Any

import tensorflow.compat.v1 as tf

CHOICE = "COLLECTIVE_KERNELS"
DYNAMIC = "COLLECTIVE_DYNAMIC_TABLES"
CHOICES = ("auto", "cpu", "gpu")
INJECTED = "injected"
SHARE_OPTION = "gpu_options.per_process_gpu_memory_fraction"
# The share of a GPU's memory that TensorFlow may take, unless the session says otherwise. The rest
# is for CUDA, NCCL and cuDNN.
TENSORFLOW_SHARE = 0.95

_injected: Callable[[], Any] | None = None


def use(make: Callable[[], Any] | None) -> None:
    """Injects operations instead of a GPU's kernels, before the process makes its first graph.

    Args:
        make: makes an object with the compiled operations; None: the environment decides again.
    """
    global _injected
    _injected = make
    injected.cache_clear()


@functools.cache
def injected() -> Any:
    """Returns the injected operations, made at their first use; None if there are none."""
    return None if _injected is None else _injected()


def chosen() -> str:
    """Returns 'cpu' or 'gpu', as the environment says; 'injected' after a call of `use`.

    Raises:
        ValueError, RuntimeError: see `chosen_by_environment`.
    """
    return chosen_by_environment() if _injected is None else INJECTED


@functools.cache
def chosen_by_environment() -> str:
    """Returns 'cpu' or 'gpu', from the environment variable COLLECTIVE_KERNELS.

    Without it, or if it is 'auto', the result is 'gpu' if TensorFlow sees a GPU and CuPy exists.

    Raises:
        ValueError: the variable has another value.
        RuntimeError: it is 'gpu', and TensorFlow sees no GPU.
    """
    choice = os.environ.get(CHOICE, "").lower() or "auto"
    if choice not in CHOICES:
        raise ValueError(
            f"{CHOICE}={choice}: there is no such choice. Known: {', '.join(CHOICES)}."
        )
    if choice == "cpu":
        return choice
    has_gpu = bool(tf.config.list_physical_devices("GPU"))
    if choice == "gpu":
        if not has_gpu:
            raise RuntimeError(
                f"{CHOICE}=gpu, but TensorFlow sees no GPU: look at nvidia-smi, "
                f"CUDA_VISIBLE_DEVICES and tf.config.list_physical_devices(), or leave {CHOICE} out"
            )
        return choice
    if has_gpu and importlib.util.find_spec("cupy") is None:
        tf.logging.warning(
            "TensorFlow sees a GPU, but there is no CuPy: tables stay in the host's memory and are "
            "looked up there. pip install .[gpu] puts them on the GPU; %s=cpu silences this.",
            CHOICE,
        )
        return "cpu"
    return "gpu" if has_gpu else "cpu"


@functools.cache
def let_memory_grow() -> bool:
    """Lets TensorFlow take the GPU's memory as it needs it, where kernels take some, too.

    Eager code would take nearly all at its first operation, and leave none for dynamic tables.

    Returns:
        Whether the memory grows: False if something has run eagerly on the GPU already.
    """
    if chosen() != "gpu":
        return True
    try:
        for gpu in tf.config.list_physical_devices("GPU")[:1]:
            tf.config.experimental.set_memory_growth(gpu, True)
    except RuntimeError:
        return False
    except ValueError:
        pass  # The script has set a limit.
    return True


def on_device(dynamic: bool) -> bool:
    """Tells whether kernels look up and update dynamic tables, or static ones.

    If not, these tables are in the host's memory. Dynamic tables are where static ones are, unless
    the environment variable COLLECTIVE_DYNAMIC_TABLES is 'host' instead of 'gpu': for tables that
    are too large for the GPU's memory.

    Raises:
        ValueError: COLLECTIVE_DYNAMIC_TABLES has another value.
    """
    where = os.environ.get(DYNAMIC, "").lower() or "gpu"
    if where not in ("gpu", "host"):
        raise ValueError(f"{DYNAMIC}={where}: there is no such choice. Known: gpu, host.")
    return chosen() != "cpu" and not (dynamic and where == "host")
