"""Fills the gaps that TensorFlow from 2.16 on leaves for tensorflow-estimator 2.15, the last.

An Estimator expects of TensorFlow what is gone: coordination with `tf.distribute`, a name for its
exports, embeddings on TPUs. Estimators work without; who uses them is told.
"""

from __future__ import annotations

import importlib
import sys
import types
from importlib import util
from typing import Any, Callable

_OF_TPUS = ("session_support", "tpu_embedding", "tpu_embedding_gradient")


def fill() -> None:
    """Puts stand-ins where this TensorFlow has nothing: next to 2.15 nowhere."""
    _stand_in(
        "tensorflow.python.distribute.estimator_training",
        {
            "should_run_distribute_coordinator": lambda config: False,
            "init_run_config": _refuse_strategy,
            "train_and_evaluate": _refuse_strategy,
            "estimator_train": _refuse_strategy,
            "estimator_evaluate": _refuse_strategy,
        },
    )
    for name in _OF_TPUS:
        _stand_in(f"tensorflow.python.tpu.{name}", {"__getattr__": _class_of_tpus})
    exports: Any = importlib.import_module("tensorflow.python.util.tf_export")
    if not hasattr(exports, "ESTIMATOR_API_NAME"):
        exports.ESTIMATOR_API_NAME = "estimator"
        for attributes, ending in ((exports.API_ATTRS, ""), (exports.API_ATTRS_V1, "_v1")):
            attributes["estimator"] = exports._Attributes(
                f"_estimator_api_names{ending}", f"_estimator_api_constants{ending}"
            )


def _stand_in(name: str, content: dict[str, Callable[..., Any]]) -> None:
    if name in sys.modules or util.find_spec(name) is not None:
        return
    module = types.ModuleType(name, "Stands in for what this TensorFlow no longer has.")
    vars(module).update(content)
    parent, _, last = name.rpartition(".")
    setattr(importlib.import_module(parent), last, module)
    sys.modules[name] = module


def _refuse_strategy(*args: Any) -> None:
    raise NotImplementedError(
        "An Estimator with a strategy of tf.distribute is not supported: this TensorFlow has no "
        "Estimators of its own. Leave train_distribute, eval_distribute and "
        "experimental_distribute out; CollectiveStrategy().scope() distributes the training."
    )


class _OfTpus:
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError(
            f"{type(self).__name__} is not supported: this TensorFlow has no embeddings on TPUs "
            "for Estimators."
        )


def _class_of_tpus(name: str) -> type[_OfTpus]:
    if name.startswith("__"):
        raise AttributeError(name)
    return type(name, (_OfTpus,), {})
