"""Arguments and members that other frameworks' names have here without effect, or refused."""

from __future__ import annotations

import pytest
import tensorflow.compat.v1 as tf

from collective.compat import estimators, framework, hybridbackend_functions
from collective.compat.deeprec_names import DEEPREC

NAMES = {name.theirs: name for name in DEEPREC.names}


@pytest.fixture(autouse=True)
def said(monkeypatch):
    """Returns what has been said so far, which is nothing."""
    monkeypatch.setattr(framework, "_said", set())
    return framework._said


def test_what_tunes_hybridbackend_is_said_once(said):
    options = hybridbackend_functions.CONTEXT.options
    for size in (16, 32):
        options.batch_size = size
    assert options.batch_size is None
    assert list(said) == [
        "hb.context.options.batch_size has no effect here: it tunes HybridBackend"
    ]


def test_what_a_context_does_not_know_is_named():
    context = hybridbackend_functions.CONTEXT
    assert context.local_world_size == 1 and not hasattr(context, "cluster_spec")
    with pytest.raises(
        AttributeError, match=r"hb.context.devices is not supported.*hb.context.rank"
    ):
        context.devices  # noqa: B018


def test_dimensions_of_blocks_are_refused():
    lookup = NAMES["tf.nn.fused_embedding_lookup_sparse"].resolve()
    with tf.Graph().as_default(), pytest.raises(NotImplementedError, match="blocknums=…"):
        lookup(tf.ones([3, 2]), tf.sparse.from_dense([[1]]), blocknums=[1])


def test_an_exported_model_is_whole(said, monkeypatch):
    """DeepRec's Estimator takes save_incr_model, which is no argument of TensorFlow's."""

    def export(self, *args, **kwargs):
        return args, kwargs

    monkeypatch.setattr(tf.estimator.Estimator, "export_saved_model", export)
    made = estimators.Estimator(lambda features: None, "folder")
    exported = made.export_saved_model("folder", save_incr_model=False, as_text=True)
    assert exported == (("folder",), {"as_text": True})
    assert not said
    assert made.export_saved_model("folder", save_incr_model=True) == (("folder",), {})
    assert [text for text in said if "export_saved_model(save_incr_model=)" in text]


def test_streams_are_contexts_without_effect(said):
    stream = NAMES["tf.stream"].resolve()
    with stream(0), stream(1):
        assert len(said) == 1
