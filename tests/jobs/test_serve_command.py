"""`collective serve` answers with what a job has trained, to the last digit, and ends cleanly."""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from tests import saved_models
from tests.jobs import pool

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = """
import sys
import numpy as np
import tensorflow.compat.v1 as tf
import tensorflow.compat.v2 as tf2
import collective
from collective.trainer import Batch

def columns(seed):
    random = np.random.default_rng(seed)
    user, item, age = random.integers(0, 50, 600), random.integers(0, 2**60, 600) % 97, random.normal(size=600)
    label = age + user % 2 > 0.5
    return {"user": user, "item": item, "age": age.astype(np.float32)}, label.astype(np.float32)

def train():
    return tf2.data.Dataset.from_tensor_slices(columns(1))

def test():
    return tf2.data.Dataset.from_tensor_slices(columns(2))

def serving_input_receiver_fn():
    inputs = {"user": tf.placeholder(tf.int64, [None]), "item": tf.placeholder(tf.int64, [None]),
              "age": tf.placeholder(tf.float32, [None])}
    return collective.estimator.export.ServingInputReceiver(inputs, inputs)

def model_fn(features, labels, mode):
    random = tf.random_normal_initializer(stddev=0.5, seed=3)
    with collective.CollectiveStrategy().embedding_scope():
        user = tf.get_variable("user", [50, 4], initializer=random)
    item = collective.get_embedding_variable("item", 4, initializer=random)
    rows = [tf.nn.embedding_lookup(user, features["user"]), tf.nn.embedding_lookup(item, features["item"])]
    first, last = tf.get_variable("first", [9, 16], initializer=random), tf.get_variable("last", [16, 1], initializer=random)
    hidden = tf.nn.relu(tf.matmul(tf.concat([*rows, features["age"][:, None]], 1), first))
    logit = tf.matmul(hidden, last)[:, 0]
    score = tf.sigmoid(logit)
    if mode == collective.estimator.ModeKeys.PREDICT:
        return collective.estimator.EstimatorSpec(mode, predictions={"score": score})
    loss = tf.losses.sigmoid_cross_entropy(labels, logit)
    metrics = {"auc": tf.metrics.auc(labels, score)}
    step = tf.train.get_or_create_global_step()
    train = tf.train.AdagradOptimizer(0.3).minimize(loss, global_step=step)
    return collective.estimator.EstimatorSpec(mode, loss=loss, train_op=train, eval_metric_ops=metrics)

if __name__ == "__main__":
    strategy = collective.CollectiveStrategy()
    with strategy.scope(plan="quiet", save_code=True):
        params = {"global_batch_size": 20}
        trainer = collective.Trainer(model_fn, params, model_dir=sys.argv[1])
        trainer.fit(train, max_length=Batch(60))
        auc = trainer.evaluate(test)["auc"]
        trainer.export(sys.argv[2], serving_input_receiver_fn)
    if strategy.rank() == 0:
        print("evaluated", repr(float(auc)))
"""


@contextlib.contextmanager
def serving(*arguments):
    """Starts the command; yields the process and a connection to its server."""
    command = [sys.executable, "-m", "collective", "serve", *map(str, arguments), "--port", "0"]
    process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)
    try:
        lines = []
        for line in process.stderr:
            lines.append(line)
            if found := re.search(r"answers at http://127.0.0.1:(\d+)", line):
                connection = http.client.HTTPConnection("127.0.0.1", int(found[1]), timeout=60)
                yield process, connection
                connection.close()
                break
        else:
            pytest.fail("".join(lines))
    finally:
        process.kill()
        process.communicate()


def ask(connection, path, body):
    connection.request("POST", path, json.dumps(body))
    response = connection.getresponse()
    answer = json.loads(response.read())
    assert response.status == 200, answer
    return answer


def scores_of(connection, name, columns):
    """Asks for all records, in batches of 64."""
    scores = []
    for first in range(0, 600, 64):
        batch = {key: value[first : first + 64].tolist() for key, value in columns.items()}
        answer = ask(connection, f"/v1/models/{name}:predict", {"inputs": batch})
        scores += answer["outputs"]
    return np.array(scores, np.float32)


def auc_of(labels, scores):
    with tf.Graph().as_default(), tf.Session() as session:
        value, update = tf.metrics.auc(labels, scores)
        session.run(tf.local_variables_initializer())
        session.run(update)
        return float(session.run(value))


@pytest.mark.slow
@pytest.mark.timeout(250)
def test_the_served_auc_is_that_of_the_evaluation(tmp_path):
    script, model, export = tmp_path / "train.py", tmp_path / "model", tmp_path / "clicks"
    script.write_text(PROGRAM)
    done = pool.launch("-np", "2", "--device", "cpu", script, model, export, timeout=150)
    assert done.returncode == 0, done.stdout
    (evaluated,) = map(float, re.findall(r"evaluated (\S+)", done.stdout))
    program: dict = {"__name__": "train"}
    exec(compile(PROGRAM, str(script), "exec"), program)
    columns, labels = program["columns"](2)

    with serving(export) as (_, connection):
        served = scores_of(connection, "clicks", columns)
    assert auc_of(labels, served) == evaluated > 0.8

    with serving(model, "--run-code", "--name", "job") as (_, connection):
        np.testing.assert_array_equal(scores_of(connection, "job", columns), served)

    (path,) = export.iterdir()
    with tf.Graph().as_default(), tf.Session() as session:
        found = tf.saved_model.loader.load(session, ["serve"], str(path)).signature_def
        signature = found["serving_default"]
        stock = [
            session.run(
                signature.outputs["score"].name,
                {signature.inputs[k].name: v[i : i + 64] for k, v in columns.items()},
            )
            for i in range(0, 600, 64)
        ]
    np.testing.assert_array_equal(np.concatenate(stock), served)


@pytest.mark.slow
def test_requests_in_flight_are_answered_at_the_end(tmp_path):
    """SIGTERM comes between the halves of a body; nobody is taken in any more, and it exits 0."""
    saved_models.write(tmp_path / "m", 3)
    body = json.dumps({"instances": [[2.0]]}).encode()
    head = f"POST /v1/models/m:predict HTTP/1.1\r\nHost: h\r\nContent-Length: {len(body)}\r\n\r\n"
    with serving(tmp_path / "m") as (process, connection):
        assert ask(connection, "/v1/models/m:predict", {"instances": [[1.0]]}) == {
            "predictions": [3.0]
        }
        address = "127.0.0.1", connection.port
        with socket.create_connection(address, 30) as half:
            half.sendall(head.encode() + body[:5])
            while True:  # until the server has it: it counts what it reads
                connection.request("GET", "/metrics")
                text = connection.getresponse().read().decode()
                if 'requests_in_flight{model="m"} 1.0' in text:
                    break
            process.send_signal(signal.SIGTERM)
            with contextlib.suppress(OSError, http.client.HTTPException):
                while True:  # until it takes nobody in
                    connection.close()
                    connection.request("GET", "/healthz")
                    connection.getresponse().read()
            assert process.poll() is None
            half.sendall(body[5:])
            answer = b"".join(iter(lambda: half.recv(4096), b""))
        assert answer.startswith(b"HTTP/1.1 200 ") and answer.endswith(b'{"predictions":[6.0]}')
        assert process.wait(30) == 0


def run(*command):
    return subprocess.run(
        [sys.executable, *map(str, command)], cwd=ROOT, capture_output=True, text=True, timeout=100
    )


@pytest.mark.slow
def test_what_can_not_be_served_is_one_sentence(tmp_path):
    (tmp_path / "m").mkdir()
    done = run("-m", "collective", "serve", tmp_path / "m", "--port", "0")
    last = done.stderr.splitlines()[-1]  # TensorFlow may have written before
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert last.startswith("collective serve: There is no model at"), done.stderr
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = run("-m", "collective", "serve", tmp_path / "m", "--port", port)
    assert done.returncode == 1 and done.stderr.count("\n") == 1
    assert f"127.0.0.1:{port} can't be listened at: Address already in use" in done.stderr
    done = run("-m", "collective", "serve", tmp_path / "m", "--max-batch", "0")
    assert done.returncode == 2 and "'0' is no number from 1" in done.stderr


@pytest.mark.parametrize("missing", ["starlette", "uvicorn"])
def test_without_the_extra_it_names_it(tmp_path, missing):
    program = (
        f"import sys; sys.modules['{missing}'] = None\n"
        "from collective.__main__ import main; sys.exit(main(['serve', 'm']))"
    )
    done = run("-c", program)
    assert done.returncode == 1 and "pip install 'collective-strategy[serve]'" in done.stderr
    assert done.stderr.count("\n") == 1
