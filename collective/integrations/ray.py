"""Runs a training function on the workers of a Ray cluster, by Horovod's Ray executor.

    from collective.integrations import ray

    def train(epochs):
        strategy = CollectiveStrategy()
        ...
        return loss

    losses = ray.run(train, args=(3,), num_workers=4)

Each worker is a rank. No launcher watches them: a worker that dies ends the function with Ray's
error, restarts and stalls are Ray's matter.
"""

from __future__ import annotations

import functools
import importlib.util
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

Result = TypeVar("Result")
_START_SECONDS = 600  # for which ranks wait for each other, as under the launcher


def run(
    fn: Callable[..., Result],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    num_workers: int,
    cpus_per_worker: int = 1,
    use_gpu: bool = False,
) -> list[Result]:
    """Runs a function on all workers at once, as it would run on the ranks of a launched job.

    Args:
        fn: the function. Ray carries it to the workers (by cloudpickle), where this package has to
            be installed; it builds its graph and its strategy itself.
        args: its positional arguments.
        kwargs: its named arguments.
        num_workers: how many ranks, 1 or more.
        cpus_per_worker: the cores that Ray keeps for each.
        use_gpu: whether each has a GPU of its own, which is then the only one that it sees.

    Returns:
        What it returned on each rank, in their order.

    Raises:
        ImportError: Ray or Horovod isn't installed here.
        ValueError: there is no number of workers like that.
        ray.exceptions.RayTaskError: it raised on a rank.
        TimeoutError: the cluster hasn't got the workers' resources.
    """
    if num_workers < 1 or cpus_per_worker < 1:
        raise ValueError(
            f"num_workers={num_workers}, cpus_per_worker={cpus_per_worker}: give 1 or more of each"
        )
    for package, remedy in (
        ("ray", "pip install ray"),
        ("horovod", "collective build-horovod"),
    ):
        if importlib.util.find_spec(package) is None:
            raise ImportError(
                f"collective.integrations.ray.run needs {package}, which isn't installed: {remedy}"
            )
    from horovod.ray import RayExecutor

    executor = RayExecutor(
        RayExecutor.create_settings(timeout_s=_START_SECONDS),
        num_workers=num_workers,
        cpus_per_worker=cpus_per_worker,
        use_gpu=use_gpu,
    )
    try:
        executor.start()
        return executor.run(
            functools.partial(_run_on_rank, fn), args=list(args), kwargs=dict(kwargs or {})
        )
    finally:
        executor.shutdown()


def _run_on_rank(fn: Callable[..., Result], *args: Any, **kwargs: Any) -> Result:
    """Runs the function, with this rank's GPU alone: Horovod shows all of a host's to each rank."""
    devices = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    if len(devices) > 1:
        os.environ["CUDA_VISIBLE_DEVICES"] = devices[int(os.environ["HOROVOD_LOCAL_RANK"])]
    return fn(*args, **kwargs)
