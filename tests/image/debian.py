"""Makes the root file system of a Debian image by debootstrap, and lets it reach packages.

A machine behind a mirror or a proxy has settings for that: a new root file system gets apt's and
the resolver's, a build pip's and the proxies.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from tests.image.image_build import Machine

_CODENAMES = {"debian:12-slim": "bookworm"}
_VARIABLES = ("http_proxy", "https_proxy", "no_proxy", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY")
_CERTIFICATES = Path("/etc/ssl/certs/ca-certificates.crt")
_PIP_SETTINGS = (Path("/etc/pip.conf"), Path("~/.config/pip/pip.conf"), Path("~/.pip/pip.conf"))


def make_root(image: str, root: Path) -> None:
    """Installs Debian's base system into a new folder.

    Raises:
      RuntimeError: debootstrap failed; shows the end of its output.
    """
    command = ["debootstrap", "--variant=minbase", _CODENAMES[image], str(root)]
    finished = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if finished.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{finished.stdout[-3000:]}")


def missing_for_builds() -> str:
    """Says what keeps this machine from building images in folders; "" if nothing does."""
    if os.geteuid() != 0:
        return "only root can change the root folder"
    if shutil.which("debootstrap") is None:
        return "there is no debootstrap (apt-get install debootstrap)"
    namespaces = ["unshare", "--mount", "--pid", "--ipc", "--uts", "--fork", "--kill-child"]
    command = [*namespaces, "mount", "-t", "tmpfs", "none", "/mnt"]
    finished = subprocess.run(command, capture_output=True, text=True)
    if finished.returncode:
        return f"this machine does not allow namespaces and mounts ({finished.stderr.strip()})"
    return ""


def this_machine() -> Machine:
    secrets = {"ca-certificates.crt": _CERTIFICATES} if _CERTIFICATES.is_file() else {}
    for path in map(Path.expanduser, _PIP_SETTINGS):
        if path.is_file():
            secrets["pip.conf"] = path
            break
    variables = {name: os.environ[name] for name in _VARIABLES if name in os.environ}
    return Machine(secrets, variables, _prepare)


def _prepare(root: Path) -> None:
    for name in ("resolv.conf", "hosts"):
        file = Path("/etc") / name
        if file.is_file():
            shutil.copy(file, root / "etc" / name)
    settings = [
        line
        for file in sorted(Path("/etc/apt/apt.conf.d").glob("*"))
        for line in file.read_text(errors="replace").splitlines()
        if line.startswith("Acquire::")
    ]
    target = root / "etc" / "apt" / "apt.conf.d" / "99machine"
    target.write_text("\n".join([*settings, ""]))
