"""Each name of another framework leads somewhere, has no effect, or is refused by name."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
import textwrap
from importlib import metadata
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parents[3] / "docs"))

import name_tables
from collective.compat.framework import SHORT, find, in_full
from collective.compat.names.deeprec import DEEPREC
from collective.compat.names.distributed_embeddings import DISTRIBUTED_EMBEDDINGS
from collective.compat.names.horovod import HOROVOD
from collective.compat.names.hybridbackend import HYBRIDBACKEND
from collective.compat.names.sok import SOK
from collective.compat.names.tfra import TFRA

ROOT = Path(__file__).resolve().parents[3]
FRAMEWORKS = (DEEPREC, DISTRIBUTED_EMBEDDINGS, HOROVOD, HYBRIDBACKEND, SOK, TFRA)
OF = {framework.name: framework for framework in FRAMEWORKS}
# DeepRec has SparseOperationKit as a part, and is trained with HybridBackend: a script for one of
# them has names of all.
TOGETHER = (DEEPREC, HYBRIDBACKEND, SOK)
# Their scripts have TensorFlow as it is.
OF_VERSION_2 = (DISTRIBUTED_EMBEDDINGS.name, TFRA.name)
WHICH = pytest.mark.parametrize("framework", FRAMEWORKS, ids=lambda framework: framework.name)


@WHICH
def test_names_are_told_apart_and_lead_to_what_is_there(framework):
    names = [name.theirs for name in framework.names]
    assert len(names) == len(set(names))
    for name in framework.names:
        if name.kind == "works" or name.ours:
            assert find(name.ours) is not None, name
        if name.kind != "works":
            assert name.note.endswith("."), f"{name.theirs}: say why, or what to do, in a sentence"
        if name.kind == "no effect" and not name.keyword and not name.is_field:
            assert callable(name.resolve()), name


@WHICH
def test_what_is_refused_says_so_when_it_is_used(framework):
    for name in framework.names:
        if name.kind == "refused":
            refusing = name.resolve()  # Naming it is no use of it.
            for use in (
                refusing,
                functools.partial(isinstance, name, refusing),
                functools.partial(issubclass, int, refusing),
                functools.partial(type, "Mine", (refusing, object), {}),
            ):
                with pytest.raises(NotImplementedError) as error:
                    use()
                assert str(error.value).startswith(f"{name.theirs} is not supported: ")
                assert name.note in str(error.value)


def test_the_launcher_knows_the_frameworks():
    from collective.launch.command_line.rank_command import FRAMEWORKS as launched

    assert set(launched) == set(OF)


def test_the_pages_print_the_tables():
    """Each table stands on one page, row for row."""
    texts = [page.read_text(encoding="utf-8") for page in name_tables.pages()]
    for text in texts:
        assert name_tables.filled(text) == text, "write the pages: python docs/name_tables.py"
    lines = [line for text in texts for line in text.splitlines()]
    for head, rows in name_tables.tables().items():
        assert rows and lines.count(head) == 1, head
    printed = {row for rows in name_tables.tables().values() for row in rows}
    missing = {name.row() for framework in FRAMEWORKS for name in framework.names} - printed
    assert not missing
    for framework in FRAMEWORKS:
        for alias, _ in framework.aliases:
            assert any(f"`{alias}`" in line for line in lines), alias


PROGRAM = """
import builtins, json, sys
import {first}
outcome = {{}}
SHORT = json.loads({short!r})
for theirs in json.loads({names!r}):
    path, _, keyword = theirs.partition("(")
    words = path.split(".")
    module = ".".join([SHORT.get(words[0], words[0]), *words[1:-1]])
    try:
        exec(f"from {{module}} import {{words[-1]}} as found", globals())
    except Exception as error:
        outcome[theirs] = repr(error)
import tensorflow as tf
import horovod.tensorflow as hvd
assert tf.__version__ == "1.15.5" and not tf.executing_eagerly()
from tensorflow.contrib import layers
import tensorflow.contrib.layers as same
assert layers is same and tf.contrib.layers is same
try:
    tf.contrib.factorization
except AttributeError as error:
    outcome["contrib"] = str(error)
assert "tensorflow.python.ops.rnn_cell" not in sys.modules
from tensorflow.python.ops import rnn_cell
assert rnn_cell is sys.modules["tensorflow.python.ops.rnn_cell"] and rnn_cell.GRUCell
import tensorflow.compat.v1 as same
from tensorflow.compat import v1
from tensorflow.compat.v1.train import Saver
import tensorflow.compat.v1.train
assert same is v1 is tf and Saver is tf.train.Saver and tensorflow is tf
version_1 = sys.modules["tensorflow"].compat.v1
here = {{*tf._names, *tf._arguments, "VERSION", "compat"}}
for name in [name for name in dir(version_1) if not name.startswith("_") and name not in here]:
    found, theirs = getattr(tf, name), getattr(version_1, name)
    if found is not theirs and not isinstance(found, type(tf)):
        outcome[name] = "hidden"
real = sys.modules["tensorflow"]
library = {{"__name__": "library", "__file__": hvd.__file__}}
exec("import tensorflow as tf", library)
try:
    exec("from tensorflow.contrib import layers", library)
except ImportError:
    library["sees"] = False
outcome["of libraries"] = [
    real.__version__.startswith("2."),
    hvd.tf is real and library["tf"] is real,
    library.get("sees", True),
    hasattr(real, "contrib"),
    hasattr(real, "EmbeddingVariableOption"),
    hasattr(real.compat.v1, "EmbeddingVariableOption"),
]
print(json.dumps(outcome))
"""


def output(program: str) -> dict:
    ran = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return json.loads(ran.stdout.splitlines()[-1])


@pytest.mark.matrix
@pytest.mark.parametrize("name", [name for name in OF if name not in OF_VERSION_2])
def test_a_script_imports_them_by_their_own_paths(name):
    """TensorFlow's own modules have none of them, and whatever isn't the script's sees those."""
    names = []
    for framework in TOGETHER if OF[name] in TOGETHER else [OF[name]]:
        names += [n.theirs for n in framework.names if not n.keyword and not n.is_field]
        for alias, whose in framework.aliases:
            found = [n.attribute for n in framework.names if n.module == in_full(whose)]
            names += [f"{alias}.{attribute}" for attribute in found]
    found = output(
        PROGRAM.format(
            first=f"collective.compat.{name}", short=json.dumps(SHORT), names=json.dumps(names)
        )
    )
    assert "TensorFlow 2.15 has no tf.contrib" in found.pop("contrib")
    assert found.pop("of libraries") == [True, True, False, False, False, False]
    assert found == {}


@pytest.mark.slow
def test_a_process_that_did_not_ask_sees_nothing():
    """The library's own use of the options and functions changes nothing.

    Only TensorFlow from 2.16 on, which has no `tf.estimator`, gets one.
    """
    program = """
        import builtins, json, sys
        original = builtins.__import__
        import tensorflow as tf
        before = [sorted(dir(tf)), sorted(dir(tf.compat.v1)), sorted(dir(tf.compat.v1.train))]
        import collective, collective.strategy, collective.interception.patches
        import collective.compat.framework
        import collective.compat.deeprec_functions, collective.compat.script_modules
        import collective.compat.hybridbackend_functions, collective.compat.sok_functions
        collective.EmbeddingVariableOption(), collective.CounterFilter(3)
        import tensorflow as again
        after = [sorted(dir(tf)), sorted(dir(tf.compat.v1)), sorted(dir(tf.compat.v1.train))]
        added = {"hybridbackend", "sparse_operation_kit", "tensorflow.contrib"} & {*sys.modules}
        print(json.dumps([
            again is tf, tf.executing_eagerly(), builtins.__import__ is original,
            [sorted({*now} ^ {*then}) for then, now in zip(before, after)],
            sorted(added), hasattr(tf, "staged"),
        ]))
    """
    given = [] if metadata.version("tensorflow").startswith("2.15.") else ["estimator"]
    assert output(textwrap.dedent(program)) == [True, True, True, [given, given, []], [], False]
