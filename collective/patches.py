"""Everything in TensorFlow that scope() replaces, because TensorFlow has no extension point there.
All of it is listed here.

Entering the outermost scope() puts the replacements in place, leaving it puts the originals back.
"""

from __future__ import annotations

import functools
import logging
from typing import Any, Callable

import horovod.tensorflow as hvd
import tensorflow.compat.v1 as tf
import tensorflow.compat.v2 as tf2
from horovod.tensorflow import functions as hvd_functions
from horovod.tensorflow import mpi_ops
from horovod.tensorflow.gradient_aggregation import LocalGradientAggregationHelper
from keras.src.layers.core import embedding
from keras.src.layers.normalization import batch_normalization
from keras.src.optimizers import optimizer as keras_optimizer
from keras.src.optimizers.legacy import optimizer_v2
from tensorflow.python.client import session as session_lib
from tensorflow.python.eager import backprop
from tensorflow.python.feature_column import feature_column_v2
from tensorflow.python.ops import (
    clip_ops,
    cond_v2,
    gradients_util,
    metrics_impl,
    state_ops,
    variable_scope,
    while_v2,
)
from tensorflow.python.ops import resource_variable_ops as resources
from tensorflow.python.saved_model import builder_impl
from tensorflow.python.summary.writer import writer as writer_lib
from tensorflow.python.training import (
    basic_session_run_hooks,
    checkpoint_utils,
    monitored_session,
    moving_averages,
    optimizer,
    session_manager,
    slot_creator,
    supervisor,
    sync_replicas_optimizer,
    training_util,
    warm_starting_util,
)
from tensorflow.python.training import saver as saver_lib
from tensorflow_estimator.python.estimator import estimator as estimator_lib

from collective import (
    accumulation,
    alike,
    averages,
    clipping,
    control_flow,
    feature_column,
    foreign,
    gradients,
    keras,
    metrics,
    strategies,
    watching,
)
from collective.checkpoint import restoring, saver, saving, warm_start
from collective.ops import communication
from collective.ops.exchange import Wire
from collective.prefetch import choice as prefetch
from collective.profiling import profiler
from collective.ranks import clock, sessions
from collective.serving import export
from collective.tables import room, rules, updates
from collective.tables.creation import is_dynamic, table_getter
from collective.tables.grouping import lookups_of
from collective.tables.table import Sharded

# (owner, attribute, f(original, *args, **kwargs))
Replacement = tuple[Any, str, Callable[..., Any]]


class Patches:
    """Puts the replacements in place and takes them away again; holds what they need to know of the
    strategy.
    """

    def __init__(
        self, embedding: Callable[[], dict[str, Any] | None], option: Callable[[str], Any]
    ):
        self._embedding, self._option = embedding, option
        self._undo: list[Callable[[], None]] = []

    def apply(self) -> None:
        self._undo.append(profiler.finish)
        try:
            for owner, attribute, replacement in self._replacements():
                self._put(owner, attribute, replacement)
            # Hooks that act every so many seconds do so at the same step on every rank.
            self._put_value(basic_session_run_hooks, "time", clock.Clock())
            if communication.rank() > 0:
                self._put_value(writer_lib, "EventFileWriter", NoEvents)
                logger, quiet = tf.get_logger(), _Quiet()
                logger.addFilter(quiet)
                self._undo.append(lambda: logger.removeFilter(quiet))
        except BaseException:
            self.restore()
            raise

    def restore(self) -> None:
        while self._undo:
            self._undo.pop()()

    def _put(self, owner: Any, attribute: str, replacement: Callable[..., Any]) -> None:
        original = getattr(owner, attribute)

        @functools.wraps(original)
        def replaced(*args: Any, **kwargs: Any) -> Any:
            return replacement(original, *args, **kwargs)

        self._put_value(owner, attribute, replaced)

    def _put_value(self, owner: Any, attribute: str, value: Any) -> None:
        own = vars(owner).get(attribute, _ABSENT)
        setattr(owner, attribute, value)
        self._undo.append(
            lambda: delattr(owner, attribute) if own is _ABSENT else setattr(owner, attribute, own)
        )

    def _replacements(self) -> list[Replacement]:
        session, create = session_lib.BaseSession, self._get_variable
        return [
            # Which variables become tables. TensorFlow's own place for a getter is the variable
            # scope that is open now; a scope object captured before, or another graph, would not
            # see it.
            (variable_scope.VariableScope, "get_variable", create),
            # Gradients are reduced where they are taken; updates and slots are the shard's.
            (gradients_util, "_GradientsHelper", self._gradients),
            (optimizer.Optimizer, "apply_gradients", self._apply),
            (backprop.GradientTape, "gradient", self._tape),
            # Keras in a graph: its legacy optimizers have slots of their own making, its Embedding
            # doesn't call tf.get_variable, and its new optimizers would train nothing.
            (optimizer_v2.OptimizerV2, "apply_gradients", self._apply_keras),
            (embedding.Embedding, "add_weight", self._add_weight),
            *(
                (keras_optimizer._BaseOptimizer, name, keras.trains_nothing)
                for name in ("compute_gradients", "apply_gradients")
            ),
            # Horovod's wrappers would reduce once more, its broadcasts would give all ranks rank
            # 0's shards. By functions that it looks up when it needs them: a script may have made a
            # wrapper, or imported its functions, before.
            *(
                (hvd, name, foreign.allreduce)
                for name in ("_allreduce_cond", "_grouped_allreduce_cond")
            ),
            (hvd._DistributedOptimizer, "compute_gradients", foreign.compute_gradients),
            *(
                (optimizer_v2.OptimizerV2, name, foreign.compute_gradients)
                for name in ("get_gradients", "_compute_gradients")
            ),
            *(
                (hvd._DistributedAdasumOptimizer, name, foreign.adasum)
                for name in ("compute_gradients", "apply_gradients")
            ),
            (LocalGradientAggregationHelper, "compute_gradients", foreign.aggregate),
            (hvd_functions, "_make_broadcast_group_fn", foreign.broadcast_group),
            (hvd_functions, "_make_inplace_broadcast_group_fn", foreign.broadcast_groups),
            *(
                (mpi_ops.MPI_LIB, name, foreign.behind_gate)
                for name in (
                    "horovod_allreduce",
                    "horovod_grouped_allreduce",
                    "horovod_allgather",
                    "horovod_grouped_allgather",
                    "horovod_broadcast",
                    "horovod_alltoall",
                    "horovod_reducescatter",
                    "horovod_grouped_reducescatter",
                )
            ),
            (
                sync_replicas_optimizer.SyncReplicasOptimizer,
                "apply_gradients",
                foreign.sync_replicas,
            ),
            # A dynamic table's slots are as open-ended as it is, and nothing goes over all there
            # could be of them.
            (slot_creator, "_create_slot_var", updates.create_slot_var),
            (optimizer, "_get_processor", updates.get_processor),
            (optimizer, "_deduplicate_indexed_slices", gradients.deduplicated),
            *rules.patches(),
            *(
                (module, "indicator_column", feature_column.indicator_column)
                for module in (feature_column_v2, tf.feature_column, tf2.feature_column)
            ),
            *(
                (module, "global_norm", clipping.global_norm)
                for module in (clip_ops, tf, tf.linalg, tf2.linalg)
            ),
            *(
                (module, function.__name__, function)
                for module in (clip_ops, tf, tf2)
                for function in (clipping.clip_by_norm, clipping.clip_by_value)
            ),
            *(
                (module, "clip_by_average_norm", clipping.clip_by_average_norm)
                for module in (clip_ops, tf)
            ),
            # Moving averages are of what all ranks see; a table's is sharded.
            *(
                (module, "assign_moving_average", averages.assign_moving_average)
                for module in (moving_averages, tf2.__internal__.train)
            ),
            (moving_averages.ExponentialMovingAverage, "apply", averages.apply_average),
            *(
                (batch_normalization.BatchNormalizationBase, name, averages.of_layer)
                for name in ("_assign_moving_average", "_assign_new_value")
            ),
            # What a script assigns in a branch or a function, where nothing can be put in front of
            # it later.
            *(
                (owner, name, alike.assign)
                for owner in (
                    resources.ResourceVariable,
                    resources.BaseResourceVariable,
                    resources._UnreadVariable,
                    state_ops,
                    tf,
                )
                for name in ("assign", "assign_add", "assign_sub")
            ),
            *(
                (Sharded, name, alike.assign_table)
                for name in ("assign", "assign_add", "assign_sub")
            ),
            # Iterations of a loop with collectives inside must not run at the same time; branches
            # don't know who takes them.
            (while_v2, "_build_while_op", control_flow.build_while_op),
            (while_v2, "while_loop", control_flow.loop),
            *((cond_v2, name, control_flow.branch) for name in ("cond_v2", "indexed_case")),
            # TensorFlow's own Estimator would train every rank on the same input, and count every
            # record N times.
            (estimator_lib.Estimator, "_call_model_fn", _only_ours),
            # A metric's value is that of all ranks' records, and so is what its update returns.
            *((state_ops, name, metrics.updated) for name in ("assign_add", "scatter_add")),
            (metrics_impl, "_aggregate_across_replicas", metrics.aggregate_across_replicas),
            # Runs are agreed on; a GPU is grown into, and one process uses one.
            (session, "__init__", sessions.with_own_gpu),
            (session, "run", self._run),
            (session, "_extend_graph", self._extend),
            (session, "make_callable", sessions.make_callable),
            (session, "_make_callable_from_options", sessions.make_callable_from_options),
            (session, "partial_run_setup", sessions.partial_run_setup),
            (session, "close", sessions.close),
            (session_lib.Session, "__exit__", sessions.leave),
            (monitored_session._MonitoredSession, "_close_internal", sessions.end),
            (session_manager.SessionManager, "prepare_session", sessions.prepare_session),
            (session_manager.SessionManager, "wait_for_session", sessions.wait_for_session),
            (supervisor.Supervisor, "__init__", sessions.supervise),
            # Every rank writes and reads its shards of a checkpoint; all take the same one for the
            # latest.
            (saver_lib.Saver, "_build", saver.build),
            (saver_lib.Saver, "save", saving.save),
            (saver_lib.Saver, "restore", self._restore),
            (session_manager.SessionManager, "_restore_checkpoint", saver.restore_latest),
            (checkpoint_utils, "_init_from_checkpoint", warm_start.init_from_checkpoint),
            (warm_starting_util, "_infer_var_name", warm_start.infer_name),
            (training_util, "write_graph", saver.write_graph),
            (builder_impl.SavedModelBuilder, "add_meta_graph_and_variables", export.add_graph),
            *(
                (module, "MonitoredTrainingSession", sessions.every_rank_for_itself)
                for module in (monitored_session, tf.train)
            ),
        ]

    def _get_variable(
        self, original: Any, scope: Any, store: Any, name: str, *args: Any, **kwargs: Any
    ) -> Any:
        # [None, D] is a dynamic table wherever it is made: TensorFlow has no such variable.
        options = self._embedding()
        if options is not None or is_dynamic(args[0] if args else kwargs.get("shape")):
            users, ours = (
                kwargs.get("custom_getter") or scope.custom_getter,
                functools.partial(table_getter, **options or {}),
            )
            kwargs["custom_getter"] = ours if users is None else _inside(users, ours)
        return original(scope, store, name, *args, **kwargs)

    def _about_gradients(self) -> gradients.Options:
        wire = {"none": None, "fp16": tf.float16, "bf16": tf.bfloat16}[
            self._option("dense_compression")
        ]
        return gradients.Options(
            self._option("embedding_gradients") == "mean", wire, self._option("local_steps")
        )

    def _tape(self, original: Any, tape: Any, *args: Any, **kwargs: Any) -> Any:
        foreign.take_over(tape)
        return gradients.reduce_tape(self._about_gradients(), original, tape, *args, **kwargs)

    def _apply(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        return gradients.apply_to_shards(
            self._option("local_steps"), rules.together(original), *args, **kwargs
        )

    def _apply_keras(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        return keras.apply_gradients(self._option("local_steps"), original, *args, **kwargs)

    def _add_weight(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        return keras.add_weight(self._embedding(), original, *args, **kwargs)

    def _gradients(self, original: Any, ys: Any, xs: Any, *args: Any, **kwargs: Any) -> Any:
        xs = list(xs) if isinstance(xs, (list, tuple)) else [xs]
        xs = prefetch.stand_ins(tf.get_default_graph(), xs)
        self._group(tf.get_default_graph(), ys, xs)
        return gradients.reduce_gradients(
            functools.partial(original, ys, xs, *args, **kwargs), xs, self._about_gradients()
        )

    def _run(self, original: Any, session: Any, *args: Any, **kwargs: Any) -> Any:
        sessions.name_fetches(session, args[0] if args else kwargs["fetches"])
        self._group(session.graph)
        prefetch.settle(session.graph, self._option("prefetch_keys"))
        with room.told(session.graph):
            return sessions.run(
                watching.of_options(self._option), original, session, *args, **kwargs
            )

    def _extend(self, original: Any, session: Any) -> None:
        """What every run of a session begins with, our own included: it takes no change of what it
        has seen by then.
        """
        # the session has seen all of that; somebody else may add to the graph just now
        if prefetch.is_of_keys():
            return
        self._group(session.graph)
        prefetch.settle(session.graph, self._option("prefetch_keys"))
        original(session)
        # TensorFlow numbers operations from 2
        lookups_of(session.graph).run = session.graph.version + 1

    def _group(self, graph: Any, ys: Any = None, xs: Any = ()) -> None:
        lookups = lookups_of(graph)
        if ys is None:
            alike.settle(graph)
        if self._option("grouping") and lookups.waiting():
            wire = Wire(
                *(
                    tf.as_dtype(self._option(name) or "float32")
                    for name in ("wire_dtype", "gradient_wire_dtype")
                )
            )
            with graph.as_default():
                lookups.group(
                    strategies.backend(), wire, None if ys is None else tf.nest.flatten(ys), xs
                )

    def _restore(self, original: Any, *args: Any, **kwargs: Any) -> None:
        restoring.restore(self._option("missing_slots") == "fresh", original, *args, **kwargs)
        accumulation.restart(kwargs["sess"] if "sess" in kwargs else args[1])


_ABSENT = object()


def _inside(users: Callable[..., Any], ours: Callable[..., Any]) -> Callable[..., Any]:
    """The user's own getter around ours: it may rename or cast, and gets a table from its `getter`."""

    def getter(getter: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return users(functools.partial(ours, getter), *args, **kwargs)

    return getter


def _only_ours(original: Any, estimator: Any, *args: Any, **kwargs: Any) -> Any:
    """`Estimator._call_model_fn`, which each of its methods calls."""
    ours = hasattr(type(estimator), "serving") or hasattr(
        tf.get_default_graph(), "_collective_estimator"
    )
    if communication.size() > 1 and not ours:
        raise TypeError(
            f"{type(estimator).__name__} is TensorFlow's own Estimator: each of the "
            f"{communication.size()} ranks would use all "
            "of the input. Make it with strategy.estimator(model_fn, model_dir, …); of an "
            "estimator that you have, with "
            "strategy.estimator(estimator.model_fn, model_dir, …). (What tf.estimator.add_metrics "
            "returns is one, too: put the "
            "metrics into model_fn.)"
        )
    return original(estimator, *args, **kwargs)


class NoEvents:
    """An `EventFileWriter` that writes nothing: every rank computes its summaries, rank 0 alone
    writes them.
    """

    def __init__(self, logdir: str, *args: Any, **kwargs: Any):
        self._logdir = logdir

    def get_logdir(self) -> str:
        return self._logdir

    def add_event(self, event: Any) -> None:
        pass

    reopen = flush = close = lambda self: None


class _Quiet(logging.Filter):
    """Lets warnings and errors of ranks other than 0 through, but for deprecations, which rank 0
    has told.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        return record.levelno >= logging.WARNING and not str(record.msg).startswith("From %s")
