"""The digest of the ranks' stderr: leaves noise out, and shows once what several ranks write alike.

    RankStream ──whole lines──▶ RankDigest ──most of them──────────▶ Screen
                                    │ a line of a warning, an error    ▲
                                    ▼                                  │
                                JobDigest: was it shown already? ──────┘

Only the shown output is condensed; logs have every byte. A warning's line is shown by the first
rank that writes it, and so is an error's traceback. Nothing waits for other ranks, except for the
error of a lost peer: it waits a few seconds for its cause. The end of an error's message can't be
recognized: it ends with a pause.
"""

from __future__ import annotations

import math
import re
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from collective.launch.output.raised_error import (
    TRACEBACK,
    WHILE_HANDLING,
    RaisedError,
    begins_error,
    errors_in,
)
from collective.launch.output.stderr_lines import (
    begins_warning,
    continues_warning,
    is_deprecation,
    is_noise,
    is_remarkable,
    message_lost_a_peer,
    without_volatile,
)
from collective.launch.planning.rank_names import rank_names

# A pause of this many seconds ends an error's message.
PAUSE = 0.3
# An error and its message take at most this many seconds.
LONGEST_MESSAGE = 1.0
# A busy machine may pause within a traceback, for up to this many seconds from its beginning.
LONGEST_TRACEBACK = 2.0
# How many seconds the error of a lost peer waits for its cause to be known.
CAUSE_PATIENCE = 5.0
# How many seconds after an error the other ranks that have raised it are named.
NAMES_PATIENCE = 2.0
# What another rank writes this many seconds later is shown again.
SAME_EVENT = 60.0
_MOST_BYTES_HELD = 1 << 16
_MOST_KNOWN = 2000
_MOST_PLACES = 3
_LONGEST_NOTE = 300
_WITH_STACK = b"  (--verbose and --log-dir have the stack)\n"
_DEPRECATIONS = (
    "TensorFlow calls functions of this program deprecated; the TensorFlow that is installed has "
    "them all (--verbose shows the warnings)"
)
_SEGMENTS = re.compile(rb"[^\r\n]*(?:\r\n|\r|\n)|[^\r\n]+")
_LINES = re.compile(rb"[^\n]*\n|[^\n]+")


@dataclass
class _Shown:
    """Records which rank has shown something, and when.

    Attributes:
        message: of an error: the lines of its message that were shown, by any rank.
        others: the ranks that have raised the same error, and weren't named yet.
        raised: how often each rank has raised it, without longer pauses.
    """

    rank: int
    time: float
    message: set[str] = field(default_factory=set)
    others: set[int] = field(default_factory=set)
    raised: Counter[int] = field(default_factory=Counter)

    def covers(self, rank: int, now: float) -> bool:
        """Tells whether the same of this rank needn't be shown: it would have come from another."""
        return self.rank != rank and now - self.time < SAME_EVENT


class _LostPeer(NamedTuple):
    """Holds an error that waits until its cause is known, or until a time."""

    until: float
    rank: int
    error: RaisedError
    lines: Sequence[bytes]


class JobDigest:
    """Compares the ranks' output. Times are those of the monotonic clock."""

    def __init__(self, say: Callable[[str], None], on_cpu: Mapping[int, bool]) -> None:
        """Makes the digests of the ranks.

        Args:
            say: shows the launcher's own notes.
            on_cpu: tells for each shown rank whether it has no GPU.
        """
        self._say = say
        self._ranks = {rank: RankDigest(self, rank, cpu) for rank, cpu in on_cpu.items()}
        self._lines: OrderedDict[tuple[str, str], _Shown] = OrderedDict()
        self._errors: OrderedDict[tuple[str, str, bool], _Shown] = OrderedDict()
        self._waiting: list[_LostPeer] = []
        self._names_at = math.inf
        self._has_said_deprecations = False
        self._interrupted_at: dict[str, list[int]] = {}
        self._lost_a_peer_at: dict[str, list[int]] = {}
        self.interrupted = False
        self.cause_is_known = False

    def of_rank(self, rank: int) -> RankDigest:
        return self._ranks[rank]

    @property
    def compares_errors(self) -> bool:
        """Tells whether an error may be another's, or only the echo of Ctrl-C."""
        return len(self._ranks) > 1 or self.interrupted

    def next_time(self) -> float:
        """Returns when to show something that is held; infinity if nothing is held."""
        times = [rank.end_time for rank in self._ranks.values()]
        return min(self._names_at, *times, *(each.until for each in self._waiting))

    def flush_due(self, now: float) -> None:
        """Shows what has been held long enough."""
        for rank in self._ranks.values():
            rank.end_message(now)
        waiting, self._waiting = self._waiting, []
        for each in waiting:
            if each.until <= now:
                self._settle(each.rank, each.error, each.lines)
            else:
                self._waiting.append(each)
        if self._names_at <= now:
            self._name_others()

    def end(self) -> None:
        """Shows everything that is still held."""
        self.flush_due(math.inf)

    def interruption(self) -> str:
        """Says where ranks were when they were interrupted; "" if no rank has said so."""
        places = _by_place(self._interrupted_at, "interrupted")
        return places and f"{places} (KeyboardInterrupt; --verbose shows the tracebacks)"

    def losses(self) -> str:
        """Says where ranks lost a peer; "" if no such error was left out."""
        places = _by_place(self._lost_a_peer_at, "lost a peer")
        return places and f"{places} (--verbose and --log-dir have the tracebacks)"

    def is_new(self, rank: int, warning: str, line: str) -> bool:
        """Tells whether to show a line of the warning that begins with the line `warning`."""
        key = without_volatile(warning), without_volatile(line)
        now, shown = time.monotonic(), self._lines.get(key)
        if shown and shown.covers(rank, now):
            return False
        self._lines[key] = _Shown(rank, now)
        self._lines.move_to_end(key)
        if len(self._lines) > _MOST_KNOWN:
            self._lines.popitem(last=False)
        return True

    def say_deprecations(self) -> None:
        """Shows one line for all ranks' warnings about deprecated functions."""
        if not self._has_said_deprecations:
            self._has_said_deprecations = True
            self._say(f"collective launch: {_DEPRECATIONS}")

    def add_error(self, rank: int, error: RaisedError, lines: Sequence[bytes]) -> None:
        """Shows an error, unless another rank has; that of a lost peer waits for its cause."""
        if _is_lost_peer(error) and not (self.cause_is_known or self.interrupted):
            until = time.monotonic() + CAUSE_PATIENCE
            self._waiting.append(_LostPeer(until, rank, error, lines))
        else:
            self._settle(rank, error, lines)

    def _settle(self, rank: int, error: RaisedError, lines: Sequence[bytes]) -> None:
        if self.interrupted and _is_echo_of_interrupt(error):
            if not error.is_aside:
                self._interrupted_at.setdefault(error.place, []).append(rank)
            if _is_interrupt(error.messages[-1]):  # which itself has no message
                self._ranks[rank].show_lines(lines[error.own + 1 - error.first :])
        elif self.cause_is_known and _is_lost_peer(error):
            if not error.is_aside:
                self._lost_a_peer_at.setdefault(error.place, []).append(rank)
        else:
            self._show_error(rank, error, lines)

    def _show_error(self, rank: int, error: RaisedError, lines: Sequence[bytes]) -> None:
        now, shown = time.monotonic(), self._errors.get(error.identity)
        if shown and now - shown.time >= SAME_EVENT:
            shown = None
        # The n-th of a rank is compared with the n-th of the one that was shown.
        if shown and shown.raised[rank] < shown.raised[shown.rank]:
            shown.others.add(rank)
            self._names_at = min(self._names_at, now + NAMES_PATIENCE)
            lines = [_line(t) for t in error.message if without_volatile(t) not in shown.message]
        else:
            self._name_others()
            raised = shown.raised if shown else Counter[int]()
            shown = self._errors[error.identity] = _Shown(rank, now, raised=raised)
            if len(self._errors) > _MOST_KNOWN:
                self._errors.popitem(last=False)
            # An error raised while another was handled may hide the reason.
            if error.is_a_sentence and _line(WHILE_HANDLING) not in lines:
                lines = [*map(_line, error.without_stack()), _WITH_STACK]
        shown.raised[rank] += 1
        shown.message.update(map(without_volatile, error.message))
        self._ranks[rank].show_lines(lines)

    def _name_others(self) -> None:
        """Names the ranks whose errors weren't shown, since another rank had raised the same."""
        self._names_at = math.inf
        for (kind, place, _), shown in self._errors.items():
            if shown.others:
                names, where = rank_names(sorted(shown.others)), f" at {place}" if place else ""
                self._say(
                    f"collective launch: {names} raised the same as rank {shown.rank}: "
                    f"{kind}{where}"[:_LONGEST_NOTE]
                )
                shown.others.clear()


class RankDigest:
    """Sorts the lines of one rank's stderr.

    Attributes:
        show: shows this rank's text; set by the owner of the rank's stream.
        end_time: when the message of the error that is held ends; infinity if none is held.
    """

    show: Callable[[bytes], None]

    def __init__(self, job: JobDigest, rank: int, on_cpu: bool) -> None:
        self._job = job
        self._rank = rank
        self._on_cpu = on_cpu
        self._in_line = False  # the last shown text is an unfinished line
        self._warning = ""  # the first line of the warning that the next line may belong to
        self._line_before = ""
        self._held = b""  # an error, and what follows it
        self._held_since = 0.0
        self.end_time = math.inf

    def take(self, data: bytes) -> None:
        """Takes text: segments that end in a newline or a carriage return; the last may not."""
        now = time.monotonic()
        self.end_message(now)
        if not self._held:
            data = self._sift(data, self._job.compares_errors)
            self._held_since = now
        if data:
            self._held += data
            self.end_time = min(now + PAUSE, self._held_since + LONGEST_MESSAGE)
            if len(self._held) > _MOST_BYTES_HELD:
                self.end_message(math.inf)

    def end_message(self, now: float) -> None:
        """Treats the error that is held as complete, if it is time."""
        if now < self.end_time:
            return
        lines = _LINES.findall(self._held)
        # An unfinished line, such as a prompt, is in no message.
        whole = lines if self._held.endswith(b"\n") else lines[:-1]
        errors = list(errors_in([_decoded(line) for line in whole]))
        latest = self._held_since + LONGEST_TRACEBACK
        if not errors and now < latest:
            self.end_time = latest
            return
        self._held, self.end_time = b"", math.inf
        position = 0
        for error in errors:
            self._sift(b"".join(lines[position : error.first]))
            self._job.add_error(self._rank, error, lines[error.first : error.end])
            position = error.end
        self._sift(b"".join(lines[position:]))

    def show_lines(self, lines: Sequence[bytes]) -> None:
        """Shows whole lines, beginning on a new line."""
        if lines and self._in_line:
            self._show_now(b"\n")
        self._show_now(b"".join(lines))

    def _sift(self, data: bytes, stops_at_errors: bool = False) -> bytes:
        """Shows text without what is left out. Returns what begins with an error, if asked to."""
        if not self._warning and not is_remarkable(data):
            self._show_now(data)
            return b""
        shown = bytearray()
        for match in _SEGMENTS.finditer(data):
            segment = match[0]
            if stops_at_errors and begins_error(_decoded(segment)):
                # A progress bar may be in the same line.
                head, _, _ = segment.rpartition(TRACEBACK.encode())
                self._show_now(bytes(shown) + head)
                self._warning = ""
                return data[match.start() + len(head) :]
            if self._is_to_show(segment):
                shown += segment
                self._in_line = not segment.endswith((b"\n", b"\r"))
        self._show_now(bytes(shown))
        return b""

    def _is_to_show(self, segment: bytes) -> bool:
        if self._in_line or not segment.endswith(b"\n"):
            self._warning = ""
            return True
        line = _decoded(segment)
        if begins_warning(line):
            self._warning = line
        elif not (self._warning and continues_warning(line, self._line_before)):
            self._warning = ""
            return not (self._on_cpu and is_noise(line))
        self._line_before = line
        if is_deprecation(self._warning):
            self._job.say_deprecations()
            return False
        return self._job.is_new(self._rank, self._warning, line)

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


def _is_echo_of_interrupt(error: RaisedError) -> bool:
    """Tells whether an error only says that its rank, or a peer, was told to stop."""
    return all(_is_interrupt(each) or message_lost_a_peer(each) for each in error.messages)


def _is_interrupt(message: Sequence[str]) -> bool:
    return message[0].startswith("KeyboardInterrupt")


def _decoded(segment: bytes) -> str:
    return segment.decode("utf-8", "surrogateescape").rstrip("\r\n")


def _line(text: str) -> bytes:
    return f"{text}\n".encode("utf-8", "surrogateescape")
