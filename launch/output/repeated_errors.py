"""Shows an error that several ranks raise once, with the numbers of these ranks.

Two ranks raise the same error if its class and the line of the script are the same. If their
messages differ, the lines that only another rank has are shown, too: no message is lost, only
stacks.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from collective.launch.output.raised_error import WHILE_HANDLING, RaisedError
from collective.launch.planning.rank_names import rank_names

# An error that a rank raises this many seconds after the others counts as a separate event.
_SAME_EVENT = 30.0
_MOST_KNOWN = 50
# How many lines of differing messages are shown; of each message at least one.
_MOST_DIFFERING_LINES = 200
_LONGEST_NOTE = 200
_WITH_STACK = "  (--verbose and --log-dir have the stack)"


@dataclass(frozen=True)
class RankError:
    """Holds an error as one rank wrote it, line by line.

    Attributes:
      before: what the rank wrote between the previous error and this one.
    """

    rank: int
    error: RaisedError
    lines: Sequence[str]
    before: bytes = b""


@dataclass(frozen=True)
class Passage:
    """Holds something to show.

    Attributes:
      note: the launcher's own words, if any.
      lines: then lines of a rank, if any.
      text: or text of a rank that belongs to no error.
    """

    note: str = ""
    rank: int = 0
    lines: Sequence[str] = ()
    text: bytes = b""


@dataclass
class _ShownError:
    rank: int
    shown_at: float
    ranks: set[int] = field(default_factory=set)
    message: set[str] = field(default_factory=set)


class RepeatedErrors:
    """Remembers the errors that were shown recently."""

    def __init__(self) -> None:
        self._shown: OrderedDict[tuple[str, str, bool], _ShownError] = OrderedDict()

    def passages(self, errors: Iterable[RankError], now: float) -> list[Passage]:
        """Returns what to show of errors that came at about the same time, in each rank's order.

        An error that a rank raises several times is shown as often.
        """
        groups: dict[tuple[tuple[str, str, bool], int], list[RankError]] = {}
        occurrences: Counter[tuple[int, tuple[str, str, bool]]] = Counter()
        for rank_error in sorted(errors, key=lambda one: one.rank):
            identity = rank_error.error.identity
            occurrences[rank_error.rank, identity] += 1
            number = occurrences[rank_error.rank, identity]
            groups.setdefault((identity, number), []).append(rank_error)
        passages = []
        for (identity, _), members in groups.items():
            for member in members:
                if member.before:
                    passages.append(Passage(rank=member.rank, text=member.before))
            passages += self._of_group(identity, members, now)
        return passages

    def _of_group(
        self, key: tuple[str, str, bool], members: Sequence[RankError], now: float
    ) -> list[Passage]:
        ranks = sorted({member.rank for member in members})
        names = rank_names(ranks)
        shown = self._shown.get(key)
        if shown and not shown.ranks.intersection(ranks) and now - shown.shown_at < _SAME_EVENT:
            own_line = members[0].error.chain[-1][:_LONGEST_NOTE]
            passages = [Passage(f"{names}: the error of rank {shown.rank}, too: {own_line}")]
        else:
            first = members[0]
            shown = _ShownError(first.rank, now, message=set(first.error.essence()))
            self._remember(key, shown)
            note = f"on {names} alike; rank {first.rank} wrote:" if len(ranks) > 1 else ""
            passages = [Passage(note, first.rank, _lines_of(first))]
        shown.ranks.update(ranks)
        return passages + _differing_messages(members, shown.message)

    def _remember(self, key: tuple[str, str, bool], shown: _ShownError) -> None:
        self._shown[key] = shown
        self._shown.move_to_end(key)
        if len(self._shown) > _MOST_KNOWN:
            self._shown.popitem(last=False)


def _lines_of(first: RankError) -> Sequence[str]:
    """Returns an error as it is shown: without its stacks if its message says everything."""
    # An error raised while another was handled may hide the reason.
    if not first.error.is_a_sentence or WHILE_HANDLING in first.lines:
        return first.lines
    return [*first.error.without_stack(), _WITH_STACK]


def _differing_messages(members: Sequence[RankError], known: set[str]) -> list[Passage]:
    """Returns the lines of messages that aren't in `known` yet, and adds them to it."""
    ranks_by_lines: dict[tuple[str, ...], list[int]] = {}
    for member in members:
        lines = tuple(line for line in member.error.essence() if line not in known)
        if lines:
            ranks_by_lines.setdefault(lines, []).append(member.rank)
    passages = []
    budget = _MOST_DIFFERING_LINES
    for number, (lines, ranks) in enumerate(ranks_by_lines.items()):
        known.update(lines)
        note = f"{rank_names(ranks)} wrote instead:" if len(ranks) > 1 else ""
        most = max(1, budget // (len(ranks_by_lines) - number))
        shown = list(lines[:most])
        budget -= len(shown)
        if len(lines) > most:
            shown[-1] += f" ... ({len(lines) - most} more lines; --verbose and --log-dir have all)"
        passages.append(Passage(note, ranks[0], shown))
    return passages
