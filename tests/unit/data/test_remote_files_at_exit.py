"""Processes end, and fork, while files of fsspec are open; nothing hangs and nothing is lost."""

import os
import subprocess
import sys
import textwrap

import pytest

BEGINNING = """
import os, sys, threading
import tensorflow.compat.v1 as tf
from collective.ops.rows import file_systems, remote_files
from tests import object_store
from tests.object_store import ObjectStore
tf.disable_v2_behavior()
gfile = tf.io.gfile
object_store.register(os.environ["STORE"])

def written(path, text):
    with gfile.GFile(path, "w") as file:
        file.write(text)

"""


def run(tmp_path, body, beginning=BEGINNING):
    """Runs a program, which must end by itself; returns what it printed."""
    done = subprocess.run(
        [sys.executable, "-c", beginning + textwrap.dedent(body)],
        env={**os.environ, "STORE": str(tmp_path), "TF_CPP_MIN_LOG_LEVEL": "3"},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr


def in_store(tmp_path):
    return {path.name: path.read_text() for path in tmp_path.iterdir()}


@pytest.mark.slow
def test_an_open_file_is_written_when_the_process_ends(tmp_path):
    """Also one that nobody can close any more, as a file of events is."""
    run(
        tmp_path,
        """
        file = gfile.GFile("objects://box/x", "w")
        file.write("content")
        closed = gfile.GFile("objects://box/y", "w")
        closed.write("closed")
        closed.close()
        """,
    )
    assert in_store(tmp_path) == {"box%2Fx": "content", "box%2Fy": "closed"}


@pytest.mark.matrix
def test_an_open_file_that_can_not_be_written_at_the_end(tmp_path):
    _, errors = run(
        tmp_path,
        """
        file = gfile.GFile("objects://box/x", "w")
        file.write("content")
        object_store.bring_down(ConnectionError("the service is down"), "write")
        """,
    )
    assert "'objects://box/x' was not written: the service is down" in errors
    assert in_store(tmp_path) == {}


@pytest.mark.matrix
def test_a_process_ends_while_a_thread_waits_for_the_store(tmp_path):
    """A thread of TensorFlow that asks for Python after its end would wait for ever, or crash."""
    run(
        tmp_path,
        """
        written("objects://box/x", "content")
        remote_files._END_TIMEOUT = 0.2
        waits = threading.Event()

        def before(operation, key):
            if operation == "open":
                waits.set()
                threading.Event().wait()

        ObjectStore.before = staticmethod(before)
        dataset = tf.data.Dataset.from_tensors("objects://box/x").map(tf.io.read_file).prefetch(1)
        batch = tf.data.make_one_shot_iterator(dataset).get_next()
        session = tf.Session()
        threading.Thread(target=session.run, args=[batch], daemon=True).start()
        assert waits.wait(60)
        """,
    )


@pytest.mark.matrix
def test_reading_goes_on_until_the_process_ends(tmp_path):
    """Its threads read while Python ends, and are told that it has."""
    run(
        tmp_path,
        """
        written("objects://box/x", "content")
        dataset = tf.data.Dataset.from_tensors("objects://box/x").repeat()
        dataset = dataset.map(tf.io.read_file, num_parallel_calls=4).prefetch(100)
        batch = tf.data.make_one_shot_iterator(dataset).get_next()
        session = tf.Session()
        for _ in range(20):
            assert session.run(batch) == b"content"
        """,
    )


@pytest.mark.slow
def test_a_fork_reads_and_its_parents_files_stay_its_parents(tmp_path):
    """As the processes that read data do. They are forked while a thread reads."""
    out, _ = run(
        tmp_path,
        """
        written("objects://box/x", "content")
        reader = gfile.GFile("objects://box/x")
        assert reader.read(3) == "con"
        file = gfile.GFile("objects://box/y", "w")
        file.write("one")
        waits, goes_on = threading.Event(), threading.Event()

        def before(operation, key):
            if threading.current_thread() is thread and operation == "open":
                waits.set()
                goes_on.wait(60)

        ObjectStore.before = staticmethod(before)
        thread = threading.Thread(target=lambda: gfile.GFile("objects://box/x").read())
        thread.start()
        assert waits.wait(60)
        child = os.fork()
        if not child:
            print(gfile.GFile("objects://box/x").read(), reader.read(), flush=True)
            written("objects://box/z", "the child's")
            try:
                file.write("lost")
                file.flush()
            except tf.errors.OpError as error:
                print(error.message, flush=True)
            remote_files._END_TIMEOUT = 0.2
            remote_files._end()
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        goes_on.set()
        thread.join(60)
        file.write(" and two")
        file.close()
        """,
    )
    assert out.splitlines()[0] == "content tent"
    assert "opened in the process that this one was forked from" in out.splitlines()[1]
    assert in_store(tmp_path) == {
        "box%2Fx": "content",
        "box%2Fy": "one and two",
        "box%2Fz": "the child's",
    }


WITHOUT = """
import sys, warnings
import tensorflow.compat.v1 as tf
for name in [name for name in sys.modules if name.partition(".")[0] == "fsspec"]:
    del sys.modules[name]
sys.modules["fsspec"] = None
import collective
from collective.ops.rows import file_systems
"""


@pytest.mark.matrix
def test_without_fsspec_nothing_changes_until_a_scheme_is_used(tmp_path):
    out, _ = run(
        tmp_path,
        """
        schemes = tf.io.gfile.get_registered_schemes()
        with collective.CollectiveStrategy().scope():
            assert tf.io.gfile.get_registered_schemes() == schemes
            file_systems.check("/a/local/path")
            for act in (
                lambda: file_systems.check("s3://b/x"),
                lambda: collective.data.register_filesystem("s3"),
                lambda: collective.data.parquet("s3://b/*.parquet", rank=0, ranks=1),
            ):
                try:
                    act()
                except (ImportError, ValueError) as error:
                    print(error)
        """,
        WITHOUT,
    )
    lines = out.splitlines()
    assert len(lines) == 3 and all("pip install fsspec" in line for line in lines), out


@pytest.mark.matrix
def test_a_scope_imports_nothing_of_fsspec(tmp_path):
    """TensorFlow may have imported it itself."""
    run(
        tmp_path,
        """
        del sys.modules["fsspec"]
        with collective.CollectiveStrategy().scope():
            assert "fsspec" not in sys.modules
            assert {"s3", "hdfs"} <= set(tf.io.gfile.get_registered_schemes())
        """,
        WITHOUT,
    )
