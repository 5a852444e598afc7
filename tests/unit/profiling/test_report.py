"""The page of a profile, from data typed out by hand."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import xml.etree.ElementTree as xml
from pathlib import Path

import pytest

from collective.profiling.history import History, Point
from collective.profiling.report import __main__ as command
from collective.profiling.report import charts, findings, page, profile, selection
from collective.profiling.report.phases import by_phase

ROOT = Path(__file__).resolve().parents[3]
GROUP = "collective.group1.0a1b2c3d"


def record(ranks=2, tables=("user", "item"), **changed):
    """Returns what split.json holds of `ranks`, of which the last comes last to each exchange."""
    phases = []
    for rank in range(ranks):
        late = 4.0 if rank == ranks - 1 else 0.0
        phases.append(
            {
                "between runs": 1.0,
                "input": 1.0 + late,
                "collective.agreement": 0.25,
                f"{GROUP}.keys": 0.5,
                f"{GROUP}.rows": 1.0,
                f"{GROUP}.rows.gradient": 1.0,
                "collective.dense_gradients.0a1b2c3d": 0.25,
                "dense": 3.0,
                "waiting for others": 4.0 - late,
                "rest of the run": 1.0,
            }
        )
    received = {
        "collective.agreement": 48.0 * ranks,
        f"{GROUP}.keys": 3000.0,
        f"{GROUP}.rows": 30_000.0,
        f"{GROUP}.rows.gradient": 30_000.0,
        "collective.dense_gradients.0a1b2c3d": 500.0,
    }
    size = 1000.0 / len(tables)
    out = {
        "first": 11,
        "last": 20,
        "steps": 10,
        "ms": [13.0] * ranks,
        "phases": phases,
        "received": [received] * ranks,
        "samples": 64.0 * ranks,
        "samples_per_s": 64.0 * ranks / 13 * 1000,
        "ids": 400.0,
        "distinct_share": 0.75,
        "bytes_per_step": sum(received.values()),
        "keys_per_owner": {t: [100.0 + 50 * (r == 0) for r in range(ranks)] for t in tables},
        "table_bytes": {
            t: {"keys": size * 3, "rows": size * 30, "gradients": size * 30} for t in tables
        },
        "dynamic_rows": {tables[-1]: [70] * ranks},
        "history": {
            "step": [11, 20, 100],
            "ms": [14.0, 12.0, 11.0],
            "samples_per_s": [None, 1.0, 2.0],
            "rows": {tables[-1]: [10, 40, 140]},
        },
        "plan": plan(ranks, tables),
        "options": {"local_steps": 4},
        "ranks": ranks,
        "alone": False,
        "written": "2026-11-23 06:00 UTC",
        "version": "0.1.0",
    }
    return {**out, **changed}


def plan(ranks, tables):
    """Returns a plan of static tables, of which the last is dynamic."""

    def of_table(name):
        dynamic = name == tables[-1]
        return {
            "name": name,
            "rows": None if dynamic else 1000,
            "dim": 16,
            "dtype": "float32",
            "slots": (f"{name}/Adagrad",),
            "row_bytes": 128,
            "shard_rows": [None if dynamic else 1000 // ranks] * ranks,
            "shard_bytes": [None if dynamic else 128_000 // ranks] * ranks,
            "groups": ("group1.0a1b2c3d",),
            "packed": len(tables),
            "imbalance": 1.0,
        }

    exchanges = [
        {
            "name": f"{GROUP}.{phase}",
            "kind": "Alltoall",
            "phase": phase,
            "of": "group1.0a1b2c3d",
            "level": 1,
            "tables": len(tables),
            "sections": len(tables),
            "members": len(tables),
            "dtype": "int64" if phase == "keys" else "float32",
            "bytes": 5000,
            "exact": False,
            "received": received,
        }
        for phase, received in (("keys", 3000.0), ("rows", 30_000.0), ("gradients", None))
    ]
    return {
        "backend": "hb",
        "ranks": ranks,
        "tables": [of_table(name) for name in tables],
        "groups": [{"name": "group1.0a1b2c3d", "level": 1, "lookups": 2, "sections": []}],
        "alone": [{"lookup": "odd", "table": tables[0], "why": "it is in a loop"}],
        "exchanges": exchanges,
        "imbalance": None,
        "notes": {"prefetch": "keys travel a batch ahead"},
    }


def drawn(*records, names=("a", "b")):
    """Returns the page of these profiles as text and as a tree: it is well-formed."""
    profiles = [profile.from_record(name, each) for name, each in zip(names, records)]
    text = page.page(profiles)
    return text, xml.fromstring(text.partition("\n")[2])


def words(tree):
    """Returns the text that a reader sees, without the style sheet."""
    for parent in tree.iter():
        for child in [child for child in parent if child.tag == "style"]:
            parent.remove(child)
    return " ".join(" ".join(tree.itertext()).split())


def section(tree, title):
    """Returns the section with this heading."""
    for each in tree.iter("section"):
        if each.find("h2").text == title:
            return each
    raise AssertionError(f"there is no section {title!r}")


def table_rows(tree):
    """Returns the cells of all rows of tables, as text."""
    rows = []
    for row in tree.iter("tr"):
        rows.append(["".join(cell.itertext()) for cell in row])
    return rows


def bars_of(tree):
    """Returns of each bar (label, [(what, percent of the width)], value)."""
    out = []
    for bar in (each for each in tree.iter("div") if each.get("class", "").startswith("bar")):
        label, track, value = bar
        parts = [
            (p.get("title").partition(":")[0], float(re.findall(r"[\d.]+", p.get("style"))[0]))
            for p in track
        ]
        out.append((label.text, parts, value.text))
    return out


# ---- The page


def test_a_bar_for_each_rank_adds_up_to_its_step():
    _, tree = drawn(record())
    of_mean, *of_ranks = bars_of(section(tree, "A step, by rank"))
    assert [label for label, _, _ in of_ranks] == ["rank 0", "rank 1"]
    assert [value for _, _, value in [of_mean, *of_ranks]] == ["13.00 ms"] * 3
    assert of_ranks[0][1] == [
        ("between runs", pytest.approx(100 / 13, abs=1e-3)),
        ("input", pytest.approx(100 / 13, abs=1e-3)),
        ("agreement", pytest.approx(25 / 13, abs=1e-3)),
        ("keys", pytest.approx(50 / 13, abs=1e-3)),
        ("rows", pytest.approx(100 / 13, abs=1e-3)),
        ("gradients", pytest.approx(100 / 13, abs=1e-3)),
        ("dense gradients", pytest.approx(25 / 13, abs=1e-3)),
        ("dense", pytest.approx(300 / 13, abs=1e-3)),
        ("waiting for others", pytest.approx(400 / 13, abs=1e-3)),
        ("rest of the run", pytest.approx(100 / 13, abs=1e-3)),
    ]
    assert all(sum(width for _, width in parts) <= 100.01 for _, parts, _ in of_ranks)


def test_phases_are_a_table_with_their_bytes():
    _, tree = drawn(record())
    rows = {row[0]: row[2:] for row in table_rows(section(tree, "A step, by rank"))}
    assert rows["input"] == ["3.00", "23.1%", "1.00", "5.00", ""]
    assert rows["keys"] == ["0.50", "3.8%", "0.50", "0.50", "3.0 kB"]
    assert rows["gradients"] == ["1.00", "7.7%", "1.00", "1.00", "30.0 kB"]
    assert rows["waiting for others"] == ["2.00", "15.4%", "0.00", "4.00", ""]
    assert rows["step"] == ["13.00", "", "13.00", "13.00", "63.6 kB"]


def test_what_stands_out_is_said_in_words():
    sentences = findings.findings(profile.from_record("a", record(bytes_per_step=1e6)))
    assert sentences == [
        "A step takes 13.00 ms. Most of it: input 23%, dense 23%, waiting for others 15%. All "
        "exchanges together take 23%, waiting not counted.",
        "Its input takes 3.00 ms of a step: look at prefetching, and at how many threads parse, "
        "before anything about tables.",
        "Ranks wait for each other for 2.00 ms of a step (15%). Rank 1 waits least (0.00 ms), so "
        "the others wait for it most.",
        "What rank 1 spends more time on than the others is input: 5.00 ms, 4.00 ms more than "
        "their mean.",
    ]
    even = record(keys_per_owner={"user": [10.0, 10.0]})
    assert not any(
        "is asked for" in each for each in findings.findings(profile.from_record("", even))
    )
    uneven = record(keys_per_owner={"user": [10.0, 10.0], "item": [80.0, 20.0]})
    assert findings.findings(profile.from_record("", uneven))[-1] == (
        "Rank 0 is asked for 90 keys a step, 1.50 times the mean. Table item adds most to that "
        "(its own ratio: 1.60)."
    )


def found(**changed):
    return " ".join(findings.findings(profile.from_record("", record(**changed))))


def test_nobody_is_blamed_where_ranks_take_turns():
    """Each waits about as long as the others: none of them is the slow one."""
    phases = [{"dense": 9.0, "waiting for others": ms} for ms in (4.0, 4.2)]
    text = found(phases=phases)
    assert "Ranks wait for each other for 4.10 ms of a step (32%). No rank is always" in text
    assert "Rank 0" not in text


@pytest.mark.parametrize("ms, is_said", [([14.0, 135.0, 21.0], True), ([14.0, 20.0, 21.0], False)])
def test_uneven_steps_are_said(ms, is_said):
    """A mean of steps of which some took ten times as long says little of any."""
    history = {"step": [11, 12, 13, 100], "ms": [*ms, 900.0], "rows": {}}
    text = found(history=history)
    assert ("14.00 to 135.00 ms, the median 21.00 ms" in text) == is_said
    assert ("uneven" in text) == is_said


@pytest.mark.parametrize("count, is_said", [(140_000.0, True), (160_000.0, False)])
def test_exchanges_that_do_not_take_long_for_their_bytes(count, is_said):
    """All of them take 3 ms."""
    text = found(bytes_per_step=count)
    assert ("The exchanges bring 140 kB to a rank in 3.00 ms" in text) == is_said
    assert ("narrower types on the wire don't" in text) == is_said


def test_bytes_by_table_with_all_else():
    _, tree = drawn(record())
    bars = bars_of(section(tree, "Bytes by table"))
    assert [(label, value) for label, _, value in bars] == [
        ("item", "31.5 kB"),
        ("user", "31.5 kB"),
        ("all else", "596 B"),
    ]
    assert bars[0][1] == [
        ("keys", pytest.approx(100 * 3 / 63, abs=1e-3)),
        ("rows", pytest.approx(100 * 30 / 63, abs=1e-3)),
        ("gradients", pytest.approx(100 * 30 / 63, abs=1e-3)),
    ]


def test_owners_rows_and_plan():
    _, tree = drawn(record())
    owners = section(tree, "Balance of owners")
    assert "max/mean 1.20" in words(owners)
    assert [each.get("title") for each in owners.iter("span") if each.get("title")] == [
        "rank 0: 300",
        "rank 1: 200",
        "rank 0: 73.0 kB",  # 64 000 of user, 70 rows of item
        "rank 1: 73.0 kB",
    ]
    assert ["item", "250", "150", "rank 0", "1.20"] in table_rows(owners)
    assert "item: 140 rows, +1.5 a step" in words(section(tree, "Rows of dynamic tables over time"))
    assert "scope(profile_every=100)" not in words(tree)
    (line,) = section(tree, "Steps over the job").iter("polyline")
    assert line.get("points") == "0.0,0.00 101.1,14.29 1000.0,21.43"
    built = section(tree, "The plan")
    assert "Backend hb, 2 ranks, 2 tables in 1 group, 3 exchanges a step." in words(built)
    group = "group1.0a1b2c3d"
    assert ["user", "1,000", "16", "float32", "1", "128 B", "128 kB", group] in table_rows(built)
    assert ["item", "dynamic, 140 now", "16", "float32", "1", "128 B", "17.9 kB", group] in (
        table_rows(built)
    )
    assert ["rows", group, "Alltoall", "2", "2", "float32", "30.0 kB"] in table_rows(built)
    assert ["gradients", group, "Alltoall", "2", "2", "float32", "at most 5.0 kB"] in (
        table_rows(built)
    )
    assert "1 lookup has an exchange of its own" in words(built)
    assert "keys travel a batch ahead" in words(built)


def test_only_the_window_was_measured():
    history = {"step": [11, 20], "ms": [1.0, 1.0], "samples_per_s": [], "rows": {"item": [3, 3]}}
    text, tree = drawn(record(history=history))
    assert "Steps over the job" not in text
    assert "scope(profile_every=100)" in words(tree)


def test_names_are_shown_as_they_are():
    """Whatever a script calls its tables: it is text, and nothing is loaded."""
    hostile = '<script src="http://x">alert(1)</script>&\x00\x1b[31m'
    text, tree = drawn(record(tables=(hostile, "b'\">")), names=("<i>", ""))
    assert "<script" not in text and "\x00" not in text and "\x1b" not in text
    assert '<script src="http://x">alert(1)</script>&\ufffd\ufffd[31m' in words(tree)
    assert not list(tree.iter("script")) and not list(tree.iter("link"))


@pytest.mark.parametrize("count", [1, 2])
def test_nothing_is_loaded_from_elsewhere(count):
    text, tree = drawn(*[record()] * count)
    assert "http" not in text and "//" not in text and "url(" not in text and "@import" not in text
    assert {each.tag for each in tree.iter()}.isdisjoint({"script", "link", "img", "iframe"})
    assert not [each for each in tree.iter() if each.get("src") or each.get("href")]


@pytest.mark.parametrize("theme", ["of-keys", "line-9"])
def test_both_themes_colour_everything(theme):
    text, _ = drawn(record())
    light, dark = text.partition("prefers-color-scheme: dark")[::2]
    assert f".{theme} {{" in light and f".{theme} {{" in dark


def test_many_ranks_and_tables_stay_readable():
    tables = [f"table_{i:03}" for i in range(300)]
    many = record(64, tables)
    many["table_bytes"] = {name: {"rows": 300.0 - i} for i, name in enumerate(tables)}
    text, tree = drawn(many)
    steps = section(tree, "A step, by rank")
    (every,) = steps.iter("details")
    assert len(bars_of(every)) == 64 and len(bars_of(steps)) == 64 + 9
    assert [label for label, _, _ in bars_of(steps)][1:9] == [
        *("rank 63", "rank 0", "rank 1", "rank 2"),
        *("rank 59", "rank 60", "rank 61", "rank 62"),
    ]
    bars = bars_of(section(tree, "Bytes by table"))
    assert [label for label, _, _ in bars] == [*tables[:10], "290 other tables", "all else"]
    assert all(sum(width for _, width in parts) <= 100.01 for _, parts, _ in bars)
    rows = table_rows(section(tree, "Balance of owners"))
    assert len(rows) == 1 + 10 + 1 and rows[-1][:2] == ["290 other tables", f"{290 * 6450:,}"]
    built = section(tree, "The plan")
    (every, alone) = built.iter("details")
    assert len(table_rows(every)) == 1 + 300
    assert len(table_rows(built)) == (1 + 10 + 2) + (1 + 300) + (1 + 3) + 2
    assert len(text) < 500_000


def test_two_side_by_side_have_one_scale():
    fast = record(4, phases=[{"dense": 6.5}] * 4, ms=[6.5] * 4, distinct_share=None)
    text, tree = drawn(record(), fast)
    bars = bars_of(section(tree, "A step, by rank"))
    assert len(bars) == 3 + 5
    assert bars[-1] == ("rank 3", [("dense", pytest.approx(50))], "6.50 ms")
    head = {row[0]: row[1:] for row in table_rows(tree.find("body/main/header"))}
    assert head[""] == ["A · a", "B · b", "change"]
    assert head["ranks"] == ["2", "4", ""]
    assert head["a step"] == ["13.00 ms", "6.50 ms", "-50.0%"]
    assert head["of the ids travel as keys"] == ["75.0%", "", ""]
    phases = {row[0]: row[2:] for row in table_rows(section(tree, "A step, by rank"))}
    assert phases["dense"] == ["3.00", "6.50", "+3.50"]
    assert phases["input"] == ["3.00", "", "-3.00"]
    assert phases["step"] == ["13.00", "6.50", "-6.50"]


@pytest.mark.parametrize("other, is_said", [([20.0, 21.0, 22.0, 90.0], False), ([12.0] * 4, True)])
def test_differences_that_may_be_chance(other, is_said):
    """A slow step more in one of them isn't what tells the two apart."""

    def history(ms):
        return {"step": [11, 12, 13, 14], "ms": ms, "rows": {}}

    before = record(history=history([10.0, 11.0, 13.0, 40.0]))
    _, tree = drawn(before, record(history=history(other), ms=[14.0, 14.0]))
    text = words(tree)
    said = "the middle half of A's steps took 10.75 to 19.75 ms, that of B's 12.00 to 12.00 ms."
    assert (said in text) == is_said and ("may be chance" in text) == is_said
    assert f"the median step 12.00 ms {sum(sorted(other)[1:3]) / 2:.2f} ms" in text


def test_rank_0_alone_is_said():
    alone = {**record(1), "alone": True, "ranks": 2}
    _, tree = drawn(alone)
    assert "the times of rank 0 alone" in words(tree)
    assert "max/mean" not in words(section(tree, "Balance of owners"))


def test_one_rank():
    text, tree = drawn(
        record(1, received=[{}], bytes_per_step=0.0, table_bytes={}, keys_per_owner={})
    )
    assert "With one rank nothing travels." in words(tree)
    assert "One rank owns everything." in words(tree)


def test_a_profile_that_an_earlier_release_saved():
    """Nothing was saved then of tables, options, rows and the plan."""
    later = ("table_bytes", "dynamic_rows", "history", "plan", "options", "ranks", "alone")
    earlier = {k: v for k, v in record().items() if k not in (*later, "written", "version")}
    _, tree = drawn(earlier)
    assert bars_of(section(tree, "Bytes by table")) == [
        ("all exchanges", [(p, pytest.approx(w, abs=0.01)) for p, w in SHARES], "63.6 kB")
    ]
    assert "an earlier release" in words(section(tree, "The plan"))
    _, tree = drawn(earlier, record())
    assert "A · a" in words(tree)


SHARES = [
    ("agreement", 0.15),
    ("keys", 4.72),
    ("rows", 47.17),
    ("gradients", 47.17),
    ("dense gradients", 0.79),
]


def test_a_trace_that_could_not_be_read():
    _, tree = drawn(record(phases=[{}, {}], received=[{}, {}], bytes_per_step=0.0, table_bytes={}))
    assert "No trace of these steps could be read." in words(tree)


# ---- Its parts


def test_collectives_belong_to_their_phases():
    assert by_phase(
        {
            "rest of the run": 1,
            f"{GROUP}.rows": 2,
            "collective.user.rows": 3,
            "HorovodAllreduce_x": 4,
        }
    ) == {"rows": 5, "other": 4, "rest of the run": 1}


def test_the_largest_and_the_rest():
    sizes = {f"t{i}": float(i) for i in range(12)}
    assert selection.largest(sizes) == ([f"t{i}" for i in range(11, 1, -1)], ["t1", "t0"])
    # A rest of one takes no less room than itself.
    assert selection.largest({**sizes, "t11": 0.0}, most=11).others == []
    assert selection.shown_ranks([3.0, 1.0]) == [0, 1]
    assert selection.shown_ranks([float(20 - i) for i in range(20)]) == [19, 18, 17, 16, 3, 2, 1, 0]


def test_a_longer_bar_takes_the_whole_width():
    row = charts.bar("rest", {"x": 3.0, "y": 1.0}, 2.0, str, "mean")
    assert [(part.kind, part.percent) for part in row.parts] == [("of-x", 75.0), ("of-y", 25.0)]
    assert row.kind == "mean beyond"
    _, tree = drawn(record(tables=[f"table{i}" for i in range(40)]))
    classes = [bar.get("class") for bar in section(tree, "Bytes by table").iter("div")]
    assert classes.count("bar") == 11 and classes.count("bar beyond") == 1


def test_more_columns_than_fit_show_the_largest():
    chart = charts.columns([float(i) for i in range(1024)], 1023, "{:.0f}".format)
    assert len(chart.columns) == 128
    assert chart.columns[1] == ("ranks 8 to 15, at most: 15", pytest.approx(1500 / 1023))


def test_points_are_thinned_evenly():
    history = History(most=5)
    for step in [1, 2, 3, 100, 200, 300]:
        history.add(Point(step, float(step), None, {"t": step} if step > 2 else {}))
    assert history.to_dict() == {
        "step": [1, 3, 100, 200, 300],
        "ms": [1.0, 3.0, 100.0, 200.0, 300.0],
        "samples_per_s": [None] * 5,
        "rows": {"t": [0, 3, 100, 200, 300]},
    }


# ---- The command


def test_the_command_draws_one_and_two(tmp_path, capsys):
    for name in ("old", "new"):
        (tmp_path / name).mkdir()
        profile.save(str(tmp_path / name), record())
    assert command.main([str(tmp_path / "old")]) == 0
    assert capsys.readouterr().out == f"{tmp_path}/old/report.html\n"
    assert (tmp_path / "old" / "report.html").read_text().startswith("<!DOCTYPE html>\n<html")
    assert command.main([str(tmp_path / "old"), str(tmp_path / "new" / "split.json")]) == 0
    assert "A · old" in (tmp_path / "new" / "comparison.html").read_text()
    assert command.main([str(tmp_path / "old"), "-o", str(tmp_path / "page.html")]) == 0
    assert sorted(each.name for each in (tmp_path / "old").iterdir()) == [
        "report.html",
        "split.json",
    ]
    assert (tmp_path / "page.html").exists()


@pytest.mark.parametrize(
    "content, error",
    [
        (None, "there is no split.json. scope(profile="),
        ("{", "this isn't a profile that scope(profile=…) has written (JSONDecodeError"),
        ("{}", "(KeyError: 'first')"),
        ("[]", "(TypeError: "),
    ],
)
def test_the_command_says_what_is_wrong(content, error, tmp_path, capsys):
    if content is not None:
        (tmp_path / "split.json").write_text(content)
    assert command.main([str(tmp_path)]) == 1
    err = capsys.readouterr().err
    assert err.startswith("collective report: ") and error in err


def test_the_command_starts_without_tensorflow(tmp_path):
    (tmp_path / "split.json").write_text(json.dumps(record()))
    program = (
        "import sys; sys.modules['tensorflow'] = sys.modules['horovod'] = None\n"
        "from collective.profiling.report.__main__ import main\n"
        "sys.exit(main(sys.argv[1:]))"
    )
    subprocess.run([sys.executable, "-c", program, tmp_path], cwd=ROOT, check=True, timeout=60)
    assert (tmp_path / "report.html").exists()
