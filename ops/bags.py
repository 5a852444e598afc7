"""What a rank computes around a group's exchange on a CPU: many lookups on many tables, by a few compiled operations.

Words: N ranks. T tables. S *sections*: what travels is ordered by section; each is of one table. M *members*: lookups.
A *bag* is what one row vector comes back for: of an unpooled section a distinct key, which all unpooled members of its table
share; of a pooled section, which serves one member, the keys that one sample has on one owner.

    ids ──ask──► message ══keys══► hear ──► rows of the shard ──gather──► flat ══rows══► flat ──pool──► one tensor a member

`message` is int64 words, `splits[r]` of them for rank r: for each section (bags, keys); then for each section its keys, if it's
pooled the lengths of its bags (int32, two to a word), if it is weighted the keys' weights (float32, two to a word). `flat` is
float32: for each rank, for each section, one row a bag; positions are element offsets into it. All of it is deterministic: keys
are ordered by first appearance, whatever the number of threads.

The library is compiled against one TensorFlow (see setup.py). Rows are float32, keys int64; no count of elements reaches 2**31.
"""
from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow.compat.v1 as tf

from collective.ops.compiled import library, missing  # noqa: F401 (missing: for those who ask first)
from collective.ops.slices import gradient_scale, mark_distinct, scaled  # noqa: F401 (scaled: for those who call gather)

ROWS, SUM, MEAN, SQRTN = range(4)       # combiners
STATIC, DYNAMIC = range(2)              # kinds of tables


@dataclasses.dataclass(frozen=True)
class Section:
    """What one table sends and receives for its unpooled members, or for one pooled member.

    Attributes:
        table: which of the T tables.
        dim: D.
        pooled: the owner sums the rows of a bag.
        weighted: with a weight for each key (pooled only).
        max_norm: the L2 norm to which the owner clips each row before it sums them (pooled only); 0 for none.
    """
    table: int
    dim: int
    pooled: bool = False
    weighted: bool = False
    max_norm: float = 0.


@dataclasses.dataclass(frozen=True)
class Member:
    """One lookup.

    Attributes:
        section: which of the S sections its keys travel in.
        dim: D.
        combiner: ROWS for one row an id; SUM, MEAN or SQRTN for one row a sample.
        weighted: with a weight for each id.
        max_norm: the L2 norm to which each row is clipped first; 0 for none.
    """
    section: int
    dim: int
    combiner: int = ROWS
    weighted: bool = False
    max_norm: float = 0.


class Asked(NamedTuple):
    """What a rank asks for.

    Attributes:
        message: [X] int64, the words for rank 0, then rank 1, …
        splits: [N] int32, how many words are for each rank.
        row_splits: [N] int32, how many elements of `flat` come back from each.
        positions: M times int32: of an unpooled member [K], where the row of each id stands in `flat`; of a pooled one [B],
            where each of its bags does, those of one sample together.
        samples: for each pooled member [B] int64, the sample of each bag, ascending.
        scales: for each pooled member [B] float32, what the row of each bag is multiplied by: 1 for SUM, 1/n or
            1/sum of weights for MEAN, 1/sqrt(n) or 1/sqrt(sum of squared weights) for SQRTN; 0 where that sum is 0.
    """
    message: tf.Tensor
    splits: tf.Tensor
    row_splits: tf.Tensor
    positions: list[tf.Tensor]
    samples: list[tf.Tensor]
    scales: list[tf.Tensor]


class Heard(NamedTuple):
    """What the ranks want of this one.

    Attributes:
        keys: T times int64 [R], in the order of the ranks, then sections: of a static table local rows, of a dynamic one keys.
        row_splits: [N] int32, how many elements of rows go to each rank.
    """
    keys: list[tf.Tensor]
    row_splits: tf.Tensor


def bounds(ids: Sequence[tf.Tensor]) -> tf.Tensor:
    """[M, 2] int64, the smallest and the largest of each of the int64 `ids`; int64's largest and smallest for no id."""
    return library().collective_bounds(ids)


def mismatches(ids: Sequence[tf.Tensor], samples: Sequence[tf.Tensor], weights: Sequence[tf.Tensor], weighted: Sequence[int]
               ) -> tf.Tensor:
    """What is wrong with P lookups whose rows are combined, W of them weighted: [2 P + W] int64, all 0 if nothing is.

    For each lookup by how many it has more samples than ids, and how many samples are smaller than the one before (the first:
    than 0); then for each of the weights by how many they are more than the ids.

    Args:
        ids: for each lookup int64.
        samples: for each lookup int64, the sample of each id.
        weights: W times float32.
        weighted: the places of the lookups that they belong to.
    """
    return library().collective_mismatches(ids, samples, weights, weighted=list(weighted))


def ask(ids: Sequence[tf.Tensor], samples: Sequence[tf.Tensor], weights: Sequence[tf.Tensor], members: Sequence[Member],
        sections: Sequence[Section], kinds: Sequence[int], ranks: int) -> Asked:
    """De-duplicates keys by section, orders them by owner, and says where their rows will be found.

    Args:
        ids: for each member [K] int64.
        samples: for each pooled member [K] int64, ascending, the sample of each id.
        weights: for each weighted pooled member [K] float32.
        members, sections, kinds: M, S and T of them.
        ranks: N.
    """
    return Asked(*library().collective_ask(
        ids, samples, weights, ranks=ranks, member_sections=[m.section for m in members],
        combiners=[m.combiner for m in members], kinds=[kinds[s.table] for s in sections], dims=[s.dim for s in sections],
        pooled=[s.pooled for s in sections], weighted=[s.weighted for s in sections]))


def _layout(sections: Sequence[Section], kinds: Sequence[int], ranks: int) -> dict[str, Any]:
    return {'ranks': ranks, 'section_tables': [s.table for s in sections], 'kinds': list(kinds),
            'dims': [s.dim for s in sections], 'pooled': [s.pooled for s in sections],
            'weighted': [s.weighted for s in sections]}


def hear(message: tf.Tensor, splits: tf.Tensor, sections: Sequence[Section], kinds: Sequence[int], ranks: int) -> Heard:
    """Reads what the ranks ask for: `message` [Y] int64, `splits[r]` words of it from rank r.

    A malformed message is an `InvalidArgumentError` of the run.
    """
    return Heard(*library().collective_hear(message, splits, T=len(kinds), **_layout(sections, kinds, ranks)))


def gather(handles: Sequence[tf.Tensor], rows: Sequence[tf.Tensor], message: tf.Tensor, splits: tf.Tensor,
           sections: Sequence[Section], kinds: Sequence[int], ranks: int, shapes: Sequence[Any]) -> tf.Tensor:
    """[E] float32: for each rank, for each section, one row a bag. Shards are read in place.

    Its gradient for each handle is `IndexedSlices` of distinct rows, multiplied by `gradient_scale()`.

    Args:
        handles: for each table the resource handle of its shard [V, D].
        rows: for each table [R] int64, the local rows of what `hear` returned.
        message, splits: what was received.
        sections, kinds, ranks: as for `hear`.
        shapes: for each table the shape of its shard, as far as it is known.
    """
    return library().collective_gather_rows(handles, rows, message, splits, max_norms=[s.max_norm for s in sections],
                                            shapes=shapes, **_layout(sections, kinds, ranks))


def pool(rows: tf.Tensor, positions: Sequence[tf.Tensor], samples: Sequence[tf.Tensor], weights: Sequence[tf.Tensor],
         members: Sequence[Member]) -> list[tf.Tensor]:
    """For each member [K, D] float32, or [last sample + 1, D] if it has a combiner: what `embedding_lookup_sparse` computes.

    Args:
        rows: [E] float32, what came back.
        positions: for each member int32, element offsets into `rows`.
        samples: for each member with a combiner int64, ascending, the sample of each position.
        weights: for each weighted member float32, the weight of each position.
        members: M of them; members of one section may share rows, those of two sections may not.
    """
    return list(library().collective_pool(rows, positions, samples, weights, **_lookups(members)))


def _lookups(members: Sequence[Member]) -> dict[str, Any]:
    return {'sections': [m.section for m in members], 'dims': [m.dim for m in members],
            'combiners': [m.combiner for m in members], 'weighted': [m.weighted for m in members],
            'max_norms': [m.max_norm for m in members]}


# ---- Gradients -------------------------------------------------------------------------------------------------------

for _name in ('CollectiveBounds', 'CollectiveMismatches', 'CollectiveHear'):
    tf.no_gradient(_name)


@tf.RegisterGradient('CollectiveAsk')
def _ask_gradient(op: tf.Operation, *gradients: Any) -> list[Any]:
    """Only weights that the owner multiplies by could have one."""
    raise NotImplementedError(f'{op.name}: the gradient with respect to weights of a lookup that its owner pools is asked for '
                              'after the lookup was built into an exchange; ask for it first, or use scope(grouping=False)')


def _attributes(op: tf.Operation, *names: str) -> dict[str, Any]:
    return {name: op.get_attr(name) for name in names}


_LAYOUT = ('ranks', 'section_tables', 'kinds', 'dims', 'pooled', 'weighted')
_LOOKUPS = ('sections', 'dims', 'combiners', 'weighted', 'max_norms')


@tf.RegisterGradient('CollectiveGatherRows')
def _gather_gradient(op: tf.Operation, gradient: Any) -> list[Any]:
    """`IndexedSlices` of distinct rows for each handle."""
    tables, inputs = op.get_attr('T'), list(op.inputs)
    values, indices, _ = library().collective_reduce_rows(
        tf.convert_to_tensor(gradient), inputs[:tables], inputs[tables:2 * tables], *inputs[2 * tables:],
        scale=gradient_scale(), **_attributes(op, 'max_norms', 'shapes', *_LAYOUT))
    shapes = [tf.TensorShape(shape) for shape in op.get_attr('shapes')]
    slices = [tf.IndexedSlices(v, mark_distinct(i), tf.constant(s.as_list(), tf.int64) if s.is_fully_defined() else None)
              for v, i, s in zip(values, indices, shapes)]
    return [*slices, *[None] * (tables + 2)]


@tf.RegisterGradient('CollectiveReduceRows')
def _reduce_gradient(op: tf.Operation, *gradients: Any) -> list[Any]:
    """Of the values with respect to the gradient that was reduced: linear, but for max_norm."""
    if any(norm > 0 for norm in op.get_attr('max_norms')):
        raise NotImplementedError(f'{op.name}: there is no second derivative of a pooled lookup with max_norm; '
                                  'look the table up without max_norm, or without pooling by the owner')
    tables, inputs = op.get_attr('T'), list(op.inputs)
    spread = library().collective_spread_rows(
        [tf.convert_to_tensor(gradient) for gradient in gradients[:tables]], list(op.outputs[2 * tables:]),
        inputs[1:1 + tables], inputs[1 + tables:1 + 2 * tables], *inputs[1 + 2 * tables:],
        **_attributes(op, 'scale', 'max_norms', 'shapes', *_LAYOUT))
    return [spread, *[None] * (2 * tables + 2)]


@tf.RegisterGradient('CollectiveSpreadRows')
def _spread_gradient(op: tf.Operation, _: Any) -> None:
    raise NotImplementedError(f'{op.name}: there is no third derivative of a lookup')


def _is_zero(gradient: Any) -> bool:
    """Whether it is what TensorFlow puts in place of the gradient of an output that nothing uses."""
    if gradient is None:
        return True
    if isinstance(gradient, tf.IndexedSlices):
        return False
    op = gradient.op
    if op.type not in ('Fill', 'Const'):
        return bool(op.type == 'ZerosLike')
    value = tf.get_static_value(op.inputs[1] if op.type == 'Fill' else gradient)
    return value is not None and not np.any(value)


def _pool_inputs(op: tf.Operation) -> tuple[Any, list[Any], list[Any], list[Any], list[Any]]:
    """Rows, positions, samples, weights and gradients of a CollectivePool or CollectivePoolGradient."""
    inputs, last = list(op.inputs), [1]
    for name in ('M', 'P', 'W'):
        last.append(last[-1] + op.get_attr(name))
    lists = [inputs[first:end] for first, end in zip(last, [*last[1:], len(inputs)])]
    return (inputs[0], *lists)


def _pool_gradient(op: tf.Operation, rows: Any, members: Sequence[int], gradients: Sequence[Any]) -> Any:
    """(flat, weights' gradients) of the pool that `op` is or is the gradient of, by what `members` contribute."""
    _, positions, samples, weights, _ = _pool_inputs(op)
    made = library().collective_pool_gradient(rows, positions, samples, weights, [tf.convert_to_tensor(g) for g in gradients],
                                              members=members, **_attributes(op, *_LOOKUPS))
    graph = made.flat.graph
    if not hasattr(graph, '_collective_pool_gradients'):
        graph._collective_pool_gradients = {}       # for whoever wants to know what an exchange of gradients is about
    graph._collective_pool_gradients[made.flat.op] = tuple(members)
    return made


@tf.RegisterGradient('CollectivePool')
def _gradient_of_pool(op: tf.Operation, *gradients: Any) -> list[Any]:
    real = [(member, gradient) for member, gradient in enumerate(gradients) if not _is_zero(gradient)]
    if not real:
        return [None] * len(op.inputs)
    made = _pool_gradient(op, op.inputs[0], *zip(*real))
    return [made.flat, *[None] * (op.get_attr('M') + op.get_attr('P')), *made.weight_gradients]


@tf.RegisterGradient('CollectivePoolGradient')
def _gradient_of_pool_gradient(op: tf.Operation, of_flat: Any, *of_weights: Any) -> list[Any]:
    """The flat gradient is linear in the gradients and in the weights."""
    members = op.get_attr('members')
    if not all(_is_zero(gradient) for gradient in of_weights):
        raise NotImplementedError(f'{op.name}: there is no derivative of the gradient of lookup weights; stop the gradient at '
                                  'the weights with tf.stop_gradient, or multiply the rows by them yourself')
    if _is_zero(of_flat):
        return [None] * len(op.inputs)
    if any(op.get_attr('max_norms')[member] > 0 for member in members):
        raise NotImplementedError(f'{op.name}: there is no second derivative of a lookup with max_norm; clip the rows yourself')
    of_flat = tf.convert_to_tensor(of_flat)
    _, positions, samples, weights, gradients = _pool_inputs(op)
    pooled = library().collective_pool(of_flat, positions, samples, weights, **_attributes(op, *_LOOKUPS))
    made = _pool_gradient(op, of_flat, members, gradients)
    return [None] * (1 + len(positions) + len(samples)) + list(made.weight_gradients) + [pooled[m] for m in members]
