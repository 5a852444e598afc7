"""Lookups that are pooled while rows of others still come: between processes, without Horovod."""

import pytest
from test_shared_memory import run

# Six sections of one table, of 40,000 keys or so: an owner answers in several parts. Members of a
# section share its rows.
HEAD = """
import ctypes

ROWS, DIM, SECTIONS, KEYS = 3 * 4 << 12, 16, 6, 40000
shard = tf.get_variable('shard', [ROWS // ranks, DIM], use_resource=True, trainable=False)
whole = np.random.default_rng(1).normal(size=(ROWS, DIM)).astype(np.float32)
fill = shard.assign(whole[rank::ranks])
MEMBERS = [  # (section, combiner: 0 rows, 1 sum, 2 mean, 3 sqrtn; weighted; max_norm)
    (2, 1, True, 0.0), (0, 0, False, 0.0), (1, 2, True, 0.0), (0, 1, False, 2.0),
    (3, 0, False, 2.5), (4, 3, True, 0.0), (5, 2, False, 3.0), (1, 3, False, 0.0),
]
LAYOUT = dict(
    sections=[s for s, *_ in MEMBERS], dims=[DIM] * len(MEMBERS),
    combiners=[c for _, c, *_ in MEMBERS], weighted=[w for *_, w, _ in MEMBERS],
    max_norms=[n for *_, n in MEMBERS],
)
folder = os.path.dirname(os.path.abspath(__file__))

class Batch:
    # What this rank looks up: of each section distinct keys, of each member some of them.
    def __init__(self, seed, keys):
        draw = np.random.default_rng([seed, rank])
        of_section = [
            draw.permutation(ROWS)[: draw.integers(keys // 2, keys + 1)] if keys else []
            for _ in range(SECTIONS)
        ]
        if keys:
            of_section[4] = []  # A lookup without ids.
        by_owner = [
            [np.array([k for k in of if k % ranks == r], np.int64) for of in of_section]
            for r in range(ranks)
        ]
        words = [
            np.concatenate([np.repeat([len(of) for of in owned], 2), *owned]) for owned in by_owner
        ]
        self.message, self.splits = np.concatenate(words), [len(w) for w in words]
        places, start = [{} for _ in range(SECTIONS)], 0
        for owned in by_owner:
            for section, of in enumerate(owned):
                places[section].update(zip(of.tolist(), range(start, start + len(of) * DIM, DIM)))
                start += len(of) * DIM
        self.ids, self.positions, self.samples, self.weights = [], [], [], []
        for section, combiner, weighted, _ in MEMBERS:
            of = of_section[section]
            ids = draw.choice(of, keys) if len(of) else np.empty(0, np.int64)
            self.ids.append(ids)
            self.positions.append([places[section][k] for k in ids.tolist()])
            if combiner:  # Samples without ids are among them.
                self.samples.append(np.sort(draw.integers(0, keys // 3 + 1, len(ids))))
            if weighted:
                self.weights.append(draw.uniform(0.5, 2, len(ids)).astype(np.float32))

    # The results of the members, in float64.
    def results(self):
        samples, weights = iter(self.samples), iter(self.weights)
        for ids, (_, combiner, weighted, max_norm) in zip(self.ids, MEMBERS):
            rows = whole[ids].astype(np.float64)
            if max_norm:
                norms = np.linalg.norm(rows, axis=1, keepdims=True)
                rows *= max_norm / np.maximum(norms, max_norm)
            if not combiner:
                yield rows
                continue
            of, weight = next(samples), next(weights) if weighted else np.ones(len(ids))
            out = np.zeros([of[-1] + 1 if len(of) else 0, DIM])
            np.add.at(out, of, rows * weight[:, None])
            if combiner > 1:
                divisor = np.zeros([len(out), 1])
                np.add.at(divisor, of, (weight if combiner == 2 else weight**2)[:, None])
                divisor[divisor == 0] = 1
                out /= divisor if combiner == 2 else np.sqrt(divisor)
            yield out

class Lookups:
    def __init__(self, name):
        many = lambda dtype, count: [tf.placeholder(dtype, [None]) for _ in range(count)]
        self.message, self.splits = many(tf.int64, 1)[0], tf.placeholder(tf.int32, [ranks])
        self.positions = many(tf.int32, len(MEMBERS))
        self.samples = many(tf.int64, sum(c > 0 for c in LAYOUT['combiners']))
        self.weights = many(tf.float32, sum(LAYOUT['weighted']))
        keys = ops.collective_shared_alltoall_keys(
            self.message, self.splits, [shard.handle], rows_name=name + '.rows', ranks=ranks,
            section_tables=[0] * SECTIONS, kinds=[0], dims=[DIM] * SECTIONS,
            pooled=[False] * SECTIONS, weighted=[False] * SECTIONS, max_norms=[0.0] * SECTIONS,
            shapes=[[ROWS // ranks, DIM]], name=name,
        )
        given = self.positions, self.samples, self.weights
        rows = ops.collective_shared_alltoall_rows(
            keys.rows, keys.row_splits, keys.answers, *given, **LAYOUT, name=name + '.rows'
        )
        self.pooled = ops.collective_pool(rows.output, *given, [], [rows.early], [], [], **LAYOUT)
        self.pooled_late = ops.collective_pool(rows.output, *given, [], [], [], [], **LAYOUT)

    def feeds(self, batch):
        feeds = {self.message: batch.message, self.splits: batch.splits}
        for of in ('positions', 'samples', 'weights'):
            feeds.update(zip(getattr(self, of), getattr(batch, of)))
        return feeds

    def check(self, session, batch):
        pooled, late = session.run([self.pooled, self.pooled_late], self.feeds(batch))
        for got, same, want in zip(pooled, late, batch.results()):
            np.testing.assert_array_equal(got.view(np.int32), same.view(np.int32))
            np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)

# Calls `act(told, sections)` between the parts of an answer.
def observe(act):
    observe.kept = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_int64)(act)
    functions.collective_observe_parts(observe.kept)

# Tells whether `holds()` has become true.
def wait_until(holds):
    until = time.monotonic() + 40
    while not holds() and time.monotonic() < until:
        time.sleep(0.01)
    return holds()
"""


@pytest.mark.sample(1)
@pytest.mark.timeout(150)
@pytest.mark.parametrize("ranks", [2, 4])
def test_the_first_lookups_are_pooled_before_the_last_rows_are_there(tmp_path, ranks):
    """Rank 1 ends its answer for rank 0 only when rank 0 has pooled what it was told of."""
    output = run(
        tmp_path,
        """
        lookups, sign = Lookups('x'), os.path.join(folder, 'pooled')

        def hold(told, sections):
            if told == 0 and not hold.seen:
                hold.seen.append(wait_until(lambda: os.path.exists(sign)))
                print('held for', sections, 'sections until', hold.seen, flush=True)
        hold.seen = []

        def watch():
            if wait_until(lambda: functions.collective_pooled_early() > 0):
                open(sign, 'w').close()

        if rank == 1:
            observe(hold)
        with tf.Session(config=one_thread) as session:
            session.run(fill.op)
            thread = threading.Thread(target=watch)
            if rank == 0:
                thread.start()
            # The last rank has no ids, and answers all the same.
            lookups.check(session, Batch(7, KEYS if rank == 0 or rank < ranks - 1 else 0))
            if rank == 0:
                thread.join()
                # Members of other sections are there, and were pooled afterwards.
                assert 0 < functions.collective_pooled_early() < len(MEMBERS)
            for seed, keys in enumerate([3, KEYS, 0, 1, KEYS // 3]):
                lookups.check(session, Batch(seed, keys))
        print('right')
        """,
        ranks,
        head=HEAD,
    )
    assert output.count("right") == ranks
    assert "sections until [True]" in output


@pytest.mark.timeout(100)
def test_who_is_killed_between_two_parts_of_its_answer_is_lost(tmp_path):
    output = run(
        tmp_path,
        """
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # The launcher's, who sees the end, too.
        lookups = Lookups('x')
        if rank == 1:
            def die(told, sections):
                if told == 0:
                    wait_until(lambda: os.path.exists(sign))
                    os.kill(os.getpid(), signal.SIGKILL)
            observe(die)
        sign = os.path.join(folder, 'pooled')

        def watch():
            if wait_until(lambda: functions.collective_pooled_early() > 0):
                open(sign, 'w').close()

        with tf.Session(config=one_thread) as session:
            session.run(fill.op)
            if rank == 0:
                threading.Thread(target=watch, daemon=True).start()
            batch = Batch(7, KEYS)
            try:
                session.run(lookups.pooled, lookups.feeds(batch))
                print('has its rows', flush=True)
            except tf.errors.UnknownError as error:
                assert os.path.exists(sign) or rank != 0
                print(error.message, flush=True)
        """,
        3,
        137,
        head=HEAD,
    )
    lost = "lost rank 1, which has ended, while 'x.rows' waited for it"
    assert f"[0] {lost}" in output
    # Rank 1 may have answered rank 2 before.
    assert f"[2] {lost}" in output or "[2] has its rows" in output
