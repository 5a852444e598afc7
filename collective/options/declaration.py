"""Declares options: each has its name, type, default, values and text in one place, a field.

    @options_class
    class ExchangeOptions(Options):
        grouping: bool = option(True, one_of(True, False), "Whether lookups share exchanges.")

The check of values, the keywords of the method that takes the options (`methods.takes`) and its
documentation follow from the fields.
"""

from __future__ import annotations

import dataclasses
import textwrap
from typing import TYPE_CHECKING, Any, Callable, ClassVar, TypeVar

if TYPE_CHECKING:
    from typing_extensions import dataclass_transform

Value = TypeVar("Value")
Class = TypeVar("Class")

# The default of an option of a method: what is in force around the call.
INHERIT: Any = type("Inherit", (), {"__repr__": lambda self: "<inherited>"})()
_COLUMNS = 88


@dataclasses.dataclass(frozen=True)
class Rule:
    """Says which values an option takes.

    Attributes:
        words: the values in words, for the message that refuses another one.
        holds: tells whether the option takes a value.
    """

    words: str
    holds: Callable[[Any], bool]


def one_of(*values: Any) -> Rule:
    """Returns the rule of an option that takes only these values."""
    return Rule(" or ".join(map(repr, values)), lambda value: value in values)


def whole_from(least: int, words: str) -> Rule:
    """Returns the rule of an option that takes a whole number, from `least`."""
    return Rule(words, lambda value: is_whole(value) and value >= least)


def is_whole(value: Any) -> bool:
    """Tells whether a value is an integer, but not True or False."""
    return isinstance(value, int) and not isinstance(value, bool)


def option(default: Value, rule: Rule, text: str) -> Value:
    """Declares an option, a field of an `options_class`.

    Args:
        default: its value where nothing sets it.
        rule: the values that it takes.
        text: what it does. The documentation adds the name and the default.
    """
    return dataclasses.field(default=default, metadata={"rule": rule, "text": text})


if TYPE_CHECKING:

    @dataclass_transform(kw_only_default=True, frozen_default=True)
    def options_class(declared: type[Class]) -> type[Class]: ...

else:
    # Python 3.9's dataclasses can't be told that fields are keywords; type checkers can.
    options_class = dataclasses.dataclass(frozen=True)


class Options:
    """Is the base of classes of options, which check their values when they are made.

    Attributes:
        METHOD: the method that takes the options, for messages.

    Raises:
        ValueError: an option has a value that it can't have.
    """

    METHOD: ClassVar[str]

    def __post_init__(self) -> None:
        for name, field in fields(type(self)).items():
            value, rule = getattr(self, name), field.metadata["rule"]
            if not rule.holds(value):
                raise ValueError(f"{self.METHOD}({name}=…) is {rule.words}, not {value!r}.")


def fields(options: Any) -> dict[str, dataclasses.Field[Any]]:
    """Returns the fields of an options class by their names."""
    return {field.name: field for field in dataclasses.fields(options)}


def names(options: type) -> list[str]:
    """Returns the names of the options that an options class has."""
    return list(fields(options))


def given(**options: Any) -> dict[str, Any]:
    """Returns the options that were given, without those that are inherited."""
    return {name: value for name, value in options.items() if value is not INHERIT}


def documentation(options: type) -> str:
    """Returns the part of a docstring that documents all options, one section for each group.

    A group is a class that `options` derives from. Its docstring is the section's first line.
    """
    sections = []
    for group in reversed(options.__mro__):
        own = [name for name in fields(options) if name in vars(group).get("__annotations__", ())]
        if own:
            items = [_item(name, fields(options)[name]) for name in own]
            sections.append("\n".join([f"{group.__doc__}\n\nArgs:", *items]))
    return "\n\n".join(sections)


def _item(name: str, field: dataclasses.Field[Any]) -> str:
    """Returns an option's entry in a list of arguments."""
    text = f"{name} (default {field.default!r}): {field.metadata['text']}"
    return textwrap.fill(
        " ".join(text.split()),
        _COLUMNS,
        initial_indent=" " * 4,
        subsequent_indent=" " * 8,
        break_long_words=False,
        break_on_hyphens=False,
    )
