"""Lets an Estimator evaluate on all ranks: metrics are global, and exporters decide the same."""

from __future__ import annotations

import base64
import contextlib
import pickle
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow.compat.v1 as tf

from collective.coordination import barrier
from collective.ops.communication import collectives
from collective.ops.graph import graph_analysis
from collective.replication import metric_reads, metric_states
from collective.tensorflow_internals.estimators import exporter as exporter_lib
from collective.tensorflow_internals.estimators import training


def agreed_metrics(metrics: dict[str, Any]) -> dict[str, Any]:
    """Returns rank 0's metrics, once its events are written, if all ranks have the same.

    Raises:
        ValueError: a metric differs between ranks.
    """
    message = {"metrics": base64.b64encode(pickle.dumps(metrics)).decode()}
    messages = barrier.exchange(None, "the end of an evaluation", message)
    metrics_by_rank = [pickle.loads(base64.b64decode(text["metrics"])) for text in messages]
    first: dict[str, Any] = metrics_by_rank[0]
    for rank, other in enumerate(metrics_by_rank):
        for name, value in first.items():
            if isinstance(value, bytes):
                if value != other[name]:
                    warnings.warn(
                        f"metric '{name}', a summary, covers only rank 0's share of the records.",
                        stacklevel=4,
                    )
            elif not _close(value, other[name]):
                raise ValueError(
                    f"metric '{name}' is {value} on rank 0 and {other[name]} on rank {rank}. The "
                    "metrics of tf.metrics and tf.keras.metrics cover the records of all ranks: "
                    "compute this one from those."
                )
    return first


def _close(a: Any, b: Any) -> bool:
    """Tells whether two values of a metric, each one array or a structure of them, are alike."""
    if tf.nest.is_nested(a) or tf.nest.is_nested(b):
        parts, other_parts = tf.nest.flatten(a), tf.nest.flatten(b)
        return len(parts) == len(other_parts) and all(map(_close, parts, other_parts))
    a, b = np.asarray(a), np.asarray(b)
    if a.dtype.kind in "fc" and a.shape == b.shape:
        return bool(np.allclose(a, b, rtol=1e-3, atol=1e-6, equal_nan=True))
    return bool(np.array_equal(a, b))


def reduce_metrics(values: dict[str, Any]) -> None:
    """Makes the metrics of an evaluation cover all ranks.

    The local variables that a script's own metric reads are states of it, too.

    Args:
        values: the metrics' values, tensors or structures of them, by their names.

    Raises:
        ValueError: the states of a metric on several ranks can't become one.
    """
    if collectives.size() == 1:
        return
    graph = tf.get_default_graph()
    parts_by_metric = {name: tf.nest.flatten(values[name]) for name in sorted(values)}
    for parts in parts_by_metric.values():
        metric_states.note(graph, _local_variables(graph, parts))
    metric_reads.reduce_reads(graph)
    for name, parts in parts_by_metric.items():
        refusal = metric_reads.refusal_of(parts)
        if refusal is not None:
            raise ValueError(f"metric '{name}' is not that of all ranks: {refusal}")


def _local_variables(graph: tf.Graph, values: list[Any]) -> list[Any]:
    """Returns the local variables that `values` read as they are on this rank."""
    elements = [graph.as_graph_element(value) for value in values]
    upstream = graph_analysis.walk(
        [getattr(x, "op", x) for x in elements],
        stop=lambda op: bool(collectives.collective_name(op)),
        control=False,
    )
    return [v for v in tf.local_variables() if graph_analysis.memory(v) in upstream]


def is_train_and_evaluate(listeners: Any) -> bool:
    """Tells by the listeners whether `tf.estimator.train_and_evaluate` trains."""
    return any(
        isinstance(listener, training._NewCheckpointListenerForEvaluate)
        for listener in listeners or []
    )


def evaluated_in_step(estimator: Any, listener: Any) -> Any:
    """Makes the listener of `train_and_evaluate` evaluate and export in the same way on all ranks.

    Returns:
        `listener`, any other one unchanged.
    """
    if isinstance(listener, training._NewCheckpointListenerForEvaluate) and collectives.size() > 1:
        stock = listener._evaluator
        listener._evaluator = RankEvaluator(estimator, stock._eval_spec, stock._max_training_steps)
    return listener


class RankEvaluator(training._TrainingExecutor._Evaluator):
    """Evaluates and exports the checkpoint that rank 0 finds to be new."""

    _estimator: Any

    def evaluate_and_export(self) -> Any:
        estimator = self._estimator
        message = {"latest": estimator.latest_checkpoint()}
        of_rank_0 = barrier.exchange(None, "looking for a checkpoint", message)[0]
        self._estimator = EstimatorAtCheckpoint(estimator, of_rank_0["latest"])
        try:
            return super().evaluate_and_export()
        finally:
            self._estimator = estimator

    def _export_eval_result(self, eval_result: Any, is_the_final_export: bool) -> Any:
        self._estimator = self._estimator.estimator  # exporters get the Estimator itself
        with contextlib.ExitStack() as stack:
            for exporter in self._eval_spec.exporters:
                stack.enter_context(_led_by_rank_0(exporter))
            return super()._export_eval_result(eval_result, is_the_final_export)


class EstimatorAtCheckpoint:
    """Stands for an Estimator, with a latest checkpoint that rank 0 has found."""

    def __init__(self, estimator: Any, checkpoint: str | None):
        self.estimator, self._checkpoint = estimator, checkpoint

    def latest_checkpoint(self) -> str | None:
        return self._checkpoint

    def __getattr__(self, name: str) -> Any:
        return getattr(self.estimator, name)


@contextlib.contextmanager
def _led_by_rank_0(exporter: Any) -> Iterator[None]:
    """Lets only rank 0 delete old exports and read old results, which it sends to all ranks."""
    replaced: dict[str, Any] = {}
    deletes_old = isinstance(exporter, (exporter_lib.LatestExporter, exporter_lib.BestExporter))
    if deletes_old and collectives.rank() > 0:
        replaced["_garbage_collect_exports"] = lambda folder: None
    if isinstance(exporter, exporter_lib.BestExporter):
        read = exporter._get_best_eval_result
        replaced["_get_best_eval_result"] = lambda files: barrier.run_on_all_ranks(
            None,
            f"reading the best result so far for exporter {exporter.name}",
            lambda: read(files) if collectives.rank() == 0 else None,
        )[0]
    for name, method in replaced.items():
        setattr(exporter, name, method)
    try:
        yield
    finally:
        for name in replaced:
            delattr(exporter, name)
