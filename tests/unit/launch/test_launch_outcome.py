"""Tests the outcome of a job: who is blamed, and what the report says."""

from __future__ import annotations

import signal

import pytest

from collective.launch.output.outcome import JobOutcome, RankExit

HOROVOD = (
    "UnknownError: Horovod has been shut down. This was caused by an exception on one of the ranks",
)


def outcome_of(size, *ends):
    """The outcome of ends (rank, code, "requested" or "victim"), one a second."""
    outcome = JobOutcome(size)
    for second, (rank, code, *marks) in enumerate(ends):
        last_lines = HOROVOD if "victim" in marks else ()
        outcome.add(
            RankExit(rank, 100 + rank, code, float(second), "requested" in marks, last_lines)
        )
    return outcome


@pytest.mark.parametrize(
    "ends, rank, certain",
    [
        ([], None, False),
        ([(0, 0)], None, False),
        ([(1, 3)], 1, True),
        ([(1, 3), (0, 4)], 1, True),
        ([(0, 0), (1, 3)], 1, True),
        ([(0, -15, "requested")], None, False),
        # A peer's error can overtake the rank that caused it.
        ([(0, 1, "victim")], 0, False),
        ([(0, 1, "victim"), (1, 7)], 1, True),
        ([(0, 1, "victim"), (2, 1, "victim"), (1, -9)], 1, True),
        ([(0, 1, "victim"), (1, 1, "victim"), (2, 1, "victim")], 0, True),
        ([(0, 1, "victim"), (1, -15, "requested")], 0, False),
        # Or the rank that left it alone.
        ([(0, 1, "victim"), (1, 0)], 0, True),
    ],
)
def test_who_is_blamed(ends, rank, certain):
    outcome = outcome_of(3, *ends)
    cause = outcome.root_cause()
    assert (cause.rank if cause else None, outcome.cause_is_certain()) == (rank, certain)


@pytest.mark.parametrize(
    "words, is_victim",
    [
        ("Horovod has been shut down. This was caused by ...", True),
        ("horovod.common.exceptions.HorovodInternalError: ...", True),
        ("[gloo/transport/tcp/pair.cc:598] Connection closed by peer", True),
        ("lost rank 1, which has ended, while 'collective.x' waited for it in ...", True),
        (
            "lost rank 1, which has given up a run that failed or timed out there, while 'x' ...",
            True,
        ),
        ("rank 1 has aborted NCCL's communicator, while 'collective.x' waited for it; ...", True),
        (
            "ncclGroupEnd says 'remote process exited or there was a network error' (rank 0 is ...",
            True,
        ),
        ("'x' failed in NCCL: ncclSend with rank 1 says 'unhandled system error'; ...", False),
        ("collective.errors.RankError: A rank failed", True),
        ("collective.errors.RankError: calling model_fn (train) failed on rank 1: KeyError", True),
        ("collective.errors.RankError: the ranks disagree", False),
        ("ERROR: RankError('calling model_fn (train) failed on rank 1: KeyError')", True),
        (
            "ERROR:tensorflow:stopped: A rank failed. Rank 0: runs 'train'. Rank 1: left its "
            "session with ValueError: boom.",
            True,
        ),
        (
            "tensorflow.python.framework.errors_impl.OutOfRangeError: rank 1, 2 has left the "
            "session: the step ends on all ranks",
            True,
        ),
        ("saving failed on rank 1: OSError", False),
        ("ValueError: wrong", False),
    ],
)
def test_victims_are_known_by_their_last_words(words, is_victim):
    assert RankExit(0, 1, 1, 0.0, last_lines=("first", words, "last")).is_victim == is_victim
    assert not RankExit(0, 1, 0, 0.0, last_lines=(words,)).is_victim


@pytest.mark.parametrize(
    "words, rank",
    [
        ("RankError: A rank failed. Rank 0: runs 'a'. Rank 2: left its session with ...", 2),
        ("collective.errors.RankError: calling model_fn (train) failed on rank 1: KeyError", 1),
        ("lost rank 12, which has ended, while 'collective.x' waited for it in ...", 12),
        ("Horovod has been shut down. This was caused by ...", None),
    ],
)
def test_victims_name_the_rank_that_they_lost(words, rank):
    assert RankExit(0, 1, 1, 0.0, last_lines=(words,)).lost_ranks == {rank} - {None}


@pytest.mark.parametrize(
    "ended, text",
    [
        ([], "ranks 0, 1 and 2"),
        ([1], "ranks 0 and 2"),
        ([1, 0], "rank 2"),
        ([1, 0, 2], "what the ranks left behind"),
    ],
)
def test_the_ranks_that_still_run(ended, text):
    outcome = outcome_of(3, *[(rank, 0) for rank in ended])
    assert (outcome.running_text(), outcome.any_running) == (text, len(ended) < 3)


def test_the_report_names_who_left_early():
    report = outcome_of(2, (1, 0), (0, -11)).failure_report()
    assert "root cause: rank 0 of 2" in report
    assert "signal SIGSEGV (11)" in report
    assert "left early rank 1 (pid 101) with exit code 0 at " in report


def test_the_report_names_who_ended_then():
    report = outcome_of(4, (1, 3), (3, -15, "requested"), (0, 4), (2, -9)).failure_report()
    assert (
        "then ended rank 0 by exit code 4, rank 2 by SIGKILL, "
        "rank 3 by SIGTERM after the launcher's TERM\n"
    ) in report


def test_the_report_shows_twenty_lines_and_shortens_long_ones():
    outcome = JobOutcome(1)
    lines = (*(f"line {number}" for number in range(30)), "x" * 501)
    outcome.add(RankExit(0, 7, 3, 0.0, last_lines=lines, last_lines_from="stdout"))
    shown = outcome.failure_report().partition("  last lines of its stdout:\n")[2].splitlines()
    assert shown[:-1] == [f"    line {number}" for number in range(11, 30)]
    assert shown[-1] == f"    {'x' * 500}... (501 characters)"


def test_there_is_no_report_without_a_root_cause():
    assert outcome_of(2, (0, 0), (1, -15, "requested")).failure_report() == ""


def test_exit_codes_as_a_shell_has_them():
    assert RankExit(0, 1, 3, 0.0).shell_code == 3
    assert RankExit(0, 1, -signal.SIGKILL, 0.0).shell_code == 137


def failed(rank, *words, requested=False):
    return RankExit(rank, 100 + rank, 1, float(rank), requested, tuple(words))


ERROR = (
    "Traceback (most recent call last):",
    '  File "train.py", line 9, in <module>',
    "    train()",
    "ValueError: wrong",
)


def test_the_report_on_many_ranks_is_short():
    """Sixty-four ranks raise alike, or are ended by the launcher, or had left."""
    outcome = JobOutcome(64)
    outcome.add(failed(7, *ERROR))
    for rank in range(64):
        if rank < 32 and rank != 7:
            outcome.add(failed(rank, *ERROR, requested=rank > 9))
        elif rank >= 50:
            outcome.add(RankExit(rank, 1, 0, 5.0))
        elif rank != 7:
            outcome.add(RankExit(rank, 1, -15, 5.0, requested=True))
    report = outcome.failure_report()
    assert max(map(len, report.splitlines())) < 200
    assert "  left early ranks 50-63 with exit code 0 while others still worked" in report
    assert (
        "  then ended ranks 0-6, 8, 9 by exit code 1, "
        "ranks 10-31 by exit code 1 after the launcher's TERM, "
        "ranks 32-49 by SIGTERM after the launcher's TERM\n"
    ) in report
    assert report.endswith(
        "\n  raised at  train.py, line 9, in <module>: train()\n  raised by  ranks 0-31 alike\n"
        "  error on its stderr:\n    ValueError: wrong"
    )


def test_many_ranks_that_still_run_are_named_by_ranges():
    assert outcome_of(64, (5, 1)).running_text() == "ranks 0-4, 6-63"


def test_a_victims_words_may_stand_before_a_long_stack():
    """TensorFlow appends the operation's stack to the message."""
    lines = ["Traceback (most recent call last):", '  File "t.py", line 9, in f', *HOROVOD]
    lines.append("Original stack trace for 'reduce':")
    lines += ['  File "/lib/python3.11/site-packages/x.py", line 1, in f', "    f()"] * 300
    assert failed(0, *lines).is_victim


SURVIVED = ("Traceback (most recent call last):", '  File "t.py", line 9, in f', *HOROVOD)
STEPS = tuple(f"step {number}" for number in range(250))


@pytest.mark.parametrize("code", [1, 3])
def test_a_lost_peer_of_long_ago_makes_no_victim(code):
    """The rank restored a checkpoint, went on and failed by itself."""
    outcome = JobOutcome(2)
    outcome.add(RankExit(1, 101, code, 0.0, last_lines=(*SURVIVED, *STEPS, "the disk is full")))
    assert not outcome.exits[0].is_victim and outcome.exits[0].error is None
    report = outcome.failure_report()
    assert "raised at" not in report and report.endswith("\n    the disk is full")


def test_an_error_raised_from_a_lost_peer_makes_a_victim():
    chained = "During handling of the above exception, another exception occurred:"
    long_stack = ['  File "/lib/python3.11/site-packages/x.py", line 1, in f', "    f()"] * 300
    assert failed(0, *SURVIVED, "", chained, "", *ERROR[:-1], *long_stack, ERROR[-1]).is_victim


def test_a_victim_may_report_its_error_itself():
    """It ends with a code of its own, after a stack that is longer than what is looked at."""
    frames = ['  File "/lib/python3.11/site-packages/x.py", line 1, in f', "    f()"] * 300
    words = (*SURVIVED[:-1], "UnknownError: Graph execution error:", "", *HOROVOD, *frames)
    assert RankExit(0, 1, 3, 0.0, last_lines=words).is_victim


HOROVODS_LOG = (
    "[2026-11-26 03:45:31.355576: E operations.cc:697] [1]: Horovod background loop uncaught "
    "exception: [gloo/transport/tcp/pair.cc:598] Connection closed by peer [127.0.0.1]:58525"
)
LOST_RANK_1 = (
    "RuntimeError: lost rank 1, which has ended, while 'x' waited for it in shared memory",
)
RAISED = ("Traceback (most recent call last):", '  File "a.py", line 3', "ValueError: bad record")


@pytest.mark.parametrize(
    "code, words, blamed",
    [
        (-15, RAISED, 1),
        (-9, RAISED, 1),
        (1, RAISED, 1),
        (143, RAISED, 0),  # it has stopped as it was told
        (0, RAISED, 0),
        (-15, ("an epoch more",), 0),
        (-15, (*RAISED[:2], *LOST_RANK_1), 0),  # a victim, too
    ],
)
def test_a_rank_that_was_long_in_ending_is_blamed_for_its_error(code, words, blamed):
    """A victim that was gone sooner names it; the launcher's TERM ends it on its way out."""
    outcome = JobOutcome(2)
    outcome.add(RankExit(0, 100, 1, 0.0, last_lines=LOST_RANK_1))
    outcome.add(RankExit(1, 101, code, 1.0, requested=True, last_lines=words))
    assert outcome.root_cause().rank == blamed and outcome.root_cause().shell_code == 1
    report = outcome.failure_report()
    assert ("ValueError: bad record" in report) is bool(blamed)
    assert ("an error; the launcher's TERM came before it was gone" in report) is (
        blamed == 1 and code < 0
    )


def test_horovods_thread_makes_no_victim_of_a_rank_after_its_own_error():
    """It loses the peers that die of the error, before the rank itself is gone."""
    outcome = JobOutcome(2)
    outcome.add(RankExit(0, 100, 1, 0.0, last_lines=LOST_RANK_1))
    outcome.add(RankExit(1, 101, 1, 0.1, last_lines=(*RAISED, HOROVODS_LOG)))
    assert outcome.root_cause().rank == 1


def test_a_rank_that_no_victim_names_may_have_handled_its_error():
    outcome = JobOutcome(2)
    outcome.add(RankExit(0, 100, 1, 0.0, last_lines=HOROVOD))
    outcome.add(RankExit(1, 101, -15, 1.0, requested=True, last_lines=RAISED))
    assert outcome.root_cause().rank == 0


CHAINED = ("", "During handling of the above exception, another exception occurred:", "")
LOST_LATER = (*RAISED, *CHAINED, *RAISED[:2], *LOST_RANK_1)
IN_THREAD = ("Exception in thread Thread-1 (fetch):", *RAISED[:2], *LOST_RANK_1)


@pytest.mark.parametrize(
    "words",
    [
        (HOROVODS_LOG, *RAISED),
        (*RAISED[:2], HOROVODS_LOG, RAISED[2]),
        (HOROVODS_LOG, "bad record"),  # of an excepthook of the script's own
        (*IN_THREAD, *RAISED),
        (*RAISED, *IN_THREAD),
        LOST_LATER,  # as it left its session
        (*RAISED, "Exception ignored in: <function Session.__del__>", *RAISED[:2], *LOST_RANK_1),
    ],
)
def test_the_root_cause_may_have_lost_its_victims(words):
    """They die of its error while it cleans up."""
    outcome = JobOutcome(3)
    outcome.add(failed(0, *LOST_RANK_1))
    outcome.add(failed(2, *SURVIVED))
    outcome.add(failed(1, *words))
    assert outcome.root_cause().rank == 1


@pytest.mark.parametrize(
    "words",
    [
        (*RAISED[:2], *LOST_RANK_1, *CHAINED, *RAISED),  # of its handler
        (f"ERROR:tensorflow:stopped: {LOST_RANK_1[0]}", *RAISED),
        (HOROVODS_LOG,),
    ],
)
def test_a_victim_may_raise_an_error_of_its_own(words):
    """A rank that says nothing of peers is blamed, though it ends last."""
    outcome = JobOutcome(2)
    outcome.add(failed(0, *words))
    assert not outcome.cause_is_certain()
    outcome.add(failed(1, "boom"))
    assert outcome.root_cause().rank == 1


@pytest.mark.parametrize(
    "code, error, is_hinted",
    [
        ("os.mkdir('out')", "FileExistsError: [Errno 17] File exists: 'out'", True),
        ("shutil.rmtree('out')", "OSError: [Errno 39] Directory not empty: 'out'", True),
        ("shutil.rmtree('out')", "FileNotFoundError: [Errno 2] No such file: 'out/a'", True),
        ("shutil.move('a', 'b')", "shutil.Error: Destination path 'b/a' already exists", True),
        ("open('data')", "FileNotFoundError: [Errno 2] No such file: 'data'", False),
        ("os.mkdir('a/b')", "FileNotFoundError: [Errno 2] No such file: 'a/b'", False),
    ],
)
def test_a_file_that_ranks_handle_at_once(code, error, is_hinted):
    """One rank was late: what all of them raise alike has another cause."""
    traceback = (
        "Traceback (most recent call last):",
        '  File "train.py", line 3, in <module>',
        f"    {code}",
        error,
    )
    for count in (1, 2):
        outcome = JobOutcome(2)
        for rank in range(count):
            outcome.add(RankExit(rank, 1, 1, 5.0, last_lines=traceback))
        if count == 1:
            outcome.add(RankExit(1, 1, -15, 5.0, requested=True))
        hinted = "  perhaps    another rank has just made" in outcome.failure_report()
        assert hinted == (is_hinted and count == 1)


@pytest.mark.parametrize(
    "error, is_of_other_versions",
    [
        ("AttributeError: module 'numpy' has no attribute 'float'", True),
        ("NameError: name 'xrange' is not defined", True),
        ("ModuleNotFoundError: No module named 'cPickle'", True),
        ("ImportError: cannot import name 'Iterable' from 'collections' (x.py)", True),
        ("AttributeError: module 'hybridbackend.tensorflow' has no attribute 'x'", False),
        ("ImportError: cannot import name 'x' from 'tensorflow.python.ops' (x.py)", False),
        ("ValueError: Dimension must be 3", False),
    ],
)
@pytest.mark.parametrize("is_as_it_is", [True, False])
def test_a_script_of_other_versions(error, is_of_other_versions, is_as_it_is):
    """It ends alike without the library, which says so where it runs scripts as they are."""
    runner = ('  File "/x/collective/run_script.py", line 41, in main',) if is_as_it_is else ()
    frame = '  File "train.py", line 3, in <module>'
    traceback = ("Traceback (most recent call last):", *runner, frame, error)
    outcome = JobOutcome(2)
    for rank in range(2):
        outcome.add(RankExit(rank, 1, 1, 5.0, last_lines=traceback))
    told = "  meant for  other versions than Python 3." in outcome.failure_report()
    assert told == (is_of_other_versions and is_as_it_is)
