"""Lets a script of SparseOperationKit run here: `import collective.compat.sok` is its first line.

`collective launch --as sok` does the same for an unchanged script. A scope() is open from then on,
since such scripts have none, and make sessions before `sok.init()`. The names of DeepRec, which
includes SparseOperationKit, and of HybridBackend are available, too, to scripts of TensorFlow 1.
"""

from __future__ import annotations

from collective.compat.names.deeprec import DEEPREC
from collective.compat.names.hybridbackend import HYBRIDBACKEND
from collective.compat.names.sok import SOK
from collective.compat.script_modules import INSTALLATION
from collective.compat.sok_functions import open_scope

INSTALLATION.add(SOK, *([] if INSTALLATION.has_version_2 else [DEEPREC, HYBRIDBACKEND]))
open_scope()
