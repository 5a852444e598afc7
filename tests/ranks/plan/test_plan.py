"""The plan says what was built: bytes equal those of the arrays, exchanges those of a trace."""

import collections
import json
import sys

import horovod.tensorflow as hvd
import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import collective
from collective.coordination import session_state
from collective.ops import kernel_device, placement
from collective.ops.communication import carrier_choice
from collective.ops.exchange import embedding_bag
from collective.ops.graph import graph_state, sessions
from collective.plan import step_estimate
from collective.plan.known_runs import KnownRuns
from tests.ranks import grouped, reference

SLOTS = {"sgd": 0, "adagrad": 1, "adam": 2, "ftrl": 2}
OPTIMIZERS = {
    "sgd": lambda: tf.train.GradientDescentOptimizer(0.1),
    "adagrad": lambda: tf.train.AdagradOptimizer(0.1),
    "adam": lambda: tf.train.AdamOptimizer(0.1),
    "ftrl": lambda: tf.train.FtrlOptimizer(0.1),
}


def build(strategy, optimizer="adagrad", ids=None, dynamic=False):
    """Builds two static tables, one looked up twice, and a dense weight of 7 elements.

    Returns the train operation and the tables.
    """
    ids = tf.placeholder(tf.int64, [None], "ids") if ids is None else ids
    with strategy.embedding_scope():
        user, item = reference.table("user", 11, 4), reference.table("item", 5, 3)
        keyed = [collective.get_embedding_variable("keyed", 2)] if dynamic else []
    weight = tf.get_variable("w", [7, 1])
    rows = [
        tf.nn.embedding_lookup(user, ids),
        tf.nn.embedding_lookup(item, ids),
        tf.nn.embedding_lookup(user, ids)[:, :0],
    ]
    rows += [tf.nn.embedding_lookup(table, ids) for table in keyed]
    loss = tf.reduce_mean(tf.matmul(tf.concat(rows, 1)[:, :7], weight))
    loss += sum(tf.reduce_mean(x) for x in rows[3:])
    return OPTIMIZERS[optimizer]().minimize(loss), loss


def started(optimizer_step, feed=None):
    session = tf.Session()
    session.run(tf.global_variables_initializer())
    session.run(optimizer_step, feed)
    return session


@pytest.mark.parametrize("optimizer", sorted(OPTIMIZERS))
def test_shards_are_as_large_as_their_arrays(strategy, size, optimizer):
    with strategy.scope(plan="quiet"), tf.Graph().as_default():
        train, _ = build(strategy, optimizer)
        plan = strategy.plan()
    want = {"user": (11, 4), "item": (5, 3)}
    assert [table.name for table in plan.tables] == ["item", "user"]
    for table in plan.tables:
        rows, dim = want[table.name]
        assert (table.rows, table.dim, table.dtype, len(table.slots)) == (
            rows,
            dim,
            "float32",
            SLOTS[optimizer],
        )
        assert list(table.shard_rows) == [np.arange(rows)[r::size].size for r in range(size)]
        assert sum(table.shard_bytes) == rows * dim * 4 * (1 + SLOTS[optimizer])
        assert table.imbalance == pytest.approx(max(table.shard_rows) / np.mean(table.shard_rows))
    whole = np.sum([table.shard_bytes for table in plan.tables], 0)
    assert plan.imbalance == pytest.approx(whole.max() / whole.mean())
    assert (plan.ranks, plan.backend) == (
        size,
        sys.modules["os"].environ.get("COLLECTIVE_STRATEGY", "hb"),
    )


def test_rows_of_a_dynamic_table_are_those_so_far(strategy, rank, size):
    ids = np.array([3, 4, 1, 2, 3])
    with strategy.scope(plan="quiet"), tf.Graph().as_default():
        train, _ = build(strategy, dynamic=True)
        with started(train, {"ids:0": ids}) as session:
            plan = strategy.plan(session=session)
            unknown = strategy.plan()
    mine = np.sum(placement.dynamic(size).owner(np.unique(ids)) == rank)
    table = next(table for table in plan.tables if table.name == "keyed")
    assert table.rows is None and table.shard_rows[rank] == mine
    assert table.shard_bytes[rank] == mine * 2 * 4 * (1 + SLOTS["adagrad"])
    assert all(table.shard_rows[r] is None for r in range(size) if r != rank)
    assert (
        next(table for table in unknown.tables if table.name == "keyed").shard_rows
        == (None,) * size
    )


@pytest.mark.parametrize("grouping", [True, False])
def test_the_exchanges_are_those_that_a_trace_counts(strategy, size, grouping):
    with strategy.scope(plan="quiet", grouping=grouping), tf.Graph().as_default():
        train, loss = build(strategy, dynamic=True)
        with started(train, {"ids:0": [1, 2]}) as session:
            plan = strategy.plan()
            _, counts = grouped.counted(session, train, {"ids:0": [1, 2]})
            of_loss = strategy.plan(fetches=loss)
            _, loss_counts = grouped.counted(session, loss, {"ids:0": [1, 2]})
    for said, counted in ((plan, counts), (of_loss, loss_counts)):
        want = {kind: counted[kind] for kind in ("Alltoall", "Allreduce", "Allgather")}
        assert {kind: n for kind, n in want.items() if n} == collections.Counter(
            x.kind for x in said.exchanges
        )
    if size > 1:
        together = grouping and embedding_bag.missing() is None
        assert [x.phase for x in plan.exchanges if x.phase != "other"][0] == "agreement"
        assert len([x for x in plan.exchanges if x.phase == "keys"]) == (1 if together else 4)
        assert {table.packed for table in plan.tables} == {3 if together else 1}
        sums = {
            kind for kind in counts if kind.startswith(("CollectiveRed", "CollectiveSparseRed"))
        }
        assert counts["CollectiveGatherRows"] == sum(counts[kind] for kind in sums) == together
        assert ("(packed with 2 others)" in plan.to_text(full=True)) == together
        assert len(plan.groups) == together and len(plan.alone) == (0 if together else 4)
        assert {x.why for x in plan.alone} == (
            set()
            if together
            else {"grouping is off"}
            if not grouping
            else {"the compiled operations are missing"}
        )
    else:
        assert plan.exchanges == () and "nothing travels" in str(plan)


def test_bytes_that_the_graph_tells(strategy, size):
    """5 ids a rank, known when the graph is built: dense gradients exactly, what depends on repeats
    at most.
    """
    with strategy.scope(plan="quiet"), tf.Graph().as_default():
        build(strategy, ids=tf.constant([1, 2, 3, 4, 4], tf.int64))
        plan = strategy.plan()
    found = {}
    for x in plan.exchanges:
        found.setdefault(x.phase, []).append(x)
    if size == 1:
        assert not found
        return
    (dense,) = found["dense gradients"]
    # one more: the gate
    assert (dense.bytes, dense.exact, dense.dtype) == ((7 + 1) * 4, True, "float32")
    (agreement,) = found["agreement"]
    assert (agreement.bytes, agreement.exact) == (7 * 8, True)
    assert sum(x.bytes for x in found["rows"]) == 5 * (4 + 3 + 4) * 4
    assert not any(x.exact for x in found["rows"] + found["keys"] + found["gradients"])
    header = sum(len(group.sections) for group in plan.groups) * 2 * 8 * size
    assert sum(x.bytes for x in found["keys"]) == 3 * 5 * 8 + header


@pytest.mark.grouped
@pytest.mark.skipif(
    embedding_bag.missing() is not None,
    reason="wire types are those of groups, which need the compiled operations",
)
@pytest.mark.parametrize("wire", [None, "float16", "bfloat16"])
def test_wire_types(strategy, size, wire):
    with (
        strategy.scope(plan="quiet", wire_dtype=wire, gradient_wire_dtype=wire),
        tf.Graph().as_default(),
    ):
        build(strategy, ids=tf.constant([1, 2], tf.int64))
        plan = strategy.plan()
    types = {x.phase: x.dtype for x in plan.exchanges}
    if size > 1:
        assert (types["rows"], types["gradients"], types["keys"]) == (
            wire or "float32",
            wire or "float32",
            "int64",
        )
        rows = next(x for x in plan.exchanges if x.phase == "rows")
        assert rows.bytes == 2 * (4 + 3 + 4) * (2 if wire else 4)
        (group,) = plan.groups
        assert (group.lookups, group.level) == (3, 1)
        assert {section.table for section in group.sections} == {"user", "item"}
        assert rows.members == 3 and rows.tables == 2 and rows.sections == len(group.sections)


@pytest.mark.grouped
@pytest.mark.skipif(
    embedding_bag.missing() is not None, reason="groups need the compiled operations"
)
def test_pooled_sections_and_levels(strategy, size):
    """A sok group pools sparse lookups at the owner; keys from another lookup's rows are a level
    later.
    """
    with strategy.scope(plan="quiet"), tf.Graph().as_default():
        with strategy.embedding_scope():
            first, second = reference.table("first", 6, 2), reference.table("second", 6, 2)
        sparse = tf.sparse.from_dense(tf.constant([[1, 2], [3, 0]], tf.int64))
        pooled = tf.nn.embedding_lookup_sparse(first, sparse, None, combiner="sum")
        derived = tf.cast(tf.abs(pooled[:, 0]), tf.int64) % 6
        loss = tf.reduce_mean(tf.nn.embedding_lookup(second, derived)) + tf.reduce_mean(pooled)
        tf.train.GradientDescentOptimizer(0.1).minimize(loss)
        plan = strategy.plan()
    if size > 1:
        assert [(group.level, [s.table for s in group.sections]) for group in plan.groups] == [
            (1, ["first"]),
            (2, ["second"]),
        ]
        assert (
            plan.groups[0].sections[0].pooled == (plan.backend == "sok")
            and not plan.groups[1].sections[0].pooled
        )
        assert {x.level for x in plan.exchanges if x.phase == "agreement"} == {1, 2}
        assert {x.of: x.level for x in plan.exchanges if x.phase == "keys"} == {
            g.name: g.level for g in plan.groups
        }


def test_what_stays_alone_and_why(strategy, size):
    with strategy.scope(plan="quiet"), tf.Graph().as_default():
        with strategy.embedding_scope():
            table = reference.table("t", 6, 2)
            double = tf.get_variable("double", [6, 2], tf.float64)
        ids = tf.constant([1], tf.int64)
        tf.cond(
            tf.constant(True),
            lambda: tf.nn.embedding_lookup(table, ids),
            lambda: tf.zeros([1, 2]),
            name="branch",
        )
        with tf.control_dependencies([tf.no_op()]):
            tf.nn.embedding_lookup(table, ids, name="ordered")
        tf.nn.embedding_lookup(double, ids, name="precise")
        tf.nn.embedding_lookup(table, ids, name="waits")
        plan = strategy.plan()
    if size == 1:
        assert plan.alone == ()
        return
    why = {x.lookup or "branch": x.why for x in plan.alone}
    assert "branch" in next(why[name] for name in why if "branch" in name)
    assert "control_dependencies" in why["ordered"] and "float64" in why["precise"]
    assert ("it waits" in why["waits"]) == (embedding_bag.missing() is None)
    assert all(f"{x.lookup} in {x.table}: {x.why}" in str(plan) for x in plan.alone if x.lookup)


def test_json_holds_all_of_it_and_the_graph_stays_as_it_was(strategy):
    with strategy.scope(plan="quiet"), tf.Graph().as_default() as graph:
        train, _ = build(strategy, dynamic=True)
        with started(train, {"ids:0": [1, 2]}):
            before = graph.version
            plan = strategy.plan()
            assert graph.version == before
    assert json.loads(plan.to_json()) == json.loads(json.dumps(plan.to_dict()))
    assert json.loads(plan.to_json())["tables"][0]["name"] == plan.tables[0].name
    with pytest.raises(AttributeError):
        plan.ranks = 7


@pytest.mark.sample(1)
@pytest.mark.parametrize("plan", ["print", "quiet", "full"])
def test_rank_0_prints_it_once_when_a_graph_starts_to_train(strategy, rank, size, plan, capsys):
    with strategy.scope(plan=plan), tf.Graph().as_default():
        train, loss = build(strategy)
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            session.run(loss, {"ids:0": [1]})
            assert "the plan" not in capsys.readouterr().err
            for _ in range(2):
                session.run(train, {"ids:0": [1]})
        with tf.Session() as session:
            session.run([tf.global_variables_initializer()])
            session.run(train, {"ids:0": [1]})
        out, err = capsys.readouterr()
    assert err.count("collective: the plan of") == (plan != "quiet" and rank == 0 and size > 1)
    assert "the plan" not in out
    if "the plan" in err:
        lines = {line.split()[0]: line.split() for line in err.splitlines() if line.split()}
        assert lines["user"][1:4] == ["11", "4", "float32"] and lines["item"][1:4] == [
            "5",
            "3",
            "float32",
        ]


@pytest.mark.sample(1)
@pytest.mark.parametrize("plan", ["print", "full"])
def test_many_tables_are_summed_up_or_listed(strategy, rank, size, plan, capsys):
    names = [f"a_table_of_many_{i:02}" for i in range(42)]
    with strategy.scope(plan=plan), tf.Graph().as_default():
        with strategy.embedding_scope():
            tables = [reference.table(name, 5 + 4 * i, 2) for i, name in enumerate(names)]
        ids = tf.constant([1, 2], tf.int64)
        loss = sum(tf.reduce_mean(tf.nn.embedding_lookup(table, ids)) for table in tables)
        started(tf.train.GradientDescentOptimizer(0.1).minimize(loss)).close()
    lines = capsys.readouterr().err.splitlines()
    if rank > 0 or size == 1:
        assert not any("the plan of" in line for line in lines)
        return
    listed = {name for name in names if any(line.startswith(name) for line in lines)}
    if plan == "full":
        assert listed == set(names)
        return
    (first,) = [i for i, line in enumerate(lines) if "the plan of" in line]
    (last,) = [i for i, line in enumerate(lines) if "scope(plan='full')" in line]
    assert last - first < 40
    assert listed == set(names[-10:])
    assert any(line.startswith("42 tables, ") for line in lines)


def of_placeholders():
    return tf.placeholder(tf.int64, [None], "ids")


@pytest.mark.grouped
@pytest.mark.skipif(
    embedding_bag.missing() is not None, reason="groups need the compiled operations"
)
@pytest.mark.parametrize("ids", [lambda: tf.constant([1, 2, 3], tf.int64), of_placeholders])
def test_a_small_model_is_told_that_sharding_does_not_pay(strategy, size, ids):
    """Six samples on two ranks; or nobody knows how many."""
    with strategy.scope(plan="quiet"), tf.Graph().as_default():
        train, _ = build(strategy, ids=ids())
        before = strategy.plan()
        with started(train, {"ids:0": [1]} if ids is of_placeholders else None):
            plan = strategy.plan()
    assert before.estimate is None  # nobody knows what a step is
    if size == 1 or kernel_device.chosen() != "cpu":
        assert plan.estimate is None
        return
    # A sample's rows are of 4, 3 and 4 elements; the network has 7 parameters.
    work = step_estimate.StepWork(
        ranks=size,
        exchanges=len(plan.exchanges),
        row_bytes=(4 + 3 + 4) * 4,
        parameters=7,
        samples=None if ids is of_placeholders else 3 * size,
        wire=getattr(step_estimate, carrier_choice.in_force().upper()),
    )
    assert plan.estimate == step_estimate.estimate(work)
    said = "sharding doesn't pay" in str(plan).partition("An estimate: ")[2]
    # Through memory five tiny exchanges are no third of a step.
    assert said is (ids is of_placeholders or work.wire == step_estimate.HOROVOD)
    assert json.loads(plan.to_json())["estimate"]["samples"] == work.samples


@pytest.mark.parametrize("kind", ["dynamic table", "convolution", "function"])
def test_where_the_work_is_unknown_nothing_is_claimed(strategy, kind):
    with strategy.scope(plan="quiet"), tf.Graph().as_default():
        train, loss = build(strategy, ids=tf.constant([1, 2], tf.int64), dynamic="dynamic" in kind)
        if kind == "convolution":
            image = tf.get_variable("image", [1, 4, 4, 1])
            loss += tf.reduce_sum(tf.nn.conv2d(image, tf.ones([2, 2, 1, 1]), 1, "VALID"))
        if kind == "function":
            weight = tf.get_variable("weight", [2])
            loss += tf.function(lambda: tf.reduce_sum(weight))()
        train = tf.train.GradientDescentOptimizer(0.1).minimize(loss)
        started(train).close()
        assert "An estimate" not in str(strategy.plan())


def test_a_wrong_value_is_an_error(strategy):
    with pytest.raises(ValueError, match="is 'print' or 'quiet' or 'full', not 'loud'"):
        strategy.scope(plan="loud")


@pytest.mark.sample(1)
@pytest.mark.parametrize("way", ["hook", "by hand", "a group"])
def test_a_broadcast_of_variables_is_no_training(strategy, rank, size, folder, way, capsys):
    """Horovod's scripts begin with one: the plan is that of the first step after it, and it counts
    neither for check nor for profile.
    """
    hooks = [hvd.BroadcastGlobalVariablesHook(0)] if way == "hook" else []
    options = {"check": 1, "profile": folder, "profile_steps": (1, 2)}
    with strategy.scope(**options), tf.Graph().as_default() as graph:
        tf.train.get_or_create_global_step()
        train, _ = build(strategy)
        broadcast = hvd.broadcast_global_variables(0)
        if way == "a group":
            broadcast = tf.group(broadcast, hvd.broadcast_variables(tf.trainable_variables(), 0))
        with tf.train.MonitoredTrainingSession("", hooks=hooks) as session:
            if way != "hook":
                session.run(broadcast)
            assert graph_state.of(graph, KnownRuns).training is None
            for _ in range(2):
                session.run(train, {"ids:0": [1, 2]})
            plan = strategy.plan()
            raw = sessions.raw_session(session)
            counted = session_state.state_of_session(raw).training_runs
    text = capsys.readouterr().err
    if size > 1:
        assert {"keys", "rows", "gradients", "dense gradients"} <= {x.phase for x in plan.exchanges}
        assert counted == 2
    assert ("dense gradients" in text) == (rank == 0 and size > 1)
    assert text.count("collective: the plan of") == (rank == 0 and size > 1)
    grouped.everyone(0)  # rank 0 has written
    with open(f"{folder}/split.json") as file:
        assert json.load(file)["steps"] == 2
