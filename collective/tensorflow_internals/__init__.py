"""Names what TensorFlow, its Estimators and Keras keep private: one module for each area.

Nothing else in the library imports private modules of these packages. What another release moves or
renames is found here.
"""

from __future__ import annotations

import os

import tensorflow as tf

# Later ones bring Keras 3 as `keras`.
BRINGS_KERAS_2 = tf.__version__.startswith("2.15.")
if not BRINGS_KERAS_2:
    # Else `tf.keras` and `tf.layers` would be Keras 3's from their first use on.
    os.environ.setdefault("TF_USE_LEGACY_KERAS", "1")
