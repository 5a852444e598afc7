"""The memory that the ranks of a job share, for exchanges that need no network.

The launcher makes it; ranks open it by way of the launcher's descriptor in /proc, as they do the
progress board. It has no name in any folder (the /dev/shm of a container is small), and is gone
with the last process that has it, however that ends. Here it gets a header only. Ranks lay out the
rest, and take pages as they need them (ops/native/mailbox.h).
"""

from __future__ import annotations

import os
import struct

VARIABLE = "COLLECTIVE_SHARED_MEMORY"  # the environment variable that holds the memory's path
MAGIC = b"collective wire\n"
VERSION = 1  # of the layout
_HEADER = struct.Struct("<16sIII4x")  # magic, version, ranks, the rendezvous' port


class SharedMemory:
    """Makes the memory, in the launcher, and keeps it until the process ends.

    Attributes:
      path: by which the ranks open it; "" where there is none.
    """

    def __init__(self, size: int, rendezvous_port: int) -> None:
        """Makes an empty memory for `size` ranks.

        Args:
          size: how many ranks there are; a single one shares nothing.
          rendezvous_port: tells jobs apart.

        Raises:
          OSError: there is no memory, or no descriptor left.
        """
        self.path = ""
        # not where Python was built for a C library before 2.27
        if size == 1 or not hasattr(os, "memfd_create"):
            return
        descriptor = os.memfd_create("collective.wire")
        os.pwrite(descriptor, _HEADER.pack(MAGIC, VERSION, size, rendezvous_port), 0)
        self.path = f"/proc/{os.getpid()}/fd/{descriptor}"
