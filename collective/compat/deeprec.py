"""Lets a script of DeepRec run here: `import collective.compat.deeprec` is its first line.

It is what `collective launch --as deeprec` does for a script as it is.
"""

from __future__ import annotations

from collective.compat.deeprec_names import DEEPREC
from collective.compat.script_modules import INSTALLATION

INSTALLATION.add(DEEPREC)
