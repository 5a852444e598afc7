"""Defines HybridBackend's functions, with its names and signatures.

One strategy serves the whole process. `hb.scope()` is its scope(); `hb.embedding_scope()` and
`hb.scope(sharding=True)` are its embedding_scope().
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import tensorflow.compat.v1 as tf

from collective.compat import hybridbackend_evaluation
from collective.compat.framework import say_once
from collective.coordination.prepared_run import EndOfData
from collective.ops.communication import collectives
from collective.ops.graph import graph_state
from collective.scope import SCOPES
from collective.strategy import CollectiveStrategy


@functools.cache
def strategy() -> Any:
    """Returns the process's strategy."""
    return CollectiveStrategy()


# Options that don't change numbers here, or have no effect at all.
_IDLE = frozenset(
    {
        "batch_size",
        "comm_default",
        "comm_pool_capacity",
        "comm_pool_name",
        "keep_checkpoint_every_n_hours",
        "keep_checkpoint_max",
        "mode",
        "model_dir",
        "pipeline_dense_ga_enabled",
        "use_hierarchical_embedding_lookup",
    }
)
# Options that would change numbers, with the only value that has no effect, and what to do
# instead.
_REFUSED = {
    "data_batch_count": (1, "scope(local_steps=k) makes one update of k batches"),
    "comm_wire_dtype": (None, "scope(wire_dtype=…) says in which type rows travel"),
    "comm_gradient_wire_dtype": (
        None,
        "scope(gradient_wire_dtype=…) says in which type gradients travel",
    ),
    "grad_lazy_sync": (
        False,
        "gradients are means over ranks where they are taken, before they are clipped",
    ),
}
_REMAINDER = "data_sync_drop_remainder"


def _use(owner: str, name: str, value: Any) -> None:
    """Reports that an option has no effect, or refuses it.

    Raises:
        NotImplementedError: it would change numbers, or is unknown.
    """
    if name in _REFUSED:
        neutral, way = _REFUSED[name]
        if value not in (neutral, None):
            raise NotImplementedError(
                f"{owner}.{name} = {value!r} is not supported: {way}. Leave it out."
            )
    elif name == _REMAINDER:
        if value is False:
            graph_state.of(tf.get_default_graph(), EndOfData).needs_all = (
                f"{owner}.{_REMAINDER} = False asks for all data, and training here ends with the "
                "first rank that is out of data. Give every rank the same number of batches "
                "(dataset.repeat() and a StopAtStepHook do), or leave the option out"
            )
    elif name in _IDLE:
        say_once(f"{owner}.{name} has no effect here: it tunes HybridBackend")
    else:
        raise NotImplementedError(
            f"{owner}.{name} is not supported: the options are {', '.join(OPTIONS)}."
        )


OPTIONS = sorted({*_IDLE, *_REFUSED, _REMAINDER, "sharding"})


class Options:
    """Accepts HybridBackend's tuning options, as `hb.context.options` does."""

    def __setattr__(self, name: str, value: Any) -> None:
        """Reports once that the option has no effect, or refuses it."""
        _use("hb.context.options", name, value)

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
        """Returns 1: each rank is a separate process."""
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
        """Returns the object that accepts options, which have no effect."""
        return Options()

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"hb.context.{name} is not supported: ranks know each other by "
            "hb.context.rank and hb.context.world_size, and nothing else of the cluster."
        )

    @classmethod
    def get(cls) -> Context:
        """Returns the process's context."""
        return CONTEXT


CONTEXT = Context()


@contextlib.contextmanager
def scope(sharding: bool = False, **options: Any) -> Iterator[Any]:
    """Opens scope(), and with `sharding` an embedding_scope() in it.

    Args:
        sharding: whether to shard the variables that are made inside.
        options: those of `hb.context.options`. Tuning options have no effect. If ranks have
            different numbers of batches, `data_sync_drop_remainder=False` is an error once the
            first rank is out of data.

    Raises:
        NotImplementedError: an option would change numbers, or is unknown.
    """
    for name, value in options.items():
        _use("hb.scope", name, value)
    with contextlib.ExitStack() as scopes:
        if not SCOPES.is_open:
            scopes.enter_context(strategy().scope())
        if sharding:
            scopes.enter_context(strategy().embedding_scope())
        yield CONTEXT


def embedding_scope(**options: Any) -> Any:
    """Opens embedding_scope(), in a scope()."""
    return scope(**{"sharding": True, **options})


def compute_pipeline() -> Any:
    """Leaves a function unchanged: HybridBackend calls it once per batch; here there is one."""
    return lambda inner: inner


def function(**params: Any) -> Any:
    """Makes a function run in `scope(**params)`."""

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
    """Exports a checkpoint: `CollectiveStrategy.export_saved_model`; `mode` has no effect."""
    kwargs.pop("mode", None)
    path: str = strategy().export_saved_model(
        export_dir_base, checkpoint_path, signature_def_fn, *args, **kwargs
    )
    return path


def estimator(model_fn: Any, model_dir: Any = None, **kwargs: Any) -> Any:
    """Makes an Estimator of all ranks: `CollectiveStrategy.estimator`.

    Evaluations count every record, whatever `eval_drop_remainder` and `predict_drop_remainder` say.

    Raises:
        NotImplementedError: `train_drop_remainder` is False.
    """
    for name in ("eval_drop_remainder", "predict_drop_remainder"):
        kwargs.pop(name, None)
    if not kwargs.pop("train_drop_remainder", True):
        raise NotImplementedError(
            "hb.estimator.Estimator(train_drop_remainder=False) is not supported: the records of "
            "an input_fn are dealt to the ranks. Leave it out."
        )
    made = strategy().estimator(model_fn, model_dir, **kwargs)
    return hybridbackend_evaluation.evaluating_where_asked(made)


def train_and_evaluate(estimator: Any, train_spec: Any, eval_spec: Any, **evaluation: Any) -> Any:
    """Trains and evaluates like the method of an `hb.estimator.Estimator`."""
    return estimator.train_and_evaluate(train_spec, eval_spec, **evaluation)
