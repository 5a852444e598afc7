"""Trains on the double, and prints what TensorFlow would refuse to place on a machine with a GPU,
or would place elsewhere than it belongs.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow.compat.v1 as tf

from collective import CollectiveStrategy, TablePolicy, train
from collective.ops import kernel_device
from collective.ops.graph import graph_analysis
from collective.prefetch.enable import split_of
from tests.gpu_double import placer

OPTIMIZERS = (
    tf.train.GradientDescentOptimizer(0.1),
    tf.train.MomentumOptimizer(0.1, 0.9),
    tf.train.AdagradOptimizer(0.1),
    tf.train.AdamOptimizer(0.1),
    tf.train.FtrlOptimizer(0.1),
    tf.train.RMSPropOptimizer(0.1),
    tf.train.AdadeltaOptimizer(0.1),
    tf.train.ProximalAdagradOptimizer(0.1),
    # One number a row, an integer a row, and one for the whole table.
    train.RowWiseAdagradOptimizer(0.1),
    lambda: train.AdagradDecayOptimizer(0.1, tf.train.get_or_create_global_step()),
    train.AdamAsyncOptimizer(0.1),
)
# TensorFlow has these for CPUs only: there they update variables that are no tables.
OPTIMIZERS_OF_CPUS = (
    tf.train.ProximalGradientDescentOptimizer(0.1),
    lambda: tf.train.AdagradDAOptimizer(0.1, tf.train.get_or_create_global_step()),
)
DEVICES = (None, "/device:GPU:0", "/cpu:0")
# Of tables: all on the GPU, the dynamic ones in the host's memory, all there.
CHOICES = (("gpu", "gpu"), ("gpu", "host"), ("cpu", "host"))
OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"prefetch_keys": True, "checkpoint_blocking": False},
    {"grouping": False, "local_steps": 2, "dense_compression": "bf16", "wire_dtype": "float16"},
)
# Operations of a lookup that take no table, but are where it is.
NEXT_TO_TABLES = {"CollectiveAsk", "CollectiveHear", "CollectivePool", "CollectivePoolGradient"}
# What these leave in the host's memory, on a GPU; the rest is in the GPU's.
IN_HOST_MEMORY = {
    "CollectiveAsk": {"splits", "row_splits", "counts"},
    "CollectiveHear": {"row_splits", "headers"},
    "IteratorGetNext": {"components"},
}


class Model:
    """Looks up static and dynamic tables in all ways, as well as a replicated variable.

    Args:
        device: of the script, which makes all but its data there.
        optimizer: of its training, or what makes it.
    """

    def __init__(self, device: str | None, optimizer: Any):
        data = tf.data.Dataset.from_tensors((np.arange(6) % 5, np.stack([np.arange(6)] * 2, 1)))
        with tf.device("/cpu:0"):
            ids, at = tf.data.make_one_shot_iterator(data.repeat()).get_next()
        with tf.device(device):
            self.static, self.dynamic = _tables()
            weights = tf.get_variable("weights", [3, 1])
            keys = tf.SparseTensor(at, ids, [6, 6])
            rows = [
                rows
                for table, other in (self.static, self.dynamic)
                for rows in (
                    tf.nn.embedding_lookup(table, ids),
                    tf.gather(table, ids),
                    tf.nn.embedding_lookup_sparse(table, keys, None, combiner="mean"),
                    tf.nn.safe_embedding_lookup_sparse(other, keys, None, combiner="sum"),
                )
            ]
            rows.append(
                tf.cond(
                    weights[0, 0] > 0,
                    lambda: tf.nn.embedding_lookup(self.static[0], ids),
                    lambda: tf.nn.embedding_lookup(self.static[1], ids),
                )
            )
            self.loss = tf.add_n([tf.reduce_mean(tf.square(x @ weights)) for x in rows])
            self.loss += tf.nn.l2_loss(self.static[0])
            self.mean_loss = tf.metrics.mean(self.loss)
            step = tf.train.get_or_create_global_step()
            optimizer = optimizer() if callable(optimizer) else optimizer
            gradients, variables = zip(*optimizer.compute_gradients(self.loss))
            clipped, _ = tf.clip_by_global_norm(gradients, 1.0)
            self.update = optimizer.apply_gradients(zip(clipped, variables), global_step=step)
            self.count = self.dynamic[0].total_count()

    def run(self) -> None:
        """Trains, saves, evaluates, and reads a table as a whole."""
        config = tf.ConfigProto(allow_soft_placement=True)
        with tf.train.MonitoredTrainingSession(config=config) as session:
            for _ in range(2):
                session.run(self.update)
            assert np.isfinite(session.run(self.mean_loss)).all()
            assert np.isfinite(session.run(self.static[0])).all()
            assert session.run(self.count) == 5


def _tables() -> tuple[list[Any], list[Any]]:
    strategy = CollectiveStrategy()
    with strategy.embedding_scope():
        orthogonal = tf.orthogonal_initializer()
        static = [
            tf.get_variable(name, [10, 3], initializer=initializer)
            for name, initializer in (("a", None), ("b", orthogonal))
        ]
    with strategy.embedding_scope(policy=TablePolicy(steps_to_live=100, weight_bound=1.0)):
        return static, [tf.get_variable(name, [None, 3]) for name in ("c", "d")]


def misplaced(device: str | None, optimizer: Any, choice: str, options: Any) -> Iterator[str]:
    """Yields what is wrong with the devices of a graph that was trained."""
    with CollectiveStrategy().scope(plan="quiet", **options), tf.Graph().as_default() as graph:
        model = Model(device, optimizer)
        saver = tf.train.Saver()
        model.run()
        assert saver.saver_def
        try:
            devices = placer.devices(graph)
        except ValueError as error:
            yield str(error)
            return
        on_device = {"a": choice == "gpu", "c": kernel_device.on_device(dynamic=True)}
        for table, wanted in on_device.items():
            for op in _users(graph, {"a": "ab", "c": "cd"}[table]):
                if devices[op.name] != ("GPU" if wanted else "CPU"):
                    yield f"{op.type} {op.name} is on the {devices[op.name]}"
                # Of integers, and of all types under op determinism, TensorFlow's kernels copy the
                # whole variable to the host: of a dynamic table it is address space.
                if op.type.startswith("ResourceScatter") and devices[op.name] == "GPU":
                    yield f"{op.type} {op.name} copies the whole table"
        yield from _staged_wrongly(graph, devices)
        for op in graph.get_operations():
            # The initial value of a whole table, of which a rank keeps its rows.
            if op.type == "Qr" and devices[op.name] != "CPU":
                yield f"{op.type} {op.name} is on the {devices[op.name]}"
        if len(set(on_device.values())) == 1:
            for op in graph.get_operations():
                if op.type in NEXT_TO_TABLES and (devices[op.name] == "GPU") != on_device["a"]:
                    yield f"{op.type} {op.name} is on the {devices[op.name]}"


def _staged_wrongly(graph: tf.Graph, devices: dict[str, str]) -> Iterator[str]:
    """Yields what of the keys ahead is staged in another memory than it is in, or left behind."""
    split = split_of(graph)
    if split is None:
        return
    stages = [op for op in graph.get_operations() if op.type == "MapStage"]
    for stage in stages:
        for x in stage.inputs[2].op.inputs:  # They are awaited together.
            if x.op.type in IN_HOST_MEMORY:
                in_host = _output_name(x) in IN_HOST_MEMORY[x.op.type]
                there = devices[x.op.name] == "GPU" and not in_host
                if there != (devices[stage.name] == "GPU"):
                    yield f"{x.name}, {_output_name(x)}, is staged on the {devices[stage.name]}"
    for name, x in split.stage.tensors.items():
        taken = [op for op in graph_analysis.upstream([x.op]) if op.type == "MapUnstage"]
        if len(taken) < len(stages):
            yield f"a run that uses {name} leaves other tensors of its batch behind"
        # TensorFlow's kernels for a GPU take int32 in the host's memory.
        if x.dtype == tf.int32 and devices[x.op.name] == "GPU" and x.op.type != "IdentityN":
            yield f"{name} comes back by {x.op.type}"


def _output_name(x: tf.Tensor) -> str:
    names: list[str] = []
    for argument in x.op.op_def.output_arg:
        if argument.type_list_attr:
            count = len(x.op.get_attr(argument.type_list_attr))
        else:
            count = x.op.get_attr(argument.number_attr) if argument.number_attr else 1
        names += [argument.name] * count
    return names[x.value_index]


def _users(graph: tf.Graph, tables: str) -> list[tf.Operation]:
    """Returns tables and slots with their operations."""
    sharded = {
        v.handle.op
        for v in tf.global_variables()
        if v.shape.rank == 2 and v.op.name.partition("/")[0] in tables and "last_used" not in v.name
    }
    sharded |= {
        op for op in graph.get_operations() if op.type == "IdentityN" and op.inputs[0].op in sharded
    }
    users = [
        op
        for op in graph.get_operations()
        if op in sharded or (op.type != "If" and any(x.op in sharded for x in op.inputs))
    ]
    assert len(users) > 8
    return users


def cases() -> Iterator[tuple[Any, ...]]:
    """Yields (device of the script, optimizer, choices, options): of the latter, all pairs."""
    for optimizer in OPTIMIZERS:
        yield "/device:GPU:0", optimizer, CHOICES[0], {}
    for optimizer in OPTIMIZERS_OF_CPUS:
        yield None, optimizer, CHOICES[0], {}
    for (d, device), (c, choices) in itertools.product(enumerate(DEVICES), enumerate(CHOICES)):
        yield device, tf.train.AdagradOptimizer(0.1), choices, OPTIONS[(d + c) % len(OPTIONS)]


def main() -> None:
    found = []
    rank = CollectiveStrategy().rank()
    for device, optimizer, (choice, dynamic), options in cases():
        placer.use(choice)
        os.environ[kernel_device.DYNAMIC] = dynamic
        for line in misplaced(device, optimizer, choice, options):
            found.append(f"{device} {optimizer} {choice} {dynamic} {options}: {line}")
    print("\n".join(found) or f"rank {rank}: everything is placed", flush=True)


if __name__ == "__main__":
    main()
