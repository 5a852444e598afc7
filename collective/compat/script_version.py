"""Tells whether a script is written for TensorFlow 2, by the names that it uses."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

# What only a script of TensorFlow 2 has, and what of TensorFlow and Keras only one of TensorFlow 1.
_VERSION_2 = frozenset({"GradientTape", "fit", "train_on_batch", "tf.function"})
_VERSION_1 = frozenset(
    {
        *("ConfigProto", "InteractiveSession", "MonitoredTrainingSession", "Session", "app"),
        *("MonitoredSession", "SingularMonitoredSession", "Supervisor", "get_session"),
        *("disable_eager_execution", "disable_v2_behavior", "enable_eager_execution"),
        *("estimator", "get_variable", "global_variables_initializer", "placeholder"),
    }
)
# Packages of which these are names, and how scripts call them if another module has imported them.
_PACKAGES = frozenset({"tensorflow", "tf_keras", "keras"})
_CUSTOMARY = frozenset({"tf", "tf1", "tensorflow", "K", "backend"})


def is_2(
    text: str, folder: Path | None = None, unless_1: bool = False, package: Path | None = None
) -> bool:
    """Tells whether the text of a script takes steps as TensorFlow 2 has them.

    Such a script has `tf.GradientTape`, `tf.function` or `fit`, and nothing of sessions. A text
    that isn't Python is none.

    Args:
        text: the script.
        folder: where Python finds modules of its own; those that it imports count, too.
        unless_1: whether a script with nothing of either kind is one, too.
        package: the folder of its package, for relative imports. Default: `folder`.
    """
    trees = list(_trees(text, folder, package or folder, set()))
    if not trees or any(_is_1(tree) for tree in trees):
        return False
    return unless_1 or any(name in _VERSION_2 for tree in trees for name in _names(tree))


def _trees(
    text: str, folder: Path | None, package: Path | None, seen: set[Path]
) -> Iterator[ast.Module]:
    """Yields the syntax of a script and of the modules of its own that it imports."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):
        return
    yield tree
    if folder is None or package is None:
        return
    for base in _imported(tree, folder, package):
        for path in (base.with_suffix(".py"), base / "__init__.py"):
            if path not in seen and path.is_file():
                seen.add(path)
                yield from _trees(path.read_text("utf-8-sig", "replace"), folder, path.parent, seen)


def _imported(tree: ast.Module, folder: Path, package: Path) -> Iterator[Path]:
    """Yields where the modules would be that are imported, without a suffix."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield folder.joinpath(*alias.name.split("."))
        elif isinstance(node, ast.ImportFrom):
            base = folder
            if node.level:
                base = package.joinpath(*[".."] * (node.level - 1))
            if node.module:
                base = base.joinpath(*node.module.split("."))
            yield base
            yield from (base / alias.name for alias in node.names if alias.name != "*")


def _names(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            yield from (node.attr, ast.unparse(node))
        elif isinstance(node, ast.ImportFrom):
            yield from (alias.name for alias in node.names)


def _is_1(tree: ast.Module) -> bool:
    """Tells whether a module uses what TensorFlow and Keras have for sessions."""
    of_tensorflow = set(_CUSTOMARY)
    others: set[str] = set()
    used: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                is_one = alias.name.partition(".")[0] in _PACKAGES
                name = (alias.asname or alias.name).partition(".")[0]
                (of_tensorflow if is_one else others).add(name)
        elif (
            isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in _PACKAGES
        ):
            used.update(alias.name for alias in node.names)
            of_tensorflow.update(alias.asname or alias.name for alias in node.names)
            if any(alias.name == "*" for alias in node.names):
                used.update(name.id for name in ast.walk(tree) if isinstance(name, ast.Name))
    of_tensorflow -= others
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            root: ast.expr = node
            while isinstance(root, ast.Attribute):
                root = root.value
            # Also of what a script has put into an attribute: self.tf.Session().
            parts = ast.unparse(node.value).split(".")
            if isinstance(root, ast.Name) and not of_tensorflow.isdisjoint(parts):
                used.add(node.attr)
    return not used.isdisjoint(_VERSION_1)
