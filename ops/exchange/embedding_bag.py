"""Computes a rank's side of a group's exchange: many lookups in a few compiled operations.

Words: N ranks. T tables. S *sections*: messages are ordered by section; each belongs to one table.
M *members*: lookups. One row vector comes back for each *bag*. In an unpooled section a bag is a
distinct key, which all unpooled members of its table share. In a pooled section, which serves one
member, a bag holds the keys that one sample has on one owner.

    ids ──request──► message ══keys══► respond ──► rows of the shard ──gather──► flat ══rows══►
    flat ──pool──► one tensor a member
    flat ──pool──► one tensor a member

`message` is int64 words, `splits[r]` of them for rank r: for each section (bags, keys); then for
each section its keys; if it is pooled, the lengths of its bags (int32, two to a word); if it is
weighted, the keys' weights (float32, two to a word); if it is unpooled and its table counts keys,
how often each was asked for (int32, two to a word). `flat` is float32: for each rank, for each
section, one row per bag; positions are element offsets into it. All of it is deterministic: keys
are ordered by first appearance, whatever the number of threads.

The library is compiled against one TensorFlow (see setup.py). On a GPU, kernels replace it
(`ops/gpu/tensorflow_binding.py`). Rows are float32, keys int64; no count of elements reaches 2**31.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import tensorflow.compat.v1 as tf

from collective.ops import native_library
from collective.ops.exchange import embedding_bag_gradients  # noqa: F401 (registers gradients)
from collective.ops.exchange.dispatch import launch_kernels, operations
from collective.ops.exchange.shard_gradients import scaled  # noqa: F401 (part of this interface)
from collective.ops.native_library import missing  # noqa: F401 (part of this interface)
from collective.ops.placement import DYNAMIC, STATIC  # noqa: F401 (part of this interface)

ROWS, SUM, MEAN, SQRTN = range(4)  # combiners


@dataclasses.dataclass(frozen=True)
class Section:
    """Describes what one table sends and receives for its unpooled members, or one pooled member.

    Attributes:
        table: the table's number among the T.
        dim: D.
        pooled: whether the owner sums the rows of a bag.
        weighted: whether each key has a weight (pooled only).
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
    """Describes one lookup.

    Attributes:
        section: the number of the section in which its keys travel.
        dim: D.
        combiner: ROWS for one row an id; SUM, MEAN or SQRTN for one row a sample.
        weighted: whether each id has a weight.
        max_norm: the L2 norm to which each row is clipped first; 0 for none.
    """

    section: int
    dim: int
    combiner: int = ROWS
    weighted: bool = False
    max_norm: float = 0.0


class Request(NamedTuple):
    """Holds a rank's requests to its peers.

    Attributes:
        message: [X] int64, the words for rank 0, then rank 1, …
        splits: [N] int32, the number of words for each rank.
        row_splits: [N] int32, the number of elements of `flat` that come back from each rank.
        positions: M times int32: for an unpooled member [K], the position of each id's row in
            `flat`; for a pooled one [B], the position of each of its bags, bags of one sample
            together.
        samples: for each pooled member [B] int64, the sample of each bag, ascending.
        scales: for each pooled member [B] float32, the factor of each bag's row: 1 for SUM, 1/n or
            1/sum of weights for MEAN, 1/sqrt(n) or 1/sqrt(sum of squared weights) for SQRTN; 0 if
            that sum is 0.
        own_samples, own_weights: samples and weights of the members that the rank itself pools, as
            given, in the memory where `pool` takes them.
        own_ids: the ids of all members in that memory, if that was wanted.
        counts: empty on a CPU. On a GPU [N · S], how many bags of each section come back from each
            rank; there, positions count the rows of `flat`, whatever their sections. And [M], how
            many samples each member has, 0 if the request has none of its samples. Both are in the
            host's memory.
    """

    message: tf.Tensor
    splits: tf.Tensor
    row_splits: tf.Tensor
    positions: list[tf.Tensor]
    samples: list[tf.Tensor]
    scales: list[tf.Tensor]
    own_samples: list[tf.Tensor]
    own_weights: list[tf.Tensor]
    own_ids: Sequence[tf.Tensor] = ()
    counts: Sequence[tf.Tensor] = ()


class Pooling(NamedTuple):
    """Says how `pool` computes the members' results from the rows that come back.

    Attributes:
        samples, weights, members: as in `pool`.
    """

    samples: Sequence[tf.Tensor]
    weights: Sequence[tf.Tensor]
    members: Sequence[BagMember]


class Response(NamedTuple):
    """Says what to send back for the peers' requests.

    Attributes:
        keys: T times int64 [R], in the order of the ranks, then sections: local rows for a static
            table, keys for a dynamic one.
        row_splits: [N] int32, the number of elements of rows for each rank.
        counts: for each table that counts keys int64 [R], how often each key was asked for.
        headers: empty on a CPU. On a GPU [2 N · S] int64 in the host's memory, bags and keys of
            each section of each rank, which other operations need to know.
    """

    keys: list[tf.Tensor]
    row_splits: tf.Tensor
    counts: Sequence[tf.Tensor] = ()
    headers: Sequence[tf.Tensor] = ()


def bounds(ids: Sequence[tf.Tensor]) -> tf.Tensor:
    """Returns the smallest and the largest of each of the int64 `ids`, [M, 2] int64.

    Without ids these are int64's largest and smallest. The host computes them, wherever tables are:
    ids come from there, and the gate needs to know before anything is sent.
    """
    return native_library.on_host().collective_bounds(ids)


def mismatches(
    ids: Sequence[tf.Tensor],
    samples: Sequence[tf.Tensor],
    weights: Sequence[tf.Tensor],
    weighted: Sequence[int],
) -> tf.Tensor:
    """Returns the mismatches in the inputs of P combined lookups, W weighted: [2 P + W] int64.

    All numbers are 0 if nothing is wrong. Each lookup has two: the number of its samples minus that
    of its ids, and the number of samples that are smaller than the one before (the first: than 0).
    Then each of the weights has one: their number minus that of the ids. The host computes them,
    like `bounds`.

    Args:
        ids: for each lookup int64.
        samples: for each lookup int64, the sample of each id.
        weights: W times float32.
        weighted: the places of the lookups to which they belong.
    """
    return native_library.on_host().collective_mismatches(
        ids, samples, weights, weighted=list(weighted)
    )


def request(
    ids: Sequence[tf.Tensor],
    samples: Sequence[tf.Tensor],
    weights: Sequence[tf.Tensor],
    members: Sequence[BagMember],
    sections: Sequence[Section],
    kinds: Sequence[int],
    ranks: int,
    counted: Sequence[bool] = (),
    hosts: int = 1,
    own_samples: Sequence[tf.Tensor | None] = (),
    own_weights: Sequence[tf.Tensor] = (),
    own_ids: bool = False,
) -> Request:
    """De-duplicates keys by section, orders them by owner, and says where their rows will be.

    Args:
        ids: for each member [K] int64.
        samples: for each pooled member [K] int64, ascending, the sample of each id.
        weights: for each weighted pooled member [K] float32.
        members, sections, kinds: M, S and T of them.
        ranks: N.
        counted: T of them, True for tables that count keys; empty if there is no such table.
        hosts: H. With more than one host, all with L ranks, the words for rank h L + l are at place
            l H + h, and so are its split and its rows: ordered by the rank's number on its host.
        own_samples: for each member [K] int64, ascending, the sample of each id, if the asking rank
            pools it itself (by `pool`); else None. Only operations that launch kernels need them:
            they say how many samples there are, and are copied to the device with everything else.
        own_weights: for any of these, [K] float32.
        own_ids: whether `ids` are results, too, for `pool`; only of operations that launch kernels.
    """
    own = {m: x for m, x in enumerate(own_samples) if x is not None}
    given = (list(own.values()), list(own_weights)) if launch_kernels() else ([], [])
    made = Request(
        *operations().collective_ask(
            ids,
            samples,
            weights,
            *given,
            ranks=ranks,
            member_sections=[m.section for m in members],
            combiners=[m.combiner for m in members],
            kinds=[kinds[s.table] for s in sections],
            dims=[s.dim for s in sections],
            pooled=[s.pooled for s in sections],
            weighted=[s.weighted for s in sections],
            **({"counted": [counted[s.table] for s in sections]} if any(counted) else {}),
            **({"hosts": hosts} if hosts > 1 else {}),
            **({"own": list(own)} if own and launch_kernels() else {}),
            **({"uploaded_ids": True} if own_ids else {}),
        )
    )
    if launch_kernels():
        return made
    return made._replace(own_samples=list(own.values()), own_weights=list(own_weights))


def layout_attributes(
    sections: Sequence[Section], kinds: Sequence[int], ranks: int, counted: Sequence[bool] = ()
) -> dict[str, Any]:
    """Returns the attributes that tell operations the layout of messages."""
    # The kernels of devices, where no table counts keys, don't know this attribute.
    layout = {"counted": list(counted)} if any(counted) else {}
    return {
        **layout,
        "ranks": ranks,
        "section_tables": [s.table for s in sections],
        "kinds": list(kinds),
        "dims": [s.dim for s in sections],
        "pooled": [s.pooled for s in sections],
        "weighted": [s.weighted for s in sections],
    }


def respond(
    message: tf.Tensor,
    splits: tf.Tensor,
    sections: Sequence[Section],
    kinds: Sequence[int],
    ranks: int,
    counted: Sequence[bool] = (),
) -> Response:
    """Reads the ranks' requests: `message` [Y] int64, `splits[r]` words of it from rank r.

    A malformed message makes the run fail with `InvalidArgumentError`. For `counted` see `request`.
    """
    outputs = {"C": sum(counted)} if any(counted) else {}
    return Response(
        *operations().collective_hear(
            message,
            splits,
            T=len(kinds),
            **outputs,
            **layout_attributes(sections, kinds, ranks, counted),
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
    counted: Sequence[bool] = (),
    headers: Sequence[tf.Tensor] = (),
    unread: bool = False,
) -> tf.Tensor:
    """Returns for each rank and section one row per bag: [E] float32.

    Shards are read in place. The gradient for each handle is `IndexedSlices` of distinct rows,
    multiplied by `gradient_scale()`.

    Args:
        handles: for each table the resource handle of its shard [V, D].
        rows: for each table [R] int64, the local rows of the keys that `respond` returned; for a
            table with admission, the result of `collective.ops.rows.dynamic_rows.admit`.
        message, splits: the received message.
        sections, kinds, ranks: as for `respond`.
        shapes: for each table the shape of its shard, as far as it is known.
        counted: as for `respond`.
        headers: the headers of the response.
        unread: nobody reads the rows, since `pool` takes them from `handles` itself; they are [0],
            and only stand for what their gradient is of. Only for operations that launch kernels.
    """
    return operations().collective_gather_rows(
        handles,
        rows,
        message,
        splits,
        headers,
        max_norms=[s.max_norm for s in sections],
        shapes=shapes,
        **layout_attributes(sections, kinds, ranks, counted),
        **({"unread": True} if unread else {}),
    )


def pool(
    rows: tf.Tensor,
    positions: Sequence[tf.Tensor],
    samples: Sequence[tf.Tensor],
    weights: Sequence[tf.Tensor],
    members: Sequence[BagMember],
    counts: Sequence[tf.Tensor] = (),
    early: Sequence[tf.Tensor] = (),
    handles: Sequence[tf.Tensor] = (),
    ids: Sequence[tf.Tensor] = (),
) -> list[tf.Tensor]:
    """Returns for each member [K, D] float32, or [last sample + 1, D] if it has a combiner.

    It computes the same as `embedding_lookup_sparse`.

    Args:
        rows: [E] float32, the rows that came back.
        positions: for each member int32, element offsets into `rows`, as `request` returned them.
        samples: for each member with a combiner int64, ascending, the sample of each position.
        weights: for each weighted member float32, the weight of each position.
        members: M of them; members of one section may share rows, members of two sections may not.
        counts: the counts of the request.
        early: a variant, the members that were pooled while rows still arrived; or none.
        handles: for each section the handle of its table, all of whose rows this rank has: they are
            read there, and `rows` aren't. Only for members without weights and norms, and for
            operations that launch kernels.
        ids: with `handles`, for each member the rows of its table, as `request` returned them.
    """
    return list(
        operations().collective_pool(
            rows,
            positions,
            samples,
            weights,
            list(counts),
            list(early),
            list(handles),
            list(ids),
            **lookup_attributes(members),
        )
    )


def lookup_attributes(members: Sequence[BagMember]) -> dict[str, Any]:
    """Returns the attributes that tell operations which members they pool."""
    return {
        "sections": [m.section for m in members],
        "dims": [m.dim for m in members],
        "combiners": [m.combiner for m in members],
        "weighted": [m.weighted for m in members],
        "max_norms": [m.max_norm for m in members],
    }
