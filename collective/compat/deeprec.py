"""Lets a script of DeepRec run here: `import collective.compat.deeprec` is its first line.

It is what `collective launch --as deeprec` does for a script as it is. DeepRec documents
SparseOperationKit as a part of itself, and is trained with HybridBackend: their names are there.
"""

from __future__ import annotations

from collective.compat.deeprec_names import DEEPREC
from collective.compat.hybridbackend_names import HYBRIDBACKEND
from collective.compat.script_modules import INSTALLATION
from collective.compat.sok_names import SOK

INSTALLATION.add(DEEPREC, SOK, HYBRIDBACKEND)
