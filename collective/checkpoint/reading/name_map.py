"""Maps the names of variables in one checkpoint to their names in another model."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable, Mapping
from typing import Any, Callable, Union

NAMES = Union[Mapping[str, Union[str, None]], Callable[[str], Union[str, None]], None]


class NameMap:
    """Renames variables by a mapping from old names to new ones.

    An old name may have one `*`, which stands for any text, and for the same text in the new name:
    'tower/*' to 'dnn/*'. An exact name takes precedence over patterns, and a pattern over those
    that follow it. A name that nothing matches stays. None, or '', as a new name leaves the
    variable out. An optimizer's slots follow their variable.

    Args:
        names: {old: new}; or a function from an old name to a new one, or to None; or None, which
            renames nothing.
        origin: says where the names were given, for messages.

    Raises:
        ValueError: a name has more than one `*`, or only the new one has one.
    """

    def __init__(self, names: NAMES = None, origin: str = "names"):
        self._function = names if callable(names) else None
        self._rules: dict[str, str | None] = {}
        self._matched: set[str] = set()
        self._origin = origin
        if isinstance(names, Mapping):
            for old, new in names.items():
                self._add(old, new)
        elif names is not None and self._function is None:
            raise ValueError(
                f"{origin}: a mapping of old names to new ones, or a function, not {names!r}."
            )

    def _add(self, old: Any, new: Any) -> None:
        if not isinstance(old, str) or not (new is None or isinstance(new, str)):
            raise ValueError(f"{self._origin}: names are strings, not {old!r} = {new!r}.")
        if old.count("*") > 1 or (new or "").count("*") > old.count("*"):
            raise ValueError(
                f"{self._origin}: '{old} = {new}': an old name may have one *; the new name "
                "then has at most one."
            )
        self._rules[old] = new or None

    def __bool__(self) -> bool:
        """Tells whether any name may change."""
        return bool(self._rules) or self._function is not None

    def rename(self, name: str, owner: str | None = None) -> str | None:
        """Returns the new name of a variable; None if it is left out.

        Args:
            name: the old name.
            owner: the variable whose slot it is, if it is one: `name` begins with the owner's name.
        """
        if self._function is not None:
            if owner is None:
                return self._function(name)
            new_owner = self._function(owner)
            return None if new_owner is None else new_owner + name[len(owner) :]
        rule = self._find(name)
        if rule is None and owner is not None:
            rule = self._find(owner)
            new_owner = owner if rule is None else self._apply(rule, owner)
            return None if new_owner is None else new_owner + name[len(owner) :]
        return name if rule is None else self._apply(rule, name)

    def _find(self, name: str) -> str | None:
        if name in self._rules:
            return name
        for old in self._rules:
            start, star, end = old.partition("*")
            fits = name.startswith(start) and name.endswith(end)
            if star and fits and len(name) >= len(start) + len(end):
                return old
        return None

    def _apply(self, rule: str, name: str) -> str | None:
        self._matched.add(rule)
        new = self._rules[rule]
        if new is None or "*" not in new:
            return new
        start, _, end = rule.partition("*")
        return new.replace("*", name[len(start) : len(name) - len(end)])

    def check_all_matched(self, names: Iterable[str]) -> None:
        """Checks that every rule has matched a variable.

        Args:
            names: the names of the variables.

        Raises:
            ValueError: a rule matched none of them.
        """
        known = sorted(names)
        for old in self._rules:
            if old not in self._matched:
                similar = difflib.get_close_matches(old, known, n=3)
                there = f"perhaps {' or '.join(similar)}" if similar else ", ".join(known[:5])
                raise ValueError(
                    f"{self._origin}: there is no variable '{old}' (there is: {there or 'none'})."
                )

    @staticmethod
    def from_file(path: str) -> NameMap:
        """Reads names from a file: lines `old = new`, or a mapping in YAML or JSON.

        A file of lines may have empty lines, and comments after `#`. The extension decides: .yaml,
        .yml, .json.

        Raises:
            ValueError: the file doesn't have this form.
            OSError: it can't be read.
        """
        with open(path, encoding="utf-8") as file:
            text = file.read()
        if os.path.splitext(path)[1] in (".yaml", ".yml", ".json"):
            import yaml

            try:
                names = yaml.safe_load(text)
            except yaml.YAMLError as error:
                raise ValueError(f"{path} is not YAML: {error}") from None
            if not isinstance(names, dict):
                raise ValueError(f"{path} has no mapping of old names to new ones.")
            return NameMap(names, path)
        names = {}
        for number, line in enumerate(text.splitlines(), 1):
            line = line.partition("#")[0].strip()
            old, equals, new = (part.strip() for part in line.partition("="))
            if line and (not equals or not old):
                raise ValueError(f"{path}, line {number}: 'old = new' is expected, not '{line}'.")
            if old in names:
                raise ValueError(f"{path}, line {number}: '{old}' appears twice.")
            if line:
                names[old] = new
        return NameMap(names, path)
