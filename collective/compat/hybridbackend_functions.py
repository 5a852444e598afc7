"""Defines HybridBackend's functions, by its names and signatures.

One strategy serves the process. `hb.scope()` is its scope(), `hb.embedding_scope()` and
`hb.scope(sharding=True)` its embedding_scope().
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import tensorflow.compat.v1 as tf

from collective.compat.framework import say_once
from collective.ops import collectives
from collective.scope import SCOPES
from collective.strategy import CollectiveStrategy


@functools.cache
def strategy() -> Any:
    """Returns the process's strategy."""
    return CollectiveStrategy()


class Options:
    """Takes what tunes HybridBackend, as `hb.context.options` does."""

    def __setattr__(self, name: str, value: Any) -> None:
        """Says once that it has no effect."""
        say_once(f"hb.context.options.{name} has no effect here: it tunes HybridBackend")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return None


class Context:
    """Tells ranks apart, as `hb.context` does."""

    @property
    def world_size(self) -> int:
        """Returns N, the number of ranks."""
        strategy()
        return collectives.size()

    @property
    def rank(self) -> int:
        """Returns this rank."""
        strategy()
        return collectives.rank()

    @property
    def local_world_size(self) -> int:
        """Returns 1: a rank is a process of its own."""
        return 1

    @property
    def is_chief(self) -> bool:
        """Tells whether this is rank 0."""
        return self.rank == 0

    @property
    def num_gpus(self) -> int:
        """Returns the number of GPUs that this rank has."""
        return len(tf.config.experimental.list_physical_devices("GPU"))

    @property
    def has_gpu(self) -> bool:
        """Tells whether this rank has a GPU."""
        return self.num_gpus > 0

    @property
    def options(self) -> Options:
        """Returns what takes options, which have no effect."""
        return Options()

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"hb.context.{name} is not supported: ranks know each other by "
            "hb.context.rank and hb.context.world_size, and nothing else of the cluster."
        )

    @classmethod
    def get(cls) -> Context:
        """Returns the process's."""
        return CONTEXT


CONTEXT = Context()


@contextlib.contextmanager
def scope(sharding: bool = False, **options: Any) -> Iterator[Any]:
    """Opens scope(), or with `sharding` embedding_scope() in it. Tuning has no effect."""
    idle = sorted(name for name, value in options.items() if value is not None)
    if idle:
        say_once(f"hb.scope({', '.join(idle)}) has no effect here: it tunes HybridBackend")
    with contextlib.ExitStack() as scopes:
        if not SCOPES.is_open:
            scopes.enter_context(strategy().scope())
        if sharding:
            scopes.enter_context(strategy().embedding_scope())
        yield CONTEXT


def embedding_scope(**options: Any) -> Any:
    """Opens embedding_scope(), in a scope()."""
    return scope(**{"sharding": True, **options})


def function(**params: Any) -> Any:
    """Decorates a function that runs in `scope(**params)`."""

    def decorated(inner: Any) -> Any:
        @functools.wraps(inner)
        def call(*args: Any, **kwargs: Any) -> Any:
            with scope(**params):
                return inner(*args, **kwargs)

        return call

    return decorated


def export(
    export_dir_base: str, checkpoint_path: str, signature_def_fn: Any, *args: Any, **kwargs: Any
) -> str:
    """Exports a checkpoint: `CollectiveStrategy.export_saved_model`."""
    kwargs.pop("mode", None)
    path: str = strategy().export_saved_model(
        export_dir_base, checkpoint_path, signature_def_fn, *args, **kwargs
    )
    return path


def estimator(model_fn: Any, model_dir: Any = None, **kwargs: Any) -> Any:
    """Makes an Estimator of all ranks: `CollectiveStrategy.estimator`."""
    made = strategy().estimator(model_fn, model_dir, **kwargs)
    own = made.train_and_evaluate

    def train_and_evaluate(train_spec: Any, eval_spec: Any, **evaluation: Any) -> Any:
        idle = sorted(name for name, value in evaluation.items() if value is not None)
        if idle:
            say_once(
                f"train_and_evaluate({', '.join(idle)}) has no effect here: evaluations come after "
                "checkpoints; RunConfig(save_checkpoints_steps=…) says when"
            )
        return own(train_spec, eval_spec)

    made.train_and_evaluate = train_and_evaluate
    return made


def train_and_evaluate(estimator: Any, train_spec: Any, eval_spec: Any, **evaluation: Any) -> Any:
    """Trains and evaluates, as the estimator's method does."""
    return estimator.train_and_evaluate(train_spec, eval_spec, **evaluation)
