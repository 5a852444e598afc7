"""Jobs that are started by a true ssh, from true servers, and what --check says of hosts."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator

import pytest

from tests.jobs.hosts.ssh_servers import SshServers, why_not
from tests.jobs.hosts.test_hosts import TELL
from tests.jobs.launch.conftest import MARK, ROOT

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

    def make(self, count: int) -> SshServers:
        self._hosts.make(count)
        mark = {MARK: self._hosts.mark}
        self.ssh = SshServers(self._hosts.network, self._hosts.folder / "ssh", mark)
        return self.ssh

    def launch(self, *arguments: object, timeout: float = 100) -> tuple[int, str, str]:
        done = subprocess.run(
            [*self._hosts.network.on_host("h1"), *self._hosts.COMMAND, *map(str, arguments)],
            cwd=self._hosts.folder,
            env={**self._hosts.environment, **self.ssh.environment},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout,
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
    script = hosts.script(TELL)
    code, stdout, stderr = servers.launch("--check", "-H", "10.77.0.1:1,10.77.0.2:2", script)
    assert code == 0, stdout + stderr
    assert "network     net0 (10.77.0.1), the way to 10.77.0.2; also lo (127.0.0.1" in stdout
    assert "host 10.77.0.2 10.77.0.2 (net0), " in stdout
    assert "problem" not in stdout and "Training on these hosts can start." in stdout


def test_check_names_each_host_with_its_trouble(hosts, servers):
    ssh = servers.make(6)
    ssh.start("h2", "h6")
    ssh.start("h4", known=False)
    ssh.start("h5", refuse=True)
    hosts.network.part("h6", "h2")
    names = [f"10.77.0.{number}:1" for number in range(1, 7)]
    code, stdout, stderr = servers.launch("--check", "-H", ",".join([*names, "nowhere:1"]))
    assert code == 1, stdout + stderr
    problems = [line for line in stdout.splitlines() if line.startswith("problem: ")]
    expected = {
        "10.77.0.3": ("port 22: Connection refused", "start one, or name its port by --ssh-port"),
        "10.77.0.4": ("Host key verification failed", "`ssh 10.77.0.4 true` by hand takes it"),
        "10.77.0.5": ("Permission denied (publickey)", "`ssh-copy-id 10.77.0.5` brings a key"),
        "10.77.0.6": ("can't connect to host 10.77.0.2: No route to host", "open all between"),
        "nowhere": ("doesn't lead to an address here", "a line in /etc/hosts"),
    }
    for name, words in expected.items():
        [line] = [
            line for line in problems if f"host {name}" in line.split(":")[1] and words[0] in line
        ]
        assert words[1] in line
    assert not any(f"host 10.77.0.{number}" in " ".join(problems) for number in (1,))
    assert "Training" not in stdout.splitlines()[-1]


def test_check_of_one_host_of_several(hosts, servers):
    servers.make(2)
    secret = ("--secret-file", hosts.folder / "none")
    common = ("--check", "--nnodes", 2, "--device", "cpu", "-np", 2)
    code, stdout, _ = servers.launch(
        *common, *secret, "--node-rank", 0, "--master-addr", "10.77.0.1"
    )
    assert code == 0, stdout
    assert "network     net0 (10.77.0.1), the way of --master-addr 10.77.0.1; also lo" in stdout
    assert f"note: the job's secret {hosts.folder}/none isn't there" in stdout
    code, stdout, _ = servers.launch(*common, "--node-rank", 0, "--master-addr", "10.77.0.2")
    assert code == 1
    assert "problem: --master-addr 10.77.0.2 is 10.77.0.2, no address of this host" in stdout
    code, stdout, _ = servers.launch(*common, "--node-rank", 1, "--master-addr", "nowhere")
    assert code == 1 and "problem: --master-addr nowhere can't be resolved" in stdout
    assert not (ROOT / "none").exists()
