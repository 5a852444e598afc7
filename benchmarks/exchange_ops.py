"""Times the compiled operations of an exchange (collective.ops.exchange.embedding_bag), and plain
TensorFlow doing one rank's part.

    python benchmarks/exchange_ops.py [--dims 16 128] [--ids one many] [--pooling asker owner]
    [--runs 40] [--malloc default]

The workload is step.py's: 26 tables of 100 to 1,000,000 rows, 4096 samples a rank, one id a feature
or 1 to 10 that are summed; Adagrad. Two ranks are simulated in one process and one thread: both
ask, messages and rows change hands without a network, both answer. Printed are the times of rank
0's operations, taken from the trace of each run, and, without a trace, the whole step of plain
TensorFlow with whole tables and half of the batch. glibc is told to keep freed memory, unless
--malloc default.
"""

from __future__ import annotations

import argparse
import collections
import os
import sys
import time

import jobs

RETAIN = jobs.ALLOCATORS["retain"]
if __name__ == "__main__" and "default" not in sys.argv and not RETAIN.keys() <= os.environ.keys():
    # glibc reads these variables when a process starts.
    os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **RETAIN})
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "0")

import numpy as np  # noqa: E402
import report  # noqa: E402
import tensorflow.compat.v1 as tf  # noqa: E402
from training_step import workload as step_workload  # noqa: E402
from training_step.workload import Setting  # noqa: E402

from collective.ops.exchange import embedding_bag  # noqa: E402

RANKS, SAMPLES, BATCHES, WARMUP = 2, 4096, 4, 5
LONGEST_BAG = 10
OPERATIONS = [
    "CollectiveBounds",
    "CollectiveAsk",
    "CollectiveHear",
    "CollectiveGatherRows",
    "CollectivePool",
    "CollectivePoolGradient",
    "CollectiveReduceRows",
    "ResourceSparseApplyAdagrad",
]
LEARNING_RATE, INITIAL_VALUE, INITIAL_SLOT = 0.01, 0.01, 0.1


class Workload:
    """Holds the batches, generated before anything is timed.

    Attributes:
        many: features have 1 to 10 ids, not one.
        rows: of each table.
        batches: [rank][batch], each a list of (ids, the sample of each id) by table.
    """

    def __init__(self, many: bool, most_rows: int):
        ids = (1, LONGEST_BAG) if many else (1, 1)
        setting = Setting(
            ranks=RANKS, ids=ids, batch=RANKS * SAMPLES, max_rows=most_rows, pool=BATCHES
        )
        self.many = many
        self.rows = setting.rows()
        self.batches = []
        for rank in range(RANKS):
            rank_batches = step_workload.batches(setting, rank)
            self.batches.append([step_workload.by_feature(setting, b) for b in rank_batches])

    def feeds(self, ranks: list[Inputs]) -> list[dict[tf.Tensor, np.ndarray]]:
        """Returns the feeds of each batch for the inputs of the first ranks."""
        feeds: list[dict[tf.Tensor, np.ndarray]] = [{} for _ in range(BATCHES)]
        for inputs, rank_batches in zip(ranks, self.batches):
            for feed, features in zip(feeds, rank_batches):
                for table, (ids, samples) in enumerate(features):
                    feed[inputs.ids[table]] = aligned(ids)
                    if inputs.samples:
                        feed[inputs.samples[table]] = aligned(samples)
        return feeds


class Inputs:
    """Holds the placeholders of a rank's ids, and if asked for of their samples, by table."""

    def __init__(self, tables: int, with_samples: bool):
        self.ids = [tf.placeholder(tf.int64, [None]) for _ in range(tables)]
        self.samples = []
        if with_samples:
            self.samples = [tf.placeholder(tf.int64, [None]) for _ in range(tables)]


def aligned(array: np.ndarray) -> np.ndarray:
    """Returns a copy that starts on 64 bytes, which a session takes without another copy."""
    room = np.empty(array.nbytes + 64, np.uint8)
    start = -room.ctypes.data % 64
    copy = room[start : start + array.nbytes].view(array.dtype)
    copy[...] = array
    return copy


def loss_of(outputs: list[tf.Tensor], dim: int) -> tf.Tensor:
    factors = np.random.default_rng(7).uniform(0.5, 1.5, len(outputs) * dim)
    weighted = tf.concat(outputs, 1) * tf.constant(factors, tf.float32)
    return tf.reduce_mean(tf.reduce_sum(weighted, 1))


def one_thread_session() -> tf.Session:
    return tf.Session(
        config=tf.ConfigProto(intra_op_parallelism_threads=1, inter_op_parallelism_threads=1)
    )


def variable(name: str, rows: int, dim: int, value: float) -> tf.Variable:
    # From a value that isn't constant: the graph would keep a copy of each table.
    filled = tf.fill([rows, dim], tf.placeholder_with_default(tf.constant(value), []))
    return tf.get_variable(name, initializer=filled, use_resource=True, dtype=tf.float32)


def initialize(session: tf.Session) -> None:
    """Initializes one variable after the other, so that two never need room at once."""
    for one in tf.global_variables():
        session.run(one.initializer)


class SimulatedExchange:
    """Builds a training step of two ranks in one graph, on shards of the workload's tables.

    Attributes:
        inputs: of each rank.
        fetches: run them for a step.
    """

    def __init__(self, workload: Workload, dim: int, pooled_by_owner: bool):
        count = len(workload.rows)
        self._dim, self._pooled_by_owner = dim, pooled_by_owner
        self._pooled = workload.many
        self._tables = range(count)
        self._sections = [
            embedding_bag.Section(t, dim, pooled=pooled_by_owner) for t in self._tables
        ]
        self._kinds = [embedding_bag.STATIC] * count
        with_samples = workload.many or pooled_by_owner
        self.inputs = [Inputs(count, with_samples) for _ in range(RANKS)]
        shards = [self._shards("table", rank, workload, INITIAL_VALUE) for rank in range(RANKS)]
        # Of rank 0, the only one that updates its shards.
        slots = self._shards("slot", 0, workload, INITIAL_SLOT)

        losses = self._losses(shards)
        handles = [shard.handle for of_rank in shards for shard in of_rank]
        with embedding_bag.scaled(1 / RANKS):
            gradients = tf.gradients(losses, handles)
        updates = []
        with tf.name_scope("rank0"):
            for shard, slot, gradient in zip(shards[0], slots, gradients):
                updates.append(adagrad_update(shard, slot, gradient))
        self.fetches = [
            *updates,
            *(gradient.values.op for gradient in gradients[count:]),
            *(bounds.op for bounds in self._bounds),
        ]

    def _shards(self, name: str, rank: int, workload: Workload, value: float) -> list[tf.Variable]:
        shards = []
        for table, rows in enumerate(workload.rows):
            owned = (rows + RANKS - 1 - rank) // RANKS
            shards.append(variable(f"{name}{rank}_{table}", owned, self._dim, value))
        return shards

    def _losses(self, shards: list[list[tf.Variable]]) -> list[tf.Tensor]:
        """Builds ask, hear, gather and pool of both ranks, and their losses."""
        self._bounds, requests = [], []
        for rank in range(RANKS):
            with tf.name_scope(f"rank{rank}"):
                self._bounds.append(embedding_bag.bounds(self.inputs[rank].ids))
                requests.append(self._ask(self.inputs[rank]))
        message_parts = [tf.split(ask.message, ask.splits, num=RANKS) for ask in requests]
        row_parts = []
        for rank in range(RANKS):
            message = tf.concat([parts[rank] for parts in message_parts], 0)
            splits = tf.stack([ask.splits[rank] for ask in requests])
            with tf.name_scope(f"rank{rank}"):
                row_parts.append(self._answer(shards[rank], message, splits))
        losses = []
        for rank in range(RANKS):
            received = tf.concat([parts[rank] for parts in row_parts], 0)
            with tf.name_scope(f"rank{rank}"):
                outputs = self._pool(received, requests[rank], self.inputs[rank])
            losses.append(loss_of(outputs, self._dim))
        return losses

    def _members(self, weighted: bool = False) -> list[embedding_bag.BagMember]:
        combiner = (
            embedding_bag.SUM if self._pooled or self._pooled_by_owner else embedding_bag.ROWS
        )
        return [
            embedding_bag.BagMember(t, self._dim, combiner, weighted=weighted) for t in self._tables
        ]

    def _ask(self, inputs: Inputs) -> embedding_bag.Request:
        samples = inputs.samples if self._pooled_by_owner else []
        return embedding_bag.request(
            inputs.ids, samples, [], self._members(), self._sections, self._kinds, RANKS
        )

    def _answer(
        self, shards: list[tf.Variable], message: tf.Tensor, splits: tf.Tensor
    ) -> list[tf.Tensor]:
        """Returns the rows for each rank, flat."""
        layout = (self._sections, self._kinds, RANKS)
        heard = embedding_bag.respond(message, splits, *layout)
        handles = [shard.handle for shard in shards]
        shapes = [shard.shape for shard in shards]
        flat = embedding_bag.gather(handles, heard.keys, message, splits, *layout, shapes)
        return tf.split(flat, heard.row_splits, num=RANKS)

    def _pool(
        self, received: tf.Tensor, request: embedding_bag.Request, inputs: Inputs
    ) -> list[tf.Tensor]:
        if self._pooled_by_owner:
            members = self._members(weighted=True)
            return embedding_bag.pool(
                received, request.positions, request.samples, request.scales, members
            )
        return embedding_bag.pool(received, request.positions, inputs.samples, [], self._members())


def adagrad_update(
    shard: tf.Variable, slot: tf.Variable, gradient: tf.IndexedSlices
) -> tf.Operation:
    return tf.raw_ops.ResourceSparseApplyAdagrad(
        var=shard.handle,
        accum=slot.handle,
        lr=LEARNING_RATE,
        grad=gradient.values,
        indices=gradient.indices,
    )


def exchange(
    workload: Workload, dim: int, pooled_by_owner: bool, runs: int
) -> dict[str, np.ndarray]:
    """Times rank 0's operations: {type of operation: [runs] ms}."""
    with tf.Graph().as_default() as graph, one_thread_session() as session:
        built = SimulatedExchange(workload, dim, pooled_by_owner)
        initialize(session)
        feeds = workload.feeds(built.inputs)
        types_by_name = {
            operation.name: operation.type
            for operation in graph.get_operations()
            if operation.type in OPERATIONS and belongs_to_rank_0(operation.name)
        }
        times: dict[str, list[float]] = {kind: [] for kind in OPERATIONS}
        options = tf.RunOptions(trace_level=tf.RunOptions.SOFTWARE_TRACE)
        for run in range(-WARMUP, runs):
            trace = tf.RunMetadata()
            session.run(built.fetches, feeds[run % BATCHES], options, trace)
            if run >= 0:
                nanoseconds = nanoseconds_by_type(trace, types_by_name)
                for kind in OPERATIONS:
                    times[kind].append(nanoseconds[kind] / 1e6)
        return {kind: np.array(milliseconds) for kind, milliseconds in times.items()}


def belongs_to_rank_0(name: str) -> bool:
    """Says that rank 0 carries out the operation: its name, or its gradient's, is in rank 0's
    scope.
    """
    return "rank0" in name if "gradients" in name else name.startswith("rank0")


def nanoseconds_by_type(
    trace: tf.RunMetadata, types_by_name: dict[str, str]
) -> collections.Counter[str]:
    spent: collections.Counter[str] = collections.Counter()
    for device in trace.step_stats.dev_stats:
        for node in device.node_stats:
            kind = types_by_name.get(node.node_name.partition(":")[0])
            if kind:
                spent[kind] += node.op_end_rel_nanos - node.op_start_rel_nanos
    return spent


def plain(workload: Workload, dim: int, runs: int) -> np.ndarray:
    """Times a step of plain TensorFlow on rank 0's half of the batch: [runs] ms."""
    with tf.Graph().as_default(), one_thread_session() as session:
        inputs = Inputs(len(workload.rows), with_samples=workload.many)
        outputs = []
        for t, rows in enumerate(workload.rows):
            table = variable(f"table{t}", rows, dim, INITIAL_VALUE)
            if workload.many:
                outputs.append(bag_sums(table, inputs.ids[t], inputs.samples[t]))
            else:
                outputs.append(tf.nn.embedding_lookup(table, inputs.ids[t]))
        optimizer = tf.train.AdagradOptimizer(LEARNING_RATE, INITIAL_SLOT)
        train = optimizer.minimize(loss_of(outputs, dim))
        initialize(session)
        feeds = workload.feeds([inputs])
        times = []
        for run in range(-WARMUP, runs):
            start = time.perf_counter()
            session.run(train, feeds[run % BATCHES])
            times.append((time.perf_counter() - start) * 1e3)
        return np.array(times[WARMUP:])


def bag_sums(table: tf.Variable, ids: tf.Tensor, samples: tf.Tensor) -> tf.Tensor:
    indices = tf.stack([samples, tf.zeros_like(samples)], 1)
    bags_of_ids = tf.SparseTensor(indices, ids, [SAMPLES, LONGEST_BAG])
    sums = tf.nn.embedding_lookup_sparse(table, bags_of_ids, None, combiner="sum")
    return tf.ensure_shape(sums, [SAMPLES, table.shape[1]])


def print_table(times: dict[str, np.ndarray], plain_times: np.ndarray) -> None:
    total = np.sum(list(times.values()), 0)
    rows = {**times, "all of them": total, "plain TensorFlow, one step": plain_times}
    print(report.heading(["operation", "ms", "p90", "least", "share"]))
    for name, milliseconds in rows.items():
        median = np.median(milliseconds)
        figures = (median, np.percentile(milliseconds, 90), milliseconds.min())
        share = f"{median / np.median(total):.0%}"
        print(report.row([name, *map(report.number, figures), share]), flush=True)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("--dims", type=int, nargs="+", default=[16, 128], help="of the tables")
    add(
        "--ids",
        nargs="+",
        choices=["one", "many"],
        default=["one", "many"],
        help="one a feature, or 1 to 10",
    )
    add(
        "--pooling",
        nargs="+",
        choices=["asker", "owner"],
        default=["asker", "owner"],
        help="who sums many ids: the rank that asks, or the rank that owns them",
    )
    add("--runs", type=int, default=40, help="timed runs of each")
    add("--rows", type=int, default=1_000_000, help="of the largest tables")
    add("--malloc", choices=list(jobs.ALLOCATORS), default="retain", help="glibc's settings")
    return parser.parse_args()


def main() -> None:
    arguments = parse()
    tf.disable_eager_execution()
    tf.logging.set_verbosity(tf.logging.ERROR)
    for ids in arguments.ids:
        workload = Workload(ids == "many", arguments.rows)
        for dim in arguments.dims:
            plain_times = plain(workload, dim, arguments.runs)
            for pooling in arguments.pooling if workload.many else ["asker"]:
                ids_text = "1 to 10 ids" if workload.many else "one id"
                print(f"\ndimension {dim}, {ids_text} a feature, pooled by the {pooling}\n")
                times = exchange(workload, dim, pooling == "owner", arguments.runs)
                print_table(times, plain_times)


if __name__ == "__main__":
    main()
