"""`collective.checkpoint.load` shows every row and variable of a checkpoint, without ranks.

The truth is what was written: by NumPy and TensorFlow's own operation, in parts as N ranks save.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from collective import checkpoint
from collective.checkpoint.files import tensor_bundle
from collective.checkpoint.files.layout import LAYOUT_ENTRY, CheckpointLayout, StoredTable
from collective.checkpoint.reading import consolidate
from collective.ops import placement
from tests.foreign_checkpoints import deeprec

GOLDEN = str(Path(__file__).resolve().parents[2] / "golden" / "version_1" / "m")
RANDOM = np.random.default_rng(5)
STATIC = RANDOM.normal(size=(23, 3)).astype(np.float32)
KEYS = np.unique([*RANDOM.integers(-(2**63), 2**63 - 1, 50), 0, -1, 2**63 - 1, -(2**63)])
DYNAMIC = RANDOM.normal(size=(len(KEYS), 2)).astype(np.float32)


@pytest.fixture(params=[1, 4])
def model(request, tmp_path):
    """Loads a checkpoint of one rank, and of four, with slices of few rows."""
    ranks, entries, slices = (
        request.param,
        {"dense/w": np.float32([[1, 2]]), "step": np.int64(3)},
        {},
    )
    owners = placement.dynamic(ranks).owner(KEYS)
    for part in range(ranks):
        name = f"t/part_{part}" if ranks > 1 else "t"
        slices[name] = STATIC[part::ranks], 2
        slices[f"d/part_{part}"] = DYNAMIC[owners == part], 3
        slices[f"d/Adam/part_{part}"] = -DYNAMIC[owners == part], 3
        entries[f"d/keys/part_{part}"] = KEYS[owners == part]
    counts = tuple(np.bincount(owners, minlength=ranks).tolist())
    tables = [
        StoredTable(
            "t", "static", 23, 3, "float32", 3, tuple(len(STATIC[p::ranks]) for p in range(ranks))
        ),
        StoredTable("d", "dynamic", None, 2, "float32", 4, counts, None, "d/keys"),
        StoredTable("d/Adam", "dynamic", None, 2, "float32", 4, counts, "d", "d/keys"),
    ]
    layout = CheckpointLayout(ranks, {table.name: table for table in tables})
    entries[LAYOUT_ENTRY] = np.array(layout.to_json())
    deeprec.write(str(tmp_path / "m-3"), entries, slices)
    (tmp_path / "checkpoint").write_text('model_checkpoint_path: "m-3"')
    return checkpoint.load(str(tmp_path))


def test_names(model):
    assert list(model) == ["d", "d/Adam", "dense/w", "step", "t"] and len(model) == 5
    assert model.tables == ["d", "t"] and model.variables == ["dense/w", "step"]
    assert "d/Adam" in model and "x" not in model
    assert (
        "table d: dynamic" in repr(model)
        and repr(model["t"]) == "<static table 't': 23 rows of 3 float32>"
    )
    with pytest.raises(KeyError, match="^checkpoint '.*' has no 'x'"):
        model["x"]
    with pytest.raises(KeyError, match="no table 'step' .it has: d, t"):
        model.table("step")


def test_variables_are_arrays(model):
    np.testing.assert_array_equal(model["dense/w"], [[1, 2]])
    assert model["step"] == 3
    np.testing.assert_array_equal(model.table("dense/w")[0], [1, 2])


def test_a_static_table(model):
    table = model["t"]
    assert (table.shape, table.dim, table.dtype, len(table)) == ((23, 3), 3, np.float32, 23)
    ids = RANDOM.integers(0, 23, (4, 6))
    np.testing.assert_array_equal(table.lookup(ids), STATIC[ids])
    np.testing.assert_array_equal(table[5], STATIC[5])
    np.testing.assert_array_equal(table[3:20:4], STATIC[3:20:4])
    np.testing.assert_array_equal(np.asarray(table), STATIC)
    np.testing.assert_array_equal(table.keys(), np.arange(23))
    blocks = list(table.blocks(5))
    np.testing.assert_array_equal(np.concatenate([keys for keys, _ in blocks]), np.arange(23))
    np.testing.assert_array_equal(np.concatenate([rows for _, rows in blocks]), STATIC)
    assert table[[]].shape == (0, 3) and 22 in table and 23 not in table
    with pytest.raises(
        KeyError, match=r"'\w+' \(keys 0 … 22\) has no key -1, nor 1 other of the 3;"
    ):
        table[[-1, 0, 23]]
    with pytest.raises(TypeError, match="integers, not float64"):
        table[0.5]


def test_a_dynamic_table(model):
    table = model["d"]
    assert table.dynamic and table.shape == (len(KEYS), 2)
    np.testing.assert_array_equal(table.keys(), KEYS)
    order = RANDOM.permutation(len(KEYS)).repeat(2)
    np.testing.assert_array_equal(table[KEYS[order]], DYNAMIC[order])
    np.testing.assert_array_equal(table.slots["d/Adam"][KEYS[order]], -DYNAMIC[order])
    np.testing.assert_array_equal(model["d/Adam"][KEYS[:1]], -DYNAMIC[:1])
    for keys, rows in table.blocks(7):
        np.testing.assert_array_equal(table[keys], rows)
    found = table.lookup([KEYS[3], 12345], default=0.5)
    np.testing.assert_array_equal(found, [DYNAMIC[3], [0.5, 0.5]])
    assert KEYS[3] in table and 12345 not in table
    assert list(table) == KEYS.tolist()
    with pytest.raises(KeyError, match="has no key 12345; lookup"):
        table[[KEYS[3], 12345]]
    with pytest.raises(TypeError, match="is dynamic: name keys"):
        table[:3]


def test_string_keys(tmp_path):
    words = ["a", "b", "c"]
    with tf.Graph().as_default(), tf.Session() as session:
        keys = session.run(tf.strings.to_hash_bucket_fast(words, 2**63 - 1))
    rows = dict(zip(keys.tolist(), np.float32([[1], [2], [3]])))
    deeprec.write(str(tmp_path / "theirs"), deeprec.embedding_variable("e", rows))
    checkpoint.import_checkpoint("deeprec", str(tmp_path / "theirs"), str(tmp_path / "ours"))
    table = checkpoint.load(str(tmp_path / "ours"))["e"]
    np.testing.assert_array_equal(table[["c", "a"]], [[3], [1]])


@pytest.mark.slow
def test_it_needs_no_horovod():
    program = f"""
import sys
sys.modules["horovod"] = None
from collective import checkpoint
model = checkpoint.load({GOLDEN!r})
print(sorted(model["item"].keys().tolist()), model["user"][4].tolist())
"""
    done = subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True
    )
    assert done.stdout == f"[-1, 7, {2**63 - 1}] [2.75, 3.0]\n"


def test_there_is_none(tmp_path):
    with pytest.raises(ValueError, match="There is no checkpoint in"):
        checkpoint.load(str(tmp_path))


def test_all_checkpoints_of_a_folder_are_verified(tmp_path):
    """Not the latest alone: a restart may need the one before."""
    with tf.Graph().as_default(), tf.Session() as session:
        v = tf.get_variable("v", [1000])
        session.run(v.initializer)
        saver = tf.train.Saver()
        prefixes = [saver.save(session, str(tmp_path / "m"), global_step=i) for i in (9, 10)]
    assert consolidate.verify(str(tmp_path)) == "\n".join(f"{p}: whole" for p in prefixes)
    data = tensor_bundle.data_path(prefixes[0], 0, 1)
    content = bytearray(open(data, "rb").read())
    content[5] ^= 1
    with open(data, "wb") as file:
        file.write(content)
    with pytest.raises(tf.errors.DataLossError, match=f"{prefixes[1]}: whole") as raised:
        consolidate.verify(str(tmp_path))
    problem, _ = raised.value.message.splitlines()  # without TensorFlow's stacks
    assert problem.startswith(f"checkpoint '{prefixes[0]}': its entry 'v' can't be read")
