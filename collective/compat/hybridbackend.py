"""Lets a script of HybridBackend run here.

`import collective.compat.hybridbackend` is its first line; `collective launch --as hybridbackend`
does the same for an unchanged script. The names of DeepRec and SparseOperationKit are available,
too.
"""

from __future__ import annotations

from collective.compat.names.deeprec import DEEPREC
from collective.compat.names.hybridbackend import HYBRIDBACKEND
from collective.compat.names.sok import SOK
from collective.compat.script_modules import INSTALLATION

INSTALLATION.add(HYBRIDBACKEND, DEEPREC, SOK)
