"""The library that answers gethostname(3): to Horovod with an address, to others with the name."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from collective.job import gloo_address

ASKING = """
#include <unistd.h>
extern "C" int ask(char* name) { return gethostname(name, 256); }
"""
# Counts how often the library looks up who asks.
COUNTING = """
#include <dlfcn.h>
static int lookups;
extern "C" int dladdr(const void* address, Dl_info* info) noexcept {
  ++lookups;
  using Function = int (*)(const void*, Dl_info*);
  return reinterpret_cast<Function>(dlsym(RTLD_NEXT, "dladdr"))(address, info);
}
extern "C" int counted() { return lookups; }
"""
PROGRAM = """
import ctypes, sys
horovod, other = (ctypes.CDLL(path) for path in sys.argv[1:])
counted = ctypes.CDLL(None).counted

def ask(library):
    name = ctypes.create_string_buffer(256)
    assert library.ask(name) == 0
    return name.value.decode()

before = counted()
print({ask(other) for _ in range(100)}, counted() - before)
print({ask(horovod) for _ in range(3)}, ask(other), ask(horovod))
"""


@pytest.mark.timeout(120)
def test_horovod_gets_the_address_and_others_are_looked_up_once(tmp_path: Path):
    """A look-up in TensorFlow's library takes milliseconds; each call of a tf.function asks."""
    libraries = {"mpi_lib": ASKING, "other": ASKING, "counting": COUNTING}
    for name, source in libraries.items():
        (tmp_path / f"{name}.cc").write_text(source)
        command = ["g++", "-shared", "-fPIC", "-o", f"{name}.so", f"{name}.cc", "-ldl"]
        subprocess.run(command, cwd=tmp_path, check=True)
    preloaded = f"{tmp_path}/counting.so:{gloo_address.library()}"
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, tmp_path / "mpi_lib.so", tmp_path / "other.so"],
        env={**os.environ, "LD_PRELOAD": preloaded, "COLLECTIVE_GLOO_ADDRESS": "10.0.0.3"},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    name = socket.gethostname()
    assert done.stdout.splitlines() == [f"{{'{name}'}} 1", f"{{'10.0.0.3'}} {name} 10.0.0.3"]
