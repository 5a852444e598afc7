"""Starts a model of many small tables on one rank and times every phase, up to its first step.

    collective launch -np 2 benchmarks/overhead_program.py {collective|plain} FOLDER

Copies of `plain` have nothing to do with each other: add --independent.

FOLDER has the data (`training_step.workload.write`). overhead.py starts this program, and the clock
starts with its first line: importing TensorFlow and the library are the first phases.
"""

from __future__ import annotations

import time

START = time.perf_counter()

import argparse  # noqa: E402
import contextlib  # noqa: E402
import os  # noqa: E402
from pathlib import Path  # noqa: E402

import jobs  # noqa: E402
from training_step.workload import Setting, read  # noqa: E402


class Clock:
    """Times phases that follow each other."""

    def __init__(self, start: float):
        self.seconds: dict[str, float] = {}
        self._last = start

    def finish(self, phase: str) -> None:
        now = time.perf_counter()
        self.seconds[phase] = now - self._last
        self._last = now


def run(name: str, folder: Path) -> dict[str, float]:
    """Returns the seconds of each phase."""
    clock = Clock(START)
    import tensorflow.compat.v1 as tf
    from training_step import model as step_model

    tf.logging.set_verbosity(tf.logging.ERROR)
    tf.disable_eager_execution()
    setting, rank = Setting.load(folder), int(os.environ["RANK"])
    with contextlib.ExitStack() as scopes:
        table_scope: contextlib.AbstractContextManager = contextlib.nullcontext()
        if name == "collective":
            from collective import CollectiveStrategy

            strategy = CollectiveStrategy()
            scopes.enter_context(strategy.scope())
            table_scope = strategy.embedding_scope()
        clock.finish("imports")

        scopes.enter_context(tf.Graph().as_default())
        data = step_model.Input(setting, read(setting, folder, rank))
        loss = step_model.loss(setting, data.tensors, table_scope)
        clock.finish("model")

        optimizer = step_model.optimizer(setting)
        gradients = optimizer.compute_gradients(loss)
        clock.finish("gradients")

        train = optimizer.apply_gradients(gradients)
        clock.finish("updates")

        session = scopes.enter_context(tf.Session(config=step_model.session_config(setting)))
        session.run(tf.global_variables_initializer())
        clock.finish("initial values")

        session.run([loss, train], data.feed(0))
        clock.finish("first step")
    return clock.seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("program", choices=["collective", "plain"])
    parser.add_argument("folder", type=Path)
    arguments = parser.parse_args()
    seconds = run(arguments.program, arguments.folder)
    jobs.write_measurements(arguments.program, arguments.folder, {"seconds": seconds})


if __name__ == "__main__":
    main()
