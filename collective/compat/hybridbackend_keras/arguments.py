"""Reads the arguments of `hb.keras.Model`: which work, which have no effect, which are refused."""

from __future__ import annotations

from typing import Any

import tensorflow.compat.v1 as tf

from collective.compat.framework import say_once
from collective.tensorflow_internals.keras import package as keras

# Arguments of Keras's functions that mean something else here, or nothing: the values that a script
# may pass, and what to do instead of the others.
_REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "y": ((None,), "x is a dataset of (features, labels)"),
    "callbacks": ((None, [], ()), "use monitor and save_best_only, or train in a session"),
    "validation_split": ((0, None), "give validation_data"),
    "class_weight": ((None,), "weigh samples in the loss"),
    "sample_weight": ((None,), "weigh samples in the loss"),
    "loss_weights": ((None,), "weigh the loss in its function"),
    "sample_weight_mode": ((None,), "weigh samples in the loss"),
    "weighted_metrics": ((None, [], ()), "give metrics"),
    "target_tensors": ((None,), "fit takes a dataset of (features, labels)"),
    "distribute": ((None,), "hb.scope() distributes"),
    "run_eagerly": ((None, False), "models train in graphs"),
    "clipnorm": ((None,), "clip gradients by an optimizer of Keras"),
    "clipvalue": ((None,), "clip gradients by an optimizer of Keras"),
    "train_drop_remainder": (
        (None, True),
        "training ends when the first rank is out of data. Leave it out",
    ),
}
_IDLE = {
    "batch_size": "a dataset has batches of its own",
    "shuffle": "a dataset is shuffled by `shuffle()`",
    "max_queue_size": "datasets prefetch by `prefetch()`",
    "workers": "datasets prefetch by `prefetch()`",
    "use_multiprocessing": "datasets prefetch by `prefetch()`",
    "experimental_run_tf_function": "models train in graphs",
    "eval_drop_remainder": "every record counts",
    "predict_drop_remainder": "every record counts",
}
UNSUPPORTED = (
    *("get_weights", "set_weights", "save_weights", "save", "to_yaml"),
    *("train_on_batch", "test_on_batch", "predict_on_batch"),
    *("fit_generator", "evaluate_generator", "predict_generator"),
)


def use(function: str, arguments: dict[str, Any]) -> None:
    """Refuses arguments that would change numbers, and says which have no effect.

    Raises:
        NotImplementedError: one would change numbers.
        TypeError: one is unknown.
    """
    for name, value in arguments.items():
        title = f"hb.keras.Model.{function}({name}=…)"
        if name in _REFUSED:
            neutral, instead = _REFUSED[name]
            if not any(value is each or (each is not None and value == each) for each in neutral):
                raise NotImplementedError(f"{title} is not supported: {instead}.")
        elif name in _IDLE:
            if value is not None:
                say_once(f"{title} has no effect here: {_IDLE[name]}")
        else:
            raise TypeError(f"{title}: there is no argument {name!r}.")


def check_compiled(optimizer: Any, loss: Any, metrics: Any) -> None:
    """Refuses what `compile` can't take.

    Raises:
        NotImplementedError: it is an optimizer of Keras that isn't legacy, or no optimizer; several
            losses or outputs; or a loss that is a sum over the batch.
    """
    if not isinstance(optimizer, tf.train.Optimizer) and not hasattr(optimizer, "get_updates"):
        raise NotImplementedError(
            f"hb.keras.Model.compile(optimizer={type(optimizer).__name__}) is not supported: give "
            "an optimizer of tf.train or tf.keras.optimizers.legacy."
        )
    for name, value in (("loss", loss), ("metrics", metrics)):
        if isinstance(value, dict) or (name == "loss" and isinstance(value, (list, tuple))):
            raise NotImplementedError(
                f"hb.keras.Model.compile({name}={type(value).__name__}) is not supported: a model "
                "here has one output, with one loss."
            )
    if getattr(loss, "reduction", None) == keras.losses.Reduction.SUM:
        raise NotImplementedError(
            "hb.keras.Model.compile(loss=…) is not supported with reduction='sum': use the mean, "
            "and a larger learning rate."
        )


def check_dataset(function: str, name: str, value: Any, has_labels: bool = True) -> None:
    """Refuses other data than datasets of features and labels.

    Raises:
        ValueError: it is no dataset, or its elements are others.
    """
    spec = getattr(value, "element_spec", None)
    counts = (2,) if has_labels else (1, 2)
    if spec is None or (len(spec) if isinstance(spec, tuple) else 1) not in counts:
        found = type(value).__name__ if spec is None else f"a dataset of {spec}"
        raise ValueError(
            f"hb.keras.Model.{function}({name}=…) is {found}: give a tf.data.Dataset of (features, "
            "labels)."
        )


def name_of(metric: Any) -> str:
    """Returns the name of a metric among the values: Keras's, a function's, or the given one."""
    if isinstance(metric, str):
        return metric
    return str(metric.name if isinstance(metric, keras.metrics.Metric) else metric.__name__)


def loss_of(loss: Any, labels: Any, outputs: Any) -> Any:
    """Returns the mean of a batch by one of Keras's losses, a function, or a name."""
    function = keras.losses.get(loss)
    return tf.reduce_mean(function(labels, outputs))


def metric_of(metric: Any, labels: Any, outputs: Any) -> Any:
    """Returns a metric of Keras for a metric, a function or a name; 'accuracy' is by the shapes."""
    if isinstance(metric, keras.metrics.Metric):
        return metric
    name = name_of(metric)
    if name in ("accuracy", "acc", "crossentropy", "ce"):
        kind = "accuracy" if name in ("accuracy", "acc") else "crossentropy"
        if outputs.shape[-1] == 1:
            metric = f"binary_{kind}"
        elif labels.shape.rank != outputs.shape.rank or labels.shape[-1] == 1:
            metric = f"sparse_categorical_{kind}"
        else:
            metric = f"categorical_{kind}"
    found = keras.metrics.get(metric)
    if isinstance(found, keras.metrics.Metric):
        return found
    return keras.metrics.MeanMetricWrapper(found, name)


def is_better_if_larger(monitor: str) -> bool:
    """Tells whether a value is better if it is larger, as Keras's `auto` does."""
    return "acc" in monitor or monitor.startswith("fmeasure")


def refusing(name: str) -> Any:
    def refuse(self: Any, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(
            f"hb.keras.Model.{name} is not supported: use fit, evaluate and predict with datasets, "
            "export_saved_model, and the checkpoints of checkpoint_dir."
        )

    return refuse
