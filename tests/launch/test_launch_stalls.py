"""Progress and stalls: what ranks post, when the launcher calls it a stall, and whom it names.

The ranks here are no TensorFlow programs: they post what such ones would (see tests/test_stalls.py
for those).
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time

import pytest

from collective.coordination.progress import Progress
from collective.launch.board import VARIABLE, Board, Label, OwnBoard, Phase, Record
from collective.launch.stall import MORE_FOR_WORK, WARN_AFTER, Watch

pytestmark = pytest.mark.timeout(60)

AWAY, WORKING, RUNNING, AGREEING = Phase.AWAY, Phase.WORKING, Phase.RUNNING, Phase.AGREEING


# When it is a stall, and whose: a table, no clock and no process.


def record(phase, passed=7, since=0, doing="runs loss:0"):
    return Record(os.getpid(), phase, passed, since, doing, "collective.t.keys")


def first_told(records, timeout, until, gone=(), held=(), size=None):
    """(seconds, stall) of all that a watch tells of ranks that post nothing new, looking every
    second.
    """
    watch = Watch(size or len(records), timeout, 0.0)
    told = []
    for second in range(1, until + 1):
        stall = watch.look(float(second), records, dict(gone), second in held)
        if stall is not None:
            told.append((second, stall))
            if stall.over:
                break
    return told


@pytest.mark.parametrize(
    "records, missing, words",
    [
        ([record(RUNNING), record(AWAY)], (1,), "in no run"),
        ([record(AGREEING), record(AWAY), record(AWAY)], (1, 2), "ranks 1, 2 of 3 are missing"),
        ([None, record(RUNNING), record(RUNNING)], (0,), "has not come to a first run yet"),
        ([record(RUNNING), record(RUNNING)], (), "all ranks are in the same run"),
        (
            [record(RUNNING, 6), record(AGREEING, 7)],
            (0,),
            "Others have finished what rank 0 is still in",
        ),
        (
            [record(RUNNING, 6), record(AWAY, 7)],
            (1,),
            "Others have finished what rank 0 is still in",
        ),
        ([record(Phase.ANSWERING), record(AWAY)], (1,), "answering the others' evaluation"),
        ([record(Phase.EQUALISING)] + [None] * 7, tuple(range(1, 8)), "ranks 1-7"),
    ],
)
def test_who_is_missing(records, missing, words):
    ((second, stall),) = first_told(records, timeout=50, until=200)
    assert (second, stall.over, stall.missing) == (51, True, missing)  # first seen at 1
    assert words in stall.block(50) and "runs loss:0" in stall.block(50)


def test_ranks_outside_of_any_run_never_stall():
    assert not first_told([record(AWAY), None, record(WORKING)], timeout=10, until=5000)


def test_a_warning_comes_once_before_the_end():
    (warning, end) = first_told([record(RUNNING), record(AWAY)], timeout=600, until=1000)
    assert (warning[0], warning[1].over) == (1 + WARN_AFTER, False)
    assert (end[0], end[1].over) == (601, True)
    assert "the job ends after 600 s" in warning[1].block(600)


def test_progress_starts_the_time_anew():
    watch = Watch(2, 10, 0.0)
    for second in range(1, 100):
        told = watch.look(second, [record(RUNNING, since=second // 8), record(AWAY)], {}, False)
        assert told is None, second
    told = [
        watch.look(second, [record(RUNNING, since=99 // 8), record(AWAY)], {}, False)
        for second in range(100, 107)
    ]
    assert told[:-1] == [None] * 6 and told[-1].over  # 10 s after the change at 96


def test_each_kind_is_warned_of_once():
    watch, warned = Watch(2, 600, 0.0), []
    for second in range(1, 1000):
        absent = record(AWAY) if second < 500 else record(WORKING)
        told = watch.look(second, [record(RUNNING, since=second // 100), absent], {}, False)
        if told is not None:
            warned.append((second, told.records[1].phase))
    assert [phase for _, phase in warned] == [AWAY, WORKING]


def test_work_gives_more_time_but_not_for_ever():
    records = [record(RUNNING), record(WORKING, doing="writing checkpoint 'c'"), record(RUNNING)]
    told = first_told(records, timeout=100, until=5000)
    assert [(second, stall.over) for second, stall in told] == [
        (61, False),
        (MORE_FOR_WORK * 100, True),
    ]
    assert told[-1][1].missing == (1,) and "writing checkpoint 'c'" in told[-1][1].block(100)


def test_a_rank_that_has_finished_its_work_late_is_given_time_to_come():
    watch = Watch(2, 100, 0.0)
    for second in range(1, 400):
        watch.look(second, [record(RUNNING), record(WORKING)], {}, False)
    told = [
        watch.look(second, [record(RUNNING), record(AWAY)], {}, False) for second in range(400, 501)
    ]
    assert [bool(stall and stall.over) for stall in told] == [False] * 100 + [True]


def test_a_rank_that_comes_late_gives_all_of_them_time():
    watch, late = Watch(2, 10, 0.0), [record(RUNNING), record(AWAY)]
    for second in range(1, 10):
        assert watch.look(second, late, {}, False) is None
    told = [watch.look(second, [record(RUNNING)] * 2, {}, False) for second in range(10, 21)]
    assert told[:-1] == [None] * 10 and told[-1].over


def test_time_without_a_reader_of_the_output_does_not_count():
    records = [record(RUNNING), record(AWAY)]
    ((second, _),) = first_told(records, timeout=50, until=500, held=range(20, 220))
    assert second == 51 + 200


def test_time_in_which_the_launcher_was_stopped_does_not_count():
    watch = Watch(2, 50, 0.0)
    records = [record(RUNNING), record(AWAY)]
    assert watch.look(1, records, {}, False) is None
    assert watch.look(1000, records, {}, False) is None
    assert watch.look(1004, records, {}, False) is None
    for second in range(1005, 1049):
        assert watch.look(second, records, {}, False) is None
    assert watch.look(1051, records, {}, False).over


def test_a_rank_that_has_left_is_missing():
    ((_, stall),) = first_told(
        [record(RUNNING), record(RUNNING)], timeout=5, until=50, gone={1: "exit code 0"}
    )
    assert stall.missing == (1,) and "rank 1     has left with exit code 0" in stall.block(5)


def test_a_page_that_was_not_whole_is_what_it_was_before():
    watch = Watch(2, 5, 0.0)
    for second in range(1, 6):
        assert (
            watch.look(second, [record(RUNNING) if second % 2 else None, record(AWAY)], {}, False)
            is None
        )
    assert watch.look(6, [None, None], {}, False).missing == (1,)


def test_ranks_that_do_the_same_share_a_line():
    since = time.monotonic_ns()
    records = (
        [record(RUNNING, since=since)] * 3
        + [record(AWAY, since=since)]
        + [record(RUNNING, since=since)]
    )
    ((_, stall),) = first_told(records, timeout=5, until=9)
    lines = stall.block(5).splitlines()
    assert any(line.startswith("  ranks 0-2, 4 in a run since ") for line in lines)
    assert any(
        line.startswith("  rank 3     in no run since ") and f"pid {os.getpid()}" in line
        for line in lines
    )
    assert "             with collective.t.keys" in lines


@pytest.mark.parametrize("size, timeout", [(1, 600), (4, 0)])
def test_nobody_looks(size, timeout):
    assert Watch(size, timeout, 0.0).next_look() == float("inf")


# The board.


def test_what_is_posted_is_read():
    own = OwnBoard(3)
    progress = Progress({VARIABLE: own.place, "LOCAL_RANK": "2"})
    assert own.read(2) is None
    before = time.monotonic_ns()
    progress.does(Label("runs a:0,\nb:0", ["collective.t.keys", "collective.t.rows"])).enters(
        RUNNING
    )
    read = own.read(2)
    assert before <= read.since <= time.monotonic_ns()
    assert read == Record(
        os.getpid(), RUNNING, 0, read.since, "runs a:0, b:0", "collective.t.keys, collective.t.rows"
    )
    with progress.does("leaves its session"):
        progress.enters(AGREEING)
        progress.passed += 1
        assert (own.read(2).phase, own.read(2).doing, own.read(2).collectives) == (
            AGREEING,
            "leaves its session",
            "",
        )
    read = own.read(2)
    assert (read.phase, read.passed, read.doing) == (AWAY, 1, "leaves its session")
    with progress:  # a run that is refused before it enters anything
        pass
    assert own.read(2) == read
    progress.works("writes")
    assert (own.read(2).phase, own.read(2).doing) == (WORKING, "writes")
    assert own.read(0) is own.read(1) is None
    with pytest.raises(IndexError):
        own.read(3)


def test_long_names_are_cut():
    own = OwnBoard(1)
    names = [f"collective.table_{number}.keys" for number in range(1000)]
    label = Label("runs " + ", ".join(["ü" * 90] * 1000), names)
    own.post(0, (1, RUNNING, 1, 1), label, False)
    read = own.read(0)
    assert read.doing.startswith("runs ü") and read.doing.endswith("...") and len(read.doing) < 2000
    shown = read.collectives.count(",") + 1
    assert read.collectives.startswith("collective.table_0.keys, ")
    assert read.collectives.endswith(f" and {1000 - shown} more")
    own.post(0, (1, RUNNING, 1, 1), Label("x", ["n" * 5000, "m"]), False)
    assert own.read(0).collectives == "2 collectives"


def test_a_reader_never_sees_halves():
    """One process posts two records in turn, as fast as it can; every one that is read is one of
    the two.
    """
    own = OwnBoard(1)
    source = """
        import sys
        from collective.launch.board import Board, Label, Phase
        board = Board.open(sys.argv[1])
        records = [(i + 1, Phase.RUNNING, i, i, ) for i in range(2)]
        labels = [Label("a" * 1000), Label("b" * 1400)]
        while True:
            for i in range(2):
                board.post(0, records[i], labels[i], False)
    """
    with subprocess.Popen([sys.executable, "-c", textwrap.dedent(source), own.place]) as writer:
        try:
            end = time.monotonic() + 40
            seen = {0: 0, 1: 0}
            while min(seen.values()) < 2000:
                assert time.monotonic() < end and writer.poll() is None
                read = own.read(0)
                if read is not None:
                    assert (read.pid, read.since) == (read.passed + 1, read.passed)
                    assert read.doing == ["a" * 1000, "b" * 1400][read.passed]
                    seen[read.passed] += 1
        finally:
            writer.kill()


def test_without_memfd_a_file_without_a_name_does(monkeypatch):
    monkeypatch.delattr(os, "memfd_create", raising=False)
    own = OwnBoard(2)
    Progress({VARIABLE: own.place, "LOCAL_RANK": "1"}).does("x").enters(RUNNING)
    assert own.read(1).doing == "x"
    assert "(deleted)" in os.readlink(own.place)


def test_nothing_is_posted_without_a_launcher():
    for environment in ({}, {VARIABLE: ""}):
        progress = Progress(environment)
        with progress.does("runs"):
            progress.enters(RUNNING)
        progress.works("saves")


def test_what_is_no_board_is_left_alone(tmp_path):
    """A process may outlive its launcher, whose number and descriptor are something else's by then."""
    file = tmp_path / "precious"
    file.write_bytes(bytes(range(256)) * 64)
    for place in (str(file), "/proc/1/fd/1", str(tmp_path / "none"), "/dev/null"):
        with pytest.warns(RuntimeWarning, match="will not see this rank stall"):
            progress = Progress({VARIABLE: place, "LOCAL_RANK": "0"})
        progress.does("runs").enters(RUNNING)
    assert file.read_bytes() == bytes(range(256)) * 64


def test_children_of_a_rank_post_nothing():
    own = OwnBoard(1)
    environment = {VARIABLE: own.place, "LOCAL_RANK": "0"}
    progress = Progress(environment)
    progress.does("the rank").enters(AWAY)
    child = os.fork()
    if child == 0:
        progress.does("its fork").enters(RUNNING)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    source = "import os; from collective.coordination.progress import *; Progress(os.environ).does('x').enters(Phase.RUNNING)"
    subprocess.run(
        [sys.executable, "-c", source], env={**os.environ, **environment}, check=True, timeout=30
    )
    assert (own.read(0).doing, own.read(0).phase) == ("the rank", AWAY)


def test_who_takes_over_from_a_dead_process_posts():
    """A rank that is a script, which starts Python a second time."""
    own = OwnBoard(1)
    dead = subprocess.Popen([sys.executable, "-c", "pass"])
    dead.wait(30)
    own.post(0, (dead.pid, RUNNING, 5, 1), Label("the first"), False)
    Progress({VARIABLE: own.place, "LOCAL_RANK": "0"}).does("the second").enters(AGREEING)
    assert own.read(0).doing == "the second"


def test_the_board_is_open_to_its_ranks_only_by_its_place():
    own = OwnBoard(1)
    assert not os.get_inheritable(int(own.place.rpartition("/")[2]))
    assert isinstance(Board.open(own.place), Board)


# Jobs.

POSTING = """
    import os, signal, subprocess, sys, time
    from collective.coordination.progress import Label, Phase, Progress
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
    """The path of a script whose ranks post."""
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
    block = text[text.index("collective.launch: the job stalled: rank 1 of 3 is missing") :]
    assert (
        "in a run since" in block and "runs loss:0" in block and "with collective.t.keys" in block
    )
    assert "rank 1     in no run since" in block and "last: runs init" in block
    assert "--stall-timeout 1)" in block
    assert "root cause" not in text


def test_ranks_that_ignore_the_end_of_a_stalled_job_are_killed(launch):
    body = (
        "for number in (1, 2, 3, 15): signal.signal(number, signal.SIG_IGN)\nrun()\ntime.sleep(50)"
    )
    code, _, stderr = launch(
        "-np", 2, "--stall-timeout", "1", "--grace", "0.5", posting(launch, body)
    )
    assert code == 124
    assert (
        b"ranks 0 and 1 still there: KILL" in stderr and b"all ranks are in the same run" in stderr
    )


@pytest.mark.parametrize(
    "options, ranks, body",
    [
        (["--stall-timeout", "0"], 2, "assert not os.environ['COLLECTIVE_PROGRESS']; run()"),
        (["--stall-timeout", "0.2"], 1, "assert not os.environ['COLLECTIVE_PROGRESS']; run()"),
        (
            ["--stall-timeout", "0.2"],
            2,
            "assert os.environ['COLLECTIVE_PROGRESS']; progress.enters(Phase.AWAY)",
        ),
        # 6 s would be too long
        (
            ["--stall-timeout", "1"],
            2,
            "(wait_for('up'), run()) if rank else (progress.works('saves'), tell('up'))",
        ),
    ],
)
def test_a_job_that_does_not_stall(launch, options, ranks, body):
    code, _, stderr = launch("-np", ranks, *options, posting(launch, f"{body}; time.sleep(2.5)"))
    assert (code, stderr) == (0, b"")


def test_progress_is_no_stall(launch):
    """Each rank waits for the other in turn, each time for less than the timeout."""
    body = "for _ in range(30):\n    run()\n    time.sleep(0.1)\n    progress.enters(Phase.AWAY)"
    code, _, stderr = launch("-np", 2, "--stall-timeout", "2", posting(launch, body))
    assert (code, stderr) == (0, b"")


def test_a_rank_that_fails_is_the_cause_even_if_others_wait(launch):
    body = "run() if rank else (wait_for('up'), sys.exit(5))\ntell('up')\ntime.sleep(50)"
    code, _, stderr = launch("-np", 2, "--stall-timeout", "20", posting(launch, body))
    assert code == 5 and b"root cause: rank 0" in stderr and b"stalled" not in stderr


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
    time.sleep(6)
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
        child = "from collective.coordination.progress import *; Progress(os.environ).does('x').enters(Phase.RUNNING)"
        subprocess.run([sys.executable, "-c", child], check=True)
    time.sleep(3)
    """
    code, _, stderr = launch("-np", 2, "--stall-timeout", "1", posting(launch, body))
    assert (code, stderr) == (0, b"")
