"""Arguments and members that other frameworks' names have here without effect, or refused."""

from __future__ import annotations

import ast
import types
from pathlib import Path

import pytest
import tensorflow.compat.v1 as tf

from collective.compat import estimators, framework, hybridbackend_functions
from collective.compat.names.deeprec import DEEPREC
from collective.compat.names.hybridbackend import HYBRIDBACKEND
from collective.tensorflow_internals.estimators import api

NAMES = {name.theirs: name for name in DEEPREC.names}
ALL = {name.theirs: name for name in (*DEEPREC.names, *HYBRIDBACKEND.names)}


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


@pytest.mark.parametrize("is_open", [True, False])
def test_a_type_of_dense_layers_is_refused(monkeypatch, is_open):
    """DeepRec's example of an Estimator gives it; TensorFlow would name the keyword alone."""
    monkeypatch.setattr(estimators, "SCOPES", types.SimpleNamespace(is_open=is_open))
    with pytest.raises(NotImplementedError, match=r"dnn_dtype=\) is not .*mixed_precision="):
        estimators.DNNLinearCombinedClassifier(dnn_dtype=tf.bfloat16)


def test_an_exported_model_is_whole(said, monkeypatch):
    """DeepRec's Estimator takes save_incr_model, which is no argument of TensorFlow's."""

    def export(self, *args, **kwargs):
        return args, kwargs

    monkeypatch.setattr(api.Estimator, "export_saved_model", export)
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


COMPAT = Path(framework.__file__).parent
# Arguments that the functions take and don't use, and why that changes no number.
_LAYOUT = "rows are sharded over all ranks anyway"
_SPEED = "it tunes how fast something is done"
_SAME = "runs take their turns, so there is nothing to lock"
_LATER = "the function here does nothing"
IDLE = {
    "contrib_functions.embedding_column": {"do_fusion": _SPEED},
    "contrib_functions.sparse_column_with_integerized_feature": dict.fromkeys(
        ("combiner", "dtype"), "an embedding column has a combiner; keys keep their type"
    ),
    "deeprec_functions.get_embedding_variable": {
        "caching_device": _SPEED,
        "validate_shape": "the shape of a table is always known",
    },
    "deeprec_functions.fused_safe_embedding_lookup_sparse": {"fusion_version": _SPEED},
    "deeprec_functions.sparse_column_with_embedding": {"ht_partition_num": _LAYOUT},
    "deeprec_functions.staged": {
        **dict.fromkeys(("capacity", "num_threads", "num_clients", "timeout_millis"), _SPEED),
        "tuning": _SPEED,
    },
    "deeprec_increments.incremental_save": {
        "save_path": "the increment is next to its checkpoint, as a line says",
        "global_step": "its number is that of the increment",
        "meta_graph_suffix": "no graph is written with it",
        "write_state": "its folder's latest state is the newest increment",
    },
    "deeprec_increments.recover_incr_checkpoints": dict.fromkeys(
        ("sess", "checkpoint_dir"), "a session restores the latest checkpoint with its increments"
    ),
    "deeprec_increments.incremental_restore": {"save_path": "an increment knows its checkpoint"},
    "deeprec_optimizers.__init__": {"use_locking": _SAME},
    "hybridbackend_data.from_parquet": dict.fromkeys(
        ("num_parallel_reads", "num_parallel_parser_calls"), _SPEED
    ),
    "hybridbackend_data.deduplicate": {"fields": "columns have their types"},
    "hybridbackend_data.parse": {"num_parallel_calls": _SPEED},
    "hybridbackend_data.populate_defaults": {"num_parallel_calls": _SPEED},
    "hybridbackend_data.rebatch": {"fields": "columns have their types"},
    "no_effect.nothing": {"args": _LATER, "kwargs": _LATER},
    "no_effect.first": {"args": _LATER, "kwargs": _LATER},
    "no_effect.scope": {"args": _LATER, "kwargs": _LATER},
    "no_effect.hook": {"args": _LATER, "kwargs": _LATER},
    "parquet.ParquetDataset": dict.fromkeys(("num_parallel_reads", "num_sequential_reads"), _SPEED),
}


def dropped(module: str) -> dict[str, set[str]]:
    """Returns the arguments that the functions of a module delete, or never name, by function."""
    found: dict[str, set[str]] = {}
    tree = ast.parse((COMPAT / f"{module}.py").read_text(encoding="utf-8"))
    for function in ast.walk(tree):
        if not isinstance(function, ast.FunctionDef) or isinstance(function.body[-1], ast.Raise):
            continue
        if function.name.startswith("_") and function.name != "__init__":
            continue
        given = function.args
        names = {a.arg for a in (*given.posonlyargs, *given.args, *given.kwonlyargs)}
        names |= {a.arg for a in (given.vararg, given.kwarg) if a is not None}
        used = {
            node.id
            for node in ast.walk(function)
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)
        }
        idle = names - used - {"self", "cls"}
        if idle:
            found.setdefault(f"{module}.{function.name}", set()).update(idle)
    return found


@pytest.mark.parametrize("module", sorted({name.partition(".")[0] for name in IDLE}))
def test_arguments_that_are_not_used_are_listed(module):
    """What a function takes and drops must change no number: it is in the list, with the reason."""
    listed = {name: {*reasons} for name, reasons in IDLE.items() if name.startswith(f"{module}.")}
    found = dropped(module)
    assert found == listed


def rows():
    return tf.ones([3, 2]), tf.sparse.from_dense([[1]])


# Calls that would change numbers: the name, its arguments, and what to do instead.
REFUSED = [
    *(
        ("tf.get_embedding_variable", lambda a=a: (("t", 2), {a: abs}), a, "is not supported: add")
        for a in ("regularizer", "custom_getter", "constraint", "init_data_source")
    ),
    (
        "tf.contrib.layers.sparse_column_with_embedding",
        lambda: (("k",), {"init_data_source": "rows.csv"}),
        "init_data_source",
        "table.import_",
    ),
    *(
        (f"tf.nn.{lookup}", lambda a=a, value=value: (rows(), {a: value}), a, way)
        for lookup, a, value, way in (
            ("fused_embedding_lookup_sparse", "blocknums", [1], "leave it out"),
            (
                "fused_embedding_lookup_sparse",
                "fill_empty_row",
                False,
                "tf.nn.embedding_lookup_sparse",
            ),
            ("fused_safe_embedding_lookup_sparse", "blocknums", [1], "leave it out"),
            (
                "fused_safe_embedding_lookup_sparse",
                "prune",
                False,
                "tf.nn.embedding_lookup_sparse",
            ),
        )
    ),
    *(
        ("tf.staged", lambda a=a, value=value: ((1,), {a: value}), a, way)
        for a, value, way in (
            ("feed_dict", {"x": 1}, "build the features"),
            ("feed_generator", iter, "from_generator"),
            ("ignored_exception_types", (tf.errors.InvalidArgumentError,), "ignore_errors"),
            ("closed_exception_types", (tf.errors.AbortedError,), "OutOfRangeError"),
        )
    ),
    (
        "tf.config.experimental.enable_distributed_strategy",
        lambda: (("parameter_server",), {}),
        "'parameter_server'",
        "strategy='collective'",
    ),
    *(
        ("tf.CheckpointOption", lambda a=a, value=value: (("m",), {a: value}), a, way)
        for a, value, way in (
            ("always_load_from_specific_ckpt", True, "new folder"),
            ("init_data_source", "rows.csv", "table.import_"),
        )
    ),
    (
        "tf.contrib.feature_column.sequence_input_layer",
        lambda: (({}, []), {"weight_collections": ["c"]}),
        "weight_collections",
        "tf.add_to_collection",
    ),
    (
        "hb.estimator.Estimator",
        lambda: ((iter,), {"train_drop_remainder": False}),
        "train_drop_remainder",
        "Leave it out",
    ),
]


@pytest.mark.parametrize("theirs, make, argument, way", REFUSED)
def test_arguments_that_would_change_numbers_are_refused(theirs, make, argument, way):
    with tf.Graph().as_default():
        args, kwargs = make()
        with pytest.raises(NotImplementedError) as error:
            ALL[theirs].resolve()(*args, **kwargs)
    text = str(error.value)
    assert argument in text and way in text and "is not supported" in text


def test_options_of_a_scope_are_known_and_have_no_effect_or_are_refused(said):
    """`hb.scope(…)` and `hb.context.options` take the same ones."""
    options = hybridbackend_functions.CONTEXT.options
    neutral = {
        "data_batch_count": 1,
        "comm_wire_dtype": None,
        "comm_gradient_wire_dtype": None,
        "grad_lazy_sync": False,
        "data_sync_drop_remainder": True,
    }
    for name, value in neutral.items():
        setattr(options, name, value)
    assert not said
    refused = {
        "data_batch_count": (2, "local_steps"),
        "comm_wire_dtype": (tf.float16, "wire_dtype"),
        "comm_gradient_wire_dtype": (tf.float16, "gradient_wire_dtype"),
        "grad_lazy_sync": (True, "Leave it out"),
        "emb_num_groups": (2, "the options are batch_size, comm_"),
    }
    for name, (value, way) in refused.items():
        with pytest.raises(NotImplementedError, match=rf"{name}.* is not supported.*{way}"):
            setattr(options, name, value)
        with pytest.raises(NotImplementedError, match=rf"hb.scope.{name}"):
            with hybridbackend_functions.scope(**{name: value}):
                pass
    known = {*hybridbackend_functions.OPTIONS} - {*neutral, "sharding"}
    for name in known:
        setattr(options, name, "a value")
    assert said == {
        f"hb.context.options.{name} has no effect here: it tunes HybridBackend" for name in known
    }


def test_staged_features_are_the_features():
    features = {"x": 1}
    staged = ALL["tf.staged"].resolve()
    ends = (tf.errors.OutOfRangeError, tf.errors.OUT_OF_RANGE, StopIteration)
    assert staged(features, {}, capacity=4, closed_exception_types=ends) is features
    assert staged(items=features, num_threads=2) is features
