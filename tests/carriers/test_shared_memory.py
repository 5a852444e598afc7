"""Collectives through shared memory, alone: between processes of a launch, without Horovod."""

import textwrap

import pytest

from tests.jobs import pool

PROGRAM = """
import os, signal, threading, time
import numpy as np
import tensorflow.compat.v1 as tf
from collective.ops import native_library
from collective.ops.communication import carrier_choice
from collective.ops.communication.membership import Process

tf.disable_eager_execution()
tf.logging.set_verbosity(tf.logging.ERROR)
rank, ranks = int(os.environ['RANK']), int(os.environ['WORLD_SIZE'])
carrier_choice.join(Process(rank, ranks, rank, ranks), None)
ops, functions = native_library.library(), native_library.functions()
one_thread = tf.ConfigProto(inter_op_parallelism_threads=1, use_per_session_threads=True)

def alltoall(x, splits, name='x'):
    return ops.collective_shared_alltoall(x, splits, name=name)

def rows_of(sender, seed, count, dtype, dim=3):
    return np.random.default_rng([sender, seed]).integers(-99, 99, (count, dim)).astype(dtype)

def splits_of(sender, seed, most):
    drawn = np.random.default_rng([seed, sender]).integers(0, most + 1, ranks)
    return np.where(drawn < most / 4, 0, drawn).astype(np.int32)

def exchange(session, fetched, x, splits, seed, most, dtype):
    mine = splits_of(rank, seed, most)
    out, counts = session.run(
        fetched, {x: rows_of(rank, seed, mine.sum(), dtype), splits: mine}
    )
    want, want_counts = [], []
    for sender in range(ranks):
        theirs = splits_of(sender, seed, most)
        cut = np.cumsum([0, *theirs])
        sent = rows_of(sender, seed, theirs.sum(), dtype)
        want.append(sent[cut[rank]:cut[rank + 1]])
        want_counts.append(theirs[rank])
    assert counts.tolist() == want_counts
    np.testing.assert_array_equal(out, np.concatenate(want))
"""


def run(tmp_path, body, ranks, code=0, limit=100, head="", **environment):
    script = tmp_path / "script.py"
    script.write_text(PROGRAM + head + textwrap.dedent(body))
    done = pool.launch(
        *("-np", ranks, "--device", "cpu", "--stall-timeout", 0, script),
        environment={"COLLECTIVE_CARRIER": "shared_memory", **environment},
        timeout=limit,
    )
    assert done.returncode == code, done.stdout
    return done.stdout


EXCHANGES = """
for dtype, mosts in ((np.int64, [1, 5, 900, 0, 70000, 3]), (np.float16, [40, 4000])):
    with tf.Graph().as_default(), tf.Session(config=one_thread) as session:
        x = tf.placeholder(dtype, [None, 3])
        splits = tf.placeholder(tf.int32, [ranks])
        fetched = alltoall(x, splits, f'x.{np.dtype(dtype).name}')
        for seed, most in enumerate(mosts * 4):
            exchange(session, fetched, x, splits, seed, most, dtype)

# A thousand tiny ones in one run, each after the previous one.
with tf.Graph().as_default(), tf.Session(config=one_thread) as session:
    i, total = tf.while_loop(
        lambda i, _: i < 1000,
        lambda i, total: (
            i + 1,
            total + ops.collective_shared_allgather(i[None] * (rank + 1), name='tiny'),
        ),
        (tf.constant(0), tf.zeros([ranks], tf.int32)),
        shape_invariants=(tf.TensorShape([]), tf.TensorShape([None])),
        parallel_iterations=1,
    )
    total = session.run(total)
    assert total.tolist() == [499500 * (r + 1) for r in range(ranks)], total

# More at a time than a ring has places, of data in the ring and in the arena.
with tf.Graph().as_default(), tf.Session(config=one_thread) as session:
    base = tf.placeholder(tf.int32, [])
    many = [
        ops.collective_shared_allgather(tf.fill([1 + 50 * (k % 2)], base + k), name=f'm{k}')
        for k in range(300)
    ]
    for k, got in enumerate(session.run(many, {base: 100 * rank})):
        want = np.repeat(100 * np.arange(ranks) + k, 1 + 50 * (k % 2))
        np.testing.assert_array_equal(got, want)

# Sums are the same bits everywhere, formed in the order of the ranks; rank 0's value for all.
with tf.Graph().as_default(), tf.Session(config=one_thread) as session:
    for size in (0, 1, 5, 8191, 300001):
        addends = [
            np.random.default_rng([r, size]).normal(size=size).astype(np.float32)
            for r in range(ranks)
        ]
        name = f'sum{size}'
        own = tf.placeholder(tf.float32, [None])
        both = [
            ops.collective_shared_allreduce([own], name=name)[0],
            ops.collective_shared_broadcast(own, name=name + '.first'),
        ]
        total, first = session.run(both, {own: addends[rank]})
        want = addends[0].copy()
        for addend in addends[1:]:
            want += addend
        np.testing.assert_array_equal(total, want)
        np.testing.assert_array_equal(first, addends[0])
# Of many tensors, in parts that begin and end within them; also of none, and of types of two bytes.
with tf.Graph().as_default(), tf.Session(config=one_thread) as session:
    for dtype, shapes in (
        (np.float32, [[7], [300, 70], [], [0], [5, 1], [20001], [2]]),
        (np.float16, [[3], [0], [9]]),
        (np.int64, [[0]]),
    ):
        draw = lambda r, i: np.random.default_rng([r, i]).integers(-99, 99, shapes[i])
        addends = [[draw(r, i) for i in range(len(shapes))] for r in range(ranks)]
        # What one operation alone reads may be added to in place, what others read may not.
        fed = [tf.placeholder(dtype, shape) for shape in shapes]
        own = [x * 1 for x in fed]
        sums = ops.collective_shared_allreduce(own, name=f'many{np.dtype(dtype).name}')
        kept = ops.collective_shared_allreduce(fed, name=f'kept{np.dtype(dtype).name}')
        feeds = {x: value.astype(dtype) for x, value in zip(fed, addends[rank])}
        for _ in range(2):
            got, got_kept, mine = session.run([sums, kept, fed], feeds)
            for i, total in enumerate(got):
                want = sum(addend[i] for addend in addends)
                np.testing.assert_array_equal(total, want)
                np.testing.assert_array_equal(got_kept[i], want)
                np.testing.assert_array_equal(mine[i], addends[rank][i])
print('right', rank)
"""


@pytest.mark.sample(1)
@pytest.mark.timeout(150)
@pytest.mark.parametrize("ranks", [2, 4])
def test_exchanges(tmp_path, ranks):
    """Of random sizes and of none; a thousand in a row; more at a time than there are places."""
    assert run(tmp_path, EXCHANGES, ranks).count("right") == ranks


@pytest.mark.timeout(100)
def test_ranks_may_start_collectives_in_any_order(tmp_path):
    """With one thread for operations, a collective that kept it would wait for ever."""
    output = run(
        tmp_path,
        """
        def late(value):
            time.sleep(0.3)
            return value

        with tf.Graph().as_default(), tf.Session(config=one_thread) as session:
            value = tf.placeholder(tf.int64, [1])  # A constant would be folded.
            delayed = tf.reshape(tf.numpy_function(late, [value], tf.int64), [1])
            a = ops.collective_shared_allgather(value if rank else delayed, name='a')
            b = ops.collective_shared_allgather(delayed if rank else value, name='b')
            for _ in range(3):
                got = session.run([a, b], {value: [rank]})
                assert [x.tolist() for x in got] == [[0, 1], [0, 1]]
        print('right')
        """,
        2,
    )
    assert output.count("right") == 2


@pytest.mark.timeout(100)
def test_the_arena_grows_and_is_used_again(tmp_path):
    output = run(
        tmp_path,
        """
        with tf.Graph().as_default(), tf.Session(config=one_thread) as session:
            x, splits = tf.placeholder(tf.float32, [None, 16]), tf.placeholder(tf.int32, [ranks])
            fetched = alltoall(x, splits)
            sizes = []
            for rows in (10, 1 << 16, 1 << 19, 1 << 19, 1 << 19, 1 << 18, 1 << 18):
                mine = np.zeros([rows, 16], np.float32)
                out, _ = session.run(fetched, {x: mine, splits: [rows // 2] * 2})
                assert out.shape == mine.shape
                sizes.append(functions.collective_mailbox_bytes() >> 20)
            # At most two of the largest: a peer may still read the one before.
            assert 0 < sizes[0] < sizes[2] <= 64 and sizes[-1] <= 64, sizes
        print('right')
        """,
        2,
    )
    assert output.count("right") == 2


@pytest.mark.timeout(100)
def test_ranks_that_exchange_different_things_are_told(tmp_path):
    output = run(
        tmp_path,
        """
        with tf.Graph().as_default(), tf.Session(config=one_thread) as session:
            wide = tf.placeholder(tf.float32, [2, 3 + rank])
            try:
                session.run(alltoall(wide, [1, 1]), {wide: np.zeros([2, 3 + rank])})
            except tf.errors.InvalidArgumentError as error:
                print(error.message)
            try:
                total = ops.collective_shared_allreduce([wide[0]], name='s')
                session.run(total, {wide: np.zeros([2, 3 + rank])})
            except tf.errors.InvalidArgumentError as error:
                print(error.message)
        """,
        2,
    )
    assert output.count("the ranks do not exchange the same in 'x': here it is an all-to-all") == 2
    assert output.count("the ranks do not exchange the same in 's': here it is an allreduce") == 2


@pytest.mark.timeout(100)
@pytest.mark.parametrize("when", ["between", "within", "leaves"])
def test_who_waits_for_a_rank_that_ends_is_told(tmp_path, when):
    """Killed between two exchanges or within one, or leaving in peace; never a wrong value."""
    output = run(
        tmp_path,
        f"""
        import sys
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # The launcher's, who sees the end, too.
        when = {when!r}
        """
        + """
        with tf.Graph().as_default(), tf.Session(config=one_thread) as session:
            x, splits = tf.placeholder(tf.float32, [None, 16]), tf.placeholder(tf.int32, [ranks])
            fetched = alltoall(x, splits)
            mine = np.full([1 << 18, 16], rank + 1, np.float32)
            killer = threading.Timer(0.7, lambda: os.kill(os.getpid(), signal.SIGKILL))
            if rank == 1 and when == 'within':
                killer.start()
            try:
                for step in range(100000):
                    if rank == 1 and step == 3 and when == 'between':
                        os.kill(os.getpid(), signal.SIGKILL)
                    if rank == 1 and step == 3 and when == 'leaves':
                        sys.exit(0)
                    out, _ = session.run(fetched, {x: mine, splits: [1 << 17] * 2})
                    assert out[0, 0] == out[1 << 17 - 1, 0] == 1 and out[-1, 0] == 2
                    last = time.monotonic()
            except tf.errors.UnknownError as error:
                assert time.monotonic() - last < 5
                print(error.message, flush=True)
        """,
        2,
        0 if when == "leaves" else 137,
    )
    assert "lost rank 1, which has ended, while 'x' waited for it in shared memory" in output


@pytest.mark.slow
@pytest.mark.timeout(100)
def test_a_rank_that_waits_needs_no_processor(tmp_path):
    output = run(
        tmp_path,
        """
        with tf.Graph().as_default(), tf.Session(config=one_thread) as session:
            x = tf.placeholder(tf.int32, [1])
            gathered = ops.collective_shared_allgather(x, name='g')
            session.run(gathered, {x: [rank]})
            if rank == 1:
                time.sleep(2)
            before = time.process_time()
            session.run(gathered, {x: [rank]})
            if rank == 0:
                print('seconds', time.process_time() - before < 0.1)
        """,
        2,
    )
    assert "seconds True" in output


AWAITED = """
def after(seconds, answer):
    time.sleep(seconds)
    if answer is None:
        raise ValueError('no rows today')
    return answer

def exchange(x, phase):
    return ops.collective_shared_alltoall(x, [1, 1], phase=phase, name=phase).output

x = tf.placeholder(tf.int32, [2])
first = ops.collective_await_rows(collectives=['rows'])
with tf.control_dependencies([first]):
    began = tf.numpy_function(lambda x: x, [x], tf.int32)
began.set_shape([2])
"""


@pytest.mark.timeout(100)
def test_gradients_wait_for_the_rows_of_their_run(tmp_path):
    """Rows come late to rank 0, which then sends its gradients late; in the next run, too."""
    output = run(
        tmp_path,
        """
        late = tf.numpy_function(lambda x: after(0.0 if rank else 0.5, x), [began], tf.int32)
        late.set_shape([2])
        rows, gradients = exchange(late, 'rows'), exchange(began, 'gradients')
        came = tf.numpy_function(lambda _: time.monotonic(), [gradients], tf.float64)
        with tf.Session() as session:
            for step in range(3):
                start = time.monotonic()
                got, sums, when = session.run([rows, gradients, came], {x: [rank, 10 + rank]})
                assert when - start > 0.4, when - start
                assert got.tolist() == sums.tolist() == [10 * rank, 10 * rank + 1]
            for step in range(3):  # Nothing is held back in a run that doesn't say so.
                quick = exchange(x, 'gradients')
                assert session.run(quick, {x: [rank, 10 + rank]}).tolist() == sums.tolist()
        print('right')
        """,
        2,
        head=AWAITED,
    )
    assert output.count("right") == 2


@pytest.mark.timeout(100)
def test_gradients_of_a_run_that_fails_are_given_up(tmp_path):
    output = run(
        tmp_path,
        """
        failing = tf.numpy_function(lambda x: after(0.3, None), [began], tf.int32)
        failing.set_shape([2])
        rows, gradients = exchange(failing, 'rows'), exchange(began, 'gradients')
        with tf.Session() as session:
            for step in range(3):
                try:
                    session.run([rows, gradients], {x: [1, 2]})
                except tf.errors.InvalidArgumentError as error:
                    print('given up:', 'no rows today' in error.message)
            fine = exchange(began, 'other')
            assert session.run(fine, {x: [1, 2]}).tolist() == [1 + rank, 1 + rank]
        print('right')
        """,
        2,
        head=AWAITED,
    )
    assert output.count("given up: True") == 6 and output.count("right") == 2
