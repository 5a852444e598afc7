"""Runs a function on several ranks, to test a model as it trains: `collective.testing`.

    import collective
    from collective import testing

    @testing.on_ranks(1, 2)
    def test_the_loss_falls():                  # runs on one rank, and then on each of two
        losses = train(collective.CollectiveStrategy())
        assert losses[-1] < losses[0]

    def test_both_ranks_agree():
        first, second = testing.run(train_and_evaluate, 2)
        assert first == second

Ranks are new processes of a job of this host, started by `collective launch`: no graph, session or
option of the test's process is there, nor is one left. It is for pytest, and `run` for any program.
"""

from __future__ import annotations

import functools
import inspect
import os
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import cloudpickle

__all__ = ["RanksFailed", "on_ranks", "run"]
Test = TypeVar("Test", bound=Callable[..., Any])
TIMEOUT = 300.0  # seconds
_CALL, _RESULT = "call", "result"
_PATIENCE = 20.0  # seconds in which a job that was told to end does so
_MOST_OUTPUT = 20_000  # characters of a job's output in an error


class RanksFailed(AssertionError):
    """Says on which ranks a function failed, and what the job has written.

    Attributes:
        errors: the traceback of each rank that raised, by rank.
        output: what the job wrote, to stdout and stderr.
    """

    def __init__(self, text: str, errors: Mapping[int, str], output: str):
        super().__init__(text)
        self.errors, self.output = dict(errors), output


def run(
    function: Callable[..., Any],
    ranks: int,
    *args: Any,
    timeout: float = TIMEOUT,
    device: str = "cpu",
    options: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
    **kwargs: Any,
) -> list[Any]:
    """Calls a function on every rank of a job, and returns what it returned on each.

    The function, its arguments and its results travel by cloudpickle, so it may be local to a test.
    Modules that it imports must be importable there: `sys.path` is the caller's.

    Args:
        function: what to call; it makes its strategy and its graph itself.
        ranks: N, 1 or more.
        args, kwargs: its arguments.
        timeout: seconds after which the job is ended.
        device: 'cpu', 'gpu' (a GPU for each rank) or 'auto'.
        options: more options of `collective launch`.
        environment: variables to add to this process's own.

    Returns:
        The results, in the order of the ranks.

    Raises:
        RanksFailed: it raised on a rank, or a rank died, or the job took too long.
        ValueError: there is no such number of ranks.
        TypeError: an argument can't be sent to another process.
    """
    if isinstance(ranks, bool) or not isinstance(ranks, int) or ranks < 1:
        raise ValueError(f"ranks={ranks!r}: it is a whole number from 1.")
    with tempfile.TemporaryDirectory(prefix="collective-testing-") as made:
        folder = Path(made)
        (folder / _CALL).write_bytes(_pickled(function, args, kwargs))
        command = [sys.executable, "-m", "collective.launch", "-np", str(ranks)]
        command += ["--device", device, *options, "-m", "collective.testing", made]
        code, output = _carry_out(command, timeout, {**os.environ, **(environment or {})})
        outcomes = {rank: _outcome(folder, rank) for rank in range(ranks)}
        failed = {rank: text for rank, (kind, text) in outcomes.items() if kind == "error"}
        complete = all(kind in ("value", "skip") for kind, _ in outcomes.values())
        if code != 0 or failed or not complete:
            raise RanksFailed(
                _report(function, ranks, code, timeout, failed, output), failed, output
            )
        skips = [text for kind, text in outcomes.values() if kind == "skip"]
        if skips:
            import pytest

            pytest.skip(skips[0])
        return [value for _, value in outcomes.values()]


def on_ranks(*ranks: int, **how: Any) -> Callable[[Test], Test]:
    """Lets pytest run a test on each rank of a job, once for each number of ranks.

    A test that fails on a rank fails, with that rank's traceback. Fixtures are made in pytest's own
    process, and are sent to all ranks: paths and numbers, not sessions or locks. The argument
    `ranks`, if the test has one, is the number of ranks.

    Args:
        ranks: the numbers of ranks.
        how: as for `run`: timeout, device, options, environment.

    Returns:
        A decorator.

    Raises:
        ValueError: there is no number of ranks.
    """
    if not ranks:
        raise ValueError("on_ranks() has no number of ranks: give some, as on_ranks(1, 2).")
    import pytest

    def decorate(test: Test) -> Test:
        signature = inspect.signature(test)
        is_told = "ranks" in signature.parameters

        @functools.wraps(test)
        def on_each_rank(**fixtures: Any) -> None:
            number = fixtures["ranks"] if is_told else fixtures.pop("ranks")
            call = functools.partial(test, **fixtures)
            functools.update_wrapper(call, test)
            run(call, number, **how)

        parameters = [*signature.parameters.values()]
        if not is_told:
            parameters.append(inspect.Parameter("ranks", inspect.Parameter.KEYWORD_ONLY))
        on_each_rank.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        return pytest.mark.parametrize("ranks", ranks)(on_each_rank)

    return decorate


def _pickled(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bytes:
    """Returns the call in bytes; the module of the function needn't be importable elsewhere."""
    inner = function
    while isinstance(inner, functools.partial):
        inner = inner.func
    module = sys.modules.get(getattr(inner, "__module__", None) or "")
    by_value = module is not None and module.__name__ != "__main__"
    if by_value:
        cloudpickle.register_pickle_by_value(module)
    try:
        call = cloudpickle.dumps((function, tuple(args), dict(kwargs)))
        return bytes(cloudpickle.dumps((list(sys.path), call)))
    except Exception as error:
        raise TypeError(
            f"{_name(function)} or one of its arguments can't be sent to the ranks "
            f"({type(error).__name__}: {error}). Make it there: a session, a graph, a lock or a "
            "file belongs to one process."
        ) from error
    finally:
        if by_value:
            cloudpickle.unregister_pickle_by_value(module)


def _carry_out(
    command: Sequence[str], timeout: float, environment: Mapping[str, str]
) -> tuple[int | None, str]:
    """Runs a job to its end; returns (its exit code, None if it took too long; its output)."""
    process = subprocess.Popen(
        command,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    try:
        output, _ = process.communicate(timeout=timeout)
        return process.returncode, output
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGQUIT)  # no time to save
        try:
            output, _ = process.communicate(timeout=_PATIENCE)
        except subprocess.TimeoutExpired:
            process.kill()  # its supervisor then ends the ranks
            output, _ = process.communicate()
        return None, output
    finally:
        if process.poll() is None:  # the test was interrupted
            process.kill()


def _outcome(folder: Path, rank: int) -> tuple[str, Any]:
    """Returns (kind, value) of a rank: 'value', 'skip', 'error', or 'none' if it has told none."""
    path = folder / f"{_RESULT}.{rank}"
    if not path.exists():
        return "none", None
    found: tuple[str, Any] = cloudpickle.loads(path.read_bytes())
    return found


def _report(
    function: Any,
    ranks: int,
    code: int | None,
    timeout: float,
    failed: Mapping[int, str],
    output: str,
) -> str:
    how = f"took more than {timeout:g} s" if code is None else f"ended with exit code {code}"
    lines = [f"{_name(function)} with -np {ranks}: the job {how}."]
    for rank, text in failed.items():
        lines += [f"--- rank {rank} ---", text.rstrip()]
    shown = output if len(output) <= _MOST_OUTPUT else f"…{output[-_MOST_OUTPUT:]}"
    return "\n".join([*lines, "--- output of the job ---", shown.rstrip()])


def _name(function: Any) -> str:
    return getattr(function, "__qualname__", None) or repr(function)


def main(folder: str) -> None:
    """Is a rank: carries out the call in a folder, and leaves its result there."""
    place = Path(folder)
    result = place / f"{_RESULT}.{os.environ['RANK']}"
    sys.path[:], call = cloudpickle.loads((place / _CALL).read_bytes())
    try:
        function, args, kwargs = cloudpickle.loads(call)
        outcome = "value", function(*args, **kwargs)
        text = cloudpickle.dumps(outcome)
    except BaseException as error:
        if type(error).__name__ == "Skipped":  # by pytest.skip, on this rank
            result.write_bytes(cloudpickle.dumps(("skip", str(error))))
            return
        result.write_bytes(cloudpickle.dumps(("error", traceback.format_exc())))
        raise
    result.write_bytes(text)


if __name__ == "__main__":
    main(sys.argv[1])
