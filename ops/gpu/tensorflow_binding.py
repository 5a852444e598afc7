"""Binds the kernels to TensorFlow: computes on a GPU what `ops/native` computes on a CPU.

`DeviceOperations` has the operations of the compiled library under their names, with the same
inputs, outputs and attributes. Each launches kernels itself, on TensorFlow's own stream
(`ops/native/gpu/`), except for the one that finds keys of dynamic tables (`row_finders.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow.compat.v1 as tf

from collective.ops import native_library
from collective.ops.gpu import (
    compiled_launches,
    distinct,
    gather,
    occurrences,
    partition,
    pool,
    row_finders,
    sums,
    update,
)
from collective.ops.gpu.memory_bridge import MemoryBridge
from collective.ops.gpu.row_finders import Find
from collective.ops.gpu.sources import Source


class DeviceOperations:
    """The compiled library's operations, carried out by kernels, with the same shapes.

    Args:
        bridge: where they compute.

    Attributes:
        bridge: as above.
    """

    def __init__(self, bridge: MemoryBridge):
        self.bridge = bridge

    def memory(self) -> str:
        """Says how much memory kernels take, for a report."""
        return self.bridge.memory()

    def _built(self, name: str, sources: Sequence[Source], *inputs: Any, **attributes: Any) -> Any:
        """Builds a compiled operation that launches kernels itself, on TensorFlow's own stream.

        Args:
            name: its function in the compiled library.
            sources: the kernels' sources.
            inputs, attributes: the operation's; `ops/native` declares them.
        """
        for source in sources:
            self.bridge.hand_over(source)
        graph, label = tf.get_default_graph(), self.bridge.label
        kind = "".join(word.capitalize() for word in name.split("_"))
        with (
            tf.device(self.bridge.placed),
            graph._kernel_label_map({kind: label} if label else {}),
        ):
            return getattr(native_library.library(), name)(*inputs, **attributes)

    def collective_ask(
        self,
        *inputs: Any,
        own: Sequence[int] = (),
        uploaded_ids: bool = False,
        ranks: int,
        member_sections: Sequence[int],
        combiners: Sequence[int],
        kinds: Sequence[int],
        dims: Sequence[int],
        pooled: Sequence[bool],
        weighted: Sequence[bool],
    ) -> tuple[Any, ...]:
        """Builds a request with a compiled operation. The last output is `counts`: [N · S] of bags
        and [M] of samples; here `kinds` are by section. `own_samples` belong to members `own`; they
        and `own_weights` are outputs, too, in the memory of rows, and so are the ids, if wanted.

        It has no counts of keys and no levels of hosts, which tables on GPUs don't have either.
        """
        bags = [compiled_launches.ASK_BAGS] * any(pooled)
        made: tuple[Any, ...] = self._built(
            "collective_ask",
            [compiled_launches.ASK, distinct.SOURCE, partition.SOURCE, *bags],
            *inputs,
            C=2,
            I=len(member_sections) if uploaded_ids else 0,
            own=list(own),
            ranks=ranks,
            member_sections=member_sections,
            combiners=combiners,
            kinds=kinds,
            dims=dims,
            pooled=pooled,
            weighted=weighted,
        )
        return made

    def collective_hear(self, *inputs: Any, **attributes: Any) -> tuple[Any, ...]:
        """Reads a message by a compiled operation, which also gives its headers."""
        sources = [partition.SOURCE]
        heard: tuple[Any, ...] = self._built("collective_hear", sources, *inputs, H=1, **attributes)
        return heard

    def collective_find_rows(
        self,
        find: Find,
        numbers: Sequence[tf.Tensor],
        handles: Sequence[tf.Tensor],
        keys: Sequence[tf.Tensor],
        insert: tf.Tensor,
        steps: Sequence[tf.Tensor],
    ) -> list[tf.Tensor]:
        """Finds the local rows of keys of T dynamic tables by a Python function.

        Args:
            find: the function, see `row_finders.Find`.
            numbers: T int64 scalars, the numbers of the key maps in this session.
            handles: the variables with the rows, which stay as long as they are written.
            keys: T times [R] int64.
            insert: bool scalar, whether to insert new keys; otherwise they have row 0.
            steps: T int64 scalars, the steps to which an insertion leads; 0 for an insertion that
                doesn't count as a use.
        """
        finder = row_finders.number_of(self.bridge, find)
        inputs = (numbers, handles, keys, insert, steps)
        found: list[tf.Tensor] = self._built("collective_find_rows", [], *inputs, finder=finder)
        return found

    def collective_gather_rows(self, *inputs: Any, **attributes: Any) -> tf.Tensor:
        sources = [gather.SOURCE, *_pooling(attributes)]
        return self._built("collective_gather_rows", sources, *inputs, **attributes)

    def collective_reduce_rows(self, *inputs: Any, **attributes: Any) -> Any:
        sources = [*_SUMS, gather.SOURCE, *_pooling(attributes)]
        return self._built("collective_reduce_rows", sources, *inputs, **attributes)

    def collective_spread_rows(self, *inputs: Any, **attributes: Any) -> tf.Tensor:
        sources = [gather.SOURCE, *_pooling(attributes)]
        return self._built("collective_spread_rows", sources, *inputs, **attributes)

    def collective_pool(self, *inputs: Any, **attributes: Any) -> Any:
        sources = [pool.SOURCE, gather.SOURCE]
        return self._built("collective_pool", sources, *inputs, **attributes)

    def collective_pool_gradient(self, *inputs: Any, **attributes: Any) -> Any:
        sources = [pool.SOURCE, occurrences.SOURCE, partition.SOURCE, sums.SOURCE]
        return self._built("collective_pool_gradient", sources, *inputs, **attributes)

    def collective_sparse_update(
        self, *inputs: Any, bounds: Sequence[float] = (), **attributes: Any
    ) -> tf.Operation:
        """Updates rows of shards and of their slots in place, by one operation for all tables.

        Args:
            inputs: tables, slots: handles of T shards, and the handles of their slots, shard by
                shard; numbers: float32 scalars, new in every step: the learning rate, …; used: T
                int64 scalars: rows 1 to this one exist, or all rows if it is -1 (empty: all rows of
                all tables exist); gradients: T times [K, D] float32; rows: T times [K] int64, each
                at most once.
            bounds: for each table the bound of the elements of rows that have a gradient, after
                the update; infinity for none. Empty: no bounds.
            attributes: `rule`, its name in `ops/native/gpu/rules.h`: 'Adagrad', …
        """
        attributes.update(bounds=list(bounds), on_device=True)
        return self._built("collective_sparse_update", [update.SOURCE], *inputs, **attributes)

    def collective_sparse_reduce_update(
        self, *inputs: Any, bounds: Sequence[float] = (), **attributes: Any
    ) -> tf.Operation:
        """Updates rows by the sums of their gradients, which are never written.

        Args:
            inputs: tables, slots, numbers, used: as for `collective_sparse_update`, of U tables;
                gradient, rows, message, splits, headers: the inputs of `collective_reduce_rows`,
                rows of the U tables only.
            bounds: as for `collective_sparse_update`.
            attributes: `rule`; the layout of the message, `scale`, and `updated`, the numbers of
                the U tables.
        """
        sources = [*_SUMS, update.SOURCE, *_pooling(attributes)]
        attributes.update(bounds=list(bounds), on_device=True)
        return self._built("collective_sparse_reduce_update", sources, *inputs, **attributes)

    def collective_sparse_pool_update(
        self, *inputs: Any, bounds: Sequence[float] = (), **attributes: Any
    ) -> tf.Operation:
        """Updates rows by the sums of the gradients of lookups that one rank pooled, of tables
        whose rows it has. The sums are never written.

        Args:
            inputs: tables, slots, numbers, used: as for `collective_sparse_update`, a table a
                section; local_rows: for each [K] int64, its rows that came back; positions,
                samples, weights, gradients, counts: the inputs of `collective_pool_gradient`.
            bounds: as for `collective_sparse_update`.
            attributes: `rule`; the lookups, `members`, and `scale`.
        """
        sources = [pool.SOURCE, occurrences.SOURCE, partition.SOURCE, sums.SOURCE, update.SOURCE]
        attributes.update(bounds=list(bounds))
        return self._built("collective_sparse_pool_update", sources, *inputs, **attributes)

    def collective_write_rows(
        self, resource: tf.Tensor, indices: tf.Tensor, updates: tf.Tensor
    ) -> tf.Operation:
        """Writes new values into rows of a variable, in place.

        Args:
            resource: the handle of a variable [V, ...] of any numeric type.
            indices: [K] int64 rows, each at most once; rows outside of the variable are ignored.
            updates: [K, ...].
        """
        inputs = (resource, indices, updates)
        return self._built("collective_write_rows", [compiled_launches.WRITE], *inputs)


# Kernels that sum gradients by row.
_SUMS = (distinct.SOURCE, occurrences.SOURCE, partition.SOURCE, sums.SOURCE)


def _pooling(attributes: dict[str, Any]) -> tuple[Source, ...]:
    """Returns the further kernels that an owner needs if sections are pooled."""
    return (compiled_launches.BAGS, pool.SOURCE) if any(attributes["pooled"]) else ()
