"""What ranks write alike is shown once; --verbose and the logs have everything."""

from __future__ import annotations

import os
import re
import signal

import pytest

pytestmark = pytest.mark.timeout(60)

# All ranks warn and fail alike, rank 1 also warns of something of its own. None ends before all
# have written their errors: ranks are ended with the first that fails, and one that is ended
# while it writes leaves half a traceback.
ALIKE = """
    import warnings
    clock = f"2026-11-23 01:37:42.47918{rank}: "
    for file, name in ("cuda_dnn.cc:9261", "cuDNN"), ("cuda_blas.cc:1515", "cuBLAS"):
        print(
            f"{clock}E external/local_xla/xla/stream_executor/cuda/{file}] Unable to register "
            f"{name} factory: Attempting to register factory for plugin {name} when one has "
            "already been registered",
            file=sys.stderr,
        )
    warnings.warn("of every rank")
    print(f"{clock}W tensorflow/core/x.cc:12] of TensorFlow", file=sys.stderr)
    if rank == 1:
        warnings.warn("of rank 1 only")

    def train():
        raise ValueError("wrong\\non every rank")

    try:
        train()
    except ValueError:
        sys.excepthook(*sys.exc_info())
    tell(f"raised{rank}", 1)
    for other in range(4):
        wait_for(f"raised{other}")
    os._exit(1)
"""


def counts(stderr, *texts):
    return [stderr.count(text) for text in texts]


@pytest.mark.parametrize("options, every", [([], 1), (["--verbose"], 4)])
def test_what_all_ranks_write_is_shown_once(launch, tmp_path, options, every):
    script = launch.sleeper(ALIKE)
    code, _, stderr = launch("-np", 4, "--log-dir", "logs", *options, script)
    assert code == 1
    console, _, report = stderr.decode().partition("collective launch: the job failed")
    assert counts(console, "of every rank\n", "] of TensorFlow", "of rank 1 only\n") == [
        every,
        every,
        1,
    ]
    assert counts(console, "Unable to register") == [0 if every == 1 else 8]
    if every == 1:
        assert counts(console, "Traceback", "ValueError: wrong") == [1, 1]
    assert report.endswith("    ValueError: wrong\n    on every rank\n")
    log = tmp_path.joinpath("logs", "rank.2", "stderr").read_text()
    assert counts(log, "of every rank\n", "of TensorFlow", "Unable to register") == [1, 1, 2]


def test_an_error_of_all_ranks_names_them(launch):
    """Each waits until all have written theirs."""
    script = launch.sleeper(
        """
    def train():
        raise ValueError("wrong")
    try:
        train()
    except ValueError:
        sys.excepthook(*sys.exc_info())
    tell(f"raised{rank}", 1)
    for other in range(3):
        wait_for(f"raised{other}")
    os._exit(1)
    """
    )
    code, _, stderr = launch("-np", 3, script)
    text = stderr.decode()
    assert code == 1
    assert re.search(
        r"launch: ranks \d, \d raised the same as rank \d: ValueError at .*, line", text
    )
    assert text.count("Traceback") == 1 and text.count("] ValueError: wrong\n") == 1
    assert "\n  error on its stderr:\n    ValueError: wrong\n" in text
    assert ".py, line " in text.partition("\n  raised at  ")[2].splitlines()[0]


def test_the_error_of_a_rank_that_hangs_afterwards_is_shown(launch):
    extra = """
    if rank == 1:
        print("Traceback (most recent call last):\\nValueError: then it hangs", file=sys.stderr)
    """
    process, _ = launch.start_sleeping(extra=extra)
    line = process.stderr.readline() + process.stderr.readline()
    assert line == b"[1] Traceback (most recent call last):\n[1] ValueError: then it hangs\n"
    process.send_signal(signal.SIGTERM)
    assert launch.end(process)[0] == 143


@pytest.mark.parametrize("ranks", [1, 3])
def test_an_interrupt_prints_a_few_lines(launch, ranks):
    extra = """
    def deep(n):
        if n:
            return deep(n - 1) or len("different code, so that no lines are elided")
        tell(f"rank{rank}", os.getpid())
        time.sleep(60)
    deep(40) if rank % 2 else deep(20)
    """
    process = launch.start("-np", ranks, launch.sleeper(extra))
    launch.files(*(f"rank{rank}" for rank in range(ranks)))
    process.send_signal(signal.SIGINT)
    code, stderr = launch.end(process)
    assert code == 130
    assert len(stderr.splitlines()) <= 4 and "Traceback" not in stderr
    assert "interrupted at " in stderr and "in deep: time.sleep(60)" in stderr
    assert "--verbose" in stderr


def test_an_interrupt_of_a_verbose_job_prints_everything(launch):
    process, _ = launch.start_sleeping("--verbose")
    process.send_signal(signal.SIGINT)
    code, stderr = launch.end(process)
    assert code == 130
    assert stderr.count("Traceback") == stderr.count("KeyboardInterrupt") == 2


def test_a_single_rank_asks_without_waiting_for_its_line(launch):
    """A partial line of stderr is shown at once, except for one that may become noise."""
    script = launch.script("import sys; sys.stderr.write('name? '); sys.stderr.write(input())")
    process = launch.start(script, stdin=-1)
    assert os.read(process.stderr.fileno(), 100) == b"name? "
    stdout, stderr = process.communicate(b"me\n", timeout=20)
    assert (process.returncode, stderr) == (0, b"me")


def test_a_program_that_is_no_script(launch):
    code, stdout, _ = launch("-n", 2, "--no-python", "sh", "-c", "echo rank $RANK")
    assert code == 0
    assert sorted(stdout.splitlines()) == [b"[0] rank 0", b"[1] rank 1"]


def test_ranks_that_lost_a_peer_are_a_line_once_the_cause_is_known(launch):
    script = launch.script(
        """
        import os, time
        if os.environ["RANK"] != "0":
            words = "Horovod has been shut down. This was caused by an exception"
            raise RuntimeError(words)
        time.sleep(0.5)
        raise ValueError("the cause")
        """
    )
    code, _, stderr = launch("-np", 3, script)
    text = stderr.decode()
    assert code == 1 and text.count("ValueError: the cause") == 2, "the traceback, and the report"
    assert "Horovod has been shut down" not in text and text.count("Traceback") == 1
    assert "collective launch: ranks 1, 2 lost a peer at " in text
    assert "root cause: rank 0 of 3" in text


def test_ranks_that_lost_a_peer_elsewhere_show_it(launch):
    """The cause is on another machine, or has ended with 0."""
    script = launch.script("raise RuntimeError('Horovod has been shut down.')")
    code, _, stderr = launch("-np", 2, script)
    assert code == 1 and stderr.count(b"Traceback") == 1 and b"lost a peer" not in stderr
