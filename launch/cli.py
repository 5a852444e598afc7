"""The command line: options, then the command that every rank runs."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from collective.job import job_file
from collective.job.errors import UsageError
from collective.job.machine import available_cores
from collective.launch.command_line.dry_run import describe
from collective.launch.command_line.host_options import (
    HostList,
    HostOptions,
    has_ranks_here,
    host_list,
    host_options,
    launchers,
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
    loader_count,
)
from collective.launch.command_line.parser import (
    DEFAULT_CHECK_SECONDS,
    DEFAULT_GRACE,
    DEFAULT_PAUSE,
    DEFAULT_TIME_TO_SAVE,
    JOB_FILES,
    PROGRAM,
    LauncherOptions,
    launcher_parser,
    split_command,
    with_ranks_apart,
    without_settings,
)
from collective.launch.command_line.rank_command import (
    as_framework,
    check_is_kept,
    loader_command,
    loader_words,
    misplaced_option,
    rank_command,
    script_of,
)
from collective.launch.manifests.options import check_unused
from collective.launch.planning.devices import (
    NO_GPUS,
    SHARED,
    choose_devices,
    driver_gpus,
    visible_gpus,
)
from collective.launch.planning.gpu_cores import bound_cores, cores_near
from collective.launch.planning.inherited import check_inherited
from collective.launch.planning.plan import LaunchPlan
from collective.launch.processes.standard_streams import open_standard_streams

if TYPE_CHECKING:  # reading a job file takes pydantic, for a quarter of a second
    from collective.launch.job_file.job import Job


def main(arguments: Sequence[str] | None = None, prog: str = PROGRAM) -> int:
    """Runs the launcher and returns its exit code; `prog` says how the user called it."""
    open_standard_streams()
    try:
        options = parse_options(sys.argv[1:] if arguments is None else arguments, prog)
        check_purpose(options)
        if options.job_schema:
            from collective.launch.job_file.job import schema

            return _print(schema() + "\n")
        for note in options.job.notes if options.job else ():
            print(f"collective launch: {note}", file=sys.stderr)
        if options.emit is not None:
            return _print(emitted(options))
        environment = environment_of(options)
        if options.check:
            return _check(options, environment)
        listed = host_list(options, environment)
        if listed is not None:
            options.standalone = True  # ignores torchrun's variables in the environment
        hosts = host_options(options, environment)
        try:
            unused = check_used(options, environment, _mode(hosts, listed))
            plan = make_plan(options, environment, listed)
        except UsageError as error:
            if hosts is None or options.dry_run:
                raise
            from collective.launch.connection.withdrawal import withdraw

            print(f"collective launch: {error}", file=sys.stderr, flush=True)
            withdraw(hosts, environment, str(error))
            return 2
        for note in [unused, misplaced_option(options.command)]:
            if note:
                print(f"collective launch: {note}", file=sys.stderr)
        if options.dry_run:
            from collective.launch.output.logs import check_logs

            if has_ranks_here(listed):
                check_logs(plan)
            job = options.job.describe() if options.job else ""
            return _print(job + describe(plan, hosts, listed) + "\n")
        if listed is not None:
            from collective.launch.restarts import HostsLeftOut
            from collective.launch.several_hosts import run_from_here

            words = sys.argv[1:] if arguments is None else arguments
            if options.job is not None:  # the other hosts may not have the file
                words = [*options.words, "--", *options.command]
            while True:
                try:
                    return run_from_here(
                        plan, listed, words, lambda size: parse_rank_list(options.tee, size)
                    )
                except HostsLeftOut as left_out:
                    kept = [each for each in listed.hosts if each[0] not in left_out.hosts]
                    listed = replace(listed, hosts=tuple(kept))
                    plan = make_plan(options, environment, listed)
                    plan = replace(plan, restart_count=left_out.restart_count)
        if hosts is not None:
            from collective.job.secret import job_secret
            from collective.launch.several_hosts import run

            secret = job_secret(environment, hosts.secret_file)
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


def parse_options(arguments: Sequence[str], prog: str = PROGRAM) -> LauncherOptions:
    """Reads the command line.

    Raises:
        UsageError: the command line is invalid, or --emit is missing.
    """
    words, command = split_command(arguments)
    job = None
    if command and command[0].lower().endswith(JOB_FILES):
        words, command, job = _from_job_file(words, command)
    parser = launcher_parser(prog)
    if list(command) == ["all"] and words[-1:] in (["-h"], ["--help"]):
        print(parser.format_help(), end="")
        parser.exit()
    options = parser.parse_args(with_ranks_apart(words), namespace=LauncherOptions())
    if options.settings:
        raise UsageError(f"--set {options.settings[0]} is for a job file: give job.yaml")
    check_unused(options)
    options.words = tuple(words)
    options.command = tuple(command)
    options.job = job
    return options


def _from_job_file(
    words: Sequence[str], command: Sequence[str]
) -> tuple[Sequence[str], Sequence[str], Job]:
    """Returns what a job file stands for: options, and a command. The user's options come last.

    Raises:
        UsageError: the job file isn't one, or something follows it that is no option.
    """
    from collective.launch.job_file.job import read_job

    path, given = command[0], [*words, *command[1:]]
    others = split_command(given)[1]
    if others:
        raise UsageError(
            f"{others[0]} after {path}: a job file takes --set KEY=VALUE and the launcher's "
            "options; its entrypoint has the script's arguments"
        )
    options = launcher_parser(PROGRAM).parse_args(
        with_ranks_apart(given), namespace=LauncherOptions()
    )
    replicas = options.replicas if options.emit else launchers(options, os.environ)
    job = read_job(path, options.settings or (), replicas, options.emit)
    return [*job.words, *without_settings(given)], job.command, job


def environment_of(options: LauncherOptions) -> dict[str, str]:
    """Returns the launcher's environment, with the variables of a job file.

    A rank may start a job of its own, which isn't described by the rank's job file.
    """
    environment = dict(os.environ)
    if environment.get("COLLECTIVE_LAUNCHED"):
        environment.pop(job_file.VARIABLE, None)
    return {**environment, **(options.job.environment if options.job else {})}


def emitted(options: LauncherOptions) -> str:
    """Returns the manifest that --emit asks for.

    Raises:
        UsageError: the options ask for something that a scheduler doesn't offer.
    """
    from collective.launch.manifests import cluster_job, manifest

    check_purpose(options)
    check_limits(options)
    if options.job is not None:
        options.env = [*map("=".join, options.job.environment.items()), *(options.env or ())]
        if options.job_name is None:
            options.job_name = options.job.label
    loaders = loader_count(options)
    job = cluster_job(
        options,
        options.words,
        options.command,
        ranks=rank_count("auto" if options.ranks is None else options.ranks),
        device=options.device,
        max_restarts=options.max_restarts,
        time_to_save=DEFAULT_TIME_TO_SAVE if options.grace is None else options.grace,
        stall_timeout=options.stall_timeout,
        search=options.job.search() if options.job else None,
        loaders=loaders,
        loader_words=loader_words(options.data_loaders[1]) if options.data_loaders else (),
    )
    each: Mode = "one" if job.replicas == 1 else "each"
    check_used(options, {}, "list" if options.emit == "mpijob" else each)
    least_ranks(options, job.replicas * job.ranks)
    parse_rank_list(options.tee, job.replicas * job.ranks)
    return manifest(job, str(options.emit))


def _check(options: LauncherOptions, environment: Mapping[str, str]) -> int:
    """Runs --check for the job that the other options describe."""
    from collective.launch.check.diagnostics import CheckedJob, check

    listed = host_list(options, environment)
    hosts = None if listed is not None else host_options(options, environment)
    check_used(options, environment, _mode(hosts, listed))
    if options.command:
        _command(options)
    ranks = ranks_here(options.ranks, environment, None)
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
    check_inherited(environment)
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
    if listed is not None or len(devices) > 1:
        check_is_kept(script_of(options.command, options.no_python))
    bound: dict[str, frozenset[int]] = {}
    if options.bind == "auto":
        bound = bound_cores(devices, frozenset(os.sched_getaffinity(0)), cores_near)
    min_ranks = least_ranks(options, len(devices))
    terminal = os.isatty(2)
    return LaunchPlan(
        command=command,
        devices=devices,
        launcher_environment=dict(environment),
        cores=cores,
        bound=bound,
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
        metrics_port=options.metrics_port,
        loaders=loader_count(options),
        loader_command=loader_command(options.data_loaders[1]) if options.data_loaders else (),
        no_restart_after=tuple(options.no_restart_after or ()),
        leave_out_host_after=tuple(options.leave_out_host_after or ()),
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
        if int(last or first) < int(first):
            raise UsageError(
                f"--tee {text}: {word.strip()} names no rank; the smaller one is first"
            )
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
