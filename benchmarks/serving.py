"""Prints requests per second of `collective serve`, next to calling the model bare.

    python benchmarks/serving.py [--batch 256] [--clients 4] [--rounds 7]

The model is DLRM, with the layers of benchmarks/step.py: 13 numbers, and 26 ids, each of a table of
100,000 rows of 16. It is exported and then called

    bare    as TensorFlow loads it, by a thread for each client, with arrays that are ready
    arrow   over HTTP on this machine, with the bytes of a `collective.data.Batch`
    columns over HTTP, with the JSON of columns (`inputs`)
    rows    over HTTP, with the JSON of rows (`instances`)

Clients are threads of this process, which send bytes that are ready and read the answer whole.
Server and clients share the machine, as bare calls do not. The ways take turns, so that what else
the machine does is shared; the time of processors is that of the process that has the model.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import numpy as np
import psutil
import tensorflow.compat.v1 as tf

from collective import CollectiveStrategy
from collective.data import Batch

sys.path.insert(0, str(Path(__file__).resolve().parent))

from training_step.workload import BOTTOM, TOP  # noqa: E402

ROWS, DIM, FEATURES, NUMBERS = 100_000, 16, 26, 13
ARROW = "application/vnd.apache.arrow.stream"


def export(folder: str) -> str:
    """Exports the model with random weights; returns its path."""
    strategy = CollectiveStrategy()

    def model(ids: dict[str, tf.Tensor], numbers: tf.Tensor) -> tf.Tensor:
        random = tf.random_normal_initializer(stddev=0.1, seed=1)
        with strategy.embedding_scope():
            tables = {name: tf.get_variable(name, [ROWS, DIM], initializer=random) for name in ids}
        rows = [tf.nn.embedding_lookup(tables[name], ids[name]) for name in ids]

        def network(name: str, x: tf.Tensor, sizes: tuple[int, ...]) -> tf.Tensor:
            for number, size in enumerate(sizes):
                shape = [x.shape[1], size]
                weights = tf.get_variable(f"{name}{number}", shape, initializer=random)
                x = tf.nn.relu(tf.matmul(x, weights)) if size > 1 else tf.matmul(x, weights)
            return x

        bottom = network("bottom", numbers, (*BOTTOM, DIM))
        vectors = tf.stack([bottom, *rows], axis=1)
        products = tf.matmul(vectors, vectors, transpose_b=True)
        pairs = np.flatnonzero(np.tri(FEATURES + 1, k=-1))
        flat = tf.reshape(products, [-1, (FEATURES + 1) ** 2])
        crossed = tf.ensure_shape(tf.gather(flat, pairs, axis=1), [None, len(pairs)])
        return tf.sigmoid(network("top", tf.concat([bottom, crossed], 1), (*TOP, 1)))[:, 0]

    def inputs() -> tuple[dict[str, tf.Tensor], tf.Tensor]:
        ids = {f"c{i}": tf.placeholder(tf.int64, [None]) for i in range(FEATURES)}
        return ids, tf.placeholder(tf.float32, [None, NUMBERS])

    def serving() -> object:
        ids, numbers = inputs()
        scores = {"score": model(ids, numbers)}
        return tf.saved_model.predict_signature_def({**ids, "numbers": numbers}, scores)

    with strategy.scope(plan="quiet"), tf.Graph().as_default():
        model(*inputs())
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            prefix = tf.train.Saver().save(session, os.path.join(folder, "model"))
    return strategy.export_saved_model(os.path.join(folder, "served"), prefix, serving)


def batch_of(size: int) -> Batch:
    """Returns a random batch."""
    random = np.random.default_rng(2)
    return Batch(
        ids={f"c{i}": random.integers(0, ROWS, size) for i in range(FEATURES)},
        dense={"numbers": random.normal(size=(size, NUMBERS)).astype(np.float32)},
    )


def rate(calls: list[Callable[[], object]], seconds: float) -> float:
    """Returns calls per second, of a thread for each."""
    counts, ends = [0] * len(calls), threading.Event()

    def repeat(number: int) -> None:
        while not ends.is_set():
            calls[number]()
            counts[number] += 1

    threads = [threading.Thread(target=repeat, args=(number,)) for number in range(len(calls))]
    began = time.perf_counter()
    for thread in threads:
        thread.start()
    time.sleep(seconds)
    ends.set()
    for thread in threads:
        thread.join()
    return sum(counts) / (time.perf_counter() - began)


@contextlib.contextmanager
def bare(path: str, batch: Batch) -> Iterator[Callable[[], object]]:
    """Yields a call of the model as TensorFlow loads it."""
    with tf.Graph().as_default(), tf.Session() as session:
        found = tf.saved_model.loader.load(session, [tf.saved_model.tag_constants.SERVING], path)
        signature = found.signature_def["serving_default"]
        values = {name: ids.values for name, ids in batch.ids.items()} | dict(batch.dense)
        feeds = {signature.inputs[name].name: value for name, value in values.items()}
        score = signature.outputs["score"].name
        yield lambda: session.run(score, feeds)


@contextlib.contextmanager
def server(path: str) -> Iterator[tuple[int, psutil.Process]]:
    """Yields the port and the process of a server."""
    command = [sys.executable, "-m", "collective", "serve", path, "--name", "m", "--port", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            lines = (re.search(r"127\.0\.0\.1:(\d+)", line) for line in process.stderr)
            yield int(next(found for found in lines if found)[1]), psutil.Process(process.pid)
        finally:
            process.terminate()


def request(port: int, kind: str, body: bytes) -> Callable[[], object]:
    """Returns a request over a connection of its own."""
    head = (
        f"POST /v1/models/m:predict HTTP/1.1\r\nHost: localhost\r\nContent-Type: {kind}\r\n"
        f"Accept: {kind}\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    sent = head.encode() + body
    connection = socket.create_connection(("127.0.0.1", port))

    def ask() -> None:
        connection.sendall(sent)
        answer = connection.recv(1 << 16)
        if not answer.startswith(b"HTTP/1.1 200 "):
            raise RuntimeError(answer.decode())
        head, _, rest = answer.partition(b"\r\n\r\n")
        length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
        while len(rest) < length:
            rest += connection.recv(1 << 16)

    return ask


def bodies(batch: Batch) -> dict[str, tuple[str, bytes]]:
    """Returns (content type, bytes) of each form of a request."""
    columns = {name: ids.values.tolist() for name, ids in batch.ids.items()}
    columns["numbers"] = batch.dense["numbers"].tolist()
    rows = [dict(zip(columns, row)) for row in zip(*columns.values())]
    return {
        "arrow": (ARROW, batch.to_bytes()),
        "columns": ("application/json", json.dumps({"inputs": columns}).encode()),
        "rows": ("application/json", json.dumps({"instances": rows}).encode()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Measures `collective serve`.")
    parser.add_argument("--batch", type=int, default=256, help="rows of a request")
    parser.add_argument("--clients", type=int, default=4, help="at the same time")
    parser.add_argument("--rounds", type=int, default=7, help="each measures all in turn")
    parser.add_argument("--seconds", type=float, default=1.0, help="of each measurement")
    options = parser.parse_args()
    tf.logging.set_verbosity(tf.logging.ERROR)
    batch, here = batch_of(options.batch), psutil.Process()
    with contextlib.ExitStack() as stack:
        path = export(stack.enter_context(tempfile.TemporaryDirectory()))
        call = stack.enter_context(bare(path, batch))
        port, serving = stack.enter_context(server(path))
        sent = bodies(batch)
        ways = {"bare": ([call] * options.clients, here)}
        for form, body in sent.items():
            ways[form] = [request(port, *body) for _ in range(options.clients)], serving
        found: dict[str, list[tuple[float, float]]] = {way: [] for way in ways}
        for measured in range(-1, options.rounds):  # the first warms up
            for way, (calls, process) in ways.items():
                before = sum(process.cpu_times()[:2])
                began = time.perf_counter()
                per_second = rate(calls, options.seconds)
                count = per_second * (time.perf_counter() - began)
                cpu = 1000 * (sum(process.cpu_times()[:2]) - before) / count
                if measured >= 0:
                    found[way].append((per_second, cpu))
    print(f"{options.clients} at the same time, batches of {options.batch}; medians of rounds")
    for way, pairs in found.items():
        rates, cpus = zip(*pairs)
        share = statistics.median(a / b for a, b in zip(rates, (r for r, _ in found["bare"])))
        size = f", {len(sent[way][1]) / 1000:.0f} KB each" if way in sent else ""
        print(
            f"{way:<8} {statistics.median(rates):6.1f}/s, {share:.2f} of bare; "
            f"{statistics.median(cpus):5.2f} ms of processors each{size}"
        )


if __name__ == "__main__":
    main()
