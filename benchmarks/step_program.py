"""Runs one rank of one of the programs that step.py times; step.py starts it, by the launcher.

    collective launch -np 2 benchmarks/step_program.py PROGRAM FOLDER

PROGRAM is step, plain, wire, replicated, keras or plain_keras. Copies of `plain` and `plain_keras`
have nothing to do with each other: add --independent.

FOLDER has the data (`training_step.workload.write`); the rank's measurements go to
FOLDER/PROGRAM.RANK.json.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Callable

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import jobs
import numpy as np
import psutil
import tensorflow.compat.v1 as tf
from training_step import model
from training_step import parts as step_parts
from training_step.workload import Setting, read

import collective
from collective import CollectiveStrategy

PARTED = 30  # steps that are taken apart
DEADLINE = 300.0  # seconds that one copy of `plain` waits for another
COLLECTIVE = re.compile(
    r"= ((?:Horovod(?:Grouped)?|Collective(?:Shared|Nccl))"
    r"(?:Alltoall|Allreduce|Allgather|Broadcast))(?:Keys|Rows)?\("
)


class Program:
    """Runs a session step by step; fetches[0] is the loss, unless `check` returns another."""

    def __init__(
        self,
        session: tf.Session,
        fetches: list[Any],
        feed: Callable[[int], dict[Any, Any]],
        check: Callable[[int, list[Any]], float] = lambda step, fetched: float(fetched[0]),
    ):
        self.session, self._fetches, self._feed, self._check = session, fetches, feed, check

    def step(self, i: int, **options: Any) -> tuple[float, float]:
        """Runs step i and returns its milliseconds and loss."""
        feed = self._feed(i)
        start = time.perf_counter()
        fetched = self.session.run(self._fetches, feed, **options)
        return (time.perf_counter() - start) * 1e3, self._check(i, fetched)


@contextlib.contextmanager
def sharded_tables(setting: Setting, folder: Path, rank: int) -> Iterator[Program]:
    """Prepares this library's program: every table is sharded over the ranks."""
    options = {
        name: getattr(tf, value) if value in ("float16", "bfloat16", "float32") else value
        for name, value in setting.scope.items()
    }
    strategy = CollectiveStrategy()
    with strategy.scope(**options), tf.Graph().as_default():
        tf.set_random_seed(1)
        data = model.Input(setting, read(setting, folder, rank))
        scope, step = strategy.embedding_scope(), None
        if setting.policy:
            step = tf.train.get_or_create_global_step()
            policy = collective.TablePolicy(**setting.policy)
            scope = strategy.embedding_scope(policy=policy)
        loss = model.loss(setting, data.tensors, scope)
        train = model.optimizer(setting).minimize(loss, global_step=step)
        with tf.Session(config=model.session_config(setting)) as session:
            session.run(tf.global_variables_initializer())
            data.start(session)
            yield Program(session, [loss, train], data.feed)


@contextlib.contextmanager
def whole_tables(setting: Setting, folder: Path, rank: int, replicated: bool) -> Iterator[Program]:
    """Prepares TensorFlow's programs, with whole tables on every rank.

    With `replicated` Horovod's optimizer makes all ranks take the same steps.
    """
    setting = dataclasses.replace(setting, dynamic=False)
    optimizer = wrapped = model.optimizer(setting)
    if replicated:
        import horovod.tensorflow as hvd

        hvd.init()
        wrapped = hvd.DistributedOptimizer(optimizer)
    with tf.Graph().as_default():
        tf.set_random_seed(1)
        data = model.Input(setting, read(setting, folder, rank))
        loss = model.loss(setting, data.tensors, contextlib.nullcontext())
        train = wrapped.minimize(loss)
        with tf.Session(config=model.session_config(setting)) as session:
            model.initialize_whole(session, optimizer)
            data.start(session)
            yield Program(session, [loss, train], data.feed)


@contextlib.contextmanager
def bare_exchange(setting: Setting, folder: Path, rank: int) -> Iterator[Program]:
    """Prepares the program of a step's collectives alone."""
    from training_step.wire import Wire

    from collective.ops.communication import collectives

    collectives.init()
    with tf.Graph().as_default():
        graph = Wire(setting, folder, rank)
        with tf.Session(config=model.session_config(setting)) as session:
            session.run(tf.global_variables_initializer())
            yield Program(session, graph.fetches, graph.feed, graph.check)


PROGRAMS: dict[str, Callable[[Setting, Path, int], contextlib.AbstractContextManager[Program]]] = {
    "step": sharded_tables,
    "plain": lambda setting, folder, rank: whole_tables(setting, folder, rank, False),
    "wire": bare_exchange,
    "replicated": lambda setting, folder, rank: whole_tables(setting, folder, rank, True),
}


# Those that `training_step.fit` measures.
KERAS = ("keras", "plain_keras")


def arrive(folder: Path, place: str, rank: int) -> None:
    (folder / f"{place}.{rank}").touch()


def all_arrived(folder: Path, place: str, ranks: int) -> bool:
    return all((folder / f"{place}.{rank}").exists() for rank in range(ranks))


def wait_for_all(folder: Path, place: str, ranks: int) -> None:
    """Waits for all ranks, by files: copies of `plain` have no other connection."""
    end = time.monotonic() + DEADLINE
    while not all_arrived(folder, place, ranks):
        if time.monotonic() > end:
            raise TimeoutError(f"not all {ranks} ranks came to '{place}' within {DEADLINE:.0f} s")
        time.sleep(1e-4)


def measure(
    program: Program, setting: Setting, together: Callable[[str], None], busy: Callable[[], bool]
) -> dict[str, Any]:
    """Times the steps of a program, and traces one more.

    Args:
        program: the program to time.
        setting: says how many steps.
        together: called with a name where ranks that don't communicate must wait for each other.
        busy: says that such a rank must go on, since another one is still being timed.

    Returns:
        times in ms; losses of all steps, warm-up included; CPU time of a step in ms; the
        collectives of a step and their bytes; the trace.
    """
    losses = [program.step(i)[1] for i in range(setting.warmup)]
    together("start")
    cpu, times, sent = time.process_time(), [], bytes_sent()
    for i in range(setting.warmup, setting.warmup + setting.steps):
        took, loss = program.step(i)
        times.append(took)
        losses.append(loss)
    cpu = (time.process_time() - cpu) * 1e3 / setting.steps
    sent = (bytes_sent() - sent) / setting.steps
    i = setting.warmup + setting.steps
    while busy():
        program.step(i)
    trace = tf.RunMetadata()
    program.step(i, options=tf.RunOptions(trace_level=tf.RunOptions.FULL_TRACE), run_metadata=trace)
    counts, received = collectives(trace)
    return {
        "times": times,
        "losses": losses,
        "cpu_ms": cpu,
        "collectives": counts,
        "bytes": received,
        "sent_by_host": sent,
        "trace": trace,
    }


def bytes_sent() -> int:
    """Returns what this host has sent to others so far: everything but by its loopback."""
    lines = Path("/proc/net/dev").read_text().splitlines()[2:]
    counters = dict(line.split(":", 1) for line in lines)
    return sum(int(text.split()[8]) for name, text in counters.items() if name.strip() != "lo")


def traced(program: Program, first: int) -> list[dict[str, Any]]:
    """Returns the times of the parts of some steps, from number `first` on."""
    times = []
    for i in range(first, first + PARTED):
        trace = tf.RunMetadata()
        options = tf.RunOptions(trace_level=tf.RunOptions.SOFTWARE_TRACE)
        took, _ = program.step(i, options=options, run_metadata=trace)
        times.append(step_parts.times_of(trace, took))
    return times


def collectives(trace: tf.RunMetadata) -> tuple[dict[str, int], int]:
    """Counts the collectives in a trace, and the bytes that this rank received by them.

    The bytes that a rank sends to itself are included.
    """
    counts, received = collections.Counter[str](), 0
    nodes = [node for device in trace.step_stats.dev_stats for node in device.node_stats]
    for node in nodes:
        kind = COLLECTIVE.search(node.timeline_label)
        if not kind:
            continue
        counts[kind[1]] += 1
        tensors = [output.tensor_description for output in node.output]
        if "Alltoall" in kind[1]:
            del tensors[1:]  # the numbers of rows by rank
        for tensor in tensors:
            elements = int(np.prod([dim.size for dim in tensor.shape.dim]))
            received += tf.as_dtype(tensor.dtype).size * elements
    return dict(counts), received


def copying_ms(size: int, repeat: int = 20) -> float:
    """Returns the median milliseconds of copying `size` bytes within this process."""
    source, target = np.zeros(size, np.uint8), np.zeros(size, np.uint8)
    source.fill(1)
    times = []
    for _ in range(repeat):
        start = time.perf_counter()
        np.copyto(target, source)
        times.append((time.perf_counter() - start) * 1e3)
    return float(np.median(times))


def save_trace(trace: tf.RunMetadata, path: Path) -> None:
    """Writes a trace for chrome://tracing or Perfetto, and as TensorFlow made it."""
    from tensorflow.python.client import timeline

    path.write_text(timeline.Timeline(trace.step_stats).generate_chrome_trace_format())
    path.with_suffix(".trace").write_bytes(trace.SerializeToString())


def peak_rss() -> float:
    """Returns the kernel's mark of this program, in MB.

    getrusage's may be the mark of the process that started it.
    """
    marks = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert marks
    return int(marks[1]) / 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("program", choices=[*PROGRAMS, *KERAS])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--trace", type=Path, help="folder for a trace of one step")
    parser.add_argument("--parts", action="store_true", help="take some steps apart")
    arguments = parser.parse_args()
    tf.logging.set_verbosity(tf.logging.ERROR)
    rank, name, folder = int(os.environ["RANK"]), arguments.program, arguments.folder
    setting = Setting.load(folder)
    # The ranks of the other programs wait for each other in every step.
    independent = name in ("plain", "plain_keras")

    def together(place: str) -> None:
        if independent:
            arrive(folder, place, rank)
            wait_for_all(folder, place, setting.ranks)

    def busy() -> bool:
        if independent:
            arrive(folder, "end", rank)
        return independent and not all_arrived(folder, "end", setting.ranks)

    base = psutil.Process().memory_info().rss / 2**20
    if name in KERAS:
        from training_step import fit as step_keras

        measured = step_keras.measure(setting, folder, rank, name == "plain_keras", together, busy)
        measured.update(peak_rss_mb=peak_rss(), base_rss_mb=base)
        jobs.write_measurements(name, folder, measured)
        return
    tf.disable_eager_execution()
    with PROGRAMS[name](setting, folder, rank) as program:
        measured = measure(program, setting, together, busy)
        measured.update(peak_rss_mb=peak_rss(), base_rss_mb=base)
        if name == "wire":
            measured["copying_ms"] = copying_ms(measured["bytes"])
        if arguments.parts:
            measured["parts"] = traced(program, setting.warmup + setting.steps + 1)
        trace = measured.pop("trace")
        if arguments.trace:
            save_trace(trace, arguments.trace / f"{name}.{rank}.json")
    jobs.write_measurements(name, folder, measured)


if __name__ == "__main__":
    main()
