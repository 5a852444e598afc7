"""A job that is started on its hosts from one of them.

`ssh` is a program of the test's that does on a namespace what ssh does on a host: it runs the
words in a shell there, and shows what it was called with. `-o`, ports and files are the true one's.
"""

from __future__ import annotations

import os
import shutil
import signal
import stat
import subprocess

import pytest

from tests.jobs.hosts.test_hosts import TELL

pytestmark = pytest.mark.timeout(120)

SSH = """#!/bin/sh
echo "$@" >> "$SSH_CALLS"
while [ "$1" != "--" ]; do shift; done
case "$2" in
  10.77.0.*) ;;
  *) echo "ssh: Could not resolve hostname $2: Name or service not known" >&2; exit 255 ;;
esac
name=h${2##*.}
exec env -i PATH="$PATH" HOME="$HOME" COLLECTIVE_TEST_MARK="$COLLECTIVE_TEST_MARK" \
    nsenter --net=/run/netns/"$SSH_NAMESPACES-$name" unshare --uts \
    sh -c 'hostname "$0" && exec sh -c "$1"' "$name" "$3"
"""


@pytest.fixture
def start(hosts):
    """Starts a launcher on the first host that starts the others."""
    programs = hosts.folder / "programs"
    programs.mkdir()
    program = programs / "ssh"
    program.write_text(SSH)
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    calls = hosts.folder / "calls"

    def start(*arguments: object, **how: object) -> subprocess.Popen[bytes]:
        path = f"{programs}{os.pathsep}{os.environ['PATH']}"
        namespaces = hosts.network._name("x")[:-2]
        environment = {
            **hosts.environment,
            "PATH": path,
            "SSH_CALLS": str(calls),
            "SSH_NAMESPACES": namespaces,
            **how,
        }
        return subprocess.Popen(
            [*hosts.network.on_host("h1"), *hosts.COMMAND, *map(str, arguments)],
            cwd=hosts.folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )

    start.calls = calls
    return start


def test_a_host_that_stands_there_by_name_and_by_address_is_refused(hosts, start):
    hosts.make(2)
    script = hosts.script(TELL)
    [(code, _, stderr)] = hosts.ends([start("-H", "localhost:1,10.77.0.1:2", script)])
    assert code == 2 and "has one host twice, as localhost and as 10.77.0.1" in stderr
    assert "name it once, localhost:3" in stderr
    assert not start.calls.exists()


def test_a_job_starts_on_all_hosts_from_the_first(hosts, start):
    hosts.make(3)
    script = hosts.script(TELL + "    print(e['PASSED'], flush=True)\n")
    options = ("--ssh-port", 2222, "--ssh-identity-file", "/keys/own")
    names = ("-np", 4, "-H", "10.77.0.1:1,10.77.0.2:2,10.77.0.3:5")
    [(code, stdout, stderr)] = hosts.ends([start(*options, *names, script, PASSED="so it is")])
    assert code == 0, stderr
    lines = sorted(stdout.splitlines())
    assert [line for line in lines if "net0" in line] == [
        "[10.77.0.1:0] 0 4 0 1 0 3 10.77.0.1 net0 False",
        "[10.77.0.2:1] 1 4 0 2 1 3 10.77.0.2 net0 False",
        "[10.77.0.2:2] 2 4 1 2 0 1 10.77.0.2 net0 False",
        "[10.77.0.3:3] 3 4 0 1 2 3 10.77.0.3 net0 False",
    ]
    assert sum(line.endswith("so it is") for line in lines) == 4
    calls = start.calls.read_text()
    assert calls.count("-o BatchMode=yes") == calls.count("-p 2222 -i /keys/own -- 10.77.0.") == 2
    assert not any(word in calls for word in ("secret", "PASSED", "so it is"))


@pytest.mark.matrix
def test_a_host_file_without_this_host(hosts, start):
    """As in Kubeflow's MPI operator: the launcher's own host has no rank."""
    hosts.make(3)
    file = hosts.folder / "hostfile"
    file.write_text("# workers\n10.77.0.2 slots=1\n\n10.77.0.3 slots=2\n")
    [(code, stdout, stderr)] = hosts.ends([start("--hostfile", file, hosts.script(TELL))])
    assert code == 0, stderr
    assert sorted(stdout.splitlines()) == [
        "[10.77.0.2:0] 0 3 0 1 0 2 10.77.0.2 net0 False",
        "[10.77.0.3:1] 1 3 0 2 1 2 10.77.0.3 net0 False",
        "[10.77.0.3:2] 2 3 1 2 0 1 10.77.0.3 net0 False",
    ]


@pytest.mark.matrix
def test_a_host_that_ssh_can_not_reach_is_named(hosts, start):
    hosts.make(2)
    script = hosts.script(TELL)
    launcher = start("-H", "10.77.0.1:1,10.77.0.2:1,10.78.0.9:1", script)
    [(code, stdout, stderr)] = hosts.ends([launcher])
    assert code == 2 and stdout == ""
    assert (
        "host 10.78.0.9: ssh can't start the launcher there: ssh: Could not resolve hostname "
        "10.78.0.9: Name or service not known; `ssh 10.78.0.9 true` must work" in stderr
    )


@pytest.mark.matrix
def test_what_is_missing_on_a_host_is_named(hosts, start):
    hosts.make(2)
    there = hosts.folder / "only here.py"
    there.write_text("")
    launcher = start("-H", "10.77.0.1:1,10.77.0.2:1", "--log-dir", "/proc/none", there)
    [(code, _, stderr)] = hosts.ends([launcher])
    assert code in (2, 137) and "--log-dir /proc/none can't be written" in stderr


FAILING_ON_A_HOST = """
    import os, sys
    e = os.environ
    count, host = e["COLLECTIVE_RESTART_COUNT"], e["HOROVOD_HOSTNAME"]
    print(f"attempt {count} on {host}, {e['WORLD_SIZE']} ranks", flush=True)
    if host == "10.77.0.2":
        print("uncorrectable ECC error", file=sys.stderr, flush=True)
        sys.exit(4)
"""


def test_a_host_is_left_out(hosts, start):
    """A job file's hosts, of which the launchers of the others start again."""
    hosts.make(3)
    hosts.script(FAILING_ON_A_HOST, "failing.py")
    (hosts.folder / "job.yaml").write_text(
        "entrypoint: failing.py\n"
        "hosts: ['10.77.0.1:1', '10.77.0.2:2', '10.77.0.3:1']\n"
        "slots: 4\n"
        "max_restarts: 3\n"
        "log_policies: [{pattern: ECC error, action: exclude_node}]\n"
        "environment: {COLLECTIVE_INDEPENDENT: 1}\n"
    )
    [(code, stdout, stderr)] = hosts.ends([start("job.yaml", "--device", "cpu")])
    assert code == 0, stderr
    lines = [line.partition("] ")[2] for line in stdout.splitlines()]
    assert "attempt 0 on 10.77.0.2, 4 ranks" in lines  # its other rank may be ended first
    again = sorted(line for line in lines if line.startswith("attempt 1"))
    assert again == ["attempt 1 on 10.77.0.1, 2 ranks", "attempt 1 on 10.77.0.3, 2 ranks"]
    words = "restart    1 of 3, from the beginning: no checkpoint is known, without host 10.77.0.2"
    assert words in stderr and "root cause: rank" in stderr


@pytest.mark.matrix
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGKILL])
def test_the_end_of_the_first_launcher_is_the_end_of_all(hosts, start, signum):
    hosts.make(2)
    launcher = start("-H", "10.77.0.1:1,10.77.0.2:1", hosts.sleeper())
    hosts.files("rank0", "rank1")
    launcher.send_signal(signum)
    [(code, _, _)] = hosts.ends([launcher])
    assert code == (130 if signum == signal.SIGINT else -9)
    hosts.wait_until(lambda: not hosts.processes(), "all processes gone", 15)


@pytest.mark.skipif(shutil.which("ssh") is None, reason="there is no ssh")
def test_the_true_ssh_is_asked_rightly(hosts):
    """Nobody listens at the port: its own words are told."""
    hosts.make(2)
    command = [*hosts.network.on_host("h1"), *hosts.COMMAND, "--ssh-port", "1"]
    done = subprocess.run(
        [*command, "-H", "10.77.0.1:1,10.77.0.2:1", hosts.script(TELL)],
        cwd=hosts.folder,
        env=hosts.environment,
        capture_output=True,
        text=True,
        timeout=40,
    )
    assert done.returncode == 2
    assert "host 10.77.0.2: ssh can't start the launcher there" in done.stderr
    assert "port 1: Connection refused" in done.stderr
