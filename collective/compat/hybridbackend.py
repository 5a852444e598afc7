"""Lets a script of HybridBackend run here.

`import collective.compat.hybridbackend` is its first line. It is what
`collective launch --as hybridbackend` does for a script as it is.
"""

from __future__ import annotations

from collective.compat.hybridbackend_names import HYBRIDBACKEND
from collective.compat.script_modules import INSTALLATION

INSTALLATION.add(HYBRIDBACKEND)
