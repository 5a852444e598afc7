"""Starts a session's variables from checkpoints of other models: `scope(warm_start=…)`."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Sequence
from typing import Any, Callable

import numpy as np
import tensorflow.compat.v1 as tf

from collective.checkpoint.files.chain import Chain, newest, open_links
from collective.checkpoint.files.chain_names import increment_prefix, split
from collective.checkpoint.files.layout import STATIC, StoredTable
from collective.checkpoint.reading import compatibility, merged_reader
from collective.checkpoint.reading.consolidate import other_entries
from collective.checkpoint.reading.name_map import NameMap
from collective.checkpoint.restoring import restores
from collective.checkpoint.rows import table_io
from collective.checkpoint.rows.shards import Shard, dynamic_tables, find_shards
from collective.checkpoint.saving.saver import variables_by_name, was_restored
from collective.coordination import barrier
from collective.errors import RankError
from collective.ops.communication import collectives
from collective.ops.counting import counted
from collective.options.scopes import WarmStart
from collective.scope import SCOPES
from collective.startup import STARTUP
from collective.tables import served_table
from collective.tensorflow_internals.checkpoints import checkpoint_management
from collective.tensorflow_internals.variables import variables

SHOWN = 20  # names in a line of the report
# The name of a slot that isn't an optimizer's: it starts as its variable does.
AVERAGE = "ExponentialMovingAverage"


def prepare_session(original: Any, manager: Any, *args: Any, **kwargs: Any) -> Any:
    """Replaces `SessionManager.prepare_session`: starts what has no checkpoint from other models'.

    Raises:
        ValueError: a source doesn't exist, or has nothing in the graph, or the map of names is
        wrong. tf.errors.InvalidArgumentError: a variable has another shape or type there.
        RankError: ranks name different sources.
    """
    session = original(manager, *args, **kwargs)
    sources = SCOPES.options.warm_starts
    if sources and not was_restored(manager) and served_table.served_graph(session.graph) is None:
        with STARTUP.doing(session.graph, "starting from other checkpoints"):
            start(session, sources)
    return session


@dataclasses.dataclass
class SourceCheckpoint:
    """Holds the contents of a checkpoint under the names of the graph.

    Attributes:
        chain: the checkpoint, with its increments.
        slots: whether optimizers' slots are wanted.
        old_names: {name here: name there}.
        pairs: the shards that start from it.
        values: {name here: variable} of the ordinary variables that start from it.
        taken: the names there that were taken.
    """

    chain: Chain
    slots: bool
    old_names: dict[str, str]
    pairs: list[tuple[Shard, StoredTable]] = dataclasses.field(default_factory=list)
    values: dict[str, Any] = dataclasses.field(default_factory=dict)
    taken: set[str] = dataclasses.field(default_factory=set)

    @staticmethod
    def open(source: WarmStart, prefix: str) -> SourceCheckpoint:
        base, number = split(prefix)
        chain = open_links(base, number or 0)
        chain.base.check_files()
        tables = chain.base.layout.tables
        names = [*tables, *other_entries(chain.base)]
        name_map = NameMap(source.names, f"WarmStart('{source.path}'): names")
        old_names: dict[str, str] = {}
        for name in names:
            stored = tables.get(name)
            owner = name.rpartition("/")[0] if stored is None else stored.slot_of
            new = name_map.rename(name, owner if owner in names else None)
            if new is not None and new in old_names:
                raise ValueError(
                    f"WarmStart('{source.path}'): names: '{old_names[new]}' and '{name}' would "
                    f"both be '{new}'."
                )
            if new is not None:
                old_names[new] = name
        name_map.check_all_matched(names)
        return SourceCheckpoint(chain, source.slots, old_names)

    @property
    def prefix(self) -> str:
        return self.chain.last.prefix

    def find(self, name: str) -> StoredTable | None:
        old = self.old_names.get(name)
        return None if old is None else compatibility.find_stored_table(self.chain.base, old)

    def left_over(self) -> list[str]:
        """Returns the names there that no variable of the graph has taken."""
        return sorted(set(self.old_names.values()) - self.taken)


@dataclasses.dataclass
class StartPlan:
    """Says from which checkpoint each variable starts.

    Attributes:
        sources: the checkpoints, in their order of precedence.
        fresh: the names of all other variables.
        fresh_slots: those among them that are optimizers' slots and scalars.
        averages: {moving average: variable} for averages that no checkpoint has.
    """

    sources: list[SourceCheckpoint]
    fresh: list[str] = dataclasses.field(default_factory=list)
    fresh_slots: list[str] = dataclasses.field(default_factory=list)
    averages: dict[str, str] = dataclasses.field(default_factory=dict)

    @property
    def shards(self) -> list[Shard]:
        return [shard for source in self.sources for shard, _ in source.pairs]

    def __str__(self) -> str:
        lines = ["collective: scope(warm_start=…)"]
        for source in self.sources:
            here = {old: new for new, old in source.old_names.items()}
            named = [
                here[old] + (f" (there {old})" if here[old] != old else "")
                for old in sorted(source.taken)
            ]
            lines.append(f"  from '{source.prefix}': {_listed(named)}")
            lines.append(f"    left over: {_listed(source.left_over())}")
        lines.append(f"  fresh: {_listed(self.fresh)}")
        if self.fresh_slots:
            lines.append(f"  fresh slots of optimizers: {_listed(self.fresh_slots)}")
        return "\n".join(lines)


def _listed(names: Sequence[str]) -> str:
    more = f", and {counted(len(names) - SHOWN, 'other')}" if len(names) > SHOWN else ""
    return (", ".join(names[:SHOWN]) or "nothing") + more


def start(session: Any, sources: Sequence[WarmStart]) -> None:
    """Gives variables of a session their values from checkpoints, on all ranks or on none."""
    prefixes = _agreed_prefixes(session, sources)
    plans: list[StartPlan] = []
    table_restores: list[table_io.TableRestore] = []

    def on_all_ranks(doing: str, step: Callable[[], Any]) -> list[Any]:
        return barrier.run_on_all_ranks(session, f"scope(warm_start=…): {doing}", step)

    def compare() -> None:
        opened = [SourceCheckpoint.open(s, prefix) for s, prefix in zip(sources, prefixes)]
        plans.append(make_plan(session.graph, opened))
        table_restores.extend(table_io.TableRestore(session, s.chain, s.pairs) for s in opened)

    def each(step: Callable[[table_io.TableRestore], Any]) -> Callable[[], Any]:
        return lambda: [step(restore) for restore in table_restores]

    on_all_ranks("comparing", compare)
    plan = plans[0]
    wishes = on_all_ranks("memory", each(table_io.TableRestore.must_read_twice))
    for restore, *reads_twice in zip(table_restores, *wishes):
        restore.reads_twice = any(reads_twice)
    if any(restore.reads_twice for restore in table_restores):
        on_all_ranks("verifying", each(table_io.TableRestore.verify))
    values: dict[str, np.ndarray] = {}

    def read() -> None:
        each(table_io.TableRestore.read)()
        values.update(_read_values(plan))

    try:
        on_all_ranks("reading", read)
    except BaseException:
        each(table_io.TableRestore.undo)()
        raise

    def assign() -> None:
        each(table_io.TableRestore.assign)()
        _assign(session, plan, values)

    on_all_ranks("assigning", assign)
    for source in plan.sources:
        tables = dynamic_tables([shard for shard, _ in source.pairs])
        restores.finish_tables(on_all_ranks, session, source.prefix, tables)
    if collectives.rank() == 0:
        print(plan, file=sys.stderr, flush=True)


def _agreed_prefixes(session: Any, sources: Sequence[WarmStart]) -> list[str]:
    """Returns the checkpoints' prefixes as rank 0 finds them; all ranks must name the same."""
    paths = [os.fspath(source.path) for source in sources]

    def find() -> list[str]:
        found = []
        for path in paths if collectives.rank() == 0 else []:
            if tf.io.gfile.isdir(path):
                latest = checkpoint_management.latest_checkpoint(path)
                if latest is None:
                    raise ValueError(f"scope(warm_start=…): there is no checkpoint in '{path}'.")
                path = latest
            base, number = split(path)
            number = (
                newest(base) if number is None and tf.io.gfile.exists(f"{base}.index") else number
            )
            found.append(increment_prefix(base, number) if number else base)
        return found

    named = barrier.exchange(session, "scope(warm_start=…)", {"paths": paths})
    for rank, message in enumerate(named):
        if message["paths"] != named[0]["paths"]:
            raise RankError(
                f"scope(warm_start=…) names {named[0]['paths']} on rank 0, {message['paths']} on "
                f"rank {rank}. Every rank must name the same."
            )
    doing = "scope(warm_start=…): looking for checkpoints"
    prefixes: list[str] = barrier.run_on_all_ranks(session, doing, find)[0]
    return prefixes


def make_plan(graph: tf.Graph, sources: list[SourceCheckpoint]) -> StartPlan:
    """Decides which variables of a graph start from which checkpoint.

    Raises:
        ValueError: a source has no variable of the graph.
        tf.errors.InvalidArgumentError: a variable doesn't fit.
    """
    plan = StartPlan(sources)
    problems = [compatibility.Problems(source.chain.last) for source in sources]
    by_name = variables_by_name(graph.get_collection(tf.GraphKeys.GLOBAL_VARIABLES))
    shards = find_shards({n: v for n, v in by_name.items() if isinstance(v, variables.Variable)})
    source_of: dict[str, int] = {}
    for shard in sorted(shards, key=lambda shard: shard.slot_of is not None):
        number = _source_of_shard(shard, sources, source_of)
        if number is None:
            (plan.fresh if shard.slot_of is None else plan.fresh_slots).append(shard.name)
            continue
        source, stored = sources[number], sources[number].find(shard.name)
        assert stored is not None
        unfit = compatibility.difference(shard, stored)
        if unfit:
            problems[number].add_unfit(unfit)
        source_of[shard.name] = number
        source.pairs.append((shard, stored))
        source.taken.add(stored.name)
    step = tf.train.get_global_step(graph)
    others = by_name.keys() - {shard.name for shard in shards}
    for name in sorted(others - ({step.op.name} if step is not None else set())):
        is_slot = compatibility.is_optimizers(name, by_name) and not name.endswith(f"/{AVERAGE}")
        number = _source_of_variable(name, is_slot, sources)
        if number is None:
            (plan.fresh_slots if is_slot else plan.fresh).append(name)
            owner, _, last = name.rpartition("/")
            if last == AVERAGE and owner in others:
                plan.averages[name] = owner
            continue
        source = sources[number]
        _check(source, name, by_name[name], problems[number])
        source.values[name] = by_name[name]
        source.taken.add(source.old_names[name])
    for number, found in enumerate(problems):
        found.check()
        if not sources[number].taken:
            raise ValueError(
                f"scope(warm_start=…): no variable of the graph starts from "
                f"'{sources[number].prefix}'{_why_none(sources, number, sorted(by_name))}"
            )
    return plan


def _why_none(sources: Sequence[SourceCheckpoint], number: int, names: Sequence[str]) -> str:
    """Says why nothing starts from a source; `names` are those of the graph's variables."""
    source, earlier = sources[number], list[str]()
    covered = set[str]()
    for other in sources[:number]:
        here = {*(shard.name for shard, _ in other.pairs), *other.values} & source.old_names.keys()
        covered |= here
        earlier += [f"'{other.prefix}'"] if here else []
    if covered:
        return (
            f": all that it has for the graph ({_listed(sorted(covered))}) starts from "
            f"{', '.join(earlier)}, which comes before it in the list. Take it out, put it before, "
            "or leave names out there: WarmStart(path, names={'name there': None})."
        )
    return (
        f". It has {_listed(source.left_over())}; the graph has {_listed(names)}. "
        "WarmStart(path, names={'there': 'here'}) renames."
    )


def _source_of_shard(
    shard: Shard, sources: Sequence[SourceCheckpoint], source_of: dict[str, int]
) -> int | None:
    """Returns the number of the checkpoint from which a table or slot starts.

    A slot starts from its table's checkpoint, if at all. So does what a policy keeps, except for
    the steps of last uses, which belong to another job's count.
    """
    if shard.slot_of is None:
        return next((i for i, s in enumerate(sources) if s.find(shard.name) is not None), None)
    number = source_of.get(shard.slot_of)
    if number is None or sources[number].find(shard.name) is None:
        return None
    if shard.may_be_missing:
        return None if shard.variable is getattr(shard.table, "last_used", None) else number
    return number if sources[number].slots else None


def _source_of_variable(
    name: str, is_slot: bool, sources: Sequence[SourceCheckpoint]
) -> int | None:
    """Returns the number of the checkpoint from which an ordinary variable starts."""
    for number, source in enumerate(sources):
        if name in source.old_names and (source.slots or not is_slot):
            return number
    return None


def _check(
    source: SourceCheckpoint, name: str, variable: Any, problems: compatibility.Problems
) -> None:
    """Notes what prevents an ordinary variable from taking its value in a checkpoint."""
    old = source.old_names[name]
    there = f"'{name}'" + (f" (there '{old}')" if old != name else "")
    parts = variable if isinstance(variable, list) else [variable]
    if not all(hasattr(part, "initializer") and hasattr(part, "dtype") for part in parts):
        problems.add_unfit(f"{there} is no variable here, and can't start from a checkpoint")
        return
    stored = source.chain.base.layout.tables.get(old)
    if stored is not None and stored.kind != STATIC:
        problems.add_unfit(
            f"{there} is a dynamic table in the checkpoint, an ordinary variable here"
        )
        return
    if stored is None:
        dtype, shape = source.chain.last.entries[old]
    else:
        dtype, shape = tf.as_dtype(stored.dtype), (stored.count, stored.dim)
    info = getattr(parts[0], "_save_slice_info", None)
    here = list(info.full_shape) if info is not None else parts[0].shape.as_list()
    if here != list(shape) or parts[0].dtype.base_dtype != tf.as_dtype(dtype):
        problems.add_unfit(
            f"{there} is {parts[0].dtype.base_dtype.name} {here} here, {tf.as_dtype(dtype).name} "
            f"{list(shape)} in the checkpoint; names={{'{old}': None}} leaves it out"
        )


def _read_values(plan: StartPlan) -> dict[str, np.ndarray]:
    values = {}
    for source in plan.sources:
        for name in source.values:
            old = source.old_names[name]
            stored = source.chain.base.layout.tables.get(old)
            values[name] = (
                source.chain.last.read_whole(old)
                if stored is None
                else merged_reader.read_whole(source.chain, stored)
            )
    return values


def _assign(session: Any, plan: StartPlan, values: dict[str, np.ndarray]) -> None:
    """Gives ordinary variables their values, with their own initializers."""
    starting = {n: v for source in plan.sources for n, v in source.values.items()}
    by_name = variables_by_name(session.graph.get_collection(tf.GraphKeys.GLOBAL_VARIABLES))
    for average, owner in plan.averages.items():
        if owner in values:
            starting[average], values[average] = by_name[average], values[owner]
    for name, variable in starting.items():
        restores.assign_whole(session, variable, values[name])
