"""The graphs of every mode find the tables that a model looks up twice."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

import pytest
import tensorflow.compat.v1 as tf

from common import click_options, click_session
from common.click_log import CARDINALITIES
from din.train import Din
from dlrm.train import Dlrm
from two_tower.train import TwoTower


@pytest.mark.parametrize("model_class", [Din, Dlrm, TwoTower])
def test_a_served_graph_has_each_table_once(model_class):
    """All modes of `din` but training ended with 'Variable C14 already exists'."""
    options = click_options.parse(model_class.defaults, [], 0)
    model = model_class(options, CARDINALITIES, contextlib.nullcontext)
    program = SimpleNamespace(model=model)
    with tf.Graph().as_default():
        signature = click_session.ClickSession._signature(program)
        names = [variable.op.name for variable in tf.global_variables()]
    assert {"dense", "categorical"} <= set(signature.inputs)
    assert len(names) == len(set(names)) and "C14" in names
