"""Names feature columns inside TensorFlow."""

from __future__ import annotations

from tensorflow.python.feature_column import feature_column as feature_column
from tensorflow.python.feature_column import feature_column_v2 as feature_column_v2
