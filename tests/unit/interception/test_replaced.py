"""Holds what scope() replaces in other libraries against what it was when it was replaced."""

import functools
import importlib
import importlib.metadata
import inspect
from pathlib import Path

import tensorflow as tf
from horovod.tensorflow import mpi_ops

from collective.interception.patches import PATCHES
from collective.interception.patching import ReplacedValue
from collective.job import training_apart
from collective.tensorflow_internals import keras

Layer = importlib.import_module(f"{keras.PACKAGE}.src.engine.base_layer").Layer
GOLDEN = Path(__file__).parents[2] / "golden" / "replaced.txt"


def replaced():
    """Returns one line for each: where it is, and the parameters by which it is called."""
    lines = set()
    for patch in PATCHES:
        if isinstance(patch, ReplacedValue):
            continue
        owner, attribute = patch.owner, patch.attribute
        place = (
            f"{owner.__module__}.{owner.__qualname__}" if inspect.isclass(owner) else owner.__name__
        )
        if owner is mpi_ops.MPI_LIB:  # called by a number of its own
            place = "horovod.tensorflow.mpi_ops.MPI_LIB"
        if inspect.isclass(owner) and issubclass(owner, Layer) and attribute not in vars(owner):
            owner = (
                Layer  # After a first layer in a graph, Keras inherits from that of TensorFlow 1.
            )
        original = getattr(owner, attribute, None)
        try:
            parameters = [
                str(p.replace(annotation=p.empty, default=p.empty if p.default is p.empty else 0))
                for p in inspect.signature(original, follow_wrapped=False).parameters.values()
            ]
        except (TypeError, ValueError):
            parameters = ["is not there" if original is None else "…"]
        lines.add(f"{place}.{attribute}({', '.join(parameters)})")
    return sorted(lines | set(replaced_before_scopes()))


def replaced_before_scopes():
    for row in (*training_apart.REPLACED, *training_apart.REPLACED_RUNS):
        try:
            owner = importlib.import_module(row.module)
            original = functools.reduce(getattr, row.name.split("."), owner)
        except (AttributeError, ModuleNotFoundError):
            if row.module.partition(".")[0] in ("keras", "tf_keras"):
                continue  # of a Keras that another TensorFlow has
            raise
        parameters = inspect.signature(original, follow_wrapped=False).parameters.values()
        names = ", ".join(
            str(p.replace(annotation=p.empty, default=p.empty if p.default is p.empty else 0))
            for p in parameters
        )
        yield f"{row.module}.{row.name}({names})"


def test_what_is_replaced_has_not_changed():
    """If this fails after an upgrade: read the function in the new release, mend its replacement in
    collective/interception/patches.py, and put the new line into tests/golden/replaced.txt. A line
    that some releases have says which: "…  # TensorFlow 2.21".
    """
    release = ".".join(tf.__version__.split(".")[:2])
    known, of_other_releases = set(), set()
    for line in GOLDEN.read_text(encoding="utf-8").splitlines():
        call, _, its_release = line.partition("  # TensorFlow ")
        (known if its_release in ("", release) else of_other_releases).add(call)
    now = {line.replace("tf_keras.src.", "keras.src.") for line in replaced()}
    gone, new = sorted(known - now), sorted(now - known - of_other_releases)
    versions = ", ".join(
        f"{name} {importlib.metadata.version(name)}"
        for name in ("tensorflow-cpu", "tensorflow", "horovod")
        if _installed(name)
    )
    assert not gone and not new, (
        f"with {versions}: collective/interception/patches.py was written for "
        f"{gone}, and finds {new}. Read the "
        "new release, mend the replacement, then "
        "tests/golden/replaced.txt."
    )


def _installed(name):
    try:
        importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True
