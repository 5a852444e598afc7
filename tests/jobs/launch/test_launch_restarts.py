"""Restarts and preemption as the launcher sees them, of ranks that only post milestones."""

from __future__ import annotations

import os
import signal
import time

import pytest

pytestmark = pytest.mark.timeout(60)

# Each attempt notes its environment; `body` decides how it goes.
RANK = """
    import os, signal, sys, time
    from collective.job.milestones import VARIABLE, MilestoneBoard, Milestones
    rank, size = int(os.environ["RANK"]), os.environ["WORLD_SIZE"]
    attempt = int(os.environ["COLLECTIVE_RESTART_COUNT"])

    def post(steps, start=0, checkpoint="", step=0):
        board = MilestoneBoard.open(os.environ[VARIABLE])
        board.post(rank, Milestones(os.getpid(), steps, start, checkpoint, step))

    def tell(name, text):
        with open(name + ".part", "w") as file:
            file.write(f"{{text}}\\n")
        os.rename(name + ".part", name)

    tell(f"attempt{{attempt}}.rank{{rank}}", f"{{time.time()}} {{size}}")
    while not all(os.path.exists(f"attempt{{attempt}}.rank{{r}}") for r in range(int(size))):
        time.sleep(0.01)
    {body}
"""


def job(launch, *options, body, ranks=2):
    script = launch.script(RANK.format(body=body.strip()))
    return launch.start("-np", ranks, *options, script)


def attempts(launch):
    """Returns (when the attempt began, its size) for each."""
    files = sorted(launch.folder.glob("attempt*.rank0"))
    return [tuple(map(float, file.read_text().split())) for file in files]


@pytest.mark.matrix
def test_pauses_grow_and_the_report_says_what_comes(launch):
    body = """
    post(2, 10 * attempt, f"m-{10 * attempt}", 10 * attempt)
    print(attempt)
    sys.exit(3 if rank == 1 and attempt < 3 else 0)
    """
    options = ("--max-restarts", 3, "--restart-pause", 0.3, "--log-dir", "logs")
    code, stderr = launch.end(job(launch, *options, body=body))
    times = [when for when, _ in attempts(launch)]
    gaps = [later - earlier for earlier, later in zip(times, times[1:])]
    assert code == 0 and len(times) == 4
    assert all(gap >= pause for gap, pause in zip(gaps, (0.3, 0.6, 1.2)))
    assert stderr.count("root cause: rank 1 of 2") == 3
    assert "  restart    1 of 3 in 0.3 s, from step 0, 'm-0'" in stderr
    assert "  restart    3 of 3 in 1.2 s, from step 20, 'm-20'" in stderr


def test_all_restarts_are_used_up(launch):
    options = ("--max-restarts", 1, "--restart-pause", 0)
    code, stderr = launch.end(job(launch, *options, body="post(attempt); sys.exit(7)"))
    assert code == 7 and len(attempts(launch)) == 2
    assert "no restart: that was the last of --max-restarts 1" in stderr


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    "body, code, count, words",
    [
        ("post(5, 0); sys.exit(4)", 4, 2, "failed after step 5 twice in a row"),
        ("sys.exit(4)", 4, 2, "failed before the first step twice in a row"),
        ("post(5 - 2 * attempt, 2 * attempt, 'm', 2); sys.exit(4)", 4, 2, "after step 5 twice"),
        ("post(5, 0, f'm-{attempt}', attempt); sys.exit(4)", 4, 4, "last of --max-restarts 3"),
        ("sys.exit(2)", 2, 1, "bad usage of the program"),
        ("post(1); sys.exit(2)", 2, 2, "after step 1 twice"),
        ("import nothing_like_this", 1, 1, "ModuleNotFoundError before the first step"),
    ],
)
def test_failures_that_would_come_again(launch, body, code, count, words):
    options = ("--max-restarts", 3, "--restart-pause", 0)
    got, stderr = launch.end(job(launch, *options, body=body, ranks=1))
    assert (got, len(attempts(launch))) == (code, count)
    assert words in stderr.split("no restart: ")[1]


def test_an_elastic_job_leaves_out_who_died(launch):
    body = """
    post(attempt)
    if rank == 1 and attempt < 3: os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.5 if attempt < 3 else 0)
    """
    options = ("--max-restarts", 3, "--restart-pause", 0, "--elastic", "--min-np", 3)
    code, stderr = launch.end(job(launch, *options, body=body, ranks=4))
    assert code == 0 and [size for _, size in attempts(launch)] == [4, 3, 3, 3]
    assert "restart    1 of 3 in 0 s on 3 ranks, from the beginning" in stderr


@pytest.mark.matrix
def test_logs_of_all_attempts_are_kept(launch):
    options = ("--max-restarts", 1, "--restart-pause", 0, "--log-dir", "logs")
    body = "print('attempt', attempt, flush=True); sys.exit(5 * (1 - attempt))"
    assert launch.end(job(launch, *options, body=body, ranks=1))[0] == 0
    text = (launch.folder / "logs" / "rank.0" / "stdout").read_text()
    assert text == "attempt 0\nattempt 1\n"


def test_a_signal_in_the_pause_ends_the_job(launch):
    process = job(launch, "--max-restarts", 1, "--restart-pause", 60, body="sys.exit(5)")
    for line in iter(process.stderr.readline, b""):
        if b"restart    1 of 1 in 60 s" in line:
            break
    process.send_signal(signal.SIGTERM)
    code, stderr = launch.end(process)
    assert code == 143 and "SIGTERM before the restart: the job ends" in stderr


@pytest.mark.matrix
def test_an_interrupted_job_is_not_started_again(launch):
    process = job(launch, "--max-restarts", 3, body="tell(f'on{rank}', 1); time.sleep(60)")
    launch.files("on0", "on1")
    process.send_signal(signal.SIGINT)
    code, stderr = launch.end(process)
    assert code == 130 and len(attempts(launch)) == 1 and "restart " not in stderr


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("end", ["sys.exit(143)", "os.kill(os.getpid(), signal.SIGTERM)"])
def test_a_rank_that_was_told_to_stop_stops_the_job_for_good(launch, end):
    """The others are told, too, in case that they don't know."""
    body = f"""
    post(3, 0, 'm-2', 2)
    if rank == 1: {end}
    signal.signal(signal.SIGTERM, lambda *_: (tell('told', 1), sys.exit(143)))
    time.sleep(60)
    """
    code, stderr = launch.end(job(launch, "--max-restarts", 3, body=body))
    assert code == 143 and launch.files("told") and len(attempts(launch)) == 1
    assert "its last checkpoint is 'm-2'. Resume with the same command, from step 2" in stderr


@pytest.mark.matrix
def test_a_signal_of_the_users_choice(launch):
    body = """
    assert os.environ["COLLECTIVE_PREEMPT_SIGNAL"] == "SIGUSR1"
    signal.signal(signal.SIGTERM, lambda *_: (tell(f"told{rank}", 1), sys.exit(143)))
    tell(f"on{rank}", 1)
    time.sleep(60)
    """
    process = job(launch, "--preempt-signal", "USR1", body=body)
    launch.files("on0", "on1")
    process.send_signal(signal.SIGUSR1)
    code, stderr = launch.end(process)
    assert code == 143 and launch.files("told0", "told1") == [1, 1]
    assert (
        "SIGUSR1: stopping ranks 0 and 1; a rank that trains may save, for 60 s at most" in stderr
    )


def test_a_second_term_ends_at_once_and_one_at_the_same_moment_is_the_same(launch):
    body = """
    signal.signal(signal.SIGTERM, lambda *_: tell(f"told{rank}", 1))
    tell(f"on{rank}", 1)
    while True: time.sleep(1)
    """
    process = job(launch, body=body)
    launch.files("on0", "on1")
    began = time.monotonic()
    process.send_signal(signal.SIGTERM)
    launch.files("told0", "told1")
    process.send_signal(signal.SIGTERM)
    time.sleep(1.2)
    assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    code, _ = launch.end(process)
    assert code == 143 and time.monotonic() - began < 15


def test_what_a_rank_has_started_works_until_it_has_saved(launch):
    """TERM goes to the rank alone; its child dies after it."""
    body = """
    import subprocess
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    def save(*_):
        time.sleep(0.3)
        tell(f"child{rank}", int(child.poll() is None))
        sys.exit(143)
    signal.signal(signal.SIGTERM, save)
    tell(f"on{rank}", child.pid)
    time.sleep(60)
    """
    process = job(launch, body=body)
    children = launch.files("on0", "on1")
    process.send_signal(signal.SIGTERM)
    assert launch.end(process)[0] == 143 and launch.files("child0", "child1") == [1, 1]
    assert not any(os.path.exists(f"/proc/{child}") for child in children)


@pytest.mark.parametrize("seed", [None, "7"])
def test_all_ranks_hash_alike_also_after_a_restart(launch, monkeypatch, seed):
    """hash() of a text, and so the order of a set, is one in all processes of a job."""
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    if seed is not None:
        monkeypatch.setenv("PYTHONHASHSEED", seed)
    body = """
    tell(f"hash{attempt}.{rank}", str((hash("user_17"), list({"a", "b", "c", "d", "e"}))))
    sys.exit(3 if rank == 1 and attempt < 1 else 0)
    """
    options = ("--max-restarts", 1, "--restart-pause", 0)
    code, _ = launch.end(job(launch, *options, body=body, ranks=3))
    # A rank that is ended while it tells leaves an empty file.
    texts = list(filter(None, (file.read_text() for file in launch.folder.glob("hash*.*"))))
    assert code == 0 and len(texts) >= 4 and len(set(texts)) == 1, texts
