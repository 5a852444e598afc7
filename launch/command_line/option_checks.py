"""Refuses options that have no effect on a job, and values that no machine can satisfy.

                                         one host    a launcher on each    a list of hosts
    --master-addr, --master-port         a note      used                  refused
    --secret-file                        refused     used                  refused
    --network-interface                  refused     used                  used
    --start-timeout, --host-timeout      refused     used                  used
    --ssh-port, --ssh-identity-file      refused     refused               used
    --elastic                            used        refused               refused

A command line that is written for any number of hosts, `--nnodes M --master-addr H ...`, may have
M = 1: then only ssh's options are refused. An option overrides an environment variable that says
something else. Variables that have no effect on a job are ignored.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping
from typing import Literal

from collective.job.errors import UsageError
from collective.launch.command_line.host_options import host_count_is_given
from collective.launch.output.log_patterns import check_patterns

Mode = Literal["one", "each", "list"]

_MEETING = {"master": "--master-addr", "port": "--master-port"}
_SECRET = {"secret_file": "--secret-file"}
_NETWORK = {
    "interface": "--network-interface",
    "start_timeout": "--start-timeout",
    "host_timeout": "--host-timeout",
}
_SSH = {"ssh_port": "--ssh-port", "ssh_identity_file": "--ssh-identity-file"}
_OF_SEVERAL = (
    "{option} is about several hosts, and this job has one: leave it out, or name the hosts by "
    "--nnodes or -H"
)
_REFUSED: Mapping[Mode, Mapping[str, Mapping[str, str]]] = {
    "one": {_OF_SEVERAL: {**_SECRET, **_NETWORK, **_SSH}},
    "each": {
        "{option} is for -H and --hostfile, which start the launchers of other hosts over ssh: "
        "leave it out, or give the hosts by one of them": _SSH
    },
    "list": {
        "{option} is for a launcher that is started on each host; those that -H or a host file "
        "starts are told where to connect: leave it out": _MEETING,
        "{option} is for a launcher that is started on each host; for those that -H or a host "
        "file starts a secret is made: leave it out": _SECRET,
    },
}


def check_purpose(options: argparse.Namespace) -> None:
    """Checks that a command line has one purpose.

    Raises:
        UsageError: it has several purposes.
    """
    flags = {
        "--emit": options.emit,
        "--check": options.check,
        "--dry-run": options.dry_run,
        "--job-schema": options.job_schema,
    }
    given = [flag for flag, value in flags.items() if value]
    if len(given) > 1:
        raise UsageError(f"{given[0]} and {given[1]} contradict: each prints, and starts nothing")


def check_used(options: argparse.Namespace, environment: Mapping[str, str], mode: Mode) -> str:
    """Checks that each given option has an effect on a job of one host or of several.

    Args:
        options: as given.
        environment: the launcher's environment.
        mode: one host; several hosts with a launcher started on each; or a list of hosts.

    Returns:
        A note on an option without effect that torchrun's users often give; "" for none.

    Raises:
        UsageError: an option would have no effect.
    """
    for sentence, flags in _REFUSED[mode].items():
        for name, option in flags.items():
            of_any_number = mode == "one" and name not in _SSH
            if of_any_number and host_count_is_given(options, environment):
                continue
            if getattr(options, name) is not None:
                raise UsageError(sentence.format(option=option))
    if mode != "one" and options.elastic:
        raise UsageError(
            "--elastic is for jobs of one host: leave it out, or start the job again on the hosts "
            "that are left"
        )
    if mode != "one" and options.data_loaders is not None and options.emit is None:
        raise UsageError(
            f"--data-loaders {' '.join(options.data_loaders)} is for jobs of one host: start "
            "loaders by themselves, and give ranks and loaders their addresses by "
            "COLLECTIVE_LOADERS=h1:7000,h2:7000, as the manifests of --emit do"
        )
    if mode != "one" or host_count_is_given(options, environment):
        return ""
    given = [option for name, option in _MEETING.items() if getattr(options, name) is not None]
    if not given:
        return ""
    has = "has" if len(given) == 1 else "have"
    return (
        f"{' and '.join(given)} {has} no effect: the ranks of one host meet at a port that the "
        "kernel picks"
    )


def check_limits(options: argparse.Namespace) -> None:
    """Checks numbers, and options that need other options.

    Raises:
        UsageError: a value is impossible, or an option has no effect.
    """
    if options.framework is None and options.embedding_scope != "script":
        raise UsageError(
            "--embedding-scope is for scripts of other frameworks: give --as, too, or mark tables "
            "by strategy.embedding_scope()"
        )
    if options.metrics_port is not None and options.independent:
        raise UsageError(
            f"--metrics-port {options.metrics_port}: with --independent each rank has metrics of "
            "its own, and only one could serve them there: leave it out, and let the script give "
            "COLLECTIVE_METRICS_PORT a port for each rank before it opens scope()"
        )
    if options.log_dir == "":
        raise UsageError("--log-dir '': give a folder, or leave it out")
    if options.data_loaders is not None:
        loader_count(options)
    if options.max_restarts < 0:
        raise UsageError(f"--max-restarts {options.max_restarts}: give 0 or more")
    if options.grace is not None and not 0 <= options.grace < math.inf:
        raise UsageError(f"--grace {options.grace}: give a number of seconds, 0 or more")
    if not 0 <= options.stall_timeout < math.inf:
        raise UsageError(
            f"--stall-timeout {options.stall_timeout}: give a number of seconds, 0 for no limit"
        )
    check_patterns_of_lines(options)
    pause = options.restart_pause
    if pause is not None and not 0 <= pause < math.inf:
        raise UsageError(f"--restart-pause {pause}: give a number of seconds, 0 or more")
    if pause is not None and not options.max_restarts:
        raise UsageError(
            f"--restart-pause {pause:g} is about restarts: give --max-restarts, too, 1 or more"
        )


def loader_count(options: argparse.Namespace) -> int:
    """Returns how many loaders --data-loaders asks for; 0 without it.

    Raises:
        UsageError: its first value isn't a number from 1.
    """
    if options.data_loaders is None:
        return 0
    count, script = options.data_loaders
    if not (count.isdecimal() and int(count) >= 1):
        raise UsageError(
            f"--data-loaders {count} {script}: give how many, 1 or more, and the script that they "
            "run: --data-loaders 2 loader.py"
        )
    return int(count)


def check_patterns_of_lines(options: argparse.Namespace) -> None:
    """Checks the patterns of lines that decide about restarts.

    Raises:
        UsageError: one is no regular expression, or has no effect.
    """
    for option in ("--no-restart-after", "--leave-out-host-after"):
        patterns = getattr(options, option.strip("-").replace("-", "_")) or ()
        check_patterns(option, patterns)
        if patterns and not options.max_restarts:
            raise UsageError(
                f"{option} {patterns[0]} is about restarts: give --max-restarts, too, 1 or more"
            )


def least_ranks(options: argparse.Namespace, size: int) -> int:
    """Returns the least number of ranks of an elastic job; 0 if the job isn't elastic.

    Args:
        options: as given.
        size: the number of ranks at the start.

    Raises:
        UsageError: the options contradict each other.
    """
    if not options.elastic:
        if options.min_ranks is not None:
            raise UsageError(f"--min-np {options.min_ranks} is for --elastic: give that, too")
        return 0
    if not options.max_restarts:
        raise UsageError(
            "--elastic is about the ranks of a restart: give --max-restarts, too, 1 or more"
        )
    least = 1 if options.min_ranks is None else options.min_ranks
    if not 1 <= least <= size:
        raise UsageError(f"--min-np {least}: the job starts with {size}; give 1 to {size}")
    return least
