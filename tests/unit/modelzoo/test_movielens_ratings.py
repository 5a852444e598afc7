"""Ratings, generated and prepared by tensorflow-datasets, and the batches that are made of them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from common import data_preparation, metrics
from movielens import generated_ratings, input_pipeline, ratings

COUNT = 100_000


@pytest.fixture(scope="module")
def generated():
    return generated_ratings.generate(COUNT)


def test_they_have_the_types_of_movie_lens(generated):
    assert generated.movie_id.dtype.kind == generated.user_id.dtype.kind == "U"
    assert generated.user_rating.dtype == np.float32
    for values in vars(generated).values():
        assert values.shape == (COUNT,)
    assert set(generated.user_rating) == {1, 2, 3, 4, 5}
    assert len(set(generated.user_id)) == 943 and 1500 < len(set(generated.movie_id)) <= 1682
    assert 0.4 < (generated.user_rating >= ratings.HIGH).mean() < 0.6
    again = generated_ratings.generate(COUNT)
    other = generated_ratings.generate(COUNT, seed=1)
    np.testing.assert_array_equal(generated.user_rating, again.user_rating)
    assert (generated.user_rating != other.user_rating).any()


def test_ratings_come_from_the_probability(generated):
    for part in np.array_split(np.argsort(generated.probability), 20):
        expected = generated.probability[part]
        deviation = np.sqrt((expected * (1 - expected)).sum()) / len(part)
        high = generated.user_rating[part] >= ratings.HIGH
        assert abs(high.mean() - expected.mean()) < 5 * deviation


def test_the_best_scores_are_what_the_probabilities_alone_say(generated):
    """Compares with the expected scores, over all pairs of ratings and all that they may become."""
    _, test = ratings.split(COUNT)
    reference = ratings.generate(COUNT).reference
    best_scores = [float(word) for word in reference.split() if "." in word]
    p = np.sort(generated.probability[test])
    lower_below = np.concatenate([[0], np.cumsum(1 - p)[:-1]])
    auc = (p * lower_below).sum() / (p.sum() * (1 - p).sum() - (p * (1 - p)).sum())
    log_loss = -(p * np.log(p) + (1 - p) * np.log(1 - p)).mean()
    assert best_scores == [pytest.approx(auc, abs=0.006), pytest.approx(log_loss, abs=0.01)]


def test_any_other_score_is_worse(generated):
    _, test = ratings.split(COUNT)
    high, known = generated.user_rating[test] >= ratings.HIGH, generated.probability[test]
    best = metrics.auc(high, known), metrics.log_loss(high, known)
    noise = np.random.default_rng(0).normal(size=len(test))
    for spread in (0.3, 1, 3):
        other = 1 / (1 + np.exp(-(np.log(known / (1 - known)) + spread * noise)))
        assert metrics.auc(high, other) < best[0] and metrics.log_loss(high, other) > best[1]


def test_a_fifth_is_held_out_the_same_for_every_seed():
    train, test = ratings.split(1001)
    assert len(test) == 200
    np.testing.assert_array_equal(np.sort(np.concatenate([train, test])), np.arange(1001))


def elements(dataset, count: int | None = None) -> list:
    """Returns the first elements of the dataset that `dataset` makes, as arrays."""
    with tf.Graph().as_default(), tf.Session() as session:
        first_elements = dataset().take(-1 if count is None else count)
        next_element = tf.data.make_one_shot_iterator(first_elements).get_next()
        values = []
        try:
            while True:
                values.append(session.run(next_element))
        except tf.errors.OutOfRangeError:
            return values


@pytest.mark.parametrize("ranks", [2, 3])
def test_the_batches_of_a_step_together_are_the_same_for_every_number_of_ranks(ranks):
    train = ratings.generate(100).train
    whole = elements(lambda: input_pipeline.training(train, 12, 1, seed=5), 15)
    parts = elements(lambda: input_pipeline.training(train, 12, ranks, seed=5), 15 * ranks)
    for name in whole[0]:
        assert {len(part[name]) for part in parts} == {12 // ranks}
        for step in range(15):
            np.testing.assert_array_equal(
                whole[step][name],
                np.concatenate([part[name] for part in parts[step * ranks : (step + 1) * ranks]]),
            )
    assert whole[0]["movie_id"].dtype == object and whole[0]["user_rating"].dtype == np.float32
    # Training that goes on after step 9.
    later = elements(lambda: input_pipeline.training(train, 12, 1, seed=5, step=9), 6)
    np.testing.assert_array_equal(
        [batch["user_rating"] for batch in later], [batch["user_rating"] for batch in whole[9:]]
    )
    other = elements(lambda: input_pipeline.training(train, 12, 1, seed=6), 15)
    assert any((one["movie_id"] != two["movie_id"]).any() for one, two in zip(whole, other))


def test_prepared_ratings_of_tensorflow_datasets_are_read(tmp_path, monkeypatch):
    import tensorflow_datasets as tfds

    from movielens import movielens_100k, options

    expected = [("196", "242", 3), ("186", "302", 4), ("196", "302", 5), ("22", "242", 1)]
    raw = as_grouplens_has_them(tmp_path / "raw" / "ml-100k", expected)
    monkeypatch.setattr(
        tfds.download.DownloadManager, "download_and_extract", lambda self, url: str(raw.parent)
    )
    with data_preparation.quiet():
        tfds.builder("movie_lens/100k-ratings", data_dir=tmp_path / "tfds").download_and_prepare()
    assert options.holds_ratings(tmp_path / "tfds")

    read = ratings.Ratings(*movielens_100k.load(tmp_path / "tfds"))
    read_ratings = zip(read.user_id.tolist(), read.movie_id.tolist(), read.user_rating.tolist())
    assert sorted(read_ratings) == sorted(
        (user.encode(), movie.encode(), stars) for user, movie, stars in expected
    )
    assert read.user_rating.dtype == np.float32
    assert {batch["movie_id"] for batch in elements(read.dataset)} == {b"242", b"302"}


def as_grouplens_has_them(folder: Path, ratings: list[tuple[str, str, int]]) -> Path:
    """Writes ratings as the files of ml-100k.zip."""
    folder.mkdir(parents=True)
    lines = {
        "u.data": [f"{user}\t{movie}\t{stars}\t881250949" for user, movie, stars in ratings],
        "u.item": [
            f"{movie}|Film {movie} (1995)|01-Jan-1995||http://|{'|'.join('0' * 18)}|1"
            for movie in ("242", "302")
        ],
        "u.user": [f"{user}|24|M|writer|85711" for user in ("196", "186", "22")],
        "u.genre": [f"genre-{number}|{number}" for number in range(19)],
        "u.occupation": ["writer"],
    }
    for name, content in lines.items():
        (folder / name).write_text("\n".join(content) + "\n", encoding="iso-8859-1")
    return folder
