"""The launcher that another host has started here (host_start.py); it reads its orders on stdin."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from typing import Any

from collective.job.errors import UsageError
from collective.launch.cli import make_plan, parse_options
from collective.launch.command_line.host_options import timeouts
from collective.launch.connection.rendezvous import Stopped, introduction, join
from collective.launch.processes.signals import SignalPipe, stop_signals
from collective.launch.several_hosts import run_as_agent, stopped_before_start

_MOST_STDIN_BYTES = 8 << 20


def main() -> int:
    """Runs the launcher as its stdin says; returns its exit code."""
    try:
        data = sys.stdin.buffer.read(_MOST_STDIN_BYTES)
        instructions = json.loads(data)
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)  # no rank reads the secret
        os.environ.update(instructions["environment"])
        return _run(instructions)
    except (ValueError, KeyError, TypeError):
        print("collective launch: no instructions on stdin: -H starts this", file=sys.stderr)
        return 2
    except UsageError as error:
        print(f"collective launch: {error}", file=sys.stderr)
        return 2


def _run(instructions: Mapping[str, Any]) -> int:
    options = parse_options(instructions["arguments"])
    options.ranks = instructions["ranks"] or options.ranks or "auto"
    options.standalone = True  # the hosts are known; this command line doesn't decide them
    options.hosts = options.hostfile = options.nodes = None
    options.elastic, options.min_ranks, options.tee = False, None, "all"
    plan = make_plan(options, os.environ)
    signals = SignalPipe(stop_signals(plan.preempt_signal))
    try:
        joined = join(
            lambda: [instructions["address"]],
            instructions["port"],
            instructions["secret"].encode(),
            introduction(instructions["node"], instructions["nodes"], plan.devices),
            timeouts(options),
            signals,
            returns=False,  # the first host already listens
        )
    except Stopped as stop:
        return stopped_before_start(stop.signum, plan)
    return run_as_agent(plan, joined, signals)


if __name__ == "__main__":
    sys.exit(main())
