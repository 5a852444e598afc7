"""Names what TensorFlow, its Estimators and Keras keep private: one module for each area.

Nothing else in the library imports private modules of these packages. What another release moves or
renames is found here.
"""

from __future__ import annotations

import importlib.util
import os

import tensorflow as tf

# Later ones bring Keras 3 as `keras`.
BRINGS_KERAS_2 = tf.__version__.startswith("2.15.")
if not BRINGS_KERAS_2:
    # Else `tf.keras` and `tf.layers` would be Keras 3's from their first use on.
    os.environ.setdefault("TF_USE_LEGACY_KERAS", "1")
    _keras_2 = importlib.util.find_spec("tf_keras")
    if _keras_2 is not None and os.environ["TF_USE_LEGACY_KERAS"] in ("1", "true", "True"):
        # Where `import tensorflow.keras` looks first, if the variable is there in time.
        _folders = _keras_2.submodule_search_locations or ()
        tf.__path__[:0] = [os.path.join(folder, "api", "_v2") for folder in _folders]
