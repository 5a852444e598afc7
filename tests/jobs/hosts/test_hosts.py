"""A job of several hosts: one job, however it ends, with one report and one exit code everywhere."""

from __future__ import annotations

import signal
import subprocess
import time

import psutil
import pytest

from tests.jobs.hosts.conftest import SECRET

pytestmark = pytest.mark.timeout(120)

TELL = """
    import os
    e = os.environ
    names = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "HOROVOD_CROSS_RANK",
             "HOROVOD_CROSS_SIZE", "HOROVOD_HOSTNAME", "HOROVOD_GLOO_IFACE"]
    print(*[e[name] for name in names], "COLLECTIVE_SECRET" in e, flush=True)
"""


def test_ranks_count_host_by_host_and_the_first_host_shows_them(hosts):
    hosts.make(2)
    script = hosts.script(TELL)
    logs = ("--log-dir", hosts.folder / "logs")
    launchers = [hosts.start_on("h1", "-np", 1, *logs, script)]
    launchers.append(hosts.start_on("h2", "-np", 2, *logs, script))
    (code, stdout, stderr), (other_code, other_stdout, other_stderr) = hosts.ends(launchers)
    assert (code, other_code) == (0, 0), stderr + other_stderr
    assert sorted(stdout.splitlines()) == [
        "[h1:0] 0 3 0 1 0 2 h1 net0 False",
        "[h2:1] 1 3 0 2 1 2 h2 net0 False",
        "[h2:2] 2 3 1 2 0 1 h2 net0 False",
    ]
    assert other_stdout == other_stderr == ""
    logged = (hosts.folder / "logs" / "rank.2" / "stdout").read_text()
    assert logged == "2 3 1 2 0 1 h2 net0 False\n"


FAIL = """
    if rank == 3:
        raise ValueError("broken on purpose")
"""


def test_a_failure_ends_all_with_one_report(hosts):
    hosts.make(2)
    start = time.monotonic()
    ends = hosts.ends(hosts.start_all(2, hosts.sleeper(FAIL)))
    assert time.monotonic() < start + 30  # a rank sleeps for 60
    assert [code for code, _, _ in ends] == [1, 1]
    reports = [stderr[stderr.index("collective launch: the job") :] for _, _, stderr in ends]
    assert reports[0] == reports[1]
    assert "root cause: rank 3 of 4\n" in reports[0] and "host       h2\n" in reports[0]
    assert "ValueError: broken on purpose" in reports[0]
    assert "ranks 0-2 by SIGTERM after the launcher's TERM" in reports[0]


AWAY = """
    import os, time
    from collective.job.progress import Label, Phase, Progress
    rank, progress = int(os.environ["RANK"]), Progress(os.environ)
    if rank == {away}:
        progress.does("runs init").enters(Phase.AWAY)
        open("posted", "w").close()
    while not os.path.exists("posted"):
        time.sleep(0.01)
    if rank != {away}:
        progress.does(Label("runs loss:0", ["collective.t.keys"])).enters(Phase.RUNNING)
    time.sleep(60)
"""


@pytest.mark.parametrize("away", [0, 2])
def test_a_stall_of_any_host_is_seen(hosts, away):
    hosts.make(2)
    script = hosts.script(AWAY.format(away=away))
    launchers = [
        hosts.start_on(name, "-np", ranks, "--stall-timeout", 3, script)
        for name, ranks in (("h1", 1), ("h2", 2))
    ]
    ends = hosts.ends(launchers)
    assert [code for code, _, _ in ends] == [124, 124]
    report = ends[0][2]
    assert f"the job stalled: rank {away} of 3 is missing" in report
    assert f"rank {away}     in no run since" in report and "last: runs init" in report
    assert "in a run since" in report and "runs loss:0" in report


def start_sleeping(hosts, *options, count=2, ranks=1):
    hosts.make(count)
    launchers = hosts.start_all(ranks, *options, hosts.sleeper())
    hosts.files(*(f"rank{rank}" for rank in range(count * ranks)))
    return launchers


@pytest.mark.sample(1)
@pytest.mark.parametrize("killed", [1, 0])
def test_a_host_whose_launcher_is_killed_is_named(hosts, killed):
    launchers = start_sleeping(hosts)
    launchers[killed].kill()
    code, _, stderr = hosts.ends(launchers)[1 - killed]
    assert code == 137
    name = "the first host, h1," if killed == 0 else "host h2 (rank 1 of 2)"
    assert f"the job failed; root cause: {name} was lost\n" in stderr
    assert "lost by    it closed the connection" in stderr or "reset by peer" in stderr


@pytest.mark.matrix
def test_a_host_whose_link_is_cut_is_named_after_the_bound(hosts):
    launchers = start_sleeping(hosts, "--host-timeout", 3)
    start = time.monotonic()
    hosts.network.cut("h2")
    ends = hosts.ends(launchers)
    assert 2 < time.monotonic() - start < 20
    assert [code for code, _, _ in ends] == [137, 137]
    assert "root cause: host h2 (rank 1 of 2) was lost" in ends[0][2]
    assert "lost by    nothing was heard of it for 3 s" in ends[0][2]
    assert "root cause: the first host, h1, was lost" in ends[1][2]


@pytest.mark.matrix
def test_a_host_that_cannot_start_its_ranks_ends_the_job_and_says_why(hosts):
    hosts.make(3)
    launchers = [hosts.start_on(name, "-np", 1, hosts.sleeper()) for name in ("h1", "h3")]
    logs = ("--log-dir", "/proc/none", "--max-restarts", 3)
    launchers.append(hosts.start_on("h2", "-np", 1, *logs, hosts.sleeper()))
    ends = hosts.ends(launchers)
    assert [code for code, _, _ in ends] == [2, 2, 2], ends
    for _, _, stderr in ends:
        assert "--log-dir /proc/none can't be written" in stderr and "was lost" not in stderr
    assert "collective launch: host h2: --log-dir" in ends[0][2]


@pytest.mark.parametrize("told", [1, 0])
@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.matrix
def test_a_launcher_that_is_told_to_stop_stops_all(hosts, told, signum):
    launchers = start_sleeping(hosts)
    launchers[told].send_signal(signum)
    ends = hosts.ends(launchers)
    assert [code for code, _, _ in ends] == [128 + signum] * 2
    assert f"{signum.name}: stopping" in ends[0][2]


SAVE = """
    def save(signum, frame):
        time.sleep(1)
        tell(f"saved{rank}", signum)
        sys.exit(0)
    signal.signal(signal.SIGINT, save)
"""


@pytest.mark.matrix
def test_one_interrupt_of_all_launchers_lets_the_ranks_save(hosts):
    """As srun and mpirun pass a Ctrl-C on."""
    hosts.make(2)
    launchers = hosts.start_all(1, hosts.sleeper(SAVE))
    hosts.files("rank0", "rank1")
    for launcher in launchers:
        launcher.send_signal(signal.SIGINT)
    ends = hosts.ends(launchers)
    assert [code for code, _, _ in ends] == [130, 130], ends
    assert hosts.files("saved0", "saved1") == [signal.SIGINT] * 2


@pytest.mark.matrix
def test_a_restart_starts_the_ranks_of_all_hosts(hosts):
    hosts.make(2)
    extra = """
    attempt = os.environ["COLLECTIVE_RESTART_COUNT"]
    print("attempt", attempt, flush=True)
    if attempt == "0" and rank == 2:
        os._exit(7)
    if attempt == "1":
        os._exit(0)
"""
    options = ("--max-restarts", 2, "--restart-pause", 0.1)
    ends = hosts.ends(hosts.start_all(2, *options, hosts.sleeper(extra)))
    assert [code for code, _, _ in ends] == [0, 0], ends
    for rank, host in enumerate(["h1", "h1", "h2", "h2"]):
        assert f"[{host}:{rank}] attempt 1\n" in ends[0][1]
    for _, _, stderr in ends:
        assert "root cause: rank 2 of 4" in stderr and "restart    1 of 2 in 0.1 s" in stderr


def test_a_script_that_one_host_lacks_ends_all_at_once(hosts):
    """Nobody waits for --start-timeout: the host and its path are named on each."""
    hosts.make(3)
    script = hosts.script(TELL)
    joined = [hosts.start_on(name, "-np", 1, script) for name in ("h1", "h2")]
    hosts.wait_until(
        lambda: has_port(hosts, "h1", ESTABLISHED), "the second launcher has come to the first"
    )
    start = time.monotonic()
    ends = hosts.ends([hosts.start_on("h3", "-np", 1, "none.py"), *joined])
    assert time.monotonic() < start + 30
    assert [code for code, _, _ in ends] == [2, 2, 2], ends
    reason = f"there is no script none.py (seen from {hosts.folder})"
    named = f" (node 2) can't take part: {reason}\n"
    assert ends[0][2] == f"collective launch: {reason}\n"
    assert ends[1][2].startswith("collective launch: host ") and ends[1][2].endswith(named)
    assert ends[2][2].endswith(named) and "the first host gave up: host " in ends[2][2]


def test_a_script_that_the_first_host_lacks_ends_all_at_once(hosts):
    """It gathers nobody, but listens for some seconds, to tell those that come."""
    hosts.make(3)
    script = hosts.script(TELL)
    others = [hosts.start_on(name, "-np", 1, script) for name in ("h2", "h3")]
    first = hosts.start_on("h1", "-np", 1, "none.py")
    reason = f"there is no script none.py (seen from {hosts.folder})"
    assert first.stderr.readline().decode() == f"collective launch: {reason}\n"
    ends = hosts.ends([first, *others])
    assert [code for code, _, _ in ends] == [2, 2, 2], ends
    for _, _, stderr in ends[1:]:
        assert stderr.endswith(f"collective launch: the first host gave up: {reason}\n")


@pytest.mark.matrix
def test_no_restart_is_announced_without_a_host(hosts):
    """Its ranks had left well when its launcher was killed; then another rank fails."""
    hosts.make(2)
    extra = """
    rank == 1 and (tell("left", 1), os._exit(0))
    wait_for("lost")
    sys.exit(5)
    """
    options = ("--max-restarts", 2, "--restart-pause", 0.1)
    launchers = hosts.start_all(1, *options, hosts.sleeper(extra))
    hosts.files_exist("left")
    # The launcher tells of its rank's end before its supervisor ends, too.
    h2 = psutil.Process(launchers[1].pid)
    hosts.wait_until(lambda: not h2.children(), "the rank of h2 and its supervisor are gone")
    launchers[1].kill()
    line = launchers[0].stderr.readline()
    assert b"host h2 was lost" in line
    (hosts.folder / "lost").write_text("1\n")
    code, _, stderr = hosts.ends(launchers)[0]
    assert code == 5 and "no restart: host h2 is gone: start the job again" in stderr
    assert "restart    1 of 2" not in stderr


def ranks_of(launcher):
    """Returns the processes below a launcher's supervisor."""
    try:
        return [
            child
            for process in psutil.Process(launcher).children()
            for child in process.children(recursive=True)
        ]
    except psutil.NoSuchProcess:
        return []


@pytest.mark.matrix
def test_another_secret_is_refused(hosts):
    hosts.make(2)
    script = hosts.script(TELL)
    first = hosts.start_on("h1", "-np", 1, "--start-timeout", 4, script)
    wrong = {"COLLECTIVE_SECRET": "another secret, as long as it needs"}
    second = hosts.start_on("h2", "-np", 1, script, environment=wrong)
    (code, _, stderr), (other_code, _, other_stderr) = hosts.ends([first, second])
    assert (code, other_code) == (2, 2)
    assert "refused a connection from 10.77.0.2: it has another secret" in stderr
    assert "10.77.0.1 port 29500 isn't this job's first host: it has another secret" in other_stderr
    assert "node 1 of 2 did not come" in stderr
    for text in (stderr, other_stderr):
        assert SECRET not in text and wrong["COLLECTIVE_SECRET"] not in text


@pytest.mark.parametrize(
    ("nodes", "node", "words"),
    [(3, 1, "it says --nnodes 3, the first host --nnodes 2"), (2, 0, "")],
)
@pytest.mark.matrix
def test_a_host_that_is_not_awaited_is_refused(hosts, nodes, node, words):
    hosts.make(2)
    script = hosts.script(TELL)
    first = hosts.start_on("h1", "-np", 1, script)
    numbers = ("--nnodes", nodes, "--node-rank", node)
    [(code, _, stderr)] = hosts.ends([hosts.start_on("h2", *numbers, "-np", 1, script)])
    assert code == 2
    assert (words or "--master-addr 10.77.0.1 is 10.77.0.1, no address of this host") in stderr
    second = hosts.start_on("h2", "-np", 1, script)
    assert [code for code, _, _ in hosts.ends([first, second])] == [0, 0]


@pytest.mark.matrix
def test_a_port_that_is_taken_is_an_error(hosts):
    hosts.make(2)
    script = hosts.script(TELL)
    first = hosts.start_on("h1", "-np", 1, script)
    hosts.wait_until(lambda: has_port(hosts, "h1", LISTENING), "the first launcher listens")
    [(code, _, stderr)] = hosts.ends([hosts.start_on("h1", "-np", 1, script)])
    assert code == 2 and "--master-port 29500 at 10.77.0.1 can't be listened at" in stderr
    second = hosts.start_on("h2", "-np", 1, script)
    assert [code for code, _, _ in hosts.ends([first, second])] == [0, 0]


LISTENING, ESTABLISHED = "0A", "01"


def has_port(hosts, name, state):
    """Tells whether the port of the first launcher is in a state on a host."""
    command = [*hosts.network.on_host(name), "cat", "/proc/net/tcp"]
    table = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    sockets = [line.split() for line in table.splitlines()[1:]]
    return any(each[1].endswith(f":{29500:04X}") and each[3] == state for each in sockets)


HOROVOD = """
    import os
    import tensorflow as tf
    import horovod.tensorflow as hvd
    import psutil

    hvd.init()
    place = (hvd.rank(), hvd.local_rank(), hvd.local_size(), hvd.cross_rank(), hvd.cross_size())
    connections = {
        connection.laddr.ip
        for connection in psutil.Process().net_connections("tcp")
        if connection.status == psutil.CONN_ESTABLISHED
    }
    for again in range(2):
        total = hvd.allreduce(tf.constant([hvd.rank() + 1.0]), op=hvd.Sum, name="total")
        if not again:
            hvd.shutdown()
            hvd.init()
    print(*place, float(total[0]), *sorted(connections), flush=True)
"""


@pytest.mark.matrix
def test_horovods_ranks_meet_across_hosts_by_the_interface(hosts):
    hosts.make(2)
    launchers = hosts.start_all(2, hosts.script(HOROVOD))
    (code, stdout, stderr), (other_code, _, _) = hosts.ends(launchers, 100)
    assert (code, other_code) == (0, 0), stderr
    assert sorted(stdout.splitlines()) == [
        "[h1:0] 0 0 2 0 2 10.0 10.77.0.1",
        "[h1:1] 1 1 2 0 2 10.0 10.77.0.1",
        "[h2:2] 2 0 2 1 2 10.0 10.77.0.2",
        "[h2:3] 3 1 2 1 2 10.0 10.77.0.2",
    ]


@pytest.mark.matrix
def test_hosts_may_have_addresses_of_ipv6_only(hosts):
    hosts.make(2, version=6)
    launchers = hosts.start_all(1, "--master-addr", "[fd77::1]", hosts.script(HOROVOD))
    (code, stdout, stderr), (other_code, _, _) = hosts.ends(launchers, 100)
    assert (code, other_code) == (0, 0), stderr
    assert sorted(stdout.splitlines()) == [
        "[h1:0] 0 0 1 0 2 3.0 fd77::1",
        "[h2:1] 1 0 1 1 2 3.0 fd77::2",
    ]


WRITER = """
    import os
    for count in range(200):
        os.write(1, b"x" * (1 << 20) + b"\\n")
        with open("count.part", "w") as file:
            file.write(f"{count}\\n")
        os.rename("count.part", "count")
"""


@pytest.mark.long
def test_a_slow_reader_on_the_first_host_slows_the_ranks_of_all(hosts):
    hosts.make(2)
    script = hosts.script(WRITER)
    first = hosts.start_on("h1", "-np", 1, "--verbose", hosts.script("", "quiet.py"))
    second = hosts.start_on("h2", "-np", 1, script)
    [count] = hosts.files("count")
    time.sleep(3)  # nobody reads the first one's stdout
    [before] = hosts.files("count")
    time.sleep(1)
    [after] = hosts.files("count")
    assert before == after < 60  # megabytes
    assert [code for code, _, _ in hosts.ends([first, second])] == [0, 0]
    assert hosts.files("count") == [199]
