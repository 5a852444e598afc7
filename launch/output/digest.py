"""The digest of the ranks' stderr: leaves noise out, and shows once what several ranks write alike.

    RankStream ──whole lines──▶ RankDigest ──most of them──────────────▶ Screen
                                    │ a warning, an error                  ▲
                                    ▼                                      │
                                JobDigest: waits for the other ranks ──────┘

Only the shown output is condensed; logs have every byte. Nothing waits for long: an error waits a
few seconds; a warning waits until the reference, the first rank that is shown, has had time to
write it. A rank that dies or hangs meanwhile loses nothing, and the held output is bounded.

While an error is held, so is what its rank writes to stderr after it. The end of a traceback can't
be recognized: the rest of a dying rank's output belongs to it.
"""

from __future__ import annotations

import itertools
import math
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from collective.launch.output.raised_error import TRACEBACK, RaisedError, begins_error, errors_in
from collective.launch.output.repeated_errors import Passage, RankError, RepeatedErrors
from collective.launch.output.repeated_warnings import HeldWarning, RepeatedWarnings
from collective.launch.output.stderr_lines import (
    begins_warning,
    continues_warning,
    is_deprecation,
    is_noise,
    is_remarkable,
    message_lost_a_peer,
)
from collective.launch.planning.rank_names import rank_names

# How many seconds an error waits for other ranks to raise the same.
ERROR_PATIENCE = 2.0
# How many seconds longer the error of a lost peer waits for its cause to be known.
CAUSE_PATIENCE = 3.0
# How many seconds the rest of a message, or of a warning, may take.
_MESSAGE_END = 0.3
# Output that comes more than this many seconds after an error isn't part of its message.
_LONGEST_PART = 1.0
_MOST_BYTES_HELD = 1 << 16
_MOST_WARNING_LINES = 50
_MOST_PLACES = 3
# pybind11 reports an interrupt that comes while TensorFlow creates the error of a lost peer.
_INTERRUPT = re.compile(
    r"KeyboardInterrupt|RuntimeError: pybind11::error_already_set: MISMATCH of original and "
    r"normalized active exception types: ORIGINAL (?:Unknown|Aborted|Cancelled|Internal)Error "
    r"REPLACED BY KeyboardInterrupt"
)
_PYBIND_STACK = re.compile(r"At:$|  \S.*\(\d+\): \S+$|$")
_DEPRECATIONS = (
    "TensorFlow calls functions of this program deprecated; the TensorFlow that is installed has "
    "them all (--verbose shows the warnings)"
)
_LINES = re.compile(rb"[^\r\n]*(?:\r\n|\r|\n)|[^\r\n]+")


class JobDigest:
    """Compares the ranks' output. Times are those of the monotonic clock."""

    def __init__(self, say: Callable[[str], None], on_cpu: Mapping[int, bool]) -> None:
        """Makes the digests of the ranks.

        Args:
          say: shows the launcher's own notes.
          on_cpu: tells for each shown rank, in ascending order, whether it has no GPU.
        """
        self._say = say
        reference = min(on_cpu)
        self._warnings = RepeatedWarnings(reference)
        self._errors = RepeatedErrors()
        self._ranks = {
            rank: RankDigest(self, rank, rank == reference, cpu) for rank, cpu in on_cpu.items()
        }
        self._has_said_deprecations = False
        self._interrupted_at: dict[str, list[int]] = {}
        self._lost_a_peer_at: dict[str, list[int]] = {}
        self.interrupted = False
        self.cause_is_known = False

    def of_rank(self, rank: int) -> RankDigest:
        return self._ranks[rank]

    @property
    def holds_errors(self) -> bool:
        """Tells whether an error is held that may be repeated, or may only echo Ctrl-C."""
        return len(self._ranks) > 1 or self.interrupted

    def next_time(self) -> float:
        """Returns when to show something that is held; infinity if nothing is held."""
        times = [rank.next_time() for rank in self._ranks.values()]
        return min(self._warnings.next_time(), *times)

    def flush_due(self, now: float) -> None:
        """Shows what has been held long enough."""
        if self.next_time() > now:
            return
        for rank in self._ranks.values():
            rank.end_warning_due(now)
        due = [rank for rank in self._ranks.values() if rank.error_time() <= now]
        if not self.cause_is_known:
            due = [rank for rank in due if not rank.waits_for_cause()]
        if due:
            self._show_errors(self._with_the_same_errors(due), now)
        self._show_warnings(self._warnings.take_due(now))

    def end(self) -> None:
        """Shows everything that is still held."""
        self._end_warnings()
        self._show_errors(self._ranks.values(), time.monotonic())
        self._end_warnings()  # warnings in the text held after errors

    def interruption(self) -> str:
        """Says where ranks were when they were interrupted; "" if no rank has said so."""
        places = _by_place(self._interrupted_at, "interrupted")
        return places and f"{places} (KeyboardInterrupt; --verbose shows the tracebacks)"

    def losses(self) -> str:
        """Says where ranks lost a peer; "" if no such error was left out."""
        places = _by_place(self._lost_a_peer_at, "lost a peer")
        return places and f"{places} (--verbose and --log-dir have the tracebacks)"

    def _end_warnings(self) -> None:
        for rank in self._ranks.values():
            rank.end_warning()
        self._show_warnings(self._warnings.take_all())

    def add_warning(self, rank: int, lines: Sequence[str]) -> None:
        self._warnings.add(rank, lines, time.monotonic())

    def say_deprecations(self) -> None:
        """Shows one line for all ranks' warnings about deprecated functions."""
        if not self._has_said_deprecations:
            self._has_said_deprecations = True
            self._say(f"collective launch: {_DEPRECATIONS}")

    def _with_the_same_errors(self, due: Sequence[RankDigest]) -> list[RankDigest]:
        """Adds the ranks that hold the same error as one of those in `due`."""
        identities = {identity for rank in due for identity in rank.held_errors()}
        return [
            rank
            for rank in self._ranks.values()
            if rank in due or not identities.isdisjoint(rank.held_errors())
        ]

    def _show_errors(self, ranks: Iterable[RankDigest], now: float) -> None:
        errors: list[RankError] = []
        others: list[tuple[RankDigest, bytes]] = []
        for rank in ranks:
            rank_errors, rest = rank.release()
            before = b""
            for error in rank_errors:
                before += error.before
                if self._is_echo_of_interrupt(error):
                    before += _text(_lines_behind_interrupt(error))
                elif not self._is_echo_of_failure(error):
                    errors.append(replace(error, before=before))
                    before = b""
            others.append((rank, before + rest))
        for passage in self._errors.passages(errors, now):
            self._show(passage)
        for rank, rest in others:
            rank.take(rest, hold_errors=False)

    def _is_echo_of_interrupt(self, rank_error: RankError) -> bool:
        """Tells whether an error only says that its rank, or a peer, was told to stop."""
        error = rank_error.error
        if not self.interrupted:
            return False
        # The first exception may be the cause, even if an interrupt ended its handling.
        if not all(_is_interrupt(each) or message_lost_a_peer(each) for each in error.messages):
            return False
        if not error.is_aside:
            self._interrupted_at.setdefault(error.place, []).append(rank_error.rank)
        return True

    def _is_echo_of_failure(self, rank_error: RankError) -> bool:
        """Tells whether an error only says that its rank lost a peer whose failure is reported."""
        error = rank_error.error
        if not self.cause_is_known or not _is_lost_peer(error):
            return False
        if not error.is_aside:
            self._lost_a_peer_at.setdefault(error.place, []).append(rank_error.rank)
        return True

    def _show_warnings(self, warnings: Iterable[HeldWarning]) -> None:
        for warning in warnings:
            ranks = sorted(warning.occurrences)
            times = max(warning.occurrences.values())
            notes = [f"on {rank_names(ranks)}"] if len(ranks) > 1 else []
            if times > 1:
                notes.append(f"{times} times")
            note = f"{', '.join(notes)}:" if notes else ""
            self._show(Passage(note, ranks[0], warning.lines))

    def _show(self, passage: Passage) -> None:
        if passage.note:
            self._say(f"collective launch: {passage.note}")
        if passage.text:
            self._ranks[passage.rank].take(passage.text, hold_errors=False)
        if passage.lines:
            self._ranks[passage.rank].show_held(_text(passage.lines))


class RankDigest:
    """Sorts the lines of one rank's stderr.

    Attributes:
      show: shows this rank's text; set by the owner of the rank's stream.
    """

    show: Callable[[bytes], None]

    def __init__(self, job: JobDigest, rank: int, is_reference: bool, on_cpu: bool) -> None:
        self._job = job
        self._rank = rank
        self._in_line = False  # the last shown text is an unfinished line
        self._warning: list[str] | None = None  # more lines may still belong to it
        self._warning_since = 0.0
        self._is_reference = is_reference
        self._on_cpu = on_cpu
        self._held: list[bytearray] = []  # the first part has an error and its message
        self._held_since = 0.0
        self._part_since = 0.0
        self._last_held = 0.0
        self._has_waited_for_cause = False

    def take(self, data: bytes, hold_errors: bool = True) -> None:
        """Takes text: segments that end in a newline or a carriage return; the last may not."""
        if self._held:
            self._hold(data)
            return
        if self._warning is None and not is_remarkable(data):
            self._show_now(data)
            return
        shown = bytearray()
        for match in _LINES.finditer(data):
            segment = match[0]
            if hold_errors and self._job.holds_errors and begins_error(_decoded(segment)):
                self._begin_holding(bytes(shown), segment, data[match.start() :])
                return
            if self._is_to_show(segment):
                shown += segment
                self._in_line = not segment.endswith((b"\n", b"\r"))
        self._show_now(bytes(shown))

    def show_held(self, data: bytes) -> None:
        """Shows whole lines, beginning on a new line."""
        if self._in_line:
            self._show_now(b"\n")
        self._show_now(data)

    def end_warning(self) -> None:
        """Treats the current warning as complete."""
        if self._warning is not None:
            if is_deprecation(self._warning[0]):
                self._job.say_deprecations()
            else:
                self._job.add_warning(self._rank, self._warning)
            self._warning = None

    def end_warning_due(self, now: float) -> None:
        if self._warning_time() <= now:
            self.end_warning()

    def error_time(self) -> float:
        """Returns when to show what is held since an error; infinity if nothing is."""
        return self._held_since + ERROR_PATIENCE if self._held else math.inf

    def waits_for_cause(self) -> bool:
        """Has a lost peer's error wait longer for its cause, but only once; tells whether it waits.

        It does if every held error says only that a peer was lost.
        """
        if self._has_waited_for_cause or self._held_since == -math.inf:
            return False
        self._has_waited_for_cause = True
        errors = [error for part in self._held for error in _errors_in_part(part)]
        if not errors or not all(map(_is_lost_peer, errors)):
            return False
        self._held_since += CAUSE_PATIENCE
        return True

    def next_time(self) -> float:
        return min(self.error_time(), self._warning_time())

    def held_errors(self) -> set[tuple[str, str, bool]]:
        """Returns which errors are held."""
        return {error.identity for part in self._held for error in _errors_in_part(part)}

    def release(self) -> tuple[list[RankError], bytes]:
        """Returns the held errors and the text after them, and stops holding them."""
        parts, self._held = self._held, []
        errors: list[RankError] = []
        text = b""
        for part in parts:
            lines = _text_lines(part)
            position = 0
            for error in _errors_in_part(part):
                text += _text(lines[position : error.first])
                errors.append(RankError(self._rank, error, lines[error.first : error.end], text))
                text = b""
                position = error.end
            text += _text(lines[position:])
            if position < len(lines) and not part.endswith(b"\n"):
                text = text[:-1]
        return errors, text

    def _begin_holding(self, before: bytes, first: bytes, data: bytes) -> None:
        """Starts to hold an error.

        Args:
          before: the text to show at once.
          first: the error's first line, maybe after a progress bar.
          data: that line and everything after it.
        """
        self.end_warning()
        head, _, _ = first.rpartition(TRACEBACK.encode())
        self._show_now(before + head)
        if self._in_line:
            self._show_now(b"\n")
        self._held_since = self._part_since = self._last_held = time.monotonic()
        self._held = [bytearray(data[len(head) :])]
        self._has_waited_for_cause = False

    def _hold(self, data: bytes) -> None:
        now = time.monotonic()
        was_silent = now - self._last_held > _MESSAGE_END
        is_long = now - self._part_since > _LONGEST_PART and _errors_in_part(self._held[-1])
        if (was_silent or is_long) and self._held[-1].endswith((b"\n", b"\r")):
            self._held.append(bytearray())
            self._part_since = now
        self._held[-1] += data
        self._last_held = now
        if sum(map(len, self._held)) > _MOST_BYTES_HELD:
            self._held_since = -math.inf

    def _is_to_show(self, segment: bytes) -> bool:
        if self._in_line or not segment.endswith(b"\n"):
            self.end_warning()
            return True
        line = _decoded(segment)
        if self._warning is not None:
            if continues_warning(line, self._warning[-1]):
                self._warning.append(line)
                is_shown = self._is_reference and not is_deprecation(self._warning[0])
                if len(self._warning) == _MOST_WARNING_LINES:
                    self.end_warning()
                return is_shown
            self.end_warning()
        if self._on_cpu and is_noise(line):
            return False
        if not begins_warning(line):
            return True
        self._warning = [line]
        self._warning_since = time.monotonic()
        return self._is_reference and not is_deprecation(line)

    def _warning_time(self) -> float:
        return math.inf if self._warning is None else self._warning_since + _MESSAGE_END

    def _show_now(self, data: bytes) -> None:
        if data:
            self._in_line = not data.endswith((b"\n", b"\r"))
            self.show(data)


def _by_place(ranks_by_place: Mapping[str, list[int]], what_happened: str) -> str:
    """Returns "ranks 0-2 interrupted at <place>; ..." for a few places."""
    places = sorted(ranks_by_place.items(), key=lambda item: item[1])
    texts = []
    for place, ranks in places[:_MOST_PLACES]:
        where = f" at {place}" if place else ""
        texts.append(f"{rank_names(sorted(set(ranks)))} {what_happened}{where}")
    if len(places) > _MOST_PLACES:
        texts.append(f"others at {len(places) - _MOST_PLACES} other places")
    return "; ".join(texts)


def _is_lost_peer(error: RaisedError) -> bool:
    # The first exception may be the cause, even if a lost peer ended its handling.
    return all(map(message_lost_a_peer, error.messages))


def _is_interrupt(message: Sequence[str]) -> bool:
    return _INTERRUPT.match(message[0]) is not None


def _lines_behind_interrupt(rank_error: RankError) -> Sequence[str]:
    """Returns what a rank wrote right after a KeyboardInterrupt, which itself has no message."""
    error = rank_error.error
    if not _is_interrupt(error.messages[-1]):
        return ()
    lines = rank_error.lines[error.own + 1 - error.first :]
    if error.chain[-1].startswith("KeyboardInterrupt"):
        return lines
    return list(itertools.dropwhile(_PYBIND_STACK.match, lines))


def _decoded(segment: bytes) -> str:
    return segment.decode("utf-8", "surrogateescape").rstrip("\r\n")


def _text_lines(text: bytearray) -> list[str]:
    lines = text.decode("utf-8", "surrogateescape").replace("\r\n", "\n").split("\n")
    return lines[:-1] if not lines[-1] else lines


def _errors_in_part(part: bytearray) -> list[RaisedError]:
    """Returns the errors in text. An unfinished last line, such as a prompt, is in no message."""
    lines = _text_lines(part)
    errors = list(errors_in(lines))
    if part.endswith(b"\n"):
        return errors
    before = list(errors_in(lines[:-1]))
    return before if len(before) == len(errors) else errors


def _text(lines: Sequence[str]) -> bytes:
    return "\n".join([*lines, ""]).encode("utf-8", "surrogateescape") if lines else b""
