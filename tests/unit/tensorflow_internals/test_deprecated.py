"""The library calls nothing that TensorFlow calls deprecated: no user can act on the warning."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from types import ModuleType

import pytest
from tensorflow.python.util import tf_decorator
from test_private import ROOT, files

# A script that calls the like itself has asked for them: they are what it would call.
OF_THE_SCRIPT = {
    "api.train_and_evaluate",
    "training.train_and_evaluate",
    "tf.feature_column.embedding_column",
    "tf.feature_column.input_layer",
}


@pytest.mark.slow
def test_no_deprecated_function_is_called():
    """In a process of its own: importing everything changes TensorFlow."""
    finished = subprocess.run([sys.executable, __file__], capture_output=True, text=True)
    assert (finished.returncode, finished.stdout) == (0, ""), finished.stderr[-2000:]


def calls_of_deprecated() -> list[str]:
    found = []
    for file in files():
        path = file.relative_to(ROOT).with_suffix("")
        parts = path.parts if path.parts[0] == "collective" else ("collective", *path.parts)
        if parts[-1] in ("__main__", "build_horovod"):
            continue
        tree = ast.parse(file.read_text(encoding="utf-8"))
        module = importlib.import_module(".".join(parts).removesuffix(".__init__"))
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and is_deprecated(module, node.func):
                name = ast.unparse(node.func)
                if name not in OF_THE_SCRIPT:
                    found.append(f"{path}:{node.lineno}: {name}")
    return found


def is_deprecated(module: ModuleType, function: ast.expr) -> bool:
    """Tells whether `function` is a name of another module's that is deprecated as a whole."""
    value = resolved(module, function)
    if not callable(value) or isinstance(value, type):
        return False
    decorators, _ = tf_decorator.unwrap(value)
    return any(
        "THIS FUNCTION IS DEPRECATED" in (each.decorator_doc or "")
        for each in decorators
        if each.decorator_name == "deprecated"
    )


def resolved(module: ModuleType, node: ast.expr) -> object:
    """Returns what a chain of names leads to from a module's globals; None if to nothing."""
    if isinstance(node, ast.Name):
        return vars(module).get(node.id)
    if isinstance(node, ast.Attribute):
        owner = resolved(module, node.value)
        return getattr(owner, node.attr, None) if isinstance(owner, ModuleType) else None
    return None


if __name__ == "__main__":
    sys.stdout.writelines(f"{call}\n" for call in calls_of_deprecated())
