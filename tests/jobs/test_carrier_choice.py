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


TRAINING = """
import numpy as np
import tensorflow.compat.v1 as tf
from tests import nccl_double
double = nccl_double.use()
import collective
from tests.ranks import reference, training

strategy = collective.CollectiveStrategy()
rank, size = strategy.rank(), strategy.world_size()

def train(loss, variables):
    return {'train': tf.train.AdagradOptimizer(0.3).minimize(loss)}

training.compare(strategy, rank, size, train, names=('train', 'emb'))
called = double.double_journal().decode()
print('calls', all(f'nccl{name}' in called for name in ('Send', 'Recv', 'AllReduce', 'Broadcast')))
"""


@pytest.mark.timeout(100)
def test_a_training_by_nccls_double_has_plain_tensorflows_numbers(tmp_path):
    (tmp_path / "script.py").write_text(TRAINING)
    environment = {"COLLECTIVE_CARRIER": "nccl"}
    done = pool.launch("-np", 2, tmp_path / "script.py", environment=environment)
    assert done.returncode == 0, done.stdout
    assert done.stdout.count("calls True") == 2, done.stdout
    said = "carrier: NCCL between the GPUs of this host, by COLLECTIVE_CARRIER=nccl"
    assert said in done.stdout, done.stdout


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
