"""Makes the modules that a script of another framework imports.

A script's `import tensorflow as tf` gets a module with TensorFlow's version 1 and the framework's
own names. TensorFlow's own modules stay unchanged, and all code that isn't the script's (installed
packages, Python, this library) imports those. Modules that TensorFlow doesn't have, such as
`hybridbackend.tensorflow`, are added.

A script of TensorFlow 2 gets TensorFlow as it is, and the added modules.
"""

from __future__ import annotations

import builtins
import contextlib
import functools
import logging
import re
import sys
import sysconfig
import types
from collections.abc import Iterable, Sequence
from typing import Any

from collective.compat import session_config
from collective.compat.framework import Framework, Name, find, in_full
from collective.compat.horovod_stand_in import modules as horovod_modules
from collective.scope import SCOPES

_INSTALLED = tuple(
    f"{path}/"
    for name in ("purelib", "platlib", "stdlib", "platstdlib")
    if (path := sysconfig.get_path(name))
)
# Modules that aren't reached through the script's `tensorflow`: they are the same for all code.
_INNER = ("tensorflow.python", "tensorflow.core", "tensorflow.compat", "tensorflow._api")
# Packages other than TensorFlow with names in a framework's table.
_OTHER_PACKAGES = ("pkg_resources",)
VERSION = "1.15.5"


class ScriptModule(types.ModuleType):
    """Has the names of a framework's table; all other names come from other modules.

    Args:
        name: the module's name.
        fallbacks: the modules with all other names, in order of precedence. They are asked each
            time: what a scope replaces there while it is open is replaced here, too.
    """

    def __init__(self, name: str, fallbacks: Sequence[Any] = ()):
        super().__init__(name, "A module for a script of another framework.")
        self.__path__: list[str] = []
        self._fallbacks = tuple(fallbacks)
        self._names: dict[str, Name] = {}
        self._arguments: dict[str, list[Name]] = {}

    # Names without an underscore would hide TensorFlow's own, such as `tf.add`.

    @property
    def _is_new(self) -> bool:
        """Tells whether TensorFlow has no such module, and scripts reach it by no other name."""
        is_contrib = self.__name__.startswith("tensorflow.contrib")
        return not self._fallbacks and not is_contrib

    def _add(self, name: Name) -> None:
        if name.keyword:
            self._arguments.setdefault(name.attribute, []).append(name)
        else:
            self._names[name.attribute] = name

    def __getattr__(self, attribute: str) -> Any:
        if attribute in self._names:
            value = self._names[attribute].resolve()
        elif attribute in self._arguments:
            value = _taking(self._arguments[attribute], functools.partial(self._ask, attribute))
        else:
            return self._ask(attribute)
        setattr(self, attribute, value)
        return value

    def _ask(self, attribute: str) -> Any:
        hidden = attribute.startswith("__") and attribute not in ("__file__", "__version__")
        for module in () if hidden else self._fallbacks:
            if hasattr(module, attribute):
                return getattr(module, attribute)
        message = f"module {self.__name__!r} has no attribute {attribute!r}"
        if self.__name__.startswith("tensorflow.contrib"):
            message += (
                ": TensorFlow 2.15 has no tf.contrib, and this library only what scripts for "
                "recommendation models use of it (docs/coming-from/deeprec.md has the list). Use "
                "what tf.layers, tf.feature_column, tf.metrics or tf.train have for it"
            )
        raise AttributeError(message)

    def __dir__(self) -> list[str]:
        names = {*self.__dict__, *self._names, *self._arguments}
        return sorted(names.union(*(dir(module) for module in self._fallbacks)))


def _works_here(argument: Name) -> bool:
    """Tells whether TensorFlow's function accepts an argument itself: it does in scope()."""
    return argument.kind == "works" and SCOPES.is_open


def _taking(arguments: Iterable[Name], get: Any) -> Any:
    """Returns a TensorFlow function or class that also takes a framework's own arguments."""
    by_keyword = {name.keyword: name for name in arguments}

    def without(kwargs: dict[str, Any]) -> dict[str, Any]:
        for keyword in [*kwargs]:
            if keyword not in by_keyword or _works_here(by_keyword[keyword]):
                continue
            if kwargs.pop(keyword) not in (None, False):
                by_keyword[keyword].use()
        return kwargs

    original = get()
    if isinstance(original, type):

        def init(self: Any, *args: Any, **kwargs: Any) -> None:
            super(made, self).__init__(*args, **without(kwargs))

        members = {"__init__": init, "__doc__": original.__doc__, "__module__": original.__module__}
        made: Any = type(original.__name__, (original,), members)
        return made

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        return get()(*args, **without(kwargs))

    return call


class Installation:
    """Keeps track of what is installed in this process.

    Attributes:
        frameworks: the frameworks whose names scripts see.
        has_version_2: whether scripts are of TensorFlow 2.
    """

    def __init__(self) -> None:
        self.frameworks: list[Framework] = []
        self.has_version_2 = False
        self._modules: dict[str, ScriptModule] = {}
        self._import = builtins.__import__
        self._added: list[str] = []

    def use_version_2(self) -> None:
        """Leaves TensorFlow as it is: scripts are of TensorFlow 2.

        Raises:
            RuntimeError: names for scripts of TensorFlow 1 are installed.
        """
        if self.frameworks and not self.has_version_2:
            raise RuntimeError(
                f"The names of {self.frameworks[0].title} are installed for scripts of TensorFlow "
                "1 already: a process has scripts of one version."
            )
        self.has_version_2 = True

    def add(self, framework: Framework, *others: Framework) -> None:
        """Lets the scripts of this process see a framework's names, from their next import on.

        Args:
            framework: the framework.
            others: further frameworks whose names its scripts use. If two have the same name, the
                first one's counts.
        """
        for each in (*reversed(others), framework):
            if each not in self.frameworks:
                self._add(each)

    def _add(self, framework: Framework) -> None:
        if not self.frameworks:
            self._begin()
        self.frameworks.append(framework)
        for name in framework.names:
            if self.has_version_2 and name.module.partition(".")[0] == "tensorflow":
                continue
            if name.is_field:
                message = name.module.rpartition(".")[2]
                session_config.FIELDS[message, name.attribute] = name
            elif name.is_method_argument:
                continue
            elif not name.module.startswith("horovod."):  # Horovod itself has them.
                self.module(name.module)._add(name)
        for theirs, whose in framework.aliases:
            alias, module = self.module(in_full(theirs)), self.module(in_full(whose))
            alias._names.update(module._names)
        for full_name, module in self._modules.items():
            if module._is_new and full_name not in sys.modules:
                sys.modules[full_name] = module
                self._added.append(full_name)

    def remove(self) -> None:
        """Removes everything; TensorFlow keeps the behaviour of its version 1."""
        builtins.__import__ = self._import
        horovod_modules.remove()
        for name in self._added:
            sys.modules.pop(name, None)
        session_config.FIELDS.clear()
        self.frameworks, self._modules, self._added = [], {}, []
        self.has_version_2 = False

    def module(self, name: str) -> ScriptModule:
        """Returns the script's module of that name; makes it and its parents if needed."""
        if name not in self._modules:
            self._modules[name] = ScriptModule(name, self._fallbacks(name))
            outer, _, attribute = name.rpartition(".")
            if outer:
                setattr(self.module(outer), attribute, self._modules[name])
        return self._modules[name]

    def _begin(self) -> None:
        self._import = builtins.__import__
        if self.has_version_2:
            if not horovod_modules.install(for_version_2=True):
                builtins.__import__ = self._import_in_version_2
            return
        import tensorflow.compat.v1 as tf

        from collective.tensorflow_internals import estimators  # noqa: F401 (tf.estimator)
        from collective.tensorflow_internals.graphs import deprecation

        # All of version 1 is deprecated; a script that asks for it needn't be told.
        deprecation._PRINT_DEPRECATION_WARNINGS = False
        logger = logging.getLogger("tensorflow")
        level = logger.level
        logger.setLevel(logging.ERROR)  # Disabling version 2 warns about what it disables.
        tf.disable_v2_behavior()
        logger.setLevel(level)
        # Version 1 has a module `compat`, too, whose functions differ from tensorflow.compat.v1's.
        script = self.module("tensorflow")
        self.module("tensorflow.compat").v1 = script  # type: ignore[attr-defined]
        vars(script).update(__version__=VERSION, VERSION=VERSION)
        horovod_modules.install()
        builtins.__import__ = self._import_for_scripts

    @staticmethod
    def _fallbacks(name: str) -> list[Any]:
        top = name.partition(".")[0]
        if top not in ("tensorflow", *_OTHER_PACKAGES):
            return []
        if name.startswith(_INNER) or top in _OTHER_PACKAGES:
            try:
                return [find(name)]
            except (AttributeError, ModuleNotFoundError):
                return []
        fallbacks = []
        for root in ("tensorflow.compat.v1", "tensorflow"):
            try:
                fallbacks.append(find(root + name[len("tensorflow") :]))
            except (AttributeError, ModuleNotFoundError):
                continue
        return fallbacks

    def _import_for_scripts(
        self,
        name: str,
        globals: Any = None,
        locals: Any = None,
        fromlist: Any = (),
        level: int = 0,
    ) -> Any:
        package = name.partition(".")[0]
        if package in ("keras", "horovod") and not level and is_script(globals):
            imported = self._import(name, globals, locals, fromlist, level)
            _give_sessions_to_keras()
            return imported
        is_theirs = (
            package == "tensorflow" or package in _OTHER_PACKAGES and package in self._modules
        )
        if level or not is_theirs or not is_script(globals):
            return self._import(name, globals, locals, fromlist, level)
        top = self.module(package)
        if f"{name}.".startswith("tensorflow.compat.v1."):
            name = name.replace("tensorflow.compat.v1", "tensorflow", 1)
        if fromlist and name in self._modules:
            if name.startswith(_INNER):
                # `from package import module` loads the module.
                with contextlib.suppress(ModuleNotFoundError):
                    self._import(name, globals, locals, fromlist, level)
            return self._modules[name]
        if not f"{name}.".startswith(tuple(f"{inner}." for inner in _INNER)):
            found: Any = top
            for word in name.split(".")[1:]:
                found = getattr(found, word, None)
            if found is not None:
                return found if fromlist else top
        imported = self._import(name, globals, locals, fromlist, level)
        return imported if fromlist else top

    def _import_in_version_2(
        self,
        name: str,
        globals: Any = None,
        locals: Any = None,
        fromlist: Any = (),
        level: int = 0,
    ) -> Any:
        """Gives scripts what stands in for Horovod, also where Horovod is installed.

        Horovod's own wrappers would reduce eagerly what scope() has reduced.
        """
        if level or name.partition(".")[0] != "horovod" or not is_script(globals):
            return self._import(name, globals, locals, fromlist, level)
        return horovod_modules.imported(name, fromlist or ())


def _give_sessions_to_keras() -> None:
    """Adds version 1's functions to `keras.backend`, which scripts and Horovod import."""
    public, inner = (sys.modules.get(f"keras.{name}") for name in ("backend", "src.backend"))
    for name in ("get_session", "set_session") if public and inner else ():
        if not hasattr(public, name) and hasattr(inner, name):  # Keras 3 has none.
            setattr(public, name, getattr(inner, name))


def is_script(module_globals: Any) -> bool:
    """Tells whether code of a module with these globals is the user's own."""
    if module_globals is None:
        return False
    name = module_globals.get("__name__") or ""
    if name.partition(".")[0] in ("collective", "tensorflow", "keras", "horovod"):
        return False
    file = module_globals.get("__file__") or ""
    return not (file.startswith(_INSTALLED) or re.search("/(site|dist)-packages/", file))


INSTALLATION = Installation()
