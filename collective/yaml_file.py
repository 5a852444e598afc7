"""Reads YAML files into pydantic models; an error names the file, the line and the key."""

from __future__ import annotations

import dataclasses
import difflib
import os
import re
import reprlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeVar, get_args

import pydantic
import yaml

Model = TypeVar("Model", bound="StrictModel")
Place = tuple[Any, ...]  # the keys that lead to a value, from the top of a file


class StrictModel(pydantic.BaseModel):
    """Is the base of models of files: no unknown key, no conversion of types, no change later."""

    model_config = pydantic.ConfigDict(strict=True, extra="forbid", frozen=True)


class FileError(ValueError):
    """Says what is wrong in a file, one line for each error: file, line, key, and what to do."""


class Contradictions(ValueError):
    """Says which keys of a model contradict each other; its validator raises it.

    Attributes:
        found: a place and a sentence for each. An empty place is the model itself.
    """

    def __init__(self, found: Sequence[tuple[Place, str]]):
        super().__init__("\n".join(f"{_dotted(place)}: {text}" for place, text in found))
        self.found = found


@dataclasses.dataclass(frozen=True)
class Change:
    """Puts a value in the place of a file's, before the file is checked.

    Attributes:
        place: the keys that lead to the value; those that aren't there are made.
        value: the value.
        source: who says so, for messages: `--set slots=2`.
    """

    place: tuple[str, ...]
    value: Any
    source: str


def load(path: str | os.PathLike[str], model: type[Model], changes: Sequence[Change] = ()) -> Model:
    """Reads a file.

    Args:
        path: of a YAML file, in UTF-8.
        model: what is in it.
        changes: made in this order before the file is checked.

    Raises:
        OSError: there is no such file, or it can't be read.
        FileError: it is no YAML, or isn't what the model describes. All errors are listed.
    """
    with open(path, "rb") as file:
        data = file.read()
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise FileError(f"{os.fspath(path)}, line {line}: the text isn't in UTF-8.") from None
    return parse(text, os.fspath(path), model, changes)


def parse(text: str, name: str, model: type[Model], changes: Sequence[Change] = ()) -> Model:
    """Reads the text of a file.

    Args:
        text: YAML.
        name: the file's name, for messages.
        model: what is in it.
        changes: made in this order before the file is checked.

    Raises:
        FileError: as for `load`.
    """
    root, value = _read(text, name)
    for change in changes:
        value = _changed(value, change, name)
    try:
        return model.model_validate(value)
    except pydantic.ValidationError as error:
        lines = [
            _printable(f"{_where(name, root, place, changes)}: {_dotted(place)}{text}")
            for place, text in _messages(error, model)
        ]
        raise FileError("\n".join(lines)) from None


def value_of(text: str, name: str) -> Any:
    """Returns what a text of YAML stands for: a number, a list, keys with values.

    Args:
        text: YAML.
        name: what it is called in messages.

    Raises:
        FileError: it is no YAML.
    """
    return _read(text, name)[1]


def _read(text: str, name: str) -> tuple[Any, Any]:
    """Returns a document's node, which has its lines, and its value."""
    try:
        return _parsed(text)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        what = " ".join(filter(None, (error.context, error.problem)))
        line = mark.line + 1 if mark else 1
        raise FileError(_printable(f"{name}, line {line}: {what}.")) from None
    except yaml.YAMLError as error:
        raise FileError(_printable(f"{name}: {' '.join(str(error).split())}.")) from None
    except RecursionError:
        raise FileError(f"{name}: its values are nested too deeply.") from None
    except (ValueError, OverflowError) as error:  # of a date or a number that there can't be
        raise FileError(f"{name}: {error}.") from None


def _changed(value: Any, change: Change, name: str) -> Any:
    """Returns a file's value with a change in it."""
    key, *rest = change.place
    if not isinstance(value, dict) and value is not None:
        raise FileError(
            f"{change.source}: {name} has {_shown(value)} where '{key}' would be a key of it."
        )
    inner = change.value
    if rest:
        below = dataclasses.replace(change, place=tuple(rest))
        inner = _changed((value or {}).get(key), below, name)
    return {**(value or {}), key: inner}


def _where(name: str, root: Any, place: Place, changes: Sequence[Change]) -> str:
    """Says who gives the value of a place: a line of the file, or the last change of it."""
    for change in reversed(changes):
        if tuple(map(str, place[: len(change.place)])) == change.place:
            return change.source
    return f"{name}, line {_line(root, place)}"


class _Loader(yaml.SafeLoader):
    """Reads YAML as SafeLoader does, but keys are text, and none occurs twice; 1e-3 is a number.

    So a slot may be called `on` or `7`, as in YAML 1.2, whose numbers need no point either.
    """

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key, _ in node.value if isinstance(node, yaml.MappingNode) else ():
            if isinstance(key, yaml.ScalarNode) and key.tag != "tag:yaml.org,2002:merge":
                if key.value in seen:
                    raise yaml.constructor.ConstructorError(
                        None, None, f"the key '{key.value}' occurs twice", key.start_mark
                    )
                seen.add(key.value)
                key.tag = "tag:yaml.org,2002:str"
        return super().construct_mapping(node, deep)


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?[0-9]+[eE][-+]?[0-9]+\Z"), list("-+0123456789")
)


def _parsed(text: str) -> tuple[Any, Any]:
    """Returns a document's node, which has its lines, and its value."""
    loader = _Loader(text)
    try:
        root = loader.get_single_node()
        return root, None if root is None else loader.construct_document(root)
    finally:
        loader.dispose()


def _messages(
    error: pydantic.ValidationError, model: type[StrictModel]
) -> Iterator[tuple[Place, str]]:
    """Yields the place and the text of each error."""
    for each in error.errors(include_url=False):
        place = each["loc"]
        cause = each.get("ctx", {}).get("error")
        if isinstance(cause, Contradictions):
            for inner, text in cause.found:
                yield place + inner, f": {text}"
        elif each["type"] == "extra_forbidden":
            yield place, _unknown(place, model)
        elif each["type"] == "missing":
            yield place, ": this key is missing."
        elif each["type"] in ("model_type", "dict_type") or (
            each["type"] == "too_short" and each["input"] == {}
        ):
            yield place, f": keys with values belong here, not {_shown(each['input'])}."
        else:
            text = each["msg"].removeprefix("Input ").removeprefix("Value error, ")
            yield place, f": it {text}, not {_shown(each['input'])}."


def _unknown(place: Place, model: type[StrictModel]) -> str:
    """Says what is known where a key is not."""
    owner: Any = model
    for key in place[:-1]:
        if hasattr(owner, "model_fields"):
            fields = (f for name, f in owner.model_fields.items() if key in _spellings(name, f))
            owner = next(fields).annotation
        else:  # a dict of models
            owner = get_args(owner)[-1]
    key = place[-1]
    for name, field in owner.model_fields.items():
        if key in _spellings(name, field):
            return f": it is another spelling of '{name}', which is there, too. Leave one out."
    known = list(owner.model_fields)
    return f": there is no such key.{nearest(key, known)} The keys here are {', '.join(known)}."


def _spellings(name: str, field: Any) -> Sequence[Any]:
    alias = field.validation_alias
    return alias.choices if isinstance(alias, pydantic.AliasChoices) else (name,)


def nearest(name: Any, known: Iterable[str]) -> str:
    """Asks whether the most similar name was meant, or returns ''; a space comes first."""
    found = difflib.get_close_matches(str(name), list(known), 1)
    return f" Did you mean '{found[0]}'?" if found else ""


def _line(root: Any, place: Place) -> int:
    """Returns the line of a key, or of the last one on the way to it that is there."""
    node, line = root, 0 if root is None else root.start_mark.line
    for key in place:
        if isinstance(node, yaml.SequenceNode) and isinstance(key, int) and key < len(node.value):
            node = node.value[key]
            line = node.start_mark.line
            continue
        if not isinstance(node, yaml.MappingNode):
            break
        found = [pair for pair in node.value if getattr(pair[0], "value", None) == str(key)]
        if not found:
            break
        line, node = found[0][0].start_mark.line, found[0][1]
    return int(line) + 1


def _dotted(place: Place) -> str:
    return ".".join(map(str, place)) if place else "the file"


def _printable(text: str) -> str:
    """Returns one line, however odd a file's characters are."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def _shown(value: Any) -> str:
    """Returns a short form of a value, however large it is."""
    return "nothing" if value is None else reprlib.repr(value)
