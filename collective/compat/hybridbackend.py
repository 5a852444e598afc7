"""Lets a script of HybridBackend run here.

`import collective.compat.hybridbackend` is its first line. It is what
`collective launch --as hybridbackend` does for a script as it is. DeepRec's names are there, too,
and SparseOperationKit's.
"""

from __future__ import annotations

from collective.compat.deeprec_names import DEEPREC
from collective.compat.hybridbackend_names import HYBRIDBACKEND
from collective.compat.script_modules import INSTALLATION
from collective.compat.sok_names import SOK

INSTALLATION.add(HYBRIDBACKEND, DEEPREC, SOK)
