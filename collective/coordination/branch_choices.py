"""Finds the branches of a session's run in which ranks exchange something: all take the same ones.

A rank that takes such a branch alone would wait in it for ever. Ranks compare what they choose
before the run's first collective, where what decides is known by then:

    tf.cond, tf.case    whether this rank comes to the collective inside
    … inside another    the same, as far as what decides is known outside of both; else whether
                        this rank comes to the inner one
    … inside a loop     nothing; of branches around loops, whether this rank comes to the loop

What depends on rows, or on anything else that ranks exchange, is known too late to be compared.
"""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import tensorflow.compat.v1 as tf

from collective.ops.communication.gate import GraphGates
from collective.ops.graph import graph_analysis

BRANCHES = frozenset({"If", "StatelessIf", "Case", "StatelessCase"})
# So many choices are told apart.
BITS = 62
_CHOICE, _BRANCH = "choice ", " by the branch "
# The name of a branch for people; what decides about it, None if that isn't known outside of
# branches; and the index with which it is taken.
_Condition = tuple[str, "tf.Tensor | None", int]


@dataclasses.dataclass(frozen=True)
class Choice:
    """Says when a run comes to a collective in a branch.

    Attributes:
        branch: the name of the branch, for people.
        conditions: pairs (what decides, its value): all of them must hold.
    """

    branch: str
    conditions: tuple[tuple[tf.Tensor, int], ...]

    def is_taken(self) -> tf.Tensor:
        """Returns an int64 scalar: 1 if this rank comes to the collective, else 0."""
        holds = [tf.equal(_index(x), value) for x, value in self.conditions]
        return tf.cast(tf.reduce_all(tf.stack(holds)), tf.int64)


def choices_of(operations: Iterable[tf.Operation], gates: GraphGates) -> tuple[Choice, ...]:
    """Returns the choices that ranks can compare in a run that executes `operations`.

    Args:
        operations: those of the run.
        gates: the graph's.

    Returns:
        Each choice once, in an order that is the same on all ranks.
    """
    found: dict[tuple[tuple[str, int], ...], Choice] = {}
    may_exchange = [op for op in operations if _may_exchange(op.type)]
    # A gradient's branch has a longer name than the script's own.
    by_name = sorted(may_exchange, key=lambda op: (len(op.name), str(op.name)))
    for way in _ways(by_name, (), None):
        known = list(itertools.takewhile(lambda each: _is_known(each[1], gates), way))
        if known:
            conditions = tuple((x, value) for _, x, value in known if x is not None)
            key = tuple((str(x.name), value) for x, value in conditions)
            found.setdefault(key, Choice(known[-1][0], conditions))
    return tuple(found.values())


def bodies_of(op: tf.Operation) -> list[Any]:
    """Returns the graphs of a branch of version 2, by its index; [] if the graph was imported."""
    names = ["_false_graph", "_true_graph"]
    if "Case" in op.type:
        names = [f"_branch_graph_{i}" for i in range(len(op.get_attr("branches")))]
    return [getattr(op, name) for name in names if hasattr(op, name)]


def descriptions(choices: Sequence[Choice]) -> list[str]:
    """Returns what ranks say of choices when they describe a run: see `differing`."""
    return [f"{_CHOICE}{i:06}{_BRANCH}{choice.branch}" for i, choice in enumerate(choices)]


def are_among(described: Iterable[str]) -> bool:
    """Tells whether there are `descriptions` of choices among some texts."""
    return any(text.startswith(_CHOICE) for text in described)


def chosen(choices: Sequence[Choice]) -> tf.Tensor | None:
    """Returns an int64 scalar that tells which choices this rank takes; None for no choice.

    It has a bit for each choice; if these are too many, a random number for each is added up.
    """
    if not choices:
        return None
    taken = tf.stack([choice.is_taken() for choice in choices])
    return tf.reduce_sum(taken * tf.constant(_numbers(len(choices)), tf.int64))


def differing(chosen_by_ranks: Sequence[int], described: Sequence[str]) -> list[str]:
    """Returns the names of the branches that not all ranks take; of all, if there are too many.

    Args:
        chosen_by_ranks: what `chosen` is on each rank.
        described: texts among which are the choices' `descriptions`.
    """
    bits = 0
    for each in chosen_by_ranks:
        bits |= each ^ chosen_by_ranks[0]
    names = [text.partition(_BRANCH)[2] for text in described if text.startswith(_CHOICE)]
    if len(names) > BITS:
        return sorted(set(names))
    return sorted({name for i, name in enumerate(names) if bits >> i & 1})


def _numbers(count: int) -> list[int]:
    """Returns what stands for each of so many choices."""
    if count <= BITS:
        return [1 << i for i in range(count)]
    # Their sum stays within 63 bits.
    random_numbers = random.Random(0)
    return [random_numbers.getrandbits(BITS - count.bit_length()) for _ in range(count)]


def _ways(
    operations: Iterable[tf.Operation],
    around: tuple[_Condition, ...],
    arguments: Mapping[str, tf.Tensor | None] | None,
) -> Iterator[tuple[_Condition, ...]]:
    """Yields the branches around each collective, outermost first.

    Args:
        operations: where collectives are sought.
        around: the branches around them all.
        arguments: in a branch of version 2, the run's tensors by the names of the branch's; None
            outside of any.
    """
    for op in filter(lambda op: _may_exchange(op.type), operations):
        path = (*around, *_contexts(op))
        if graph_analysis.is_collective(op.type):
            yield path
        elif op.type in BRANCHES and (bodies := bodies_of(op)):
            decider, *given = [_origin(x, arguments) for x in op.inputs]
            for i, body in enumerate(bodies):
                inside = (*path, (str(op.name), decider, i))
                passed = {str(x.name): own for x, own in zip(body.inputs, given)}
                yield from _ways(body.get_operations(), inside, passed)
        elif op.type in graph_analysis.CALLS and graph_analysis.has_inside(
            op.graph, op, graph_analysis.is_collective
        ):
            yield path


def _may_exchange(op_type: str) -> bool:
    is_call = op_type in BRANCHES or op_type in graph_analysis.CALLS
    return is_call or graph_analysis.is_collective(op_type)


def _contexts(op: tf.Operation) -> tuple[_Condition, ...]:
    """Returns the branches of version 1 around an operation, outermost first."""
    conditions: list[_Condition] = []
    context = op._get_control_flow_context()
    while context is not None:
        if context.IsWhileContext():
            conditions = []
        else:
            name = str(context.name).removesuffix("/cond_text")
            conditions.insert(0, (name, _origin(context.pred, None), context.branch))
        context = context.outer_context
    return tuple(conditions)


def _origin(x: tf.Tensor, arguments: Mapping[str, tf.Tensor | None] | None) -> tf.Tensor | None:
    """Returns what is passed into a branch as `x`; None if it is computed in a branch or a loop."""
    if arguments is not None:
        while x.op.type == "Identity":
            x = x.op.inputs[0]
        return arguments.get(str(x.name))
    while x.op._get_control_flow_context() is not None and x.op.type in ("Identity", "Switch"):
        x = x.op.inputs[0]
    return x if x.op._get_control_flow_context() is None else None


def _is_known(x: tf.Tensor | None, gates: GraphGates) -> bool:
    return x is not None and gates.level(x.op) == 0


def _index(x: tf.Tensor) -> tf.Tensor:
    """Returns what decides about a branch as the branch's index, an int64 scalar."""
    return tf.cast(x if x.dtype.is_integer else tf.cast(x, tf.bool), tf.int64)
