"""Runs this package's programs on other hosts over ssh: the command line, and why it fails."""

from __future__ import annotations

import os
import re
import shlex
import shutil
from collections.abc import Sequence

from collective.job.errors import UsageError
from collective.job.network import is_this_host
from collective.launch.command_line.host_options import SshOptions

_CONNECT_SECONDS = 15
_PATH_NAMES = ("PYTHONPATH", "LD_LIBRARY_PATH")
_FAILED = 255  # ssh's own exit code
_NOT_STARTED = (126, 127)  # exit codes of a shell
_NO_FOLDER = re.compile(r"\bcd: ")
_NO_PACKAGE = re.compile(r"No module named '?collective")

# The first entry that matches a line of ssh decides.
_REMEDIES = (
    (
        "IDENTIFICATION HAS CHANGED",
        "its key is another one than before: if you know why, `ssh-keygen -R {host}`",
    ),
    (
        "Host key verification failed",
        "its key is unknown here: `ssh {host} true` by hand takes it, or a line of `ssh-keyscan "
        "{host}` in ~/.ssh/known_hosts",
    ),
    (
        r"Could not resolve hostname",
        "give its address, or the name one in /etc/hosts or in ~/.ssh/config",
    ),
    (
        r"Permission denied",
        "`ssh-copy-id {host}` brings a key there, --ssh-identity-file names another",
    ),
    (
        r"[Cc]onnection refused",
        "no ssh server listens there: start one, or name its port by --ssh-port",
    ),
    (
        r"timed out|No route to host|[Uu]nreachable",
        "it is down, or a firewall is between",
    ),
)


def command_on_host(host: str, module: Sequence[str], ssh: SshOptions) -> list[str]:
    """Returns the command that runs one of this package's programs on a host, in this folder.

    Args:
        host: the host's name or address; this host needs no ssh.
        module: the program's command line.
        ssh: how to call ssh.

    Raises:
        UsageError: there is no ssh here.
    """
    if is_this_host(host):
        return list(module)
    program = shutil.which("ssh")
    if program is None:
        raise UsageError(
            f"there is no ssh here, which starts the launcher on host {host}: install "
            "openssh-client, or start the launcher on each host, with --nnodes and --node-rank"
        )
    options = ["-o", "BatchMode=yes", "-o", f"ConnectTimeout={_CONNECT_SECONDS}", "-T"]
    if ssh.port is not None:
        options += ["-p", str(ssh.port)]
    if ssh.identity_file is not None:
        options += ["-i", ssh.identity_file]
    # The variables that Python needs to find this package; everything else goes through stdin.
    paths = [f"{name}={os.environ[name]}" for name in _PATH_NAMES if name in os.environ]
    command = ["env", *paths, *module] if paths else module
    remote = f"cd {shlex.quote(os.getcwd())} && exec {shlex.join(command)}"
    return [program, *options, "--", host, remote]


def explanation(host: str, code: int, lines: Sequence[str], python: str) -> str:
    """Says why ssh couldn't run this package's program on a host; "" if the reason is unknown.

    Args:
        host: the host's name or address.
        code: ssh's exit code.
        lines: the lines on stderr.
        python: the interpreter that was to run there.
    """
    last = lines[-1] if lines else "it says nothing"
    if code == _FAILED:
        fix = _remedy(host, lines)
        must = f"`ssh {host} true` must work"
        return f"ssh can't start the launcher there: {last}; {must}{': ' if fix else ''}{fix}"
    folder = next(filter(_NO_FOLDER.search, lines), "")
    if folder:
        return f"the folder from which you start does not exist ({folder}): all hosts need it"
    if code in _NOT_STARTED:
        return f"there is no {python} that runs there ({last}): all hosts need it"
    missing = next(filter(_NO_PACKAGE.search, lines), "")
    if missing:
        return (
            f"{python} there doesn't find this package, or has another version of it ({missing}): "
            "install the same on all"
        )
    return ""


def _remedy(host: str, lines: Sequence[str]) -> str:
    """Returns what helps after ssh has failed; "" if its message is unknown.

    Args:
        host: the host's name or address.
        lines: ssh's lines on stderr.
    """
    text = "\n".join(lines)
    for pattern, fix in _REMEDIES:
        if re.search(pattern, text):
            return fix.format(host=host)
    return ""
