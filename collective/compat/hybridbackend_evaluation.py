"""Evaluates a model during its training, as HybridBackend's EvaluationHook does."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import sys
from collections.abc import Iterator
from typing import Any, Callable

import tensorflow.compat.v1 as tf

from collective.ops.communication import collectives
from collective.tensorflow_internals.estimators import ModeKeys
from collective.tensorflow_internals.keras import backend
from collective.tensorflow_internals.variables import variable_scope

# The initializers of iterators, for each evaluation that is being built.
_initializers: list[list[Any]] = []


def make_one_shot_iterator(dataset: Any) -> Any:
    """Makes an iterator; in an evaluation, an iterator that starts again each time."""
    if not _initializers:
        return tf.data.make_one_shot_iterator(dataset)
    return make_initializable_iterator(dataset)


def make_initializable_iterator(dataset: Any, shared_name: str | None = None) -> Any:
    """Makes an iterator with an initializer, which an evaluation runs at its start."""
    iterator = tf.data.make_initializable_iterator(dataset, shared_name)
    if _initializers:
        _initializers[-1].append(iterator.initializer)
    return iterator


@contextlib.contextmanager
def _building() -> Iterator[list[Any]]:
    """Collects the initializers of iterators made inside."""
    _initializers.append([])
    try:
        yield _initializers[-1]
    finally:
        _initializers.pop()


@dataclasses.dataclass
class DefaultNames:
    """Counts the unnamed layers and scopes of a graph: `dense`, `dense_1`; at its start none.

    Attributes:
        layers: the counts of Keras's layers and of `tf.layers`.
        scopes: the counts of variable scopes.
    """

    layers: dict[str, int] = dataclasses.field(default_factory=dict)
    scopes: dict[str, int] = dataclasses.field(default_factory=dict)

    @classmethod
    def now(cls) -> DefaultNames:
        """Returns the counts of the default graph."""
        scopes = variable_scope.get_variable_scope_store().variable_scopes_count
        layers = backend.PER_GRAPH_OBJECT_NAME_UIDS.get(tf.get_default_graph(), {})
        return cls(dict(layers), dict(scopes))

    @contextlib.contextmanager
    def again(self, owner: str) -> Iterator[None]:
        """Counts unnamed layers and scopes from here, and reuses variables by name.

        So an unnamed layer gets the name that it had in training.

        Args:
            owner: who builds an evaluation, for messages.

        Raises:
            ValueError: a trainable variable is made inside.
        """
        graph, known = tf.get_default_graph(), set(tf.trainable_variables())
        counts = backend.PER_GRAPH_OBJECT_NAME_UIDS.pop(graph, None)
        backend.PER_GRAPH_OBJECT_NAME_UIDS[graph] = collections.defaultdict(int, self.layers)
        try:
            with tf.variable_scope(tf.get_variable_scope(), reuse=tf.AUTO_REUSE):
                # The scope restores its counts when it is left.
                scopes = variable_scope.get_variable_scope_store().variable_scopes_count
                scopes.clear()
                scopes.update(self.scopes)
                yield
        finally:
            backend.PER_GRAPH_OBJECT_NAME_UIDS.pop(graph, None)
            if counts is not None:
                backend.PER_GRAPH_OBJECT_NAME_UIDS[graph] = counts
        new = [v.op.name for v in tf.trainable_variables() if v not in known]
        if new:
            raise ValueError(
                f"{owner}: the evaluation makes {', '.join(new)}, which the training doesn't have, "
                "so nothing trains it. Make the same layers as in training, with the same names, "
                "and make a Keras layer once, outside the function."
            )


class EvaluationHook(tf.train.SessionRunHook):
    """Evaluates on all ranks every `every_n_iter` runs of a session; every record counts once.

    Args:
        fn: builds the evaluation with the variables of the training, and returns
            {name: (value, update)}. Unnamed layers and scopes get the names of the training, in the
            same order. Iterators that it makes with `tf.data` start again each time.
        steps: the most batches that each rank evaluates.
        every_n_iter: the number of runs between evaluations.
        summary_dir: where rank 0 writes the values as summaries; None: nowhere.
        history: a list to which the values of each evaluation are appended; None: nothing.

    Raises:
        ValueError: every_n_iter isn't a positive number.
    """

    def __init__(
        self,
        fn: Callable[[], Any],
        steps: int = 100,
        every_n_iter: int = 1000,
        summary_dir: str | None = None,
        history: Any = None,
    ):
        super().__init__()
        if every_n_iter is None or every_n_iter <= 0:
            raise ValueError(f"EvaluationHook(every_n_iter={every_n_iter!r}) is a number from 1.")
        self._fn, self._steps, self._every_n_iter = fn, steps, every_n_iter
        self._summary_dir, self._history, self._runs = summary_dir, history, 0
        self._values: dict[str, Any] = {}
        self._updates: list[Any] = []
        self._start: list[Any] = []

    def begin(self) -> None:
        """Builds the evaluation in the training's graph.

        Raises:
            ValueError: it has variables that the training doesn't have.
        """
        known = set(tf.local_variables())
        with (
            DefaultNames().again("EvaluationHook"),
            tf.name_scope("eval"),
            _building() as initializers,
        ):
            metrics = self._fn()
            self._start = list(initializers)
        new = [variable for variable in tf.local_variables() if variable not in known]
        self._start.append(tf.variables_initializer(new))
        self._values = {name: value for name, (value, _) in metrics.items()}
        self._updates = [update for _, update in metrics.values()]

    def after_run(self, run_context: Any, run_values: Any) -> None:
        """Evaluates if it is time."""
        self._runs += 1
        if self._runs % self._every_n_iter == 0:
            self._evaluate(run_context.session)

    def _evaluate(self, session: Any) -> None:
        session.run(self._start)
        last: dict[str, Any] = {}
        for _ in range(self._steps):
            try:
                last = session.run([self._values, self._updates])[0]
            except tf.errors.OutOfRangeError:
                break
        for name, value in self._values.items():
            # A value that needs a batch belongs to the last one; a metric's value follows all
            # updates.
            with contextlib.suppress(tf.errors.OutOfRangeError):
                last[name] = session.run(value)
        tf.logging.info("evaluation after %d runs: %s", self._runs, last)
        if self._history is not None:
            self._history.append(last)
        if self._summary_dir and collectives.rank() == 0:
            summary = tf.Summary()
            for name, value in last.items():
                summary.value.add(tag=f"eval/{name}", simple_value=float(value))
            writer = tf.summary.FileWriterCache.get(self._summary_dir)
            writer.add_summary(summary, self._runs)
            writer.flush()


def evaluating_where_asked(estimator: Any) -> Any:
    """Returns an Estimator whose `train_and_evaluate` is that of HybridBackend and DeepRec."""
    estimator.train_and_evaluate = functools.partial(_train_and_evaluate, estimator)
    return estimator


def _train_and_evaluate(
    made: Any,
    train_spec: Any,
    eval_spec: Any,
    eval_every_n_iter: int | None = None,
    eval_history: Any = None,
) -> Any:
    """Trains, and evaluates in the training's session at the given interval, if any."""
    hooks = list(train_spec.hooks)
    if eval_every_n_iter is not None:
        hooks.append(
            EvaluationHook(
                lambda: _evaluation(made, eval_spec.input_fn),
                eval_spec.steps or sys.maxsize,
                eval_every_n_iter,
                made.eval_dir(),
                eval_history,
            )
        )
    return made.train(train_spec.input_fn, hooks, max_steps=train_spec.max_steps)


def _evaluation(made: Any, input_fn: Any) -> dict[str, Any]:
    """Builds an Estimator's evaluation; returns its metrics and their updates, by name."""
    inputs = made._call_input_fn(input_fn, ModeKeys.EVAL)
    if hasattr(inputs, "element_spec"):
        inputs = make_initializable_iterator(inputs).get_next()
    features, labels = inputs if isinstance(inputs, tuple) else (inputs, None)
    spec = made._call_model_fn(features, labels, ModeKeys.EVAL, made.config)
    return {"loss": tf.metrics.mean(spec.loss), **(spec.eval_metric_ops or {})}
