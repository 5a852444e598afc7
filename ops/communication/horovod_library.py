"""Finds Horovod, if it is installed: the ranks of one host do without it.

It carries what travels between hosts, and what scripts reduce by themselves.
"""

from __future__ import annotations

import importlib
from typing import Any

# Why Horovod is missing; "" if it isn't.
missing = ""
hvd: Any = None
try:
    hvd = importlib.import_module("horovod.tensorflow")
except ImportError as error:
    missing = str(error)
