"""Checks the whole sparse step: what is counted of it, and the same by PyTorch, for which a double
in NumPy stands in.
"""

from __future__ import annotations

import json
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from collective.ops import gpu_check
from collective.ops.gpu.checks import SMALL, pytorch, step, timing, workload
from tests.kernels.gpu.emulator import EmulatedDevice


class Tensor:
    """Imitates as much of `torch.Tensor` as the step uses."""

    device = "cpu"

    def __init__(self, values: Any):
        self.values = np.asarray(values)

    def __len__(self) -> int:
        return len(self.values)

    def __add__(self, other: Tensor) -> Tensor:
        return Tensor(self.values + other.values)

    def __mul__(self, factor: int) -> Tensor:
        return Tensor(self.values * factor)

    def reshape(self, *shape: int) -> Tensor:
        return Tensor(self.values.reshape(shape))

    def long(self) -> Tensor:
        return Tensor(self.values.astype(np.int64))

    def diff(self) -> Tensor:
        return Tensor(np.diff(self.values))

    def index_select(self, axis: int, index: Tensor) -> Tensor:
        return Tensor(np.take(self.values, index.values, axis))

    def index_add_(self, axis: int, index: Tensor, more: Tensor) -> Tensor:
        assert axis == 0
        np.add.at(self.values, index.values, more.values)
        return self

    def index_copy_(self, axis: int, index: Tensor, source: Tensor) -> Tensor:
        assert axis == 0
        self.values[index.values] = source.values
        return self

    def addcmul_(self, left: Tensor, right: Tensor) -> Tensor:
        self.values += left.values * right.values
        return self

    def addcdiv_(self, above: Tensor, below: Tensor, value: float) -> Tensor:
        self.values += np.float32(value) * above.values / below.values
        return self

    def sqrt_(self) -> Tensor:
        np.sqrt(self.values, self.values)
        return self

    def cpu(self) -> Tensor:
        return self

    def numpy(self) -> np.ndarray:
        return self.values


def _embedding_bag(
    index: Tensor, rows: Tensor, offsets: Tensor, mode: str, include_last_offset: bool
) -> Tensor:
    assert mode == "sum" and include_last_offset
    return Tensor(np.add.reduceat(rows.values[index.values], offsets.values[:-1]))


def _repeat_interleave(repeats: Tensor, output_size: int | None = None) -> Tensor:
    assert output_size in (None, repeats.values.sum())
    return Tensor(np.repeat(np.arange(len(repeats)), repeats.values))


@pytest.fixture
def torch(monkeypatch: pytest.MonkeyPatch) -> None:
    double: Any = types.SimpleNamespace(
        nn=types.SimpleNamespace(functional=types.SimpleNamespace(embedding_bag=_embedding_bag)),
        from_dlpack=Tensor,
        zeros_like=lambda x: Tensor(np.zeros_like(x.values)),
        as_tensor=lambda values, device: Tensor(values),
        repeat_interleave=_repeat_interleave,
        __version__="2.9",
        unique=lambda x, return_inverse: [
            Tensor(made) for made in np.unique(x.values, return_inverse=return_inverse)
        ],
    )
    monkeypatch.setitem(sys.modules, "torch", double)


def test_pytorch_computes_the_same_step(torch: None):
    step.by_pytorch(EmulatedDevice(), SMALL, np.random.default_rng(1))


@pytest.mark.parametrize("operation", ["index_add_", "index_copy_", "addcmul_"])
def test_pytorch_that_is_wrong_is_seen(
    monkeypatch: pytest.MonkeyPatch, torch: None, operation: str
):
    monkeypatch.setattr(Tensor, operation, lambda self, *_: self)
    with pytest.raises(AssertionError, match="of up to 1 ids by PyTorch"):
        step.by_pytorch(EmulatedDevice(), SMALL, np.random.default_rng(1))


def _measured() -> list[tuple[str, bool]]:
    return [
        (one.kernel, one.waits)
        for one in step.measurements(EmulatedDevice(), SMALL, np.random.default_rng(0))
    ]


def test_what_is_measured(torch: None):
    assert _measured() == [
        ("step, 1 id", True),
        ("step, 1 id, prefetched", False),
        ("step, 1 id, PyTorch", True),
        ("step, 1 to 10 ids", True),
        ("step, 1 to 10 ids, prefetched", False),
        ("step, 1 to 10 ids, PyTorch", True),
        ("step, owner of 8", True),
    ]


@pytest.mark.slow
def test_the_host_waits_where_it_is_said_to():
    class Waiting(EmulatedDevice):
        waited = 0

        def download(self, array: object) -> np.ndarray:
            self.waited += 1
            return super().download(array)

    device = Waiting()
    for one in step.measurements(device, SMALL, np.random.default_rng(0)):
        one.runs[0]()
        assert (device.waited > 0) == one.waits, one.kernel
        device.waited = 0


def test_how_pytorch_compares_is_said(torch: None, tmp_path: Path):
    row = timing.Row("step", 128, "float32", 2.0, 2.0, 2.0, 1.0, 1.0, 1.0, "")
    rows = [row, row._replace(kernel="step, PyTorch", ms=11.0)]
    assert gpu_check.compared_with_pytorch(rows) == ['PyTorch takes 5.50 times as long as "step"']
    gpu_check.write(tmp_path / "rows", EmulatedDevice(), rows)
    assert [one["torch"] for one in json.loads((tmp_path / "rows").read_text())] == ["2.9", "2.9"]


def test_without_pytorch_nothing_is_compared(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    assert pytorch.imported(EmulatedDevice()) is None
    assert len(_measured()) == 5 and all("PyTorch" not in kernel for kernel, _ in _measured())
    assert (
        gpu_check.compared_with_pytorch(
            [timing.Row("step", 128, "float32", 2.0, 2.0, 2.0, 1.0, 1.0, 1.0, "")]
        )
        == []
    )


def test_pytorch_that_can_not_use_the_device_is_none(monkeypatch: pytest.MonkeyPatch):
    def refuse(array: object) -> None:
        raise AssertionError("Torch not compiled with CUDA enabled")

    monkeypatch.setitem(sys.modules, "torch", types.SimpleNamespace(from_dlpack=refuse))
    assert pytorch.imported(EmulatedDevice()) is None


@pytest.mark.parametrize(
    "function, message", [("pooled", "look-ups of batch 0"), ("updated", "weights of batch 0")]
)
def test_a_wrong_step_is_seen(monkeypatch: pytest.MonkeyPatch, function: str, message: str):
    """Compares with a truth that knows of one more sample."""
    right = getattr(workload, function)

    def wrong(weights: np.ndarray, *others: Any) -> Any:
        weights = weights.copy()
        weights[:, 0] += 1
        return right(weights, *others)

    monkeypatch.setattr(workload, function, wrong)
    with pytest.raises(AssertionError, match=message):
        step.one_rank(EmulatedDevice(), SMALL, np.random.default_rng(1))


def test_what_is_counted():
    """Ten ids of four samples, of six distinct rows; then ten keys, of six distinct rows."""
    row = 4 * workload.DIM
    read_and_written = {
        "ids": 80 + 80,
        "inverse": 40 + 40,
        "keys": 48,
        "rows": 48,
        "offsets": 16,
        "pooled": (6 + 4) * row,
        "gradients": 4 * row,
        "weights and slots": 6 * 4 * row,
    }
    assert step._bytes(10, 4, 6) == sum(read_and_written.values())
    owned = {
        "keys": 80 + 80 + 48,
        "rows": 48,
        "inverse": 40 + 40,
        "answered": (6 + 10) * row,
        "gradients": 10 * row,
        "weights and slots": 6 * 4 * row,
    }
    assert step._owner_bytes(10, 6) == sum(owned.values())


def test_the_workload_is_skewed():
    """Some ids are frequent and most of the rows are rare; what an owner is asked for is its own,
    each once a rank.
    """
    rng = np.random.default_rng(0)
    counts = np.bincount(workload.drawn(10000, 3000, rng), minlength=3000)
    assert counts.max() > 1000 and 500 < np.count_nonzero(counts) < 3000
    asked = workload.received(300, 50, rng)
    assert np.all(asked.keys % workload.RANKS == 0) and asked.keys.max() < 50 * workload.RANKS
    assert all(
        len(np.unique(part)) == len(part)
        for part in np.split(asked.keys, np.cumsum(asked.lengths)[:-1])
    )
