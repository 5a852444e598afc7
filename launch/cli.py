"""The command line: options, then the command that every rank runs."""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn

from . import __doc__ as manual
from .command import rank_command
from .devices import NO_GPUS, driver_gpus, visible_gpus
from .machine import available_cores
from .plan import Plan, choose_devices, shown_ranks
from .usage import UsageError


@dataclass(frozen=True)
class Options:
    """The command line, read but not yet judged."""

    ranks: str
    device: str
    log_dir: str | None
    tee: str
    grace: float
    stall_timeout: float
    dry_run: bool
    check: bool
    command: tuple[str, ...]


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the launcher and returns its exit code."""
    _open_standard_streams()
    try:
        options = parse(sys.argv[1:] if arguments is None else arguments)
        if options.check:
            from .check import check

            return check()
        plan = make_plan(options, os.environ)
        if options.dry_run:
            print(plan.describe())
            return 0
        # what only a job needs, a server for one, costs half of the start-up time
        from .job import Job

        return Job(plan).run()
    except UsageError as error:
        print(f"collective.launch: {error}", file=sys.stderr)
        return 2


def parse(arguments: Sequence[str]) -> Options:
    """Reads the command line.

    Raises:
      UsageError: it can't be read.
    """
    ours, command = _split(arguments)
    found = _parser().parse_args(ours)
    return Options(
        found.ranks,
        found.device,
        found.log_dir,
        found.tee,
        found.grace,
        found.stall_timeout,
        found.dry_run,
        found.check,
        tuple(command),
    )


def make_plan(options: Options, environment: Mapping[str, str]) -> Plan:
    """Decides everything that a job needs to know.

    Raises:
      UsageError: what was asked for can't be had.
    """
    command = rank_command(options.command)
    if not 0 <= options.grace < math.inf:
        raise UsageError(f"--grace {options.grace}: give a number of seconds, 0 or more")
    if not 0 <= options.stall_timeout < math.inf:
        raise UsageError(
            f"--stall-timeout {options.stall_timeout}: give a number of seconds, 0 for no limit"
        )
    cores = available_cores()
    devices = choose_devices(
        _count(options.ranks), options.device, _gpus(options, environment), cores
    )
    terminal = os.isatty(2)
    return Plan(
        command=command,
        devices=devices,
        outer=dict(environment),
        cores=cores,
        terminal=terminal,
        columns=(os.get_terminal_size(2).columns or None) if terminal else None,
        grace=options.grace,
        shown=shown_ranks(options.tee, len(devices)),
        log_dir=options.log_dir,
        stall_timeout=options.stall_timeout,
    )


def _gpus(options: Options, environment: Mapping[str, str]) -> tuple[str, ...]:
    if "cpu" in (options.device, options.ranks):
        return NO_GPUS
    return visible_gpus(environment, driver_gpus())


def _count(text: str) -> int | str:
    if text in ("auto", "gpu", "cpu"):
        return text
    try:
        return int(text)
    except ValueError:
        raise UsageError(f"-np {text}: give a number of ranks, auto, gpu or cpu") from None


def _split(arguments: Sequence[str]) -> tuple[Sequence[str], Sequence[str]]:
    """Our options, and the rest: from the first word that is neither an option of ours nor the
    value of one.
    """
    with_value = {
        name for action in _parser()._actions if action.nargs != 0 for name in action.option_strings
    }
    position = 0
    while position < len(arguments):
        word = arguments[position]
        if word == "--":
            return arguments[:position], arguments[position + 1 :]
        if word == "-m" or not word.startswith("-"):
            break
        position += 2 if word in with_value else 1
    return arguments[:position], arguments[position:]


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """One sentence, not the usage on top of it."""
        raise UsageError(f"{message}; --help tells more")


def _parser() -> _Parser:
    parser = _Parser(
        prog="python -m collective.launch",
        usage="%(prog)s [options] {script.py | python3 script.py | -m module} [arguments]",
        description=manual,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add(
        "-np",
        "--nproc-per-node",
        dest="ranks",
        default="auto",
        metavar="N|auto|gpu|cpu",
        help="how many ranks; auto (the default): one for each visible GPU, without any one CPU "
        "rank; "
        "gpu: one for each visible GPU; cpu: one CPU rank for each core",
    )
    add(
        "--device",
        choices=("auto", "cpu", "gpu"),
        default="auto",
        help="cpu: hide the GPUs; gpu: insist on them",
    )
    add(
        "--log-dir",
        metavar="FOLDER",
        help="also keep the output, as FOLDER/rank.N/stdout and stderr",
    )
    add(
        "--tee",
        metavar="RANKS",
        default="all",
        help='show these ranks only: "0", "0,2-3", "all", "none"',
    )
    add(
        "--grace",
        type=float,
        default=5.0,
        metavar="SECONDS",
        help="from TERM to KILL (default: %(default)g)",
    )
    add(
        "--stall-timeout",
        type=float,
        default=600.0,
        metavar="SECONDS",
        help="how long ranks may wait for one another before the job ends; 0: for ever (default: "
        "%(default)g)",
    )
    add("--dry-run", action="store_true", help="print the plan, start nothing")
    add("--check", action="store_true", help="print what is installed and what is missing")
    return parser


def _open_standard_streams() -> None:
    """Opens what we were started without of stdin, stdout and stderr; else a rank's pipe would get
    its number.
    """
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the kernel gives the lowest free number: this one
            os.set_inheritable(descriptor, True)
    if sys.stderr is None:
        sys.stderr = open(2, "w", closefd=False)
    if sys.stdout is None:
        sys.stdout = open(1, "w", closefd=False)
