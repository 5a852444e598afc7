"""Names checkpoints, savers and files inside TensorFlow."""

from __future__ import annotations

from tensorflow.core.protobuf import saver_pb2 as saver_pb2
from tensorflow.core.protobuf import tensor_bundle_pb2 as tensor_bundle_pb2
from tensorflow.python.checkpoint import checkpoint as checkpoint
from tensorflow.python.checkpoint import checkpoint_management as checkpoint_management
from tensorflow.python.checkpoint import tensor_callable as tensor_callable
from tensorflow.python.lib.io import file_io as file_io
from tensorflow.python.ops import gen_checkpoint_ops as gen_checkpoint_ops
from tensorflow.python.ops import io_ops as io_ops
from tensorflow.python.training import checkpoint_utils as checkpoint_utils
from tensorflow.python.training import py_checkpoint_reader as py_checkpoint_reader
from tensorflow.python.training import saver as saver
from tensorflow.python.training import warm_starting_util as warm_starting_util
from tensorflow.python.training.saving import saveable_object as saveable_object
from tensorflow.python.training.saving import saveable_object_util as saveable_object_util
