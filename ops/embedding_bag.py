"""What a rank computes around a group's exchange: many lookups on many tables, by a few compiled
operations.

Words: N ranks. T tables. S *sections*: what travels is ordered by section; each is of one table. M
*members*: lookups. A *bag* is what one row vector comes back for: of an unpooled section a distinct
key, which all unpooled members of its table share; of a pooled section, which serves one member,
the keys that one sample has on one owner.

    ids ──ask──► message ══keys══► hear ──► rows of the shard ──gather──► flat ══rows══► flat
    ──pool──► one tensor a member

`message` is int64 words, `splits[r]` of them for rank r: for each section (bags, keys); then for
each section its keys, if it's pooled the lengths of its bags (int32, two to a word), if it is
weighted the keys' weights (float32, two to a word). `flat` is float32: for each rank, for each
section, one row a bag; positions are element offsets into it. All of it is deterministic: keys are
ordered by first appearance, whatever the number of threads.

The library is compiled against one TensorFlow (see setup.py). On a GPU, kernels stand in for it
(`ops/gpu/binding.py`), whose messages look a little different (`ops/gpu/wire.py`). Rows are
float32, keys int64; no count of elements reaches 2**31.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import tensorflow.compat.v1 as tf

from collective.ops import embedding_bag_gradients  # noqa: F401 (registers them)
from collective.ops.dispatch import operations
from collective.ops.native_library import missing  # noqa: F401 (for those who ask first)
from collective.ops.shard_gradients import scaled  # noqa: F401 (for those who call gather)

ROWS, SUM, MEAN, SQRTN = range(4)  # combiners
STATIC, DYNAMIC = range(2)  # kinds of tables


@dataclasses.dataclass(frozen=True)
class Section:
    """What one table sends and receives for its unpooled members, or for one pooled member.

    Attributes:
        table: which of the T tables.
        dim: D.
        pooled: the owner sums the rows of a bag.
        weighted: with a weight for each key (pooled only).
        max_norm: the L2 norm to which the owner clips each row before it sums them (pooled only); 0
            for none.
    """

    table: int
    dim: int
    pooled: bool = False
    weighted: bool = False
    max_norm: float = 0.0


@dataclasses.dataclass(frozen=True)
class BagMember:
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
    max_norm: float = 0.0


class Request(NamedTuple):
    """What a rank asks for.

    Attributes:
        message: [X] int64, the words for rank 0, then rank 1, …
        splits: [N] int32, how many words are for each rank.
        row_splits: [N] int32, how many elements of `flat` come back from each.
        positions: M times int32: of an unpooled member [K], where the row of each id stands in
            `flat`; of a pooled one [B], where each of its bags does, those of one sample together.
        samples: for each pooled member [B] int64, the sample of each bag, ascending.
        scales: for each pooled member [B] float32, what the row of each bag is multiplied by: 1 for
            SUM, 1/n or 1/sum of weights for MEAN, 1/sqrt(n) or 1/sqrt(sum of squared weights) for
            SQRTN; 0 where that sum is 0.
        counts: nothing on a CPU. On a GPU [N · S], how many bags of each section come back from
            each rank; there, positions number the rows of `flat` through, whatever their sections.
    """

    message: tf.Tensor
    splits: tf.Tensor
    row_splits: tf.Tensor
    positions: list[tf.Tensor]
    samples: list[tf.Tensor]
    scales: list[tf.Tensor]
    counts: Sequence[tf.Tensor] = ()


class Response(NamedTuple):
    """What the ranks want of this one.

    Attributes:
        keys: T times int64 [R], in the order of the ranks, then sections: of a static table local
            rows, of a dynamic one keys.
        row_splits: [N] int32, how many elements of rows go to each rank.
    """

    keys: list[tf.Tensor]
    row_splits: tf.Tensor


def bounds(ids: Sequence[tf.Tensor]) -> tf.Tensor:
    """[M, 2] int64, the smallest and the largest of each of the int64 `ids`; int64's largest and
    smallest for no id.
    """
    return operations().collective_bounds(ids)


def mismatches(
    ids: Sequence[tf.Tensor],
    samples: Sequence[tf.Tensor],
    weights: Sequence[tf.Tensor],
    weighted: Sequence[int],
) -> tf.Tensor:
    """What is wrong with P lookups whose rows are combined, W of them weighted: [2 P + W] int64,
    all 0 if nothing is.

    For each lookup by how many it has more samples than ids, and how many samples are smaller than
    the one before (the first: than 0); then for each of the weights by how many they are more than
    the ids.

    Args:
        ids: for each lookup int64.
        samples: for each lookup int64, the sample of each id.
        weights: W times float32.
        weighted: the places of the lookups that they belong to.
    """
    return operations().collective_mismatches(ids, samples, weights, weighted=list(weighted))


def ask(
    ids: Sequence[tf.Tensor],
    samples: Sequence[tf.Tensor],
    weights: Sequence[tf.Tensor],
    members: Sequence[BagMember],
    sections: Sequence[Section],
    kinds: Sequence[int],
    ranks: int,
) -> Request:
    """De-duplicates keys by section, orders them by owner, and says where their rows will be found.

    Args:
        ids: for each member [K] int64.
        samples: for each pooled member [K] int64, ascending, the sample of each id.
        weights: for each weighted pooled member [K] float32.
        members, sections, kinds: M, S and T of them.
        ranks: N.
    """
    return Request(
        *operations().collective_ask(
            ids,
            samples,
            weights,
            ranks=ranks,
            member_sections=[m.section for m in members],
            combiners=[m.combiner for m in members],
            kinds=[kinds[s.table] for s in sections],
            dims=[s.dim for s in sections],
            pooled=[s.pooled for s in sections],
            weighted=[s.weighted for s in sections],
        )
    )


def _layout(sections: Sequence[Section], kinds: Sequence[int], ranks: int) -> dict[str, Any]:
    return {
        "ranks": ranks,
        "section_tables": [s.table for s in sections],
        "kinds": list(kinds),
        "dims": [s.dim for s in sections],
        "pooled": [s.pooled for s in sections],
        "weighted": [s.weighted for s in sections],
    }


def hear(
    message: tf.Tensor,
    splits: tf.Tensor,
    sections: Sequence[Section],
    kinds: Sequence[int],
    ranks: int,
) -> Response:
    """Reads what the ranks ask for: `message` [Y] int64, `splits[r]` words of it from rank r.

    A malformed message is an `InvalidArgumentError` of the run.
    """
    return Response(
        *operations().collective_hear(
            message, splits, T=len(kinds), **_layout(sections, kinds, ranks)
        )
    )


def gather(
    handles: Sequence[tf.Tensor],
    rows: Sequence[tf.Tensor],
    message: tf.Tensor,
    splits: tf.Tensor,
    sections: Sequence[Section],
    kinds: Sequence[int],
    ranks: int,
    shapes: Sequence[Any],
) -> tf.Tensor:
    """[E] float32: for each rank, for each section, one row a bag. Shards are read in place.

    Its gradient for each handle is `IndexedSlices` of distinct rows, multiplied by
    `gradient_scale()`.

    Args:
        handles: for each table the resource handle of its shard [V, D].
        rows: for each table [R] int64, the local rows of what `hear` returned.
        message, splits: what was received.
        sections, kinds, ranks: as for `hear`.
        shapes: for each table the shape of its shard, as far as it is known.
    """
    return operations().collective_gather_rows(
        handles,
        rows,
        message,
        splits,
        max_norms=[s.max_norm for s in sections],
        shapes=shapes,
        **_layout(sections, kinds, ranks),
    )


def pool(
    rows: tf.Tensor,
    positions: Sequence[tf.Tensor],
    samples: Sequence[tf.Tensor],
    weights: Sequence[tf.Tensor],
    members: Sequence[BagMember],
    counts: Sequence[tf.Tensor] = (),
) -> list[tf.Tensor]:
    """For each member [K, D] float32, or [last sample + 1, D] if it has a combiner: what
    `embedding_lookup_sparse` computes.

    Args:
        rows: [E] float32, what came back.
        positions: for each member int32, element offsets into `rows`, as `ask` returned them.
        samples: for each member with a combiner int64, ascending, the sample of each position.
        weights: for each weighted member float32, the weight of each position.
        members: M of them; members of one section may share rows, those of two sections may not.
        counts: what `ask` returned.
    """
    return list(
        operations().collective_pool(
            rows, positions, samples, weights, *counts, **_lookups(members)
        )
    )


def _lookups(members: Sequence[BagMember]) -> dict[str, Any]:
    return {
        "sections": [m.section for m in members],
        "dims": [m.dim for m in members],
        "combiners": [m.combiner for m in members],
        "weighted": [m.weighted for m in members],
        "max_norms": [m.max_norm for m in members],
    }
