"""Tells whether a script is written for TensorFlow 2, by the names that it uses."""

from __future__ import annotations

import ast

# What only a script of TensorFlow 2 has, and what only one of TensorFlow 1 has.
_VERSION_2 = frozenset({"GradientTape", "fit", "tf.function"})
_VERSION_1 = frozenset(
    {
        *("ConfigProto", "InteractiveSession", "MonitoredTrainingSession", "Session", "tf.app"),
        *("disable_eager_execution", "disable_v2_behavior", "enable_eager_execution"),
        *("tf.estimator", "get_variable", "global_variables_initializer", "placeholder"),
    }
)


def is_2(text: str) -> bool:
    """Tells whether the text of a script takes steps as TensorFlow 2 has them.

    Such a script has `tf.GradientTape`, `tf.function` or `fit`, and nothing of sessions. A text
    that isn't Python is none.
    """
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):
        return False
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            names.update((node.attr, ast.unparse(node)))
        elif isinstance(node, ast.ImportFrom):
            names.update(alias.name for alias in node.names)
    return bool(names & _VERSION_2) and not names & _VERSION_1
