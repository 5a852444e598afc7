"""The launcher's options, and how a command line is split into options and a command."""

from __future__ import annotations

import argparse
import re
import signal
from collections.abc import Sequence
from typing import Any, NoReturn

from collective.job import metrics_address
from collective.job.errors import UsageError
from collective.job.preempt_signals import signal_number
from collective.launch import __doc__ as manual
from collective.launch.command_line.durations import seconds
from collective.launch.command_line.host_options import add_host_options
from collective.launch.command_line.rank_command import FRAMEWORKS
from collective.launch.command_line.short_help import short_help
from collective.launch.manifests.options import ManifestOptions, add_options
from collective.launch.planning.gpu_cores import CHOICES
from collective.launch.planning.plan import LONGEST_PAUSE
from collective.version import __version__

PROGRAM = "collective launch"
DEFAULT_GRACE = 5.0
DEFAULT_TIME_TO_SAVE = 60.0
DEFAULT_PAUSE = 1.0  # seconds before the first restart
DEFAULT_CHECK_SECONDS = 30.0  # how long a host may take to answer --check
JOB_FILES = (".yaml", ".yml")


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
    bind: str
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
    metrics_port: str | None
    data_loaders: list[str] | None
    framework: str | None
    embedding_scope: str
    dry_run: bool
    check: bool
    settings: list[str] | None
    job_schema: bool
    no_restart_after: list[str] | None
    leave_out_host_after: list[str] | None
    words: tuple[str, ...]
    command: tuple[str, ...]
    job: Any  # a `job_file.job.Job`, None without a job file


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Raises a one-sentence error instead of printing the usage."""
        raise UsageError(f"{message}; --help tells more")

    def print_help(self, file: Any = None) -> None:
        """Prints one line per option. `--help all` prints all of `format_help`."""
        print(short_help(self.prog), end="", file=file)


def launcher_parser(prog: str) -> Parser:
    parser = Parser(
        prog=prog,
        usage="%(prog)s [options] {script.py | python3 script.py | -m module} [arguments]\n"
        "       %(prog)s [options] job.yaml [--set KEY=VALUE ...] [options]\n"
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
        "--bind",
        choices=CHOICES,
        default="auto",
        help="auto: a rank with a GPU uses the cores and the memory near it; none: all cores",
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
        "--metrics-port",
        type=_metrics_port,
        metavar="PORT",
        help="serve the job's metrics to Prometheus there, on rank 0's host; 0: at any free port; "
        "ADDRESS:PORT: on that network interface only",
    )
    add(
        "--data-loaders",
        nargs=2,
        metavar=("K", "SCRIPT"),
        help="also start K processes that run SCRIPT, which makes batches for the ranks and calls "
        "collective.data.serve_stream; SCRIPT may be a quoted text with arguments",
    )
    add(
        "--as",
        dest="framework",
        choices=FRAMEWORKS,
        help="run an unchanged script of another framework: `import tensorflow` gives it "
        "TensorFlow's version 1 with that framework's names, or for a script of TensorFlow 2 "
        "TensorFlow as it is",
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
    add(
        "--no-restart-after",
        action="append",
        metavar="PATTERN",
        help="with --max-restarts: no restart if a rank has written a line in which this regular "
        "expression is found; may be given several times",
    )
    add(
        "--leave-out-host-after",
        action="append",
        metavar="PATTERN",
        help="with --max-restarts and -H: the restart leaves out the host on which a rank has "
        "written such a line",
    )
    add(
        "--set",
        dest="settings",
        action="append",
        metavar="KEY=VALUE",
        help="for a job file: another value, as hyperparameters.lr=0.1; may be given several times",
    )
    add_options(parser)
    add(
        "--job-schema",
        action="store_true",
        help="print the JSON schema of job files, for editors",
    )
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


def split_command(arguments: Sequence[str]) -> tuple[Sequence[str], Sequence[str]]:
    """Splits the launcher's options from the command.

    The command begins with the first word that is neither an option nor an option's value.
    """
    values: dict[str, int] = {}  # how many words follow each option
    for action in launcher_parser(PROGRAM)._actions:
        count = 1 if action.nargs is None else int(action.nargs)
        values.update(dict.fromkeys(action.option_strings, count))
    position = 0
    while position < len(arguments):
        word = arguments[position]
        if word == "--":
            return arguments[:position], arguments[position + 1 :]
        if word == "-m" or not word.startswith("-"):
            break
        position += 1 + values.get(word, 0)
    return arguments[:position], arguments[position:]


def with_ranks_apart(words: Sequence[str]) -> list[str]:
    """Returns the options with -np=2 for -np2, which argparse would read as -n p2."""
    return [re.sub("^-np(?=[^=])", "-np=", word) for word in words]


def without_settings(words: Sequence[str]) -> list[str]:
    """Returns the options without --set, in its forms `--set K=V` and `--set=K=V`."""
    others: list[str] = []
    position = 0
    while position < len(words):
        word = words[position]
        if word == "--set":
            position += 1
        elif not word.startswith("--set="):
            others.append(word)
        position += 1
    return others


def _metrics_port(text: str) -> str:
    try:
        metrics_address.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


def _preempt_signal(text: str) -> int:
    try:
        return signal_number(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{error}; give a name like USR1, or a number") from None
