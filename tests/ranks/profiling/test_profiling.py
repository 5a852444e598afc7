"""A profile counts every byte of steps whose bytes are known."""

import glob
import json
import os
import xml.etree.ElementTree as xml

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import collective
from collective import RankError
from collective.ops import placement
from collective.ops.communication import carrier_choice
from collective.ops.exchange import embedding_bag
from collective.profiling import breakdown, run_tracer, trace
from tests.ranks import grouped, reference

WEIGHTS = 3 * 2 + 2
DIMS = {"user": 4, "item": 3, "keyed": 2}


def batch(rank):
    """Draws [6] ids of this rank, some of them twice."""
    return np.random.default_rng(rank).integers(0, 5, 6)


def model(strategy):
    ids = tf.data.make_one_shot_iterator(
        tf.data.Dataset.from_tensors(batch(strategy.rank())).repeat()
    ).get_next()
    with strategy.embedding_scope():
        tables = [
            reference.table("user", 11, 4),
            reference.table("item", 5, 3),
            collective.get_embedding_variable("keyed", 2),
        ]
    user, item, keyed = (tf.nn.embedding_lookup(table, ids) for table in tables)
    kernel, bias = tf.get_variable("kernel", [3, 2]), tf.get_variable("bias", [2])
    loss = tf.reduce_mean(tf.square(tf.matmul(item, kernel) + bias + keyed)) + tf.reduce_mean(user)
    return tf.train.AdagradOptimizer(0.1).minimize(loss, tf.train.get_or_create_global_step())


def train(strategy, steps, folder, **options):
    with strategy.scope(plan="quiet", profile=folder, **options), tf.Graph().as_default():
        op = model(strategy)
        with tf.train.MonitoredTrainingSession("") as session:
            for _ in range(steps):
                session.run(op)
            plan = strategy.plan()
            counts = grouped.counted(session, op)[1]
    return plan, counts


def read_split(folder):
    with open(os.path.join(folder, "split.json")) as file:
        return json.load(file)


def owned(size, owner):
    """Returns by table the keys that `owner` is asked for in a step, by all ranks."""
    asked = {name: 0 for name in DIMS}
    for r in range(size):
        distinct = np.unique(batch(r))
        asked["user"] += np.sum(distinct % size == owner)
        asked["item"] += np.sum(distinct % size == owner)
        asked["keyed"] += np.sum(placement.dynamic(size).owner(distinct) == owner)
    return asked


@pytest.mark.parametrize("grouping", [True, False])
def test_a_step_of_which_every_byte_is_known(strategy, rank, size, folder, grouping, capsys):
    plan, counts = train(strategy, 7, folder, profile_steps=(3, 6), grouping=grouping)
    grouped.everyone(0)  # rank 0 has written
    out = read_split(folder)
    assert (out["first"], out["last"], out["steps"]) == (3, 6, 4)
    for r in range(size):
        assert sum(out["phases"][r].values()) == pytest.approx(out["ms"][r])
        assert all(ms >= 0 for ms in out["phases"][r].values())
        assert {"input", "lookup", "dense", "optimizer", breakdown.REST, breakdown.OUTSIDE} <= set(
            out["phases"][r]
        )
    assert out["samples"] == 6 * size and out["samples_per_s"] == pytest.approx(
        6 * size / np.mean(out["ms"]) * 1000
    )
    if size == 1:
        assert out["received"] == [{}]
    else:
        # of lookups with exchanges of their own, those by the same ids are told apart in bytes only
        if grouping:
            assert out["ids"] == 3 * 6 * size
            assert out["keys_per_owner"] == {
                name: [owned(size, r)[name] for r in range(size)] for name in DIMS
            }
            travelled = sum(len(np.unique(batch(r))) for r in range(size)) * 3
            assert out["distinct_share"] == pytest.approx(travelled / (18 * size))
            asked = {table.name: table.keys_per_owner for table in plan.tables}
            assert asked == {
                name: tuple(owned(size, r)[name] for r in range(size)) for name in DIMS
            }
            worst = max(owned(size, r)["user"] for r in range(size)) / np.mean(
                [owned(size, r)["user"] for r in range(size)]
            )
            assert next(t for t in plan.tables if t.name == "user").key_imbalance == pytest.approx(
                worst
            )
        for r in range(size):
            check_received(out["received"][r], plan, r, size)
        check_table_bytes(out, plan, size)
        assert {x.received for x in plan.exchanges if x.phase == "dense gradients"} == {
            4.0 * (WEIGHTS + 1)
        }
    distinct = np.unique(np.concatenate([batch(r) for r in range(size)]))
    owners = placement.dynamic(size).owner(distinct)
    assert out["dynamic_rows"] == {"keyed": [int(np.sum(owners == r)) for r in range(size)]}
    assert out["table_counts"]["keyed"]["rows"] == len(distinct)
    assert out["table_counts"]["keyed"]["admitted"] == len(distinct)
    assert out["table_rates"]["keyed"]["admitted"] == 0
    assert out["history"]["rows"] == {"keyed": [len(distinct)] * 4}
    assert out["history"]["step"] == [3, 4, 5, 6]
    err = capsys.readouterr().err
    assert err.count("collective: steps 3 to 6") == (rank == 0)
    check_trace(folder, rank, range(3, 7), counts)
    assert glob.glob(os.path.join(folder, f"rank_{rank}", "plugins", "profile", "*", "*.xplane.pb"))


def check_received(received, plan, r, size):
    """Checks the bytes that rank r receives, its own share included."""
    by_phase = {}
    for x in plan.exchanges:
        by_phase.setdefault(x.phase, 0)
        by_phase[x.phase] += received.get(x.name, 0)
    asked, mine = owned(size, r), len(np.unique(batch(r)))
    header = 8 * 2 * size * sum(len(group.sections) for group in plan.groups)
    assert by_phase["keys"] == header + 8 * sum(asked.values())
    assert by_phase["rows"] == 4 * mine * sum(DIMS.values())
    assert by_phase["gradients"] == 4 * sum(asked[name] * dim for name, dim in DIMS.items())
    assert by_phase["dense gradients"] == 4 * (WEIGHTS + 1)
    assert by_phase["agreement"] == 56 * size  # a header of seven int64


def check_table_bytes(out, plan, size):
    """Checks what a rank receives for each table, the mean over ranks."""
    asked = {name: sum(owned(size, r)[name] for r in range(size)) for name in DIMS}
    headers = 8 * 2 * size * sum(len(group.sections) for group in plan.groups)
    assert sorted(out["table_bytes"]) == sorted(DIMS)
    for name, dim in DIMS.items():
        of_table = out["table_bytes"][name]
        assert of_table["rows"] == pytest.approx(4 * dim * asked[name] / size)
        assert of_table["gradients"] == pytest.approx(4 * dim * asked[name] / size)
        share = headers * asked[name] / sum(asked.values())
        assert of_table["keys"] == pytest.approx(8 * asked[name] / size + share)


def check_trace(folder, rank, steps, counts):
    """Checks that every step has the collectives that TensorFlow's trace of a later step counts."""
    with open(os.path.join(folder, f"rank_{rank}.trace.json")) as file:
        events = [e for e in json.load(file)["traceEvents"] if e["ph"] == "X"]
    assert {e["pid"] for e in events} == {rank} and {e["args"]["step"] for e in events} == set(
        steps
    )
    want = sum(counts[kind] for kind in ("Alltoall", "Allreduce", "Allgather", "Broadcast"))
    for number in steps:
        mine = [e for e in events if e["args"]["step"] == number]
        assert sum(e["name"].startswith("collective.") for e in mine) == want
        assert sum(e["name"] == "IteratorGetNext" and e["cat"] == "input" for e in mine) == 1
        updates = [e for e in mine if "Apply" in e["name"]]
        assert updates and {e["cat"] for e in updates} == {"optimizer"}
        # Rows of one kind don't overlap: they would hide each other. (As float64, microseconds
        # since 1970 are 0.25 apart.)
        for tid in {e["tid"] for e in mine}:
            line = sorted((e["ts"], e["ts"] + e["dur"]) for e in mine if e["tid"] == tid)
            assert all(end <= start + 0.5 for (_, end), (start, _) in zip(line, line[1:]))


@pytest.mark.grouped
@pytest.mark.skipif(
    embedding_bag.missing() is not None, reason="the operations of groups are not built"
)
def test_what_a_group_computes_is_its_lookup(strategy, rank, size, folder):
    train(strategy, 2, folder, profile_steps=(2, 2))
    with open(os.path.join(folder, f"rank_{rank}.trace.json")) as file:
        phases = {e["name"]: e["cat"] for e in json.load(file)["traceEvents"] if e["ph"] == "X"}
    # Through shared memory the owner's part is in the exchange of keys.
    of_owner = (
        ("Hear", "GatherRows") if carrier_choice.in_force() != carrier_choice.SHARED_MEMORY else ()
    )
    for kind in ("Ask", *of_owner, "Pool", "PoolGradient") if size > 1 else ():
        assert phases[f"Collective{kind}"] == "lookup"
    assert {phases[name] for name in phases if "MatMul" in name} == {"dense"}


@pytest.mark.slow
def test_scalars_for_tensorboard(strategy, rank, size, folder):
    train(strategy, 9, folder, profile_steps=(2, 3), profile_every=4)
    grouped.everyone(0)
    found = {}
    for path in glob.glob(os.path.join(folder, "events.*")):
        for event in tf.train.summary_iterator(path):
            for value in event.summary.value:
                found.setdefault(value.tag, {})[event.step] = value.simple_value
    assert all(sorted(of) == [2, 3, 4, 8] for of in found.values())
    want = {
        "step_ms",
        "bytes_per_step",
        "samples_per_s",
        "ms/input",
        "ms/lookup",
        "ms/dense",
        "ms/optimizer",
    }
    want |= (
        {
            "distinct_share",
            "ms/keys",
            "ms/rows",
            "ms/gradients",
            "ms/dense_gradients",
            "ms/agreement",
            "ms/waiting_for_others",
        }
        if size > 1
        else set()
    )
    assert {f"collective/{name}" for name in want} <= set(found)
    for step in (2, 3, 4, 8):
        parts = sum(of[step] for tag, of in found.items() if tag.startswith("collective/ms/"))
        assert parts == pytest.approx(found["collective/step_ms"][step], rel=1e-4)
        assert found["collective/samples_per_s"][step] == pytest.approx(
            6 * size / found["collective/step_ms"][step] * 1000, rel=1e-4
        )


@pytest.mark.slow
def test_numbers_are_the_same(strategy, folder):
    def losses(**options):
        with strategy.scope(plan="quiet", **options), tf.Graph().as_default():
            tf.set_random_seed(3)
            op = model(strategy)
            rows = tf.nn.embedding_lookup(
                next(v for v in tf.global_variables() if v.op.name == "user"), tf.range(11)
            )
            with tf.train.MonitoredTrainingSession("") as session:
                for _ in range(4):
                    session.run(op)
                return session.run(rows)

    np.testing.assert_array_equal(losses(profile=folder, profile_steps=(2, 3)), losses())


def test_training_that_ends_before_the_last_step(strategy, rank, size, folder, capsys):
    train(strategy, 3, folder, profile_steps=(2, 10))
    err = capsys.readouterr().err
    assert ("of rank 0 alone: training ended before step 10" in err) == (rank == 0)
    assert "Error" not in err and os.path.exists(os.path.join(folder, f"rank_{rank}.trace.json"))
    grouped.everyone(0)
    with open(os.path.join(folder, "report.html"), encoding="utf-8") as file:
        assert ("the times of rank 0 alone" in file.read()) == (size > 1)


def test_the_user_s_own_trace(strategy, size, folder):
    """Options and metadata of a run are still the user's."""
    with (
        strategy.scope(plan="quiet", profile=folder, profile_steps=(1, 1)),
        tf.Graph().as_default(),
    ):
        op = model(strategy)
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            counts = [grouped.counted(session, op)[1] for _ in range(2)]
    assert counts[0] == counts[1]
    assert not size > 1 or counts[0]["Allgather"] == 1


def test_one_rank_that_profiles_alone_is_an_error_on_all(strategy, rank, size, folder):
    if size == 1:
        return
    options = {"profile": folder, "profile_steps": (2, 2)} if rank == 0 else {}
    with strategy.scope(plan="quiet", **options), tf.Graph().as_default():
        op = model(strategy)
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            with pytest.raises(RankError, match="puts together the profile of steps 2 to 2"):
                for _ in range(4):
                    session.run(op)


def test_the_profiler_works_outside_of_the_profiled_steps(strategy, folder, monkeypatch):
    """Ranks seem to wait for each other where one reads its trace, or counts for the first time,
    for longer than the others.
    """
    runs, read_after, counted_after = [], [], []
    spans, dynamic_rows = trace.spans, run_tracer._dynamic_rows
    monkeypatch.setattr(trace, "spans", lambda *args: read_after.append(len(runs)) or spans(*args))
    monkeypatch.setattr(
        run_tracer,
        "_dynamic_rows",
        lambda session: counted_after.append(len(runs)) or dynamic_rows(session),
    )
    with (
        strategy.scope(plan="quiet", profile=folder, profile_steps=(3, 5)),
        tf.Graph().as_default(),
    ):
        op = model(strategy)
        with tf.train.MonitoredTrainingSession("") as session:
            for i in range(6):
                session.run(op)
                runs.append(i)
    assert read_after == [4, 4, 4]
    assert counted_after == [0, 2, 3, 4]


@pytest.mark.grouped
@pytest.mark.backends("hb", "sok")
def test_bytes_of_tables_whose_rows_the_owner_pools(strategy, rank, size, folder):
    """With sok one sum travels for each sample and owner, and a row for each distinct key of the
    lookup that isn't pooled; with hb one row for each distinct key.
    """
    if size == 1:
        return

    def ids_of(r):
        return np.random.default_rng(7 + r).integers(0, 9, (4, 3))

    def rows_of(r):
        """Returns (of 'pooled', of 'mixed'), the rows that travel to rank r."""
        ids = ids_of(r)
        if os.environ.get("COLLECTIVE_STRATEGY", "hb") == "hb":
            return len(np.unique(ids)), len(np.unique(ids))
        bags = sum(len(np.unique(sample % size)) for sample in ids)
        return bags, bags + len(np.unique(ids[:, 0]))

    with (
        strategy.scope(plan="quiet", profile=folder, profile_steps=(2, 2)),
        tf.Graph().as_default(),
    ):
        ids = tf.data.make_one_shot_iterator(
            tf.data.Dataset.from_tensors(ids_of(rank)).repeat()
        ).get_next()
        with strategy.embedding_scope():
            pooled, mixed = reference.table("pooled", 9, 4), reference.table("mixed", 9, 3)
        lookups = [
            tf.nn.embedding_lookup_sparse(pooled, grouped.sparse(ids), None, combiner="sum"),
            tf.nn.embedding_lookup_sparse(mixed, grouped.sparse(ids), None, combiner="mean"),
            tf.nn.embedding_lookup(mixed, ids[:, 0]),
        ]
        loss = tf.add_n([tf.reduce_mean(tf.square(rows)) for rows in lookups])
        op = tf.train.GradientDescentOptimizer(0.1).minimize(loss)
        with tf.train.MonitoredTrainingSession("") as session:
            for _ in range(2):
                session.run(op)
    grouped.everyone(0)
    of_tables = read_split(folder)["table_bytes"]
    for place, (name, dim) in enumerate([("pooled", 4), ("mixed", 3)]):
        want = 4 * dim * sum(rows_of(r)[place] for r in range(size)) / size
        assert of_tables[name]["rows"] == pytest.approx(want)
        assert of_tables[name]["gradients"] == pytest.approx(want)


@pytest.mark.slow
def test_the_page_of_a_profile(strategy, rank, size, folder):
    """Rank 0 writes it after the window, and again with the steps that are measured later."""
    train(strategy, 7, folder, profile_steps=(2, 3), profile_every=5, local_steps=2)
    grouped.everyone(0)
    with open(os.path.join(folder, "report.html"), encoding="utf-8") as file:
        text = file.read()
    tree = xml.fromstring(text.partition("\n")[2])
    seen = " ".join("".join(each.itertext()) for each in tree.iter("td"))
    assert all(name in seen for name in DIMS)
    bars = [each[0].text for each in tree.iter("div") if each.get("class", "").startswith("bar")]
    assert [bar for bar in bars if bar.startswith("rank")] == [f"rank {r}" for r in range(size)]
    assert "local_steps=2" in text and "Steps over the job" in text and "http" not in text
    assert read_split(folder)["history"]["step"] == [2, 3, 5]
