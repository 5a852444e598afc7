"""Ranks that wait for a peer which doesn't come: the launcher ends the job after --stall-timeout,
and says who and where.

Each case is a launch of its own, given by its mark `job`. The jobs wait rather than compute, so a few
of them run at a time; a case waits for the end of its own.
"""

import re
import textwrap
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.jobs import pool

pytestmark = pytest.mark.timeout(200)

MODEL = """
import os, sys, time
import numpy as np
import tensorflow.compat.v1 as tf
from collective import CollectiveStrategy
from collective.coordination import coordinator

tf.logging.set_verbosity(tf.logging.ERROR)
if 'loop_v1' in sys.argv:
    tf.disable_control_flow_v2()
strategy = CollectiveStrategy()
rank, ranks = strategy.rank(), strategy.world_size()
with strategy.scope(), tf.Graph().as_default():
    with strategy.embedding_scope():
        t = tf.get_variable('users', [10, 2], initializer=tf.ones_initializer())
    w = tf.get_variable('w', [2, 1], initializer=tf.ones_initializer())
    ids = tf.placeholder(tf.int64, [None])
    turns = tf.placeholder_with_default(1, [])
    emb = tf.identity(tf.nn.embedding_lookup(t, ids), 'emb')
    loss = tf.reduce_mean(tf.matmul(emb, w))
    train = tf.train.AdagradOptimizer(0.1).minimize(loss, name='train')

    def steps(session, n):
        for _ in range(n):
            session.run(train, {ids: [1, 2, rank]})
"""


AT_A_TIME = 3


@pytest.fixture(scope="module")
def jobs(request, tmp_path_factory):
    """Starts the jobs of all chosen cases of this module, and yields their ends by the case."""

    def run(case):
        mark = case.get_closest_marker("job")
        folder = tmp_path_factory.mktemp("job")
        script = folder / "script.py"
        script.write_text(MODEL + textwrap.indent(textwrap.dedent(mark.args[0]), "    "))
        options = ("-np", mark.kwargs.get("ranks", 2), "--device", "cpu")
        options += ("--stall-timeout", mark.kwargs.get("timeout", 6))
        job = pool.start(*options, script, folder / "pipe", *mark.args[1:])
        return pool.to_its_end(job, timeout=170)

    with ThreadPoolExecutor(AT_A_TIME) as executor:
        cases = [item for item in request.session.items if item.path == request.path]
        yield {case.nodeid: executor.submit(run, case) for case in cases}


@pytest.fixture
def ended(request, jobs):
    """Returns (exit code, what the launcher and the ranks wrote) of the case's job."""
    done = jobs[request.node.nodeid].result()
    print(done.stdout)
    return done.returncode, done.stdout


def report(output):
    """Reads {rank: its line and what follows it} of the report, and its first line under None."""
    first, *lines = output[output.index("collective launch: the job stalled: ") :].splitlines()
    told, ranks = {None: first}, []
    for line in lines:
        named = re.match(r"  ranks? (\d+(?:, \d+)*) ", line)
        if named or not line.startswith("      "):
            ranks = [int(number) for number in named[1].split(", ")] if named else []
        for rank in ranks:
            told[rank] = f"{told.get(rank, '')} {line.strip()}"
    return told


ELSEWHERE = {
    "sleeps": "time.sleep(1000)",
    "loops": "while True: pass",
    "reads": "os.mkfifo(sys.argv[1]) ; open(sys.argv[1]).read()",
}


def lookup_alone(what):
    body = f"""
    with tf.train.MonitoredTrainingSession('') as session:
        steps(session, 2)
        if rank == ranks - 1:
            {ELSEWHERE[what]}
        session.run(emb, {{ids: [1]}})
    """
    return pytest.mark.job(body, ranks=3 if what == "sleeps" else 2)


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "what", [pytest.param(what, marks=lookup_alone(what)) for what in ELSEWHERE]
)
def test_a_lookup_that_one_rank_fetches_alone(ended, what):
    """The last rank runs nothing more; nor does it hear the signal in time."""
    code, output = ended
    last = 2 if what == "sleeps" else 1
    told = report(output)
    assert code == 124
    assert told[None].endswith(f"the job stalled: rank {last} of {last + 1} is missing")
    assert "in no run since" in told[last] and "last: runs train" in told[last]
    assert re.search(r" at \S+/script\.py, line \d+, in <module>", told[last])
    for rank in range(last):
        assert (
            "in a run since" in told[rank] and "runs emb:0" in told[rank] and "users" in told[rank]
        )


@pytest.mark.slow
@pytest.mark.job(
    """
    with tf.train.MonitoredTrainingSession('') as session:
        steps(session, 2)
        if rank == 1:
            import signal
            os.kill(os.getpid(), signal.SIGSTOP)
        steps(session, 2)
    """,
)
def test_a_rank_that_is_stopped(ended):
    """By SIGSTOP: it hears no signal but the last."""
    code, output = ended
    told = report(output)
    assert code == 124 and told[None].endswith("rank 1 of 2 is missing")
    assert "in no run since" in told[1] and "in a run since" in told[0] and "runs train" in told[0]


@pytest.mark.job(
    """
    import signal, threading
    from collective import checkpoint
    from collective.checkpoint.saving import background
    saver = tf.train.Saver()
    if rank == 1:
        background.BackgroundSave._leave_note = lambda *_: threading.Event().wait()
    with tf.Session() as session:
        session.run(tf.global_variables_initializer())
        steps(session, 2)
        with strategy.scope(checkpoint_blocking=False):
            saver.save(session, os.path.join(os.path.dirname(sys.argv[1]), 'model'))
        if rank == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        checkpoint.wait()
    """,
)
def test_a_rank_that_is_stopped_while_it_saves_during_training(ended):
    """Rank 0 waits for its part, and not for ten minutes."""
    code, output = ended
    told = report(output)
    assert code == 124 and told[None].endswith("rank 1 of 2 is missing")
    assert "in no run since" in told[1]
    assert "waiting for the others' word" in told[0] and "waiting for checkpoint" in told[0]


@pytest.mark.job(
    """
    if rank == 0:
        time.sleep(1000)
    with tf.train.MonitoredTrainingSession('') as session:
        steps(session, 1)
    """,
)
def test_a_rank_that_never_comes_to_a_first_run(ended):
    code, output = ended
    told = report(output)
    assert code == 124 and told[None].endswith("rank 0 of 2 is missing")
    assert "has not come to a first run yet" in told[0]
    assert "waiting for the others' word since" in told[1]
    assert "making a MonitoredTrainingSession" in told[1]


TURN_ALONE = """
    loop = tf.while_loop(
        lambda i, rows: i < turns,
        lambda i, rows: (i + 1, rows + tf.reduce_sum(tf.nn.embedding_lookup(t, ids), 0, True)),
        (0, tf.zeros([1, 2])),
        name='loop',
    )[1]
    with tf.train.MonitoredTrainingSession('') as session:
        steps(session, 2)
        session.run(loop, {ids: [1], turns: 2 if rank == 0 else 1})
        print('past the loop')
        steps(session, 1)
    """


@pytest.mark.matrix
@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "version",
    [
        pytest.param(version, marks=pytest.mark.job(TURN_ALONE, version))
        for version in ("loop_v1", "loop_v2")
    ],
)
def test_a_turn_of_a_loop_with_a_lookup_that_one_rank_takes_alone(ended, version):
    """It waits in a collective that the others never come to; they have finished the run, and wait
    in the next.
    """
    code, output = ended
    told = report(output)
    assert code == 124 and output.count("past the loop") == 1
    assert told[None].endswith("rank 0 of 2 is missing")
    assert "runs loop/" in told[0]
    assert "runs train" in told[1]
    assert "Others have finished what rank 0 is still in" in output


@pytest.mark.slow
@pytest.mark.job(
    """
    take = emb[0, 0] > (1.0 if rank == 0 else 0.0)
    branch = tf.cond(take, lambda: tf.nn.embedding_lookup(t, ids), lambda: tf.zeros([1, 2]), name='branch')
    learn = tf.train.GradientDescentOptimizer(0.1).minimize(loss + tf.reduce_sum(tf.matmul(branch, w)), name='learn')
    with tf.train.MonitoredTrainingSession('') as session:
        session.run(learn, {ids: [1]})
    """,
)
def test_a_branch_of_the_training_step_that_one_rank_takes_alone(ended):
    """It depends on rows, so ranks can't compare it before they exchange these. The dense gradients
    wait for what it gives: the ranks are in the same run for ever, in different collectives.
    """
    code, output = ended
    told = report(output)
    assert code == 124 and told[None].endswith("all ranks are in the same run")
    assert "runs learn" in told[0] and "runs learn" in told[1]


@pytest.mark.job(
    """
    def keys():
        yield [1, 2]
        while rank == 1:
            time.sleep(1)
        yield [1, 2]
    data = tf.data.Dataset.from_generator(keys, tf.int64, [2])
    rows = tf.nn.embedding_lookup(t, tf.data.make_one_shot_iterator(data).get_next())
    learn = tf.train.GradientDescentOptimizer(0.1).minimize(tf.reduce_mean(rows), name='learn')
    with tf.train.MonitoredTrainingSession('') as session:
        while not session.should_stop():
            session.run(learn)
    """,
)
def test_input_that_never_comes_on_one_rank(ended):
    code, output = ended
    assert code == 124 and "input doesn't come" in output
    assert "runs learn" in report(output)[0] and "runs learn" in report(output)[1]


@pytest.mark.matrix
@pytest.mark.job(
    """
    data = tf.data.Dataset.from_tensors(np.array([1, 2], np.int64)).repeat(2 + 2 * rank)
    rows = tf.identity(tf.nn.embedding_lookup(t, tf.data.make_one_shot_iterator(data).get_next()), 'rows')
    with tf.train.MonitoredTrainingSession('') as session:
        steps(session, 1)
        try:
            for step in range(100):
                if (rank, step) == (1, 3):
                    time.sleep(1000)
                session.run(rows)
        except tf.errors.OutOfRangeError:
            print('it can not be over yet')
    """,
)
def test_an_idle_rank_of_an_evaluation_whose_peer_does_not_go_on(ended):
    code, output = ended
    told = report(output)
    assert code == 124 and "can not be over" not in output
    assert told[None].endswith("rank 1 of 2 is missing") and "last: runs rows:0" in told[1]
    assert "waiting for the others' word since" in told[0] and "runs rows:0" in told[0]


@pytest.mark.long
@pytest.mark.job(
    """
    def slowly():
        time.sleep(18 if rank == 1 else 0)
        return np.float32(1)
    slow = tf.get_variable('slow', initializer=tf.py_func(slowly, [], tf.float32), validate_shape=False)
    with tf.train.MonitoredTrainingSession('') as session:
        steps(session, 2)
    print('done', rank)
    """,
)
def test_initialising_for_longer_than_the_timeout(ended):
    """Rank 1 takes its time, rank 0 waits in the next thing they do together: no stall, for
    three timeouts.
    """
    code, output = ended
    assert code == 0 and output.count("done") == 2 and "stalled" not in output


@pytest.mark.matrix
@pytest.mark.job(
    """
    with tf.train.MonitoredTrainingSession('') as session:
        steps(session, 1)
        time.sleep(9)
        steps(session, 1)
    time.sleep(9)
    """,
)
def test_ranks_that_do_nothing_together_for_longer_than_the_timeout(ended):
    """Both prepare data, or are debugged."""
    code, output = ended
    assert code == 0 and "stalled" not in output


@pytest.mark.job(
    """
    from collective.errors import RankError
    from collective.coordination import barrier

    def told(what):
        counts = barrier.exchange(None, 'comparing', {'passed': coordinator.instance().progress.passed})
        assert len({text['passed'] for text in counts}) == 1, (what, counts)
        print('alike after', what, counts[0]['passed'])

    data = tf.data.Dataset.from_tensors(np.array([1, 2], np.int64)).repeat(2 + 2 * rank)
    iterator = tf.data.make_initializable_iterator(data)
    rows = tf.nn.embedding_lookup(t, iterator.get_next())
    learn = tf.train.GradientDescentOptimizer(0.1).minimize(tf.reduce_mean(rows))
    init = tf.global_variables_initializer()
    with tf.Session() as session:
        session.run(init)
        steps(session, 3)
        told('training')
        for fetch in (rows, learn):
            session.run(iterator.initializer)
            try:
                while True:
                    session.run(fetch)
            except tf.errors.OutOfRangeError:
                told('the end of data')
        session.run(iterator.initializer)
        session.run(rows)
        steps(session, 1)
        told('an evaluation that was cut short')
        try:
            session.run(emb, {ids: [99 if rank == 1 else 1]})
        except tf.errors.InvalidArgumentError:
            told('an id outside of the table')
        try:
            barrier.run_on_all_ranks(session, 'failing', lambda: 1 // (rank - 1))
        except (RankError, ZeroDivisionError):
            told('a meeting that failed')
        barrier.run_on_all_ranks(session, 'meeting', lambda: rank)
        told('a meeting')
    told('leaving')
    with tf.train.MonitoredTrainingSession('') as session:
        steps(session, 1)
    told('a second session')
    with tf.Session() as session:
        session.run(init)
        try:
            session.run(emb if rank else train, {ids: [1]})
        except RankError:
            told('ranks that ran something else')
    """,
    ranks=3,
    timeout=60,
)
def test_all_ranks_count_the_same_agreements(ended):
    """The launcher compares them to tell which rank is late.

    After a bit of everything they are as many on each rank.
    """
    code, output = ended
    assert code == 0
    for what in (
        "the end of data",
        "an id outside of the table",
        "a meeting that failed",
        "leaving",
        "ranks that ran something else",
    ):
        assert f"alike after {what}" in output
