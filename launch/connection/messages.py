"""The messages between launchers: JSON objects of known kinds, each with exactly its fields.

A participating launcher is trusted with its own ranks, not with another launcher's memory or time:
numbers, lists and texts are bounded. The receiver refuses a rank that isn't the sender's own.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from collective.launch.connection.frames import Refused

Message = Mapping[str, Any]
_MOST_NUMBER = 1 << 63
_MOST_ITEMS = 1 << 16
_MOST_SECONDS = 1e11  # since 1970; a calendar can show it


def _number(value: object) -> bool:
    return type(value) is int and -_MOST_NUMBER <= value < _MOST_NUMBER


def _time(value: object) -> bool:
    """Tells whether a clock may show this: a wrong clock is no reason to refuse a host."""
    return type(value) in (int, float) and abs(value) < _MOST_SECONDS  # type: ignore[arg-type]


def _text(value: object) -> bool:
    return isinstance(value, str)


def _flag(value: object) -> bool:
    return isinstance(value, bool)


def _texts(value: object) -> bool:
    return isinstance(value, list) and len(value) <= _MOST_ITEMS and all(map(_text, value))


def _devices(value: object) -> bool:
    return (
        isinstance(value, list)
        and len(value) <= _MOST_ITEMS
        and all(device is None or _text(device) for device in value)
    )


def _numbers(value: object) -> bool:
    return isinstance(value, list) and len(value) <= _MOST_ITEMS and all(map(_number, value))


def _hosts(value: object) -> bool:
    return isinstance(value, list) and all(
        isinstance(host, dict)
        and set(host) == {"name", "devices"}
        and _text(host["name"])
        and _devices(host["devices"])
        for host in value
    )


_PROGRESS = {"rank": _number, "pid": _number, "phase": _number, "passed": _number}
_MILESTONES = {"rank": _number, "pid": _number, "steps": _number, "start": _number}
_KINDS: Mapping[str, Mapping[str, Callable[[object], bool]]] = {
    # from each host to the first one
    "join": {
        "version": _text,
        "node": _number,
        "nodes": _number,
        "host": _text,
        "devices": _devices,
    },
    "declined": {
        "version": _text,
        "node": _number,
        "nodes": _number,
        "host": _text,
        "reason": _text,
    },
    "exited": {
        "rank": _number,
        "pid": _number,
        "code": _number,
        "time": _time,
        "words": _texts,
        "source": _text,
    },
    "output": {"rank": _number, "error": _flag, "data": _text},
    "progress": {
        **_PROGRESS,
        "since": _number,
        "clock": _number,
        "doing": _text,
        "collectives": _text,
    },
    "milestones": {**_MILESTONES, "checkpoint": _text, "step": _number},
    "trouble": {"text": _text},
    "unable": {"reason": _text},
    "stopped": {"number": _number},
    "done": {},
    # from the first host to each
    "refused": {"reason": _text},
    "world": {"hosts": _hosts, "node": _number},
    "start": {"attempt": _number, "restarts": _number, "shown": _numbers, "watched": _flag},
    "signal": {"number": _number, "groups": _flag},
    "ending": {},
    "room": {"bytes": _number},
    "say": {"text": _text},
    "over": {"code": _number},
    # both ways
    "alive": {},
    "put": {"attempt": _number, "scope": _text, "key": _text, "value": _text},
    "leave": {"attempt": _number, "scope": _text, "key": _text},
}


def encode(kind: str, fields: Message) -> bytes:
    """Returns the message as bytes."""
    return json.dumps({"kind": kind, **fields}, separators=(",", ":")).encode()


def decode(payload: bytes) -> Message:
    """Returns the message in a payload, checked.

    Raises:
        Refused: the payload isn't a message.
    """
    try:
        message = json.loads(payload.decode("utf-8"))
    except (ValueError, RecursionError):
        raise Refused("a message that is no JSON") from None
    if not isinstance(message, dict):
        raise Refused("a message that is no object")
    kind = message.get("kind")
    fields = _KINDS.get(kind) if isinstance(kind, str) else None
    if fields is None:
        raise Refused("a message of an unknown kind")
    if set(message) != {"kind", *fields}:
        raise Refused(f"a message {kind!r} without its fields, or with others")
    for name, check in fields.items():
        if not check(message[name]):
            raise Refused(f"a message {kind!r} with a wrong {name!r}")
    return message
