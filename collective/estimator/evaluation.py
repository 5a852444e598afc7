"""Evaluation by an Estimator on all ranks: metrics that are everyone's, exporters that decide
alike.
"""

from __future__ import annotations

import base64
import contextlib
import pickle
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow.compat.v1 as tf
from tensorflow.python.ops import variables
from tensorflow_estimator.python.estimator import exporter as exporter_lib
from tensorflow_estimator.python.estimator import training

from collective.coordination import barrier
from collective.ops import collectives, gate


def agreed(metrics: dict[str, Any]) -> dict[str, Any]:
    """Rank 0's metrics, once its events are written, if they are everyone's.

    Raises:
        ValueError: a metric differs between ranks.
    """
    mine = base64.b64encode(pickle.dumps(metrics)).decode()
    told = [
        pickle.loads(base64.b64decode(text["metrics"]))
        for text in barrier.exchange(None, "the end of an evaluation", {"metrics": mine})
    ]
    for r, other in enumerate(told):
        for name, value in told[0].items():
            if isinstance(value, bytes):
                if value != other[name]:
                    warnings.warn(
                        f"metric '{name}', a summary, is that of rank 0's share of the records.",
                        stacklevel=4,
                    )
            elif not _close(value, other[name]):
                raise ValueError(
                    f"metric '{name}' is {value} on rank 0 and {other[name]} on rank {r}. The "
                    f"records of all ranks enter the "
                    "metrics of tf.metrics and tf.keras.metrics, whose variables are summed; "
                    "compute this one from such."
                )
    first: dict[str, Any] = told[0]
    return first


def _close(a: Any, b: Any) -> bool:
    a, b = np.asarray(a), np.asarray(b)
    if a.dtype.kind in "fc" and a.shape == b.shape:
        return bool(np.allclose(a, b, rtol=1e-3, atol=1e-6, equal_nan=True))
    return bool(np.array_equal(a, b))


def summing_hooks(values: dict[str, tf.Tensor]) -> list[tf.train.SessionRunHook]:
    """What makes metrics global that aren't yet: before their values are read, their variables are
    summed over ranks.

    `tf.metrics` sums when it reads (see `collective.replication.metrics`); this is for Keras metrics.

    Raises:
        ValueError: such a variable can't be summed.
    """
    if collectives.size() == 1:
        return []
    left: dict[str, Any] = {}
    for name in sorted(values):
        for variable in _unsummed(values[name]):
            if variable.aggregation != tf.VariableAggregation.SUM:
                raise ValueError(
                    f"metric '{name}' reads the variable '{variable.name}', whose "
                    f"values on several ranks cannot "
                    "be summed. Use a metric of tf.metrics, or a Keras metric whose "
                    "variables add up."
                )
            left[variable.name] = variable
    return [_SumBeforeTheEnd([left[name] for name in sorted(left)])] if left else []


def _unsummed(value: tf.Tensor) -> list[Any]:
    """The metric variables that `value` reads as they are on this rank."""
    by_handle = {
        v.handle.op if hasattr(v, "handle") else v.op: v
        for v in tf.get_collection(tf.GraphKeys.METRIC_VARIABLES)
    }
    found, seen, ahead = (
        [],
        set(),
        [value.op if isinstance(value, (tf.Tensor, variables.Variable)) else value],
    )
    while ahead:
        op = ahead.pop()
        if op in seen or collectives.collective_name(op):
            continue
        seen.add(op)
        if op in by_handle:
            found.append(by_handle[op])
        ahead.extend(x.op for x in op.inputs)
    return found


class _SumBeforeTheEnd(tf.train.SessionRunHook):
    """Puts the sums over ranks into variables when an evaluation is over."""

    def __init__(self, states: list[Any]):
        self._states = states

    def begin(self) -> None:
        opened = gate.gates_of(tf.get_default_graph()).beside([v.handle for v in self._states]).zero
        self._sums = []
        for state in self._states:
            name = collectives.unique_name(f"{state.op.name}/metric")
            total = collectives.allreduce_sum([tf.convert_to_tensor(state)], name, opened)[0]
            self._sums.append(state.assign(total, read_value=False))

    def end(self, session: tf.Session) -> None:
        session.run(self._sums)


def is_train_and_evaluate(listeners: Any) -> bool:
    """Whether it is `tf.estimator.train_and_evaluate` that trains, with these listeners."""
    return any(
        isinstance(listener, training._NewCheckpointListenerForEvaluate)
        for listener in listeners or []
    )


def in_step(estimator: Any, listener: Any) -> Any:
    """`listener`, made to evaluate and export alike on all ranks if it is the one of
    `tf.estimator.train_and_evaluate`.
    """
    if isinstance(listener, training._NewCheckpointListenerForEvaluate) and collectives.size() > 1:
        theirs = listener._evaluator
        listener._evaluator = _Evaluator(estimator, theirs._eval_spec, theirs._max_training_steps)
    return listener


class _Evaluator(training._TrainingExecutor._Evaluator):
    """Evaluates and exports what rank 0 finds to be new."""

    _estimator: Any

    def evaluate_and_export(self) -> Any:
        estimator = self._estimator
        found = barrier.exchange(
            None, "looking for a checkpoint", {"latest": estimator.latest_checkpoint()}
        )[0]["latest"]
        self._estimator = _At(estimator, found)
        try:
            return super().evaluate_and_export()
        finally:
            self._estimator = estimator

    def _export_eval_result(self, eval_result: Any, is_the_final_export: bool) -> Any:
        self._estimator = self._estimator.estimator  # exporters get the Estimator itself
        with contextlib.ExitStack() as stack:
            for exporter in self._eval_spec.exporters:
                stack.enter_context(_by_rank_0(exporter))
            return super()._export_eval_result(eval_result, is_the_final_export)


class _At:
    """An Estimator whose latest checkpoint is the one that rank 0 found."""

    def __init__(self, estimator: Any, checkpoint: str | None):
        self.estimator, self._checkpoint = estimator, checkpoint

    def latest_checkpoint(self) -> str | None:
        return self._checkpoint

    def __getattr__(self, name: str) -> Any:
        return getattr(self.estimator, name)


@contextlib.contextmanager
def _by_rank_0(exporter: Any) -> Iterator[None]:
    """Inside, rank 0 alone deletes old exports and reads old results, and tells them to all."""
    own: dict[str, Any] = {}
    if (
        isinstance(exporter, (exporter_lib.LatestExporter, exporter_lib.BestExporter))
        and collectives.rank() > 0
    ):
        own["_garbage_collect_exports"] = lambda folder: None
    if isinstance(exporter, exporter_lib.BestExporter):
        read = exporter._get_best_eval_result
        own["_get_best_eval_result"] = lambda files: barrier.together(
            None,
            f"reading the best result so far for exporter {exporter.name}",
            lambda: read(files) if collectives.rank() == 0 else None,
        )[0]
    for name, value in own.items():
        setattr(exporter, name, value)
    try:
        yield
    finally:
        for name in own:
            delattr(exporter, name)
