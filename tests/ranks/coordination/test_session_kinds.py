"""Every kind of session and hook of a TensorFlow 1 script equals plain TensorFlow."""

import contextlib

import numpy as np
import pytest
import tensorflow.compat.v1 as tf
import tensorflow.compat.v2 as tf2

from collective import RankError
from tests.ranks import grouped, reference

pytestmark = [pytest.mark.either_backend, pytest.mark.backends("hb")]

B, STEPS = grouped.B, 3
IDS = np.random.default_rng(5).integers(0, 10, (STEPS, B))


def build(embedding_scope, name=""):
    """Builds a table, a dense weight and a global step."""
    with embedding_scope():
        t = reference.table(f"{name}t", 10, 2)
    w = tf.get_variable(f"{name}w", initializer=reference.table_values(2, 1, 1))
    ids = tf.placeholder(tf.int64, [None], f"{name}ids")
    rows = tf.nn.embedding_lookup(t, ids)
    loss = tf.reduce_mean(tf.square(tf.matmul(rows, w)), name=f"{name}loss")
    train = tf.train.AdagradOptimizer(0.1).minimize(
        loss, global_step=tf.train.get_or_create_global_step()
    )
    return {
        "ids": ids,
        "loss": loss,
        "train": train,
        "w": w,
        "rows": tf.nn.embedding_lookup(t, tf.range(10)),
        "step": tf.train.get_global_step(),
    }


def part(step, rank, size):
    return reference.part(IDS[step], rank, size)


def expected(steps=STEPS):
    with tf.Graph().as_default():
        f = build(contextlib.nullcontext)
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            for step in range(steps):
                session.run(f["train"], {f["ids"]: IDS[step]})
            return session.run({name: f[name] for name in ("rows", "w", "step")})


SESSIONS = {
    "MonitoredTrainingSession": lambda: tf.train.MonitoredTrainingSession(""),
    "MonitoredSession": tf.train.MonitoredSession,
    "SingularMonitoredSession": tf.train.SingularMonitoredSession,
    "Session": tf.Session,
    "InteractiveSession": tf.InteractiveSession,
}


@pytest.mark.sample(3)
@pytest.mark.parametrize("kind", SESSIONS)
def test_kinds_of_sessions(strategy, rank, size, kind):
    with strategy.scope(plan="quiet"), tf.Graph().as_default():
        f = build(strategy.embedding_scope)
        session = SESSIONS[kind]()
        if kind.endswith("Session") and not kind.startswith(("Mon", "Sing")):
            session.run(tf.global_variables_initializer())
        for step in range(STEPS):
            session.run(f["train"], {f["ids"]: part(step, rank, size)})
        got = session.run({name: f[name] for name in ("rows", "w", "step")})
        if kind == "InteractiveSession":  # what is evaluated has it for its session
            np.testing.assert_array_equal(f["rows"].eval(), got["rows"])
        session.close()
    grouped.same(got, expected())


def test_several_sessions_over_one_graph(strategy, rank, size):
    """Each has variables of its own; they take turns."""
    with strategy.scope(plan="quiet"), tf.Graph().as_default():
        f = build(strategy.embedding_scope)
        sessions = [tf.Session() for _ in range(2)]
        for session in sessions:
            session.run(tf.global_variables_initializer())
        for step in range(STEPS):
            sessions[0].run(f["train"], {f["ids"]: part(step, rank, size)})
            if step < 2:
                sessions[1].run(f["train"], {f["ids"]: part(step, rank, size)})
        got = [
            session.run({name: f[name] for name in ("rows", "w", "step")}) for session in sessions
        ]
        for session in sessions:
            session.close()
    grouped.same(got[0], expected())
    grouped.same(got[1], expected(2))


def test_several_graphs_in_one_scope(strategy, rank, size):
    """They run while none of them is the default graph; rows are as they were before the step."""
    before = [expected(step)["rows"] for step in range(STEPS)]
    with strategy.scope(plan="quiet"):
        graphs = [tf.Graph(), tf.Graph()]
        models, sessions = [], []
        for graph in graphs:
            with graph.as_default():
                models.append(build(strategy.embedding_scope))
                sessions.append(tf.Session())
                sessions[-1].run(tf.global_variables_initializer())
        for step in range(STEPS):
            for f, session in zip(models, sessions):
                feeds = {f["ids"]: part(step, rank, size)}
                _, rows = session.run([f["train"], f["rows"]], feeds)
                grouped.same(rows, before[step])
        for f, session in zip(models, sessions):
            grouped.same(session.run({name: f[name] for name in ("rows", "w", "step")}), expected())
            session.close()


class Recorder(tf.train.SessionRunHook):
    """Fetches the same on every rank, as a user's hook does."""

    def __init__(self, fetches):
        self._fetches, self.seen = fetches, []

    def before_run(self, context):
        return tf.train.SessionRunArgs(self._fetches)

    def after_run(self, context, values):
        self.seen.append(values.results)


class Stopper(tf.train.SessionRunHook):
    """Asks to stop on this rank after run `at`."""

    def __init__(self, at):
        self._left = at

    def after_run(self, context, values):
        self._left -= 1
        if self._left == 0:
            context.request_stop()


class Alone(tf.train.SessionRunHook):
    """Looks on one rank at what needs no peer, in runs of its own."""

    def __init__(self, fetches):
        self._fetches, self.seen = fetches, []

    def after_run(self, context, values):
        self.seen.append(context.session.run(self._fetches))


def train_with(strategy, rank, size, hooks_of):
    """Returns how many runs were made."""
    with strategy.scope(plan="quiet"), tf.Graph().as_default():
        f = build(strategy.embedding_scope)
        done = 0
        with tf.train.MonitoredTrainingSession("", hooks=hooks_of(f)) as session:
            while not session.should_stop() and done < STEPS:
                session.run(f["train"], {f["ids"]: part(done, rank, size)})
                done += 1
        return done


def test_several_hooks_by_steps(strategy, rank, size, tmp_path, capfd):
    """The row that is logged is looked up on every rank; rank 0 alone writes the summary, which
    reaches the table, too.
    """
    recorder = []

    def hooks(f):
        recorder.append(Recorder([f["loss"], f["rows"][3]]))
        summary = tf.summary.scalar("third", tf.reduce_sum(f["rows"][3]))
        return [
            tf.train.StopAtStepHook(last_step=2),
            tf.train.LoggingTensorHook({"row": f["rows"][3]}, every_n_iter=1),
            tf.train.StepCounterHook(every_n_steps=1, output_dir=str(tmp_path)),
            recorder[0],
            tf.train.SummarySaverHook(save_steps=1, output_dir=str(tmp_path), summary_op=summary),
            tf.train.ProfilerHook(save_steps=1, output_dir=str(tmp_path)),
            tf.train.NanTensorHook(f["loss"]),
        ]

    done = train_with(strategy, rank, size, hooks)
    assert done == 2
    np.testing.assert_allclose(recorder[0].seen[0][1], reference.table_values(10, 2)[3], rtol=1e-6)
    events = list(tmp_path.glob("events*"))
    assert bool(events) == (rank == 0)
    tf.summary.FileWriterCache.clear()
    if rank == 0:
        tags = {
            value.tag
            for event in tf.train.summary_iterator(str(events[0]))
            for value in event.summary.value
        }
        assert "third" in tags
    everyone = grouped.everyone([row for _, row in recorder[0].seen])
    np.testing.assert_array_equal(everyone, [everyone[0]] * size)


def test_a_stop_that_one_rank_requests_stops_all_at_that_step(strategy, rank, size):
    done = train_with(strategy, rank, size, lambda f: [Stopper(2)] if rank == size - 1 else [])
    assert grouped.everyone(done) == [2] * size


def test_a_hook_on_one_rank_that_needs_no_peer(strategy, rank, size):
    seen = []

    def hooks(f):
        seen.append(Alone([f["w"], f["step"]]))
        return seen[:] if rank == 0 else []

    done = train_with(strategy, rank, size, hooks)
    assert done == STEPS and [int(step) for _, step in seen[0].seen] == (
        [1, 2, 3] if rank == 0 else []
    )


def test_a_loss_that_is_nan_on_one_rank_alone(strategy, rank, size):
    """NanTensorHook raises there; the others end, too: at the next step they hear of it."""
    with strategy.scope(plan="quiet"), tf.Graph().as_default():
        f = build(strategy.embedding_scope)
        mine = tf.placeholder_with_default(tf.constant(0.0), [])
        seen = f["loss"] + mine
        done = 0
        with pytest.raises((tf.train.NanLossDuringTrainingError, RankError)) as raised:
            with tf.train.MonitoredTrainingSession(
                "", hooks=[tf.train.NanTensorHook(seen)]
            ) as session:
                for step in range(STEPS):
                    session.run(
                        f["train"],
                        {
                            f["ids"]: part(step, rank, size),
                            mine: np.nan if rank == size - 1 and step == 1 else 0.0,
                        },
                    )
                    done += 1
        # the rank that raised says so when it next waits for its peers
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
    assert done == (1 if rank == size - 1 else 2)
    assert isinstance(
        raised.value, tf.train.NanLossDuringTrainingError if rank == size - 1 else RankError
    )
    assert rank == size - 1 or f"Rank {size - 1}" in str(raised.value)


def test_a_nan_in_one_ranks_batch_is_one_in_the_global_batch(strategy, rank, size):
    """The replicated weight and that batch's rows become NaN on every rank; other rows don't."""

    def model(embedding_scope):
        with embedding_scope():
            t = reference.table("t", 10, 2)
        w = tf.get_variable("w", initializer=reference.table_values(2, 1, 1))
        ids, x = tf.placeholder(tf.int64, [None]), tf.placeholder(tf.float32, [None])
        loss = tf.reduce_mean(tf.square(tf.matmul(tf.nn.embedding_lookup(t, ids), w))[:, 0] * x)
        train = tf.train.GradientDescentOptimizer(0.1).minimize(loss)
        return {"train": train, "w": w.read_value(), **grouped.rows_of({"t": t})}, {
            "ids": ids,
            "x": x,
        }

    x = np.ones(B, np.float32)
    x[-1] = np.nan
    runs = [(["train"], {"ids": IDS[0], "x": x}), (["w", "t"], {})]
    want, got = grouped.both(strategy, rank, size, model, runs)
    assert (
        np.isnan(want[1]["t"]).any()
        and not np.isnan(want[1]["t"]).all()
        and np.isnan(want[1]["w"]).all()
    )
    grouped.same(got[1], want[1])


def test_dropout_is_each_ranks_own_and_first_values_are_not(strategy, rank, size):
    with strategy.scope(plan="quiet"), tf.Graph().as_default():
        f = build(strategy.embedding_scope)
        v = tf.get_variable("v", [4])
        kept = tf.nn.dropout(tf.ones([200]), rate=0.5)
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            mask, first, _ = session.run([kept, v, f["train"]], {f["ids"]: part(0, rank, size)})
    masks, firsts = np.array(grouped.everyone(mask)), grouped.everyone(first)
    assert len(np.unique(masks, axis=0)) == size
    np.testing.assert_array_equal(firsts, [firsts[0]] * size)


def test_what_is_not_initialized_is_reported(strategy, rank, size):
    with strategy.scope(plan="quiet"), tf.Graph().as_default():
        f = build(strategy.embedding_scope)
        report = tf.report_uninitialized_variables()
        with tf.Session() as session:
            before = {name.decode() for name in session.run(report)}
            session.run(f["w"].initializer)
            between = {name.decode() for name in session.run(report)}
            session.run(tf.global_variables_initializer())
            assert not session.run(report).size
    assert {"t", "w", "global_step"} <= before and before - between == {"w"}


@pytest.mark.parametrize("shorter", ["first", "second"])
def test_several_datasets_of_unequal_lengths_end_with_the_first_that_ends(
    strategy, rank, size, shorter
):
    lengths = (2, 4 + rank) if shorter == "first" else (5 + rank, 3 + rank)
    with strategy.scope(plan="quiet"), tf.Graph().as_default():
        one, other = (
            tf.data.make_one_shot_iterator(
                tf.data.Dataset.from_tensors(np.array([rank, 5], np.int64)).repeat(n)
            ).get_next()
            for n in lengths
        )
        with strategy.embedding_scope():
            t = reference.table("t", 10, 2)
        loss = tf.reduce_mean(
            tf.square(tf.nn.embedding_lookup(t, one) + tf.nn.embedding_lookup(t, other))
        )
        train = tf.train.AdagradOptimizer(0.1).minimize(loss, tf.train.get_or_create_global_step())
        done = 0
        with tf.train.MonitoredTrainingSession("") as session:
            while not session.should_stop():
                session.run(train)
                done += 1
    assert done == (2 if shorter == "first" else 3)


def test_one_ranks_data_end_before_the_step_that_a_hook_stops_at(strategy, rank, size):
    with strategy.scope(plan="quiet"), tf.Graph().as_default():
        ids = tf.data.make_one_shot_iterator(
            tf.data.Dataset.from_tensors(np.array([1], np.int64)).repeat(
                2 if rank == size - 1 else 9
            )
        ).get_next()
        with strategy.embedding_scope():
            t = reference.table("t", 10, 2)
        step = tf.train.get_or_create_global_step()
        train = tf.train.AdagradOptimizer(0.1).minimize(
            tf.reduce_mean(tf.square(tf.nn.embedding_lookup(t, ids))), step
        )
        done = 0
        with tf.train.MonitoredTrainingSession(
            "", hooks=[tf.train.StopAtStepHook(last_step=4)]
        ) as session:
            while not session.should_stop():
                session.run(train)
                done += 1
    assert done == 2


@pytest.mark.sample(1)
@pytest.mark.parametrize("iterator", ["one_shot", "initializable", "feedable", "reinitializable"])
def test_datasets_that_a_script_shards_by_rank(strategy, rank, size, iterator):
    """With the sharding of TensorFlow's distribution strategies off, on, or left to them: it does
    nothing here.
    """

    def data(n, r, policy):
        options = tf2.data.Options()
        options.experimental_distribute.auto_shard_policy = policy
        return (
            tf.data.Dataset.from_tensor_slices(IDS.reshape(-1))
            .shard(n, r)
            .batch(B // n)
            .with_options(options)
        )

    def run(scope, embedding_scope, n, r, policy):
        with scope, tf.Graph().as_default():
            source, start, feed = data(n, r, policy), [], {}
            if iterator == "one_shot":
                ids = tf.data.make_one_shot_iterator(source).get_next()
            elif iterator == "initializable":
                made = tf.data.make_initializable_iterator(source)
                ids, start = made.get_next(), [made.initializer]
            elif iterator == "feedable":
                handle, made = (
                    tf.placeholder(tf.string, []),
                    tf.data.make_one_shot_iterator(source).string_handle(),
                )
                ids = tf.data.Iterator.from_string_handle(handle, tf.int64, [None]).get_next()
            else:
                made = tf.data.Iterator.from_structure(tf.int64, [None])
                ids, start = made.get_next(), [made.make_initializer(source)]
            with embedding_scope():
                t = reference.table("t", 10, 2)
            loss = tf.reduce_mean(tf.reduce_sum(tf.square(tf.nn.embedding_lookup(t, ids)), 1))
            train = tf.train.AdagradOptimizer(0.1).minimize(loss)
            with tf.Session() as session:
                session.run([tf.global_variables_initializer(), *start])
                if iterator == "feedable":
                    feed = {handle: session.run(made)}
                for _ in range(STEPS):
                    session.run(train, feed)
                with pytest.raises(tf.errors.OutOfRangeError):
                    session.run(train, feed)
                return session.run({"t": t})

    policies = tf2.data.experimental.AutoShardPolicy
    for policy in (policies.OFF, policies.DATA, policies.AUTO):
        got = run(strategy.scope(plan="quiet"), strategy.embedding_scope, size, rank, policy)
        grouped.same(got, run(contextlib.nullcontext(), contextlib.nullcontext, 1, 0, policy))
