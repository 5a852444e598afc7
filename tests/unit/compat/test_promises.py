"""Each name of another framework has a promise and a version; same numbers have a test."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import collective
from collective.compat.framework import FIRST_VERSION, PROMISES
from collective.compat.names.contrib import CONTRIB, MOVED
from collective.compat.names.deeprec import DEEPREC
from collective.compat.names.distributed_embeddings import DISTRIBUTED_EMBEDDINGS
from collective.compat.names.horovod import HOROVOD
from collective.compat.names.hybridbackend import HYBRIDBACKEND
from collective.compat.names.sok import SOK
from collective.compat.names.tfra import TFRA

ROOT = Path(__file__).resolve().parents[3]
NAMES = {
    name.theirs: name
    for names in (
        CONTRIB,
        MOVED,
        *(f.names for f in (DEEPREC, DISTRIBUTED_EMBEDDINGS, HOROVOD, HYBRIDBACKEND, SOK, TFRA)),
    )
    for name in names
}
_COLLECTIVE_STRATEGY = (
    "tensorflow.python.distribute.group_embedding_collective_strategy.CollectiveStrategy"
)
_RULE = "tests/unit/train/test_optimizers.py::test_rule"
_ESTIMATOR = (
    "tests/ranks/estimator/test_estimator_training.py::test_training_is_that_of_one_process"
)
_CONTRIB = "tests/unit/compat/test_contrib_numbers.py"
_LOOKUPS = "tests/ranks/compat/test_names_of_others.py"
# Where the numbers of a name are compared, and by which word the test's file calls it.
PROOFS = {
    _COLLECTIVE_STRATEGY: ("tests/ranks/train/test_training.py::test_optimizers", "strategy"),
    "tf.feature_column.categorical_column_with_embedding": (
        "tests/ranks/tables/test_dynamic_columns.py"
        "::test_trained_as_the_identity_column_in_plain_tensorflow",
        "categorical_column_with_embedding",
    ),
    "tf.nn.group_embedding_lookup": (
        "tests/ranks/compat/test_group_embedding.py::test_sequences_and_dense_ids",
        "group_embedding_lookup",
    ),
    "tf.nn.group_embedding_lookup_sparse": (
        "tests/ranks/compat/test_group_embedding.py::test_pooled",
        "group_embedding_lookup_sparse",
    ),
    **{
        f"{module}.fused_safe_embedding_lookup_sparse": (
            f"{_LOOKUPS}::test_sparse_lookups",
            "tf.nn.fused_safe_embedding_lookup_sparse",
        )
        for module in (
            "tf.nn",
            "tensorflow.python.ops.embedding_ops",
            "tf.contrib.layers.python.layers.embedding_ops",
        )
    },
    "tf.nn.fused_embedding_lookup_sparse": (
        f"{_LOOKUPS}::test_sparse_lookups",
        "tf.nn.fused_embedding_lookup_sparse",
    ),
    "sok.lookup_sparse": (f"{_LOOKUPS}::test_sparse_lookups", "sok.lookup_sparse"),
    "sok.all2all_dense_embedding": (
        f"{_LOOKUPS}::test_dense_lookups",
        "sok.all2all_dense_embedding",
    ),
    **{
        f"tf.contrib.{name}": (f"{_CONTRIB}::{test}", name.rpartition(".")[2])
        for test, names in {
            "test_regularizers": ("layers.l1_regularizer", "layers.l2_regularizer"),
            "test_dense_layers": (
                "layers.fully_connected",
                "layers.flatten",
                "rnn.python.ops.core_rnn_cell._Linear",
            ),
            "test_columns": (
                "layers.embedding_column",
                "layers.input_from_feature_columns",
                "layers.python.layers.feature_column.embedding_column",
                "layers.python.layers.feature_column_ops.input_from_feature_columns",
            ),
            "test_integer_columns": (
                "layers.sparse_column_with_integerized_feature",
                "layers.python.layers.feature_column.sparse_column_with_integerized_feature",
            ),
            "test_sequences": ("feature_column.sequence_input_layer",),
        }.items()
        for name in names
    },
    **{
        f"{module}.{optimizer}": (_RULE, optimizer)
        for name, optimizer in (
            ("adam_async", "AdamAsyncOptimizer"),
            ("adagrad_decay", "AdagradDecayOptimizer"),
            ("adagrad_decay_v2", "AdagradDecayOptimizerV2"),
        )
        for module in ("tf.train", f"tensorflow.python.training.{name}")
    },
    **{
        f"{module}.{optimizer}": (f"{_LOOKUPS}::test_rules_of_embedding_variables", optimizer)
        for modules, optimizer in (
            ("tf.train hb.train tensorflow.python.training.adam", "AdamOptimizer"),
            ("tf.train hb.train tensorflow.python.training.ftrl", "FtrlOptimizer"),
            ("tf.train tensorflow.python.training.weight_decay_optimizers", "AdamWOptimizer"),
        )
        for module in modules.split()
    },
    "tf.estimator.Estimator": (_ESTIMATOR, "estimator"),
    "hb.estimator.Estimator": (_ESTIMATOR, "estimator"),
    "hb.keras.Model": (
        "tests/ranks/compat/test_hybridbackend_keras.py"
        "::test_numbers_are_those_of_plain_tensorflow",
        "hb.keras.Model",
    ),
    "hvd.DistributedOptimizer": (
        "tests/ranks/train/test_horovod_wrappers.py::test_gradients_are_reduced_once",
        "DistributedOptimizer",
    ),
    "hvd.DistributedGradientTape": (
        "tests/ranks/train/test_horovod_wrappers.py::test_tapes",
        "DistributedGradientTape",
    ),
    **{
        f"horovod.tensorflow.keras.{name}": (
            "tests/ranks/compat/test_horovod_in_version_2.py::test_fit",
            name.rpartition(".")[2],
        )
        for name in (
            "DistributedOptimizer",
            "callbacks.LearningRateWarmupCallback",
            "callbacks.LearningRateScheduleCallback",
        )
    },
    **{
        f"distributed_embeddings.{name}": (
            f"tests/ranks/compat/test_distributed_embeddings.py::{test}",
            name,
        )
        for test, names in {
            "test_a_tape": "DistributedEmbedding DistributedGradientTape Embedding",
            "test_fit": "DistributedOptimizer",
            "test_layers_of_their_own": "ConcatOneHotEmbedding embedding_lookup",
        }.items()
        for name in names.split()
    },
    **{
        f"de.{name}": (f"tests/ranks/compat/test_tfra.py::{test}", name.rpartition(".")[2])
        for test, names in {
            "test_fit": "DynamicEmbeddingOptimizer keras.layers.HvdAllToAllEmbedding",
            "test_a_tape": "keras.layers.Embedding keras.layers.BasicEmbedding "
            "keras.layers.SquashedEmbedding keras.layers.FieldWiseEmbedding",
        }.items()
        for name in names.split()
    },
}


def version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split("."))


@pytest.mark.parametrize("theirs", NAMES)
def test_a_name_has_a_promise_and_a_version(theirs):
    name = NAMES[theirs]
    assert name.promise in PROMISES
    assert version(FIRST_VERSION) <= version(name.since) <= version(collective.__version__)
    if name.kind != "works":
        assert name.promise == name.kind and not name.has_same_numbers
    if name.promise == "the original":
        assert name.ours.startswith(("tensorflow.", "horovod."))
    _, here, promise, since = (cell.strip() for cell in name.row().strip("|").split(" | "))
    assert here and (promise, since) == (name.promise, name.since)


def test_same_numbers_are_compared_by_a_test():
    promised = {name.theirs for name in NAMES.values() if name.promise == "same numbers"}
    assert promised == set(PROOFS)
    for theirs, (proof, word) in PROOFS.items():
        file, _, test = proof.partition("::")
        text = (ROOT / file).read_text(encoding="utf-8")
        tests = [node.name for node in ast.parse(text).body if isinstance(node, ast.FunctionDef)]
        assert test in tests and word in text, theirs


def test_every_promise_is_kept_by_a_name():
    assert {name.promise for name in NAMES.values()} == set(PROMISES)
