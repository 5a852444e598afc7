"""Names parts of SavedModels inside TensorFlow."""

from __future__ import annotations

from tensorflow.core.protobuf import meta_graph_pb2 as meta_graph_pb2
from tensorflow.core.protobuf import saved_model_pb2 as saved_model_pb2
from tensorflow.python.saved_model.loader_impl import SavedModelLoader as SavedModelLoader
from tensorflow.python.saved_model.model_utils import export_utils as export_utils
from tensorflow.python.saved_model.model_utils.mode_keys import (
    EstimatorModeKeys as EstimatorModeKeys,
)
