"""Starts programs of modelzoo/census_income from this checkout, installed or not."""
from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CENSUS_INCOME = ROOT / 'modelzoo' / 'census_income'
NO_NETWORK = dict.fromkeys(('http_proxy', 'https_proxy', 'HTTP_PROXY', 'HTTPS_PROXY'), 'http://127.0.0.1:9')


def train(ranks: int, *options: object, **environment: str | None) -> subprocess.CompletedProcess:
    """Calls train.py on some ranks, with these options and changes to the environment."""
    command = [sys.executable, '-m', 'collective.launch', '-np', str(ranks), '--device', 'cpu',
               str(CENSUS_INCOME / 'train.py'), *map(str, options)]
    return subprocess.run(command, cwd=ROOT, env=environ(**environment), timeout=200,
                          stdin=subprocess.DEVNULL, capture_output=True, text=True)


def environ(**changes: str | None) -> dict[str, str]:
    """This process' environment with the checkout importable and with these changes (None: not set)."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get('PYTHONPATH')]))
    changed = {**os.environ, 'PYTHONPATH': path, **changes}
    return {name: value for name, value in changed.items() if value is not None}
