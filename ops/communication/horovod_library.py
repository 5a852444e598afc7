"""Finds Horovod if it is installed: the ranks of one host don't need it.

It carries the traffic between hosts, and the reductions that scripts make themselves.
"""

from __future__ import annotations

import importlib
from typing import Any

import collective.tensorflow_internals  # noqa: F401 (Keras 2, of which Horovod derives classes)

# why Horovod is missing; "" if it isn't
missing = ""
hvd: Any = None
try:
    hvd = importlib.import_module("horovod.tensorflow")
except ImportError as error:
    missing = str(error)
