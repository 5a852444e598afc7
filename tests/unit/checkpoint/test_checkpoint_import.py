"""Checkpoints of DeepRec, HybridBackend and SOK become ours: every row under its own key.

The truth is a dict of key to row, from which the foreign files were written.
"""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from collective import checkpoint
from collective.checkpoint import __main__ as command
from collective.checkpoint.files import tensor_bundle
from collective.checkpoint.importing import hybridbackend as reader
from collective.checkpoint.importing import key_buckets
from tests.foreign_checkpoints import deeprec, hybridbackend, sok

RANDOM = np.random.default_rng(7)


def rows_by_key(keys, dim=3):
    return {int(key): RANDOM.normal(size=dim).astype(np.float32) for key in keys}


def read(path, name, **options):
    """Returns {key: row, or (row, number)} of a table."""
    found = {}
    for keys, rows, *numbers in checkpoint.read_table(str(path), name, block=7, **options):
        assert list(keys) == sorted(keys)
        for i, key in enumerate(keys):
            found[int(key)] = (rows[i], *(n[i] for n in numbers)) if numbers else rows[i]
    return found


def read_static(path, name):
    return np.concatenate([rows for _, rows in checkpoint.read_table(str(path), name)])


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    for key, row in expected.items():
        np.testing.assert_array_equal(found[key], row)


@pytest.fixture(params=[None, 300], ids=["one bucket", "buckets"])
def buckets(request, monkeypatch):
    """Lets tables be one bucket, or twelve and more."""
    if request.param:
        monkeypatch.setattr(key_buckets, "BUCKET_BYTES", request.param)
        monkeypatch.setattr(tensor_bundle, "SLICE_BYTES", 40)


@pytest.mark.parametrize("parts", [0, 1, 3])
def test_embedding_variables_of_deeprec(tmp_path, buckets, parts):
    keys = [*RANDOM.integers(0, 2**62, 40), 0, 999, 1000, 2000, 2**63 - 1]
    rows, slot = rows_by_key(keys), rows_by_key(keys)
    freqs = {int(key): int(key) % 17 + 1 for key in keys}
    versions = {int(key): int(key) % 23 for key in keys}
    filtered = {5: 2, 10**15: 1}
    entries = {"dense/kernel": np.float32([[1, 2]]), "global_step": np.int64(70)}
    for part in range(max(1, parts)):
        stem = f"in/emb/part_{part}" if parts else "in/emb"

        def of_part(by_key, part=part):
            return {key: v for key, v in by_key.items() if key % max(1, parts) == part}

        entries |= deeprec.embedding_variable(
            stem, of_part(rows), of_part(freqs), of_part(versions), of_part(filtered)
        )
        entries |= deeprec.embedding_variable(f"{stem}/Adagrad", of_part(slot))
    deeprec.write(str(tmp_path / "theirs"), entries)
    report = checkpoint.import_checkpoint("deeprec", str(tmp_path / "theirs"), f"{tmp_path}/ours")
    assert_same(read(tmp_path / "ours", "in/emb"), rows)
    assert_same(read(tmp_path / "ours", "in/emb/Adagrad"), slot)
    counted = read(tmp_path / "ours", "in/emb", frequencies=True, last_used=True)
    assert {key: tuple(map(int, numbers)) for key, (_, *numbers) in counted.items()} == {
        key: (freqs[key], versions[key]) for key in freqs
    }
    refused = read(tmp_path / "ours", "in/emb/refused")
    assert {key: int(count[0]) for key, count in refused.items()} == filtered
    plain = tf.train.load_checkpoint(str(tmp_path / "ours"))
    np.testing.assert_array_equal(plain.get_tensor("dense/kernel"), [[1, 2]])
    assert plain.get_tensor("global_step") == 70
    taken = {new for _, new, _ in report.taken}
    tables = {"in/emb", "in/emb/Adagrad", "in/emb/frequency", "in/emb/last_used", "in/emb/refused"}
    assert taken == tables | {"dense/kernel", "global_step"}
    assert list(report.left_out) == ["in/emb-versions_filtered"]
    assert tf.train.latest_checkpoint(str(tmp_path)) == str(tmp_path / "ours")
    assert not [path for path in tmp_path.iterdir() if "_temp_" in path.name]


def test_keys_of_32_bits_and_no_counters(tmp_path):
    rows = rows_by_key([7, 3, 2**31 - 1], 1)
    entries = deeprec.embedding_variable("e", rows, key_dtype=np.int32)
    deeprec.write(str(tmp_path / "theirs"), {**entries, **deeprec.embedding_variable("none", {})})
    checkpoint.import_checkpoint("deeprec", str(tmp_path / "theirs"), str(tmp_path / "ours"))
    assert_same(read(tmp_path / "ours", "e"), rows)
    assert read(tmp_path / "ours", "none") == {}
    with pytest.raises(ValueError, match="no frequencies of 'e'"):
        checkpoint.read_table(str(tmp_path / "ours"), "e", frequencies=True)


def test_a_partitioned_variable_of_tensorflow_keeps_its_order(tmp_path):
    rows = np.arange(20, dtype=np.float32).reshape(10, 2)
    deeprec.write(str(tmp_path / "theirs"), {}, {"t": (rows, 3), "t/Adagrad": (-rows, 3)})
    checkpoint.import_checkpoint("deeprec", str(tmp_path / "theirs"), str(tmp_path / "ours"))
    np.testing.assert_array_equal(read_static(tmp_path / "ours", "t"), rows)
    np.testing.assert_array_equal(read_static(tmp_path / "ours", "t/Adagrad"), -rows)


@pytest.mark.parametrize("damage", ["part", "values", "ssd", "slot", "twice"])
def test_what_is_missing_is_an_error(tmp_path, damage):
    entries = {}
    for part in range(3):
        rows = rows_by_key([part, part + 3])
        entries |= deeprec.embedding_variable(f"e/part_{part}", rows)
        entries |= deeprec.embedding_variable(f"e/part_{part}/Adam", rows)
    words = {
        "part": "part_1 of embedding variable 'e' is missing",
        "values": r"'e/part_1' has keys \[2\] and values \[1, 3\]",
        "ssd": "keeps rows in files of their own",
        "slot": "slot 'e/Adam' and its table 'e' don't have the same keys .*--without-slots",
        "twice": "table 'e' has the key 4 twice",
    }
    if damage == "part":
        entries = {name: value for name, value in entries.items() if "part_1" not in name}
    elif damage == "values":
        entries["e/part_1-values"] = entries["e/part_1-values"][:1]
    elif damage == "slot":
        entries |= deeprec.embedding_variable("e/part_2/Adam", rows_by_key([2, 99]))
    elif damage == "twice":
        entries |= deeprec.embedding_variable("e/part_2", rows_by_key([2, 4]))
    else:
        (tmp_path / "theirs-e_part_0-ssd_record.index").touch()
    deeprec.write(str(tmp_path / "theirs"), entries)
    with pytest.raises(ValueError, match=words[damage]):
        checkpoint.import_checkpoint("deeprec", str(tmp_path / "theirs"), str(tmp_path / "ours"))
    assert not [path for path in tmp_path.iterdir() if path.name.startswith("ours")]
    if damage == "slot":
        report = checkpoint.import_checkpoint(
            "deeprec", str(tmp_path / "theirs"), str(tmp_path / "ours"), slots=False
        )
        assert report.left_out == {"e/Adam": "slots are left out"}


@pytest.mark.parametrize("place", ["memory", "in place"])
@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_shards_of_hybridbackend(tmp_path, monkeypatch, ranks, place):
    if place == "in place":
        monkeypatch.setattr(reader, "IN_MEMORY_BYTES", 0)
        monkeypatch.setattr(tensor_bundle, "SLICE_BYTES", 24)
    table = RANDOM.normal(size=(29, 2)).astype(np.float32)
    dense = RANDOM.normal(size=(7, 4)).astype(np.float32)
    hybridbackend.write(
        str(tmp_path / "theirs"),
        {"bias": np.float32([3, 4]), "small": table[:2]},
        {"t": table, "t/Adagrad": -table},
        ranks,
        {"cut": (dense, 2), "cut/Adagrad": (-dense, 2)},
    )
    report = checkpoint.import_checkpoint(
        "hybridbackend",
        str(tmp_path / "theirs"),
        str(tmp_path / "ours"),
        in_order=["cut"],
    )
    plain = tf.train.load_checkpoint(str(tmp_path / "ours"))
    for name, expected in {
        "t": table,
        "t/Adagrad": -table,
        "cut": dense,
        "cut/Adagrad": -dense,
        "small": table[:2],
        "bias": np.float32([3, 4]),
    }.items():
        np.testing.assert_array_equal(plain.get_tensor(name), expected)
    assert f"from {ranks} shards" in str(report)


def test_embedding_variables_of_hybridbackend(tmp_path):
    rows = rows_by_key(range(9))
    entries = {}
    for part in range(2):
        of_part = {key: row for key, row in rows.items() if key % 2 == part}
        entries |= deeprec.embedding_variable(f"e/part_{part}", of_part)
    hybridbackend.write(str(tmp_path / "theirs"), entries, {}, 2)
    checkpoint.import_checkpoint("hybridbackend", str(tmp_path / "theirs"), str(tmp_path / "ours"))
    assert_same(read(tmp_path / "ours", "e"), rows)


@pytest.mark.parametrize("key_dtype", [np.int64, np.uint32])
def test_dumps_of_sok(tmp_path, buckets, key_dtype):
    (tmp_path / "dump").mkdir()
    keys = np.unique(RANDOM.integers(5, 2**32, 50)).astype(key_dtype)
    rows = RANDOM.normal(size=(len(keys), 4)).astype(np.float32)
    slots = {("Adam", "m"): -rows, ("Adam", "v"): rows**2, ("Adam", "vhat"): rows + 1}
    sok.dump(tmp_path / "dump", "tower/user:0", keys, rows, 3, slots)
    static = RANDOM.normal(size=(10, 2)).astype(np.float32)
    sok.dump(
        tmp_path / "dump", "item:0", np.arange(10), static, 4, {("Adagrad", "accumulator"): static}
    )
    sok.dump(tmp_path / "dump", "few:0", np.arange(4), static[:4])
    deeprec.write(str(tmp_path / "theirs"), {"dense/w": np.float32([1, 2])})
    report = checkpoint.import_checkpoint(
        "sok",
        str(tmp_path / "dump"),
        str(tmp_path / "ours"),
        {"tower_user": "tower/user"},
        kinds={"few": "dynamic"},
        dense=str(tmp_path / "theirs"),
    )
    for name, values in {
        "tower/user": rows,
        "tower/user/Adam": -rows,
        "tower/user/Adam_1": rows**2,
        "tower/user/Adam/vhat": rows + 1,
    }.items():
        assert_same(read(tmp_path / "ours", name), dict(zip(map(int, keys), values)))
    np.testing.assert_array_equal(read_static(tmp_path / "ours", "item"), static)
    np.testing.assert_array_equal(read_static(tmp_path / "ours", "item/Adagrad"), static)
    assert_same(read(tmp_path / "ours", "few"), dict(enumerate(static[:4])))
    plain = tf.train.load_checkpoint(str(tmp_path / "ours"))
    np.testing.assert_array_equal(plain.get_tensor("dense/w"), [1, 2])
    assert "--dynamic item" in str(report) and "beta1_power" in str(report)


def test_dumps_of_sok_1_0(tmp_path):
    rows = rows_by_key([3, 99, 10**12], 5)
    sok.old_dump(tmp_path, "user", np.array(list(rows)), np.array(list(rows.values())))
    checkpoint.import_checkpoint("sok", str(tmp_path), str(tmp_path / "ours"))
    assert_same(read(tmp_path / "ours", "user"), rows)


def test_dumps_that_are_cut_off(tmp_path):
    sok.dump(tmp_path, "user:0", np.arange(4) * 3, np.ones((4, 2), np.float32))
    weight = tmp_path / "user_0-weight"
    weight.write_bytes(weight.read_bytes()[:-4])
    with pytest.raises(ValueError, match="user_0-weight has 7 values for 4 keys"):
        checkpoint.import_checkpoint("sok", str(tmp_path), str(tmp_path / "ours"))
    weight.write_bytes(weight.read_bytes()[:200])
    with pytest.raises(ValueError, match="doesn't begin as a file of sok.dump does"):
        checkpoint.import_checkpoint("sok", str(tmp_path), str(tmp_path / "ours"))
    weight.unlink()
    with pytest.raises(ValueError, match="not user_0-weight: the dump is incomplete"):
        checkpoint.import_checkpoint("sok", str(tmp_path), str(tmp_path / "ours"))
    with pytest.raises(ValueError, match="There are no tables of sok.dump"):
        (tmp_path / "user_0-key").unlink()
        checkpoint.import_checkpoint("sok", str(tmp_path), str(tmp_path / "ours"))


def test_the_command_renames(tmp_path, capsys):
    rows = rows_by_key([1, 2])
    entries = deeprec.embedding_variable("e", rows) | deeprec.embedding_variable("e/Adam", rows)
    entries |= {"dnn/a/w": np.float32([1]), "dnn/b": np.float32([2]), "old": np.float32([3])}
    deeprec.write(str(tmp_path / "theirs"), entries)
    (tmp_path / "names.txt").write_text("e = user  # the table\n\ndnn/* = tower/*\nold =\n")
    arguments = ["import", "deeprec", f"{tmp_path}/theirs", f"{tmp_path}/ours"]
    assert command.main([*arguments, "--map", f"{tmp_path}/names.txt"]) == 0
    assert_same(read(tmp_path / "ours", "user/Adam"), rows)
    names = {name for name, _ in tf.train.list_variables(str(tmp_path / "ours"))}
    assert {"tower/a/w", "tower/b"} < names and not any("old" in name for name in names)
    output = capsys.readouterr().out
    assert "user: dynamic table, 2 rows of 3 float32, from e-values" in output
    assert "old: the map of names says so" in output
    assert command.main(arguments) == 1
    assert "There is a checkpoint" in capsys.readouterr().err


@pytest.mark.parametrize(
    "text, words",
    [
        ("emb = user", "there is no variable 'emb' .there is: e, w"),
        ("e = w", "'e' and 'w' would both be 'w'"),
        ("e user", "line 1: 'old = new' is expected"),
        ("e = a\ne = b", "line 2: 'e' appears twice"),
        ("* = a/*/*", "an old name may have one"),
    ],
)
def test_maps_that_are_wrong(tmp_path, capsys, text, words):
    entries = deeprec.embedding_variable("e", rows_by_key([1])) | {"w": np.float32([1])}
    deeprec.write(str(tmp_path / "theirs"), entries)
    (tmp_path / "names").write_text(text)
    arguments = ["import", "deeprec", f"{tmp_path}/theirs", f"{tmp_path}/ours"]
    assert command.main([*arguments, "--map", f"{tmp_path}/names"]) == 1
    assert words in capsys.readouterr().err.replace("(there", ".there")
    assert not list(tmp_path.glob("ours*"))


def test_what_isnt_to_be_imported(tmp_path):
    deeprec.write(str(tmp_path / "theirs"), deeprec.embedding_variable("e", rows_by_key([1])))
    checkpoint.import_checkpoint("deeprec", str(tmp_path / "theirs"), str(tmp_path / "ours"))
    with pytest.raises(ValueError, match="is one of this library"):
        checkpoint.import_checkpoint("deeprec", str(tmp_path / "ours"), str(tmp_path / "again"))
    with pytest.raises(ValueError, match="in_order has no effect on a checkpoint of deeprec"):
        checkpoint.import_checkpoint("deeprec", str(tmp_path / "theirs"), "x", in_order=["e"])
    with pytest.raises(ValueError, match="framework is 'deeprec' or"):
        checkpoint.import_checkpoint("persia", str(tmp_path / "theirs"), "x")
    with pytest.raises(ValueError, match="has no table old"):
        sok.dump(tmp_path, "user:0", np.arange(4) * 3, np.ones((4, 2), np.float32))
        checkpoint.import_checkpoint("sok", str(tmp_path), "x", kinds={"old": "static"})
