"""Generated ratings, whose best possible scores are what they are said to be, and prepared ones of
tensorflow-datasets.
"""

from __future__ import annotations

from pathlib import Path

import generated
import inputs
import measures
import numpy as np
import pytest
import ratings
import tensorflow.compat.v1 as tf

COUNT = 100_000


@pytest.fixture(scope="module")
def made():
    return generated.generate(COUNT)


def test_they_have_the_types_of_movie_lens(made):
    assert (
        made.movie_id.dtype.kind == made.user_id.dtype.kind == "U"
        and made.user_rating.dtype == np.float32
    )
    assert {
        values.shape for values in (made.movie_id, made.user_id, made.user_rating, made.probability)
    } == {(COUNT,)}
    assert set(made.user_rating) == {1, 2, 3, 4, 5}
    assert len(set(made.user_id)) == 943 and 1500 < len(set(made.movie_id)) <= 1682
    assert 0.4 < (made.user_rating >= ratings.HIGH).mean() < 0.6
    again, other = generated.generate(COUNT), generated.generate(COUNT, seed=1)
    np.testing.assert_array_equal(made.user_rating, again.user_rating)
    assert (made.user_rating != other.user_rating).any()


def test_ratings_come_from_the_probability(made):
    for part in np.array_split(np.argsort(made.probability), 20):
        expected = made.probability[part]
        deviation = np.sqrt((expected * (1 - expected)).sum()) / len(part)
        assert (
            abs((made.user_rating[part] >= ratings.HIGH).mean() - expected.mean()) < 5 * deviation
        )


def test_the_best_scores_are_what_the_probabilities_alone_say(made):
    """AUC: the chance that a high rating has the higher probability, over all pairs of ratings and
    what they may become.
    """
    _, test = ratings.held_out(COUNT)
    said = [float(word) for word in ratings.generate(COUNT).reference.split() if "." in word]
    p = np.sort(made.probability[test])
    lower_below = np.concatenate([[0], np.cumsum(1 - p)[:-1]])
    auc = (p * lower_below).sum() / (p.sum() * (1 - p).sum() - (p * (1 - p)).sum())
    log_loss = -(p * np.log(p) + (1 - p) * np.log(1 - p)).mean()
    assert said == [pytest.approx(auc, abs=0.006), pytest.approx(log_loss, abs=0.01)]


def test_any_other_score_is_worse(made):
    _, test = ratings.held_out(COUNT)
    high, known = made.user_rating[test] >= ratings.HIGH, made.probability[test]
    best = measures.auc(high, known), measures.log_loss(high, known)
    noise = np.random.default_rng(0).normal(size=len(test))
    for spread in (0.3, 1, 3):
        other = 1 / (1 + np.exp(-(np.log(known / (1 - known)) + spread * noise)))
        assert measures.auc(high, other) < best[0] and measures.log_loss(high, other) > best[1]


def test_a_fifth_is_held_out_the_same_for_every_seed():
    train, test = ratings.held_out(1001)
    assert len(test) == 200
    np.testing.assert_array_equal(np.sort(np.concatenate([train, test])), np.arange(1001))


def elements(dataset, count: int | None = None) -> list:
    """The first elements of a dataset, as arrays, in a graph of its own."""
    with tf.Graph().as_default(), tf.Session() as session:
        following = tf.data.make_one_shot_iterator(
            dataset() if count is None else dataset().take(count)
        ).get_next()
        found = []
        try:
            while True:
                found.append(session.run(following))
        except tf.errors.OutOfRangeError:
            return found


@pytest.mark.parametrize("ranks", [2, 3])
def test_the_batches_of_a_step_together_are_the_same_for_every_number_of_ranks(ranks):
    train = ratings.generate(100).train
    whole = elements(lambda: inputs.training(train, 12, 1, seed=5), 15)
    parts = elements(lambda: inputs.training(train, 12, ranks, seed=5), 15 * ranks)
    for name in whole[0]:
        assert {len(part[name]) for part in parts} == {12 // ranks}
        for step in range(15):
            np.testing.assert_array_equal(
                whole[step][name],
                np.concatenate([part[name] for part in parts[step * ranks : (step + 1) * ranks]]),
            )
    assert whole[0]["movie_id"].dtype == object and whole[0]["user_rating"].dtype == np.float32
    # after an interruption
    later = elements(lambda: inputs.training(train, 12, 1, seed=5, step=9), 6)
    np.testing.assert_array_equal(
        [batch["user_rating"] for batch in later], [batch["user_rating"] for batch in whole[9:]]
    )
    other = elements(lambda: inputs.training(train, 12, 1, seed=6), 15)
    assert any((one["movie_id"] != two["movie_id"]).any() for one, two in zip(whole, other))


def test_prepared_ratings_of_tensorflow_datasets_are_read(tmp_path, monkeypatch):
    import arguments
    import movielens_100k
    import tensorflow_datasets as tfds

    given = [("196", "242", 3), ("186", "302", 4), ("196", "302", 5), ("22", "242", 1)]
    raw = as_grouplens_has_them(tmp_path / "raw" / "ml-100k", given)
    monkeypatch.setattr(
        tfds.download.DownloadManager, "download_and_extract", lambda self, url: str(raw.parent)
    )
    with movielens_100k._quiet():
        tfds.builder("movie_lens/100k-ratings", data_dir=tmp_path / "tfds").download_and_prepare()
    assert arguments.holds_ratings(tmp_path / "tfds")

    read = ratings.Ratings(*movielens_100k.load(tmp_path / "tfds"))
    assert sorted(
        zip(read.user_id.tolist(), read.movie_id.tolist(), read.user_rating.tolist())
    ) == sorted((user.encode(), movie.encode(), stars) for user, movie, stars in given)
    assert read.user_rating.dtype == np.float32
    assert {batch["movie_id"] for batch in elements(read.dataset)} == {b"242", b"302"}


def as_grouplens_has_them(folder: Path, given: list[tuple[str, str, int]]) -> Path:
    folder.mkdir(parents=True)
    lines = {
        "u.data": [f"{user}\t{movie}\t{stars}\t881250949" for user, movie, stars in given],
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
