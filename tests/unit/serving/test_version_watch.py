"""A watch of a folder gives the newest complete version, whatever else is there, and never half."""

import os
import shutil
import subprocess
import sys
import threading
import time
import warnings

import pytest
import tensorflow as tf

from collective import serving
from collective.serving.export_record import ExportedFile, ExportRecord

QUICK = {"interval": 0.01, "timeout": 0.05}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A SavedModel that plain TensorFlow wrote, with variables and an asset."""
    folder = tmp_path_factory.mktemp("model")
    (folder / "words.txt").write_text("to\nbe\n")
    module = tf.Module()
    module.weights = tf.Variable(tf.range(1000.0))
    module.words = tf.saved_model.Asset(str(folder / "words.txt"))
    tf.saved_model.save(module, str(folder / "saved"))
    return folder / "saved"


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "served"


@pytest.fixture
def publish(model, folder):
    """Makes a version as an export does: written under another name, then renamed."""

    def make(name):
        shutil.copytree(model, folder / "temp-1")
        os.rename(folder / "temp-1", folder / name)
        return str(folder / name)

    return make


def cut(path):
    os.truncate(path, os.path.getsize(path) // 2)


def test_the_newest_version_once_it_is_there(folder, publish):
    with serving.watch(folder, **QUICK) as versions:
        assert list(versions) == [] and versions.latest() is None
        folder.mkdir()
        assert list(versions) == []
        first = publish("9")
        assert list(versions) == [first] and list(versions) == []
        publish("10")
        publish("11")
        newest = publish("12")
        assert list(versions) == [newest], "those between are passed over"
        publish("3")
        assert list(versions) == [], "it is older"
        assert versions.latest() == newest


def test_what_latest_gave_is_not_given_again(folder, publish):
    folder.mkdir()
    publish("1")
    with serving.watch(folder, **QUICK) as versions:
        assert versions.latest() == str(folder / "1")
        assert list(versions) == []
        second = publish("2")
        assert list(versions) == [second]


@pytest.mark.parametrize("name", ["temp-77", "77a", "-77", "7.7", "v77", "\u0667\u0667", "backup"])
def test_only_numbers_are_versions(folder, publish, name):
    folder.mkdir()
    first = publish("1")
    publish(name)
    (folder / "78").write_text("a file")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert serving.watch(folder).latest() == first


DAMAGES = {
    "no graph": lambda path: (path / "saved_model.pb").unlink(),
    "an empty graph": lambda path: (path / "saved_model.pb").write_bytes(b""),
    "half a graph": lambda path: cut(path / "saved_model.pb"),
    "half of the values": lambda path: cut(path / "variables/variables.data-00000-of-00001"),
    "no values": lambda path: (path / "variables/variables.data-00000-of-00001").unlink(),
    "half an index": lambda path: cut(path / "variables/variables.index"),
    "no index": lambda path: (path / "variables/variables.index").unlink(),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_version_that_is_not_complete_waits(model, folder, publish, damage):
    """The one before stays, with one warning; the new one is given when it is complete."""
    folder.mkdir()
    first = publish("1")
    shutil.copytree(model, folder / "2")
    damage(folder / "2")
    with serving.watch(folder, **QUICK) as versions:
        with pytest.warns(RuntimeWarning, match=r"/2' isn't complete.*[^.]\. It is") as caught:
            assert list(versions) == [first]
            assert list(versions) == []
            assert versions.latest() == first
        assert len(caught) == 1
        shutil.rmtree(folder / "2")
        second = publish("2")
        assert list(versions) == [second]


def test_files_that_only_the_record_knows(folder, publish):
    """An export of this library lists all files: one that is cut off is seen, an asset, too."""
    folder.mkdir()
    first, second = publish("1"), publish("2")
    asset = "assets/words.txt"
    record = ExportRecord(None, 1 << 20, {asset: ExportedFile(6, "")})
    record.write(second)
    assert serving.watch(folder).latest() == second
    cut(os.path.join(second, asset))
    with pytest.warns(RuntimeWarning, match="assets/words.txt has 3 bytes, not 6"):
        assert serving.watch(folder).latest() == first


def test_a_cleaner_deletes_versions(folder, publish):
    folder.mkdir()
    first, second = publish("1"), publish("2")
    with serving.watch(folder, **QUICK) as versions:
        assert list(versions) == [second]
        shutil.rmtree(first)
        assert list(versions) == []
        third = publish("3")
        assert list(versions) == [third]
        shutil.rmtree(third)
        assert list(versions) == [second], "back to the one before"
        shutil.rmtree(second)
        assert list(versions) == [], "nothing is left: what was given goes on"
        shutil.rmtree(folder)
        assert list(versions) == []
        folder.mkdir()
        fourth = publish("4")
        assert list(versions) == [fourth]


def test_a_folder_that_can_not_be_read_for_a_while(folder, publish, monkeypatch):
    folder.mkdir()
    first = publish("1")
    listdir, failures = tf.io.gfile.listdir, [2]

    def failing(path):
        if failures[0] and str(path) == str(folder):
            failures[0] -= 1
            raise tf.errors.UnavailableError(None, None, "the network is down")
        return listdir(path)

    monkeypatch.setattr(tf.compat.v1.io.gfile, "listdir", failing)
    with pytest.warns(RuntimeWarning, match="the network is down") as caught:
        assert next(serving.watch(folder, interval=0.01, timeout=20)) == first
    assert len(caught) == 1 and failures == [0]


def test_it_ends_when_it_is_closed(folder, publish):
    """At once, from another thread, though it would look again in an hour only."""
    folder.mkdir()
    first, given, waits = publish("1"), [], threading.Event()
    versions = serving.watch(folder, interval=3600.0)

    def follow():
        for path in versions:
            given.append(path)
            waits.set()

    thread = threading.Thread(target=follow)
    thread.start()
    assert waits.wait(30)
    versions.close()
    thread.join(30)
    assert not thread.is_alive() and given == [first] and list(versions) == []


def test_it_does_not_look_more_often_than_told(folder, publish, monkeypatch):
    folder.mkdir()
    looks = []
    listdir = tf.io.gfile.listdir
    monkeypatch.setattr(
        tf.compat.v1.io.gfile, "listdir", lambda path: looks.append(path) or listdir(path)
    )
    began = time.monotonic()
    assert list(serving.watch(folder, interval=0.1, timeout=0.5)) == []
    assert len(looks) <= 2 + (time.monotonic() - began) / 0.1


@pytest.mark.parametrize(
    "options, words",
    [
        ({"interval": 0}, "interval=0"),
        ({"interval": -1.0}, "interval=-1.0"),
        ({"interval": "5"}, "interval='5'"),
        ({"interval": float("nan")}, "interval=nan"),
        ({"timeout": -1}, "timeout=-1"),
        ({"timeout": "soon"}, "timeout='soon'"),
    ],
)
def test_numbers_of_seconds(folder, options, words):
    with pytest.raises(ValueError, match=words):
        serving.watch(folder, **options)


@pytest.mark.slow
def test_it_needs_no_ranks(folder, publish):
    folder.mkdir()
    path = publish("1")
    script = (
        "import sys; sys.modules['horovod'] = sys.modules['horovod.tensorflow'] = None\n"
        "from collective import serving\n"
        "assert 'tensorflow' not in sys.modules\n"
        "print(serving.watch(sys.argv[1]).latest())"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(folder)],
        stdout=subprocess.PIPE,
        text=True,
        timeout=100,
        check=True,
    )
    assert done.stdout.strip() == path
