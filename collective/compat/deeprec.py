"""Lets a script of DeepRec run here: `import collective.compat.deeprec` is its first line.

It is what `collective launch --as deeprec` does for a script as it is. DeepRec documents
SparseOperationKit as a part of itself, and is trained with HybridBackend: their names are there.
"""

from __future__ import annotations

from collective.compat.names.deeprec import DEEPREC
from collective.compat.names.hybridbackend import HYBRIDBACKEND
from collective.compat.names.sok import SOK
from collective.compat.script_modules import INSTALLATION

INSTALLATION.add(DEEPREC, SOK, HYBRIDBACKEND)
