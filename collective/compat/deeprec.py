"""Lets a script of DeepRec run here: `import collective.compat.deeprec` is its first line.

`collective launch --as deeprec` does the same for an unchanged script. DeepRec documents
SparseOperationKit as a part of itself, and is used together with HybridBackend: their names are
available, too.
"""

from __future__ import annotations

from collective.compat.names.deeprec import DEEPREC
from collective.compat.names.hybridbackend import HYBRIDBACKEND
from collective.compat.names.sok import SOK
from collective.compat.script_modules import INSTALLATION

INSTALLATION.add(DEEPREC, SOK, HYBRIDBACKEND)
