"""The secret of a job: a process that holds it may talk to the job's launchers.

    COLLECTIVE_SECRET        the secret itself, in the environment
    --secret-file FILE       a file that holds it: ~/.collective/secret by default, made if
                             missing, readable only by its owner

Hosts that share a home folder share the file. The secret never appears in a process list, in a log
or in an error, and no rank inherits it.
"""

from __future__ import annotations

import os
import secrets
import stat
import tempfile
from collections.abc import Mapping
from pathlib import Path

from collective.job.errors import UsageError

VARIABLE = "COLLECTIVE_SECRET"
FILE_VARIABLE = "COLLECTIVE_SECRET_FILE"
_DEFAULT_FILE = "~/.collective/secret"
_LEAST_CHARACTERS = 16
_MOST_CHARACTERS = 4096


def new_secret() -> str:
    """Makes a secret that can't be guessed: 256 bits."""
    return secrets.token_hex(32)


def job_secret(environment: Mapping[str, str], file: str | None) -> bytes:
    """Returns the secret of this job.

    Args:
        environment: the launcher's environment.
        file: --secret-file, if given.

    Raises:
        UsageError: the secret is too short or unreadable, or other users may read it.
    """
    value = environment.get(VARIABLE, "")
    if value and file is None:
        return _checked(value, VARIABLE)
    path = _file(environment, file)
    try:
        if not path.exists():
            _make(path)
        mode = path.stat().st_mode
        with path.open("rb") as opened:
            # Decoded as Python decodes the environment: the same bytes are the same secret.
            text = opened.read(4 * _MOST_CHARACTERS + 1).decode("utf-8", "surrogateescape")
    except OSError as error:
        raise UsageError(
            f"the job's secret can't be read or made: {path}: {error.strerror}; give another "
            f"--secret-file, or {VARIABLE}"
        ) from None
    # A secret that Kubernetes mounts belongs to root, and its group may read it; nobody else may.
    if mode & (stat.S_IROTH | stat.S_IWOTH):
        raise UsageError(
            f"the job's secret {path} has mode {stat.S_IMODE(mode):o}, so that other users may "
            f"read or write it: chmod 600 {path}"
        )
    return _checked(text.strip(), str(path))


def missing_secret_file(environment: Mapping[str, str], file: str | None) -> Path | None:
    """Returns the file that `job_secret` would make; None if there is a secret already."""
    if environment.get(VARIABLE) and file is None:
        return None
    path = _file(environment, file)
    return None if path.exists() else path


def _file(environment: Mapping[str, str], file: str | None) -> Path:
    return Path(file or environment.get(FILE_VARIABLE) or _DEFAULT_FILE).expanduser()


def _checked(value: str, origin: str) -> bytes:
    """Returns the bytes of a secret; an error reveals only its length."""
    if not _LEAST_CHARACTERS <= len(value) <= _MOST_CHARACTERS:
        raise UsageError(
            f"the job's secret in {origin} has {len(value)} characters: give {_LEAST_CHARACTERS} "
            f"to {_MOST_CHARACTERS}, such as those of `openssl rand -hex 32`"
        )
    return value.encode("utf-8", "surrogateescape")


def _make(path: Path) -> None:
    """Makes the whole file or nothing: two hosts that share a folder may do it at the same time."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(dir=path.parent)  # readable only by its owner
    try:
        with os.fdopen(descriptor, "w") as file:
            file.write(new_secret() + "\n")
            file.flush()
            os.fsync(file.fileno())
        os.link(name, path)
    except FileExistsError:
        pass  # the other host was first: its secret counts
    finally:
        os.unlink(name)
