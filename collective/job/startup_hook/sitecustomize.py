"""Watches from the start whether a rank trains apart from the others.

Python imports the first `sitecustomize` on its path before it runs a script. The launcher puts this
folder at the front of PYTHONPATH (`collective.launch.planning.environment`). The script sees
neither of these: the folder removes itself from the path, and another `sitecustomize`, the system's
or the user's, runs as always.
"""

import os
import sys
from importlib import machinery, util

_FOLDER = os.path.dirname(os.path.abspath(__file__))
_WATCH = "collective.job.training_apart"


def _load(spec):
    module = util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


sys.path[:] = [folder for folder in sys.path if os.path.abspath(folder) != _FOLDER]
# Loads the file by its path, since the package may not be on this interpreter's path. If it is, an
# import of the package's name finds this same module.
_file = os.path.join(os.path.dirname(_FOLDER), "training_apart.py")
_load(util.spec_from_file_location(_WATCH, _file)).watch(int(os.environ.get("WORLD_SIZE") or 1))
_others = machinery.PathFinder.find_spec("sitecustomize", sys.path)
if _others is not None and _others.loader is not None:
    _load(_others)
