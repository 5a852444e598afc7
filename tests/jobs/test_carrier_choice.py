"""What carries a job's collectives, by how it was started."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.jobs import pool

PROGRAM = """
import collective
import tensorflow.compat.v1 as tf
strategy = collective.CollectiveStrategy()
with strategy.scope(plan='quiet'), tf.Graph().as_default():
    with strategy.embedding_scope():
        table = tf.get_variable('t', [20, 3])
    loss = tf.reduce_mean(tf.square(tf.nn.embedding_lookup(table, [1, 7])))
    train = tf.train.AdagradOptimizer(0.3).minimize(loss)
    with tf.Session() as session:
        session.run(tf.global_variables_initializer())
        session.run(train)
    print([line for line in str(strategy.plan()).splitlines() if 'carrier' in line])
"""


@pytest.fixture
def script(tmp_path):
    (tmp_path / "script.py").write_text(PROGRAM)
    return tmp_path / "script.py"


@pytest.mark.timeout(100)
@pytest.mark.parametrize(
    ("choice", "said"),
    [
        ("auto", "carrier: shared memory of the ranks of this host"),
        ("horovod", "carrier: Horovod, by COLLECTIVE_CARRIER=horovod"),
    ],
)
def test_the_launchers_ranks(script, choice, said):
    done = pool.launch("-np", 2, script, environment={"COLLECTIVE_CARRIER": choice})
    assert done.returncode == 0 and done.stdout.count(said) == 2, done.stdout


@pytest.mark.matrix
@pytest.mark.timeout(100)
def test_horovodruns_ranks(script):
    """They find each other without the launcher."""
    horovodrun = Path(sys.executable).with_name("horovodrun")
    environment = {k: v for k, v in os.environ.items() if not k.startswith("HOROVOD_")}
    done = subprocess.run(
        [horovodrun, "-np", "2", "--gloo", sys.executable, script],
        env={**environment, "PYTHONPATH": str(pool.ROOT), "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=90,
    )
    said = "carrier: shared memory of the ranks of this host"
    assert done.returncode == 0 and done.stdout.count(said) == 2, done.stdout + done.stderr


DOUBLE = """
from tests import nccl_double
double = nccl_double.use()
"""
TRAINING = f"""
import numpy as np
import tensorflow.compat.v1 as tf
{DOUBLE}
import collective
from tests.ranks import reference, training

strategy = collective.CollectiveStrategy()
rank, size = strategy.rank(), strategy.world_size()

def train(loss, variables):
    return {{'train': tf.train.AdagradOptimizer(0.3).minimize(loss)}}

training.compare(strategy, rank, size, train, names=('train', 'emb'))
called = double.double_journal().decode()
print('calls', all(f'nccl{{name}}' in called for name in ('Send', 'Recv', 'AllReduce', 'Broadcast')))
"""


@pytest.mark.timeout(100)
def test_a_training_by_nccls_double_has_plain_tensorflows_numbers(tmp_path):
    (tmp_path / "script.py").write_text(TRAINING)
    # Each rank also trains in plain TensorFlow, to compare with.
    environment = {"COLLECTIVE_CARRIER": "nccl", "COLLECTIVE_INDEPENDENT": "1"}
    done = pool.launch("-np", 2, tmp_path / "script.py", environment=environment)
    assert done.returncode == 0, done.stdout
    assert done.stdout.count("calls True") == 2, done.stdout
    said = "carrier: NCCL between the GPUs of this host, by COLLECTIVE_CARRIER=nccl"
    assert said in done.stdout, done.stdout


@pytest.mark.matrix
@pytest.mark.timeout(100)
def test_a_rank_that_hangs_in_nccl_ends_the_job(tmp_path):
    """It lives, and NCCL says nothing: the launcher sees that no run ends."""
    body = PROGRAM.replace("import collective", f"{DOUBLE}import collective", 1)
    steps = """session.run(train)
        if strategy.rank() == 1:
            double.double_hang(b'ncclGroupEnd')
        session.run(train)
"""
    (tmp_path / "script.py").write_text(body.replace("session.run(train)\n", steps, 1))
    options = ("-np", 2, "--device", "cpu", "--stall-timeout", 6)
    done = pool.launch(
        *(*options, tmp_path / "script.py"), environment={"COLLECTIVE_CARRIER": "nccl"}, timeout=90
    )
    assert done.returncode == 124, done.stdout
    assert "collective launch: the job stalled: " in done.stdout, done.stdout


@pytest.mark.timeout(100)
@pytest.mark.parametrize("by", ["variable", pytest.param("scope", marks=pytest.mark.matrix)])
def test_nccl_without_a_gpu_is_refused_by_all_ranks(script, by):
    if by == "scope":
        script.write_text(PROGRAM.replace("plan='quiet'", "plan='quiet', carrier='nccl'"))
    environment = {"COLLECTIVE_CARRIER": "nccl" if by == "variable" else "auto"}
    done = pool.launch("-np", 2, script, environment=environment)
    asked = "COLLECTIVE_CARRIER=nccl" if by == "variable" else "scope(carrier='nccl')"
    assert done.returncode == 1
    assert f"RuntimeError: {asked}: NCCL moves the memory of GPUs" in done.stdout, done.stdout
    assert "or leave the choice to COLLECTIVE_CARRIER=auto" in done.stdout


@pytest.mark.timeout(100)
@pytest.mark.parametrize(("choice", "gives_way"), [("auto", True), ("horovod", False)])
def test_horovods_threads_give_way_where_memory_carries_a_step(tmp_path, choice, gives_way):
    """They are batch work of a low priority then, and what a script reduces itself still works."""
    (tmp_path / "script.py").write_text(
        "import os, subprocess, threading\n"
        "import numpy\n"
        "import collective\n"
        "import horovod.tensorflow as hvd\n"
        "from collective.ops.communication import horovod_threads\n"
        "def batch():\n"
        "    tasks = [int(task) for task in os.listdir('/proc/self/task')]\n"
        "    return {t for t in tasks if os.sched_getscheduler(t) == os.SCHED_BATCH}\n"
        "begun, there, ended = (threading.Event() for _ in range(3))\n"
        "def other():\n"
        "    there.set()\n"
        "    ended.wait()\n"
        "others = threading.Thread(target=other, daemon=True)\n"
        "threading.Thread(target=lambda: begun.wait() and others.start()).start()\n"
        "def slowly(init=hvd.init):\n"  # A thread of the script's own begins meanwhile.
        "    begun.set()\n"
        "    there.wait()\n"
        "    init()\n"
        "hvd.init = slowly\n"
        "strategy = collective.CollectiveStrategy()\n"
        "print('gives way:', bool(batch()))\n"
        "assert not {threading.main_thread().native_id, others.native_id} & batch()\n"
        "total = hvd.allreduce(numpy.float32(strategy.rank() + 1), op=hvd.Sum)\n"
        "with strategy.scope(carrier='horovod'):\n"
        "    print('taken back:', not batch(), float(total))\n"
        "ended.set()\n"
    )
    done = pool.launch("-np", 2, tmp_path / "script.py", environment={"COLLECTIVE_CARRIER": choice})
    assert done.stdout.count(f"gives way: {gives_way}") == 2, done.stdout
    assert done.stdout.count("taken back: True 3.0") == 2, done.stdout
