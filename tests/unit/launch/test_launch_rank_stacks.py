"""A rank tells the launcher where it is in Python, whatever it does, and is not harmed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from collective.launch.progress import rank_stacks

PROGRAM = """
import os, sys, threading, time
from collective.job import stack_signal
if "silent" not in sys.argv:
    stack_signal.answer(3)
threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()

def waits():
    {what}

os.write(1, b"ready")
waits()
"""


@pytest.fixture
def rank(tmp_path: Path):
    started = []

    def start(what: str, *arguments: str) -> subprocess.Popen[bytes]:
        script = tmp_path / "train.py"
        script.write_text(PROGRAM.format(what=what))
        command = [sys.executable, str(script), *arguments]
        started.append(subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True))
        assert started[-1].stdout.read(5) == b"ready"
        return started[-1]

    yield start
    for process in started:
        os.killpg(process.pid, signal.SIGKILL)  # with what it has started
        process.communicate()


@pytest.mark.parametrize(
    "what, innermost",
    [
        ("time.sleep(1000)", "train.py"),
        ("while True: pass", "train.py"),
        ("threading.Event().wait()", "threading.py"),
        ("import subprocess; subprocess.run(['sleep', '1000'])", "subprocess.py"),
    ],
)
def test_a_stack_ends_at_the_scripts_line(rank, what: str, innermost: str, tmp_path: Path):
    process = rank(what)
    stack: list[str] = []
    for _ in range(100):  # until it has come to where it waits
        stack = rank_stacks.stack_of(3)
        if innermost in stack[0] and stack[-1].endswith("waits"):
            break
    assert innermost in stack[0]
    assert stack[-1] == f"{tmp_path}/train.py, line 9, in waits"
    assert process.poll() is None
    assert rank_stacks.stack_of(2) == []


def test_a_process_that_is_not_ready_is_left_alone(rank):
    process = rank("time.sleep(1000)", "silent")
    assert rank_stacks.stack_of(3) == [] and process.poll() is None


def test_a_stopped_rank_says_nothing(rank):
    process = rank("time.sleep(1000)")
    os.kill(process.pid, signal.SIGSTOP)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
    assert rank_stacks.stack_of(3) == []


def test_the_main_thread_is_the_last_one():
    text = (
        "Thread 0x01 (most recent call first):\n"
        '  File "/a/lib/python3.11/threading.py", line 9 in run\n'
        '  File "other.py", line 1 in other\n\n'
        "Current thread 0x02 (most recent call first):\n"
        '  File "/x/site-packages/t.py", line 3 in deep\n'
        '  File "train.py", line 7 in step\n'
        '  File "train.py", line 9 in <module>\n'
    )
    assert rank_stacks.frames(text) == [
        "/x/site-packages/t.py, line 3, in deep",
        "train.py, line 7, in step",
    ]


def test_a_deep_stack_is_shortened():
    lines = [f'  File "/x/site-packages/t.py", line {n} in f' for n in range(30)]
    lines.append('  File "train.py", line 7 in step')
    shown = rank_stacks.frames("\n".join(lines))
    assert len(shown) == 8 and shown[-2:] == ["…", "train.py, line 7, in step"]
