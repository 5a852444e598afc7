"""Lets a script of HybridBackend run here.

`import collective.compat.hybridbackend` is its first line. It is what
`collective launch --as hybridbackend` does for a script as it is. DeepRec's names are there, too,
and SparseOperationKit's.
"""

from __future__ import annotations

from collective.compat.names.deeprec import DEEPREC
from collective.compat.names.hybridbackend import HYBRIDBACKEND
from collective.compat.names.sok import SOK
from collective.compat.script_modules import INSTALLATION

INSTALLATION.add(HYBRIDBACKEND, DEEPREC, SOK)
