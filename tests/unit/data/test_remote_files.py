"""TensorFlow reads and writes in file systems of fsspec."""

import contextlib
import errno
import signal
import sys
import threading

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from collective.checkpoint.files import storage
from collective.data import register_filesystem
from collective.ops import native_library
from collective.ops.rows import file_systems, remote_files
from tests import object_store
from tests.object_store import ObjectStore, bring_down, bring_up

gfile = tf.io.gfile
BOX = "objects://box"


@pytest.fixture
def memory():
    register_filesystem("memory")
    gfile.makedirs("memory://a/b")
    yield "memory://a/b"
    gfile.rmtree("memory://a")


@pytest.fixture
def store(tmp_path):
    object_store.register(tmp_path)
    yield BOX
    bring_up()


def write(path, text, mode="w"):
    with gfile.GFile(path, mode) as file:
        file.write(text)


def read(path):
    with gfile.GFile(path) as file:
        return file.read()


@pytest.mark.parametrize("where", ["memory", "store"])
def test_files(where, request):
    folder = request.getfixturevalue(where)
    write(f"{folder}/x", "one\ntwo\n")
    write(f"{folder}/x", "three\n", "a")
    assert gfile.stat(f"{folder}/x").length == 14
    assert gfile.listdir(folder) == ["x"] and gfile.glob(f"{folder}/*") == [f"{folder}/x"]
    gfile.rename(f"{folder}/x", f"{folder}/y")
    assert not gfile.exists(f"{folder}/x")
    assert read(f"{folder}/y") == "one\ntwo\nthree\n"
    with pytest.raises(tf.errors.NotFoundError, match=f"{folder}/x: open_reader: FileNotFound"):
        read(f"{folder}/x")
    with pytest.raises(tf.errors.FailedPreconditionError, match="it is a folder"):
        gfile.remove(folder)


@pytest.mark.parametrize("where", ["memory", "store"])
def test_records(where, request):
    path = f"{request.getfixturevalue(where)}/records"
    records = [b"%d" % i for i in range(1000)]
    with tf.python_io.TFRecordWriter(path) as writer:
        for record in records:
            writer.write(record)
    with tf.Graph().as_default(), tf.Session() as session:
        dataset = tf.data.TFRecordDataset(path, buffer_size=1000).batch(2000)
        batch = tf.data.make_one_shot_iterator(dataset).get_next()
        assert session.run(batch).tolist() == records


@pytest.mark.parametrize("where", ["memory", "store"])
def test_folders(where, request):
    base = request.getfixturevalue(where)
    gfile.makedirs(f"{base}/empty")
    gfile.mkdir(f"{base}/empty")
    assert gfile.isdir(f"{base}/empty") and gfile.listdir(f"{base}/empty") == []
    write(f"{base}/full/deep/x", "x")
    write(f"{base}/full/y", "y")
    assert gfile.isdir(f"{base}/full") and not gfile.isdir(f"{base}/full/y")
    assert not gfile.isdir(f"{base}/ful") and not gfile.exists(f"{base}/ful")
    gfile.rename(f"{base}/full", f"{base}/moved")
    assert not gfile.exists(f"{base}/full")
    assert read(f"{base}/moved/deep/x") == "x" and read(f"{base}/moved/y") == "y"
    with pytest.raises(tf.errors.AlreadyExistsError):
        gfile.rename(f"{base}/moved", f"{base}/empty", overwrite=True)
    with pytest.raises(tf.errors.AlreadyExistsError):
        gfile.rename(f"{base}/moved/y", f"{base}/empty", overwrite=True)
    assert read(f"{base}/moved/y") == "y"
    gfile.rename(f"{base}/empty", f"{base}/still_empty")
    assert sorted(gfile.listdir(base)) == ["moved", "still_empty"]
    assert [found for *_, found in gfile.walk(f"{base}/moved")] == [["y"], ["x"]]
    gfile.rmtree(f"{base}/moved")
    gfile.rmtree(f"{base}/still_empty")
    assert not gfile.exists(f"{base}/moved") and not gfile.exists(f"{base}/still_empty")


class Hosts(ObjectStore):
    """Has the store's host in its paths, as Azure's do: `hosted://box@host/key` is `box/key`."""

    protocol = ("hosted",)

    @classmethod
    def _strip_protocol(cls, path):
        return super()._strip_protocol(path.replace("hosted://", "").replace("@host", ""))


def test_paths_with_a_host(tmp_path):
    object_store.fsspec.register_implementation("hosted", Hosts, clobber=True)
    register_filesystem("hosted", root=str(tmp_path))
    write("hosted://box@host/a/x", "x")
    for pattern in ("hosted://box@host/a/*", "hosted://box@host/*/x"):
        assert gfile.glob(pattern) == ["hosted://box@host/a/x"]


CASES = {
    "open": (lambda: read(f"{BOX}/x"), ["open"], "read"),
    "look": (lambda: gfile.stat(f"{BOX}/x"), ["info"], "stat"),
    "exists": (lambda: gfile.exists(f"{BOX}/x"), ["info"], "exists"),
    "write": (lambda: write(f"{BOX}/x", "new"), ["write"], "close_writer"),
    "append": (lambda: write(f"{BOX}/x", "+", "a"), ["info"], "open_appender"),
    "list": (lambda: gfile.listdir(BOX), ["list"], "children"),
    "glob": (lambda: gfile.glob(f"{BOX}/*"), ["list"], "matching"),
    "rename": (lambda: gfile.rename(f"{BOX}/x", f"{BOX}/y"), ["copy"], "rename"),
    "delete": (lambda: gfile.remove(f"{BOX}/x"), ["delete"], "delete_file"),
    "folder": (lambda: gfile.makedirs(f"{BOX}/z"), ["write"], "create_folders"),
}
ERRORS = {
    ConnectionResetError("the service is down"): tf.errors.UnavailableError,
    PermissionError("not yours"): tf.errors.PermissionDeniedError,
    OSError(errno.ENOSPC, "no room"): tf.errors.ResourceExhaustedError,
    RuntimeError("a code of its own"): tf.errors.UnknownError,
}


@pytest.mark.parametrize("case", CASES)
def test_a_store_that_fails(case, store):
    """Each error names the path, the operation and its cause, and what was there stays."""
    act, fails, operation = CASES[case]
    write(f"{BOX}/x", "old")
    for cause, error in ERRORS.items():
        bring_down(cause, *fails)
        words = rf"{BOX}(/\S+)?: {operation}: {type(cause).__name__}: .*{cause.args[-1]}"
        with pytest.raises(error, match=words):
            act()
        bring_up()
        assert read(f"{BOX}/x") == "old" and gfile.listdir(BOX) == ["x"]


def test_failures_are_the_storages(store):
    """So training survives them, like those of a local disk."""
    bring_down(RuntimeError("a code of its own"), "write")
    with pytest.raises(storage.StorageFailure, match="a code of its own"), storage.failures():
        write(f"{BOX}/x", "new")


@pytest.mark.parametrize("change", [lambda text: text[:-1], lambda text: text + b"more"])
def test_reads_of_another_length_are_refused(store, monkeypatch, change):
    """Too little would be taken for the file's end; too much would be written past a buffer."""
    write(f"{BOX}/x", "content")
    original = ObjectStore.cat_file
    monkeypatch.setattr(ObjectStore, "cat_file", lambda *a, **k: change(original(*a, **k)))
    with pytest.raises(tf.errors.UnavailableError, match="of the 7 bytes from 0 on: it changed"):
        read(f"{BOX}/x")


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_callback_that_gives_no_answer_has_failed(store, monkeypatch):
    """A signal's exception may come at any line, as after the work was done."""
    write(f"{BOX}/x", "content")
    monkeypatch.setattr(remote_files, "_code", lambda error: 1 // 0)
    with pytest.raises(tf.errors.InternalError, match="Python gave no answer"):
        read(f"{BOX}/nothing")


def test_ctrl_c_ends_the_program_and_not_only_the_write(store, request):
    """Training survives a write that fails, and would survive this."""
    # A shell lets what it starts in the background ignore Ctrl-C.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, before))
    bring_down(KeyboardInterrupt(), "write")
    with pytest.raises(KeyboardInterrupt):
        with contextlib.suppress(tf.errors.CancelledError):
            write(f"{BOX}/x", "new")
        threading.Event().wait(60)
        pytest.fail("it goes on")


@pytest.mark.parametrize("act", ["rename", "rmtree"])
def test_a_folder_that_can_not_be_listed(store, act):
    """Nothing in it is lost, and nobody thinks that it is gone."""
    write(f"{BOX}/a/x", "x")
    write(f"{BOX}/a/deep/y", "y")
    bring_down(ConnectionResetError("the service is down"), "list", name="box/a/deep")
    with pytest.raises(tf.errors.UnavailableError):
        if act == "rename":
            gfile.rename(f"{BOX}/a", f"{BOX}/b")
        else:
            gfile.rmtree(f"{BOX}/a")
    bring_up()
    assert read(f"{BOX}/a/deep/y") == "y"


def test_a_store_that_takes_long_holds_nothing_else_up(store):
    """TensorFlow's threads wait in Python, and Python goes on, in files of the same store, too."""
    write(f"{BOX}/slow", "slow")
    write(f"{BOX}/fast", "fast")
    waits, goes_on = threading.Event(), threading.Event()

    def before(operation, key):
        if (operation, key) == ("open", "box/slow"):
            waits.set()
            assert goes_on.wait(60)

    ObjectStore.before = staticmethod(before)
    content = []
    with tf.Graph().as_default(), tf.Session() as session:
        slow, fast = tf.io.read_file(f"{BOX}/slow"), tf.io.read_file(f"{BOX}/fast")
        thread = threading.Thread(target=lambda: content.append(session.run(slow)))
        thread.start()
        assert waits.wait(60)
        assert session.run(fast) == b"fast" and read(f"{BOX}/fast") == "fast"
        assert content == []
        goes_on.set()
        thread.join(60)
    assert content == [b"slow"]


def test_many_threads(store):
    expected = [b"%d" % i * 1000 for i in range(64)]
    for i, content in enumerate(expected):
        write(f"{BOX}/{i:02}", content.decode())
    with tf.Graph().as_default(), tf.Session() as session:
        paths = tf.data.Dataset.from_tensor_slices([f"{BOX}/{i:02}" for i in range(64)])
        dataset = paths.map(tf.io.read_file, num_parallel_calls=16).batch(64)
        batch = tf.data.make_one_shot_iterator(dataset).get_next()
        assert session.run(batch).tolist() == expected


def test_a_saved_model(memory):
    path = f"{memory}/model"
    with tf.Graph().as_default(), tf.Session() as session:
        x = tf.placeholder(tf.float32, [None])
        w = tf.get_variable("w", initializer=[1.0, 2.0, 3.0])
        session.run(w.initializer)
        tf.saved_model.simple_save(session, path, {"x": x}, {"y": x * w})
    with tf.Graph().as_default() as graph, tf.Session(graph=graph) as session:
        loaded = tf.saved_model.loader.load(session, ["serve"], path)
        told = loaded.signature_def["serving_default"]
        y = session.run(told.outputs["y"].name, {told.inputs["x"].name: [1.0, 10.0, 100.0]})
    np.testing.assert_array_equal(y, [1.0, 20.0, 300.0])


def test_what_fsspec_does_not_have():
    with pytest.raises(ValueError, match="nowhere://: call fsspec.register_implementation"):
        register_filesystem("nowhere")


def test_a_scheme_that_tensorflow_has_stays(tmp_path):
    schemes = gfile.get_registered_schemes()
    with pytest.raises(ValueError, match="TensorFlow has a file system of its own for file://"):
        register_filesystem("file")
    assert gfile.get_registered_schemes() == schemes
    write(f"file://{tmp_path}/x", "x")
    assert (tmp_path / "x").read_text() == "x"
    assert file_systems.fsspec_file_system(f"file://{tmp_path}/x") is None


def test_a_package_that_is_missing(monkeypatch):
    """fsspec names it."""
    monkeypatch.setitem(sys.modules, "s3fs", None)
    file_systems.register_in_scope()
    with pytest.raises(ValueError, match=r"'s3a://b/x'.*[Ii]nstall s3fs"):
        file_systems.check("s3a://b/x")
    with pytest.raises(tf.errors.FailedPreconditionError, match=r"s3a://b/x.*[Ii]nstall s3fs"):
        read("s3a://b/x")


def test_compiled_operations_of_an_earlier_release(monkeypatch):
    monkeypatch.setattr(native_library, "functions", lambda: object())
    monkeypatch.setattr(remote_files, "_library", remote_files._library.__wrapped__)
    monkeypatch.setattr(remote_files, "_options", {})
    monkeypatch.setattr(gfile, "get_registered_schemes", lambda: ["", "file"])
    file_systems.register_in_scope()
    with pytest.raises(ValueError, match=r"'s3://b/x'.*of a release without remote file systems"):
        file_systems.check("s3://b/x")
    with pytest.raises(ImportError, match="make setup"):
        register_filesystem("memory")


def test_tensorflow_io_keeps_its_schemes(monkeypatch):
    """Its import would fail once they are taken."""
    registered = []
    find = file_systems.importlib.util.find_spec
    monkeypatch.setattr(
        file_systems.importlib.util, "find_spec", lambda name: name == "tensorflow_io" or find(name)
    )
    monkeypatch.setattr(remote_files, "register", registered.append)
    file_systems.register_in_scope()
    assert registered == []
    monkeypatch.setitem(file_systems.sys.modules, "tensorflow_io", object())
    file_systems.register_in_scope()
    assert registered == list(file_systems.SCHEMES)
