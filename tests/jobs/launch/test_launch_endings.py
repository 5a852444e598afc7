"""How jobs end: exit codes, signals, and nothing left over.

That no process remains is checked after every test, by the `launch` fixture.
"""

from __future__ import annotations

import os
import signal
import time
from signal import SIGHUP, SIGINT, SIGKILL, SIGQUIT, SIGTERM

import pytest

from collective.job.machine import available_cores

pytestmark = pytest.mark.timeout(60)


@pytest.mark.parametrize("ranks", [1, 3])
def test_all_is_well(launch, ranks):
    code, _, stderr = launch("-np", ranks, launch.script("pass"))
    assert (code, stderr) == (0, b"")


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(
    "source, code, manner",
    [
        ("sys.exit(7)", 7, "exit code 7"),
        ("raise ValueError('what was wrong')", 1, "exit code 1"),
        ("os.kill(os.getpid(), signal.SIGKILL)", 137, "signal SIGKILL"),
        ("os.abort()", 134, "signal SIGABRT"),
        ("print('only said on stdout'); os._exit(255)", 255, "only said on stdout"),
    ],
)
def test_the_job_ends_as_the_rank_that_fails(launch, ranks, source, code, manner):
    process = launch.start("-np", ranks, launch.sleeper(f"if rank == {ranks - 1}: {source}"))
    assert process.wait(20) == code
    report = process.communicate()[1].decode()
    assert f"root cause: rank {ranks - 1} of {ranks}" in report
    assert manner in report
    assert ("what was wrong" in report.split("last lines")[-1]) == ("what was wrong" in source)


def test_the_report_has_the_last_twenty_lines_and_comes_last(launch):
    script = launch.sleeper(
        "for i in range(99): print('line', i, file=sys.stderr)\n    sys.exit(3)"
    )
    code, stderr = launch.end(launch.start("-np", 1, script))
    report = stderr[stderr.index("collective launch: the job failed") :]
    lines = [line.strip() for line in report.splitlines()]
    assert lines[-20:] == [f"line {number}" for number in range(79, 99)]
    assert "line 78" not in report
    assert code == 3


def test_a_rank_killed_from_outside(launch):
    process, pids = launch.start_sleeping()
    os.kill(pids[1], SIGKILL)
    code, stderr = launch.end(process)
    assert code == 137
    assert f"rank 1 of 2\n  time       {time.strftime('%Y-')}" in stderr
    assert f"pid        {pids[1]}" in stderr and "signal SIGKILL" in stderr
    assert "rank 0 by SIGTERM after the launcher's TERM" in stderr


def test_the_first_of_two_failures_is_blamed(launch):
    extra = """
    rank == 1 and (tell("first", 1), sys.exit(5))
    rank == 2 and signal.signal(15, lambda *_: sys.exit(6))
    """
    code, stderr = launch.end(launch.start("-np", 3, launch.sleeper(extra)))
    assert code == 5
    assert "root cause: rank 1 of 3" in stderr


@pytest.mark.parametrize(
    "words",
    [
        "Horovod has been shut down.",
        "collective.errors.RankError: calling model_fn (train) failed on rank 1: KeyError: 'mine'",
    ],
)
def test_a_victim_is_not_blamed_for_a_root_cause_that_ends_after_it(launch, words):
    """Its peers are told of a rank that raised before that rank is gone."""
    extra = f"words = {words!r}"
    extra += """
    if rank == 0:
        print(words, file=sys.stderr)
        tell("victim", os.getpid())
        sys.exit(1)
    wait_for("victim")
    try:
        while True:
            os.kill(int(open("victim").read()), 0)
            time.sleep(0.01)
    except ProcessLookupError:
        time.sleep(0.2)
        sys.exit("the real reason")
    """
    code, stderr = launch.end(launch.start("-np", 2, launch.sleeper(extra)))
    assert code == 1
    assert "root cause: rank 1 of 2" in stderr and "the real reason" in stderr


@pytest.mark.slow
def test_a_root_cause_that_is_long_in_ending_is_blamed_for_its_error(launch):
    """A busy machine: it has raised, which its victim names, and still ends when that one is gone."""
    extra = """
    if rank == 0:
        wait_for("raised")
        sys.exit("lost rank 1, which has ended, while 'x' waited for it in shared memory")
    import atexit
    atexit.register(lambda: (tell("raised", 1), time.sleep(60)))
    raise ValueError("the real reason")
    """
    code, stderr = launch.end(launch.start("-np", 2, launch.sleeper(extra)))
    assert code == 1
    assert "root cause: rank 1 of 2" in stderr and "    ValueError: the real reason" in stderr
    assert "an error; the launcher's TERM came before it was gone" in stderr


def test_a_rank_may_leave_before_the_others(launch):
    script = launch.sleeper("rank == 0 and sys.exit(0)\n    time.sleep(0.5)\n    sys.exit(0)")
    assert launch.end(launch.start("-np", 2, script)) == (0, "")


def test_a_rank_that_left_early_is_named_when_others_fail(launch):
    extra = """
    rank == 0 and (tell("left", 1), os._exit(0))
    wait_for("left")
    time.sleep(0.3)
    sys.exit(9)
    """
    code, stderr = launch.end(launch.start("-np", 2, launch.sleeper(extra)))
    assert code == 9
    assert "left early rank 0 (pid " in stderr and "with exit code 0 at " in stderr


@pytest.mark.parametrize("signum", [SIGINT, SIGTERM, SIGHUP, SIGQUIT])
def test_signals_are_passed_on(launch, signum):
    extra = """
    def note(signum, frame):
        tell(f"note{rank}", signum)
        sys.exit(0)
    for number in (1, 2, 3, 15):
        signal.signal(number, note)
    """
    process, _ = launch.start_sleeping(extra=extra)
    process.send_signal(signum)
    code, stderr = launch.end(process)
    assert code == 128 + signum
    assert launch.files("note0", "note1") == [signum, signum]
    assert "root cause" not in stderr


IGNORE = "for number in (1, 2, 3, 15): signal.signal(number, signal.SIG_IGN)"


@pytest.mark.parametrize("signum", [SIGTERM, SIGINT])
def test_who_ignores_a_signal_is_killed_after_the_grace(launch, signum):
    process, _ = launch.start_sleeping("--grace", "0.5", extra=IGNORE)
    began = time.monotonic()
    process.send_signal(signum)
    code, stderr = launch.end(process)
    assert code == 128 + signum
    assert 0.5 <= time.monotonic() - began < 10
    assert "ranks 0 and 1 still there: KILL" in stderr


def test_who_ignores_term_when_another_rank_fails(launch):
    process, pids = launch.start_sleeping("--grace", "0.5", extra=IGNORE)
    os.kill(pids[1], SIGKILL)
    code, stderr = launch.end(process)
    assert code == 137
    assert "rank 0 still there: KILL" in stderr and "root cause: rank 1" in stderr


def test_a_second_interrupt_kills_at_once(launch):
    process, _ = launch.start_sleeping("--grace", "50", extra=IGNORE)
    process.send_signal(SIGINT)
    assert b"SIGINT: stopping ranks 0 and 1" in process.stderr.readline()
    process.send_signal(SIGINT)
    assert launch.end(process)[0] == 130


def test_hangup_is_ignored_under_nohup(launch):
    process = launch.start(
        "-np", 2, launch.sleeper(), preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN)
    )
    pids = launch.files("rank0", "rank1")
    for pid in (process.pid, *pids):
        os.kill(pid, SIGHUP)
    process.send_signal(SIGTERM)
    code, stderr = launch.end(process)
    assert code == 143 and "SIGHUP" not in stderr


def test_a_background_job_can_be_interrupted(launch):
    """A shell without job control starts it with INT ignored, which must not reach the ranks."""
    process = launch.start(
        "-np",
        2,
        "--grace",
        60,
        launch.sleeper(),
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN),
    )
    launch.files("rank0", "rank1")
    process.send_signal(SIGINT)
    code, stderr = launch.end(process)  # sooner than the grace
    assert code == 130 and "KeyboardInterrupt" in stderr


def test_a_command_that_cannot_be_started(launch):
    """The interpreter is there but isn't one."""
    fake = launch.folder / "python3.9"
    fake.write_bytes(b"\x7fELF nonsense")
    fake.chmod(0o755)
    code, stderr = launch.end(launch.start("-np", 2, str(fake), launch.script("pass")))
    assert code == 126
    assert "can't be started: Exec format error" in stderr


def test_a_job_of_many_ranks(launch):
    code, stdout, stderr = launch("-np", 12, launch.script("import os; print(os.environ['RANK'])"))
    is_crowded = 12 > 2 * available_cores()
    assert (code, stderr.count(b"\n")) == (0, is_crowded)
    assert (b"starting 12 ranks on " in stderr) == is_crowded
    assert set(stdout.splitlines()) == {b"[%d] %d" % (rank, rank) for rank in range(12)}
