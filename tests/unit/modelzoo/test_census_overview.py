"""The table that ends the census programs, for a plan that is typed out."""

from __future__ import annotations

from types import SimpleNamespace

from census_income import overview

REFERENCE = "PERSIA publishes 0.8929 on these rows"


def plan(*tables, exchanges=0, backend="hb"):
    """Makes a plan of tables, each given as rows and bytes by rank."""
    parts = [
        SimpleNamespace(rows=sum(rows), shard_rows=rows, shard_bytes=size) for rows, size in tables
    ]
    ranks = len(tables[0][0])
    return SimpleNamespace(ranks=ranks, backend=backend, tables=parts, exchanges=[None] * exchanges)


def test_two_ranks():
    seen = plan(([5, 4], [320, 256]), ([2, 2], [128, 128]), exchanges=5, backend="sok")
    assert overview.lines(seen, 384, 0.91324, REFERENCE) == [
        "",
        "What you just saw",
        "  ranks     2, each with a part of every table (backend sok)",
        "  tables    2 tables of 13 rows, sharded by rows",
        "  a rank    7 rows at most, with optimizer slots 448 bytes; the network whole",
        "  a step    384 rows of data, 5 exchanges between the ranks for all tables together",
        "  test AUC  0.9132; PERSIA publishes 0.8929 on these rows",
    ]


def test_one_rank():
    assert overview.lines(plan(([9], [576])), 384, 0.91324, REFERENCE)[2:] == [
        "  ranks     1, which holds every table whole",
        "  tables    1 table of 9 rows",
        "  test AUC  0.9132; PERSIA publishes 0.8929 on these rows",
    ]


def test_without_training_there_is_only_the_result():
    assert overview.lines(None, 384, 0.5, REFERENCE)[2:] == [
        "  test AUC  0.5000; PERSIA publishes 0.8929 on these rows"
    ]
