"""`tf.estimator.Estimator` on all ranks (`strategy.estimator`)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, Callable

import numpy as np
import tensorflow.compat.v1 as tf
from tensorflow_estimator.python.estimator import estimator as estimator_lib
from tensorflow_estimator.python.estimator import training
from tensorflow_estimator.python.estimator.mode_keys import ModeKeys

from collective import checkpoint
from collective.checkpoint.layout import ENTRY, FORMAT_ENTRY, StoredTable
from collective.checkpoint.tensor_bundle import Bundle
from collective.coordination import barrier, coordinator
from collective.errors import RankError
from collective.estimator import evaluation, input_sharding, prediction
from collective.estimator.run_config import local_config
from collective.ops import collectives
from collective.ops.graph_state import state_of
from collective.prefetch import enable as prefetch
from collective.replication import metrics
from collective.serving import export
from collective.serving.exporter import Serving


class Estimator(estimator_lib.EstimatorV2):
    """What `strategy.estimator` returns; see there. Made by every rank, and every rank calls its
    methods, in the same order.

    Methods can be called inside `strategy.scope()` and outside of it. All ranks work on one
    model_dir, rank 0 alone writes summaries and events there, and whatever depends on the file
    system or the clock is decided by rank 0. Hooks, listeners and exporters run on every rank. An
    error while a model_fn or an input_fn builds its graph, on any rank, is an error on all.
    """

    serving: Serving | None = None  # while an export builds its graph

    def __init__(
        self,
        scope: Callable[[], Any],
        shard_input: bool,
        model_fn: Any,
        model_dir: Any,
        config: Any,
        params: Any,
        warm_start_from: Any,
    ):
        self._scope, self._shard_input = scope, shard_input
        with scope():
            super().__init__(
                model_fn,
                config=local_config(config, model_dir),
                params=params,
                warm_start_from=warm_start_from,
            )

    @classmethod
    def _assert_members_are_not_overridden(cls, estimator: Any) -> None:
        """TensorFlow has no other way to extend these methods than to override them."""

    # -- what a user calls

    def train(
        self,
        input_fn: Any,
        hooks: Any = None,
        steps: int | None = None,
        max_steps: int | None = None,
        saving_listeners: Any = None,
    ) -> Estimator:
        """`tf.estimator.Estimator.train`. Training stops on all ranks when the first one is out of
        data.

        Args:
            steps: the number of steps that all ranks take together, each with a batch of its own.
        """
        step = estimator_lib._load_global_step_from_checkpoint_dir(self.model_dir)
        with self._together(
            "train", {"steps": steps, "max_steps": max_steps}, step=int(step)
        ) as of_rank_0:
            if max_steps is not None and 0 < max_steps <= of_rank_0["step"] and steps is None:
                tf.logging.info("Skipping training since max_steps has already saved.")
                return self
            if (
                max_steps is not None
                and evaluation.is_train_and_evaluate(saving_listeners)
                and self._deals(input_fn)
            ):
                input_fn = input_sharding.Use(input_fn, passes=collectives.size())
            listeners = [evaluation.in_step(self, listener) for listener in saving_listeners or []]
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
        """`tf.estimator.Estimator.evaluate`. Every record counts once, on whichever rank, and all
        ranks return the same.

        Args:
            steps: the first batches of the input, dealt to all ranks; of each rank's own input if
                it isn't dealt.

        Raises:
            ValueError: a metric isn't the same on all ranks: it isn't made of `tf.metrics` or Keras
                metrics.
        """
        with self._together(
            "evaluate",
            {"steps": steps, "checkpoint_path": checkpoint_path, "name": name},
            latest=self._latest(checkpoint_path),
        ) as of_rank_0:
            if collectives.size() > 1 and steps is not None and steps > 0 and self._deals(input_fn):
                input_fn, steps = input_sharding.Use(input_fn, batches=steps), None
            metrics = super().evaluate(input_fn, steps, hooks, of_rank_0["latest"], name)
            return evaluation.agreed(metrics)

    def predict(
        self,
        input_fn: Any,
        predict_keys: Any = None,
        hooks: Any = None,
        checkpoint_path: str | None = None,
        yield_single_examples: bool = True,
        gather: bool = False,
    ) -> Iterator[Any]:
        """`tf.estimator.Estimator.predict`: this rank's predictions, those of its share of the
        input.

        Every rank must go through them, in step. Where one stops early, it ends for all.

        Args:
            gather: rank 0 gets all predictions, in the order of the input, the other ranks none.
                They are made before predict() returns, and kept in a temporary file (in TMPDIR) of
                rank 0; rank 0 may read as much of them as it likes. An input that isn't dealt comes
                in turn: every rank's first batch, every rank's second….
        """
        if not gather or collectives.size() == 1:
            return self._share(
                input_fn, predict_keys, hooks, checkpoint_path, yield_single_examples
            )
        with self._failure_told("predict"):
            batches = prediction.gather(
                self._share(input_fn, predict_keys, hooks, checkpoint_path, False)
            )
        return (
            (one for batch in batches for one in self._singly(batch))
            if yield_single_examples
            else batches
        )

    def train_and_evaluate(
        self, train_spec: Any, eval_spec: Any
    ) -> tuple[dict[str, Any] | None, list[Any] | None]:
        """`tf.estimator.train_and_evaluate`: trains to `train_spec.max_steps` and evaluates, on all
        ranks, after checkpoints.

        With max_steps, which TensorFlow has as the one stop condition here, any number of ranks
        takes as many steps as one
        process would: an input that is dealt to N ranks, N batches a step, is gone through up to N
            times. (train() ends with
        the input, and so does this if max_steps is None.)

        Args:
            train_spec: `tf.estimator.TrainSpec`.
            eval_spec: `tf.estimator.EvalSpec`. `throttle_secs` are seconds of rank 0's clock.

        Returns:
            (metrics of the last evaluation, what its exporters returned), the same on every rank;
            (None, None) if the model had been trained to max_steps before.
        """
        with self._scope():
            results: tuple[Any, Any] = training.train_and_evaluate(self, train_spec, eval_spec)
            return results

    def export_savedmodel(
        self,
        export_dir_base: Any,
        serving_input_receiver_fn: Any,
        assets_extra: Any = None,
        as_text: bool = False,
        checkpoint_path: Any = None,
        strip_default_attrs: bool = True,
    ) -> Any:
        """`export_saved_model` by its name in TensorFlow 1."""
        return self._export_all_saved_models(
            export_dir_base,
            {ModeKeys.PREDICT: serving_input_receiver_fn},
            assets_extra,
            as_text,
            checkpoint_path,
            strip_default_attrs,
        )

    def get_variable_value(self, name: str) -> Any:
        """`tf.estimator.Estimator.get_variable_value`; of a static table all rows, read here from
        all ranks' parts.

        Raises:
            ValueError: `name` is a dynamic table or a slot of one:
                `collective.checkpoint.read_table` has keys and rows.
        """
        column = self._columns().get(name)
        if column is None:
            return super().get_variable_value(name)
        if column.rows is None:
            raise ValueError(
                f"'{name}' is dynamic, with a row for each key that came: "
                f"collective.checkpoint.read_table('{self.latest_checkpoint()}', "
                f"'{name}') has keys and rows."
            )
        return np.concatenate(
            [rows for _, rows in checkpoint.read_table(self.latest_checkpoint(), name)]
        )

    def get_variable_names(self) -> list[str]:
        """`tf.estimator.Estimator.get_variable_names`; tables and their slots by their own names."""
        columns = self._columns()
        inner = {ENTRY, FORMAT_ENTRY} | (
            Bundle(self.latest_checkpoint()).layout.entries() if columns else set()
        )
        return sorted(
            {*columns, *(name for name in super().get_variable_names() if name not in inner)}
        )

    def _columns(self) -> dict[str, StoredTable]:
        latest = self.latest_checkpoint()
        return Bundle(latest).layout.columns if latest else {}

    # -- what TensorFlow's methods call

    def _call_input_fn(self, input_fn: Any, mode: str, input_context: Any = None) -> Any:
        use = input_fn if isinstance(input_fn, input_sharding.Use) else input_sharding.Use(input_fn)
        call = super()._call_input_fn
        if not self._deals(use.input_fn):
            given = input_sharding.context() if input_sharding.takes_context(use.input_fn) else None
            return _everywhere(
                f"calling input_fn ({mode})", lambda: call(use.input_fn, mode, given)
            )
        with input_sharding.one_order():
            return _everywhere(
                f"calling input_fn ({mode})",
                lambda: input_sharding.deal(call(use.input_fn, mode), use.batches, use.passes),
            )

    def _call_model_fn(self, features: Any, labels: Any, mode: str, config: Any) -> Any:
        call = super()._call_model_fn
        # within which another one's model_fn may be called
        state = state_of(tf.get_default_graph())
        state.estimator = state.estimator or self
        if self.serving is not None:
            return call(features, labels, mode, config)  # an export tells its errors itself
        if mode != ModeKeys.TRAIN:  # may have a train_op all the same
            prefetch.keep_whole(tf.get_default_graph(), f"the graph is for mode {mode!r}")
        return _everywhere(
            f"calling model_fn ({mode})", lambda: call(features, labels, mode, config)
        )

    def _call_model_fn_eval(self, input_fn: Any, config: Any) -> Any:
        scaffold, hooks, input_hooks, update, values = super()._call_model_fn_eval(input_fn, config)
        return (
            scaffold,
            [*(hooks or []), *evaluation.summing_hooks(values)],
            input_hooks,
            metrics.without_sums(update),
            values,
        )

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
            )

    def _create_and_assert_global_step(self, graph: tf.Graph) -> Any:
        if self.serving is not None:
            self.serving.bind(graph)  # before its first variable
        return super()._create_and_assert_global_step(graph)

    # -- ranks

    def _deals(self, input_fn: Any) -> bool:
        return self._shard_input and not input_sharding.takes_context(input_fn)

    def _latest(self, checkpoint_path: str | None) -> str | None:
        found: str | None = checkpoint_path or self.latest_checkpoint()
        return found

    def _share(
        self,
        input_fn: Any,
        predict_keys: Any,
        hooks: Any,
        checkpoint_path: str | None,
        singly: bool,
    ) -> Iterator[Any]:
        """This rank's predictions. While the caller has one in hand, scope() isn't entered."""
        with self._together(
            "predict", {"checkpoint_path": checkpoint_path}, latest=self._latest(checkpoint_path)
        ) as of_rank_0:
            ours = super().predict(input_fn, predict_keys, hooks, of_rank_0["latest"], singly)
        try:
            while True:
                with self._failure_told("predict"), self._scope():
                    try:
                        one = next(ours)
                    except StopIteration:
                        return
                yield one
        finally:
            with self._scope():
                ours.close()

    def _singly(self, batch: Any) -> Iterator[Any]:
        if isinstance(batch, dict):
            return (
                {key: value[i] for key, value in batch.items()}
                for i in range(self._extract_batch_length(batch))
            )
        return iter(batch)

    @contextlib.contextmanager
    def _together(
        self, method: str, alike: dict[str, Any], **mine: Any
    ) -> Iterator[dict[str, Any]]:
        """All ranks call `method` with the arguments `alike`; gives rank 0's `mine`."""
        with self._failure_told(method), self._scope():
            told = barrier.exchange(None, f"Estimator.{method}", {"alike": alike, "mine": mine})
            for r, text in enumerate(told):
                for name, value in told[0]["alike"].items():
                    if text["alike"][name] != value:
                        raise RankError(
                            f"Estimator.{method}: {name} is {value!r} on rank 0 and "
                            f"{text['alike'][name]!r} on "
                            f"rank {r}. Every rank must call it with the same "
                            f"arguments."
                        )
            yield told[0]["mine"]

    @contextlib.contextmanager
    def _failure_told(self, method: str) -> Iterator[None]:
        """Peers that come to wait for this rank hear of an error that they can't know yet, should
        this program survive it.
        """
        try:
            yield
        except (RankError, tf.errors.OutOfRangeError):
            raise
        except Exception as error:
            if collectives.size() > 1 and not getattr(error, "collective_told", False):
                ours = coordinator.instance()
                ours.failure = ours.failure or (
                    coordinator.Membership(0, []),
                    f"Estimator.{method} failed with {type(error).__name__}: {error}",
                )
            raise


def _everywhere(what: str, build: Callable[[], Any]) -> Any:
    """What `build` returns here; an error on one rank is an error on all."""
    made: list[Any] = []
    try:
        barrier.together(None, what, lambda: made.append(build()))
    except Exception as error:
        error.collective_told = True  # type: ignore[attr-defined]
        raise
    return made[0]
