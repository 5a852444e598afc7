"""Jobs that are started by a true ssh, from true servers, and what --check says of hosts."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator

import pytest

from tests.jobs.hosts.ssh_servers import SshServers, why_not
from tests.jobs.hosts.test_hosts import TELL
from tests.jobs.launch.conftest import MARK
from tests.jobs.launch.test_launch_check import make_stubs

pytestmark = [
    pytest.mark.timeout(150),
    pytest.mark.matrix,
    pytest.mark.skipif(bool(why_not()), reason=why_not()),
]


class Servers:
    """Makes hosts with ssh servers, and runs launchers on the first."""

    def __init__(self, hosts) -> None:
        self._hosts = hosts
        self.ssh: SshServers
        self._path = make_stubs(hosts)

    def check(self, *arguments: object) -> tuple[int, list[str]]:
        """Runs --check, and returns the lines that it prints."""
        code, stdout, stderr = self.launch("--check", *arguments, PYTHONPATH=self._path)
        assert not stderr, stderr
        return code, stdout.splitlines()

    def make(self, count: int) -> SshServers:
        self._hosts.make(count)
        mark = {MARK: self._hosts.mark}
        self.ssh = SshServers(self._hosts.network, self._hosts.folder / "ssh", mark)
        return self.ssh

    def launch(self, *arguments: object, **variables: str) -> tuple[int, str, str]:
        done = subprocess.run(
            [*self._hosts.network.on_host("h1"), *self._hosts.COMMAND, *map(str, arguments)],
            cwd=self._hosts.folder,
            env={**self._hosts.environment, **self.ssh.environment, **variables},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=100,
        )
        return done.returncode, done.stdout, done.stderr


@pytest.fixture
def servers(hosts) -> Iterator[Servers]:
    made = Servers(hosts)
    yield made
    made.ssh.stop()


def test_a_job_starts_over_a_true_ssh(hosts, servers):
    servers.make(3).start("h2", "h3")
    names = "10.77.0.1:1,10.77.0.2:2,10.77.0.3:1"
    code, stdout, stderr = servers.launch("-H", names, hosts.script(TELL))
    assert code == 0, stderr
    assert sorted(stdout.splitlines()) == [
        "[10.77.0.1:0] 0 4 0 1 0 3 10.77.0.1 net0 False",
        "[10.77.0.2:1] 1 4 0 2 1 3 10.77.0.2 net0 False",
        "[10.77.0.2:2] 2 4 1 2 0 1 10.77.0.2 net0 False",
        "[10.77.0.3:3] 3 4 0 1 2 3 10.77.0.3 net0 False",
    ]


def test_check_finds_nothing_wrong_with_hosts_that_are_well(hosts, servers):
    servers.make(2).start("h2")
    code, lines = servers.check("-H", "10.77.0.1:1,10.77.0.2:2", hosts.script(TELL))
    text = "\n".join(lines)
    assert code == 0, text
    assert "network     net0 (10.77.0.1), the way to 10.77.0.2; also lo (127.0.0.1" in text
    assert "host 10.77.0.2 10.77.0.2 (net0), " in text
    assert "problem" not in text and lines[-1] == "Training on these hosts can start."


def test_check_names_each_host_with_its_trouble(hosts, servers):
    ssh = servers.make(6)
    ssh.start("h2", "h6")
    ssh.start("h4", known=False)
    ssh.start("h5", refuse=True)
    hosts.network.part("h6", "h2")
    names = [f"10.77.0.{number}:1" for number in range(1, 7)]
    code, lines = servers.check("-H", ",".join([*names, "nowhere:1"]))
    problems = [line for line in lines if line.startswith("problem: ")]
    expected = {
        "10.77.0.3": ("port 22: Connection refused", "start one, or name its port by --ssh-port"),
        "10.77.0.4": ("Host key verification failed", "`ssh 10.77.0.4 true` by hand takes it"),
        "10.77.0.5": ("Permission denied (publickey", "`ssh-copy-id 10.77.0.5` brings a key"),
        "10.77.0.2 can't connect": ("to host 10.77.0.6", "open all between hosts"),
        "10.77.0.6 can't connect": ("to host 10.77.0.2: No route to host", "open all between"),
        "nowhere": ("Could not resolve hostname nowhere", "give its address, or the name one"),
    }
    for name, words in expected.items():
        [line] = [line for line in problems if line.startswith(f"problem: host {name}")]
        assert all(each in line for each in words), line
    assert code == 1 and len(problems) == len(expected), problems


def test_check_of_one_host_of_several(hosts, servers):
    servers.make(2)
    common = ("--nnodes", 2, "--device", "cpu", "-np", 2, "--secret-file", hosts.folder / "none")
    code, lines = servers.check(*common, "--node-rank", 0, "--master-addr", "10.77.0.1")
    assert code == 0, lines
    [network] = [line for line in lines if line.startswith("network")]
    assert "net0 (10.77.0.1), the way of --master-addr 10.77.0.1; also lo" in network
    assert any(
        f"note: the job's secret {hosts.folder}/none does not exist" in line for line in lines
    )
    code, lines = servers.check(*common, "--node-rank", 1, "--master-addr", "nowhere")
    assert code == 1
    assert any("problem: --master-addr nowhere can't be resolved" in line for line in lines)
    assert not (hosts.folder / "none").exists()
