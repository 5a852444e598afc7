"""Classifies the lines that Python and TensorFlow write to stderr by how they begin."""

from __future__ import annotations

import re
from collections.abc import Sequence

# TensorFlow 2.15 registers plugins twice; without a GPU it never uses them. Newer ones look for a
# GPU, and what they log before their log is set up ignores TF_CPP_MIN_LOG_LEVEL.
_NOISE = re.compile(
    r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d+: E external/local_xla/xla/stream_executor/cuda/"
    r"cuda_(?:dnn|fft|blas)\.cc:\d+\] Unable to register (cuDNN|cuFFT|cuBLAS) factory: "
    r"Attempting to register factory for plugin \1 when one has already been registered"
    r"|WARNING: All log messages before absl::InitializeLog\(\) is called are written to STDERR"
    r"|I0000 00:00:\d+\.\d+ +\d+ \S+:\d+\] .*"
    r"|E0000 00:00:\d+\.\d+ +\d+ cuda_platform\.cc:\d+\] failed call to cuInit: .*"
)
_WARNING = re.compile(
    # warnings.warn
    r"\S.*:\d+: \w*Warning: "
    # logging, as TensorFlow and logging.basicConfig() set it up
    r"|WARNING:[\w.]+:"
    # absl
    r"|W\d{4} \d\d:\d\d:\d\d\.\d+ +\d+ \S+:\d+\] "
    # TensorFlow's C++
    r"|\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d+: W \S+:\d+\] "
)
# About a function that the program calls; a TensorFlow that is installed won't lose it.
_DEPRECATION = re.compile(
    r"(?:WARNING:tensorflow:|W\d{4} \S+ +\d+ \S+:\d+\] )From .+ is deprecated"
)
_INSTRUCTIONS = "Instructions for updating:"
# A line of a log; it isn't part of an exception's message.
_LOG_LINE = re.compile(
    r"\[?\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d|[IWEF]\d{4} \d\d:\d\d:\d\d\.\d"
    r"|(?:DEBUG|INFO|WARNING|ERROR|CRITICAL):[\w.]+:"
)
# A line of Horovod's own log.
_HOROVODS = re.compile(r"\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d+: [A-Z] \S+:\d+\] \[\d+\]: ")
# Parts that differ on every rank and in every run.
_VOLATILE = re.compile(
    r"\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d(?:[.,]\d+)?"
    r"|(?<=^[IWEF])\d{4} \d\d:\d\d:\d\d\.\d+ +\d+"
    r"|0x[0-9a-f]+"
)
# Finds the rank that is to blame, as far as it is known.
_LOST_RANK = re.compile(
    r"lost rank (\d+), which has (?:ended|given up a run that failed or timed out there), while '"
    r"|A rank failed\. .*?Rank (\d+): left its session with "
    r"|RankError(?:: |\(['\"]).* failed on rank (\d+)"
)
_LOST_A_PEER = re.compile(
    r"Horovod has been shut down|HorovodInternalError|gloo/transport/"
    rf"|{_LOST_RANK.pattern}"
    r"|rank \d+ has aborted NCCL's communicator, while '"
    r"|says 'remote process exited or there was a network error'"
    r"|A rank failed\. Rank 0: |RankError: A rank failed"
    r"|rank \d+(?:, \d+)* (?:has left|is at the end of) the session: the step ends on all ranks"
)
# TensorFlow may say only after an error's own line that a peer was lost.
_MAY_LOSE_A_PEER = re.compile(r"[\w.]*\.errors_impl\.(?:Unknown|Aborted|Cancelled|Internal)Error: ")
# A piece of output without any of these needs no closer look.
_REMARKABLE = (
    b"Unable to register",
    b"0000 00:00:",
    b"Warning: ",
    b"WARNING:",
    b": W ",
    b"\nW",
    b"Traceback",
    b"Exception ",
    b"Error in",
    b"Process ",
)
# An unfinished line that may become noise: it begins with a year or as absl's lines do, as far as
# it goes.
_NOISE_START = re.compile(rb"\d{1,4}$|\d{4}-|[IE]0{0,3}$|[IE]0000|WARNING: All")


def is_noise(line: str) -> bool:
    """Tells whether a line means nothing to a rank without a GPU."""
    return _NOISE.fullmatch(line) is not None


def begins_warning(line: str) -> bool:
    return _WARNING.match(line) is not None


def continues_warning(line: str, before: str) -> bool:
    """Tells whether a line belongs to the warning whose last line is `before`."""
    if not line:
        return is_deprecation(before)
    return line.startswith((" ", "\t", _INSTRUCTIONS)) or before == _INSTRUCTIONS


def is_deprecation(line: str) -> bool:
    """Tells whether TensorFlow warns that another release may lack a function."""
    return _DEPRECATION.match(line) is not None


def is_log_line(line: str) -> bool:
    return _LOG_LINE.match(line) is not None or begins_warning(line)


def is_horovods(line: str) -> bool:
    """Tells whether a line comes from Horovod's log, into which its threads write."""
    return _HOROVODS.match(line) is not None


def lost_a_peer(line: str) -> bool:
    """Tells whether a rank says that it failed because of another."""
    return _LOST_A_PEER.search(line) is not None


def lost_rank(line: str) -> int | None:
    """Returns the lost rank, if a line names it as the reason for a failure."""
    found = _LOST_RANK.search(line)
    return int(found[found.lastindex or 0]) if found else None


def message_lost_a_peer(message: Sequence[str]) -> bool:
    """Tells whether an exception was raised because of another rank.

    Args:
        message: the exception's own line, and what was written after it by any thread.
    """
    own_line = message[0]
    if _MAY_LOSE_A_PEER.match(own_line):
        return any(map(lost_a_peer, message))
    return lost_a_peer(own_line)


def without_volatile(line: str) -> str:
    """Returns a line without times, thread ids and addresses, to compare ranks by it."""
    return _VOLATILE.sub("*", line)


def is_remarkable(data: bytes) -> bool:
    """Tells whether output may hold noise, a warning or an error."""
    return data.startswith(b"W") or any(words in data for words in _REMARKABLE)


def may_begin_noise(partial_line: bytes | bytearray) -> bool:
    """Tells whether an unfinished line may become noise."""
    return _NOISE_START.match(partial_line) is not None
