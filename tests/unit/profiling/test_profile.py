"""Tests the split of a step, on spans typed out by hand."""

import pytest
import tensorflow.compat.v1 as tf

from collective.ops.communication.collective_names import split_name
from collective.options import ScopeOptions
from collective.plan.formatting import columns, imbalance, in_bytes
from collective.profiling import breakdown, profiler, run_tracer, summaries, trace

MS = 1_000_000


def span(phase, start, end, waits=False):
    return trace.Span(phase, "Kind", phase, int(start * MS), int(end * MS), waits, 0)


@pytest.mark.parametrize(
    "ran, want",
    [
        ([], {}),
        ([span("a", 0, 3)], {"a": 3}),
        ([span("a", 0, 3), span("b", 5, 6)], {"a": 3, "b": 1}),
        # two that compute at once share the time
        ([span("a", 0, 4), span("b", 2, 4)], {"a": 3, "b": 1}),
        ([span("a", 0, 3), span("a", 0, 3), span("b", 0, 3)], {"a": 2, "b": 1}),
        # what waits has what nothing else computes in
        ([span("keys", 0, 10, True), span("a", 2, 5)], {"keys": 7, "a": 3}),
        ([span("keys", 0, 4, True), span("rows", 2, 6, True)], {"keys": 3, "rows": 3}),
        # one ends as the next begins
        ([span("a", 0, 1), span("b", 1, 2), span("c", 2, 3)], {"a": 1, "b": 1, "c": 1}),
    ],
)
def test_every_moment_belongs_to_what_computes_else_to_what_waits(ran, want):
    assert trace.time_by_phase(ran) == pytest.approx(want)


def step(number=1, **kwargs):
    return breakdown.StepTimes(number, **{"ms": 10.0, **kwargs})


def test_who_spends_least_in_a_collective_came_last():
    """Rank 0 comes to the keys 6 ms before rank 1, which needs 2 ms for them: rank 0 has waited 6
    of its 8 ms.
    """
    early = step(
        phases={"input": 2.0, "collective.t.keys": 8.0}, collectives={"collective.t.keys": 8.0}
    )
    late = step(
        phases={"input": 8.0, "collective.t.keys": 2.0}, collectives={"collective.t.keys": 2.0}
    )
    joined = breakdown.combine([[early], [late]])
    assert joined.phases[0] == pytest.approx(
        {"input": 2.0, "collective.t.keys": 2.0, breakdown.WAITING: 6.0}
    )
    assert joined.phases[1] == pytest.approx(
        {"input": 8.0, "collective.t.keys": 2.0, breakdown.WAITING: 0.0}
    )
    assert [sum(phases.values()) for phases in joined.phases] == pytest.approx(joined.ms)


def test_who_waits_is_found_step_by_step():
    """Each rank is late once: means over steps would see no waiting at all."""
    name = "collective.t.rows"
    long, short = (
        {"phases": {name: ms, "dense": 10 - ms}, "collectives": {name: ms}} for ms in (5.0, 1.0)
    )
    joined = breakdown.combine(
        [[step(1, **long), step(2, **short)], [step(1, **short), step(2, **long)]]
    )
    assert all(
        phases == pytest.approx({name: 1.0, "dense": 7.0, breakdown.WAITING: 2.0})
        for phases in joined.phases
    )


def test_a_hidden_collective_hides_its_waiting():
    """Of 8 ms, 6 of them waiting, only 4 weren't spent on computing meanwhile."""
    name = "collective.t.rows"
    joined = breakdown.combine(
        [
            [step(phases={name: 4.0, "dense": 6.0}, collectives={name: 8.0})],
            [step(phases={name: 2.0, "dense": 8.0}, collectives={name: 2.0})],
        ]
    )
    assert joined.phases[0] == pytest.approx({name: 1.0, breakdown.WAITING: 3.0, "dense": 6.0})


def test_what_dynamic_tables_let_come_and_go():
    """Counts are of the last step, rates means over the steps that have them; of all ranks."""
    early, late = (
        {"user": {"rows": rows, "bytes": 100 * rows, "admitted": rows, "refused": 0}}
        for rows in (10, 30)
    )
    late["user"]["evicted by capacity"] = 5
    rates = {"user": {"rows": 4.0, "admitted": 6.0, "evicted by capacity": 2.5}}
    steps = [step(3, table_counts=early), step(5, table_counts=late, table_rates=rates)]
    joined = breakdown.combine([steps, steps])
    assert joined.table_counts["user"] == {
        "rows": 60,
        "bytes": 6000,
        "admitted": 60,
        "refused": 0,
        "evicted by capacity": 10,
    }
    assert joined.table_rates["user"]["admitted"] == 12
    last = breakdown.text(joined, range(2)).splitlines()[-1]
    assert last == (
        "table 'user': 60 rows, 6.0 kB, 60 admitted (12.0 a step), "
        "10 evicted by capacity (5.0 a step)"
    )
    values = summaries.scalars(joined)
    assert values["collective/tables/user/evicted_by_capacity"] == 10
    assert values["collective/tables/user/evicted_by_capacity_per_step"] == 5
    many = {f"t{i}": {"rows": 1, "bytes": i} for i in range(14)}
    lines = breakdown.text(breakdown.combine([[step(1, table_counts=many)]]), [0]).splitlines()
    assert lines[-2].startswith("table 't4':")
    assert lines[-1] == "and 4 smaller dynamic tables"


def test_rates_and_shares():
    told = [
        [
            step(
                samples=100,
                ids=300,
                asked={"t": 60, "u": 30},
                received={"collective.t.keys": 480},
                ms=20.0,
            )
        ],
        [
            step(
                samples=100,
                ids=300,
                asked={"t": 40, "u": 50},
                received={"collective.t.keys": 320},
                ms=20.0,
            )
        ],
    ]
    joined = breakdown.combine(told)
    assert joined.samples_per_s == pytest.approx(200 / 0.020)
    assert joined.distinct_share == pytest.approx(180 / 600)
    assert joined.bytes_per_step == pytest.approx(400)
    assert joined.keys_per_owner == {"t": [60, 40], "u": [30, 50]}
    text = breakdown.text(joined, [0, 1])
    assert "10,000 samples/s" in text and "30.0%" in text and "max/mean 1.00" in text
    nothing = breakdown.combine([[step()]])
    assert (nothing.samples_per_s, nothing.distinct_share, nothing.bytes_per_step) == (
        None,
        None,
        0,
    )
    assert "samples" not in breakdown.text(nothing, [0])


@pytest.mark.parametrize("ranks, exchanges", [(2, 3), (2, 90), (7, 3)])
def test_the_printed_rows_add_up_to_the_step(ranks, exchanges):
    phases = {
        "input": 1.0,
        "dense": 2.0,
        **{
            f"collective.t{i}.{phase}": 0.5
            for i in range(exchanges // 3)
            for phase in ("keys", "rows", "rows.gradient")
        },
    }
    told = [[step(ms=sum(phases.values()), phases=phases)] for _ in range(ranks)]
    lines = breakdown.text(breakdown.combine(told), range(ranks)).splitlines()
    rows = [line for line in lines[2:] if not line.startswith("step")]
    first = [
        float(
            next(word for word in line.split() if word.replace(".", "").isdigit() and "." in word)
        )
        for line in rows
    ]
    total = next(line for line in lines if line.startswith("step "))
    assert sum(first) == pytest.approx(float(total.split()[1]), abs=0.01 * len(rows))
    assert len(rows) == 2 + 3
    assert ("keys of 30 exchanges" in "\n".join(lines)) == (exchanges == 90)
    assert ("rank 1" in lines[1]) == (ranks == 2)


@pytest.mark.parametrize(
    "name, want",
    [
        ("collective.user.keys", ("keys", "user")),
        ("collective.user.rows.2", ("rows", "user.2")),
        ("collective.user.rows.gradient", ("gradients", "user")),
        ("collective.user.rows.1.gradient.3", ("gradients", "user.1")),
        ("collective.user.rows.gradient.gradient", ("rows", "user")),
        ("collective.group1.0a1b2c3d.keys", ("keys", "group1.0a1b2c3d")),
        ("collective.a.keys.rows", ("rows", "a.keys")),
        ("collective.host>user.rows.gradient", ("gradients", "user")),  # of a host's ranks
        ("collective.host.user.rows", ("rows", "host.user")),
        ("collective.host.keys", ("keys", "host")),
        ("collective.dense_gradients.0a1b2c3d.1", ("dense gradients", "")),
        ("collective.sparse_gradients.0a1b2c3d.indices", ("dense gradients", "")),
        ("collective.agreement", ("agreement", "")),
        ("collective.agreement.level2", ("agreement", "")),
        ("collective.auc.metric", ("other", "")),
    ],
)
def test_what_a_collective_s_name_tells(name, want):
    assert split_name(name) == want


def test_numbers_as_text():
    assert [in_bytes(n) for n in (None, 0, 999, 1500, 99_949, 99_950, 2_000_000, 3.5e9, 4e12)] == [
        "?",
        "0 B",
        "999 B",
        "1.5 kB",
        "99.9 kB",
        "100 kB",
        "2.0 MB",
        "3.5 GB",
        "4.0 TB",
    ]
    assert imbalance([1, 1, 4]) == 2 and imbalance([]) is None and imbalance([0, 0]) is None
    assert columns(["a", "b"], [["x", "100"], ["long", "2"]]) == [
        "a       b",
        "x     100",
        "long    2",
    ]


@pytest.mark.parametrize(
    "options, error",
    [
        ({"profile": 3}, r"scope\(profile=…\) is a folder or None, not 3"),
        ({"profile": ""}, r"is a folder or None"),
        ({"profile_steps": (0, 3)}, r"scope\(profile_steps=…\) is \(first, last\).*not \(0, 3\)"),
        ({"profile_steps": (5, 3)}, r"1 <= first <= last, not \(5, 3\)"),
        ({"profile_steps": 5}, r"not 5"),
        ({"profile_steps": (1.0, 2)}, r"not \(1.0, 2\)"),
        ({"profile_every": -1}, r"scope\(profile_every=…\) .* not -1"),
        ({"profile_every": True}, "not True"),
    ],
)
def test_wrong_options(options, error):
    with pytest.raises(ValueError, match=error):
        ScopeOptions(**options)


def test_a_folder_that_can_not_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError):
        profiler.of_options(ScopeOptions(profile=str(tmp_path / "file")))
    profiler.of_options(ScopeOptions(profile=str(tmp_path / "made"), profile_steps=(1, 1)))
    assert (tmp_path / "made").is_dir()


def test_the_profiler_s_own_time_is_no_part_of_a_step(monkeypatch):
    """Starting TensorFlow's profiler takes 2 s, the run 10 s, writing the profile 5 s."""
    now = [100.0]
    monkeypatch.setattr(run_tracer.time, "perf_counter", lambda: now[0])
    own_time = run_tracer.OwnTime()

    def passes(seconds):
        now[0] += seconds

    tensorflow_profiler = run_tracer.tf2.profiler.experimental
    monkeypatch.setattr(tensorflow_profiler, "start", lambda folder: passes(2))
    monkeypatch.setattr(tensorflow_profiler, "stop", lambda: passes(5))
    with run_tracer._tensorflow_profile("folder", own_time):
        passes(10)
    assert own_time.seconds == 7


def test_the_shape_of_a_tensor_that_is_fed_has_the_tensor_s_name():
    """TensorFlow names what it puts in its place by operation, output and number of the feed."""
    stats = tf.RunMetadata().step_stats
    for name, sizes in (("_arg_scope/ids_1_0_7", [24, 3]), ("dense/_arg_", [2])):
        output = stats.dev_stats.add(device="/cpu:0").node_stats.add(node_name=name).output.add()
        for size in sizes:
            output.tensor_description.shape.dim.add(size=size)
    assert trace.shapes(stats) == {"scope/ids_1:0": [24, 3], "dense/_arg_:0": [2]}
