"""An InferenceContext answers by one version at a time, and by the newest one, whatever comes."""

from __future__ import annotations

import os
import shutil
import threading
import time
import warnings

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import collective
from collective.data import Batch
from tests import saved_models

QUICK = 0.02


@pytest.fixture
def folder(tmp_path):
    path = tmp_path / "served"
    path.mkdir()
    return path


def score(context):
    """Returns the number of the version that answers, as the answer has it."""
    return context.predict({"x": [[1.0]]})["score"].tolist()[0]


def wait_for(version, context):
    deadline = time.monotonic() + 20
    while context.version != version:
        assert time.monotonic() < deadline, (context.version, context.problems())
        time.sleep(0.01)


def test_one_saved_model_and_the_newest_of_a_folder(folder):
    paths = [saved_models.write(folder, number) for number in (2, 10)]
    for path, number in ((paths[0], 2), (folder, 10)):
        with collective.InferenceContext(path) as context:
            assert (context.version, score(context)) == (number, number)
    with pytest.raises(RuntimeError, match="is closed"):
        score(context)


def test_later_versions_take_over_and_a_deleted_one_is_rolled_back(folder):
    saved_models.write(folder, 1)
    with collective.InferenceContext(folder, interval=QUICK) as context:
        for number in (2, 5):
            path = saved_models.write(folder, number)
            wait_for(number, context)
            assert score(context) == number
        shutil.rmtree(path)
        wait_for(2, context)
        assert score(context) == 2


@pytest.mark.filterwarnings("ignore:.*can't be loaded as a SavedModel:RuntimeWarning")
def test_a_version_that_can_not_be_loaded_changes_nothing(folder):
    """Its values are damaged, which shows only when they are read."""
    saved_models.write(folder, 1)
    with collective.InferenceContext(folder, interval=QUICK) as context:
        hidden = saved_models.write(folder.parent, 7)
        data = os.path.join(hidden, "variables", "variables.data-00000-of-00001")
        with open(data, "r+b") as file:
            file.write(b"\xff" * 4)
        os.rename(hidden, folder / "7")
        deadline = time.monotonic() + 20
        while not context.problems():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        (number,) = context.problems()
        assert number == 7 and "can't be loaded" in context.problems()[7]
        assert (context.version, score(context)) == (1, 1)
        saved_models.write(folder, 8)
        wait_for(8, context)
        assert score(context) == 8 and not context.problems()


@pytest.mark.slow
def test_threads_that_ask_while_versions_change_get_whole_answers(folder):
    """Each answer is that of one version, the first or a later one; none fails."""
    width, last = 50, 12
    saved_models.write(folder, 1, width)
    failed: list[BaseException] = []
    seen: set[float] = set()
    ends = threading.Event()
    x = np.ones([8, width], np.float32)

    def ask(context):
        try:
            while not ends.is_set():
                scores = context.predict({"x": x})["score"]
                assert len(set(scores.tolist())) == 1, scores
                seen.add(float(scores[0]) / width)
        except BaseException as error:
            failed.append(error)

    with collective.InferenceContext(folder, interval=QUICK) as context:
        threads = [threading.Thread(target=ask, args=(context,)) for _ in range(16)]
        for thread in threads:
            thread.start()
        for number in range(2, last + 1):
            saved_models.write(folder, number, width)
        wait_for(last, context)
        assert score_of(context, x) == last * width
        ends.set()
        for thread in threads:
            thread.join()
    assert not failed and 1.0 in seen and seen <= set(map(float, range(1, last + 1)))


def score_of(context, x):
    return context.predict({"x": x})["score"].tolist()[0]


def test_the_model_that_is_replaced_is_freed_when_its_last_answer_is_given(folder):
    saved_models.write(folder, 1)
    with collective.InferenceContext(folder, interval=QUICK) as context:
        with context.current() as first:
            saved_models.write(folder, 2)
            wait_for(2, context)
            assert first.predict({"x": [[3.0]]})["score"].tolist() == [3.0]
        with pytest.raises(RuntimeError, match="closed"):
            first.predict({"x": [[3.0]]})


def test_it_waits_for_the_first_version(folder):
    made = threading.Timer(0.3, saved_models.write, (folder, 4))
    made.start()
    with collective.InferenceContext(folder, interval=QUICK, wait=20) as context:
        assert context.version == 4
    made.join()


def test_a_path_without_a_model_is_named(folder, tmp_path):
    with pytest.raises(ValueError, match=f"no model at '{folder}': the folder is empty"):
        collective.InferenceContext(folder)
    (folder / "notes.txt").write_text("")
    with pytest.raises(ValueError, match="the folder has notes.txt"):
        collective.InferenceContext(folder, interval=QUICK, wait=0.05)
    with pytest.raises(ValueError, match="it doesn't exist"):
        collective.InferenceContext(tmp_path / "missing")
    (folder / "3").mkdir()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        with pytest.raises(ValueError, match="There is no model at"):
            collective.InferenceContext(folder)


@pytest.mark.parametrize("wrong", [{"interval": 0}, {"interval": True}, {"wait": -1}, {"wait": ""}])
def test_wrong_seconds(folder, wrong):
    (name,) = wrong
    with pytest.raises(ValueError, match=rf"InferenceContext\({name}=.*number of seconds"):
        collective.InferenceContext(folder, **wrong)


def test_inputs_are_those_of_the_batch_by_name(folder):
    path = saved_models.write_types(folder)
    batch = Batch(
        ids={"id": [1, 2], "few": [[1, 2], [3, 4]], "list": [[5], [6, 7]]},
        dense={
            "number": np.array([0.5, 1]),
            "double": np.array([0.5, 1]),
            "flag": np.array([True, False]),
            "unused": np.zeros(2),
        },
        labels={"click": np.zeros(2)},
    )
    with collective.InferenceContext(path) as context:
        with pytest.raises(ValueError, match="input 'sparse' is missing"):
            context.predict(batch)
        with pytest.raises(TypeError, match="not list"):
            context.predict([1])
        with pytest.raises(ValueError, match="no signature 'other'; it has serving_default, words"):
            context.predict(batch, "other")
        found = context.predict({"word": ["to", "be or"]}, "words")
        assert found["length"].tolist() == [2, 5]
        with pytest.raises(ValueError, match="tables isn't recorded"):
            context.lookup([1])


def test_the_number_of_ids_that_an_input_takes(folder):
    path = os.path.join(folder, "1")
    with tf.Graph().as_default(), tf.Session() as session:
        one, two = tf.placeholder(tf.int64, [None]), tf.placeholder(tf.int64, [None, 2])
        total = one + tf.reduce_sum(two, axis=1)
        tf.saved_model.simple_save(session, path, {"one": one, "two": two}, {"total": total})
    with collective.InferenceContext(path) as context:
        total = context.predict(Batch(ids={"one": [1, 2], "two": [[3, 4], [5, 6]]}))["total"]
        assert total.tolist() == [8, 13]
        far = Batch(ids={"one": np.array([2**64 - 1], np.uint64), "two": [[1, 1]]})
        assert context.predict(far)["total"].tolist() == [1]
        with pytest.raises(ValueError, match="'two' takes 2 ids a sample.*sample 1 has 1 id"):
            context.predict(Batch(ids={"one": [1, 2], "two": [[3, 4], [5]]}))
