"""An error of Python in a rank's stderr: the exception, its message, and where it was raised.

Traceback (most recent call last):
  File "train.py", line 9, in <module>                    the script's own last frame: the place
    session.run(train_op)
  File ".../tensorflow/python/client/session.py", ...     a library's frame
...InvalidArgumentError: indices[0] = 9 is not in ...     the exception's own line, and with it
                                                          the message, to the next line of a log
Original stack trace for 'lookup':
  File "train.py", line 5, in <module>                    again: the script's own last frame
  File ".../tensorflow/python/ops/...", ...
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from collective.launch.output.stderr_lines import is_log_line

TRACEBACK = "Traceback (most recent call last):"
WHILE_HANDLING = "During handling of the above exception, another exception occurred:"
_CHAINED = (
    WHILE_HANDLING,
    "The above exception was the direct cause of the following exception:",
)
# Introduces a traceback that isn't the end of the program.
_ASIDE = re.compile(
    r"Exception ignored in|Exception in thread |Error in (?:atexit|sys)\.\w+:$|Process \S+-\d+:$"
)
_FATAL = re.compile(r"Fatal Python error: ")
# TensorFlow marks the functions that it has copied with asterisks.
_FRAME = re.compile(r'\s*File "([^"]*)", line (\d+)(?:, in (.*?)(?:  \*{1,2})?)?$')
_LIBRARY = re.compile(
    r"/(?:site|dist)-packages/|/lib/python\d[^/]*/|^<(?!stdin|string)"
    # TensorFlow's copy of a function, in a file with a random name that is deleted at the end.
    r"|/__autograph_generated_file"
)
# An error in a function that TensorFlow has copied begins so; its stack follows.
_IN_COPIED_CODE = re.compile(r"\S+: in user code:$")
_PACKAGE = f"{Path(__file__).parents[2]}/"
# A class of this library, whose messages say what is wrong and what to do.
_OWN_ERROR = re.compile(r"collective(?:\.\w+)+: \S")
# The errors of the second rank that makes, moves or removes the same file.
_THERE_ALREADY = re.compile(
    r"FileExistsError: |OSError: \[Errno (?:17|39)\] |shutil\.Error: .*already exists"
    r"|tensorflow\.\S*\.AlreadyExistsError: (?!Resource)"
)
_GONE_ALREADY = re.compile(r"FileNotFoundError: |tensorflow\.\S*\.NotFoundError: ")
_REMOVES = re.compile(
    r"\b(?:rmtree|rmdir|remove|unlink|rename|replace|move|DeleteRecursively|Remove|Rename)\("
)
# The errors of a script written for other versions of Python or of packages. The frameworks that
# `--as` can replace may be missing for no other reason than that.
_FRAMEWORKS = "tensorflow|horovod|hybridbackend|sparse_operation_kit|collective"
_OF_OTHER_VERSIONS = re.compile(
    r"(?:Name|UnboundLocal|Syntax|Indentation|Tab)Error: "
    rf"|(?:ModuleNotFound|Import)Error: (?!.*'(?:{_FRAMEWORKS})\b|.*needs Horovod itself)"
    rf"|AttributeError: module '(?!(?:{_FRAMEWORKS})\b)[\w.]+' has no attribute "
)
_NO_HOROVOD = re.compile(r"ModuleNotFoundError: No module named 'horovod['.]")
_REPEATED = re.compile(r"  \[Previous line repeated ")
_PLACE = "  at "
# Introduces a stack within a message: of the operation that failed, or of its Python function.
_HEADING = re.compile(
    r"Original stack trace for |Original op created by |Traceback \(most recent call last\):$"
    r"|Detected at node .* defined at \(most recent call last\):$"
)
# Words of TensorFlow that say nothing about the error.
_EMPTY_WORDS = re.compile(
    r"Node: '|\d+ successful operations\.$|\d+ derived errors ignored\.$"
    r"|Hint: If you want to see a list of allocated tensors when OOM happens"
)


@dataclass(frozen=True)
class RaisedError:
    """Describes one error.

    Attributes:
        first, own, end: line numbers in the text that was read: the error's first line, the
            exception's own line, and the line after the error's last.
        is_aside: whether it was reported in passing, for a thread or a destructor.
        chain: the own lines of all its exceptions, causes first.
        messages: for each exception of the chain, its own line and all that follows it.
        message: the exception's own line and what follows; of stack frames only the script's own.
        place: the script's own last frame, "" if there is none.
    """

    first: int
    own: int
    end: int
    is_aside: bool
    chain: tuple[str, ...]
    messages: tuple[tuple[str, ...], ...]
    message: tuple[str, ...]
    place: str

    @property
    def identity(self) -> tuple[str, str, bool]:
        """Returns class and place: the same on ranks that raise the same error."""
        return self.chain[-1].partition(":")[0], self.place, self.is_aside

    @property
    def is_a_sentence(self) -> bool:
        """Tells whether the message says all: this library raised it for an error it caught."""
        return _OWN_ERROR.match(self.chain[-1]) is not None and not self.is_aside

    @property
    def lacks_horovod(self) -> bool:
        """Tells whether the program imports Horovod but Horovod isn't installed."""
        return _NO_HOROVOD.search(self.chain[-1]) is not None

    def without_stack(self) -> list[str]:
        """Returns the message, and where in the script it was raised."""
        return [*self.message, f"{_PLACE}{self.place}"] if self.place else list(self.message)


def tells_of_shared_files(error: RaisedError) -> bool:
    """Tells whether an error is typical of ranks that handle the same files at the same time."""
    own = error.chain[-1]
    if _GONE_ALREADY.match(own):
        return _REMOVES.search(error.place) is not None
    return _THERE_ALREADY.match(own) is not None


def tells_of_other_versions(error: RaisedError) -> bool:
    """Tells whether a script has used something that this Python, or a package, doesn't have."""
    return _OF_OTHER_VERSIONS.match(error.chain[-1]) is not None


def begins_error(line: str) -> bool:
    # The text before it, such as a progress bar, may lack its end.
    return line.endswith(TRACEBACK) or _ASIDE.match(line) is not None


def errors_in(lines: Sequence[str]) -> Iterator[RaisedError]:
    """Yields the errors in lines of stderr, in their order."""
    position = 0
    while position < len(lines):
        error = _error_at(lines, position) if begins_error(lines[position]) else None
        if error is not None:
            yield error
        position = error.end if error else position + 1


def last_error(lines: Sequence[str]) -> RaisedError | None:
    """Returns the error that ended a program, if the lines show one."""
    errors = list(errors_in(lines))
    for error in reversed(errors):
        if not error.is_aside:
            return error
    return errors[-1] if errors else None


def fatal_line(lines: Sequence[str]) -> int | None:
    """Returns the last line in which the interpreter reports a crash."""
    for number in reversed(range(len(lines))):
        if _FATAL.match(lines[number]):
            return number
    return None


def _error_at(lines: Sequence[str], first: int) -> RaisedError | None:
    """Reads the error that begins at a line; None if the exception's own line is missing."""
    position = first
    is_aside = not lines[position].endswith(TRACEBACK)
    if is_aside:
        position += 1
    chain, messages = [], []
    while True:
        if position >= len(lines) or not lines[position].endswith(TRACEBACK):
            return None
        position += 1
        frames = position
        while position < len(lines) and _is_of_stack(lines[position]):
            position += 1
        if position == len(lines):
            return None
        own = position
        chain.append(lines[own])
        end = _message_end(lines, own)
        messages.append(tuple(lines[own:end]))
        if end < len(lines) and lines[end] in _CHAINED:
            following = end + 1
            while following < len(lines) and not lines[following]:
                following += 1
            if following < len(lines) and lines[following] == TRACEBACK:
                position = following
                continue
        break
    message = tuple(lines_without_frames(lines[own:end]))
    places = _places(lines_without_frames(lines[frames:own]))
    if _IN_COPIED_CODE.match(lines[own]):
        places += _places(message)[:1]
    return RaisedError(
        first,
        own,
        end,
        is_aside,
        tuple(chain),
        tuple(messages),
        message,
        places[-1] if places else "",
    )


def _is_of_stack(line: str) -> bool:
    """Tells whether a line belongs to a stack, or was written into one by another thread."""
    return not line or line[0] in " \t" or is_log_line(line)


def _places(lines: Iterable[str]) -> list[str]:
    return [line[len(_PLACE) :] for line in lines if line.startswith(_PLACE)]


def _message_end(lines: Sequence[str], own: int) -> int:
    """Returns the line after a message; messages have no end mark."""
    for number in range(own + 1, len(lines)):
        line = lines[number]
        # TensorFlow puts the traceback of a Python function into the message, with empty lines.
        quoted = line == TRACEBACK and lines[number + 1 : number + 2] == [""]
        if quoted:
            continue
        if line in _CHAINED or begins_error(line) or is_log_line(line):
            return number
    return len(lines)


def lines_without_frames(lines: Sequence[str]) -> Iterator[str]:
    """Yields the nonempty lines, and of each stack only the script's own last frame."""
    heading = ""  # the heading of the stack that follows; ignored without a frame
    place = ""
    shown: set[str] = set()
    code_indent = 0  # the indent of the code below a frame; 0 outside of a stack
    lacks_code = False
    for line in lines:
        frame = _FRAME.match(line)
        indent = len(line) - len(line.lstrip())
        if frame:
            code_indent = indent + 1
            lacks_code = is_of_script(frame[1])
            if lacks_code:
                place = f"{_PLACE}{frame[1]}, line {frame[2]}"
                place += f", in {frame[3]}" if frame[3] else ""
        elif not line.strip():
            code_indent = 0
        elif code_indent and indent >= code_indent:
            if lacks_code and line.strip(" ^~"):
                place += f": {line.strip()}"
                lacks_code = False
        elif not _REPEATED.match(line):
            yield from _stack_summary(heading, place, shown)
            code_indent, heading, place = 0, "", ""
            if _HEADING.match(line):
                heading = line
            elif not _EMPTY_WORDS.match(line):
                yield line
    yield from _stack_summary(heading, place, shown)


def _stack_summary(heading: str, place: str, shown: set[str]) -> list[str]:
    """Returns the lines that replace a stack; none if its place was shown before."""
    if not place or place in shown:
        return []
    shown.add(place)
    return [heading, place] if heading else [place]


def is_of_script(file: str) -> bool:
    """Tells whether a frame's file is the user's, not a library's and not this package's."""
    return not _LIBRARY.search(file) and not file.startswith(_PACKAGE)
