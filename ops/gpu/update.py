"""Updates rows of many tables by the sums of their gradients, the sum and the rule in one kernel.

The owner of the rows does this with the gradients that it received. With `terms` it does backward
and update at once, for gradients of its own samples: then no gradient of a row is written.
`reference/update.py` has the same function in NumPy.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from collective.ops.counting import counted
from collective.ops.gpu.occurrences import Occurrences
from collective.ops.gpu.rules import RULES, Adam, Rule
from collective.ops.gpu.segments import THREADS, Segments
from collective.ops.gpu.sources import Source
from collective.ops.gpu.sums import NULL, SLOTS, Rows, launch, target_words
from collective.ops.gpu.workspace import Workspace

# Rules that differ in their options share a kernel.
_KERNELS = dict.fromkeys(rule.kernel for rule in RULES)
SOURCE = Source(
    "update.cu",
    (
        *(f"update_{kernel}{of}" for kernel in _KERNELS for of in ("", "_long")),
        "adam_decay",
    ),
)
_IN_FLIGHT = 2
_NUMBER_BYTES = 8  # of a row's number


class Table(NamedTuple):
    """Holds a shard and its slots.

    Attributes:
        weights: [V, D] float32, C-contiguous.
        slots: as many as the rule has, each like the weights; [V, 1] for a row-wise rule.
    """

    weights: Any
    slots: Sequence[Any] = ()


def update(
    rule: Rule,
    tables: Sequence[Table],
    rows: Any,
    segments: Segments,
    gradients: Rows,
    occurrences: Occurrences,
    workspace: Workspace,
    terms: Any = None,
    bounds: Sequence[float] | None = None,
) -> None:
    """Updates the tables' rows in place. One kernel, or three if there are more than `LONG`
    occurrences; Adam that isn't lazy has one more, over all rows of the tables. The host waits for
    nothing.

    Bytes moved: per row 12, and 8 D for weights and for each slot; per occurrence 4 (with terms 12)
        and D elements.
    Adam that isn't lazy: 24 D per row of the tables, and a byte.

    Undefined if `rows` has a row of a table twice. A row that doesn't occur is not changed; nor is
    a row outside of its table.

    Args:
        rule: the rule.
        tables: S of them.
        rows: [U] int64, their rows, each at most once; in the order of `segments`.
        segments: M of them with U rows, whose sections are tables.
        gradients: R rows, of the dimensions of the tables.
        occurrences: the occurrences of U rows. Without terms, occurrence k is row k of `gradients`,
            times 1.
        workspace: scratch memory.
        terms: [K, 2] uint32, for each occurrence a row of `gradients` and, as the bits of a
            float32, its factor; not needed if `occurrences` has them.
        bounds: for each table the bound of its weights, which applies wherever a gradient updates
            them: min(max(w, -bound), bound), but a NaN stays one. None: no bounds.

    Raises:
        ValueError: a table isn't what the rule needs, or a segment has no table.
    """
    check_tables(rule, tables, segments)
    device = workspace.device
    decays = isinstance(rule, Adam) and not rule.lazy
    dims = np.array([table.weights.shape[1] for table in tables], np.int64)
    counts = np.array([table.weights.shape[0] for table in tables], np.int64)
    addresses = np.zeros((len(tables), 1 + SLOTS), np.int64)
    touched = np.zeros(len(tables), np.int64)
    for number, table in enumerate(tables):
        addresses[number, : 1 + rule.slots] = [
            device.pointer(array) for array in (table.weights, *table.slots)
        ]
        if decays:
            touched[number] = device.pointer(_touched(number, len(table.weights), workspace))
    of = segments.sections
    targets, tiles = target_words(
        segments, dims[of], addresses[of], counts[of], _IN_FLIGHT, touched[of]
    )
    row_addresses = device.pointer(rows) + _NUMBER_BYTES * segments.offsets[:-1]
    options = workspace.upload("update.options", np.array(rule.options(), np.float32))
    launch(
        device.kernel(SOURCE, f"update_{rule.kernel}"),
        device.kernel(SOURCE, f"update_{rule.kernel}_long"),
        targets,
        tiles,
        workspace.upload("update.rows", row_addresses[np.diff(segments.offsets) > 0]),
        gradients,
        occurrences,
        NULL if terms is None else terms,
        NULL,
        (
            np.float32(1),
            options,
            NULL if bounds is None else _by_target(bounds, segments, workspace),
        ),
        workspace,
        "update",
    )
    if decays:
        everything = Segments.of(counts, np.arange(len(tables)))
        targets, tiles = target_words(everything, dims, addresses, counts, 1, touched)
        device.kernel(SOURCE, "adam_decay")(
            tiles,
            THREADS,
            (workspace.upload("update.decay", targets), np.int32(len(targets)), options),
        )


def _by_target(bounds: Sequence[float], segments: Segments, workspace: Workspace) -> Any:
    some = np.diff(segments.offsets) > 0
    return workspace.upload("update.bounds", np.array(bounds, np.float32)[segments.sections][some])


def _touched(number: int, rows: int, workspace: Workspace) -> Any:
    """Keeps one byte per row of a table: 0 before and after each update. A growing table gets new
    bytes once it has doubled.
    """
    room = 1 << max(rows - 1, 0).bit_length()
    return workspace.keep(
        f"update.touched.{number}.{room}", lambda: workspace.device.zeros(room, np.uint8)
    )


def check_tables(rule: Rule, tables: Sequence[Table], segments: Segments) -> None:
    """Raises the errors of `update`."""
    if len(segments.sections) and segments.sections.max() >= len(tables):
        raise ValueError(
            f"a segment is of table {segments.sections.max()}, but there are {len(tables)}"
        )
    for number, table in enumerate(tables):
        if len(table.slots) != rule.slots:
            raise ValueError(
                f"{type(rule).__name__} has {counted(rule.slots, 'slot')}, but table {number} "
                f"{len(table.slots)}"
            )
        if table.weights.ndim != 2 or table.weights.shape[1] < 1:
            raise ValueError(f"table {number} must be a matrix, but is {table.weights.shape}")
        shape = table.weights.shape
        slot_shape = (shape[0], 1) if rule.row_wise else shape
        for array, wanted in [
            (table.weights, shape),
            *((slot, slot_shape) for slot in table.slots),
        ]:
            if array.dtype != np.float32 or array.shape != wanted or not array.flags.c_contiguous:
                raise ValueError(
                    f"table {number}: weights and slots must be contiguous and float32, slots "
                    f"{slot_shape}, but one is {array.dtype} {array.shape}"
                )
