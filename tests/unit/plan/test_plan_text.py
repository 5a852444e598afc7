"""The text of a plan: everything of a small model, no more than a screen of a large one."""

from __future__ import annotations

import dataclasses
import json
import re

import pytest

from collective.plan.data import (
    ExchangePlan,
    GroupPlan,
    SectionPlan,
    StepEstimate,
    TablePlan,
    UngroupedLookupPlan,
)
from collective.plan.formatting import distinct, shortened
from collective.plan.plan import Plan

RANKS = 4


@pytest.fixture(autouse=True)
def on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLLECTIVE_TERMINAL", "1")


@pytest.mark.parametrize("launchers", ["0", None])
def test_nothing_is_cut_where_nobody_has_a_terminal(launchers, monkeypatch):
    """A log has room: names, lookups and policies are whole, of few tables and of many."""
    if launchers is None:
        monkeypatch.delenv("COLLECTIVE_TERMINAL")
    else:
        monkeypatch.setenv("COLLECTIVE_TERMINAL", launchers)
    policy = {f"option_{i}": f"value_{i}" for i in range(20)}
    names = [f"input_layer/{'nested/' * 9}user_{i}_embedding" for i in range(3)]
    plan = plan_of([dataclasses.replace(table(n, 8, 4), policy=policy) for n in names])
    assert "…" not in str(plan) and "option_19=value_19" in str(plan)
    assert all(name in str(plan) for name in names)
    reasons = tuple(UngroupedLookupPlan(f"look_{i}", "item", "why " * 60) for i in range(50))
    summed_up = str(dataclasses.replace(large_plan(), alone=reasons))
    assert "scope(plan='full')" in summed_up and "why " * 59 in summed_up


def table(name: str, rows: int | None, dim: int, groups: tuple[str, ...] = ("group",)) -> TablePlan:
    """Makes a table of float32 with one slot."""
    shard_rows = [None] * RANKS if rows is None else [len(range(r, rows, RANKS)) for r in range(4)]
    shard_bytes = [None if rows is None else rows * dim * 8 for rows in shard_rows]
    return TablePlan(
        name=name,
        rows=rows,
        dim=dim,
        dtype="float32",
        slots=(f"{name}/Adagrad",),
        row_bytes=dim * 8,
        shard_rows=tuple(shard_rows),
        shard_bytes=tuple(shard_bytes),
        groups=groups,
        packed=1,
        imbalance=None if rows is None else max(shard_bytes) * RANKS / sum(shard_bytes),
    )


def exchange(phase: str, members: int, size: int | None) -> ExchangePlan:
    return ExchangePlan(
        name=f"collective.{phase}",
        kind="Alltoall",
        phase=phase,
        of="group",
        level=1,
        tables=members,
        sections=members,
        members=members,
        dtype="int64" if phase == "keys" else "float32",
        bytes=size,
        exact=False,
    )


def plan_of(tables: list[TablePlan], **fields) -> Plan:
    sections = tuple(SectionPlan(t.name, t.dim, False, 1) for t in tables if t.groups)
    exchanges = tuple(
        exchange(phase, len(tables), size)
        for phase, size in (("keys", 8000), ("rows", 64000), ("gradients", None))
    )
    values = {
        "groups": (GroupPlan("group", 1, len(tables), sections),),
        "alone": (),
        "exchanges": exchanges,
        "imbalance": 1.0,
        **fields,
    }
    return Plan("hb", RANKS, tuple(tables), **values)


def bounded(table: TablePlan, bound: float) -> TablePlan:
    return dataclasses.replace(table, policy={"weight_bound": bound})


def large_plan(**fields) -> Plan:
    """Makes a plan of 300 tables: 200 of dimension 16, 100 of 32, the larger the later."""
    tables = [table(f"t{i:03}", 4 * (i + 1), 16 if i < 200 else 32) for i in range(300)]
    return plan_of(tables, **fields)


def test_a_small_model_has_a_line_for_each_table_and_exchange():
    text = str(plan_of([table("item", 8, 4), table("user", 100, 16)]))
    assert text == (
        "collective: the plan of 4 ranks, backend hb\n"
        "\n"
        "table     rows  dim     type  slots  rows a rank  bytes a rank  max/mean"
        "  lookups, by group\n"
        "item         8    4  float32      1            2          64 B      1.00"
        "  group: 1 by distinct rows\n"
        "user       100   16  float32      1           25        3.2 kB      1.00"
        "  group: 1 by distinct rows\n"
        "2 tables                                                3.3 kB      1.00\n"
        "\n"
        "3 exchanges a step:\n"
        "an exchange of  in     by        level  tables  sections  lookups     type  bytes a rank\n"
        "keys            group  Alltoall      1       2         2        2    int64      ≤ 8.0 kB\n"
        "rows            group  Alltoall      1       2         2        2  float32     ≤ 64.0 kB\n"
        "gradients       group  Alltoall      1       2         2        2  float32             ?\n"
        "(?: it depends on the batch; scope(profile=DIR) measures it. "
        "≤: at most, since repeated ids are sent once)"
    )


def test_lines_of_tables_fit_on_a_screen_unless_all_is_wanted():
    name = "input_layer/" + "nested/" * 9 + "user_embedding"
    plan = plan_of([table(name, 8, 4, tuple(f"group{i}" for i in range(9))), table("item", 8, 4)])
    assert max(map(len, str(plan).splitlines())) <= 120
    assert name not in str(plan) and name in plan.to_text(full=True)
    assert re.search(r"^input_layer/nested/\S+…\S+/user_embedding ", str(plan), re.MULTILINE)


def grouped_twice(tables: list[TablePlan]) -> Plan:
    """Makes a plan whose tables are looked up by training and, alike, by an evaluation."""
    names = ("group1.c10ae4c6", "group1.c10ae4c6.1")
    sections = tuple(SectionPlan(t.name, t.dim, False, 1) for t in tables)
    groups = tuple(GroupPlan(name, 1, len(tables), sections) for name in names)
    exchanges = [dataclasses.replace(x, of=names[0]) for x in plan_of(tables).exchanges]
    tables = [dataclasses.replace(t, groups=names) for t in tables]
    return plan_of(tables, groups=groups, exchanges=tuple(exchanges))


def test_lookups_are_told_without_digests_and_whole():
    plan = grouped_twice([table("education", 17, 8), table("native_country", 43, 8)])
    lines = str(plan).splitlines()
    assert lines[2].endswith("  lookups, by group")
    assert lines[3].endswith("  group1, group1.1: 1 by distinct rows")
    assert lines[9].split()[:3] == ["keys", "group1", "Alltoall"]
    assert "c10ae4c6" not in str(plan) + plan.to_text(full=True)
    assert json.loads(plan.to_json())["groups"][0]["name"] == "group1.c10ae4c6"


def test_groups_of_one_number_keep_their_digests():
    plan = grouped_twice([table("education", 17, 8)])
    names = ("group1.c10ae4c6", "group1.0e11ab37")
    groups = tuple(dataclasses.replace(g, name=name) for g, name in zip(plan.groups, names))
    text = str(dataclasses.replace(plan, groups=groups))
    assert "group1.c10ae4c6, group1.0e11ab37: 1 by" in text


def test_names_are_shortened_where_they_are_alike():
    """Feature columns make such names."""
    scope = "linear/linear_model/input_from_feature_columns/input_layer"
    names = [f"{scope}/{name}_embedding/embedding_weights" for name in ("user_id", "item_id")]
    plan = grouped_twice([table(name, 100, 16) for name in names])
    lines = str(plan).splitlines()
    assert [line.split()[0] for line in lines[3:5]] == [
        "…/user_id_embedding/…",
        "…/item_id_embedding/…",
    ]
    assert all(name in plan.to_text(full=True) for name in names)


def test_lookups_that_are_alike_are_told_once_where_names_are_long():
    names = [f"input_layer/{name}_embedding/embedding_weights" for name in ("user_id", "item_id")]
    lines = str(grouped_twice([table(name, 100, 16) for name in names])).splitlines()
    assert [line.split()[0] for line in lines[3:5]] == names
    assert lines[2].endswith("max/mean") and lines[3].endswith("1.00")
    assert lines[6] == "(lookups, by group, of each table: group1, group1.1: 1 by distinct rows)"


def test_names_are_whole_where_there_is_room():
    name = "input_layer/user_id_embedding/embedding_weights"
    assert f"\n{name}   100 " in str(plan_of([table(name, 100, 16, ()), table("item", 8, 4, ())]))


@pytest.mark.parametrize(
    "names, most, want",
    [
        (["a/b/x/w", "a/b/y/w"], 6, ["…/x/…", "…/y/…"]),
        (["a/b/x/w", "a/b/y/w"], 7, ["a/b/x/w", "a/b/y/w"]),
        (["a/b/w", "a/w"], 4, ["…/b/w", "…/w"]),
        (["a/long/name"], 7, ["a/l…ame"]),
    ],
)
def test_scopes_that_all_names_share_are_left_out(names, most, want):
    assert distinct(names, most) == [shortened(name, most) for name in want]


def test_policies_are_shown_where_there_are_any():
    plan = plan_of([bounded(table("item", 8, 4), 0.5), table("user", 100, 16)])
    _, _, head, item, user, *_ = str(plan).splitlines()
    assert head.endswith("max/mean            policy  lookups, by group")
    assert "1.00  weight_bound=0.5  group: 1 by" in item
    assert "1.00                    group: 1 by" in user
    assert json.loads(plan.to_json())["tables"][0]["policy"] == {"weight_bound": 0.5}


def test_policies_of_many_tables_are_counted():
    tables = [bounded(t, 1 + (i > 5) + (i > 8)) for i, t in enumerate(large_plan().tables[:10])]
    lines = str(plan_of([*tables, *large_plan().tables[10:]])).splitlines()
    assert lines[3:6] == [
        "6 tables with weight_bound=1.",
        "3 tables with weight_bound=2.",
        "… and 1 other policy",
    ]
    assert len(lines) <= 40


def test_one_is_one():
    text = str(plan_of([table("only", 8, 4)], exchanges=(exchange("keys", 1, None),)))
    assert "\n1 table  " in text and "\n1 exchange a step:" in text


@pytest.mark.parametrize("ranks", [1, RANKS])
def test_a_model_without_tables_is_told(ranks):
    """Somebody forgot embedding_scope(): the script trains, and nothing is sharded."""
    dense = dataclasses.replace(exchange("dense gradients", 4, 640), kind="Allreduce", of="")
    plan = dataclasses.replace(plan_of([], groups=(), exchanges=(dense,)), ranks=ranks)
    lines = str(plan).splitlines()
    assert lines[1] == "" and lines[4:5] == [""]
    assert lines[2].startswith(
        "No variable is a table: none was made inside embedding_scope(), or min_rows left all"
    )
    assert "nothing is sharded" in str(plan) and "docs/troubleshooting.md" in str(plan)
    assert "every table is whole" not in str(plan)
    assert max(map(len, lines)) <= 120
    assert "No variable" not in str(large_plan()) + str(plan_of([table("item", 8, 4)]))


def test_three_hundred_tables_are_summed_up():
    lines = str(large_plan()).splitlines()
    assert lines[:6] == [
        "collective: the plan of 4 ranks, backend hb",
        "",
        "300 tables, 9.0 MB on the largest rank, slots included, 1.00 times the ranks' mean.",
        "group  dim     type  tables     rows  rows a rank  bytes a rank  max/mean",
        "group   32  float32     100  100,200       25,050        6.4 MB      1.00",
        "group   16  float32     200   80,400       20,100        2.6 MB      1.00",
    ]
    assert lines[7].split() == "the largest 10 rows dim slots bytes a rank max/mean".split()
    assert [line.split()[0] for line in lines[8:18]] == [f"t{i}" for i in range(299, 289, -1)]
    assert lines[8].split() == ["t299", "1,200", "32", "1", "76.8", "kB", "1.00"]
    assert lines[19] == "3 exchanges a step:"
    assert [line.split()[:2] for line in lines[21:24]] == [
        ["keys", "1"],
        ["rows", "1"],
        ["gradients", "1"],
    ]
    assert lines[-1] == (
        "All of it: scope(plan='full') prints it, strategy.plan().to_json() has it as data."
    )


def crowded_plan(dynamic: bool = True) -> Plan:
    """Makes a plan with more of everything than a summary has room for."""
    groups = [f"group.of.a.rather.long.name.{i}" for i in range(40)]
    tables = [
        table(
            f"scope/{'deep/' * 30}{i}",
            400 + i if i % 7 or not dynamic else None,
            1 + i,
            (groups[i % 40],),
        )
        for i in range(300)
    ]
    tables.append(table("unused", 4, 1, ()))
    why = "a reason that takes more than the hundred and twenty columns that a line may have " * 2
    alone = tuple(
        UngroupedLookupPlan(f"lookup_{i}", f"lonely_{i}", f"{why} {i % 9}") for i in range(90)
    )
    phases = ("agreement", "keys", "rows", "gradients", "dense gradients", "other")
    exchanges = tuple(
        dataclasses.replace(exchange(phase, 7, 10**12), dtype=f"float{16 * i}", received=1e15)
        for phase in phases
        for i in range(1, 50)
    )
    return plan_of(
        tables,
        alone=alone,
        exchanges=exchanges,
        imbalance=None,
        notes={f"note {i}": "a remark.\n" * 30 for i in range(9)},
        estimate=StepEstimate(None, None, None, 123456),
    )


def static_crowded_plan() -> Plan:
    return crowded_plan(dynamic=False)


@pytest.mark.parametrize("make", [large_plan, crowded_plan, static_crowded_plan])
def test_a_summary_has_no_more_than_forty_lines_of_120_columns(make):
    lines = str(make()).splitlines()
    assert ("An estimate" in str(make())) == (make is static_crowded_plan)
    assert 20 < len(lines) <= 40
    assert max(map(len, lines)) <= 120


def test_a_summary_has_names_as_feature_columns_make_them():
    names = [f"input_layer/feature_{i}_embedding/embedding_weights" for i in range(100, 150)]
    lines = str(plan_of([table(name, 100, 16) for name in names])).splitlines()
    assert [line.split()[0] for line in lines[7:17]] == names[:10]
    assert "(?: it depends on the batch; " in lines[-3] and len(lines) <= 40


def test_a_summary_says_what_it_leaves_out():
    text = str(crowded_plan())
    assert "301 tables (43 dynamic)" in text
    assert "other kinds of tables" in text
    assert "90 lookups with exchanges of their own:" in text and "and for 8 other reasons" in text
    assert "and 8 other remarks" in text


def test_replicated_tables_are_counted_and_told_apart():
    whole = dataclasses.replace(
        table("country", 100, 16, ()),
        shard_rows=(100,) * RANKS,
        shard_bytes=(12800,) * RANKS,
        imbalance=1.0,
        placement="replicated",
    )
    on_one = [dataclasses.replace(table(f"w{i}", 7, 2), placement=f"whole:{i}") for i in range(2)]
    plan = plan_of([whole, *on_one, *(table(f"t{i}", 100, 16) for i in range(50))])
    assert "53 tables (2 whole on one rank, 1 replicated)" in str(plan)
    assert re.search(r"\nreplicated +16 +float32 +1 +100 +100 +12.8 kB +1.00\n", str(plan))
    assert "replicated: nothing is exchanged" in plan.to_text(full=True)
    assert re.search(r"\nw1 .*whole on rank 1", plan.to_text(full=True))


@pytest.mark.parametrize("make", [large_plan, crowded_plan])
def test_everything_is_in_the_full_text_and_in_json(make):
    plan = make()
    full, data = plan.to_text(full=True), json.loads(plan.to_json())
    for part in plan.tables:
        assert part.name in full
    for lookup in plan.alone:
        assert f"{lookup.lookup} in {lookup.table}: {lookup.why}" in full
    assert [part["name"] for part in data["tables"]] == [part.name for part in plan.tables]
    assert len(data["exchanges"]) == len(plan.exchanges)
    assert len(data["alone"]) == len(plan.alone)


@pytest.mark.parametrize(
    "text, most, want",
    [("short", 5, "short"), ("a/long/name", 7, "a/l…ame"), ("a/long/name", 6, "a/l…me")],
)
def test_names_are_shortened_in_their_middle(text, most, want):
    assert shortened(text, most) == want
