"""The tables of TensorFlow 1 names that scripts for recommendation models use.

They are those of tf.contrib, and of functions that TensorFlow has moved since.
"""

from __future__ import annotations

from collective.compat.framework import Name, refused, same_numbers, works

_HERE = "collective.compat.contrib_functions"
_TF = "tensorflow.compat.v1"
_INITIALIZERS = ("xavier_initializer", "xavier_initializer_conv2d", "variance_scaling_initializer")
_LAYERS = ("l1_regularizer", "l2_regularizer", "fully_connected", "flatten")
_METRICS = {
    "streaming_accuracy": "accuracy",
    "streaming_auc": "auc",
    "streaming_mean": "mean",
    "streaming_precision": "precision",
    "streaming_recall": "recall",
    "streaming_mean_squared_error": "mean_squared_error",
}
_CELLS = ("BasicLSTMCell", "BasicRNNCell", "DropoutWrapper", "GRUCell", "LSTMCell", "MultiRNNCell")
_DATA = (
    "map_and_batch",
    "shuffle_and_repeat",
    "prefetch_to_device",
    "unbatch",
    "parallel_interleave",
)
_STACKS, _FLOW = ("stack", "unstack"), ("cond", "while_loop", "Assert")
_SEQUENCES = (
    "sequence_categorical_column_with_hash_bucket",
    "sequence_categorical_column_with_identity",
    "sequence_categorical_column_with_vocabulary_file",
    "sequence_categorical_column_with_vocabulary_list",
    "sequence_numeric_column",
)

CONTRIB: tuple[Name, ...] = (
    *(works(f"tf.contrib.layers.{name}", f"{_HERE}.{name}") for name in _INITIALIZERS),
    *(same_numbers(f"tf.contrib.layers.{name}", f"{_HERE}.{name}") for name in _LAYERS),
    works("tf.contrib.layers.dropout", f"{_HERE}.dropout", "other elements are drawn"),
    *(
        same_numbers(f"{module}.{name}", f"{_HERE}.{name}")
        for module, name in (
            ("tf.contrib.layers", "embedding_column"),
            ("tf.contrib.layers", "input_from_feature_columns"),
            ("tf.contrib.layers.python.layers.feature_column", "embedding_column"),
            ("tf.contrib.layers.python.layers.feature_column_ops", "input_from_feature_columns"),
        )
    ),
    *(
        same_numbers(
            f"{module}.sparse_column_with_integerized_feature",
            f"{_HERE}.sparse_column_with_integerized_feature",
            "keys are taken modulo bucket_size",
        )
        for module in ("tf.contrib.layers", "tf.contrib.layers.python.layers.feature_column")
    ),
    works(
        "tf.contrib.layers.safe_embedding_lookup_sparse", f"{_TF}.nn.safe_embedding_lookup_sparse"
    ),
    *(
        works(f"tf.contrib.feature_column.{name}", f"{_TF}.feature_column.{name}")
        for name in _SEQUENCES
    ),
    same_numbers("tf.contrib.feature_column.sequence_input_layer", f"{_HERE}.sequence_input_layer"),
    refused(
        "tf.contrib.layers.sequence_input_from_feature_columns",
        "use tf.contrib.feature_column.sequence_input_layer.",
    ),
    *(
        works(f"tf.contrib.metrics.{theirs}", f"{_TF}.metrics.{ours}")
        for theirs, ours in _METRICS.items()
    ),
    works("tf.contrib.training.HParams", f"{_HERE}.HParams"),
    works(
        "tf.contrib.training.get_or_create_global_step", f"{_TF}.train.get_or_create_global_step"
    ),
    works(
        "tf.contrib.framework.get_or_create_global_step", f"{_TF}.train.get_or_create_global_step"
    ),
    *(
        works(f"{module}.{name}", f"{_TF}.train.{name}")
        for module in (
            "tf.contrib.framework",
            "tf.contrib.framework.python.framework.checkpoint_utils",
        )
        for name in ("list_variables", "load_variable")
    ),
    works("tf.contrib.lookup.index_table_from_file", f"{_HERE}.index_table_from_file"),
    works("tf.contrib.lookup.index_table_from_tensor", f"{_HERE}.index_table_from_tensor"),
    *(works(f"tf.contrib.rnn.{cell}", f"{_TF}.nn.rnn_cell.{cell}") for cell in _CELLS),
    same_numbers("tf.contrib.rnn.python.ops.core_rnn_cell._Linear", f"{_HERE}.Linear"),
    *(works(f"tf.contrib.data.{name}", f"{_TF}.data.experimental.{name}") for name in _DATA),
)

# By their places in TensorFlow 1.15.
MOVED: tuple[Name, ...] = (
    works("tf.array_ops", "tensorflow.python.ops.array_ops"),
    *(works(f"tensorflow.python.ops.array_ops.{name}", f"{_TF}.{name}") for name in _STACKS),
    *(works(f"tensorflow.python.ops.control_flow_ops.{name}", f"{_TF}.{name}") for name in _FLOW),
    works("tensorflow.python.util.nest.is_sequence", "tensorflow.python.util.nest.is_nested"),
)
