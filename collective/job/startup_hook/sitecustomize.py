"""Watches from its start whether a rank trains apart from the others.

Python imports the first `sitecustomize` of its path before a script runs, and the launcher puts
this folder in front of PYTHONPATH (`collective.launch.planning.environment`). The script sees
neither: the folder leaves its path again, and another `sitecustomize`, of the system's or the
user's, runs as always.
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
# By its file, since the package may not be on this interpreter's path. Where it is, it finds this
# very module under the name.
_file = os.path.join(os.path.dirname(_FOLDER), "training_apart.py")
_load(util.spec_from_file_location(_WATCH, _file)).watch(int(os.environ.get("WORLD_SIZE") or 1))
_others = machinery.PathFinder.find_spec("sitecustomize", sys.path)
if _others is not None and _others.loader is not None:
    _load(_others)
