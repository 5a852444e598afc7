"""Keys that owners answer as they come, alone: between processes of a launch, without Horovod."""

import pytest
from test_shared_memory import run

# One table: its row k is (k, k + 1/4, k + 1/2, k + 3/4), at local row k div N of rank k mod N.
HEAD = """
ROWS = 3 * 4 << 12
shard = tf.get_variable('shard', [ROWS // ranks, 4], use_resource=True, trainable=False)
whole = (np.arange(ROWS)[:, None] + np.arange(4) / 4).astype(np.float32)
fill = shard.assign(whole[rank::ranks])

class Exchange:
    def __init__(self, name, rows_name=None):
        rows_name = rows_name or name + '.rows'
        self.message = tf.placeholder(tf.int64, [None])
        self.splits = tf.placeholder(tf.int32, [ranks])
        self.keys = ops.collective_shared_alltoall_keys(
            self.message, self.splits, [shard.handle], rows_name=rows_name, ranks=ranks,
            section_tables=[0], kinds=[0], dims=[4], pooled=[False], weighted=[False],
            max_norms=[0.0], shapes=[[ROWS // ranks, 4]], name=name,
        )
        positions = tf.range(tf.size(self.keys.rows) // 4) * 4
        self.rows = ops.collective_shared_alltoall_rows(
            self.keys.rows, self.keys.row_splits, self.keys.answers, [positions], [], [],
            sections=[0], dims=[4], combiners=[0], weighted=[False], max_norms=[0.0],
            name=rows_name,
        ).output

    def feeds(self, keys):
        by_owner = [[k for k in keys if k % ranks == r] for r in range(ranks)]
        words = [[len(of), len(of), *of] for of in by_owner]
        return {self.message: np.concatenate(words), self.splits: [len(w) for w in words]}

    def check(self, session, keys_of_ranks):
        keys = keys_of_ranks[rank]
        rows, asked = session.run(
            [self.rows, self.keys.local_rows[0]], self.feeds(keys)
        )
        want = [whole[k] for r in range(ranks) for k in keys if k % ranks == r]
        np.testing.assert_array_equal(rows, np.reshape(want, [-1]))
        # What the way back needs: what all ranks asked of this one.
        want = [k // ranks for of in keys_of_ranks for k in of if k % ranks == rank]
        assert asked.tolist() == want

def keys_of(seed, most):
    draw = np.random.default_rng(seed)
    return [draw.integers(0, ROWS, draw.integers(0, most + 1)).tolist() for _ in range(ranks)]
"""


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.timeout(150)
@pytest.mark.parametrize("ranks", [3, 2])
def test_rows_are_those_that_were_asked_for(tmp_path, ranks):
    """Of none, of few and of so many that the arena grows; memory is used again, too."""
    output = run(
        tmp_path,
        """
        exchange = Exchange('x')
        with tf.Session(config=one_thread) as session:
            session.run(fill.op)
            for seed, most in enumerate([0, 1, 5, 300, 20000, 3, 90000, 0, 90000, 2000]):
                exchange.check(session, keys_of(seed, most))
            grown = functions.collective_mailbox_bytes()
            for seed in range(20):
                exchange.check(session, keys_of(seed, 9000))
            # Runs that leave the rows out keep step with those that take them, and keep nothing.
            for seed in range(40):
                session.run(exchange.keys.output, exchange.feeds(keys_of(seed, 50000)[rank]))
            exchange.check(session, keys_of(99, 9000))
            assert functions.collective_mailbox_bytes() <= 2 * grown
        print('right')
        """,
        ranks,
        head=HEAD,
    )
    assert output.count("right") == ranks


@pytest.mark.timeout(100)
def test_a_rank_is_answered_while_the_keys_of_another_are_missing(tmp_path):
    """Ranks 0 and 2 have answered each other before rank 1 begins: it waits until they say so."""
    output = run(
        tmp_path,
        """
        exchange = Exchange('x')
        folder = os.path.dirname(os.path.abspath(__file__))
        seen = [os.path.join(folder, f'seen.{r}') for r in (0, 2)]

        def watch():
            until = time.monotonic() + 30
            while functions.collective_answers() < 1 and time.monotonic() < until:
                time.sleep(0.01)
            if functions.collective_answers() == 1:
                open(os.path.join(folder, f'seen.{rank}'), 'w').close()

        def wait():
            until = time.monotonic() + 40
            while not all(map(os.path.exists, seen)) and time.monotonic() < until:
                time.sleep(0.01)
            print('seen', all(map(os.path.exists, seen)), flush=True)

        with tf.Session(config=one_thread) as session:
            session.run(fill.op)
            thread = threading.Thread(target=watch)
            if rank == 1:
                wait()
            else:
                thread.start()
            exchange.check(session, keys_of(7, 500))
            if rank != 1:
                thread.join()
            assert functions.collective_answers() == 2
        print('right')
        """,
        3,
        head=HEAD,
    )
    assert "seen True" in output and output.count("right") == 3


@pytest.mark.timeout(100)
def test_who_waits_for_an_owner_that_is_killed_is_told(tmp_path):
    """It writes to the memory of rank 0 most of the time: no wrong row comes of it."""
    output = run(
        tmp_path,
        """
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # The launcher's, who sees the end, too.
        exchange = Exchange('x')
        keys = [list(range(ROWS)) * 4 for _ in range(ranks)]
        with tf.Session(config=one_thread) as session:
            session.run(fill.op)
            feeds = exchange.feeds(keys[rank])
            want = np.tile(whole[0::2], [4, 1]), np.tile(whole[1::2], [4, 1])
            killer = threading.Timer(1.0, lambda: os.kill(os.getpid(), signal.SIGKILL))
            if rank == 1:
                killer.start()
            try:
                for step in range(100000):
                    rows = session.run(exchange.rows, feeds)
                    np.testing.assert_array_equal(rows, np.concatenate(want).ravel())
                    last = time.monotonic()
            except tf.errors.UnknownError as error:
                assert time.monotonic() - last < 5
                print(error.message, flush=True)
        """,
        2,
        137,
        head=HEAD,
    )
    assert "lost rank 1, which has ended, while 'x" in output


@pytest.mark.timeout(100)
def test_an_owner_that_can_not_answer_says_why(tmp_path):
    """The rank that asks for a row that doesn't exist gets no answer, and is told that it ended."""
    output = run(
        tmp_path,
        """
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        exchange = Exchange('x')
        with tf.Session(config=one_thread) as session:
            session.run(fill.op)
            exchange.check(session, keys_of(1, 100))
            keys = [[ROWS + 1], []][rank]
            try:
                session.run(exchange.rows, exchange.feeds(keys))
            except tf.errors.OpError as error:
                print(f'rank {rank}:', error.message, flush=True)
        """,
        2,
        head=HEAD,
    )
    assert "table 0 has no local row 24576: there are 24576" in output
    assert "lost rank 1, which has ended, while 'x.rows' waited for it" in output


@pytest.mark.timeout(100)
def test_ranks_that_exchange_different_things_are_told(tmp_path):
    output = run(
        tmp_path,
        """
        with tf.Session(config=one_thread) as session:
            session.run(fill.op)
            if rank:
                x = tf.placeholder(tf.int64, [3])  # A constant would be folded.
                fetched, feeds = ops.collective_shared_allgather(x, name='x'), {x: [1, 2, 3]}
            else:
                exchange = Exchange('x')
                fetched, feeds = exchange.rows, exchange.feeds([1, 2])
            try:
                session.run(fetched, feeds)
            except tf.errors.InvalidArgumentError as error:
                print(error.message)
        """,
        2,
        head=HEAD,
    )
    assert "in 'x': here it is an all-to-all of keys of int64" in output
    assert "in 'x': here it is an allgather of int64" in output


@pytest.mark.timeout(100)
def test_an_exchange_that_can_not_begin_keeps_no_memory(tmp_path):
    """Nobody writes to the place for its rows, of which nobody has been told."""
    output = run(
        tmp_path,
        """
        # Two names with one FNV-1a hash.
        first, second = '8yn0iYCKYHlIj4-BwPqk', 'GReLUrM4wMqfg9yzV3KQ'
        x = tf.placeholder(tf.int64, [3])
        gathered = ops.collective_shared_allgather(x, name=first)
        exchange = Exchange('x', second)
        feeds = exchange.feeds(list(range(30000)))
        with tf.Session(config=one_thread) as session:
            session.run([fill.op, gathered], {x: [1, 2, 3]})
            for _ in range(60):
                try:
                    session.run(exchange.keys.output, feeds)
                except tf.errors.ResourceExhaustedError as error:
                    assert f"'{second}' and '{first}' are one name" in error.message
                else:
                    assert False
            print('MB:', functions.collective_mailbox_bytes() >> 20)
        """,
        2,
        head=HEAD,
    )
    assert output.count("MB: 4\n") == 2
