"""Shows pages in a real browser, where one is installed."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
BROWSER = next(filter(None, map(shutil.which, BROWSERS)), None)

needed = pytest.mark.skipif(
    BROWSER is None, reason=f"there is no browser: none of {', '.join(BROWSERS)} is installed"
)


def shown(address: str, folder: Path, dark: bool = False) -> str:
    """Returns the document of a page as its scripts leave it, without a network.

    Args:
        address: of the page.
        folder: for the browser's own files.
        dark: whether the page is asked for its dark colours.
    """
    command = [
        *(BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom"),
        *(f"--user-data-dir={folder / 'browser'}", "--host-resolver-rules=MAP * 127.0.0.1:9"),
        # 0 is dark, 1 is light.
        f"--blink-settings=preferredColorScheme={0 if dark else 1}",
        *("--window-size=1600,1000", "--virtual-time-budget=5000", address),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=True)
    return done.stdout
