"""Jobs that stall, and jobs that only look so.

The ranks here are no TensorFlow programs: they post what such ones would (see tests/test_stalls.py
for those).
"""

from __future__ import annotations

import os
import signal
import textwrap
import time

import pytest

pytestmark = pytest.mark.timeout(60)

# Each rank can post what a TensorFlow program would; `body` says what it does.
POSTING = """
    import os, signal, subprocess, sys, time
    from collective.job.progress import Label, Phase, Progress
    rank = int(os.environ["RANK"])
    progress = Progress(os.environ)

    def tell(name):
        open(name, "w").close()

    def wait_for(name):
        end = time.monotonic() + 25
        while not os.path.exists(name):
            assert time.monotonic() < end, name
            time.sleep(0.01)

    def run(phase=Phase.RUNNING):
        progress.does(Label("runs loss:0", ["collective.t.keys"])).enters(phase)

    {body}
"""


def posting(launch, body):
    """Writes a script whose ranks post and returns its path."""
    return launch.script(
        POSTING.format(body=textwrap.indent(textwrap.dedent(body), "    ").strip())
    )


def test_a_job_that_stalls_ends_and_says_why(launch):
    body = """
    if rank == 1:
        progress.does("runs init").enters(Phase.AWAY)
        tell("posted")
    else:
        wait_for("posted")
        run()
    time.sleep(50)
    """
    code, _, stderr = launch("-np", 3, "--stall-timeout", "1", posting(launch, body))
    text = stderr.decode()
    assert code == 124
    assert "rank 1 of 3 is missing: stopping ranks 0, 1 and 2" in text
    report = text[text.index("collective launch: the job stalled: rank 1 of 3 is missing") :]
    assert "in a run since" in report and "runs loss:0" in report
    assert "with collective.t.keys" in report
    assert "rank 1     in no run since" in report and "last: runs init" in report
    assert "--stall-timeout 1)" in report
    assert "root cause" not in text


LEAVES = """
    import os, sys
    if os.environ["RANK"] == "1":
        sys.exit(0)
    from collective import CollectiveStrategy
    CollectiveStrategy()
"""


def test_a_rank_that_leaves_before_the_ranks_have_met_ends_the_job(launch):
    code, _, stderr = launch("-np", 2, "--device", "cpu", launch.script(LEAVES))
    assert code == 124
    assert b"the job stalled: rank 1 of 2 is missing" in stderr
    assert b"rank 1     has left with exit code 0" in stderr


def test_ranks_that_ignore_the_end_of_a_stalled_job_are_killed(launch):
    body = """
    for number in (1, 2, 3, 15):
        signal.signal(number, signal.SIG_IGN)
    run()
    time.sleep(50)
    """
    code, _, stderr = launch(
        "-np", 2, "--stall-timeout", "1", "--grace", "0.5", posting(launch, body)
    )
    assert code == 124
    assert b"ranks 0 and 1 still there: KILL" in stderr
    assert b"all ranks are in the same run" in stderr


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "options, ranks, body",
    [
        # Nobody looks, whatever the ranks do.
        (["--stall-timeout", "0"], 2, "assert not os.environ['COLLECTIVE_PROGRESS']; run()"),
        (["--stall-timeout", "0.2"], 1, "assert not os.environ['COLLECTIVE_PROGRESS']; run()"),
        # No rank is in a run.
        (
            ["--stall-timeout", "0.2"],
            2,
            "assert os.environ['COLLECTIVE_PROGRESS']; progress.enters(Phase.AWAY)",
        ),
        # Rank 0 works for all: 6 s would be too long.
        (
            ["--stall-timeout", "1"],
            2,
            "(wait_for('up'), run()) if rank else (progress.works('saves'), tell('up'))",
        ),
    ],
)
def test_a_job_that_does_not_stall(launch, options, ranks, body):
    code, _, stderr = launch("-np", ranks, *options, posting(launch, f"{body}; time.sleep(2)"))
    assert (code, stderr) == (0, b"")


def test_progress_is_no_stall(launch):
    """Each rank waits for the other in turn, each time for less than the timeout."""
    body = "for _ in range(25):\n    run()\n    time.sleep(0.1)\n    progress.enters(Phase.AWAY)"
    code, _, stderr = launch("-np", 2, "--stall-timeout", "2", posting(launch, body))
    assert (code, stderr) == (0, b"")


def test_a_rank_that_fails_is_the_cause_even_if_others_wait(launch):
    body = "run() if rank else (wait_for('up'), sys.exit(5))\ntell('up')\ntime.sleep(50)"
    code, _, stderr = launch("-np", 2, "--stall-timeout", "20", posting(launch, body))
    assert code == 5 and b"root cause: rank 0" in stderr and b"stalled" not in stderr


@pytest.mark.slow
def test_ranks_that_wait_for_a_reader_do_not_stall(launch):
    """Rank 0 can't go on because nobody reads what it writes; rank 1 waits for it."""
    body = """
    if rank:
        wait_for("writing")
        run()
        wait_for("written")
        progress.enters(Phase.AWAY)
    else:
        for line in range(80):
            os.write(1, b"x" * 99_999 + bytes([10]))
            tell("writing")
        tell("written")
    """
    process = launch.start("-np", 2, "--stall-timeout", "2", posting(launch, body))
    launch.files_exist("writing")
    time.sleep(3.5)  # a stall would end the job after 2.25 s at most
    assert not (launch.folder / "written").exists() and process.poll() is None
    stdout, stderr = process.communicate(timeout=30)
    assert (process.returncode, stderr) == (0, b"") and len(stdout) > 7_000_000


@pytest.mark.parametrize("how", ["ends", "is killed"])
def test_the_board_leaves_nothing_behind(launch, how, tmp_path):
    folder = tmp_path / "temporary"
    folder.mkdir()
    script = posting(launch, "run()\ntell(f'up{rank}')\ntime.sleep(50)")
    process = launch.start("-np", 2, script, environment={"TMPDIR": str(folder)})
    launch.files_exist("up0", "up1")
    assert not list(folder.iterdir())
    process.send_signal(signal.SIGKILL if how == "is killed" else signal.SIGTERM)
    process.communicate(timeout=20)
    assert not list(folder.iterdir())
    assert not [name for name in os.listdir("/dev/shm") if "collective.progress" in name]


def test_records_of_a_process_that_has_ended_are_no_run(launch):
    """The rank goes on after a child of it that had posted was killed in the middle of a run."""
    body = """
    if rank:
        child = (
            "import os; from collective.job.progress import Phase, Progress; "
            "Progress(os.environ).does('x').enters(Phase.RUNNING)"
        )
        subprocess.run([sys.executable, "-c", child], check=True)
        time.sleep(2)
        tell("done")
    else:
        wait_for("done")
    """
    code, _, stderr = launch("-np", 2, "--stall-timeout", "1", posting(launch, body))
    assert (code, stderr) == (0, b"")
