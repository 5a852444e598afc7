"""Makes the whole sparse step with PyTorch's own operations, at their best: all tables in one
matrix, and one call of each operation.

They run on PyTorch's default stream, which is also CuPy's default stream: events of one library
time the other.
"""

from __future__ import annotations

import importlib
from functools import partial
from typing import Any, Callable

import numpy as np

from collective.ops.gpu.checks.workload import RULE, Batch
from collective.ops.gpu.device import Device


def imported(device: Device) -> Any:
    """Imports `torch`; returns None if it is missing or can't use the device's arrays, as a
    PyTorch without CUDA can't use a GPU's.
    """
    try:
        torch = importlib.import_module("torch")
        torch.from_dlpack(device.zeros(1, np.float32))
    except Exception:  # whatever is wrong with it, the kernels can still be measured
        return None
    return torch


class Step:
    """Makes one step after another on the same tables, whose memory it shares.

    Args:
        torch: the result of `imported`.
        weights, slots: [T, V, D] float32 on the device, weights and Adagrad's slots.
    """

    def __init__(self, torch: Any, weights: Any, slots: Any):
        self._torch, self._rows = torch, weights.shape[1]
        self._weights, self._slots = (
            torch.from_dlpack(array).reshape(-1, weights.shape[2]) for array in (weights, slots)
        )

    def given(self, batch: Batch) -> Callable[[], Any]:
        """Returns a function that makes the step with `batch`, which is on the device. The function
        returns [T B, D], the pooled rows, and updates the tables.
        """
        torch = self._torch
        ids, offsets, gradients = (
            torch.from_dlpack(array) for array in (batch.ids, batch.offsets, batch.gradients)
        )
        ids = (
            ids
            + torch.repeat_interleave(torch.as_tensor(batch.lengths, device=ids.device))
            * self._rows
        )
        return partial(self._step, ids, offsets.long(), gradients)

    def _step(self, ids: Any, offsets: Any, gradients: Any) -> Any:
        torch = self._torch
        keys, inverse = torch.unique(ids, return_inverse=True)
        rows = self._weights.index_select(0, keys)
        pooled = torch.nn.functional.embedding_bag(
            inverse, rows, offsets, mode="sum", include_last_offset=True
        )
        if len(ids) != len(gradients):  # else each sample has one id
            samples = torch.repeat_interleave(offsets.diff(), output_size=len(ids))
            gradients = gradients.index_select(0, samples)
        summed = torch.zeros_like(rows).index_add_(0, inverse, gradients)
        slots = self._slots.index_select(0, keys).addcmul_(summed, summed)
        self._slots.index_copy_(0, keys, slots)
        self._weights.index_copy_(0, keys, rows.addcdiv_(summed, slots.sqrt_(), value=-RULE.rate))
        return pooled
