"""Makes `tf.estimator.Estimator` work on all ranks (`strategy.estimator`)."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Iterator
from typing import Any, Callable

import numpy as np
import tensorflow.compat.v1 as tf

from collective import checkpoint
from collective.checkpoint.files.layout import FORMAT_ENTRY, LAYOUT_ENTRY, StoredTable
from collective.checkpoint.files.tensor_bundle import Bundle
from collective.checkpoint.saving.best import KeepBest
from collective.coordination import barrier, coordinator, test_mode
from collective.coordination.preemption import PREEMPTION
from collective.data import positions
from collective.errors import RankError
from collective.estimator import evaluation, input_sharding, prediction
from collective.estimator.refusal import Builder
from collective.estimator.run_config import increment_hooks, local_config
from collective.monitoring import job_metrics
from collective.monitoring.dealing_check import DealingHook
from collective.monitoring.step_meter import LossHook
from collective.ops.communication import collectives
from collective.ops.graph import graph_state
from collective.prefetch import enable as prefetch
from collective.replication import metrics
from collective.serving import export
from collective.serving.served_checkpoint import ServedCheckpoint
from collective.tensorflow_internals.estimators import ModeKeys, training
from collective.tensorflow_internals.estimators import estimator as estimator_lib


class Estimator(estimator_lib.EstimatorV2):
    """Trains, evaluates, predicts and exports on all ranks; `strategy.estimator` makes it.

    Create it on every rank, and call its methods in the same order, inside or outside
    `strategy.scope()`. All ranks use one model_dir, only rank 0 writes summaries and events there,
    and rank 0 decides everything that depends on the file system or the clock. Hooks, listeners and
    exporters run on every rank. An error while a model_fn or an input_fn builds its graph, on any
    rank, is an error on all.

    Attributes:
        served_checkpoint: set while an export builds its graph.
    """

    served_checkpoint: ServedCheckpoint | None = None
    _export_base: Any = None

    def __init__(
        self,
        scope: Callable[[], Any],
        shard_input: bool,
        model_fn: Any,
        model_dir: Any,
        config: Any,
        params: Any,
        warm_start_from: Any,
        keep_best: KeepBest | None = None,
    ):
        self._scope, self._shard_input, self._keep_best = scope, shard_input, keep_best
        with scope():
            super().__init__(
                model_fn,
                config=local_config(config, model_dir),
                params=params,
                warm_start_from=warm_start_from,
            )

    @classmethod
    def _assert_members_are_not_overridden(cls, estimator: Any) -> None:
        """Allows methods to be overridden, which is the only way to extend them."""

    # -- what a user calls

    def train(
        self,
        input_fn: Any,
        hooks: Any = None,
        steps: int | None = None,
        max_steps: int | None = None,
        saving_listeners: Any = None,
    ) -> Estimator:
        """Trains like `tf.estimator.Estimator.train`, until the first rank runs out of data.

        Args:
            steps: the number of steps that all ranks take together, each with its own batch.
        """
        step = estimator_lib._load_global_step_from_checkpoint_dir(self.model_dir)
        arguments = {"steps": steps, "max_steps": max_steps}
        with self._on_all_ranks("train", arguments, step=int(step)) as of_rank_0:
            if max_steps is not None and 0 < max_steps <= of_rank_0["step"] and steps is None:
                tf.logging.info("Skipping training since max_steps has already saved.")
                return self
            is_train_and_evaluate = evaluation.is_train_and_evaluate(saving_listeners)
            if max_steps is not None and is_train_and_evaluate and self._deals(input_fn):
                input_fn = input_sharding.DealtInput(input_fn, passes=collectives.size())
            listeners = [
                evaluation.evaluated_in_step(self, listener) for listener in saving_listeners or []
            ]
            hooks = [*(hooks or []), *increment_hooks(self.config), DealingHook()]
            hooks += [LossHook()] if job_metrics.is_on() else []
            super().train(input_fn, hooks, steps, max_steps, listeners)
        return self

    def evaluate(
        self,
        input_fn: Any,
        steps: int | None = None,
        hooks: Any = None,
        checkpoint_path: str | None = None,
        name: str | None = None,
    ) -> dict[str, Any]:
        """Evaluates like `tf.estimator.Estimator.evaluate`; all ranks return the same.

        Every record counts once, on whichever rank.

        Args:
            steps: how many of the input's first batches to use. They are dealt to all ranks, or
                taken from each rank's own input if it isn't dealt.

        Raises:
            ValueError: a metric isn't the same on all ranks: it isn't made of `tf.metrics` or Keras
                metrics.
        """
        if test_mode.is_on() and steps != 0:
            steps = 1
        arguments = {"steps": steps, "checkpoint_path": checkpoint_path, "name": name}
        latest = checkpoint_path or self.latest_checkpoint()
        with self._on_all_ranks("evaluate", arguments, latest=latest) as of_rank_0:
            if collectives.size() > 1 and steps is not None and steps > 0 and self._deals(input_fn):
                input_fn, steps = input_sharding.DealtInput(input_fn, batches=steps), None
            metrics = super().evaluate(input_fn, steps, hooks, of_rank_0["latest"], name)
            metrics = evaluation.agreed_metrics(metrics)
            job_metrics.metrics().evaluated(name, metrics)
            best, evaluated = self._keep_best, of_rank_0["latest"] or ""
            is_own = os.path.dirname(evaluated) == os.path.normpath(self.model_dir)
            if best is not None and best.evaluation == name and is_own:
                checkpoint.keep_best(evaluated, metrics, best)
            return metrics

    def predict(
        self,
        input_fn: Any,
        predict_keys: Any = None,
        hooks: Any = None,
        checkpoint_path: str | None = None,
        yield_single_examples: bool = True,
        gather: bool = False,
    ) -> Iterator[Any]:
        """Predicts like `tf.estimator.Estimator.predict`, for this rank's share of the input.

        Every rank must iterate over its predictions, in step. If one stops early, all of them end.

        Args:
            gather: rank 0 gets all predictions, in the order of the input, the other ranks none.
                They are made before predict() returns, and kept in a temporary file (in TMPDIR) of
                rank 0; rank 0 may read any number of them. The batches of an input that isn't dealt
                are interleaved: every rank's first, every rank's second….
        """
        predict = functools.partial(
            self._predict_share, input_fn, predict_keys, hooks, checkpoint_path
        )
        if not gather or collectives.size() == 1:
            return predict(yield_single_examples)
        with self._reports_failure("predict"):
            batches = prediction.gather(predict(False))
        if not yield_single_examples:
            return batches
        return (example for batch in batches for example in self._examples(batch))

    def train_and_evaluate(
        self, train_spec: Any, eval_spec: Any
    ) -> tuple[dict[str, Any] | None, list[Any] | None]:
        """Trains to `train_spec.max_steps`, and evaluates on all ranks after checkpoints.

        It is `tf.estimator.train_and_evaluate`. With max_steps, TensorFlow's only stop condition
        here, any number of ranks takes as many steps as one process would: an input that is dealt
        to N ranks, N batches per step, is used up to N times. (train() ends with the input, and so
        does this method if max_steps is None.)

        Args:
            train_spec: `tf.estimator.TrainSpec`.
            eval_spec: `tf.estimator.EvalSpec`. `throttle_secs` are seconds of rank 0's clock.

        Returns:
            (metrics of the last evaluation, what its exporters returned), the same on every rank;
            (None, None) if the model had been trained to max_steps before.
        """
        with self._scope():
            if test_mode.is_on():
                step = int(estimator_lib._load_global_step_from_checkpoint_dir(self.model_dir))
                train_spec = train_spec._replace(max_steps=step + 1)
            results: tuple[Any, Any] = training.train_and_evaluate(self, train_spec, eval_spec)
            return results

    def export_saved_model(
        self,
        export_dir_base: Any,
        serving_input_receiver_fn: Any,
        assets_extra: Any = None,
        as_text: bool = False,
        checkpoint_path: Any = None,
        experimental_mode: str = ModeKeys.PREDICT,
        base: Any = None,
    ) -> Any:
        """Exports like `tf.estimator.Estimator.export_saved_model`, on all ranks.

        Args:
            base: a version, or a folder of versions, whose equal files are linked; as of
                `collective.CollectiveStrategy.export_saved_model`.
        """
        self._export_base = base
        try:
            return super().export_saved_model(
                export_dir_base,
                serving_input_receiver_fn,
                assets_extra,
                as_text,
                checkpoint_path,
                experimental_mode,
            )
        finally:
            self._export_base = None

    def export_savedmodel(
        self,
        export_dir_base: Any,
        serving_input_receiver_fn: Any,
        assets_extra: Any = None,
        as_text: bool = False,
        checkpoint_path: Any = None,
        strip_default_attrs: bool = True,
    ) -> Any:
        """Exports as `export_saved_model` does; this is its name in TensorFlow 1."""
        return self._export_all_saved_models(
            export_dir_base,
            {ModeKeys.PREDICT: serving_input_receiver_fn},
            assets_extra,
            as_text,
            checkpoint_path,
            strip_default_attrs,
        )

    def get_variable_value(self, name: str) -> Any:
        """Returns a variable's value in the latest checkpoint; for a static table all rows.

        Raises:
            ValueError: `name` is a dynamic table or a slot of one:
                `collective.checkpoint.read_table` has keys and rows.
        """
        stored = self._stored_tables().get(name)
        if stored is None:
            return super().get_variable_value(name)
        if stored.rows is None:
            raise ValueError(
                f"'{name}' is a dynamic table: "
                f"collective.checkpoint.read_table('{self.latest_checkpoint()}', '{name}') has "
                "keys and rows."
            )
        blocks = checkpoint.read_table(self.latest_checkpoint(), name)
        return np.concatenate([rows for _, rows in blocks])

    def get_variable_names(self) -> list[str]:
        """Returns the names in the latest checkpoint, tables and their slots by their own names."""
        stored_tables = self._stored_tables()
        inner = {LAYOUT_ENTRY, FORMAT_ENTRY}
        if stored_tables:
            inner |= Bundle(self.latest_checkpoint()).layout.entries()
        return sorted({*stored_tables, *(set(super().get_variable_names()) - inner)})

    def _stored_tables(self) -> dict[str, StoredTable]:
        latest = self.latest_checkpoint()
        return Bundle(latest).layout.tables if latest else {}

    # -- called by TensorFlow's methods

    def _call_input_fn(self, input_fn: Any, mode: str, input_context: Any = None) -> Any:
        dealt = input_fn
        if not isinstance(input_fn, input_sharding.DealtInput):
            dealt = input_sharding.DealtInput(input_fn)
        call, doing = super()._call_input_fn, f"calling input_fn ({mode})"
        if mode != ModeKeys.TRAIN:
            call = positions.without_positions()(call)
        if not self._deals(dealt.input_fn):
            takes_context = input_sharding.takes_context(dealt.input_fn)
            context = input_sharding.input_context()
            if not takes_context:
                return _on_all_ranks(doing, lambda: call(dealt.input_fn, mode))
            with input_sharding.same_draws():
                return _on_all_ranks(doing, lambda: call(dealt.input_fn, mode, context))

        def build() -> Any:
            return input_sharding.deal(call(dealt.input_fn, mode), dealt.batches, dealt.passes)

        with input_sharding.same_shuffling():
            return _on_all_ranks(doing, build)

    def _call_model_fn(self, features: Any, labels: Any, mode: str, config: Any) -> Any:
        call = super()._call_model_fn
        # This model_fn may call that of another estimator.
        graph_state.of(tf.get_default_graph(), Builder).is_collective_estimator = True
        if self.served_checkpoint is not None:
            return call(features, labels, mode, config)  # an export tells its errors itself
        if mode != ModeKeys.TRAIN:  # may have a train_op all the same
            prefetch.keep_whole(tf.get_default_graph(), f"the graph is for mode {mode!r}")
        return _on_all_ranks(
            f"calling model_fn ({mode})", lambda: call(features, labels, mode, config)
        )

    def _call_model_fn_eval(self, input_fn: Any, config: Any) -> Any:
        scaffold, hooks, input_hooks, update, values = super()._call_model_fn_eval(input_fn, config)
        evaluation.reduce_metrics(values)
        hooks = [*(hooks or []), DealingHook()]
        return scaffold, hooks, input_hooks, metrics.without_sums(update), values

    def _export_all_saved_models(
        self,
        export_dir_base: Any,
        input_receiver_fn_map: Any,
        assets_extra: Any = None,
        as_text: bool = False,
        checkpoint_path: Any = None,
        strip_default_attrs: bool = True,
    ) -> bytes:
        with self._scope():
            return export.from_estimator(
                self,
                super()._export_all_saved_models,
                export_dir_base,
                input_receiver_fn_map,
                assets_extra,
                as_text,
                checkpoint_path,
                strip_default_attrs,
                self._export_base,
            )

    def _create_and_assert_global_step(self, graph: tf.Graph) -> Any:
        if self.served_checkpoint is not None:
            self.served_checkpoint.bind(graph)  # before its first variable
        return super()._create_and_assert_global_step(graph)

    # -- ranks

    def _deals(self, input_fn: Any) -> bool:
        return self._shard_input and not input_sharding.takes_context(input_fn)

    def _predict_share(
        self,
        input_fn: Any,
        predict_keys: Any,
        hooks: Any,
        checkpoint_path: str | None,
        yield_single_examples: bool,
    ) -> Iterator[Any]:
        """Yields this rank's predictions. While the caller has one, scope() isn't entered."""
        arguments = {"checkpoint_path": checkpoint_path}
        latest = checkpoint_path or self.latest_checkpoint()
        with self._on_all_ranks("predict", arguments, latest=latest) as of_rank_0:
            predictions = super().predict(
                input_fn, predict_keys, hooks, of_rank_0["latest"], yield_single_examples
            )
        try:
            while True:
                with self._reports_failure("predict"), self._scope():
                    try:
                        prediction = next(predictions)
                    except StopIteration:
                        return
                yield prediction
        finally:
            with self._scope():
                predictions.close()

    def _examples(self, batch: Any) -> Iterator[Any]:
        """Yields the predictions for each example of a batch."""
        if isinstance(batch, dict):
            return (
                {key: value[i] for key, value in batch.items()}
                for i in range(self._extract_batch_length(batch))
            )
        return iter(batch)

    @contextlib.contextmanager
    def _on_all_ranks(
        self, method: str, arguments: dict[str, Any], **values: Any
    ) -> Iterator[dict[str, Any]]:
        """Enters scope() for `method`, which all ranks must call with the same arguments.

        Args:
            method: its name.
            arguments: by name.
            values: of this rank.

        Yields:
            rank 0's `values`.
        """
        PREEMPTION.raise_if_decided()
        with self._reports_failure(method), self._scope():
            messages = barrier.exchange(
                None, f"Estimator.{method}", {"alike": arguments, "mine": values}
            )
            for rank, message in enumerate(messages):
                for name, value in messages[0]["alike"].items():
                    if message["alike"][name] != value:
                        raise RankError(
                            f"Estimator.{method}: {name} is {value!r} on rank 0 and "
                            f"{message['alike'][name]!r} on rank {rank}. Every rank must call it "
                            "with the same arguments."
                        )
            yield messages[0]["mine"]

    @contextlib.contextmanager
    def _reports_failure(self, method: str) -> Iterator[None]:
        """Notes an error for peers that will wait for this rank, in case this program survives it.

        Peers that next meet or run with this rank are told of the error.
        """
        try:
            yield
        except (RankError, tf.errors.OutOfRangeError):
            raise
        except Exception as error:
            if collectives.size() > 1 and not getattr(error, "collective_told", False):
                process_coordinator = coordinator.instance()
                process_coordinator.failure = process_coordinator.failure or (
                    coordinator.Membership(0, []),
                    f"Estimator.{method} failed with {type(error).__name__}: {error}",
                )
            raise


def _on_all_ranks(doing: str, build: Callable[[], Any]) -> Any:
    """Returns what `build` returns here; an error on one rank is an error on all."""
    built: list[Any] = []
    try:
        barrier.run_on_all_ranks(None, doing, lambda: built.append(build()))
    except Exception as error:
        error.collective_told = True  # type: ignore[attr-defined]
        raise
    return built[0]
