"""The command line: options, then the command that every rank runs."""

from __future__ import annotations

import argparse
import os
import re
import signal
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from collective.job.errors import UsageError
from collective.job.preempt_signals import signal_number
from collective.launch import __doc__ as manual
from collective.launch.command_line.dry_run import describe
from collective.launch.command_line.durations import seconds
from collective.launch.command_line.host_options import (
    HostList,
    HostOptions,
    add_host_options,
    has_ranks_here,
    host_list,
    host_options,
    rank_count,
    ranks_here,
    timeouts,
)
from collective.launch.command_line.option_checks import (
    Mode,
    check_limits,
    check_purpose,
    check_used,
    least_ranks,
)
from collective.launch.command_line.rank_command import (
    FRAMEWORKS,
    as_framework,
    misplaced_option,
    rank_command,
    script_of,
)
from collective.launch.command_line.short_help import short_help
from collective.launch.manifests.options import ManifestOptions, add_options, check_unused
from collective.launch.planning.devices import (
    NO_GPUS,
    SHARED,
    choose_devices,
    driver_gpus,
    visible_gpus,
)
from collective.launch.planning.machine import available_cores
from collective.launch.planning.plan import LONGEST_PAUSE, LaunchPlan
from collective.launch.processes.standard_streams import open_standard_streams
from collective.version import __version__

_PROGRAM = "collective launch"
DEFAULT_GRACE = 5.0
DEFAULT_TIME_TO_SAVE = 60.0
DEFAULT_PAUSE = 1.0  # seconds before the first restart
DEFAULT_CHECK_SECONDS = 30.0  # how long a host may take to answer --check


class LauncherOptions(ManifestOptions):
    """Holds the options as given, and the command after them; `make_plan` checks them."""

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
    start_timeout: float | None
    host_timeout: float | None
    secret_file: str | None
    device: str
    log_dir: str | None
    tee: str
    grace: float | None
    preempt_signal: int
    max_restarts: int
    restart_pause: float | None
    elastic: bool
    min_ranks: int | None
    stall_timeout: float
    verbose: bool
    no_python: bool
    independent: bool
    test_mode: bool
    framework: str | None
    embedding_scope: str
    dry_run: bool
    check: bool
    words: tuple[str, ...]
    command: tuple[str, ...]


def main(arguments: Sequence[str] | None = None, prog: str = _PROGRAM) -> int:
    """Runs the launcher and returns its exit code; `prog` says how the user called it."""
    open_standard_streams()
    try:
        options = parse_options(sys.argv[1:] if arguments is None else arguments, prog)
        check_purpose(options)
        if options.emit is not None:
            return _print(emitted(options))
        if options.check:
            return _check(options)
        listed = host_list(options, os.environ)
        if listed is not None:
            options.standalone = True  # ignores torchrun's variables in the environment
        hosts = host_options(options, os.environ)
        try:
            unused = check_used(options, os.environ, _mode(hosts, listed))
            plan = make_plan(options, os.environ, listed)
        except UsageError as error:
            if hosts is None or options.dry_run:
                raise
            from collective.launch.connection.withdrawal import withdraw

            print(f"collective launch: {error}", file=sys.stderr, flush=True)
            withdraw(hosts, os.environ, str(error))
            return 2
        for note in [unused, misplaced_option(options.command)]:
            if note:
                print(f"collective launch: {note}", file=sys.stderr)
        if options.dry_run:
            from collective.launch.output.logs import check_logs

            if has_ranks_here(listed):
                check_logs(plan)
            return _print(describe(plan, hosts, listed) + "\n")
        if listed is not None:
            from collective.launch.several_hosts import run_from_here

            words = sys.argv[1:] if arguments is None else arguments
            return run_from_here(
                plan, listed, words, lambda size: parse_rank_list(options.tee, size)
            )
        if hosts is not None:
            from collective.job.secret import job_secret
            from collective.launch.several_hosts import run

            secret = job_secret(os.environ, hosts.secret_file)
            return run(plan, hosts, secret, lambda size: parse_rank_list(options.tee, size))
        # Only a job needs a server and the like; importing them takes half of the start-up time.
        from collective.launch.job import Job
        from collective.launch.planning.plan import with_gloo_address

        return Job(with_gloo_address(plan)).run()
    except UsageError as error:
        print(f"collective launch: {error}", file=sys.stderr)
        return 2


def _print(text: str) -> int:
    """Prints what the user asked for; returns the exit code.

    Raises:
        UsageError: the text can't be written.
    """
    try:
        print(text, end="", flush=True)
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # else Python tries again at exit
        if isinstance(error, BrokenPipeError):  # `| head` has read enough
            return 128 + signal.SIGPIPE
        raise UsageError(f"stdout can't be written: {error.strerror}") from None
    return 0


def parse_options(arguments: Sequence[str], prog: str = _PROGRAM) -> LauncherOptions:
    """Reads the command line.

    Raises:
        UsageError: the command line is invalid, or --emit is missing.
    """
    words, command = _split(arguments)
    parser = _parser(prog)
    if list(command) == ["all"] and words[-1:] in (["-h"], ["--help"]):
        print(parser.format_help(), end="")
        parser.exit()
    options = parser.parse_args(_with_ranks_apart(words), namespace=LauncherOptions())
    check_unused(options)
    options.words = tuple(words)
    options.command = tuple(command)
    return options


def emitted(options: LauncherOptions) -> str:
    """Returns the manifest that --emit asks for.

    Raises:
        UsageError: the options ask for something that a scheduler doesn't offer.
    """
    from collective.launch.manifests import cluster_job, manifest

    check_purpose(options)
    check_limits(options)
    job = cluster_job(
        options,
        options.words,
        options.command,
        ranks=rank_count("auto" if options.ranks is None else options.ranks),
        device=options.device,
        max_restarts=options.max_restarts,
        time_to_save=DEFAULT_TIME_TO_SAVE if options.grace is None else options.grace,
        stall_timeout=options.stall_timeout,
    )
    each: Mode = "one" if job.replicas == 1 else "each"
    check_used(options, {}, "list" if options.emit == "mpijob" else each)
    least_ranks(options, job.replicas * job.ranks)
    parse_rank_list(options.tee, job.replicas * job.ranks)
    return manifest(job, str(options.emit))


def _check(options: LauncherOptions) -> int:
    """Runs --check for the job that the other options describe."""
    from collective.launch.check.diagnostics import CheckedJob, check

    listed = host_list(options, os.environ)
    hosts = None if listed is not None else host_options(options, os.environ)
    check_used(options, os.environ, _mode(hosts, listed))
    if options.command:
        _command(options)
    ranks = ranks_here(options.ranks, os.environ, None)
    check_limits(options)
    if isinstance(ranks, int):
        if ranks < 1:
            raise UsageError(f"-np {ranks}: a job has at least one rank")
        if (listed or hosts) is None:
            least_ranks(options, ranks)
            parse_rank_list(options.tee, ranks)
    if ranks == "cpu":
        ranks = available_cores()
    job = CheckedJob(
        ranks=ranks if isinstance(ranks, int) else None,
        uses_gpus=options.device != "cpu" and options.ranks != "cpu",
        files=[path for path in [script_of(options.command, options.no_python)] if path],
        hosts=hosts,
        listed=listed,
        seconds=min(timeouts(options)[0], DEFAULT_CHECK_SECONDS),
    )
    return check(job)


def _mode(hosts: HostOptions | None, listed: HostList | None) -> Mode:
    if listed is not None:
        return "list"
    return "one" if hosts is None else "each"


def _command(options: LauncherOptions) -> tuple[str, ...]:
    """Returns the command of each rank."""
    command = rank_command(options.command, options.no_python)
    if options.framework is not None:
        command = as_framework(command, options.framework, options.embedding_scope)
    return command


def make_plan(
    options: LauncherOptions, environment: Mapping[str, str], listed: HostList | None = None
) -> LaunchPlan:
    """Decides everything about the job before it starts.

    Args:
        options: as given.
        environment: the launcher's environment.
        listed: the hosts of -H or of a host file, if the job has such a list.

    Raises:
        UsageError: the options ask for something impossible.
    """
    command = _command(options)
    check_limits(options)
    grace = DEFAULT_GRACE if options.grace is None else options.grace
    cores = available_cores()
    devices: tuple[str | None, ...] = (None,)  # a plan has one, even on a host without ranks
    if has_ranks_here(listed):
        ranks = ranks_here(options.ranks, environment, listed)
        gpus = NO_GPUS
        if "cpu" not in (options.device, ranks):
            gpus = visible_gpus(environment, driver_gpus())
        shared = environment.get(SHARED) == "1"
        devices = choose_devices(ranks, options.device, gpus, cores, shared)
    min_ranks = least_ranks(options, len(devices))
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
        restart_pause=DEFAULT_PAUSE if options.restart_pause is None else options.restart_pause,
        most_ranks=len(devices),
        min_ranks=min_ranks,
        shown_ranks=_shown_ranks(options, environment, listed, len(devices)),
        log_dir=options.log_dir,
        verbose=options.verbose,
        stall_timeout=options.stall_timeout,
        independent=options.independent,
        test_mode=options.test_mode,
    )


def parse_rank_list(text: str, size: int) -> frozenset[int]:
    """Returns the ranks that --tee names: "all", "none", or numbers and ranges like "0,2-3".

    Raises:
        UsageError: the text isn't such a list, or names a rank that doesn't exist.
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


def _shown_ranks(
    options: LauncherOptions, environment: Mapping[str, str], listed: HostList | None, size: int
) -> frozenset[int]:
    """Returns the ranks that --tee names; for several hosts all, until the number is known."""
    if listed is not None or host_options(options, environment) is not None:
        return frozenset(range(size))
    return parse_rank_list(options.tee, size)


def _preempt_signal(text: str) -> int:
    try:
        return signal_number(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{error}; give a name like USR1, or a number") from None


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


def _with_ranks_apart(words: Sequence[str]) -> list[str]:
    """Returns the options with -np=2 for -np2, which argparse would read as -n p2."""
    return [re.sub("^-np(?=[^=])", "-np=", word) for word in words]


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Raises a one-sentence error instead of printing the usage."""
        raise UsageError(f"{message}; --help tells more")

    def print_help(self, file: Any = None) -> None:
        """Prints one line per option. `--help all` prints all of `format_help`."""
        print(short_help(self.prog), end="", file=file)


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
        help="how many ranks on this host; auto (the default): one for each visible GPU, or one "
        "CPU rank if there is none; gpu: one for each visible GPU; cpu: one CPU rank for each core",
    )
    add_host_options(parser)
    add(
        "--device",
        choices=("auto", "cpu", "gpu"),
        default="auto",
        help="cpu: hide the GPUs; gpu: require them",
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
        help='show only these ranks: "0", "0,2-3", "all", "none"',
    )
    add(
        "--verbose",
        action="store_true",
        help="show every line as each rank writes it, including noise and repeated output of ranks",
    )
    add(
        "--no-python",
        action="store_true",
        help="run a program that isn't a Python script",
    )
    add(
        "--independent",
        action="store_true",
        help="let each rank train its own model, as in a sweep; otherwise that is an error",
    )
    add(
        "--test-mode",
        action="store_true",
        help="try the script once: one training batch and one evaluation batch in each session, "
        "then its checkpoint and export",
    )
    add(
        "--as",
        dest="framework",
        choices=FRAMEWORKS,
        help="run an unchanged script of another framework: `import tensorflow` gives it "
        "TensorFlow's version 1 with that framework's names",
    )
    add(
        "--embedding-scope",
        choices=("script", "auto"),
        default="script",
        help="with --as: auto opens strategy.scope() around the whole script and makes tables of "
        "the weights of its embedding columns and of partitioned variables, except for layers'; "
        "script (the default): the script opens its scopes itself",
    )
    add(
        "--grace",
        type=seconds,
        default=None,
        metavar="TIME",
        help="from TERM to KILL, in seconds or as 90s, 1m, 2h (default: "
        f"{DEFAULT_GRACE:g}; {DEFAULT_TIME_TO_SAVE:g} for ranks that are told to stop and save)",
    )
    add(
        "--preempt-signal",
        type=_preempt_signal,
        default=int(signal.SIGTERM),
        metavar="SIGNAL",
        help="a signal that acts like TERM: all ranks stop after the same step and save; such as "
        "USR1 for Slurm's --signal=B:USR1@120",
    )
    add(
        "--max-restarts",
        "--max_restarts",
        type=int,
        default=0,
        metavar="K",
        help="restart all ranks after a failure, up to K times: the script resumes from its latest "
        "checkpoint (default: %(default)s)",
    )
    add(
        "--restart-pause",
        type=seconds,
        metavar="TIME",
        help="pause before the first restart; twice as long before each further one, at most "
        f"{LONGEST_PAUSE:g} s (default: {DEFAULT_PAUSE:g})",
    )
    add(
        "--elastic",
        action="store_true",
        help="restart with the remaining ranks: without a lost GPU, or a CPU rank that died",
    )
    add(
        "--min-np",
        dest="min_ranks",
        type=int,
        default=None,
        metavar="A",
        help="with --elastic: the minimum number of ranks (default: 1)",
    )
    add(
        "--stall-timeout",
        type=seconds,
        default=600.0,
        metavar="TIME",
        help="how long ranks may wait for one another before the job ends, in seconds or as 90s, "
        "10m, 2h; 0: forever (default: %(default)g)",
    )
    add_options(parser)
    add("--dry-run", action="store_true", help="print the plan, start nothing")
    add(
        "--check",
        action="store_true",
        help="print what is installed and what is missing; with -H or --nnodes also what would "
        "stop a job on these hosts, each of which may take 30 s, or --start-timeout, to answer",
    )
    add(
        "--version",
        action="version",
        version=f"collective {__version__}",
        help="print the version of this package",
    )
    return parser
