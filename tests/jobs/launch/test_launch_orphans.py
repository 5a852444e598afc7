"""Nothing stays behind, however the launcher, its supervisor or the ranks end.

That no process of a test is left is checked after every test, by the `launch` fixture.
"""

from __future__ import annotations

import os
import signal
import subprocess
from signal import SIGKILL

import pytest

pytestmark = pytest.mark.timeout(60)

# Besides the sleeping rank: a child, one in a session of its own, and one that was forked twice and
# ignores signals.
FAMILY = """
    sleep = [sys.executable, "-c", "import time; time.sleep(60)"]
    subprocess.Popen(sleep)
    subprocess.Popen(sleep, start_new_session=True)
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            for signum in (1, 2, 3, 15):
                signal.signal(signum, signal.SIG_IGN)
            tell(f"orphan{rank}", os.getpid())
            time.sleep(60)
        os._exit(0)
    os.wait()
    wait_for(f"orphan{rank}")
"""


def with_family(launch, *options):
    """Starts a job with the whole FAMILY in each of its two ranks."""
    process, pids = launch.start_sleeping(*options, extra=FAMILY)
    assert len(launch.processes()) == 2 + 2 * 4  # launcher and supervisor; each rank with its three
    return process, pids


def test_the_family_goes_when_the_launcher_is_killed(launch):
    process, _ = with_family(launch)
    process.kill()
    process.wait(20)


def test_the_family_goes_when_the_launchers_whole_group_is_killed(launch):
    process = launch.start("-np", 2, launch.sleeper(FAMILY), start_new_session=True)
    launch.files("rank0", "rank1")
    os.killpg(process.pid, SIGKILL)
    process.wait(20)


def test_the_family_goes_when_all_that_looks_like_the_launcher_is_killed(launch):
    """`pkill -KILL -f collective.launch`: the supervisor doesn't go by that name."""
    process, _ = with_family(launch)
    named = []
    # all before the first is killed: the supervisor is quick to kill the rest
    for pid in launch.processes():
        with open(f"/proc/{pid}/cmdline") as file:
            if "collective.launch" in file.read():
                named.append(pid)
    assert process.pid in named
    for pid in named:
        os.kill(pid, SIGKILL)
    process.wait(20)


def test_the_family_goes_when_the_supervisor_is_killed(launch):
    process, _ = with_family(launch)
    with open(f"/proc/{process.pid}/task/{process.pid}/children") as file:
        (supervisor,) = map(int, file.read().split())
    os.kill(supervisor, SIGKILL)
    code, stderr = launch.end(process)
    assert code == 137
    assert f"supervisor process {supervisor} has died: the job was killed" in stderr
    assert "still there" not in stderr


@pytest.mark.parametrize("how", ["TERM to the launcher", "a rank fails"])
def test_the_family_goes_when_the_job_ends(launch, how):
    process, pids = with_family(launch, "--grace", "0.5")
    if how == "TERM to the launcher":
        process.terminate()
        assert launch.end(process)[0] == 143
    else:
        os.kill(pids[0], signal.SIGSEGV)
        assert launch.end(process)[0] == 139


def test_children_that_outlive_their_ranks_end_well(launch):
    script = launch.sleeper(FAMILY + "    sys.exit(0)")
    assert launch.end(launch.start("-np", 2, "--grace", "0.5", script)) == (0, "")


def test_the_shells_other_children_are_spared(launch):
    """`sleep & exec collective launch`: the launcher's child isn't one of its job."""
    script = launch.sleeper()
    command = f'sleep 60 >/dev/null 2>&1 & echo $! > spared; exec "$@" -np 2 {script}'
    process = subprocess.Popen(
        ["sh", "-c", command, "sh", *launch.COMMAND],
        cwd=launch.folder,
        env=launch.environment,
        stderr=subprocess.PIPE,
    )
    launch.files("rank0", "rank1")
    (spared,) = launch.files("spared")
    with open(f"/proc/{process.pid}/task/{process.pid}/children") as file:
        (supervisor,) = set(map(int, file.read().split())) - {spared}
    os.kill(supervisor, SIGKILL)
    assert launch.end(process)[0] == 137
    os.kill(spared, SIGKILL)  # raises if it is gone


def test_children_that_outlive_their_ranks_may_say_goodbye(launch):
    """TERM comes first; KILL would leave no note."""
    extra = """
    if os.fork() == 0:
        os.setsid()
        def goodbye(signum, frame):
            tell("goodbye", signum)
            os._exit(0)
        signal.signal(signal.SIGTERM, goodbye)
        tell("up", os.getpid())
        time.sleep(60)
    wait_for("up")
    os._exit(0)
    """
    assert launch.end(launch.start("-np", 1, "--grace", "20", launch.sleeper(extra))) == (0, "")
    assert launch.files("goodbye") == [signal.SIGTERM]
