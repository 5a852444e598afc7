"""The table of TensorFlow's Estimators, for the scripts of every framework."""

from __future__ import annotations

from collective.compat.framework import Name, no_effect, refused, same_numbers, works

_HERE = "collective.compat.estimators"
_READY_MADE = (
    "DNNClassifier",
    "DNNLinearCombinedClassifier",
    "DNNLinearCombinedRegressor",
    "DNNRegressor",
    "LinearClassifier",
    "LinearRegressor",
)

# An argument of DeepRec's Estimator.
INCREMENTS = no_effect(
    "tf.estimator.Estimator.export_saved_model(save_incr_model=)",
    "an exported model is whole, and is exported again to change.",
)
# An argument of DeepRec's ready-made Estimator.
DNN_DTYPE = refused(
    "tf.estimator.DNNLinearCombinedClassifier(dnn_dtype=)",
    "leave it out, and make the Estimator in scope(mixed_precision='bfloat16').",
    since="0.2.0",
)
ESTIMATORS: tuple[Name, ...] = (
    same_numbers("tf.estimator.Estimator", f"{_HERE}.Estimator", "in scope() that of all ranks"),
    *(
        works(f"tf.estimator.{name}", f"{_HERE}.{name}", "in scope() its model, on all ranks")
        for name in _READY_MADE
    ),
    works("tf.estimator.train_and_evaluate", f"{_HERE}.train_and_evaluate"),
)
