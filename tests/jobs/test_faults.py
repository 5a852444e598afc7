"""What the other ranks do when one fails, finishes or disagrees: the job ends soon, and says who it
was.
"""

import textwrap
import time

import pytest

from tests.jobs import pool

MODEL = """
import os, signal, sys
import numpy as np
import tensorflow.compat.v1 as tf
from collective import CollectiveStrategy

tf.logging.set_verbosity(tf.logging.ERROR)
strategy = CollectiveStrategy()
rank, ranks = strategy.rank(), strategy.world_size()
with strategy.scope(), tf.Graph().as_default():
    with strategy.embedding_scope():
        t = tf.get_variable('t', [10, 2], initializer=tf.ones_initializer())
    w = tf.get_variable('w', [2, 1], initializer=tf.ones_initializer())
    ids = tf.placeholder(tf.int64, [None])
    extra = tf.placeholder_with_default(0.0, [])
    emb = tf.nn.embedding_lookup(t, ids)
    loss = tf.reduce_mean(tf.matmul(emb, w)) + extra
    train = tf.train.AdagradOptimizer(0.1).minimize(loss)
    init = tf.global_variables_initializer()

    def steps(session, n, **feed):
        for _ in range(n):
            session.run(train, {ids: [1, 2, rank]})
"""


@pytest.mark.matrix
def test_ranks_of_which_only_one_uses_kernels_are_told(tmp_path, monkeypatch):
    """Their messages look different."""
    monkeypatch.setitem(
        globals(),
        "MODEL",
        "import os\nfrom tests import gpu_double\n"
        "if os.environ['HOROVOD_RANK'] == '1':\n    gpu_double.use()\n" + MODEL,
    )
    code, out, _ = job(
        tmp_path,
        """
        with tf.Session() as session:
            session.run(init)
            print('ready', flush=True)
            steps(session, 1)
        """,
        ranks=2,
    )
    assert code == 1 and "The ranks do not run the same" in out and "rows of table" in out


def job(tmp_path, body, ranks=3, limit=90, carrier="auto"):
    """(exit code, output, seconds from the moment that the ranks say 'ready')."""
    script = tmp_path / "script.py"
    script.write_text(MODEL + textwrap.indent(textwrap.dedent(body), "    "))
    environment = {"COLLECTIVE_CARRIER": carrier} if carrier != "auto" else {}
    process = pool.start("-np", ranks, "--device", "cpu", script, environment=environment)
    try:
        lines, ready = [], time.monotonic()
        for line in process.stdout:
            lines.append(line)
            if "ready" in line:
                ready = time.monotonic()
            assert time.monotonic() - ready < limit
        code = process.wait(limit)
    finally:
        process.kill()
    print("".join(lines))
    return code, "".join(lines), time.monotonic() - ready


CARRIERS = ["shared_memory", "horovod"]
CASES = {
    "killed": ("os.kill(os.getpid(), signal.SIGKILL)", 137, "SIGKILL"),
    "raises": ("raise ValueError('boom')", 1, "ValueError: boom"),
    "exits": ("sys.exit(7)", 7, "exit code 7"),
    "hard_exit": ("os._exit(9)", 9, "exit code 9"),
}


@pytest.mark.sample(2)
@pytest.mark.timeout(150)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("carrier", CARRIERS)
def test_a_rank_that_fails_while_others_exchange(tmp_path, case, carrier):
    """Within a session, between two runs; the others wait for it in the next. Under 15 s, its code,
    its name.
    """
    crash, code, word = CASES[case]
    got, output, seconds = job(
        tmp_path,
        f"""
        with tf.train.MonitoredTrainingSession('') as session:
            steps(session, 2)
            print('ready', flush=True)
            if rank == 1:
                {crash}
            while True:
                steps(session, 1)
        """,
        carrier=carrier,
    )
    assert got == code and "root cause: rank 1 of 3" in output and word in output
    assert seconds < 15


@pytest.mark.sample(1)
@pytest.mark.timeout(150)
@pytest.mark.parametrize("carrier", CARRIERS)
def test_a_rank_that_exits_0_early(tmp_path, carrier):
    """It says nothing, not even goodbye: the others can't finish, and the report says who left."""
    code, output, seconds = job(
        tmp_path,
        """
        session = tf.Session()
        session.run(init)
        steps(session, 1)
        print('ready', flush=True)
        if rank == 1:
            os._exit(0)
        while True:
            steps(session, 1)
        """,
        carrier=carrier,
    )
    assert code != 0 and "left early" in output and "rank 1" in output.split("left early")[1]
    assert seconds < 15


@pytest.mark.timeout(150)
def test_a_rank_that_finishes_early_lets_the_others_finish(tmp_path):
    """A session that is never closed is left at the end of the program: the others' next run there
    is out of data.
    """
    code, output, _ = job(
        tmp_path,
        """
        session = tf.Session()
        session.run(init)
        try:
            steps(session, 2 + rank * 100)
        except tf.errors.OutOfRangeError as end:
            print('ended:', end.message)
        print('done', rank)
        """,
    )
    assert code == 0
    assert output.count("rank 0 has left the session") == 2 and output.count("done") == 3


@pytest.mark.timeout(150)
def test_a_rank_that_survives_its_error_tells_the_others(tmp_path):
    """The error is caught outside of the session; the peers must not wait for ever."""
    code, output, seconds = job(
        tmp_path,
        """
        try:
            with tf.train.MonitoredTrainingSession('') as session:
                steps(session, 2)
                print('ready', flush=True)
                if rank == 1:
                    raise ValueError('boom')
                steps(session, 3)
        except ValueError:
            print('survived')
        """,
    )
    assert (
        code != 0
        and "survived" in output
        and "Rank 1: left its session with ValueError: boom" in output
    )
    assert seconds < 15


@pytest.mark.timeout(150)
@pytest.mark.parametrize(
    "feed, word", [("{ids: [[1]]}", "Cannot feed value"), ("{'nothing:0': 1}", "nothing")]
)
def test_a_run_that_one_rank_cannot_start(tmp_path, feed, word):
    code, output, seconds = job(
        tmp_path,
        f"""
        with tf.Session() as session:
            session.run(init)
            print('ready', flush=True)
            session.run(train, {feed} if rank == 1 else {{ids: [1]}})
            steps(session, 1)
        """,
    )
    assert code == 1 and word in output and "root cause: rank 1" in output
    assert seconds < 15


@pytest.mark.sample(1)
@pytest.mark.timeout(150)
@pytest.mark.parametrize("carrier", CARRIERS[::-1])
def test_an_operation_that_fails_half_way_on_one_rank(tmp_path, carrier):
    """After the first exchange, where the peers can't be told: the job ends with the failing
    rank's code.
    """
    code, output, seconds = job(
        tmp_path,
        """
        checked = tf.Assert(tf.equal(extra, 0.0), ['extra is not zero'])
        with tf.control_dependencies([checked, emb]):
            late = tf.Assert(tf.equal(extra, 0.0) | (emb[0, 0] > 1e9), ['extra is not zero'])
        with tf.control_dependencies([late]):
            more = tf.train.GradientDescentOptimizer(0.1).minimize(tf.identity(loss))
        with tf.Session() as session:
            session.run(init)
            print('ready', flush=True)
            session.run(more, {ids: [1], extra: float(rank == 1)})
            steps(session, 1)
        """,
        carrier=carrier,
    )
    assert code == 1 and "extra is not zero" in output and "root cause: rank 1" in output
    assert seconds < 15


@pytest.mark.timeout(150)
def test_unequal_data_is_no_failure(tmp_path):
    """3, 5 and 0 batches: all ranks' loops end at once, with exit code 0."""
    code, output, _ = job(
        tmp_path,
        """
        data = tf.data.Dataset.from_tensors(np.array([1, 2], np.int64)).repeat([3, 5, 0][rank])
        rows = tf.nn.embedding_lookup(t, tf.data.make_one_shot_iterator(data).get_next())
        train = tf.train.AdamOptimizer(0.1).minimize(tf.reduce_mean(rows))
        with tf.train.MonitoredTrainingSession('') as session:
            while not session.should_stop():
                session.run(train)
                print('stepped')
        print('done', rank)
        """,
    )
    assert code == 0 and output.count("done") == 3 and "stepped" not in output


@pytest.mark.timeout(150)
def test_two_sessions_one_after_the_other(tmp_path):
    """Leaving the first is agreed on; the second trains on."""
    code, output, _ = job(
        tmp_path,
        """
        for _ in range(2):
            with tf.train.MonitoredTrainingSession('') as session:
                steps(session, 3)
        print('fine', rank)
        """,
    )
    assert code == 0 and output.count("fine") == 3


ON_DEVICE = """
        from collective.tables.rows import device_row_store
        ensure_capacity = device_row_store.DeviceColumn.ensure_capacity

        def full(memory, size):
            raise MemoryError('the device is full')

        def little(column, count):
            if rank == 1 and count > 100:
                column._bridge.grow = full
            ensure_capacity(column, count)
        device_row_store.DeviceColumn.ensure_capacity = little
"""
IN_HOST_MEMORY = """
        from collective.ops.rows import memory
        if rank == 1:
            memory.rows_that_fit = lambda *_: 100
"""


@pytest.mark.slow
@pytest.mark.timeout(150)
@pytest.mark.parametrize(
    "first, little, words",
    [
        (
            "from tests import gpu_double\ngpu_double.use()\n",
            ON_DEVICE,
            "'open' has memory for 256 rows, and needs",
        ),
        pytest.param(
            "",
            IN_HOST_MEMORY,
            "table 'open': it is full: 100 rows of 100. Train on more ranks",
            marks=pytest.mark.matrix,
        ),
    ],
    ids=["device", "host"],
)
def test_a_rank_without_memory_for_new_rows_ends_the_job(
    tmp_path, monkeypatch, first, little, words
):
    """The peers, who wait for the rows of a dynamic table, don't wait for ever."""
    monkeypatch.setitem(globals(), "MODEL", first + MODEL)
    code, out, seconds = job(
        tmp_path,
        f"""
        import collective
        {little.strip()}
        rows = tf.nn.embedding_lookup(collective.get_embedding_variable('open', 4), ids)
        grow = tf.train.AdagradOptimizer(0.1).minimize(tf.reduce_sum(rows))
        with tf.train.MonitoredTrainingSession('') as session:
            session.run(grow, {{ids: np.arange(50)}})
            print('ready', flush=True)
            session.run(grow, {{ids: np.arange(5000)}})
            print('went on', flush=True)
        """,
    )
    assert code == 1 and seconds < 60 and "went on" not in out
    assert "root cause: rank 1 of 3" in out and words in out
