"""Names variables and their scopes inside TensorFlow."""

from __future__ import annotations

from tensorflow.python.ops import resource_variable_ops as resource_variable_ops
from tensorflow.python.ops import state_ops as state_ops
from tensorflow.python.ops import variable_scope as variable_scope
from tensorflow.python.ops import variables as variables
from tensorflow.python.ops.resource_variable_ops import BaseResourceVariable as BaseResourceVariable
from tensorflow.python.ops.variable_scope import VariableScope as VariableScope
from tensorflow.python.trackable import base as base
from tensorflow.python.training import moving_averages as moving_averages
from tensorflow.python.training import slot_creator as slot_creator
