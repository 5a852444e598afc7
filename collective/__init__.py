"""Trains recommendation models on several ranks, with TensorFlow and sharded embedding tables.

A rank is a process, with a GPU of its own or on CPUs. Each rank holds a part of every table's rows
and of every batch. Lookups request rows from their owners by all-to-all. The rest of the model is
replicated. Training takes the same steps on any number of ranks as plain TensorFlow in one process.

Six lines and a command distribute a TensorFlow 1-style script:

    import tensorflow.compat.v1 as tf
    from collective import CollectiveStrategy                      # 1

    strategy = CollectiveStrategy()                                # 2
    with strategy.scope(), tf.Graph().as_default():                # 3
        dataset = strategy.shard(dataset)                          # 4: this rank's records
        dataset = dataset.batch(BATCH // strategy.world_size())    # 5: its part of a batch
        with strategy.embedding_scope():                           # 6
            table = tf.get_variable('user', [1000000, 16])
        ...
    collective launch -np 2 train.py                               # 7

Public names, in short:

    CollectiveStrategy, RunConfig    scopes, ranks, the plan, Estimators, exports
    Trainer, load, InferenceContext, job_info  trains; a trained model; its answers; the job
    get_embedding_variable           makes a table of open-ended keys
    embedding_sizes, clear_embeddings    count the rows of tables, remove those of dynamic ones
    group_embedding_lookup, group_embedding_lookup_sparse    as in DeepRec
    Table, DynamicTable              the tables that scripts get
    TablePolicy, FirstRows, every_steps  what a table keeps, starts from, and when rows go
    EmbeddingVariableOption          the same in DeepRec's words, made of:
    InitializerOption, CheckpointOption  first rows; a checkpoint that has them
    CounterFilter, CBFFilter, GlobalStepEvict, L2WeightEvict  keys admitted, rows evicted
    StorageOption, StorageType, CacheType  where rows are: memory, files; the least recent go first
    EmbeddingConfig                  the same in PERSIA's words
    RankError, ReplicaError, TableError, Preempted  errors, and the end of a preempted job
    collective.feature_column        columns of open-ended keys, groups of columns
    collective.features              PERSIA's slots: tables and embeddings of a file
    collective.data                  reads Parquet, deals items of work; batches; Criteo's logs
    collective.checkpoint            reads, shows and converts checkpoints; increments of them
    collective.keras                 layers and callbacks for Keras's models
    collective.estimator             what tf.estimator has up to TensorFlow 2.15
    collective.serving               follows the versions of an exported model
    collective.train, collective.trainer  optimizers; the units of a Trainer's periods
    collective.options               the options of scope(), typed
    collective.launch, collective.testing  starts ranks: collective launch; tests on ranks

See also: help(collective.CollectiveStrategy) documents every option and error of the scopes;
`collective launch --help all` is the launcher's manual; docs/ covers the whole life of a model.

Importing this package loads no TensorFlow; the first use of a name does.
"""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING, Any

from collective.version import __version__ as __version__

if os.path.isfile(f"{__path__[0]}/launch"):  # a link that git wrote as a text file
    from importlib.util import find_spec

    # An editable install of this checkout finds the folders without the links.
    _origin = getattr(find_spec("collective.launch"), "origin", None)
    if not _origin or not os.path.samefile(_origin, f"{__path__[0]}/../launch/__init__.py"):
        raise ImportError(
            f"launch, ops and strategies in {__path__[0]} are text files instead of links: git has "
            "checked them out with core.symlinks=false, so collective can't import its parts. "
            "Run `git config core.symlinks true` and `git checkout -- collective`, or install the "
            "package with `pip install .` and run programs outside of the checkout."
        )

if TYPE_CHECKING:
    from collective import checkpoint as checkpoint
    from collective import data as data
    from collective import estimator as estimator
    from collective import feature_column as feature_column
    from collective import features as features
    from collective import keras as keras
    from collective import serving as serving
    from collective import testing as testing
    from collective import train as train
    from collective import trainer as trainer
    from collective.compat.deeprec_options import (
        CacheType,
        CBFFilter,
        CheckpointOption,
        CounterFilter,
        EmbeddingVariableOption,
        GlobalStepEvict,
        InitializerOption,
        L2WeightEvict,
        StorageOption,
        StorageType,
    )
    from collective.embedding_variable import (
        clear_embeddings,
        embedding_sizes,
        get_embedding_variable,
    )
    from collective.errors import Preempted, RankError, ReplicaError, TableError
    from collective.estimator.run_config import RunConfig
    from collective.features.embedding_config import EmbeddingConfig
    from collective.group_embedding import group_embedding_lookup, group_embedding_lookup_sparse
    from collective.inference.context import InferenceContext
    from collective.job.info import job_info
    from collective.policy import FirstRows, TablePolicy, every_steps
    from collective.strategy import CollectiveStrategy
    from collective.tables.dynamic_table import DynamicTable
    from collective.tables.table import Table
    from collective.trainer.loaded_model import load
    from collective.trainer.trainer import Trainer

__all__ = [
    "CBFFilter",
    "CacheType",
    "CheckpointOption",
    "CollectiveStrategy",
    "CounterFilter",
    "DynamicTable",
    "EmbeddingConfig",
    "EmbeddingVariableOption",
    "FirstRows",
    "GlobalStepEvict",
    "InferenceContext",
    "InitializerOption",
    "L2WeightEvict",
    "Preempted",
    "RankError",
    "ReplicaError",
    "RunConfig",
    "StorageOption",
    "StorageType",
    "Table",
    "TableError",
    "TablePolicy",
    "Trainer",
    "clear_embeddings",
    "embedding_sizes",
    "every_steps",
    "get_embedding_variable",
    "group_embedding_lookup",
    "group_embedding_lookup_sparse",
    "job_info",
    "load",
]
_MODULES = {
    "CBFFilter": "compat.deeprec_options",
    "CacheType": "compat.deeprec_options",
    "CheckpointOption": "compat.deeprec_options",
    "CollectiveStrategy": "strategy",
    "CounterFilter": "compat.deeprec_options",
    "DynamicTable": "tables.dynamic_table",
    "EmbeddingConfig": "features.embedding_config",
    "EmbeddingVariableOption": "compat.deeprec_options",
    "FirstRows": "policy",
    "GlobalStepEvict": "compat.deeprec_options",
    "InferenceContext": "inference.context",
    "InitializerOption": "compat.deeprec_options",
    "L2WeightEvict": "compat.deeprec_options",
    "Preempted": "errors",
    "RankError": "errors",
    "ReplicaError": "errors",
    "RunConfig": "estimator.run_config",
    "StorageOption": "compat.deeprec_options",
    "StorageType": "compat.deeprec_options",
    "Table": "tables.table",
    "TableError": "errors",
    "TablePolicy": "policy",
    "Trainer": "trainer.trainer",
    "clear_embeddings": "embedding_variable",
    "embedding_sizes": "embedding_variable",
    "every_steps": "policy",
    "get_embedding_variable": "embedding_variable",
    "group_embedding_lookup": "group_embedding",
    "group_embedding_lookup_sparse": "group_embedding",
    "job_info": "job.info",
    "load": "trainer.loaded_model",
}
_SUBMODULES = frozenset(
    {
        "checkpoint",
        "data",
        "estimator",
        "feature_column",
        "features",
        "keras",
        "serving",
        "testing",
        "train",
        "trainer",
    }
)


# Type checkers find the names above; with this function, they would accept any other name, too.
if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        if name in _SUBMODULES:
            return importlib.import_module(f"{__name__}.{name}")
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    if _is_asked_by_help():
        return sorted(globals())
    return sorted([*globals(), *_MODULES, *_SUBMODULES])


def _is_asked_by_help() -> bool:
    """Tells whether pydoc is asking what to document in full.

    In that case help() of this package is the page above, which lists the names: the operators that
    tables inherit from TensorFlow would take 3,000 lines.
    """
    import inspect

    frame = inspect.currentframe()
    while frame is not None and frame.f_globals.get("__name__") in (__name__, "inspect"):
        frame = frame.f_back
    return frame is not None and frame.f_globals.get("__name__") == "pydoc"
