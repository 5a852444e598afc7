"""Holds how much a step of 26 tables costs the host, in golden numbers: operations that TensorFlow
schedules, launches, copies and waits. Each of them takes microseconds of every step.
"""

from __future__ import annotations

import collections
from typing import Any

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from collective import CollectiveStrategy
from tests.gpu_double import driver

TABLES, IDS = 26, 64
# What the script computes of rows isn't counted.
SCRIPT = "script"

EXCHANGE = {
    "CollectiveBounds": 1,
    "CollectiveAsk": 1,
    "CollectiveHear": 1,
    "CollectiveGatherRows": 1,  # It does nothing: results are made straight from the tables.
    "CollectivePool": 1,
    "CollectiveSparsePoolUpdate": 1,
    # Tables and their slots, and the rate.
    "VarHandleOp": 2 * TABLES,
    "Const": 1,
    # By them a run leaves lookups out.
    "PlaceholderWithDefault": TABLES,
    "CollectiveRefuse": 1,
    "IteratorGetNext": 1,
    "OneShotIterator": 1,
    "NoOp": 1,
}
OF_SAMPLES = {
    "CollectiveMismatches": 1,
    "CollectiveRefuse": 2,
    "PlaceholderWithDefault": 2 * TABLES,
    "StridedSlice": TABLES,
    "Const": 2,
    "Pack": 1,
}
CALLS = {
    "launch": 21,
    "set_memory": 1,
    "copy_to_device": 4,
    "copy_to_host": 2,
    "create_event": 2,
    "record_event": 5,
    "wait_for_event": 2,
    "destroy_event": 3,  # the last one where the session ends: of the memory that uploads have
}


def batches() -> dict[str, Any]:
    """Returns what tf.data gives: for each table ids, and where they are."""
    at = np.stack([np.arange(IDS) // 2, np.arange(IDS) % 2], 1).astype(np.int64)
    batch = {f"ids{t}": np.arange(IDS, dtype=np.int64) % 50 + t for t in range(TABLES)}
    batch |= {f"at{t}": at for t in range(TABLES)}
    data = tf.data.Dataset.from_tensors(batch).repeat()
    return dict(tf.data.make_one_shot_iterator(data).get_next())


def look_up(table: Any, ids: tf.Tensor, at: tf.Tensor, by_sample: bool) -> tf.Tensor:
    if not by_sample:
        return tf.nn.embedding_lookup(table, ids)
    sparse = tf.SparseTensor(at, ids, tf.constant([IDS, 2], tf.int64))
    return tf.nn.embedding_lookup_sparse(table, sparse, None, combiner="mean")


@pytest.mark.slow
@pytest.mark.parametrize("by_sample", [False, True])
@pytest.mark.usefixtures("bound")
def test_what_a_step_costs_the_host(by_sample: bool, stand_in: driver.StandIn):
    strategy, metadata = CollectiveStrategy(), tf.RunMetadata()
    with strategy.scope(plan="quiet"), tf.Graph().as_default():
        batch = batches()
        with strategy.embedding_scope():
            tables = [tf.get_variable(f"t{t}", [1000, 16]) for t in range(TABLES)]
        rows = [
            look_up(table, batch[f"ids{t}"], batch[f"at{t}"], by_sample)
            for t, table in enumerate(tables)
        ]
        with tf.name_scope(SCRIPT):
            loss = tf.add_n([tf.reduce_mean(tf.square(of_table)) for of_table in rows])
        train = tf.train.AdagradOptimizer(0.1).minimize(loss)
        with tf.train.MonitoredTrainingSession() as session:
            session.run(train)
            stand_in.reset()
            options = tf.RunOptions(output_partition_graphs=True)
            session.run(train, options=options, run_metadata=metadata)
    nodes = [node for graph in metadata.partition_graphs for node in graph.node]
    operations = collections.Counter(node.op for node in nodes if SCRIPT not in node.name)
    assert operations == EXCHANGE | (OF_SAMPLES if by_sample else {})
    calls = collections.Counter(stand_in.calls)
    del calls["wait_for_stream"]  # of the emulator: on a GPU operations are in order by themselves
    assert calls == CALLS | ({"launch": CALLS["launch"] + 2} if by_sample else {})
