"""Tests how a process takes signals that tell it to stop, in processes of their own."""

from __future__ import annotations

import signal
import subprocess
import sys
import textwrap

import pytest

PROGRAM = """
import multiprocessing, os, signal, sys, threading, time
os.environ["COLLECTIVE_LAUNCHED"] = "1"
# A shell lets what it starts in the background ignore Ctrl-C, and that is inherited.
signal.signal(signal.SIGINT, signal.default_int_handler)
from collective.coordination import stop_signals
signals = stop_signals.StopSignals()
stop_signals.SAME = 0.5

def tell(number):
    os.kill(os.getpid(), number)
    end = time.monotonic() + 5
    while not signals.received and time.monotonic() < end:
        time.sleep(0.01)

"""


def run(body):
    """Returns how the program ended and what it printed."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", PROGRAM + textwrap.dedent(body)],
        capture_output=True,
        text=True,
        timeout=60,
    )
    print(done.stderr)
    return done.returncode, done.stdout


def test_the_first_is_noted_and_one_at_the_same_moment_is_the_same():
    body = """
    signals.watch()
    tell(15)
    tell(2)
    time.sleep(0.1)
    print(int(signals.received))
    """
    assert run(body) == (0, "15\n")


def test_under_slurm_term_comes_more_than_once():
    """Slurm tells the step, the batch file and srun, and kills by itself who takes too long."""
    body = """
    os.environ["SLURM_JOB_ID"] = "7"
    signals.watch()
    tell(15)
    time.sleep(0.6)
    tell(15)
    time.sleep(0.1)
    print(int(signals.received), flush=True)
    tell(2)
    time.sleep(5)
    """
    assert run(body) == (-2, "15\n")


@pytest.mark.parametrize("first, second", [(15, 15), (2, 15), (15, 2)])
def test_a_later_one_ends_the_process_wherever_it_is(first, second):
    """The main thread is in C, where no handler of Python is called."""
    body = f"""
    signals.watch()
    tell({first})
    time.sleep(0.6)
    threading.Timer(0.2, os.kill, (os.getpid(), {second})).start()
    import ctypes
    print("in C", flush=True)
    ctypes.CDLL(None).pause()     # a handler in this thread would end it
    ctypes.CDLL(None).sleep(20)
    """
    assert run(body) == (-second, "in C\n")


def test_once_the_launcher_ends_the_job_the_first_one_ends_the_process():
    body = """
    from collective.coordination import milestones
    milestones.poster = lambda: type("Poster", (), {"is_ending": True})
    signals.watch()
    os.kill(os.getpid(), 15)
    time.sleep(20)
    """
    assert run(body)[0] == -signal.SIGTERM


def test_what_a_script_has_installed_stays():
    body = """
    mine = []
    signal.signal(signal.SIGTERM, lambda *_: mine.append("before"))
    signals.watch()
    signal.signal(signal.SIGINT, lambda *_: mine.append("after"))
    os.kill(os.getpid(), 15)
    os.kill(os.getpid(), 2)
    time.sleep(0.2)
    signals.unwatch(unheard=True)
    os.kill(os.getpid(), 2)
    print(mine, signals.received)
    """
    assert run(body) == (0, "['before', 'after', 'after'] 0\n")


def test_an_event_loop_keeps_its_pipe():
    body = """
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    signal.set_wakeup_fd(writing)
    signals.watch()
    tell(15)
    print(int(signals.received), os.read(reading, 9))
    signals.unwatch(unheard=False)
    print(signal.set_wakeup_fd(-1) == writing, signal.getsignal(15) == signal.SIG_DFL)
    """
    assert run(body) == (0, "15 b'\\x0f'\nTrue True\n")


def test_a_fork_is_ended_as_always_and_tells_its_parent_nothing():
    body = """
    signals.watch()
    child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
    child.start()
    child.terminate()
    child.join(20)
    print(child.exitcode, signals.received)
    """
    assert run(body) == (0, "-15 0\n")


@pytest.mark.parametrize("unheard, code", [(False, 0), (True, -15)])
def test_a_wish_that_nobody_has_heard_ends_the_process_when_there_is_nothing_to_save(unheard, code):
    body = f"""
    signals.watch()
    tell(15)
    signals.unwatch(unheard={unheard})
    """
    assert run(body)[0] == code


def test_afterwards_signals_do_what_they_did_and_may_be_watched_again():
    body = """
    for _ in range(3):
        signals.watch()
        signals.unwatch(unheard=True)
    print(signal.getsignal(15) == signal.SIG_DFL, threading.active_count())
    print(signal.getsignal(2) == signal.default_int_handler, signal.set_wakeup_fd(-1))
    signals.watch()
    tell(15)
    print(int(signals.received))
    """
    assert run(body) == (0, "True 1\nTrue -1\n15\n")


def test_another_thread_watches_nothing():
    body = """
    thread = threading.Thread(target=signals.watch)
    thread.start()
    thread.join()
    print(signal.getsignal(15) == signal.SIG_DFL)
    signals.watch()
    print(signal.getsignal(15) == signal.SIG_DFL)
    """
    assert run(body) == (0, "True\nFalse\n")


def test_a_signal_of_the_users_choice():
    body = """
    os.environ["COLLECTIVE_PREEMPT_SIGNAL"] = "USR1"
    signals.watch()
    tell(signal.SIGUSR1)
    print(int(signals.received))
    """
    assert run(body) == (0, "15\n")
    body = """
    os.environ["COLLECTIVE_PREEMPT_SIGNAL"] = "USR9"
    try:
        signals.watch()
    except ValueError as error:
        print(error)
    """
    assert run(body)[1] == (
        "COLLECTIVE_PREEMPT_SIGNAL=USR9: 'USR9' is no signal; give a name like USR1, or a number\n"
    )
