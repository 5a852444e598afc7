"""The command line: options, then the command that every rank runs."""

from __future__ import annotations

import argparse
import math
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from typing import NoReturn

from collective import __version__

from . import __doc__ as manual
from .command import FRAMEWORKS, as_framework, misplaced_option, rank_command
from .devices import NO_GPUS, choose_devices, driver_gpus, visible_gpus
from .dry_run import describe
from .durations import seconds
from .errors import UsageError
from .host_options import (
    HostList,
    add_host_options,
    host_list,
    host_options,
    ranks_from_environment,
)
from .machine import available_cores
from .manifests.options import ManifestOptions, add_options, check_unused
from .plan import LONGEST_PAUSE, LaunchPlan
from .preempt_signals import signal_number

_PROGRAM = "python -m collective.launch"
DEFAULT_GRACE = 5.0
DEFAULT_TIME_TO_SAVE = 60.0
DEFAULT_CHECK_SECONDS = 30.0  # in which a host has to answer --check


class LauncherOptions(ManifestOptions):
    """Holds the options as they were given, and the command behind them; `make_plan` judges."""

    ranks: str | None
    nodes: str | None
    node: int | None
    master: str | None
    port: int | None
    standalone: bool
    hosts: str | None
    hostfile: str | None
    ssh_port: int | None
    ssh_identity_file: str | None
    interface: str | None
    start_timeout: float
    host_timeout: float
    secret_file: str | None
    device: str
    log_dir: str | None
    tee: str
    grace: float | None
    preempt_signal: int
    max_restarts: int
    restart_pause: float
    elastic: bool
    min_ranks: int | None
    stall_timeout: float
    verbose: bool
    no_python: bool
    framework: str | None
    embedding_scope: str
    dry_run: bool
    check: bool
    words: tuple[str, ...]
    command: tuple[str, ...]


def main(arguments: Sequence[str] | None = None, prog: str = _PROGRAM) -> int:
    """Runs the launcher and returns its exit code; `prog` is how the user called it."""
    _open_standard_streams()
    try:
        options = parse_options(sys.argv[1:] if arguments is None else arguments, prog)
        if options.emit is not None:
            print(emitted(options), end="")
            return 0
        if options.check:
            return _check(options)
        listed = host_list(options, os.environ)
        if listed is not None:
            options.standalone = True  # whatever the environment says of torchrun's hosts
            options.ranks = _ranks_of(listed)
        plan = make_plan(options, os.environ)
        hosts = host_options(options, os.environ)
        if (hosts or listed) is not None and options.elastic:
            raise UsageError(
                "--elastic is for jobs of one host: leave it out, or start the job again on the "
                "hosts that are left"
            )
        misplaced = misplaced_option(options.command)
        if misplaced:
            print(f"collective.launch: {misplaced}", file=sys.stderr)
        if options.dry_run:
            from .logs import check_logs

            check_logs(plan)
            print(describe(plan, hosts, listed))
            return 0
        if listed is not None:
            from .several_hosts import run_from_here

            words = sys.argv[1:] if arguments is None else arguments
            return run_from_here(
                plan, listed, words, lambda size: parse_rank_list(options.tee, size)
            )
        if hosts is not None:
            from .secret import job_secret
            from .several_hosts import run

            secret = job_secret(os.environ, hosts.secret_file)
            return run(plan, hosts, secret, lambda size: parse_rank_list(options.tee, size))
        # Only a job needs a server and its like; importing them takes half of the start-up time.
        from .gloo_address import with_gloo_address
        from .job import Job

        return Job(with_gloo_address(plan)).run()
    except UsageError as error:
        print(f"collective.launch: {error}", file=sys.stderr)
        return 2


def parse_options(arguments: Sequence[str], prog: str = _PROGRAM) -> LauncherOptions:
    """Reads the command line.

    Raises:
      UsageError: it can't be read, or --emit is missing.
    """
    words, command = _split(arguments)
    options = _parser(prog).parse_args(words, namespace=LauncherOptions())
    check_unused(options)
    options.words = tuple(words)
    options.command = tuple(command)
    return options


def emitted(options: LauncherOptions) -> str:
    """Returns the manifest of --emit.

    Raises:
      UsageError: the options ask for what a scheduler doesn't give.
    """
    from .manifests import cluster_job, manifest

    if options.dry_run:
        raise UsageError("--emit and --dry-run contradict: both print, and start nothing")
    _check_limits(options)
    job = cluster_job(
        options,
        options.words,
        options.command,
        ranks=_rank_count(options.ranks or "auto"),
        device=options.device,
        max_restarts=options.max_restarts,
        time_to_save=DEFAULT_TIME_TO_SAVE if options.grace is None else options.grace,
        stall_timeout=options.stall_timeout,
    )
    if options.elastic and job.replicas > 1:
        raise UsageError(
            f"--elastic is for jobs of one host: leave it out, or --replicas {job.replicas}"
        )
    _min_ranks(options, job.replicas * job.ranks)
    parse_rank_list(options.tee, job.replicas * job.ranks)
    return manifest(job, str(options.emit))


def _check(options: LauncherOptions) -> int:
    """Runs --check for the job that the other options describe."""
    from .diagnostics import CheckedJob, check

    listed = host_list(options, os.environ)
    hosts = None if listed is not None else host_options(options, os.environ)
    ranks = _rank_count(options.ranks or ranks_from_environment(os.environ) or "auto")
    if ranks == "cpu":
        ranks = available_cores()
    job = CheckedJob(
        ranks=ranks if isinstance(ranks, int) else None,
        uses_gpus=options.device != "cpu" and options.ranks != "cpu",
        files=[word for word in options.command[:1] if word.endswith(".py")],
        hosts=hosts,
        listed=listed,
        seconds=min(options.start_timeout, DEFAULT_CHECK_SECONDS),
    )
    return check(job)


def make_plan(options: LauncherOptions, environment: Mapping[str, str]) -> LaunchPlan:
    """Decides everything that a job needs to know.

    Raises:
      UsageError: the options ask for what can't be had.
    """
    command = rank_command(options.command, options.no_python)
    if options.framework is not None:
        command = as_framework(command, options.framework, options.embedding_scope)
    _check_limits(options)
    grace = DEFAULT_GRACE if options.grace is None else options.grace
    cores = available_cores()
    ranks = _rank_count(options.ranks or ranks_from_environment(environment) or "auto")
    gpus = NO_GPUS
    if "cpu" not in (options.device, ranks):
        gpus = visible_gpus(environment, driver_gpus())
    devices = choose_devices(ranks, options.device, gpus, cores)
    min_ranks = _min_ranks(options, len(devices))
    terminal = os.isatty(2)
    return LaunchPlan(
        command=command,
        devices=devices,
        launcher_environment=dict(environment),
        cores=cores,
        terminal=terminal,
        columns=(os.get_terminal_size(2).columns or None) if terminal else None,
        grace=grace,
        time_to_save=DEFAULT_TIME_TO_SAVE if options.grace is None else grace,
        preempt_signal=options.preempt_signal,
        max_restarts=options.max_restarts,
        restart_pause=options.restart_pause,
        most_ranks=len(devices),
        min_ranks=min_ranks,
        shown_ranks=_shown_ranks(options, environment, len(devices)),
        log_dir=options.log_dir,
        verbose=options.verbose,
        stall_timeout=options.stall_timeout,
    )


def _check_limits(options: LauncherOptions) -> None:
    """Refuses what no machine could make good."""
    if options.framework is None and options.embedding_scope != "script":
        raise UsageError(
            "--embedding-scope is for scripts of other frameworks: give --as, too, or mark tables "
            "by strategy.embedding_scope()"
        )
    if options.grace is not None and not 0 <= options.grace < math.inf:
        raise UsageError(f"--grace {options.grace}: give a number of seconds, 0 or more")
    if not 0 <= options.stall_timeout < math.inf:
        raise UsageError(
            f"--stall-timeout {options.stall_timeout}: give a number of seconds, 0 for no limit"
        )
    if not 0 <= options.restart_pause < math.inf:
        raise UsageError(
            f"--restart-pause {options.restart_pause}: give a number of seconds, 0 or more"
        )


def parse_rank_list(text: str, size: int) -> frozenset[int]:
    """Returns the ranks that --tee names: "all", "none", or numbers and ranges like "0,2-3".

    Raises:
      UsageError: it isn't that, or names a rank that isn't there.
    """
    if text in ("all", "none"):
        return frozenset(range(size) if text == "all" else ())
    ranks: set[int] = set()
    for word in text.split(","):
        first, dash, last = word.strip().partition("-")
        if not (first.isdigit() and (last.isdigit() or not dash)):
            raise UsageError(f'--tee {text}: give "all", "none" or ranks like 0,2-3')
        ranks.update(range(int(first), int(last or first) + 1))
    if max(ranks, default=0) >= size:
        raise UsageError(f"--tee {text}: there is no rank {max(ranks)}, the last one is {size - 1}")
    return frozenset(ranks)


def _ranks_of(listed: HostList) -> str | None:
    """Returns how many ranks this host gets, if it is the first of a list."""
    from .network import is_this_host

    name, ranks = listed.hosts[0]
    if not is_this_host(name):
        return "1"  # none is here; the plan wants one all the same
    return None if ranks is None else str(ranks)


def _shown_ranks(
    options: LauncherOptions, environment: Mapping[str, str], size: int
) -> frozenset[int]:
    """Returns the ranks that --tee names; of several hosts all, until it is known who comes."""
    if options.hosts or options.hostfile or host_options(options, environment) is not None:
        return frozenset(range(size))
    return parse_rank_list(options.tee, size)


def _min_ranks(options: LauncherOptions, size: int) -> int:
    """Returns how few ranks an elastic job may have; 0 if the job isn't elastic."""
    if options.max_restarts < 0:
        raise UsageError(f"--max-restarts {options.max_restarts}: give 0 or more")
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


def _preempt_signal(text: str) -> int:
    try:
        return signal_number(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{error}; give a name like USR1, or a number") from None


def _rank_count(text: str) -> int | str:
    if text in ("auto", "gpu", "cpu"):
        return text
    try:
        return int(text)
    except ValueError:
        raise UsageError(f"-np {text}: give a number of ranks, auto, gpu or cpu") from None


def _split(arguments: Sequence[str]) -> tuple[Sequence[str], Sequence[str]]:
    """Splits the launcher's options from the command.

    The command begins with the first word that is neither an option nor an option's value.
    """
    options_with_value: set[str] = set()
    for action in _parser(_PROGRAM)._actions:
        if action.nargs != 0:
            options_with_value.update(action.option_strings)
    position = 0
    while position < len(arguments):
        word = arguments[position]
        if word == "--":
            return arguments[:position], arguments[position + 1 :]
        if word == "-m" or not word.startswith("-"):
            break
        position += 2 if word in options_with_value else 1
    return arguments[:position], arguments[position:]


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Raises one sentence instead of printing the whole usage before it."""
        raise UsageError(f"{message}; --help tells more")


def _parser(prog: str) -> _Parser:
    parser = _Parser(
        prog=prog,
        usage="%(prog)s [options] {script.py | python3 script.py | -m module} [arguments]\n"
        "       %(prog)s [options] --no-python program [arguments]",
        description=manual,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add(
        "-np",
        "-n",
        "--nproc-per-node",
        "--nproc_per_node",
        dest="ranks",
        default=None,
        metavar="N|auto|gpu|cpu",
        help="how many ranks on this host; auto (the default): one for each visible GPU, without "
        "any one CPU rank; gpu: one for each visible GPU; cpu: one CPU rank for each core",
    )
    add_host_options(parser)
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
        "--verbose",
        action="store_true",
        help="show every line as each rank writes it: also noise, and what ranks write alike",
    )
    add(
        "--no-python",
        action="store_true",
        help="run a program that is no Python script, as it is",
    )
    add(
        "--as",
        dest="framework",
        choices=FRAMEWORKS,
        help="run a script that was written for another framework, as it is: `import tensorflow` "
        "gives it TensorFlow's version 1 with that framework's names",
    )
    add(
        "--embedding-scope",
        choices=("script", "auto"),
        default="script",
        help="with --as: auto opens strategy.scope() around the whole script and makes tables of "
        "the weights of its embedding columns and of partitioned variables, but for layers'; "
        "script (the default): the script opens its scopes itself",
    )
    add(
        "--grace",
        type=seconds,
        default=None,
        metavar="TIME",
        help="from TERM to KILL, in seconds or as 90s, 1m, 2h (default: "
        f"{DEFAULT_GRACE:g}; {DEFAULT_TIME_TO_SAVE:g} for ranks that are told to stop, and save)",
    )
    add(
        "--preempt-signal",
        type=_preempt_signal,
        default=int(signal.SIGTERM),
        metavar="SIGNAL",
        help="a signal that means TERM, too: all ranks stop after the same step, and save; as USR1 "
        "of Slurm's --signal=B:USR1@120",
    )
    add(
        "--max-restarts",
        "--max_restarts",
        type=int,
        default=0,
        metavar="K",
        help="after a failure start all ranks again, up to K times: the script goes on from its "
        "latest checkpoint (default: %(default)s)",
    )
    add(
        "--restart-pause",
        type=seconds,
        default=1.0,
        metavar="TIME",
        help="before the first restart; before each further one twice as long, "
        f"{LONGEST_PAUSE:g} s at most (default: %(default)g)",
    )
    add(
        "--elastic",
        action="store_true",
        help="restart with the ranks that are left: without a GPU that is gone, or a CPU rank that "
        "died",
    )
    add(
        "--min-np",
        dest="min_ranks",
        type=int,
        default=None,
        metavar="A",
        help="with --elastic: at least so many ranks (default: 1)",
    )
    add(
        "--stall-timeout",
        type=seconds,
        default=600.0,
        metavar="TIME",
        help="how long ranks may wait for one another before the job ends, in seconds or as 90s, "
        "10m, 2h; 0: for ever (default: %(default)g)",
    )
    add_options(parser)
    add("--dry-run", action="store_true", help="print the plan, start nothing")
    add(
        "--check",
        action="store_true",
        help="print what is installed and what is missing; with -H or --nnodes also what is in the "
        "way of a job on these hosts, each of which may take 30 s, or --start-timeout, to answer",
    )
    add(
        "--version",
        action="version",
        version=f"collective {__version__}",
        help="print the version of this package",
    )
    return parser


def _open_standard_streams() -> None:
    """Opens whichever of stdin, stdout and stderr is closed; else a rank's pipe gets its number."""
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
