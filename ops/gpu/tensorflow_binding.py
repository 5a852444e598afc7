"""Binds the kernels to TensorFlow: computes on a GPU what `ops/native` computes on a CPU.

`DeviceOperations` has the operations of the compiled library under their names, with its inputs,
outputs and attributes. Each launches kernels (`tensorflow_call.py`): the compiled one itself, where
the library has a kernel of it for GPUs, else a call of Python, which has the gradient that is
registered for the compiled one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Callable, NamedTuple

import numpy as np
import tensorflow.compat.v1 as tf

from collective.ops import native_library, tensorflow_lookup
from collective.ops.gpu import gather, requests
from collective.ops.gpu.kernel_api import Joined, Kernels
from collective.ops.gpu.message_layout import Layout
from collective.ops.gpu.pooling import Members, Pooling
from collective.ops.gpu.responses import Response
from collective.ops.gpu.rules import Rule
from collective.ops.gpu.segments import Segments
from collective.ops.gpu.tensorflow_call import KernelCaller, Outputs, Work
from collective.ops.gpu.update import Table

Find = Callable[[Kernels, np.ndarray, Any, Sequence[int], "Sequence[int] | None"], Any]


class DeviceOperations(KernelCaller):
    """Has the operations of the compiled library, by kernels. They have its shapes, too."""

    def about(self, tables: Sequence[str]) -> DeviceOperations:
        """Returns the operations for tables of these names."""
        return DeviceOperations(self.bridge, tables)

    def _shard(self, handle: tf.Tensor, writes: bool = False) -> tf.Tensor:
        """Makes a tensor in the memory of a shard, which nobody shares if it is written."""
        library = native_library.library()
        make = library.collective_sparse_shard if writes else library.collective_shard
        with tf.device(self.bridge.placed):
            return make(handle, dtype=tf.float32, device=self.bridge.kind)

    def collective_bounds(self, ids: Sequence[tf.Tensor]) -> tf.Tensor:
        """Finds bounds by TensorFlow's operations, wherever it has kernels for them."""
        return tf.stack([tensorflow_lookup.bounds(x) for x in ids])

    def collective_mismatches(
        self,
        ids: Sequence[tf.Tensor],
        samples: Sequence[tf.Tensor],
        weights: Sequence[tf.Tensor],
        weighted: Sequence[int],
    ) -> tf.Tensor:
        """Finds mismatches by TensorFlow's operations."""
        found = [tensorflow_lookup.mismatches(x, y, None) for x, y in zip(ids, samples)]
        more = [
            tf.size(w, out_type=tf.int64) - tf.size(ids[place], out_type=tf.int64)
            for w, place in zip(weights, weighted)
        ]
        return tf.concat([*found, more], 0) if more else tf.concat(found, 0)

    def collective_ask(
        self,
        ids: Sequence[tf.Tensor],
        samples: Sequence[tf.Tensor],
        weights: Sequence[tf.Tensor],
        *,
        ranks: int,
        member_sections: Sequence[int],
        combiners: Sequence[int],
        kinds: Sequence[int],
        dims: Sequence[int],
        pooled: Sequence[bool],
        weighted: Sequence[bool],
    ) -> tuple[Any, ...]:
        """Asks as the compiled operation does; and gives, as the last output, [N · S] `counts`.
        `kinds` are by section here.
        """
        members, by_owner = len(ids), len(samples)
        layout = Layout(ranks, range(len(dims)), kinds, dims, pooled, weighted)

        def work(kernels: Kernels, *arrays: Any) -> list[Any]:
            request = requests.ask(
                kernels,
                layout,
                member_sections,
                combiners,
                arrays[:members],
                arrays[members : members + by_owner],
                arrays[members + by_owner :],
            )
            counts = [request.runs.splits, request.runs.row_splits, request.runs.bags]
            joined_counts = kernels.upload(np.concatenate(counts).astype(np.int32))
            return [
                request.message,
                Joined(joined_counts, [len(x) for x in counts]),
                *request.positions,
                *request.samples,
                *request.scales,
            ]

        # stable: as `requests.ask` has them
        order = sorted(range(members), key=lambda m: bool(pooled[member_sections[m]]))
        position_shapes = [[None] if pooled[member_sections[m]] else ids[m].shape for m in order]
        out = self._call(
            "CollectiveAsk",
            work,
            [*ids, *samples, *weights],
            [
                (tf.int64, [None]),
                (tf.int32, [ranks]),
                (tf.int32, [ranks]),
                (tf.int32, [ranks * len(dims)]),
                *((tf.int32, shape) for shape in position_shapes),
                *((tf.int64, [None]) for _ in samples),
                *((tf.float32, [None]) for _ in samples),
            ],
        )
        splits, row_splits, counts = out[1:4]
        positions_by_member = dict(zip(order, out[4 : 4 + members]))
        return (
            out[0],
            tf.bitcast(splits, tf.int32),
            tf.bitcast(row_splits, tf.int32),
            [positions_by_member[m] for m in range(members)],
            out[4 + members : 4 + members + by_owner],
            out[4 + members + by_owner :],
            [counts],
        )

    def collective_hear(
        self, message: tf.Tensor, splits: tf.Tensor, *, T: int, **attributes: Any
    ) -> tuple[Any, ...]:
        layout = _layout(attributes)

        def work(kernels: Kernels, message: Any, splits: Any) -> list[Any]:
            rows, row_splits = requests.receive(kernels, layout, message, kernels.download(splits))
            return [rows, kernels.upload(row_splits.astype(np.int32))]

        out = self._call(
            "CollectiveHear",
            work,
            [message, splits],
            [*((tf.int64, [None]) for _ in range(T)), (tf.int32, [layout.ranks])],
        )
        return out[:-1], tf.bitcast(out[-1], tf.int32)

    def collective_find(
        self,
        find: Find,
        numbers: Sequence[tf.Tensor],
        keys: Sequence[tf.Tensor],
        insert: tf.Tensor,
        steps: Sequence[tf.Tensor | int],
    ) -> list[tf.Tensor]:
        """Finds the local rows of keys of T dynamic tables: on a CPU each has a function of its own
        for it.

        Args:
            find: f(kernels, numbers, keys [K], how many of them each table has, steps, or None
                for no insertion) -> [K] int64.
            numbers: T int64 scalars, of what holds them in this session.
            keys: T times [R] int64.
            insert: bool scalar, whether new ones are inserted; or have row 0.
            steps: T int64 scalars, the steps to which an insertion leads; 0 for none that counts
                as a use.
        """

        def work(kernels: Kernels, scalars: Any, *keys: Any) -> list[Any]:
            *numbers_and_steps, insert = kernels.download(scalars).tolist()
            numbers, steps = np.reshape(numbers_and_steps, (2, len(keys)))
            sizes = [int(one.size) for one in keys]
            all_keys = kernels.xp.concatenate(keys)
            uses = steps.tolist() if insert else None
            return [Joined(find(kernels, numbers, all_keys, sizes, uses), sizes)]

        scalars = tf.stack([*numbers, *steps, tf.cast(insert, tf.int64)])
        outputs = [(tf.int64, one.shape) for one in keys]
        return self._call("CollectiveFind", work, [scalars, *keys], outputs)

    def _respond(
        self,
        name: str,
        work: Callable[[Response, Sequence[Any]], Sequence[Any]],
        inputs: Sequence[tf.Tensor],
        handles: Sequence[tf.Tensor],
        rows: Sequence[tf.Tensor],
        message: tf.Tensor,
        splits: tf.Tensor,
        outputs: Outputs,
        attributes: dict[str, Any],
    ) -> list[tf.Tensor]:
        """Makes an operation of the owner of shards; `work` gets its response and arrays of
        `inputs`.
        """
        layout, first, tables = _layout(attributes), len(inputs), len(handles)

        def run(kernels: Kernels, *arrays: Any) -> Sequence[Any]:
            shards, rows = arrays[first : first + tables], arrays[first + tables : -2]
            message, splits = arrays[-2], kernels.download(arrays[-1])
            response = Response(kernels, layout, shards, rows, message, splits)
            return work(response, arrays[:first])

        shapes = [
            shape.as_list() if shape.rank is not None else None
            for shape in map(tf.TensorShape, attributes["shapes"])
        ]
        return self._call(
            name,
            run,
            [*inputs, *(self._shard(handle) for handle in handles), *rows, message, splits],
            outputs,
            **{**attributes, "T": tables, "shapes": shapes},
        )

    def collective_gather_rows(
        self,
        handles: Sequence[tf.Tensor],
        rows: Sequence[tf.Tensor],
        message: tf.Tensor,
        splits: tf.Tensor,
        **attributes: Any,
    ) -> tf.Tensor:
        """Gathers by a compiled operation, unless sections are pooled."""
        if not any(attributes["pooled"]):
            with self._launching("CollectiveGatherRows", gather.SOURCE):
                return native_library.library().collective_gather_rows(
                    handles, rows, message, splits, **attributes
                )
        return self._respond(
            "CollectiveGatherRows",
            lambda response, _: [response.gather()],
            [],
            handles,
            rows,
            message,
            splits,
            [(tf.float32, [None])],
            attributes,
        )[0]

    def collective_reduce_rows(
        self,
        gradient: tf.Tensor,
        handles: Sequence[tf.Tensor],
        rows: Sequence[tf.Tensor],
        message: tf.Tensor,
        splits: tf.Tensor,
        **attributes: Any,
    ) -> tuple[Any, ...]:
        tables, scale = len(handles), attributes["scale"]

        def work(response: Response, inputs: Sequence[Any]) -> Sequence[Any]:
            return response.reduce(inputs[0], scale)

        out = self._respond(
            "CollectiveReduceRows",
            work,
            [gradient],
            handles,
            rows,
            message,
            splits,
            [
                *((tf.float32, [None, dim]) for dim in _table_dims(attributes)),
                *((tf.int64, [None]) for _ in range(tables)),
                *((tf.int32, [None]) for _ in range(tables)),
            ],
            attributes,
        )
        return out[:tables], out[tables : 2 * tables], out[2 * tables :]

    def collective_spread_rows(
        self,
        values: Sequence[tf.Tensor],
        inverse: Sequence[tf.Tensor],
        handles: Sequence[tf.Tensor],
        rows: Sequence[tf.Tensor],
        message: tf.Tensor,
        splits: tf.Tensor,
        **attributes: Any,
    ) -> tf.Tensor:
        tables, scale = len(handles), attributes["scale"]

        def work(response: Response, inputs: Sequence[Any]) -> Sequence[Any]:
            return [response.spread(inputs[:tables], inputs[tables:], scale)]

        return self._respond(
            "CollectiveSpreadRows",
            work,
            [*values, *inverse],
            handles,
            rows,
            message,
            splits,
            [(tf.float32, [None])],
            attributes,
        )[0]

    def collective_pool(
        self,
        rows: tf.Tensor,
        positions: Sequence[tf.Tensor],
        samples: Sequence[tf.Tensor],
        weights: Sequence[tf.Tensor],
        counts: tf.Tensor,
        **attributes: Any,
    ) -> list[tf.Tensor]:
        members = _members(attributes)
        shapes = [
            [at.shape[0] if combiner == 0 and at.shape.rank == 1 else None, dim]
            for at, combiner, dim in zip(positions, members.combiners, members.dims)
        ]
        return self._call(
            "CollectivePool",
            _pooling(members, range(len(positions)), lambda pooling, _: [pooling.pool()]),
            [rows, *positions, *samples, *weights, counts],
            [(tf.float32, shape) for shape in shapes],
            **_sized(attributes, positions, samples, weights),
        )

    def collective_pool_gradient(
        self,
        rows: tf.Tensor,
        positions: Sequence[tf.Tensor],
        samples: Sequence[tf.Tensor],
        weights: Sequence[tf.Tensor],
        gradients: Sequence[tf.Tensor],
        counts: tf.Tensor,
        **attributes: Any,
    ) -> PoolGradient:
        def work(pooling: Pooling, gradients: Sequence[Any]) -> Sequence[Any]:
            flat, weight_gradients = pooling.gradient(gradients)
            return [flat, *weight_gradients]

        out = self._call(
            "CollectivePoolGradient",
            _pooling(_members(attributes), attributes["members"], work),
            [rows, *positions, *samples, *weights, *gradients, counts],
            [(tf.float32, rows.shape), *((tf.float32, weight.shape) for weight in weights)],
            **_sized(attributes, positions, samples, weights),
        )
        return PoolGradient(out[0], out[1:])

    def collective_update(
        self,
        rule: Callable[..., Rule],
        numbers: Sequence[tf.Tensor],
        tables: Sequence[tf.Tensor],
        slots: Sequence[Sequence[tf.Tensor]],
        gradients: Sequence[tf.Tensor],
        rows: Sequence[tf.Tensor],
        used: Sequence[tf.Tensor | None] = (),
    ) -> tf.Operation:
        """Updates rows of shards and of their slots in place: the compiled library has operations
        for one table and one rule.

        Args:
            rule: makes the rule of `numbers`.
            numbers: float32 scalars, in every step anew: the learning rate, …
            tables, slots: handles of T shards, and for each those of its slots.
            gradients: T times [K, D] float32.
            rows: T times [K] int64, each at most once.
            used: T int64 scalars, or None. Of a table with a scalar, rows 1 to this one are there,
                row 0 and others are not; of one with None, all are. Empty: all are, of all tables.
        """
        count, each = len(tables), 1 + len(slots[0])
        limits = [limit for limit in used if limit is not None]
        limited = [t for t, limit in enumerate(used) if limit is not None]

        def work(kernels: Kernels, numbers: Any, *arrays: Any) -> Sequence[Any]:
            shards = [arrays[each * t : each * (t + 1)] for t in range(count)]
            gradients, rows = arrays[count * each : -count], list(arrays[-count:])
            if limits:
                lasts, gradients = kernels.download(gradients[0]), gradients[1:]
                for t, last in zip(limited, lasts):
                    shards[t] = tuple(array[1 : last + 1] for array in shards[t])
                    rows[t] = rows[t] - 1
            lengths = [int(one.size) for one in rows]
            kernels.update(
                rule(*(float(number) for number in kernels.download(numbers))),
                [Table(weights, table_slots) for weights, *table_slots in shards],
                kernels.xp.concatenate(rows),
                Segments.of(lengths, range(count)),
                kernels.rows(gradients),
                kernels.each_once(sum(lengths)),
            )
            return []

        inputs = [tf.stack(numbers), *([tf.stack(limits)] if limits else []), *gradients, *rows]
        # not before: until then others may read or assign what they like
        with tf.control_dependencies(inputs):
            shards = [
                self._shard(handle, writes=True)
                for table, table_slots in zip(tables, slots)
                for handle in (table, *table_slots)
            ]
        return self._operation("CollectiveUpdate", work, [inputs[0], *shards, *inputs[1:]], [], {})


class PoolGradient(NamedTuple):
    """Holds the outputs of CollectivePoolGradient."""

    flat: tf.Tensor
    weight_gradients: list[tf.Tensor]


def _pooling(
    members: Members, wanted: Sequence[int], work: Callable[[Pooling, Sequence[Any]], Sequence[Any]]
) -> Work:
    """Gives `work` the pooling of the `wanted` members, and arrays of the other inputs."""
    samples_from = len(members.dims)
    weights_from = samples_from + sum(combiner != 0 for combiner in members.combiners)
    rest_from = weights_from + sum(map(bool, members.weighted))

    def run(kernels: Kernels, rows: Any, *arrays: Any) -> Sequence[Any]:
        counts = kernels.download(arrays[-1]).reshape(-1, max(members.sections) + 1)
        pooling = Pooling(
            kernels,
            members,
            rows,
            counts,
            arrays[:samples_from],
            arrays[samples_from:weights_from],
            arrays[weights_from:rest_from],
            wanted,
        )
        return work(pooling, arrays[rest_from:-1])

    return run


def _sized(
    attributes: dict[str, Any],
    positions: Sequence[Any],
    samples: Sequence[Any],
    weights: Sequence[Any],
) -> dict[str, Any]:
    return {**attributes, "M": len(positions), "P": len(samples), "W": len(weights)}


def _members(attributes: dict[str, Any]) -> Members:
    names = ("sections", "dims", "combiners", "weighted", "max_norms")
    return Members(*(list(attributes[name]) for name in names))


def _layout(attributes: dict[str, Any]) -> Layout:
    return Layout(
        attributes["ranks"],
        attributes["section_tables"],
        attributes["kinds"],
        attributes["dims"],
        attributes["pooled"],
        attributes["weighted"],
        attributes.get("max_norms", ()),
    )


def _table_dims(attributes: dict[str, Any]) -> list[int | None]:
    dims: list[int | None] = [None] * len(attributes["kinds"])
    for table, dim in zip(attributes["section_tables"], attributes["dims"]):
        dims[table] = dim
    return dims
