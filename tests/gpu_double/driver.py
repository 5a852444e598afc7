"""Stands in for CUDA's driver: compiled operations launch functions of Python by it.

`collective/ops/native/gpu/driver.h` has the table of functions that this fills.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import sys
import threading
from collections.abc import Sequence
from typing import Any, Callable, Protocol

from collective.ops import native_library
from tests.gpu_double import hidden

NOT_READY = 600  # CUDA_ERROR_NOT_READY
LAUNCH_FAILED = 719  # CUDA_ERROR_LAUNCH_FAILED
NOT_COPIED = 0xCD

_INT, _UNSIGNED, _POINTER, _SIZE = ctypes.c_int, ctypes.c_uint, ctypes.c_void_p, ctypes.c_size_t
_FUNCTIONS = (
    ("launch", (_POINTER, *(_UNSIGNED,) * 7, _POINTER, ctypes.POINTER(_POINTER), _POINTER)),
    ("copy_to_device", (ctypes.c_uint64, _POINTER, _SIZE, _POINTER)),
    ("copy_to_host", (_POINTER, ctypes.c_uint64, _SIZE, _POINTER)),
    ("create_event", (ctypes.POINTER(_POINTER), _UNSIGNED)),
    ("record_event", (_POINTER, _POINTER)),
    ("wait_for_event", (_POINTER,)),
    ("destroy_event", (_POINTER,)),
    ("wait_for_stream", (_POINTER,)),
    ("set_memory", (ctypes.c_uint64, ctypes.c_ubyte, _SIZE, _POINTER)),
    ("query_event", (_POINTER,)),
)


class Table(ctypes.Structure):
    """Holds the functions that operations call: `Driver` of driver.h."""

    _fields_ = [(name, ctypes.CFUNCTYPE(_INT, *types)) for name, types in _FUNCTIONS]


class Launchable(Protocol):
    """Runs in the place of a kernel.

    Attributes:
        sizes: the bytes of each argument.
    """

    sizes: Sequence[int]

    def run(self, blocks: int, threads: int, shared: int, arguments: Sequence[bytes]) -> None:
        """Runs all threads of all blocks."""


class StandIn:
    """Does what CUDA's driver does, on the CPU's memory, for one stream.

    Attributes:
        delays: whether work is only queued, until something waits for it: who reads what a kernel
            or a copy writes and didn't wait finds something else there.
        fails_at: the number of the call, from 1, that does nothing and returns an error; None.
        interrupts: does something before each call, whose name it is given; None.
        calls: the names of the functions that were called.
        launches: the names of the kernels that were launched.
        uploads: what was copied to the device.
        downloads: what was copied to the host.
        queued: work that wasn't done yet.
        events: those that were made and not destroyed, by whichever test.
        failures: what kernels raised.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._kernels: list[tuple[str, Launchable]] = []
        self._made = 0
        self.events: dict[int, int] = {}  # how much of what was queued is before each
        self.reset()
        self.table = Table(
            *(made(self._guarded(name)) for name, made in Table._fields_)  # type: ignore[operator]
        )

    def reset(self) -> None:
        """Forgets calls, and does all work at once from now on."""
        self.delays = False
        self.fails_at: int | None = None
        self.interrupts: Callable[[str], Any] | None = None
        self.calls: list[str] = []
        self.launches: list[str] = []
        self.uploads: list[bytes] = []
        self.downloads: list[bytes] = []
        self.queued: list[Callable[[], Any]] = []
        self.events = dict.fromkeys(self.events, 0)
        self.failures: list[BaseException] = []

    def register(self, name: str, kernel: Launchable) -> int:
        """Returns a handle by which `kernel` is launched from now on."""
        self._kernels.append((name, kernel))
        return len(self._kernels)

    def _guarded(self, name: str) -> Callable[..., int]:
        function = getattr(self, f"_{name}", None)

        def call(*arguments: Any) -> int:
            if self.interrupts is not None:
                self.interrupts(name)
            with self._lock:
                if name == "query_event":  # How often depends on how many uploads are under way.
                    return NOT_READY if self.events[arguments[0]] else 0
                self.calls.append(name)
                if len(self.calls) == self.fails_at:
                    if name == "destroy_event":
                        self.events.pop(arguments[0])  # Nobody asks a second time.
                    return LAUNCH_FAILED
                try:
                    function(*arguments)
                except BaseException as failure:  # ctypes would only print it
                    self.failures.append(failure)
                    print(f"{name} on the double: {failure}", file=sys.stderr)
                    return LAUNCH_FAILED
                return 0

        return call

    def _add(self, work: Callable[[], Any]) -> None:
        self.queued.append(work)
        if not self.delays:
            self._work_off(len(self.queued))

    def _work_off(self, count: int) -> None:
        for _ in range(count):
            with hidden.on_device():
                self.queued.pop(0)()
        self.events = {event: max(0, left - count) for event, left in self.events.items()}

    def _launch(self, handle: int, *rest: Any) -> None:
        (blocks, _, _, threads, _, _, shared), addresses = rest[:7], rest[8]
        name, kernel = self._kernels[handle - 1]
        self.launches.append(name)
        given = [ctypes.string_at(addresses[i], size) for i, size in enumerate(kernel.sizes)]
        self._add(lambda: kernel.run(blocks, threads, shared, given))

    def _copy_to_device(self, to: int, source: int, size: int, stream: int) -> None:
        def copy() -> None:  # memory on the host is taken for pinned: it is read now
            self.uploads.append(ctypes.string_at(source, size))
            ctypes.memmove(to, source, size)

        self._add(copy)

    def _copy_to_host(self, to: int, source: int, size: int, stream: int) -> None:
        ctypes.memset(to, NOT_COPIED, size)

        def copy() -> None:
            ctypes.memmove(to, source, size)
            self.downloads.append(ctypes.string_at(to, size))

        self._add(copy)

    def _set_memory(self, at: int, value: int, size: int, stream: int) -> None:
        self._add(lambda: ctypes.memset(at, value, size))

    def _create_event(self, event: Any, flags: int) -> None:
        self._made += 1
        event[0] = self._made
        self.events[self._made] = 0

    def _record_event(self, event: int, stream: int) -> None:
        self.events[event] = len(self.queued)

    def _wait_for_event(self, event: int) -> None:
        self._work_off(self.events[event])

    def _destroy_event(self, event: int) -> None:
        del self.events[event]

    def _wait_for_stream(self, stream: int) -> None:
        self._work_off(len(self.queued))


@functools.cache
def installed() -> StandIn:
    """Returns the one of this process, which operations call from now on."""
    made, functions = StandIn(), native_library.functions()
    functions.collective_gpu_driver(ctypes.byref(made.table))
    # Sessions that nobody ended destroy events where Python can't be called any more.
    atexit.register(functions.collective_gpu_driver, None)
    return made
