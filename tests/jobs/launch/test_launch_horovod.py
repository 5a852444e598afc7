"""Launches real Horovod ranks: they meet on the loopback only, and one that fails ends the job.

Each job costs the import of TensorFlow, so the ranks of one job show several things.
"""

from __future__ import annotations

import time

import pytest

pytestmark = pytest.mark.timeout(200)
START_TIMEOUT = 100.0  # TensorFlow is imported, perhaps in parallel with other tests

RANK = """
    import os, sys, time
    import tensorflow as tf
    import horovod.tensorflow as hvd
    hvd.init()
    rank, size = hvd.rank(), hvd.size()

    def total(name):
        return int(hvd.allreduce(tf.constant([rank + 1.0]), op=hvd.Sum, name=name)[0])

    def last():
        return rank == size - 1
"""

MEET = """
    assert (hvd.local_rank(), hvd.local_size()) == (rank, size)
    assert (hvd.cross_rank(), hvd.cross_size()) == (0, 1)
    assert hvd.gloo_enabled() and not hvd.mpi_enabled()
    first = total("first")
    hvd.allreduce(tf.zeros([1]), name="all are up")
    import psutil
    launcher = psutil.Process().parent().parent()
    sockets = psutil.Process().connections("inet") + launcher.connections("inet")
    listening = {socket.laddr.ip for socket in sockets if socket.status == psutil.CONN_LISTEN}
    assert listening <= {"127.0.0.1", "::1"} and len(sockets) > 0, sockets
    hvd.allreduce(tf.zeros([1]), name="all have looked")
    hvd.shutdown()
    hvd.init()  # the rendezvous has forgotten the first addresses
    print(first, total("second"))
"""


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_ranks_meet_on_the_loopback(launch, ranks):
    code, stdout, stderr = launch("-np", ranks, launch.script(RANK + MEET), timeout=START_TIMEOUT)
    total = ranks * (ranks + 1) // 2
    assert code == 0, stderr.decode()
    assert stdout.count(f"{total} {total}\n".encode()) == ranks


FAIL = """
    total("all are up")
    if last():
        time.sleep(0.5)  # so that the others wait inside their collective
        open("failed", "w").close()
        {how}
    total("never")
"""


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "how, code, block",
    [
        ("raise ValueError('what was wrong')", 1, "ValueError: what was wrong"),
        ("sys.exit(7)", 7, "ended by   exit code 7"),
    ],
)
def test_a_rank_that_fails_while_the_other_waits_for_it(launch, how, code, block):
    process = launch.start("-np", 2, launch.script(RANK + FAIL.format(how=how)))
    launch.files_exist("failed", deadline=START_TIMEOUT)
    began = time.monotonic()
    stderr = process.communicate(timeout=60)[1].decode()
    assert process.returncode == code
    assert time.monotonic() - began < 15
    assert "root cause: rank 1 of 2" in stderr
    assert block in stderr[stderr.index("root cause") :]


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("how", ["os._exit(0)", "sys.exit(0)"])
def test_a_rank_that_leaves_while_the_other_waits_for_it(launch, how):
    process = launch.start("-np", 2, launch.script(RANK + FAIL.format(how=how)))
    launch.files_exist("failed", deadline=START_TIMEOUT)
    began = time.monotonic()
    stderr = process.communicate(timeout=60)[1].decode()
    assert process.returncode not in (0, None)
    assert time.monotonic() - began < 15
    assert "root cause: rank 0 of 2" in stderr
    assert "left early rank 1 (pid " in stderr
