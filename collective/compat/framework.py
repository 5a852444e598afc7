"""Describes another framework's names, and where each of them leads here.

A framework is a table of names. Its scripts get the names from modules that
`collective.compat.script_modules` makes from the table; docs/ prints the table.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import os
import sys
from typing import Any, Literal

# Short names of modules in the tables and messages; frameworks' scripts use them, too.
SHORT = {
    "tf": "tensorflow",
    "hb": "hybridbackend.tensorflow",
    "sok": "sparse_operation_kit",
    "hvd": "horovod.tensorflow",
    "de": "tensorflow_recommenders_addons.dynamic_embedding",
}
Kind = Literal["works", "no effect", "refused"]
Promise = Literal["same numbers", "the original", "same effect", "no effect", "refused"]
# Each promise with its meaning; docs/ prints them.
PROMISES: dict[Promise, str] = {
    "same numbers": "Losses, rows and updates are those of plain TensorFlow on the whole batch, or "
    "of the rule that the framework has published. A test compares them",
    "the original": "It is an object of TensorFlow or Horovod, the same that every script gets",
    "same effect": "It does for a script what it does there. Where numbers can differ, such as "
    "random initial values, or an order, the row or the page says so",
    "no effect": "It is accepted. Rank 0 says once that it has no effect, and why; numbers are "
    "those of a script without it",
    "refused": "Using it is an error that names it, and says what to do. Importing it is none",
}
# The first version of this library that has a name, unless its row gives another one.
FIRST_VERSION = "0.1.0"


@dataclasses.dataclass(frozen=True)
class Name:
    """Describes one name of a framework.

    Attributes:
        theirs: the name as scripts write it, 'tf.nn.group_embedding_lookup'; with a keyword,
            'tf.train.Saver(incremental_save_restore=)', that argument of TensorFlow's function.
        kind: 'works'; 'no effect', which is reported once when it is used; or 'refused' when used.
        ours: the path of the object here, 'collective.group_embedding_lookup'. For a name without
            effect the object does nothing; arguments and refused names have none.
        note: what differs; why it has no effect; what to do instead.
        has_same_numbers: whether a test compares its numbers with the framework's.
        since: the first version of this library that has it.
    """

    theirs: str
    kind: Kind
    ours: str = ""
    note: str = ""
    has_same_numbers: bool = False
    since: str = FIRST_VERSION

    @property
    def module(self) -> str:
        """Returns the full name of its module: 'tensorflow.nn'."""
        return in_full(self.theirs.partition("(")[0].rpartition(".")[0])

    @property
    def attribute(self) -> str:
        """Returns its name in the module: 'group_embedding_lookup'."""
        return self.theirs.partition("(")[0].rpartition(".")[2]

    @property
    def keyword(self) -> str:
        """Returns the name of the argument, '' if it isn't an argument."""
        return self.theirs.partition("(")[2].rstrip("=)")

    @property
    def is_field(self) -> bool:
        """Tells whether it is a field of a message in a session's configuration."""
        return self.theirs.startswith(("tf.ConfigProto.", "tf.OptimizerOptions.", "tf.Rewriter"))

    @property
    def is_method_argument(self) -> bool:
        """Tells whether it is an argument of a class's method, which the class here accepts."""
        return bool(self.keyword) and self.module.rpartition(".")[2][:1].isupper()

    @property
    def promise(self) -> Promise:
        """Returns which of PROMISES it keeps."""
        if self.kind != "works":
            return self.kind
        if self.has_same_numbers:
            return "same numbers"
        is_original = self.ours.startswith(("tensorflow.", "horovod."))
        return "the original" if is_original else "same effect"

    def row(self) -> str:
        """Returns the name as a row of the documentation's tables: theirs, ours, promise, since."""
        is_found = self.kind == "works" and self.is_public
        ours = f"`{self.ours}`" if is_found else "" if self.note else "works"
        here = ": ".join(part for part in (ours, self.note.removesuffix(".")) if part)
        return f"| `{self.theirs}` | {here} | {self.promise} | {self.since} |"

    @property
    def is_public(self) -> bool:
        """Tells whether scripts can import the object from its path."""
        return not self.ours.startswith(("collective.compat.", "horovod."))

    def use(self) -> None:
        """Reports once that it has no effect, or refuses it.

        Raises:
            NotImplementedError: it is refused.
        """
        if self.kind == "refused":
            raise NotImplementedError(f"{self.theirs} is not supported: {self.note}")
        if self.kind == "no effect":
            say_once(f"{self.theirs} has no effect here: {self.note}")

    def resolve(self) -> Any:
        """Returns the object that replaces it; the object acts when it is called."""
        if self.kind == "refused":
            return _refusing(self)
        found = find(self.ours)
        return _saying(self, found) if self.kind == "no effect" else found


@dataclasses.dataclass(frozen=True)
class Framework:
    """Describes a framework whose scripts run here.

    Attributes:
        name: the name for `--as`.
        title: the name in text.
        names: its names.
        marks: words; a script that distributes itself has one of them.
        aliases: modules with the same names as another module: (theirs, whose), as scripts write
            them.
    """

    name: str
    title: str
    names: tuple[Name, ...]
    marks: tuple[str, ...]
    aliases: tuple[tuple[str, str], ...] = ()


def in_full(module: str) -> str:
    """Returns the full name of a module: 'tensorflow.nn' for 'tf.nn'."""
    first, _, rest = module.partition(".")
    full = SHORT.get(first, first)
    return f"{full}.{rest}" if rest else full


def works(theirs: str, ours: str, note: str = "", since: str = FIRST_VERSION) -> Name:
    return Name(theirs, "works", ours, note, since=since)


def same_numbers(theirs: str, ours: str, note: str = "", since: str = FIRST_VERSION) -> Name:
    return Name(theirs, "works", ours, note, has_same_numbers=True, since=since)


def no_effect(theirs: str, note: str, ours: str = "") -> Name:
    return Name(theirs, "no effect", ours, note)


def refused(theirs: str, note: str, since: str = FIRST_VERSION) -> Name:
    return Name(theirs, "refused", "", note, since=since)


def find(path: str) -> Any:
    """Imports the object of a dotted path: a module, or something in it."""
    words = path.split(".")
    for count in range(len(words), 0, -1):
        module = ".".join(words[:count])
        try:
            found: Any = importlib.import_module(module)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{module}.".startswith(f"{error.name}."):
                raise
            continue
        for word in words[count:]:
            found = getattr(found, word)
        return found
    raise ModuleNotFoundError(f"no module named {words[0]!r}", name=words[0])


_said: set[str] = set()


def say_once(text: str) -> None:
    """Writes a line to stderr on rank 0, but only the first time."""
    if text not in _said:
        _said.add(text)
        if os.environ.get("RANK", "0") == "0":
            print(f"collective: {text}", file=sys.stderr, flush=True)


class _Refusing(type):
    """The class of refused names: each is a class that can be named, but not used.

    Using it means to call it, to derive a class from it, or to test an object for being one.
    """

    _name: Name

    def __new__(cls, title: str, bases: tuple[type, ...], members: dict[str, Any]) -> Any:
        for base in bases:
            if isinstance(base, _Refusing):
                base._name.use()
        return super().__new__(cls, title, bases, members)

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        cls._name.use()

    def __instancecheck__(cls, instance: Any) -> bool:
        cls._name.use()
        return False

    def __subclasscheck__(cls, subclass: type) -> bool:
        cls._name.use()
        return False


def _refusing(name: Name) -> _Refusing:
    members = {"__doc__": f"Refuses {name.theirs}: {name.note}", "_name": name}
    refusing: _Refusing = _Refusing(name.attribute, (), members)
    return refusing


def _saying(name: Name, function: Any) -> Any:
    @functools.wraps(function)
    def say(*args: Any, **kwargs: Any) -> Any:
        name.use()
        return function(*args, **kwargs)

    return say
