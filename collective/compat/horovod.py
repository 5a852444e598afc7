"""Lets a script of Horovod run here: `import collective.compat.horovod` is its first line.

`collective launch --as horovod` does the same for an unchanged script: `tensorflow` is then
TensorFlow's version 1, and `horovod.tensorflow` is Horovod's own, or what stands in for it where
Horovod isn't installed.
"""

from __future__ import annotations

from collective.compat.names.horovod import HOROVOD
from collective.compat.script_modules import INSTALLATION

INSTALLATION.add(HOROVOD)
