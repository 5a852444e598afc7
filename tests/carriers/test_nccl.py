"""Collectives by NCCL, between processes of a launch: NCCL itself is a double, over sockets."""

import textwrap

import pytest

from tests import nccl_double
from tests.jobs import pool

PROGRAM = """
import os, signal, sys, threading, time
import numpy as np
import tensorflow.compat.v1 as tf
from collective.ops import native_library
from collective.ops.communication import carrier_choice, nccl
from collective.ops.communication.membership import Process
from tests import nccl_double

tf.disable_eager_execution()
tf.logging.set_verbosity(tf.logging.ERROR)
rank, ranks = int(os.environ['RANK']), int(os.environ['WORLD_SIZE'])
double = nccl_double.use()
carrier_choice.join(Process(rank, ranks, rank, ranks), None)
assert carrier_choice.in_force() == 'nccl' and carrier_choice.of_agreement() == 'shared_memory'
ops = native_library.library()
one_thread = tf.ConfigProto(inter_op_parallelism_threads=1, use_per_session_threads=True)
gate = tf.zeros([], tf.int32)

def called(function):
    return [line for line in double.double_journal().decode().splitlines() if function in line]

def late(value, seconds=0.2):
    time.sleep(seconds)
    return value

def delayed(x):
    out = tf.numpy_function(late, [x], x.dtype)
    out.set_shape(x.shape)
    return out
"""


@pytest.fixture(scope="module", autouse=True)
def _built():
    nccl_double.built()


def run(tmp_path, body, ranks=2, code=0):
    script = tmp_path / "script.py"
    script.write_text(PROGRAM + textwrap.dedent(body))
    done = pool.launch(
        *("-np", ranks, "--device", "cpu", "--stall-timeout", 0, script),
        environment={"COLLECTIVE_CARRIER": "nccl"},
        timeout=60,
    )
    assert done.returncode == code, done.stdout
    return done.stdout


EXCHANGES = """
def rows_of(sender, seed, count, dtype):
    return np.random.default_rng([sender, seed]).integers(-99, 99, (count, 3)).astype(dtype)

def splits_of(sender, seed, most):
    drawn = np.random.default_rng([seed, sender]).integers(0, most + 1, ranks)
    return np.where(drawn < most / 4, 0, drawn).astype(np.int32)

for dtype, mosts in ((np.int64, [0, 1, 5, 900, 70000, 3]), (np.float16, [40, 4000])):
    with tf.Graph().as_default(), tf.Session(config=one_thread) as session:
        x, splits = tf.placeholder(dtype, [None, 3]), tf.placeholder(tf.int32, [ranks])
        fetched = ops.collective_nccl_alltoall(x, splits, name=f'x.{np.dtype(dtype).name}')
        for seed, most in enumerate(mosts * 2):
            own = splits_of(rank, seed, most)
            feeds = {x: rows_of(rank, seed, own.sum(), dtype), splits: own}
            out, counts = session.run(fetched, feeds)
            want, want_counts = [], []
            for sender in range(ranks):
                theirs = splits_of(sender, seed, most)
                cut = np.cumsum([0, *theirs])
                sent = rows_of(sender, seed, theirs.sum(), dtype)
                want.append(sent[cut[rank]:cut[rank + 1]])
                want_counts.append(theirs[rank])
            assert counts.tolist() == want_counts
            np.testing.assert_array_equal(out, np.concatenate(want))

shapes = [[7], [300, 70], [], [0], [5, 1]]
addends = [
    [np.random.default_rng([r, i]).normal(size=shape).astype(np.float32) for i, shape in
     enumerate(shapes)]
    for r in range(ranks)
]
with tf.Graph().as_default(), tf.Session(config=one_thread) as session:
    fed = [tf.placeholder(tf.float32, shape) for shape in shapes]
    gate = tf.placeholder_with_default(tf.zeros([], tf.int32), [])
    many = [
        # What one operation alone reads may be added to in place, what others read may not.
        ops.collective_nccl_allreduce([x * 1 for x in fed], gate, name='sums'),
        ops.collective_nccl_allreduce(fed, gate, name='kept'),
        fed,
        ops.collective_nccl_allgather(tf.tile(fed[0][None], [rank + 1, 1]), gate, name='all'),
        ops.collective_nccl_broadcast(fed[1] > 0, name='first'),  # of a type NCCL doesn't know
        ops.collective_nccl_broadcast(fed[3], name='nothing'),
    ]
    for _ in range(3):
        sums, kept, own, all_rows, first, nothing = session.run(
            many, dict(zip(fed, addends[rank]))
        )
        for i, total in enumerate(sums):
            want = np.sum([addend[i] for addend in addends], 0, np.float64)
            np.testing.assert_allclose(total, want, rtol=1e-5, atol=1e-6)
            np.testing.assert_array_equal(kept[i], total)
            np.testing.assert_array_equal(own[i], addends[rank][i])
        want = np.concatenate([np.tile(addends[r][0], (r + 1, 1)) for r in range(ranks)])
        np.testing.assert_array_equal(all_rows, want)
        np.testing.assert_array_equal(first, addends[0][1] > 0)
        assert nothing.size == 0
assert len(called('CommInitRank')) == 1 and len(called('GetUniqueId')) == (rank == 0)
print('right', rank)
"""


@pytest.mark.sample(1)
@pytest.mark.timeout(100)
@pytest.mark.parametrize("ranks", [2, 3])
def test_exchanges(tmp_path, ranks):
    """Of random sizes and of none, of many tensors in one group; one communicator for all."""
    assert run(tmp_path, EXCHANGES, ranks).count("right") == ranks


@pytest.mark.timeout(100)
def test_all_ranks_issue_in_one_order(tmp_path):
    """They start collectives in opposite orders, in loops and in runs in parallel, too."""
    output = run(
        tmp_path,
        """
        import threading
        with tf.Graph().as_default(), tf.Session(config=one_thread) as session:
            value = tf.placeholder(tf.int64, [1])  # A constant would be folded.
            gate = tf.placeholder_with_default(tf.zeros([], tf.int32), [])
            x = {name: value if (name == 'a') == (rank == 0) else delayed(value) for name in 'ab'}
            gathered = [
                ops.collective_nccl_allgather(tf.tile(x[name], [times]), gate, name=name)
                for times, name in enumerate('ab', 1)
            ]
            for _ in range(3):
                a, b = session.run(gathered, {value: [rank]})
                assert a.tolist() == [0, 1] and b.tolist() == [0, 0, 1, 1]

        # As many at once as there are, each of its own size: rank 0's order is everyone's.
        with tf.Graph().as_default(), tf.Session() as session:
            value = tf.placeholder(tf.int32, [])
            gate = tf.placeholder_with_default(tf.zeros([], tf.int32), [])
            many = [
                ops.collective_nccl_allgather(tf.fill([1 + k], value + k), gate, name=f'm{k}')
                for k in range(80)
            ]
            loop = tf.while_loop(
                lambda i, _: i < 50,
                lambda i, total: (
                    i + 1,
                    total + ops.collective_nccl_allgather(i[None], gate, name='tiny'),
                ),
                (value * 0, tf.zeros([2], tf.int32)),
                shape_invariants=(tf.TensorShape([]), tf.TensorShape([None])),
                parallel_iterations=1,
            )[1]
            totals = []
            thread = threading.Thread(
                target=lambda: totals.append(session.run(loop, {value: rank}).tolist())
            )
            thread.start()
            for _ in range(3):
                order = many if rank else many[::-1]
                got = session.run(order, {value: 100 * rank})
                for k, rows in enumerate(got if rank else got[::-1]):
                    want = np.repeat([k, 100 + k], k + 1)
                    np.testing.assert_array_equal(rows, want)
            thread.join()
            assert totals == [[1225, 1225]], totals
        sends = [line for line in called('Send') if line.endswith(f'to {1 - rank}')]
        print('order', hash(tuple(line.split()[1] for line in sends)), len(sends))
        """,
    )
    orders = [line.rpartition("order")[2] for line in output.splitlines() if "order" in line]
    assert len(orders) == 2 and orders[0] == orders[1], output


FAILS = """
x = tf.placeholder(tf.float32, [None])
gathered = ops.collective_nccl_allgather(x, gate_fed, name='wanted')
again = ops.collective_nccl_allgather(x, gate_fed, name='next')

def tried(session, fetched, seconds=10):
    start = time.monotonic()
    try:
        return session.run(fetched, {x: [rank]})
    except tf.errors.OpError as error:
        words = next(line for line in error.message.splitlines() if 'NCCL' in line)
        print(f'rank {rank} says:', type(error).__name__, words, flush=True)
        assert time.monotonic() - start < seconds
"""
FAILS = "gate_fed = tf.placeholder_with_default(tf.zeros([], tf.int32), [])" + FAILS


@pytest.mark.timeout(100)
@pytest.mark.parametrize(
    ("function", "n", "said"),
    [
        ("ncclSend", 6, "ncclSend with rank 1 says 'unhandled system error' (the test says so)"),
        pytest.param(
            *("ncclCommInitRank", 1, "ncclCommInitRank says 'unhandled system error'"),
            marks=pytest.mark.matrix,
        ),
    ],
)
def test_an_error_names_the_collective_the_peer_and_nccls_words(tmp_path, function, n, said):
    """The communicator is aborted, by which the peer doesn't wait; nothing goes by it any more."""
    peers = function == "ncclSend"
    output = run(
        tmp_path,
        FAILS
        + f"""
with tf.Session() as session:
    if rank == 0 or not {peers}:  # With nobody to connect to, a double waits, as NCCL does.
        double.double_fail({function.encode()!r}, {n})
    for _ in range(2 if {peers} else 0):
        assert tried(session, gathered).tolist() == [0, 1]
    tried(session, gathered)
    tried(session, again)
    assert double.double_live() == 0
    try:
        nccl.checked(0)
    except tf.errors.UnknownError as error:
        print('checked', error.message, flush=True)
    time.sleep(0.5)
""",
    )
    assert f"rank 0 says: UnknownError 'wanted' failed in NCCL: {said}" in output
    assert "UnknownError 'next' can't go by NCCL any more: 'wanted' failed" in output
    assert output.count("checked what this run gave is not to be used: 'wanted'") == 2
    if peers:
        gone = "'remote process exited or there was a network error' (rank 0 is gone)"
        assert f"rank 1 says: UnknownError 'wanted' failed in NCCL: ncclGroupEnd says {gone}" in (
            output
        )


@pytest.mark.timeout(100)
def test_who_waits_for_a_rank_that_gave_up_and_lives_is_told(tmp_path):
    """It has issued what the other one failed to issue, and NCCL tells it nothing."""
    output = run(
        tmp_path,
        FAILS
        + f"""
told = {str(tmp_path / "told")!r}
with tf.Session() as session:
    assert tried(session, gathered).tolist() == [0, 1]
    double.double_quiet()
    if rank == 0:
        double.double_fail(b'ncclSend', 4)
    tried(session, gathered)
    if rank == 1:
        open(told, 'w').close()
    end = time.monotonic() + 30
    while not os.path.exists(told) and time.monotonic() < end:
        time.sleep(0.05)
    assert os.path.exists(told)
    tried(session, again)
""",
    )
    assert "rank 0 says: UnknownError 'wanted' failed in NCCL: ncclSend" in output
    gone = "rank 0 has aborted NCCL's communicator, while 'NCCL' waited for it; its own error says"
    assert f"rank 1 says: UnknownError {gone}" in output
    assert "UnknownError 'next' can't go by NCCL any more: rank 0 has aborted" in output


@pytest.mark.timeout(100)
@pytest.mark.parametrize(
    "when",
    [
        "under way",
        pytest.param("before", marks=pytest.mark.matrix),
        pytest.param("connecting", marks=pytest.mark.matrix),
    ],
)
def test_who_waits_for_a_rank_that_ends_is_told(tmp_path, when):
    """Before its headers have come, while NCCL moves data, and while the communicator is made."""
    output = run(
        tmp_path,
        FAILS
        + f"when = {when!r}"
        + """
signal.signal(signal.SIGTERM, signal.SIG_IGN)  # The launcher's, who sees the end, too.
with tf.Session() as session:
    if when != 'connecting':
        assert tried(session, gathered).tolist() == [0, 1]
    if rank == 1:
        if when == 'before':
            os.kill(os.getpid(), signal.SIGKILL)
        double.double_hang(b'ncclCommInitRank' if when == 'connecting' else b'ncclGroupEnd')
        threading.Timer(0.5, lambda: os.kill(os.getpid(), signal.SIGKILL)).start()
    elif when == 'under way':
        double.double_hang(b'ncclGroupEnd')  # So does a kernel on a device.
    tried(session, gathered)
    tried(session, again)
    os._exit(0)  # A thread may hang in NCCL.
""",
        code=137,
    )
    where = "'wanted' waited for it before NCCL" if when == "before" else "'NCCL' waited for it"
    assert f"rank 0 says: UnknownError lost rank 1, which has ended, while {where}" in output
    assert "UnknownError 'next' can't go by NCCL any more: lost rank 1" in output


@pytest.mark.matrix
@pytest.mark.timeout(100)
def test_an_error_of_what_is_under_way_aborts_it(tmp_path):
    """And ends it; a rank that aborts at its end leaves no communicator."""
    output = run(
        tmp_path,
        FAILS
        + """
with tf.Session() as session:
    assert tried(session, gathered).tolist() == [0, 1]
    assert double.double_live() == 1
    double.double_hang(b'ncclGroupEnd')
    threading.Timer(0.3, lambda: double.double_async_error(6)).start()
    tried(session, gathered)
    assert len(called('CommAbort')) == 1
""",
    )
    said = "an exchange that is under way' failed in NCCL: ncclCommGetAsyncError says 'remote"
    assert output.count(f"says: UnknownError '{said}") == 2, output


@pytest.mark.matrix
@pytest.mark.timeout(100)
def test_nobody_frees_the_communicator_while_a_group_is_put_together(tmp_path):
    run(
        tmp_path,
        FAILS
        + """
with tf.Session() as session:
    assert tried(session, gathered).tolist() == [0, 1]
    double.double_slow_sends(400)
    threading.Timer(0.2, lambda: double.double_async_error(6)).start()
    tried(session, gathered)
    # The run may be over before who watches NCCL sees the error.
    until = time.monotonic() + 30
    while not called('CommAbort') and time.monotonic() < until:
        time.sleep(0.01)
    assert len(called('CommAbort')) == 1 and not called('used after its abort')
""",
    )


@pytest.mark.timeout(100)
def test_ranks_that_exchange_different_things_are_told_and_go_on(tmp_path):
    """Nothing is issued for them on any rank; the communicator lives, and ends with the process."""
    output = run(
        tmp_path,
        """
        import atexit
        atexit.register(lambda: print('live', double.double_live(), flush=True))
        with tf.Graph().as_default(), tf.Session(config=one_thread) as session:
            wide = tf.placeholder(tf.float32, [2, 3 + rank])
            gate = tf.placeholder_with_default(tf.zeros([], tf.int32), [])
            for name, fetched in (
                ('x', ops.collective_nccl_alltoall(wide, [1, 1], name='x')),
                ('s', ops.collective_nccl_allreduce([wide], gate, name='s')),
                ('m', (ops.collective_shared_alltoall if rank else ops.collective_nccl_alltoall)(
                    wide, [1, 1], name='m')),
            ):
                try:
                    session.run(fetched, {wide: np.zeros([2, 3 + rank])})
                except tf.errors.InvalidArgumentError as error:
                    print(error.message)
                if name != 'm':
                    fine = ops.collective_nccl_allgather(wide[0, :1], gate, name='fine')
                    got = session.run(fine, {wide: np.full([2, 3 + rank], rank)})
                    assert got.tolist() == [0, 1]
        # Registered last, called first.
        atexit.unregister(native_library.functions().collective_nccl_leave)
        atexit.register(native_library.functions().collective_nccl_leave)
        """,
    )
    assert output.count("the same in 'x': here it is an all-to-all by NCCL of float") == 2
    assert output.count("the same in 's': here it is an allreduce by NCCL of float") == 2
    assert "on rank 1 it is an all-to-all of float" in output
    assert output.count("live 0") == 2


@pytest.mark.matrix
@pytest.mark.timeout(100)
def test_gradients_wait_for_the_rows_of_their_run(tmp_path):
    """As through shared memory: rows come late to rank 0, which then sends its gradients late."""
    output = run(
        tmp_path,
        """
        def exchange(x, phase):
            return ops.collective_nccl_alltoall(x, [1, 1], phase=phase, name=phase).output

        x = tf.placeholder(tf.int32, [2])
        with tf.control_dependencies([ops.collective_await_rows(collectives=['rows'])]):
            began = tf.numpy_function(lambda x: x, [x], tf.int32)
        began.set_shape([2])
        rows, gradients = exchange(began if rank else delayed(began), 'rows'), exchange(
            began, 'gradients')
        with tf.Session() as session:
            for step in range(2):
                got, sums = session.run([rows, gradients], {x: [rank, 10 + rank]})
                assert got.tolist() == sums.tolist() == [10 * rank, 10 * rank + 1]
        phases = [line.split()[0] for line in called('ncclRecv')]
        print('right', len(phases))
        """,
    )
    assert output.count("right") == 2
