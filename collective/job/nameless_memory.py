"""Makes memory without a name in any folder, which the launcher and its ranks share.

Ranks open it through the launcher's descriptor in /proc, and it is freed when the last process that
has it ends, for whatever reason. (A file on a disk would sometimes make a rank wait while the
kernel writes it back.)
"""

from __future__ import annotations

import mmap
import os
import tempfile
import warnings
from collections.abc import Mapping
from typing import TypeVar

PAGE = 4096
Memory = TypeVar("Memory", bound="PagedMemory")


class PagedMemory:
    """Maps memory with a page for the launcher, page 0, and one for each rank r, page r + 1.

    Attributes:
        name: the name of the memory, only for display.
        magic: the first bytes of page 0, by which the memory is recognised.
        variable: the environment variable that holds its path.
        content: what ranks post on it, for a warning, and `loss`, what happens without it.
    """

    name: str
    magic: bytes
    variable: str
    content: str
    loss: str

    def __init__(self, descriptor: int) -> None:
        """Maps an open file, which the caller may close afterwards.

        Raises:
            ValueError: the file isn't such memory.
            OSError: it can't be mapped.
        """
        self._memory = mmap.mmap(descriptor, 0)
        if self._memory[: len(self.magic)] != self.magic:
            raise ValueError("it isn't a launcher's board")

    @classmethod
    def open(cls: type[Memory], path: str) -> Memory:
        """Opens the launcher's memory at its `OwnedMemory.path`.

        Raises:
            OSError, ValueError: there is none.
        """
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            return cls(descriptor)
        finally:
            os.close(descriptor)

    @classmethod
    def of_rank(
        cls: type[Memory], environment: Mapping[str, str], process: int
    ) -> tuple[Memory | None, int]:
        """Returns the launcher's memory (None if this process has none) and the rank's number.

        Args:
            environment: the process's, in which the launcher has put the memory's path.
            process: the process's id.
        """
        path = environment.get(cls.variable)
        if not path:
            return None, 0
        try:
            memory, rank = cls.open(path), int(environment["RANK"])
            owner = memory.owner(rank)
        except (OSError, ValueError, KeyError, IndexError) as error:
            warnings.warn(
                f"{cls.variable}={path} is no board to post {cls.content} on "
                f"({type(error).__name__}: {error}): the launcher will not {cls.loss}",
                RuntimeWarning,
                stacklevel=3,
            )
            return None, 0
        # A process that a rank starts inherits its environment and number, but isn't a rank.
        is_taken = owner not in (0, process) and os.path.exists(f"/proc/{owner}")
        return (None if is_taken else memory), rank

    def owner(self, rank: int) -> int:
        """Returns the id of the process that posts on the page of `rank`; 0 if none has posted.

        Raises:
            IndexError: there is no page for the rank.
        """
        raise NotImplementedError


class OwnedMemory(PagedMemory):
    """Creates the memory in the launcher.

    Attributes:
        path: the path under which the ranks open it.
    """

    def __init__(self, size: int) -> None:
        """Makes room for `size` ranks.

        Raises:
            OSError: no memory or no descriptor is left.
        """
        self._descriptor = nameless_file(self.name)
        os.ftruncate(self._descriptor, (size + 1) * PAGE)
        os.pwrite(self._descriptor, self.magic, 0)
        self.path = f"/proc/{os.getpid()}/fd/{self._descriptor}"
        super().__init__(self._descriptor)

    def close(self) -> None:
        """Releases the memory."""
        self._memory.close()
        os.close(self._descriptor)


def nameless_file(name: str) -> int:
    """Makes memory that is in no folder, and returns its descriptor; `name` is only for display."""
    if hasattr(os, "memfd_create"):  # missing if Python was built for a C library before 2.27
        return os.memfd_create(name)
    with tempfile.TemporaryFile(dir="/dev/shm" if os.path.isdir("/dev/shm") else None) as file:
        return os.dup(file.fileno())
