"""collective.integrations.ray: what Horovod's Ray executor is asked for, by a double of it."""

from __future__ import annotations

import importlib.util
import sys
import types
from typing import Any

import pytest

from collective.integrations import ray


class Executor:
    """Runs the function on one rank after the other, here."""

    made: list[Executor]

    @staticmethod
    def create_settings(**settings: Any) -> dict[str, Any]:
        return settings

    def __init__(self, settings: dict[str, Any], num_workers: int, **options: Any) -> None:
        self.settings, self.ranks, self.options = settings, num_workers, options
        self.calls: list[str] = []
        self.made.append(self)

    def start(self) -> None:
        self.calls.append("start")

    def run(self, fn: Any, args: list[Any], kwargs: dict[str, Any]) -> list[Any]:
        self.calls.append("run")
        results = []
        for rank in range(self.ranks):
            with pytest.MonkeyPatch.context() as patch:
                patch.setenv("HOROVOD_RANK", str(rank))
                patch.setenv("HOROVOD_LOCAL_RANK", str(rank % 2))
                # Of a host with two ranks, as Horovod's executor sets it.
                patch.setenv("CUDA_VISIBLE_DEVICES", "5,7" if self.options["use_gpu"] else "")
                results.append(fn(*args, **kwargs))
        return results

    def shutdown(self) -> None:
        self.calls.append("shutdown")


@pytest.fixture
def executors(monkeypatch: pytest.MonkeyPatch) -> list[Executor]:
    monkeypatch.setattr(Executor, "made", [], raising=False)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    module = types.ModuleType("horovod.ray")
    module.RayExecutor = Executor
    monkeypatch.setitem(sys.modules, "horovod.ray", module)
    return Executor.made


def on_rank(*args: Any, **kwargs: Any) -> tuple[Any, ...]:
    import os

    return os.environ["HOROVOD_RANK"], os.environ["CUDA_VISIBLE_DEVICES"], args, kwargs


def test_each_worker_is_a_rank(executors: list[Executor]):
    results = ray.run(on_rank, args=(3,), kwargs={"rate": 0.5}, num_workers=3, cpus_per_worker=2)
    assert results == [(str(rank), "", (3,), {"rate": 0.5}) for rank in range(3)]
    (executor,) = executors
    assert executor.options == {"cpus_per_worker": 2, "use_gpu": False}
    assert executor.calls == ["start", "run", "shutdown"]


def test_a_rank_sees_its_own_gpu_alone(executors: list[Executor]):
    results = ray.run(on_rank, num_workers=4, use_gpu=True)
    assert [device for _, device, *_ in results] == ["5", "7", "5", "7"]


def test_workers_end_after_a_failure(executors: list[Executor]):
    def fail() -> None:
        raise KeyError("column")

    with pytest.raises(KeyError):
        ray.run(fail, num_workers=2)
    assert executors[0].calls == ["start", "run", "shutdown"]


@pytest.mark.parametrize("missing, remedy", [("ray", "pip install ray"), ("horovod", "build-hor")])
def test_what_is_missing_is_named(
    missing: str, remedy: str, executors: list[Executor], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == missing else object()
    )
    with pytest.raises(ImportError, match=f"needs {missing}, which isn't installed: .*{remedy}"):
        ray.run(on_rank, num_workers=2)
    assert not executors


@pytest.mark.parametrize("sizes", [{"num_workers": 0}, {"num_workers": 1, "cpus_per_worker": 0}])
def test_workers_without_number_are_refused(sizes: dict[str, int], executors: list[Executor]):
    with pytest.raises(ValueError, match="give 1 or more of each"):
        ray.run(on_rank, **sizes)
    assert not executors
