"""Lets a script of SparseOperationKit run here: `import collective.compat.sok` is its first line.

It is what `collective launch --as sok` does for a script as it is. A scope() is open from
then on, as such scripts have none, and make sessions before `sok.init()`. DeepRec's names are
there, too, of which SparseOperationKit is a part, and HybridBackend's.
"""

from __future__ import annotations

from collective.compat.names.deeprec import DEEPREC
from collective.compat.names.hybridbackend import HYBRIDBACKEND
from collective.compat.names.sok import SOK
from collective.compat.script_modules import INSTALLATION
from collective.compat.sok_functions import open_scope

INSTALLATION.add(SOK, DEEPREC, HYBRIDBACKEND)
open_scope()
