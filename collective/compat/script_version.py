"""Tells whether a script is written for TensorFlow 2, by the names that it uses."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

# What only a script of TensorFlow 2 has, and what only one of TensorFlow 1 has.
_VERSION_2 = frozenset({"GradientTape", "fit", "tf.function"})
_VERSION_1 = frozenset(
    {
        *("ConfigProto", "InteractiveSession", "MonitoredTrainingSession", "Session", "tf.app"),
        *("MonitoredSession", "SingularMonitoredSession", "get_session"),
        *("disable_eager_execution", "disable_v2_behavior", "enable_eager_execution"),
        *("tf.estimator", "get_variable", "global_variables_initializer", "placeholder"),
    }
)


def is_2(text: str, folder: Path | None = None, unless_1: bool = False) -> bool:
    """Tells whether the text of a script takes steps as TensorFlow 2 has them.

    Such a script has `tf.GradientTape`, `tf.function` or `fit`, and nothing of sessions. A text
    that isn't Python is none.

    Args:
        text: the script.
        folder: where it is; the modules there that it imports count, too.
        unless_1: whether a script with nothing of either kind is one, too.
    """
    trees = list(_trees(text, folder, set()))
    names = {name for tree in trees for name in _names(tree)}
    if not trees or names & _VERSION_1:
        return False
    return unless_1 or bool(names & _VERSION_2)


def _trees(text: str, folder: Path | None, seen: set[Path]) -> Iterator[ast.Module]:
    """Yields the syntax of a script and of the modules in its folder that it imports."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):
        return
    yield tree
    if folder is None:
        return
    for module in _imported(tree):
        path = folder.joinpath(*module.split(".")).with_suffix(".py")
        if path not in seen and path.is_file():
            seen.add(path)
            yield from _trees(path.read_text(errors="replace"), folder, seen)


def _imported(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module


def _names(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            yield from (node.attr, ast.unparse(node))
        elif isinstance(node, ast.ImportFrom):
            yield from (alias.name for alias in node.names)
