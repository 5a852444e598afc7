"""Checks placements against dictionaries that are filled key by key."""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from collective.checkpoint.files.layout import StoredTable
from collective.ops import placement
from collective.ops.communication import collectives
from collective.tables.dynamic_table import DynamicTable

ROOT = Path(__file__).resolve().parents[3]
RANKS = range(1, 9)
EDGES = [-(2**63), -(2**63) + 1, -(2**32), -7, -1, 0, 1, 2**31, 2**32 - 1, 2**32, 2**63 - 1]
DRAWN = np.random.default_rng(1).integers(-(2**63), 2**63 - 1, 1000)
KEYS = np.concatenate([np.array(EDGES, np.int64), DRAWN])
PLACEMENTS = {
    "static": placement.static,
    "whole static": lambda ranks: placement.static(ranks, ranks // 2),
    "dynamic": placement.dynamic,
    "whole dynamic": lambda ranks: placement.dynamic(ranks, ranks // 2),
}


def mixed(key: int) -> int:
    """Mixes by SplitMix64, in Python's unbounded numbers."""
    x = key % 2**64
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    x = (x ^ x >> 27) * 0x94D049BB133111EB % 2**64
    return x ^ x >> 31


def owner_of(kind: str, key: int, ranks: int) -> int:
    if kind.startswith("whole"):
        return ranks // 2
    return (key if kind == "static" else mixed(key)) % ranks


def shards(rows: int, ranks: int) -> list[list[int]]:
    """Returns the keys of each shard of a static table, dealt one by one."""
    dealt: list[list[int]] = [[] for _ in range(ranks)]
    for key in range(rows):
        dealt[key % ranks].append(key)
    return dealt


@pytest.mark.parametrize("kind", PLACEMENTS)
@pytest.mark.parametrize("ranks", RANKS)
def test_owners(kind: str, ranks: int):
    placed = PLACEMENTS[kind](ranks)
    want = [owner_of(kind, key, ranks) for key in KEYS.tolist()]
    owners = placed.owner(KEYS)
    assert owners.dtype == np.int32 and owners.tolist() == want
    assert placed.owner(KEYS[:0]).tolist() == []
    with tf.Graph().as_default(), tf.Session() as session:
        keys = tf.placeholder(tf.int64, [None])
        tensor = placed.owner_tensor(keys)
        assert tensor.dtype == tf.int32
        assert session.run(tensor, {keys: KEYS}).tolist() == want


@pytest.mark.parametrize("rows", [0, 1, 2, 7, 8, 23])
@pytest.mark.parametrize("ranks", RANKS)
def test_shards(rows: int, ranks: int):
    """Tables with fewer rows than ranks have empty shards."""
    placed, whole = placement.static(ranks), np.arange(rows)
    dealt = shards(rows, ranks)
    assert placed.counts(rows) == [len(shard) for shard in dealt]
    for rank, shard in enumerate(dealt):
        assert placed.count(rank, rows) == len(shard)
        assert placed.keys(rank, rows).tolist() == shard
        assert placed.keys(rank, rows).dtype == np.int64
        assert placed.row(np.array(shard, np.int64)).tolist() == list(range(len(shard)))
        assert placed.key(rank, np.arange(len(shard))).tolist() == shard
        assert whole[placed.rows_of(rank)].tolist() == shard
        for first in range(rows + 1):
            later = [key for key in shard if key >= first]
            assert whole[first:][placed.rows_of(rank, first)].tolist() == later
            assert placed.count(rank, first) == len(shard) - len(later)


def test_rows_of_tables_with_more_than_2_to_the_32_keys():
    placed, keys = placement.static(7), np.array([2**32, 2**40 + 3, 2**62], np.int64)
    rows = placed.row(keys)
    assert rows.tolist() == [key // 7 for key in keys.tolist()]
    for key, row, owner in zip(keys.tolist(), rows.tolist(), placed.owner(keys).tolist()):
        assert placed.key(owner, row) == key and placed.row(key) == row
    unsigned = placed.key(3, np.arange(2, dtype=np.uint64))
    assert unsigned.dtype == np.uint64 and unsigned.tolist() == [3, 10]


@pytest.mark.parametrize("saved", RANKS)
@pytest.mark.parametrize("ranks", RANKS)
def test_rows_that_two_placements_have_in_common(saved: int, ranks: int):
    """The rows of each part that a rank of another job has, and where it has them."""
    before, now = placement.static(saved), placement.static(ranks)
    rows = 3 * saved * ranks  # each pattern, three times
    parts, dealt = shards(rows, saved), shards(rows, ranks)
    for part, old in enumerate(parts):
        for rank, new in enumerate(dealt):
            pairs = [(old.index(key), new.index(key)) for key in old if key in set(new)]
            common = before.common(part, now, rank)
            assert before.may_hold(part, now, rank) == bool(pairs) == (common is not None)
            if common is None:
                continue
            row = now.row(before.key(part, common.first))
            for i, pair in enumerate(pairs):
                assert pair == (common.first + i * common.step, row + i * common.other_step)


@pytest.mark.parametrize("kind", ["static", "dynamic"])
@pytest.mark.parametrize("saved", RANKS)
def test_parts_that_can_hold_a_ranks_keys(kind: str, saved: int):
    """Counted out: of the numbers of one period, those that a rank owns, and their parts."""
    for ranks in RANKS:
        before, now = PLACEMENTS[kind](saved), PLACEMENTS[kind](ranks)
        for rank in range(ranks):
            want = {number % saved for number in range(rank, saved * ranks, ranks)}
            assert before.parts_of(now, rank) == sorted(want)
            of_rank = KEYS[now.owner(KEYS) == rank]
            assert set(before.owner(of_rank).tolist()) <= want
            is_part = before.may_hold(np.arange(saved), now, rank)
            assert np.flatnonzero(is_part).tolist() == sorted(want)


@pytest.mark.parametrize("ranks, only", [(2, 0), (3, 2), (8, 5)])
def test_a_table_that_one_rank_has_whole(ranks: int, only: int):
    """It is stored as one part, as plain TensorFlow would save it."""
    placed, whole = placement.static(ranks, only), np.arange(23)
    assert (placed.kind, placed.parts) == (placement.ON_ONE_RANK * (1 + only), 1)
    assert placed.counts(23) == [23 * (rank == only) for rank in range(ranks)]
    for rank in range(ranks):
        own = whole if rank == only else whole[:0]
        assert placed.part(rank) == (0 if rank == only else None)
        assert placed.keys(rank, 23).tolist() == own.tolist()
        assert placed.row(own).tolist() == own.tolist()
        assert whole[placed.rows_of(rank)].tolist() == own.tolist()
        assert whole[5:][placed.rows_of(rank, 5)].tolist() == [k for k in own.tolist() if k >= 5]
        # All rows of each part of a checkpoint, and none on other ranks.
        for saved in (1, 3, 4):
            before = placement.static(saved)
            every = list(range(saved)) if rank == only else []
            assert before.parts_of(placed, rank) == every
            for part in range(saved):
                common = before.common(part, placed, rank)
                assert common == ((0, 1, saved) if rank == only else None)
    assert placement.static(1, 4).kind == placement.STATIC
    assert placement.static(3, 4).holder == 1


@pytest.mark.parametrize("ranks, only", [(2, 0), (3, 2), (8, 5)])
def test_a_dynamic_table_that_one_rank_has_whole(ranks: int, only: int):
    """Its keys are in one part; a rank without keys needs no part of any checkpoint."""
    placed = placement.dynamic(ranks, only)
    assert (placed.parts, placed.holder) == (1, only)
    for rank in range(ranks):
        assert placed.part(rank) == (0 if rank == only else None)
        for saved in (1, 3, 4):
            every = list(range(saved)) if rank == only else []
            assert placement.dynamic(saved).parts_of(placed, rank) == every
    assert placement.dynamic(1, 4).kind == placement.DYNAMIC
    assert placement.dynamic(3, 4).holder == 1


@pytest.mark.parametrize("ranks", RANKS)
def test_every_table_has_a_kind_of_its_own(ranks: int):
    static = [placement.static(ranks), *(placement.static(ranks, r) for r in range(ranks))]
    dynamic = [placement.dynamic(ranks), *(placement.dynamic(ranks, r) for r in range(ranks))]
    kinds = [placed.kind for placed in [*static, *dynamic]]
    assert len(set(kinds)) == (2 if ranks == 1 else 2 + 2 * ranks)
    assert [placement.is_dynamic(kind) for kind in kinds] == [False] * (1 + ranks) + [True] * (
        1 + ranks
    )


@pytest.mark.parametrize("rows", [0, 1, 7, 23])
def test_shares_of_a_number_of_rows(rows: int):
    """All rows are shared out, to those who may have any."""
    for placed in (placement.static(3), placement.dynamic(3)):
        assert [placed.share(r, rows) for r in range(3)] == placement.static(3).counts(rows)
    for placed in (placement.static(3, 1), placement.dynamic(3, 1)):
        assert [placed.share(r, rows) for r in range(3)] == [0, rows, 0]


def test_placements_are_equal_if_they_place_all_keys_alike():
    assert placement.static(3) == placement.static(3)
    assert placement.static(3) != placement.static(2)
    assert placement.static(3) != placement.dynamic(3)
    for made in (placement.static, placement.dynamic):
        assert made(3, 1) == made(3, 1)
        assert made(3, 1) != made(3, 2)
        assert made(3, 1) != made(3)
    assert placement.static(3, 1) != placement.dynamic(3, 1)


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_rows_in_a_graph(ranks: int):
    """A served model finds rows by TensorFlow's own strategy, training by these operations."""
    placed, whole = placement.static(ranks), np.arange(23)
    with tf.Graph().as_default(), tf.Session() as session:
        keys = tf.placeholder(tf.int64, [None])
        parts = [tf.constant(whole[placed.rows_of(rank), None]) for rank in range(ranks)]
        served = tf.nn.embedding_lookup(parts, keys, partition_strategy=placed.strategy)
        rows, own = placed.row(keys), tf.constant(whole)[placed.rows_of(ranks - 1)]
        back = placed.key(ranks - 1, tf.range(3, dtype=tf.int64))
        values = session.run([served, rows, own, back], {keys: whole})
    assert values[0][:, 0].tolist() == whole.tolist()
    assert values[1].tolist() == (whole // ranks).tolist()
    assert values[2].tolist() == shards(23, ranks)[-1]
    assert values[3].tolist() == [ranks - 1, 2 * ranks - 1, 3 * ranks - 1]


# ---- Who knows it

# The files that compute which rank has which row, each with its reason.
KNOWN_IN = {
    "ops/placement.py": "is the place for it",
    "ops/native/placement.h": "is its twin for compiled operations",
    "ops/gpu/placement.cuh": "is its twin for CUDA kernels",
    "ops/gpu/reference/owners.py": "is what kernels are compared with, without TensorFlow",
    "collective/tables/policies/bloom_filter.py": "makes keys of which a rank has a partition",
}
MOST = 6
# Files that divide by a number of ranks for another reason.
OTHERS = {
    "collective/compat/distributed_embeddings_stand_in/layer.py": "cuts a batch into the ranks' "
    "shares",
    "collective/checkpoint/reading/table_reader.py": "shares a buffer among parts",
    "collective/data/global_batches.py": "cuts a batch into the ranks' shares",
    "collective/data/parquet_dataset.py": "deals batches to ranks",
    "collective/data/resumable_dataset.py": "deals records to ranks",
    "collective/data/streams/protocol.py": "cuts a batch into the ranks' shares",
    "collective/data/work_queue.py": "deals items to ranks",
    "collective/estimator/input_sharding.py": "deals batches to ranks",
    "collective/plan/machine_rates.py": "counts the bytes that each rank gets",
    "collective/planner/machines.py": "counts the ranks of a host",
    "collective/planner/workload.py": "takes the rank of a whole table from those that there are",
    "collective/planner/published.py": "counts the hosts that ranks need",
    "collective/serving/variable_copy.py": "deals the work of copying parts to ranks",
    "ops/communication/collectives.py": "cuts a tensor into pieces, one for each rank",
    "ops/communication/dense_allreduce.py": "cuts a tensor into pieces, one for each rank",
    "ops/native/carrier.cc": "cuts a tensor into pieces, one for each rank",
}
COUNTS = {"ranks", "_ranks", "world_size", "saved", "shards", "parts"}
REMAINDERS = {"floormod", "floordiv", "floor_divide", "mod", "remainder", "divmod"}
IN_COMPILED_CODE = re.compile(
    r"[%/]\s*(static_cast<\w+>\()?\s*[\w.>-]*\branks_?\b|&\s*\(ranks_? - 1\)"
)


def names_ranks(node: ast.AST | None) -> bool:
    """Tells whether an expression has a number of ranks, or of a stored table's parts."""
    for part in ast.walk(node) if node is not None else ():
        if isinstance(part, ast.Name) and part.id in COUNTS:
            return True
        if isinstance(part, ast.Attribute) and part.attr in COUNTS:
            return True
        if isinstance(part, ast.Call) and not part.args:
            if isinstance(part.func, ast.Attribute) and part.func.attr in ("size", "world_size"):
                return True
    return False


def divides_by_ranks(node: ast.AST) -> bool:
    """Tells whether Python's code takes a remainder or quotient, or every Nth element."""
    if isinstance(node, ast.BinOp):
        if isinstance(node.op, (ast.Mod, ast.FloorDiv)):
            is_text = isinstance(node.left, (ast.Constant, ast.JoinedStr))
            return not is_text and (names_ranks(node.left) or names_ranks(node.right))
        times = node.left
        is_inverse = isinstance(node.op, ast.Add) and isinstance(times, ast.BinOp)
        return is_inverse and isinstance(times.op, ast.Mult) and names_ranks(times.right)
    if isinstance(node, ast.Slice):
        return names_ranks(node.step)
    if isinstance(node, ast.Call):
        name = getattr(node.func, "attr", getattr(node.func, "id", ""))
        if name in ("range", "arange"):
            return len(node.args) == 3 and names_ranks(node.args[2])
        return name in REMAINDERS and any(map(names_ranks, node.args[1:]))
    return False


def divisions_in_python(text: str) -> list[int]:
    return [n.lineno for n in ast.walk(ast.parse(text)) if divides_by_ranks(n)]  # type: ignore[attr-defined]


def divisions_in_compiled_code(text: str) -> list[int]:
    lines = enumerate(text.splitlines(), 1)
    return [n for n, line in lines if IN_COMPILED_CODE.search(line.partition("//")[0])]


def sources() -> Iterator[tuple[str, list[int]]]:
    """Yields the product's files above the launcher, and the lines that divide by ranks."""
    for folder in ("collective", "ops", "strategies"):
        for directory, _, files in os.walk(ROOT / folder):
            for file in sorted(files):
                path = Path(directory) / file
                name = path.relative_to(ROOT).as_posix()
                if path.suffix == ".py":
                    yield name, divisions_in_python(path.read_text(encoding="utf-8"))
                elif path.suffix in (".cc", ".h", ".cu", ".cuh"):
                    yield name, divisions_in_compiled_code(path.read_text(encoding="utf-8"))


def placements(text: str) -> Iterator[tuple[str, str]]:
    """Yields the names of fields, properties and arguments that are placements, and their types."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.FunctionDef, ast.arg)):
            name = node.name if isinstance(node, ast.FunctionDef) else node.arg
            kind = node.returns if isinstance(node, ast.FunctionDef) else node.annotation
        elif isinstance(node, ast.AnnAssign):
            name, kind = ast.unparse(node.target).rpartition(".")[2], node.annotation
        else:
            continue
        if name in ("placement", "row_placement"):
            yield name, ast.unparse(kind) if kind is not None else ""


# In these it is the option of that name, a word.
OF_THE_OPTION = (
    "collective/options/",
    "collective/strategy.py",
    "collective/plan/",
    "collective/planner/",
    "collective/compat/sok_variables.py",
)


@pytest.mark.slow
def test_every_placement_has_a_type():
    """With `Any`, nothing would find a dynamic table that is asked for the rows of keys."""
    found = {
        (name, kind)
        for file, _ in sources()
        if file.endswith(".py") and not file.startswith(OF_THE_OPTION)
        for name, kind in placements((ROOT / file).read_text(encoding="utf-8"))
    }
    assert found == {
        ("placement", "Placement"),
        ("row_placement", "RowPlacement"),
        ("row_placement", "NoReturn"),
    }


def test_dynamic_tables_have_no_rows_by_placement(monkeypatch):
    stored = StoredTable("t", "dynamic", None, 2, "float32", 4, (3, 1), keys="t/keys")
    assert stored.placement == placement.dynamic(2)
    with pytest.raises(ValueError, match="table 't' is dynamic"):
        _ = stored.row_placement
    with tf.Graph().as_default():
        table = DynamicTable(
            initializer=tf.ones_initializer(),
            shape=tf.TensorShape([None, 2]),
            dtype=tf.float32,
            name="t",
        )
        monkeypatch.setattr(collectives, "size", lambda: 3)
        assert table.placement == placement.dynamic(3)
        with pytest.raises(TypeError, match="table 't' is dynamic"):
            _ = table.row_placement


@pytest.mark.slow
def test_few_files_know_which_rank_has_which_row():
    """Everything else asks `collective.ops.placement`: another placement is then a class."""
    found = {name: lines for name, lines in sources() if lines}
    unknown = {name: lines for name, lines in found.items() if name not in {**KNOWN_IN, **OTHERS}}
    assert not unknown, f"ask collective.ops.placement: {unknown}"
    assert set(found) == {*KNOWN_IN, *OTHERS}, "listed, but doesn't divide by a number of ranks"
    assert len(KNOWN_IN) <= MOST


@pytest.mark.parametrize(
    "code",
    [
        "keys % ranks",
        "keys // collectives.size()",
        "mix(keys) % np.uint64(self._ranks)",
        "parts = keys % len(stored.parts)",
        "tf.math.floormod(keys, collectives.size())",
        "rows[rank::ranks]",
        "value[rank :: collectives.size()]",
        "rows * ranks + rank",
        "rows * np.uint64(ranks) + np.uint64(rank)",
        "len(range(rank, rows, ranks))",
        "np.arange(rank, rows, collectives.size())",
    ],
)
def test_what_counts_as_knowing_it(code: str):
    assert divisions_in_python(code) == [1]


@pytest.mark.parametrize(
    "code",
    [
        "const int64_t rest = key % ranks_;",
        "static_cast<uint32_t>(key) % static_cast<uint32_t>(ranks_)",
        "key / layout.ranks",
        "x & (ranks - 1)",
    ],
)
def test_what_counts_as_knowing_it_in_compiled_code(code: str):
    assert divisions_in_compiled_code(code) == [1]
    assert divisions_in_compiled_code(f"// {code}") == []
