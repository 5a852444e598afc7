"""Puts modules in the place of `horovod.tensorflow` and its neighbours where Horovod is missing.

Scripts of TensorFlow 2 get those of Keras, too, and also where Horovod is installed. They have
Horovod's common functions. Everything else of Horovod is an error whose text names it, and says how
to get Horovod.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import sys
import types
from collections.abc import Sequence
from typing import Any

import tensorflow.compat.v1 as tf

from collective.compat.horovod_stand_in import process

# The modules here that have the names of one of Horovod's.
_MODULES = {
    "horovod": (),
    "horovod.tensorflow": ("process", "compression", "reductions", "training"),
    "horovod.tensorflow.compression": ("compression",),
    "horovod.tensorflow.mpi_ops": ("process", "reductions"),
}
_MODULES_IN_VERSION_2 = {
    "horovod.keras": ("process", "compression", "keras"),
    "horovod.keras.callbacks": ("keras_callbacks",),
    "horovod.tensorflow.keras": ("process", "compression", "keras"),
    "horovod.tensorflow.keras.callbacks": ("keras_callbacks",),
}
# What they have for others, or import.
_NAMES = {
    "process": (
        *("init", "shutdown", "is_initialized", "rank", "size", "local_rank", "local_size"),
        *("cross_rank", "cross_size", "is_homogeneous", "global_process_set"),
        *("nccl_built", "mpi_built", "mpi_enabled", "mpi_threads_supported", "gloo_built"),
        *("gloo_enabled", "cuda_built", "rocm_built", "sycl_built", "ccl_built", "ddl_built"),
        *("Average", "Sum", "Adasum", "Min", "Max", "Product"),
    ),
    "compression": ("Compression", "NoneCompressor", "FP16Compressor"),
    "reductions": ("allreduce", "grouped_allreduce", "allgather", "grouped_allgather", "broadcast"),
    "training": (
        *("DistributedOptimizer", "broadcast_variables", "broadcast_global_variables"),
        *("BroadcastGlobalVariablesHook", "DistributedGradientTape"),
        *("allgather_object", "broadcast_object"),
    ),
    "keras": (
        *("DistributedOptimizer", "allgather", "allreduce", "broadcast"),
        *("broadcast_global_variables", "load_model"),
    ),
    "keras_callbacks": (
        *("BroadcastGlobalVariablesCallback", "MetricAverageCallback"),
        *("LearningRateScheduleCallback", "LearningRateWarmupCallback"),
    ),
}


class Module(types.ModuleType):
    """A module of Horovod's name, with its common functions."""

    def __init__(self, name: str):
        super().__init__(name, "Stands in for a module of Horovod, which isn't installed.")
        self.__path__: list[str] = []  # Its other modules are looked for, and refused by name.
        self.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
        for module in {**_MODULES, **_MODULES_IN_VERSION_2}[name]:
            found = importlib.import_module(f"collective.compat.horovod_stand_in.{module}")
            vars(self).update((each, _as_it_is(getattr(found, each))) for each in _NAMES[module])

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise AttributeError(process.unavailable(f"{self.__name__}.{name}"))


def _as_it_is(member: Any) -> Any:
    """Returns a function that AutoGraph leaves alone in a `tf.function`; anything else as it is."""
    if not isinstance(member, types.FunctionType):
        return member
    return tf.autograph.experimental.do_not_convert(member)


class _Refusal:
    """Finds none of Horovod's other modules, and says why."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        """Refuses a module of Horovod.

        Raises:
            ImportError: it is one.
        """
        if name.startswith("horovod."):
            raise ImportError(process.unavailable(name), name=name)


# What scripts of TensorFlow 2 import, by the names of modules.
_made: dict[str, Module] = {}


def install(for_version_2: bool = False) -> Sequence[str]:
    """Installs the modules if Horovod can't be imported; returns the names of those installed.

    Args:
        for_version_2: whether scripts are of TensorFlow 2. `imported` has the modules for them,
            where Horovod is installed.
    """
    if isinstance(sys.modules.get("horovod"), Module):
        return ()
    is_missing = bool(process.missing_horovod())
    if not is_missing and not for_version_2:
        return ()
    process.STATE.is_in_version_2 = for_version_2
    modules = {
        name: Module(name)
        for name in (*_MODULES, *(_MODULES_IN_VERSION_2 if for_version_2 else ()))
    }
    for name, module in modules.items():
        outer, _, attribute = name.rpartition(".")
        if outer:
            setattr(modules[outer], attribute, module)
    _made.update(modules)
    if not is_missing:
        return ()
    sys.modules.update(modules)
    sys.meta_path.insert(0, _Refusal())
    return tuple(modules)


def imported(name: str, fromlist: Sequence[str]) -> Any:
    """Returns what a script of TensorFlow 2 imports of Horovod.

    Args:
        name: the module's.
        fromlist: the names that are imported from it; if there are none, it is the package.

    Raises:
        ImportError: there is no such module or name.
    """
    for wanted in [name, *(f"{name}.{each}" for each in fromlist if each != "*")]:
        outer, _, attribute = wanted.rpartition(".")
        if wanted not in _made and not hasattr(_made.get(outer), attribute):
            raise ImportError(process.unavailable(wanted), name=wanted)
    return _made[name] if fromlist else _made["horovod"]


def remove() -> None:
    """Removes them, and what refuses Horovod's other modules."""
    for name in _made:
        if isinstance(sys.modules.get(name), Module):
            del sys.modules[name]
    _made.clear()
    process.STATE.is_in_version_2 = False
    sys.meta_path[:] = [each for each in sys.meta_path if not isinstance(each, _Refusal)]
