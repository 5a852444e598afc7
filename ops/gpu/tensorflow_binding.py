"""Binds the kernels to TensorFlow: computes on a GPU what `ops/native` computes on a CPU.

`DeviceOperations` has the operations of the compiled library under their names, with the same
inputs, outputs and attributes. Each launches kernels itself, on TensorFlow's own stream
(`ops/native/gpu/`), except for the one that finds keys of dynamic tables (`row_finders.py`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
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

    @contextlib.contextmanager
    def _launching(self, name: str, *sources: Source) -> Iterator[None]:
        """Makes the compiled operation `name` that is built inside launch kernels of `sources`
        itself, on TensorFlow's own stream.
        """
        for source in sources:
            self.bridge.hand_over(source)
        graph, label = tf.get_default_graph(), self.bridge.label
        with (
            tf.device(self.bridge.placed),
            graph._kernel_label_map({name: label} if label else {}),
        ):
            yield

    def collective_ask(
        self,
        ids: Sequence[tf.Tensor],
        samples: Sequence[tf.Tensor],
        weights: Sequence[tf.Tensor],
        own_samples: Sequence[tf.Tensor],
        own_weights: Sequence[tf.Tensor],
        *,
        own: Sequence[int] = (),
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
        and `own_weights` are outputs, too, in the memory of rows.
        """
        sources = [
            compiled_launches.ASK,
            distinct.SOURCE,
            partition.SOURCE,
            *[compiled_launches.ASK_BAGS] * any(pooled),
        ]
        with self._launching("CollectiveAsk", *sources):
            made: tuple[Any, ...] = native_library.library().collective_ask(
                ids,
                samples,
                weights,
                own_samples,
                own_weights,
                C=2,
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

    def collective_hear(
        self, message: tf.Tensor, splits: tf.Tensor, **attributes: Any
    ) -> tuple[Any, ...]:
        """Reads a message by a compiled operation, which also gives its headers."""
        with self._launching("CollectiveHear", partition.SOURCE):
            return native_library.library().collective_hear(message, splits, H=1, **attributes)

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
        with self._launching("CollectiveFindRows"):
            found: list[tf.Tensor] = native_library.library().collective_find_rows(
                numbers,
                handles,
                keys,
                insert,
                steps,
                finder=row_finders.number_of(self.bridge, find),
            )
        return found

    def collective_gather_rows(
        self,
        handles: Sequence[tf.Tensor],
        rows: Sequence[tf.Tensor],
        message: tf.Tensor,
        splits: tf.Tensor,
        headers: Sequence[tf.Tensor],
        **attributes: Any,
    ) -> tf.Tensor:
        with self._launching("CollectiveGatherRows", gather.SOURCE, *_pooling(attributes)):
            return native_library.library().collective_gather_rows(
                handles, rows, message, splits, headers, **attributes
            )

    def collective_reduce_rows(
        self,
        gradient: tf.Tensor,
        handles: Sequence[tf.Tensor],
        rows: Sequence[tf.Tensor],
        message: tf.Tensor,
        splits: tf.Tensor,
        headers: Sequence[tf.Tensor],
        **attributes: Any,
    ) -> tuple[Any, ...]:
        sources = (*_SUMS, gather.SOURCE, *_pooling(attributes))
        with self._launching("CollectiveReduceRows", *sources):
            made: tuple[Any, ...] = native_library.library().collective_reduce_rows(
                gradient, handles, rows, message, splits, headers, **attributes
            )
        return made

    def collective_spread_rows(
        self,
        values: Sequence[tf.Tensor],
        inverse: Sequence[tf.Tensor],
        handles: Sequence[tf.Tensor],
        rows: Sequence[tf.Tensor],
        message: tf.Tensor,
        splits: tf.Tensor,
        headers: Sequence[tf.Tensor],
        **attributes: Any,
    ) -> tf.Tensor:
        with self._launching("CollectiveSpreadRows", gather.SOURCE, *_pooling(attributes)):
            return native_library.library().collective_spread_rows(
                values, inverse, handles, rows, message, splits, headers, **attributes
            )

    def collective_pool(
        self,
        rows: tf.Tensor,
        positions: Sequence[tf.Tensor],
        samples: Sequence[tf.Tensor],
        weights: Sequence[tf.Tensor],
        counts: Sequence[tf.Tensor],
        early: Sequence[tf.Tensor],
        **attributes: Any,
    ) -> list[tf.Tensor]:
        with self._launching("CollectivePool", pool.SOURCE):
            made: list[tf.Tensor] = native_library.library().collective_pool(
                rows, positions, samples, weights, counts, early, **attributes
            )
        return made

    def collective_pool_gradient(
        self,
        rows: tf.Tensor,
        positions: Sequence[tf.Tensor],
        samples: Sequence[tf.Tensor],
        weights: Sequence[tf.Tensor],
        gradients: Sequence[tf.Tensor],
        counts: Sequence[tf.Tensor],
        **attributes: Any,
    ) -> Any:
        sources = (pool.SOURCE, occurrences.SOURCE, partition.SOURCE, sums.SOURCE)
        with self._launching("CollectivePoolGradient", *sources):
            return native_library.library().collective_pool_gradient(
                rows,
                positions,
                samples,
                weights,
                gradients,
                counts,
                **attributes,
            )

    def collective_sparse_update(
        self,
        tables: Sequence[tf.Tensor],
        slots: Sequence[tf.Tensor],
        numbers: Sequence[tf.Tensor],
        used: Sequence[tf.Tensor],
        gradients: Sequence[tf.Tensor],
        rows: Sequence[tf.Tensor],
        *,
        rule: str,
        bounds: Sequence[float] = (),
    ) -> tf.Operation:
        """Updates rows of shards and of their slots in place, by one operation for all tables.

        Args:
            tables, slots: handles of T shards, and the handles of their slots, shard by shard.
            numbers: float32 scalars, new in every step: the learning rate, …
            used: T int64 scalars: rows 1 to this one exist, or all rows if it is -1. Empty: all
                rows of all tables exist.
            gradients: T times [K, D] float32.
            rows: T times [K] int64, each at most once.
            rule: its name in `ops/native/gpu/rules.h`: 'Adagrad', …
            bounds: for each table the bound of the elements of rows that have a gradient, after
                the update; infinity for none. Empty: no bounds.
        """
        with self._launching("CollectiveSparseUpdate", update.SOURCE):
            updated: tf.Operation = native_library.library().collective_sparse_update(
                tables,
                slots,
                numbers,
                used,
                gradients,
                rows,
                rule=rule,
                on_device=True,
                bounds=list(bounds),
            )
        return updated

    def collective_sparse_reduce_update(
        self,
        tables: Sequence[tf.Tensor],
        slots: Sequence[tf.Tensor],
        numbers: Sequence[tf.Tensor],
        used: Sequence[tf.Tensor],
        gradient: tf.Tensor,
        rows: Sequence[tf.Tensor],
        message: tf.Tensor,
        splits: tf.Tensor,
        headers: Sequence[tf.Tensor],
        *,
        rule: str,
        bounds: Sequence[float] = (),
        **attributes: Any,
    ) -> tf.Operation:
        """Updates rows by the sums of their gradients, which are never written.

        Args:
            tables, slots, numbers, used, rule, bounds: as for `collective_sparse_update`, of U
                tables.
            gradient, rows, message, splits, headers: the inputs of `collective_reduce_rows`; rows
                of the U tables only.
            attributes: the layout of the message, `scale`, and `updated`, the numbers of the U
                tables.
        """
        sources = (*_SUMS, update.SOURCE, *_pooling(attributes))
        with self._launching("CollectiveSparseReduceUpdate", *sources):
            updated: tf.Operation = native_library.library().collective_sparse_reduce_update(
                tables,
                slots,
                numbers,
                used,
                gradient,
                rows,
                message,
                splits,
                headers,
                rule=rule,
                on_device=True,
                bounds=list(bounds),
                **attributes,
            )
        return updated

    def collective_write_rows(
        self, resource: tf.Tensor, indices: tf.Tensor, updates: tf.Tensor
    ) -> tf.Operation:
        """Writes new values into rows of a variable, in place.

        Args:
            resource: the handle of a variable [V, ...] of any numeric type.
            indices: [K] int64 rows, each at most once; rows outside of the variable are ignored.
            updates: [K, ...].
        """
        with self._launching("CollectiveWriteRows", compiled_launches.WRITE):
            written: tf.Operation = native_library.library().collective_write_rows(
                resource, indices, updates
            )
        return written


# Kernels that sum gradients by row.
_SUMS = (distinct.SOURCE, occurrences.SOURCE, partition.SOURCE, sums.SOURCE)


def _pooling(attributes: dict[str, Any]) -> tuple[Source, ...]:
    """Returns the further kernels that an owner needs if sections are pooled."""
    return (compiled_launches.BAGS, pool.SOURCE) if any(attributes["pooled"]) else ()
