"""The digest of stderr: what ranks write alike is shown once, and nothing else is lost."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from collective.launch.output import digest
from collective.launch.output.digest import (
    CAUSE_PATIENCE,
    LONGEST_MESSAGE,
    LONGEST_TRACEBACK,
    NAMES_PATIENCE,
    PAUSE,
    SAME_EVENT,
    JobDigest,
)

NOISE = (
    b"2026-11-23 01:37:42.479186: E external/local_xla/xla/stream_executor/cuda/cuda_dnn.cc:9261] "
    b"Unable to register cuDNN factory: Attempting to register factory for plugin cuDNN when one "
    b"has already been registered\n"
)
WARNING = b"train.py:3: UserWarning: careful\n  warnings.warn('careful')\n"
LOGGED = b"2026-11-23 01:37:4%d.479186: W tensorflow/core/x.cc:12] slow\n"


def error(message=b"ValueError: wrong", line=7, frames=b""):
    return (
        b'Traceback (most recent call last):\n  File "train.py", line %d, in main\n    step()\n'
        b"%s%s\n" % (line, frames, message)
    )


class Ranks:
    """A job of ranks whose stderr is read at times that the test sets."""

    def __init__(self, monkeypatch, size, on_cpu=True):
        self.now = 100.0
        monkeypatch.setattr(digest, "time", SimpleNamespace(monotonic=lambda: self.now))
        self.shown = []
        self.job = JobDigest(
            lambda text: self.shown.append(f"{text}\n".encode()), dict.fromkeys(range(size), on_cpu)
        )
        for rank in range(size):
            self.job.of_rank(rank).show = lambda data, rank=rank: self.shown.append(
                b"".join(b"[%d] %s" % (rank, line) for line in data.splitlines(True))
            )

    def write(self, rank, data):
        self.job.of_rank(rank).take(data)

    def wait(self, seconds):
        self.now += seconds
        self.job.flush_due(self.now)

    def take(self):
        """The text shown since the last call."""
        text, self.shown = b"".join(self.shown).decode(), []
        return text


@pytest.fixture
def ranks(monkeypatch):
    return lambda size, **how: Ranks(monkeypatch, size, **how)


@pytest.mark.parametrize("size", [1, 2])
def test_noise_is_left_out_where_there_is_no_gpu(ranks, size):
    job = ranks(size)
    job.write(0, b"before\n" + NOISE + NOISE.replace(b"cuDNN", b"cuFFT") + b"after\n")
    assert job.take() == "[0] before\n[0] after\n"


def test_what_newer_tensorflow_logs_before_its_log_is_set_up_is_noise(ranks):
    """As TensorFlow 2.21 writes it on a machine without a GPU, whatever TF_CPP_MIN_LOG_LEVEL is."""
    job = ranks(2)
    absl = b"%c0000 00:00:1795792430.211670    8251 "
    job.write(
        1,
        b"WARNING: All log messages before absl::InitializeLog() is called are written to STDERR\n"
        + (absl % b"I" + b"port.cc:153] oneDNN custom operations are on.\n")
        + (absl % b"E" + b"cuda_platform.cc:52] failed call to cuInit: INTERNAL: CUDA error\n")
        + (absl % b"E" + b"elsewhere.cc:52] out of memory\n"),
    )
    assert job.take() == f"[1] {(absl % b'E').decode()}elsewhere.cc:52] out of memory\n"


@pytest.mark.parametrize(
    "line",
    [
        NOISE.replace(b"plugin cuDNN", b"plugin cuBLAS"),
        NOISE.replace(b"already been registered", b"already been registered: out of memory"),
        NOISE.replace(b"stream_executor/cuda", b"elsewhere"),
        b"could not say: Unable to register cuDNN factory\n",
    ],
    ids=["another plugin", "more words", "another file", "no log line"],
)
def test_only_the_known_lines_are_noise(ranks, line):
    job = ranks(2)
    job.write(1, line)
    assert job.take() == f"[1] {line.decode()}"


def test_on_a_gpu_nothing_is_noise(ranks):
    job = ranks(1, on_cpu=False)
    job.write(0, NOISE)
    assert job.take() == f"[0] {NOISE.decode()}"


def test_a_warning_of_all_ranks_is_shown_once(ranks):
    """By the rank that is the first to write it, at once."""
    job = ranks(3)
    for rank in (2, 0, 1):
        job.write(rank, WARNING + b"next\n" + LOGGED % rank + b"end\n")
        job.now += 1
    job.write(1, WARNING.replace(b"careful", b"only here"))
    assert job.take() == (
        "[2] train.py:3: UserWarning: careful\n[2]   warnings.warn('careful')\n[2] next\n"
        f"[2] {(LOGGED % 2).decode()}[2] end\n[0] next\n[0] end\n[1] next\n[1] end\n"
        "[1] train.py:3: UserWarning: only here\n[1]   warnings.warn('only here')\n"
    )


def test_a_line_that_only_one_ranks_warning_has_is_shown(ranks):
    job = ranks(2)
    job.write(0, b"train.py:3: UserWarning: careful:\n  a\n")
    job.write(1, b"train.py:3: UserWarning: careful:\n  b\n")
    assert job.take() == "[0] train.py:3: UserWarning: careful:\n[0]   a\n[1]   b\n"


def test_a_rank_that_warns_again_shows_it_again(ranks):
    job = ranks(2)
    for _ in range(3):
        job.write(0, LOGGED % 1)
        job.write(1, LOGGED % 1)
        job.now += 9
    assert job.take() == f"[0] {(LOGGED % 1).decode()}" * 3


def test_what_is_known_of_warnings_has_a_bound(ranks, monkeypatch):
    monkeypatch.setattr(digest, "_MOST_KNOWN", 20)
    job = ranks(2)
    for number in range(100):
        job.write(1, b"WARNING:tensorflow:number %d\nnext\n" % number)
    assert job.take().count("WARNING") == 100
    assert len(job.job._lines) == 20


def test_instructions_of_several_lines_belong_to_their_warning(ranks):
    text = (
        b"WARNING:tensorflow:From train.py:3: f (from x) is going to change.\n"
        b"Instructions for updating:\nUse g.\n"
    )
    job = ranks(2)
    job.write(1, text + b"first step\n")
    job.write(0, text)
    job.job.end()
    assert job.take() == "".join(
        f"[1] {line}\n" for line in (text + b"first step\n").decode().splitlines()
    )


def test_an_error_that_all_ranks_raise_is_shown_once(ranks):
    job = ranks(64)
    for rank in range(64):
        frames = b'  File "/lib/python3.11/site-packages/x.py", line %d, in f\n' % rank
        job.write(
            rank, b"[Errno] at 0x%x\n" % rank + error(b"ValueError: at 0x%x" % rank, 7, frames)
        )
    job.take()
    job.wait(PAUSE)
    assert job.take() == (
        "[0] Traceback (most recent call last):\n"
        '[0]   File "train.py", line 7, in main\n'
        "[0]     step()\n"
        '[0]   File "/lib/python3.11/site-packages/x.py", line 0, in f\n'
        "[0] ValueError: at 0x0\n"
    )
    job.wait(NAMES_PATIENCE)
    named = (
        "collective launch: ranks 1-63 raised the same as rank 0: "
        "ValueError at train.py, line 7, in main: step()\n"
    )
    assert job.take() == named
    job.job.end()
    assert job.take() == ""


def test_errors_that_differ_are_shown_each(ranks):
    job = ranks(3)
    job.write(0, error())
    job.write(1, error(line=8))
    job.write(2, error(b"KeyError: 'wrong'"))
    job.job.end()
    text = job.take()
    assert text.count("Traceback") == 3 and "collective.launch" not in text


def test_messages_that_differ_are_shown_each(ranks):
    job = ranks(4)
    for rank, file in enumerate((b"a", b"b", b"b", b"a")):
        job.write(rank, error(b"OSError: no file %s\nin this folder" % file))
    job.job.end()
    text = job.take()
    assert text.count("Traceback") == text.count("OSError: no file a") == 1
    assert "[0] in this folder\n[1] OSError: no file b\ncollective launch: ranks 1-3 raised" in text


def test_a_rank_that_raises_the_same_a_little_later_is_named(ranks):
    job = ranks(3)
    job.write(0, error())
    job.wait(PAUSE)
    assert job.take().endswith("[0] ValueError: wrong\n")
    job.wait(SAME_EVENT - 2)
    job.write(1, error())
    job.job.end()
    assert job.take().startswith("collective launch: rank 1 raised the same as rank 0: ValueError")
    job.now += 2
    job.write(2, error())
    job.job.end()
    assert job.take().endswith("[2] ValueError: wrong\n")


def test_an_error_that_comes_again_is_shown_again(ranks):
    job = ranks(2)
    for _ in range(2):
        job.write(0, error())
        job.wait(PAUSE)
        assert job.take().count("Traceback") == 1


def test_an_error_that_comes_again_from_another_rank_is_shown_again(ranks):
    """The first time it is the same as rank 0's; then the rank may die of it."""
    job = ranks(2)
    shown = []
    for rank in (0, 1, 1):
        job.write(rank, error())
        job.wait(PAUSE)
        shown.append(job.take().count("Traceback"))
    assert shown == [1, 0, 1]


def test_a_rank_that_hangs_after_its_error_does_not_hide_it(ranks):
    job = ranks(2)
    job.write(1, error()[:-8])
    job.wait(PAUSE)
    job.wait(LONGEST_TRACEBACK - PAUSE - 0.1)
    assert job.take() == "" and job.job.next_time() == pytest.approx(job.now + 0.1)
    job.wait(0.2)
    assert job.take().endswith("[1] ValueError")


def test_what_follows_a_survived_error_keeps_its_order(ranks):
    """Lines that come a while after an error are no part of its message."""
    job = ranks(2)
    for rank in (0, 1):
        job.write(rank, error())
    job.now += 1
    for rank in (0, 1):
        job.write(rank, b"".join(b"rank %d line %d\n" % (rank, line) for line in range(9)))
    job.now += 1
    job.write(1, WARNING)
    job.wait(0.1)
    text = job.take()
    assert text.count("Traceback") == 1
    assert text.index("ValueError") < text.index("rank 0 line 0") < text.index("rank 1 line 8")
    assert text.count("line") == 18 + 1
    job.write(1, b"at once\n")
    assert job.take() == "[1] at once\n"


def test_what_is_held_after_an_error_has_a_bound(ranks):
    job = ranks(2)
    job.write(0, error())
    job.write(0, b"x" * 70000 + b"\n")
    assert len(job.take()) > 70000


def test_a_progress_bar_before_an_error_ends(ranks):
    job = ranks(2)
    job.write(0, b"50%|##  |")
    job.write(0, error())
    job.write(1, b"50%|##  |" + error())
    job.job.end()
    text = job.take()
    assert text.startswith("[0] 50%|##  |[1] 50%|##  |[0] \n[0] Traceback")
    assert "rank 1 raised the same as rank 0" in text and text.count("Traceback") == 1


def interrupt(line=7):
    inner = b'  File "/lib/python3.11/site-packages/x.py", line 3, in f\n'
    return error(b"KeyboardInterrupt", line, inner * 60)


@pytest.mark.parametrize("size", [1, 3])
def test_an_interrupt_is_a_line(ranks, size):
    job = ranks(size)
    job.job.interrupted = True
    for rank in range(size):
        job.write(rank, interrupt() + b"saved\n")
    job.job.end()
    names = "rank 0" if size == 1 else "ranks 0-2"
    assert job.job.interruption().startswith(
        f"{names} interrupted at train.py, line 7, in main: step() (KeyboardInterrupt; "
    )
    assert job.take() == "".join(f"[{rank}] saved\n" for rank in range(size))


def test_the_echoes_of_an_interrupt_are_few_lines(ranks):
    job = ranks(64)
    job.job.interrupted = True
    for rank in range(64):
        lost = error(b"RankError: A rank failed. rank 0: KeyboardInterrupt")
        job.write(rank, lost if rank % 2 else interrupt(line=rank))
        job.write(rank, b"Exception ignored in: <f at 0x7>\n" + interrupt())
    job.job.end()
    assert job.take() == ""
    assert job.job.interruption().count("interrupted at") == 3


def test_a_real_error_is_shown_in_spite_of_an_interrupt(ranks):
    job = ranks(2)
    job.write(1, error())
    job.job.interrupted = True
    job.write(0, interrupt())
    job.job.end()
    assert job.take().count("ValueError: wrong") == 1


def test_without_an_interrupt_a_keyboard_interrupt_is_an_error(ranks):
    job = ranks(2)
    job.write(0, interrupt())
    job.job.end()
    assert "[0] KeyboardInterrupt" in job.take() and job.job.interruption() == ""


def test_an_error_in_the_handling_of_an_interrupt_is_shown(ranks):
    job = ranks(2)
    job.job.interrupted = True
    handling = b"\nDuring handling of the above exception, another exception occurred:\n\n"
    job.write(0, interrupt() + handling + error(b"OSError: can't save"))
    job.job.end()
    assert "[0] OSError: can't save\n" in job.take()


HANDLING = b"\nDuring handling of the above exception, another exception occurred:\n\n"


def test_an_interrupt_in_the_handling_of_an_error_does_not_hide_it(ranks):
    """Its clean-up hung, so that somebody pressed Ctrl-C."""
    job = ranks(2)
    job.job.interrupted = True
    job.write(1, error(b"ValueError: the cause") + HANDLING + interrupt())
    job.job.end()
    assert "[1] ValueError: the cause\n" in job.take()


def test_a_lost_peer_after_an_error_does_not_hide_it(ranks):
    job = ranks(2)
    job.job.interrupted = True
    job.write(0, error() + b"Horovod has been shut down\n")
    job.job.end()
    assert "[0] ValueError: wrong\n" in job.take()


def test_a_lost_peer_within_tensorflows_message_is_an_echo(ranks):
    unknown = b"tensorflow.python.framework.errors_impl.UnknownError: "
    job = ranks(2)
    job.job.interrupted = True
    job.write(
        0,
        error(unknown + b"{{node step}} Horovod has been shut down. ")
        + HANDLING
        + error(unknown + b"Graph execution error:\n\nHorovod has been shut down. "),
    )
    job.job.end()
    assert job.take() == "" and "rank 0 interrupted" in job.job.interruption()


LOST = b"tensorflow.python.framework.errors_impl.UnknownError: Horovod has been shut down. "
ECHO = error(LOST, line=2) + HANDLING + error(b"RankError: saving failed on rank 0: wrong", line=3)


def test_the_loss_of_a_peer_is_a_line_where_the_cause_is_known(ranks):
    job = ranks(8)
    for rank in range(1, 8):
        job.write(rank, ECHO)
    job.wait(CAUSE_PATIENCE - 0.1)
    job.write(0, error())
    assert job.take() == "" == job.job.losses()
    job.job.cause_is_known = True
    job.wait(PAUSE)
    job.job.end()
    text = job.take()
    assert "ValueError: wrong" in text and "RankError" not in text and "Horovod" not in text
    assert job.job.losses().startswith("ranks 1-7 lost a peer at train.py, line 3, in main: step()")


def test_the_loss_of_a_peer_is_shown_where_no_cause_is_known(ranks):
    job = ranks(3)
    job.write(1, ECHO)
    job.write(2, ECHO)
    job.wait(PAUSE)
    assert job.take() == ""
    job.wait(CAUSE_PATIENCE)
    assert job.take().count("RankError: saving failed on rank 0") == 1 and job.job.losses() == ""


def test_a_lost_peer_does_not_hide_the_error_in_whose_handling_it_was_lost(ranks):
    job = ranks(2)
    job.job.cause_is_known = True
    job.write(1, error(b"KeyError: 'x'") + HANDLING + error(LOST))
    job.job.end()
    assert "KeyError: 'x'" in job.take() and job.job.losses() == ""


def test_no_line_of_a_differing_message_is_lost(ranks):
    job = ranks(16)
    for rank in range(16):
        job.write(rank, error() + b"".join(b"rank %d line %d\n" % (rank, i) for i in range(12)))
    job.job.end()
    text = job.take()
    assert text.count(" line ") == 16 * 12 + 1 + 1  # of the traceback, and of the note


def test_what_is_written_steadily_after_a_survived_error_is_shown(ranks):
    """A line every tenth of a second isn't silence, and yet no part of the message."""
    job = ranks(2)
    for rank in (0, 1):
        job.write(rank, error())
    for number in range(19):
        job.now += 0.1
        for rank in (0, 1):
            job.write(rank, b"  step %d\n\n" % number)
    job.wait(0.2)
    text = job.take()
    assert text.count("Traceback") == 1
    for number in range(12, 19):
        assert f"[0]   step {number}\n[0] \n" in text and f"[1]   step {number}\n[1] \n" in text


def test_a_rank_that_raises_the_same_often_shows_it_as_often(ranks):
    """Each occurrence of a rank is compared with the others' same one."""
    job = ranks(3)
    for rank in (0, 1):
        for number in range(5 if rank == 0 else 2):
            frames = b'  File "/lib/python3.11/site-packages/x.py", line %d, in f\n' % number
            job.write(rank, error(frames=frames))
    job.job.end()
    text = job.take()
    assert text.count("Traceback") == 5 and text.count("rank 1 raised the same") == 1
    assert all(f"line {number}, in f" in text for number in range(5))


def test_ranks_are_named_before_the_error_comes_again(ranks):
    job = ranks(2)
    for rank in (0, 1, 0):
        job.write(rank, error())
        job.wait(PAUSE)
    assert [line[:3] for line in job.take().splitlines()] == ["[0]"] * 4 + ["col"] + ["[0]"] * 4


def test_what_a_rank_writes_between_errors_keeps_its_order(ranks):
    job = ranks(2)
    for text in (
        error(b"ValueError: first"),
        b"between\n",
        error(b"KeyError: second"),
        b"the end\n",
    ):
        job.write(1, text)
        job.now += 0.5
    job.job.end()
    text = job.take()
    words = ("ValueError: first", "between", "KeyError: second", "the end")
    assert sorted(words, key=text.index) == list(words)


@pytest.mark.parametrize("later", [0.0, 0.5])
def test_a_partial_line_after_an_error_stays_partial(ranks, later):
    job = ranks(2)
    for rank in (0, 1):
        job.write(rank, error())
    job.now += later
    job.write(1, b"50%|##  |\r60%|##  |\rgo on? ")
    job.wait(LONGEST_MESSAGE)
    assert "60%|##  |\r[1] go on? " in job.take()
    job.write(1, b"yes\n")
    assert job.take() == "[1] yes\n"


def test_a_warning_long_after_rank_0s_is_shown(ranks):
    job = ranks(6)
    job.write(0, WARNING + b"next\n")
    job.wait(3 * 3600)
    job.write(5, WARNING + b"next\n")
    assert job.take().count("[5] train.py:3: UserWarning: careful\n") == 1


@pytest.mark.parametrize("lag", [-6, -1, 0, 1, 50])
def test_a_warning_that_comes_again_and_again_is_one_ranks(ranks, lag):
    """Seconds by which rank 1 is late; a warning comes every seven seconds, for minutes."""
    job = ranks(2)
    events = [(7 * number, 0) for number in range(60)]
    events += [(7 * number + lag, 1) for number in range(60)]
    for second, rank in sorted(events):
        job.wait(1000 + second - job.now)
        job.write(rank, WARNING + b"next\n")
    (shown,) = {line[:3] for line in job.take().splitlines() if "UserWarning" in line}
    assert shown == ("[1]" if lag < 0 else "[0]")


NAME = (
    b"WARNING:tensorflow:From train.py:%d: The name tf.log is deprecated. Please use "
    b"tf.math.log.\n\n"
)
FUNCTION = (
    b"WARNING:tensorflow:From train.py:%d: dense (from keras) is deprecated and will be removed in "
    b"a future version.\nInstructions for updating:\nUse keras.layers.Dense instead.\n"
)


@pytest.mark.parametrize("size", [1, 2])
def test_deprecations_are_one_line(ranks, size):
    """Of a TensorFlow that is pinned nothing is removed: nobody can act on them."""
    job = ranks(size)
    for rank in range(size):
        for line in range(30):
            job.write(rank, NAME % line + FUNCTION % line)
        job.write(rank, b"step 1\n")
    job.job.end()
    shown = job.take()
    assert "WARNING" not in shown and "Instructions" not in shown and "Dense" not in shown
    assert shown.count("TensorFlow calls functions of this program deprecated") == 1
    assert [line for line in shown.splitlines() if "step" in line] == [
        f"[{rank}] step 1" for rank in range(size)
    ]


def test_a_warning_among_deprecations_is_shown(ranks):
    job = ranks(2)
    for rank in range(2):
        job.write(rank, FUNCTION % 3 + WARNING + FUNCTION % 4 + b"WARNING:tensorflow:From here\n")
    job.job.end()
    shown = job.take()
    assert shown.count("UserWarning: careful") == 1 and "[0] WARNING:tensorflow:From here" in shown


OWN = (
    b"collective.checkpoint.files.storage.CheckpointStorageError: "
    b"No checkpoint was written: disk full."
)
LIBRARY = b'  File "/x/site-packages/tensorflow/a.py", line 3, in run\n    deep()\n' * 20


def test_an_error_that_says_all_comes_without_its_stack(ranks):
    job = ranks(2)
    for rank in range(2):
        job.write(rank, error(OWN, frames=LIBRARY))
    job.job.end()
    assert job.take() == (
        f"[0] {OWN.decode()}\n"
        "[0]   at train.py, line 7, in main: step()\n"
        "[0]   (--verbose and --log-dir have the stack)\n"
        "collective launch: rank 1 raised the same as rank 0: "
        "collective.checkpoint.files.storage.CheckpointStorageError at train.py, line 7, in main: "
        "step()\n"
    )


def test_what_was_handled_meanwhile_keeps_its_stack(ranks):
    job = ranks(2)
    handled = b"\nDuring handling of the above exception, another exception occurred:\n\n"
    job.write(0, error(b"ValueError: mine") + handled + error(OWN, frames=LIBRARY))
    job.wait(PAUSE)
    shown = job.take()
    assert "ValueError: mine" in shown and "site-packages" in shown
