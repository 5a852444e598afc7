"""Names graphs, functions and tensors inside TensorFlow: no public names lead to these."""

from __future__ import annotations

from tensorflow.core.framework import attr_value_pb2 as attr_value_pb2
from tensorflow.core.framework import function_pb2 as function_pb2
from tensorflow.core.framework import graph_pb2 as graph_pb2
from tensorflow.core.framework import tensor_shape_pb2 as tensor_shape_pb2
from tensorflow.core.framework import tensor_slice_pb2 as tensor_slice_pb2
from tensorflow.python import pywrap_tfe as pywrap_tfe
from tensorflow.python.data.ops.structured_function import (
    StructuredFunctionWrapper as StructuredFunctionWrapper,
)
from tensorflow.python.distribute import distribute_lib as distribute_lib
from tensorflow.python.distribute import summary_op_util as summary_op_util
from tensorflow.python.eager import context as context
from tensorflow.python.eager import record as record
from tensorflow.python.eager import tape as tape
from tensorflow.python.eager.polymorphic_function import autograph_util as autograph_util
from tensorflow.python.eager.polymorphic_function.concrete_function import (
    ConcreteFunction as ConcreteFunction,
)
from tensorflow.python.eager.polymorphic_function.polymorphic_function import Function as Function
from tensorflow.python.framework import composite_tensor as composite_tensor
from tensorflow.python.framework import config as config
from tensorflow.python.framework import convert_to_constants as convert_to_constants
from tensorflow.python.framework import func_graph as func_graph
from tensorflow.python.framework import indexed_slices as indexed_slices
from tensorflow.python.framework import kernels as kernels
from tensorflow.python.framework import op_def_registry as op_def_registry
from tensorflow.python.framework import random_seed as random_seed
from tensorflow.python.framework import tensor as tensor
from tensorflow.python.framework import tensor_conversion_registry as tensor_conversion_registry
from tensorflow.python.framework import tensor_shape as tensor_shape
from tensorflow.python.framework import tensor_util as tensor_util
from tensorflow.python.framework.func_graph import FuncGraph as FuncGraph
from tensorflow.python.framework.ops import gradient_registry as gradient_registry
from tensorflow.python.framework.tensor_util import make_tensor_proto as make_tensor_proto
from tensorflow.python.ops import cond_v2 as cond_v2
from tensorflow.python.ops import gradients_util as gradients_util
from tensorflow.python.ops import while_v2 as while_v2
from tensorflow.python.util import deprecation as deprecation
from tensorflow.python.util import function_utils as function_utils
