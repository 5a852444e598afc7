"""Puts modules in the place of `horovod.tensorflow` and its neighbours where Horovod is missing.

They have Horovod's common functions. Everything else of Horovod is an error whose text names it,
and says how to get Horovod.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import sys
import types
from collections.abc import Sequence
from typing import Any

from collective.compat.horovod_stand_in import process

# The modules here that have the names of one of Horovod's.
_MODULES = {
    "horovod": (),
    "horovod.tensorflow": ("process", "reductions", "training"),
}
# What they have for others, or import.
_NAMES = {
    "process": (
        *("init", "shutdown", "is_initialized", "rank", "size", "local_rank", "local_size"),
        *("cross_rank", "cross_size", "is_homogeneous", "global_process_set", "Compression"),
        *("nccl_built", "mpi_built", "mpi_enabled", "mpi_threads_supported", "gloo_built"),
        *("gloo_enabled", "cuda_built", "rocm_built", "ccl_built", "ddl_built"),
        *("Average", "Sum", "Adasum", "Min", "Max", "Product"),
    ),
    "reductions": ("allreduce", "grouped_allreduce", "allgather", "grouped_allgather", "broadcast"),
    "training": (
        *("DistributedOptimizer", "broadcast_variables", "broadcast_global_variables"),
        "BroadcastGlobalVariablesHook",
    ),
}


class Module(types.ModuleType):
    """A module of Horovod's name, with its common functions."""

    def __init__(self, name: str):
        super().__init__(name, "Stands in for a module of Horovod, which isn't installed.")
        self.__path__: list[str] = []  # Its other modules are looked for, and refused by name.
        self.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
        for module in _MODULES[name]:
            found = importlib.import_module(f"collective.compat.horovod_stand_in.{module}")
            vars(self).update((each, getattr(found, each)) for each in _NAMES[module])

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise AttributeError(process.unavailable(f"{self.__name__}.{name}"))


class _Refusal:
    """Finds none of Horovod's other modules, and says why."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        """Refuses a module of Horovod.

        Raises:
            ImportError: it is one.
        """
        if name.startswith("horovod."):
            raise ImportError(process.unavailable(name), name=name)


def install() -> Sequence[str]:
    """Installs the modules if Horovod can't be imported; returns the names of those installed."""
    if not process.missing_horovod() or isinstance(sys.modules.get("horovod"), Module):
        return ()
    modules = {name: Module(name) for name in _MODULES}
    for name, module in modules.items():
        outer, _, attribute = name.rpartition(".")
        if outer:
            setattr(modules[outer], attribute, module)
    sys.modules.update(modules)
    sys.meta_path.insert(0, _Refusal())
    return tuple(modules)


def remove() -> None:
    """Removes them, and what refuses Horovod's other modules."""
    for name in _MODULES:
        if isinstance(sys.modules.get(name), Module):
            del sys.modules[name]
    sys.meta_path[:] = [each for each in sys.meta_path if not isinstance(each, _Refusal)]
