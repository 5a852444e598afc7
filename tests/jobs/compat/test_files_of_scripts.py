"""A script's own folders and files, which all ranks handle at once, are those of one process."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.jobs import pool

SCRIPT = """
import glob, logging, os, pathlib, shutil, sys, tempfile
import numpy as np
import tensorflow as tf

rank = int(os.environ.get("RANK", "0"))
os.chdir("{folder}")
if os.path.exists("out"):
    shutil.rmtree("out")
os.mkdir("out")
os.makedirs("out/a/b")
tf.gfile.MakeDirs("out/c/d")
tf.gfile.MkDir("out/e")
pathlib.Path("out", "p").mkdir()
with open("out/log.txt", "w") as log:
    log.write("rank %d\\n" % rank)
with open("out/log.txt", "a") as log:
    log.write("more\\n")
assert open("out/log.txt").read() == "rank %d\\nmore\\n" % rank
with open("record.txt", "a+") as record:
    record.write("line of %d\\n" % rank)
with tf.gfile.GFile("out/g.txt", "w") as file:
    file.write("of rank %d" % rank)
assert tf.io.gfile.GFile("out/g.txt").read() == "of rank %d" % rank
os.rename("out/g.txt", "out/h.txt")
assert pathlib.Path("out/h.txt").read_text() == "of rank %d" % rank
np.save("out/n.npy", np.full(3, rank))
assert np.load("out/n.npy")[0] == rank
shutil.copy("kept.txt", "out/copy.txt")
tf.gfile.Copy("kept.txt", "out/copy2.txt")
shutil.move("out/a", "out/e/a")
for name in os.listdir("out/e/a"):
    shutil.move(os.path.join("out/e/a", name), os.path.join("out/c", name))
with tempfile.TemporaryDirectory() as own:
    pathlib.Path(own, "x").write_text("of any rank")
assert not os.path.exists(own)
logging.basicConfig(filename="out/l.log", level=logging.INFO)
logging.info("rank %d", rank)
for names in (os.listdir("out"), map(os.path.basename, glob.glob("out/*")),
              tf.gfile.ListDirectory("out"), next(os.walk("out"))[2] + next(os.walk("out"))[1]):
    print("names", *sorted(names))
print("matches", *tf.gfile.Glob("out/*.t*"))
for wrong in (lambda: os.mkdir("before"), lambda: os.remove("never"), lambda: os.mkdir("out"),
              lambda: tf.gfile.MkDir("before")):
    try:
        wrong()
    except (OSError, tf.errors.AlreadyExistsError) as error:
        print("error", type(error).__name__)
"""


def state(folder: Path) -> dict[str, bytes | None]:
    """Returns all that is in a folder: files with what they hold."""
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None
        for path in folder.rglob("*")
    }


@pytest.mark.matrix
def test_files_of_all_ranks(tmp_path: Path):
    """One process shows what there has to be, and what a script has to see of it."""
    before = tmp_path / "plain"
    (before / "before").mkdir(parents=True)
    (before / "out").mkdir()
    for name in ("out/old.txt", "kept.txt", "record.txt"):
        (before / name).write_text("from before\n")
    shutil.copytree(before, tmp_path / "ranks")
    told = {}
    for count, name in ((1, "plain"), (3, "ranks")):
        script = tmp_path / f"{name}.py"
        script.write_text(SCRIPT.replace("{folder}", str(tmp_path / name)))
        done = pool.launch("-np", count, "--device", "cpu", "--as", "horovod", script)
        assert done.returncode == 0, done.stdout
        told[name] = done.stdout.splitlines()
    plain, ranks = state(tmp_path / "plain"), state(tmp_path / "ranks")
    assert {path: ranks[path] for path in plain} == plain
    assert {Path(path).suffix for path in set(ranks) - set(plain)} == {".rank1", ".rank2"}
    assert ranks["record.txt.rank1"] == b"from before\nline of 1\n"
    kinds = ("names", "matches", "error")
    want = [line for line in told["plain"] if line.startswith(kinds)]
    assert len(want) == 8
    for rank in range(3):
        of_rank = [line[4:] for line in told["ranks"] if line.startswith(f"[{rank}] ")]
        assert [line for line in of_rank if line.startswith(kinds)] == want
    said = [line for line in told["ranks"] if "a file that all ranks write is rank 0's" in line]
    assert len(said) == 1


LATE = """
import os, shutil
import tensorflow as tf

if os.environ["RANK"] == "0":
    tf.summary.FileWriter("{folder}/events").close()
else:
    while not os.path.exists("{folder}/events"):
        pass
    shutil.rmtree("{folder}/events")
"""


@pytest.mark.matrix
def test_a_late_rank_leaves_what_tensorflow_has_made_for_another(tmp_path: Path):
    """It would make its folder afresh, and comes as the first rank has its files in there."""
    script = tmp_path / "train.py"
    script.write_text(LATE.replace("{folder}", str(tmp_path)))
    done = pool.launch("-np", 2, "--device", "cpu", "--as", "horovod", script)
    assert done.returncode == 0, done.stdout
    assert (tmp_path / "events").is_dir()
    assert done.stdout.count("collective: rank 1 leaves ") == 1


TIMED = """
import os, shutil
import tensorflow as tf

os.chdir("{folder}")
model = "model_" + os.environ["RANK"]  # as a folder named by the second in which a rank starts
table = tf.get_variable("t", [6, 2], partitioner=tf.fixed_size_partitioner(1))
loss = tf.reduce_mean(tf.nn.embedding_lookup(table, [1, 2]))
step = tf.train.get_or_create_global_step()
train = tf.train.GradientDescentOptimizer(0.1).minimize(loss, global_step=step)
with tf.train.MonitoredTrainingSession(
    checkpoint_dir=model, hooks=[tf.train.StopAtStepHook(last_step=2)]
) as session:
    while not session.should_stop():
        session.run(train)
with tf.train.MonitoredSession(tf.train.ChiefSessionCreator(checkpoint_dir=model)) as session:
    assert session.run(step) == 2
os.mkdir(os.path.join(model, "1"))
for name in os.listdir(model):
    if name != "1":
        shutil.move(os.path.join(model, name), os.path.join(model, "1", name))
assert os.path.exists(os.path.join(model, "1", "checkpoint"))
with open(os.path.join(model, "1", "log.txt"), "w") as log:
    log.write(model)
"""


@pytest.mark.matrix
def test_a_folder_named_by_the_time_is_rank_0s(tmp_path: Path):
    """Ranks that start in different seconds name different ones."""
    script = tmp_path / "train.py"
    script.write_text(TIMED.replace("{folder}", str(tmp_path)))
    done = pool.launch(
        "-np", 2, "--device", "cpu", "--as", "deeprec", "--embedding-scope", "auto", script
    )
    assert done.returncode == 0, done.stdout
    assert (tmp_path / "model_0" / "1" / "checkpoint").is_file()
    assert (tmp_path / "model_0" / "1" / "log.txt").read_text() == "model_0"
    assert (tmp_path / "model_1").resolve() == (tmp_path / "model_0").resolve()
