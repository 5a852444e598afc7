"""What the compiled operations of an exchange cost (collective.ops.embedding_bag), beside plain TensorFlow
doing one rank's part.

    python benchmarks/exchange_ops.py [--dims 16 128] [--ids one many] [--pooling asker owner]
    [--runs 40] [--malloc default]

26 tables of 100 to 1,000,000 rows (the sizes of Criteo-Kaggle's features, clipped), 4096 samples a
rank, Zipf(1.05) ids scattered over the tables, one id a feature or 1 to 10 that are summed;
Adagrad. Two ranks are simulated in one process and one thread: both ask, messages and rows change
hands without a network, both answer. Printed are the times of rank 0's operations, taken from the
trace of each run, and, without a trace, the whole step of plain TensorFlow with whole tables and
half of the batch. glibc is told to keep freed memory, unless --malloc default.
"""

from __future__ import annotations

import argparse
import collections
import os
import sys
import time
from typing import Any

KEEP = {
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": str(8 << 30),
    "MALLOC_TOP_PAD_": str(256 << 20),
}
if __name__ == "__main__" and "default" not in sys.argv and "MALLOC_TOP_PAD_" not in os.environ:
    # glibc reads it when it starts
    os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **KEEP})
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "0")

import numpy as np  # noqa: E402
import tensorflow.compat.v1 as tf  # noqa: E402

from collective.ops import embedding_bag  # noqa: E402

SIZES = [
    1460,
    583,
    10131227,
    2202608,
    305,
    24,
    12517,
    633,
    3,
    93145,
    5683,
    8351593,
    3194,
    27,
    14992,
    5461306,
    10,
    5652,
    2173,
    4,
    7046547,
    18,
    15,
    286181,
    105,
    142572,
]
RANKS, SAMPLES, BATCHES = 2, 4096, 4
KINDS = [
    "CollectiveBounds",
    "CollectiveAsk",
    "CollectiveHear",
    "CollectiveGatherRows",
    "CollectivePool",
    "CollectivePoolGradient",
    "CollectiveReduceRows",
    "ResourceSparseApplyAdagrad",
]
RATE, FIRST = 0.01, 0.1


class Workload:
    """Batches, generated before anything is timed.

    Attributes:
        rows: of each table.
        ids, samples: [batch][rank][table], int64 [K].
    """

    def __init__(self, many: bool, most: int):
        self.rows = [min(max(size, 100), most) for size in SIZES]
        rng = np.random.default_rng(5)
        self.ids, self.samples = (
            [[[] for _ in range(RANKS)] for _ in range(BATCHES)] for _ in range(2)
        )
        for rows in self.rows:
            chances = np.cumsum(np.arange(1, rows + 1) ** -1.05)
            scattered = rng.permutation(rows)
            for batch in range(BATCHES):
                for rank in range(RANKS):
                    counts = rng.integers(1, 11, SAMPLES) if many else np.ones(SAMPLES, np.int64)
                    drawn = np.searchsorted(chances, rng.random(counts.sum()) * chances[-1])
                    self.ids[batch][rank].append(scattered[np.minimum(drawn, rows - 1)])
                    self.samples[batch][rank].append(np.repeat(np.arange(SAMPLES), counts))


def loss_of(outputs: list[tf.Tensor], dim: int) -> tf.Tensor:
    factors = tf.constant(
        np.random.default_rng(7).uniform(0.5, 1.5, len(outputs) * dim), tf.float32
    )
    return tf.reduce_mean(tf.reduce_sum(tf.concat(outputs, 1) * factors, 1))


def session() -> tf.Session:
    return tf.Session(
        config=tf.ConfigProto(intra_op_parallelism_threads=1, inter_op_parallelism_threads=1)
    )


def variable(name: str, rows: int, dim: int, value: float) -> tf.Variable:
    # From something that isn't constant: the graph would keep a copy of each table.
    filled = tf.fill([rows, dim], tf.placeholder_with_default(tf.constant(value), []))
    return tf.get_variable(name, initializer=filled, use_resource=True, dtype=tf.float32)


def update(table: tf.Variable, slot: tf.Variable, gradient: tf.IndexedSlices) -> tf.Operation:
    return tf.raw_ops.ResourceSparseApplyAdagrad(
        var=table.handle, accum=slot.handle, lr=RATE, grad=gradient.values, indices=gradient.indices
    )


def inputs(count: int) -> list[tf.Tensor]:
    return [tf.placeholder(tf.int64, [None]) for _ in range(count)]


def aligned(array: np.ndarray) -> np.ndarray:
    """A copy that starts on 64 bytes, which a session takes without another copy."""
    room = np.empty(array.nbytes + 64, np.uint8)
    start = -room.ctypes.data % 64
    copy = room[start : start + array.nbytes].view(array.dtype)
    copy[...] = array
    return copy


def feeds(
    workload: Workload, ids: list[list[Any]], samples: list[list[Any]]
) -> list[dict[Any, np.ndarray]]:
    return [
        {
            place: aligned(value)
            for rank in range(len(ids))
            for places, values in ((ids, workload.ids), (samples, workload.samples))
            for place, value in zip(places[rank], values[batch][rank])
        }
        for batch in range(BATCHES)
    ]


def exchange(
    workload: Workload, dim: int, many: bool, by_owner: bool, runs: int
) -> dict[str, np.ndarray]:
    """{kind of operation: [runs] ms} of rank 0."""
    count = len(workload.rows)
    sections = [embedding_bag.Section(t, dim, pooled=by_owner) for t in range(count)]
    kinds = [embedding_bag.STATIC] * count
    members = [
        embedding_bag.BagMember(
            t, dim, embedding_bag.SUM if many or by_owner else embedding_bag.ROWS
        )
        for t in range(count)
    ]
    with tf.Graph().as_default(), session() as running:
        ids, samples = [[inputs(count) for _ in range(RANKS)] for _ in range(2)]
        tables, slots = [
            [
                [
                    variable(f"{name}{rank}_{t}", (rows + RANKS - 1 - rank) // RANKS, dim, value)
                    for t, rows in enumerate(workload.rows)
                ]
                for rank in range(RANKS)
            ]
            for name, value in (("table", 0.01), ("slot", FIRST))
        ]
        asked, wanted = [], []
        for rank in range(RANKS):
            with tf.name_scope(f"rank{rank}"):
                wanted.append(embedding_bag.bounds(ids[rank]))
                asked.append(
                    embedding_bag.request(
                        ids[rank],
                        samples[rank] if by_owner else [],
                        [],
                        members,
                        sections,
                        kinds,
                        RANKS,
                    )
                )
        parts = [tf.split(a.message, a.splits, num=RANKS) for a in asked]
        flats = []
        for rank in range(RANKS):
            message = tf.concat([part[rank] for part in parts], 0)
            splits = tf.stack([a.splits[rank] for a in asked])
            with tf.name_scope(f"rank{rank}"):
                heard = embedding_bag.respond(message, splits, sections, kinds, RANKS)
                handles = [table.handle for table in tables[rank]]
                flat = embedding_bag.gather(
                    handles,
                    heard.keys,
                    message,
                    splits,
                    sections,
                    kinds,
                    RANKS,
                    [t.shape for t in tables[rank]],
                )
            flats.append(tf.split(flat, heard.row_splits, num=RANKS))
        losses = []
        for rank in range(RANKS):
            received = tf.concat([flat[rank] for flat in flats], 0)
            with tf.name_scope(f"rank{rank}"):
                if by_owner:
                    scaled = [
                        embedding_bag.BagMember(t, dim, embedding_bag.SUM, weighted=True)
                        for t in range(count)
                    ]
                    outputs = embedding_bag.pool(
                        received,
                        asked[rank].positions,
                        asked[rank].samples,
                        asked[rank].scales,
                        scaled,
                    )
                else:
                    outputs = embedding_bag.pool(
                        received, asked[rank].positions, samples[rank] if many else [], [], members
                    )
            losses.append(loss_of(outputs, dim))
        with embedding_bag.scaled(1 / RANKS):
            gradients = tf.gradients(losses, [handle for rank in tables for handle in rank])
        mine = [g for g in gradients[:count]]
        with tf.name_scope("rank0"):
            train = [update(*its) for its in zip(tables[0], slots[0], mine)]
        other = [g.values for g in gradients[count:]]
        for made in tf.global_variables():
            running.run(made.initializer)
        fed = feeds(workload, ids, samples if many or by_owner else [[], []])
        owners = {op.name: op.type for op in running.graph.get_operations() if op.type in KINDS}
        # Of the gradients, the first of each two is rank 0's: they hang on what rank 0 made.
        own = {
            name
            for name, kind in owners.items()
            if kind in KINDS and _is_first(running.graph, name)
        }
        taken = collections.defaultdict(list)
        options = tf.RunOptions(trace_level=tf.RunOptions.SOFTWARE_TRACE)
        for run in range(-5, runs):
            trace = tf.RunMetadata()
            running.run(
                [train, [o.op for o in other], [w.op for w in wanted]],
                fed[run % BATCHES],
                options,
                trace,
            )
            spent: collections.Counter = collections.Counter()
            for device in trace.step_stats.dev_stats:
                for node in device.node_stats:
                    name = node.node_name.partition(":")[0]
                    if name in own:
                        spent[owners[name]] += node.op_end_rel_nanos - node.op_start_rel_nanos
            if run >= 0:
                for kind in KINDS:
                    taken[kind].append(spent[kind] / 1e6)
        return {kind: np.array(times) for kind, times in taken.items()}


def _is_first(graph: tf.Graph, name: str) -> bool:
    """Whether rank 0 carries out the operation: it is in its scope, or the gradient of one that is."""
    if "gradients" in name:
        return "rank0" in name
    return name.startswith("rank0")


def plain(workload: Workload, dim: int, many: bool, runs: int) -> np.ndarray:
    """[runs] ms of a step of plain TensorFlow on rank 0's half of the batch."""
    with tf.Graph().as_default(), session() as running:
        ids, samples = inputs(len(workload.rows)), inputs(len(workload.rows))
        tables = [variable(f"table{t}", rows, dim, 0.01) for t, rows in enumerate(workload.rows)]
        outputs = []
        for table, keys, of in zip(tables, ids, samples):
            if many:
                sparse = tf.SparseTensor(tf.stack([of, tf.zeros_like(of)], 1), keys, [SAMPLES, 10])
                outputs.append(
                    tf.ensure_shape(
                        tf.nn.embedding_lookup_sparse(table, sparse, None, combiner="sum"),
                        [SAMPLES, dim],
                    )
                )
            else:
                outputs.append(tf.nn.embedding_lookup(table, keys))
        train = tf.train.AdagradOptimizer(RATE, FIRST).minimize(loss_of(outputs, dim))
        for made in tf.global_variables():
            running.run(made.initializer)
        fed, times = feeds(workload, [ids], [samples] if many else [[]]), []
        for run in range(-5, runs):
            start = time.perf_counter()
            running.run(train, fed[run % BATCHES])
            times.append((time.perf_counter() - start) * 1e3)
        return np.array(times[5:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--dims", type=int, nargs="+", default=[16, 128], help="D")
    parser.add_argument(
        "--ids",
        nargs="+",
        choices=["one", "many"],
        default=["one", "many"],
        help="one a feature, or 1 to 10",
    )
    parser.add_argument(
        "--pooling",
        nargs="+",
        choices=["asker", "owner"],
        default=["asker", "owner"],
        help="who sums many ids: the rank that asks, or the one that owns them",
    )
    parser.add_argument("--runs", type=int, default=40, help="timed runs of each")
    parser.add_argument("--rows", type=int, default=1_000_000, help="of the largest tables")
    parser.add_argument(
        "--malloc", choices=["keep", "default"], default="keep", help="glibc's settings"
    )
    options = parser.parse_args()
    tf.disable_eager_execution()
    tf.logging.set_verbosity(tf.logging.ERROR)
    for name in options.ids:
        many = name == "many"
        workload = Workload(many, options.rows)
        for dim in options.dims:
            beside = plain(workload, dim, many, options.runs)
            for pooling in options.pooling if many else ["asker"]:
                times = exchange(workload, dim, many, pooling == "owner", options.runs)
                whole = np.sum(list(times.values()), 0)
                print(
                    f"\ndimension {dim}, {'1 to 10 ids' if many else 'one id'} a feature, "
                    f"pooled by the {pooling}\n"
                )
                print("| operation | ms | p90 | least | share |\n|---|---|---|---|---|")
                for kind, each in [
                    *times.items(),
                    ("all of them", whole),
                    ("plain TensorFlow, one step", beside),
                ]:
                    share = np.median(each) / np.median(whole)
                    numbers = (np.median(each), np.percentile(each, 90), each.min())
                    print(
                        f"| {kind} | " + " | ".join(f"{x:.2f}" for x in numbers) + f" | "
                        f"{share:.0%} |",
                        flush=True,
                    )


if __name__ == "__main__":
    main()
