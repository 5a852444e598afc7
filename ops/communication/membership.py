"""Knows this process's place in its job."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from typing import NamedTuple

from collective.job import gloo_address, scheduled_ranks, training_apart
from collective.ops.communication.horovod_library import hvd
from collective.ops.communication.horovod_threads import start


class Process(NamedTuple):
    """Describes a rank's place in its job.

    Attributes:
        rank, size: its number among all ranks, and their number.
        local_rank, local_size: the same among the ranks of its host.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> Process:
        """Returns the place that a launcher has described, as it does for Horovod.

        Without a description the process is a job of one rank.

        Raises:
            ValueError: the description is incomplete.
        """
        names = [f"HOROVOD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")]
        given = [environment.get(name) for name in names]
        if not any(given):
            return cls(0, 1, 0, 1)
        try:
            return cls(*(int(value or "") for value in given))
        except ValueError:
            said = ", ".join(f"{name}={value!r}" for name, value in zip(names, given))
            raise ValueError(
                f"The launcher describes this rank's place by numbers in {', '.join(names)}; they "
                f"are {said}. Start the job with `collective launch`."
            ) from None

    @property
    def host(self) -> range:
        """Returns the ranks of its host, if they are consecutive."""
        first = self.rank - self.local_rank
        return range(first, first + self.local_size)

    @property
    def on_one_host(self) -> bool:
        """Tells whether all ranks are on its host."""
        return self.local_size == self.size


# This process's place, once it has joined.
_process: Process | None = None


def has_joined() -> bool:
    """Tells whether this process has joined its job."""
    return _process is not None


def join() -> Process:
    """Joins the job that a launcher described, by Horovod if it is installed; returns the place.

    Raises:
        ValueError: the description is incomplete.
        collective.job.errors.UsageError: mpirun or srun has started this process, and the ranks
            can't find each other.
    """
    global _process
    if hvd is None or _is_alone_without_an_address():
        scheduled_ranks.set_environment(os.environ)
        _process = Process.of(os.environ)
        training_apart.watch(_process.size)
        return _process
    # Each call would register Horovod's shutdown again, before the end of sessions, which need
    # Horovod.
    if not hvd.is_initialized():
        scheduled_ranks.set_environment(os.environ, has_mpi=bool(hvd.mpi_built()))
        start(hvd.init)
    _process = _of_horovod()
    training_apart.watch(_process.size, has_horovod=True)
    return _process


def rank() -> int:
    """Returns this process's number among all ranks, from 0."""
    return (_process or _place()).rank


def size() -> int:
    """Returns the number of ranks, N."""
    return (_process or _place()).size


def local_rank() -> int:
    """Returns this process's number among the ranks of its host, from 0."""
    return (_process or _place()).local_rank


def place() -> Process:
    """Returns this process's place in its job.

    Raises:
        ValueError: it has joined none.
    """
    return _process or _place()


def _is_alone_without_an_address() -> bool:
    """Tells whether Horovod, which one rank doesn't need, would end the process.

    It listens where the host's name leads, or where the launcher says, and aborts if that is
    nowhere.
    """
    return not (
        hvd.is_initialized()
        or hvd.mpi_built()
        or Process.of(os.environ).size > 1
        or os.environ.get(gloo_address.VARIABLE)
        or gloo_address.addresses_of_name(socket.gethostname())
    )


def _of_horovod() -> Process:
    return Process(int(hvd.rank()), int(hvd.size()), int(hvd.local_rank()), int(hvd.local_size()))


def _place() -> Process:
    """Returns the place of a process that hasn't joined."""
    if hvd is not None and hvd.is_initialized():  # the script has initialised it
        return _of_horovod()
    raise ValueError(
        "This process has joined no job: make a collective.CollectiveStrategy() first."
    )
