"""The end of a rank's output, as the report shows it, also of lines longer than what is kept."""

from __future__ import annotations

import pytest

from collective.launch.output.error_excerpt import excerpt
from collective.launch.output.output_tail import TAIL_BYTES, OutputTail


def tail_of(data: bytes, piece: int) -> OutputTail:
    tail = OutputTail()
    for start in range(0, len(data), piece):
        tail.take(data[start : start + piece])
    return tail


TRACEBACK = """Traceback (most recent call last):
  File "train.py", line 7, in <module>
    check(rows)
ValueError: rows differ: """


@pytest.mark.parametrize("piece", [1 << 16, 12345, 10 << 20])
@pytest.mark.parametrize("after", ["\n", "\nat exit\n", ""])
def test_an_error_with_a_message_of_megabytes_keeps_its_name(piece, after):
    text = "a log\n" * 50_000 + TRACEBACK + "é" * 5_000_000 + after
    shown = excerpt(tail_of(text.encode(), piece).lines(2000), 1)
    assert shown.is_error and "train.py" in shown.place
    assert shown.lines[0].startswith("ValueError: rows differ: éééé")
    assert shown.lines[0].endswith(f"... ({5_000_000 + 25} characters)")
    assert len(shown.lines[0]) < 600
    assert shown.lines[1:] == (("at exit",) if "exit" in after else ())


@pytest.mark.parametrize("width", [1, 7, 1000, 100_000])
def test_lines_that_fit_are_kept_as_they_were(width):
    lines = [f"{number:06d}" + "x" * width for number in range(3 * TAIL_BYTES // (width + 7) + 3)]
    kept = tail_of(("\n".join(lines) + "\n").encode(), 4096).lines(100_000)
    whole = kept if "..." not in kept[0] else kept[1:]
    assert len("\n".join(kept)) >= min(TAIL_BYTES, 100_000)
    # The first one may have lost its beginning, as ever.
    assert whole[1:] == lines[len(lines) - len(whole) + 1 :]


def test_a_long_line_that_has_ended_makes_room_for_what_follows():
    data = b"begin " + b"x" * 1_000_000 + b"\n" + b"later\n" * 60_000
    kept = tail_of(data, 1 << 16).lines(100_000)
    assert set(kept[1:]) == {"later"} and len(kept) > TAIL_BYTES // 6


def test_memory_is_bounded():
    tail = tail_of(b"y" * (64 << 20), 1 << 16)
    assert len(tail._head) + len(tail._tail) < 3 * TAIL_BYTES
    assert tail.lines(5)[0].endswith(f"... ({64 << 20} characters)")


def test_a_progress_bar_shows_its_last_state():
    assert tail_of(b"one\r\ntwo 1%\rtwo 2%\n\n", 4).lines(9) == ["one", "two 2%"]
    assert tail_of(b"\n\n", 1).lines(9) == []


@pytest.mark.parametrize("state", [b"\rstep %06d", b"step %06d\r"])
def test_a_progress_bar_of_megabytes_shows_its_last_state(state):
    bar = b"begins\n" + b"".join(state % i for i in range(200_000))
    for size in (4096, 65_537):
        assert tail_of(bar, size).lines(1)[0].rstrip() == "step 199999"
    failed = bar + b"Traceback (most recent call last):\n  File\nValueError: x\n"
    lines = tail_of(failed, 4096).lines(3)
    assert lines[0].endswith("Traceback (most recent call last):") and lines[2] == "ValueError: x"
    after = tail_of(b"x" * (1 << 20) + b"\n" + bar, 4096)
    assert after.lines(1)[0].rstrip() == "step 199999"
