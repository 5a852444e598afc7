"""Two jobs that save under one name: the second is told, and a dead owner is in nobody's way."""

import contextlib
import json
import os
import subprocess
import threading
import time
import warnings

import pytest

from collective import CollectiveStrategy
from collective.checkpoint.saving import ownership, saver
from collective.coordination import coordinator, session_ends
from collective.coordination.session_state import state_of_session
from collective.errors import RankError


class Session:
    """As much of a session as a mark needs."""

    def close(self):
        state_of_session(self).close()


@pytest.fixture
def base(tmp_path):
    return str(tmp_path / "model.ckpt")


@pytest.fixture
def job():
    """Makes the marks of another job each time: owners in this process, which lives."""
    made = []

    def make():
        made.append(ownership.OwnerMarks())
        return made[-1]

    yield make
    for each in made:
        each.release_all()


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setattr(ownership, "_INTERVAL", 0.02)
    monkeypatch.setattr(ownership, "_PATIENCE", 0.1)
    monkeypatch.setattr(ownership, "_SETTLING", 0.01)


def mark(base, **changes):
    """Leaves the mark of another owner, by default a living process of this machine."""
    owner = {
        "id": "another",
        "job": "",
        "host": "elsewhere",
        "machine": ownership._machine(),
        "pid": os.getpid(),
        "started": ownership._process_state(os.getpid())[1],
        "since": "2026-01-01 00:00:00 UTC",
        "command": "train.py",
    }
    with open(base + ".owner", "w") as file:
        json.dump({**owner, **changes}, file)


def owner_id(base):
    return json.loads(open(base + ".owner").read())["id"]


def test_a_mark_stays_as_long_as_a_session_that_saves(base, job):
    marks, first, second = job(), Session(), Session()
    for session in (first, first, second):
        marks.hold(session, base)
    assert owner_id(base) == marks.id
    first.close()
    assert owner_id(base) == marks.id, "the second session saves here, too"
    second.close()
    assert not os.path.exists(base + ".owner")
    third = Session()
    marks.hold(third, base)
    third.close()
    third.close()
    assert not os.path.exists(base + ".owner")


def test_the_end_of_the_program_removes_all_marks(base, job):
    marks = job()
    for name in (base, base + "2"):
        marks.hold(Session(), name)
    marks.release_all()
    assert not os.path.exists(base + ".owner") and not os.path.exists(base + "2.owner")


def test_the_second_job_is_told_who_the_first_is(base, job, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "4711")
    first, session = job(), Session()
    first.hold(session, base)
    with pytest.raises(ownership.OwnedError, match="job 4711, process") as raised:
        job().hold(Session(), base)
    assert f"process {os.getpid()} on host " in str(raised.value)
    assert base in str(raised.value) and "folder of its own" in str(raised.value)
    assert owner_id(base) == first.id, "the first goes on"
    first.hold(session, base)
    session.close()
    job().hold(Session(), base)


def finished():
    process = subprocess.Popen(["true"])
    process.wait()
    return {"pid": process.pid, "started": "1"}


DEAD = {
    "finished": finished,
    "its number is another process's now": lambda: {"started": "1"},
    "waited for by nobody": lambda: {"pid": zombie.pid, "started": zombie.started},
}


@contextlib.contextmanager
def zombie_process():
    process = subprocess.Popen(["true"])
    zombie.pid, zombie.started = process.pid, ownership._process_state(process.pid)[1]
    deadline = time.monotonic() + 10
    while ownership._process_state(process.pid)[0] != "Z" and time.monotonic() < deadline:
        time.sleep(0.01)
    yield
    process.wait()


class zombie:
    pid = 0
    started = ""


@pytest.mark.parametrize("how", DEAD)
def test_a_dead_owner_of_this_machine_is_in_nobodys_way(base, job, how):
    """At once: nobody waits for the mark to grow old."""
    with zombie_process():
        mark(base, **DEAD[how]())
        marks = job()
        began = time.monotonic()
        marks.hold(Session(), base)
        assert time.monotonic() - began < 5 < ownership.EXPIRY
    assert owner_id(base) == marks.id


ELSEWHERE = {"machine": "another one", "pid": 1, "started": "1"}


@pytest.mark.parametrize("text", [None, "", "no JSON", '{"pid": 1}'])
def test_a_mark_of_elsewhere_that_nobody_renews_is_taken_over(base, job, monkeypatch, text):
    monkeypatch.setattr(ownership, "EXPIRY", 0.3)
    mark(base, **ELSEWHERE)
    if text is not None:
        open(base + ".owner", "w").write(text)
    marks = job()
    began = time.monotonic()
    marks.hold(Session(), base)
    assert time.monotonic() - began >= 0.3 and owner_id(base) == marks.id


def test_an_owner_of_elsewhere_that_renews_its_mark_lives(base, job, monkeypatch):
    """Whatever the clocks of the two hosts say."""
    mark(base, **ELSEWHERE)
    renewing = threading.Timer(0.2, mark, [base], {**ELSEWHERE, "renewals": 1})
    renewing.start()
    with pytest.raises(ownership.OwnedError, match="on host elsewhere"):
        job().hold(Session(), base)
    renewing.join()
    assert owner_id(base) == "another"


def test_an_owner_that_ends_while_one_waits_is_followed(base, job):
    mark(base, **ELSEWHERE)
    ending = threading.Timer(0.2, os.remove, [base + ".owner"])
    ending.start()
    marks = job()
    marks.hold(Session(), base)
    ending.join()
    assert owner_id(base) == marks.id


def test_a_mark_is_renewed(base, job, monkeypatch):
    monkeypatch.setattr(ownership, "RENEWAL", 0.02)
    marks, session = job(), Session()
    marks.hold(session, base)
    before, deadline = open(base + ".owner").read(), time.monotonic() + 10
    while open(base + ".owner").read() == before and time.monotonic() < deadline:
        time.sleep(0.02)
    after = open(base + ".owner").read()
    assert after != before and owner_id(base) == marks.id and len(after) == len(before)
    session.close()
    time.sleep(0.1)
    assert not os.path.exists(base + ".owner"), "nothing makes it again"


def test_an_owner_that_stood_still_too_long_notices_that_it_is_none_any_more(base, job):
    marks, session = job(), Session()
    marks.hold(session, base)
    mark(base)
    with pytest.raises(ownership.OwnedError):
        marks.hold(session, base)
    session.close()
    assert owner_id(base) == "another", "it isn't this one's to remove"


def test_a_job_of_another_name_in_the_folder_is_named(base, job):
    mark(base)
    with pytest.warns(RuntimeWarning, match="under another name.*on host elsewhere"):
        job().hold(Session(), base + "2")
    assert owner_id(base) == "another"
    others = job().others_in(os.path.dirname(base))
    assert "elsewhere" in [owner.host for owner in others]


def test_a_session_that_saves_under_ever_new_names_leaves_few_marks(base, job):
    marks, session = job(), Session()
    for i in range(3 * ownership.MOST_MARKS):
        marks.hold(session, f"{base}-{i}")
    left = [name for name in os.listdir(os.path.dirname(base)) if name.endswith(".owner")]
    assert len(left) == ownership.MOST_MARKS
    session.close()
    assert os.listdir(os.path.dirname(base)) == []


def test_a_folder_that_takes_no_mark_is_warned_of(base, job, monkeypatch):
    def refuse(*_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(ownership.os, "open", refuse)
    with pytest.warns(RuntimeWarning, match="can't be written .*Saving continues"):
        job().hold(Session(), base)
    assert os.listdir(os.path.dirname(base)) == []


def test_a_full_disk_leaves_no_half_mark(base, job, monkeypatch):
    class Full:
        def __enter__(self):
            return self

        def __exit__(self, *_):
            raise OSError(28, "No space left on device")

        def write(self, _):
            pass

    def open_full(handle, *_, **__):
        os.close(handle)
        return Full()

    monkeypatch.setattr(ownership.os, "fdopen", open_full)
    with pytest.warns(RuntimeWarning, match="No space left"):
        job().hold(Session(), base)
    assert os.listdir(os.path.dirname(base)) == []


def test_a_fork_owns_nothing(base):
    marks, session = ownership.marks(), Session()
    marks.hold(session, base)
    child = os.fork()
    if child == 0:
        try:
            session.close()
            marks.release_all()
            os._exit(0 if ownership.marks().id != marks.id else 3)
        finally:
            os._exit(4)
    assert os.waitpid(child, 0)[1] == 0
    assert owner_id(base) == marks.id
    session.close()


def test_in_a_file_system_of_another_kind(tmp_path, job, monkeypatch):
    """As on an object store, where files are written whole."""
    base = f"file://{tmp_path}/model.ckpt"
    marks, session = job(), Session()
    marks.hold(session, base)
    assert owner_id(str(tmp_path / "model.ckpt")) == marks.id
    with pytest.raises(ownership.OwnedError):
        job().hold(Session(), base)
    session.close()
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("elsewhere", [False, True])
def test_an_owner_that_lives_has_time_to_end(base, job, monkeypatch, elsewhere):
    """It writes its last checkpoint, say, before a job that was moved goes on with it."""
    monkeypatch.setattr(ownership, "_PATIENCE", 60.0)
    mark(base, **(ELSEWHERE if elsewhere else {}))

    def renew_and_end():
        for renewal in range(4):
            time.sleep(0.1)
            mark(base, **(ELSEWHERE if elsewhere else {}), renewals=renewal)
        os.remove(base + ".owner")

    ending = threading.Thread(target=renew_and_end)
    ending.start()
    marks = job()
    marks.hold(Session(), base)
    ending.join()
    assert owner_id(base) == marks.id


def test_an_owner_that_is_killed_while_one_waits_expires_after_its_last_renewal(
    base, job, monkeypatch
):
    monkeypatch.setattr(ownership, "_PATIENCE", 60.0)
    monkeypatch.setattr(ownership, "EXPIRY", 0.3)
    mark(base, **ELSEWHERE)
    renewed = []

    def renew():
        mark(base, **ELSEWHERE, renewals=1)
        renewed.append(time.monotonic())

    renewing = threading.Timer(0.2, renew)
    renewing.start()
    marks = job()
    marks.hold(Session(), base)
    renewing.join()
    assert owner_id(base) == marks.id and time.monotonic() - renewed[0] >= 0.3


def test_one_that_waits_says_so_once(base, job, monkeypatch):
    said = []
    monkeypatch.setattr(ownership.tf.logging, "warning", lambda text, *of: said.append(text % of))
    monkeypatch.setattr(ownership, "_SILENCE", 0.02)
    mark(base, job="4711")
    with pytest.raises(ownership.OwnedError):
        job().hold(Session(), base)
    (line,) = said
    assert f"job 4711, process {os.getpid()} on host elsewhere" in line
    assert "Waiting for it to end, until " in line


def test_the_renewals_decide_about_an_owner_that_is_hidden(base, job, monkeypatch):
    """Another user's process, of which nothing can be read: its number may be of a third."""
    monkeypatch.setattr(ownership, "EXPIRY", 0.3)
    mark(base)
    marks = job()
    assert json.loads(marks._text())["machine"]
    monkeypatch.setattr(ownership, "_process_state", lambda pid: None)
    marks.hold(Session(), base)
    assert owner_id(base) == marks.id


def test_a_mark_that_is_there_and_can_not_be_read_stops_nobody(base, job, monkeypatch):
    monkeypatch.setattr(ownership, "EXPIRY", 0.3)
    os.symlink("nowhere", base + ".owner")
    marks, session = job(), Session()
    waiting = threading.Thread(target=marks.hold, args=(session, base), daemon=True)
    with pytest.warns(RuntimeWarning, match="can't be read.*Saving continues"):
        waiting.start()
        waiting.join(5)
    assert not waiting.is_alive()
    began = time.monotonic()
    marks.hold(session, base)
    assert time.monotonic() - began < 0.3, "it waits once"


def test_a_warning_that_is_an_error_leaves_no_mark_behind(base, job):
    mark(base)
    session = Session()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(RuntimeWarning, match="under another name"):
            job().hold(session, base + "2")
    session.close()
    assert not os.path.exists(base + "2.owner")


def test_no_mark_stays_after_the_last_scope(base, job):
    """A session that is closed there, or never, is of no interest any more."""
    marks, first, second = job(), Session(), Session()
    for session in (first, second):
        marks.hold(session, base)
    marks.release_sessions()
    assert not os.path.exists(base + ".owner")
    marks.hold(first, base)
    assert owner_id(base) == marks.id, "it saves again, in another scope"
    second.close()
    assert owner_id(base) == marks.id
    first.close()
    assert not os.path.exists(base + ".owner")


def test_the_last_scope_releases_the_marks_of_this_process(base):
    session = Session()
    with CollectiveStrategy().scope(plan="quiet"):
        ownership.marks().hold(session, base)
        assert os.path.exists(base + ".owner")
    assert not os.path.exists(base + ".owner")


def test_the_graph_is_written_once_it_is_known_whose_the_folder_is(tmp_path, base):
    """A killed job's mark is there: who it was is found out by the save after it."""
    (tmp_path / "graph.pbtxt").write_text("old")
    mark(base, **ELSEWHERE)

    def write(_, folder, name, as_text):
        with open(os.path.join(folder, name), "w") as file:
            file.write("new")

    saver.write_graph(write, None, f"{tmp_path}/", "graph.pbtxt")
    assert (tmp_path / "graph.pbtxt").read_text() == "old", "the owner may live"
    saver.write_postponed_graph(os.path.dirname(base))
    assert (tmp_path / "graph.pbtxt").read_text() == "new"
    (tmp_path / "graph.pbtxt").write_text("changed")
    saver.write_postponed_graph(os.path.dirname(base))
    assert (tmp_path / "graph.pbtxt").read_text() == "changed"


def test_a_mark_goes_though_the_peers_are_told_in_vain(base, job, monkeypatch):
    class Broken:
        def leave(self, *_):
            raise RankError("a peer is gone")

    monkeypatch.setattr(coordinator, "started", lambda: True)
    monkeypatch.setattr(coordinator, "instance", Broken)
    closed = []
    for leave in (
        lambda session: session_ends.close(closed.append, session),
        lambda session: session_ends.leave(
            lambda session, *_: session.close() or closed.append(session), session, None, None, None
        ),
    ):
        session = Session()
        job().hold(session, base)
        with pytest.raises(RankError, match="a peer is gone"):
            leave(session)
        assert closed.pop() is session and not os.path.exists(base + ".owner")
