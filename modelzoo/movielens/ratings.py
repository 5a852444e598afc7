"""The ratings, of MovieLens or generated, split into those to train on and those held out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from common import datasets_package, metrics
from movielens import generated_ratings
from movielens.options import Options

HIGH = 4.0  # stars: the model predicts whether a rating is at least this high
HELD_OUT = 0.2  # of all ratings
# Whatever --seed says: models of different seeds are compared on the same ratings.
SPLIT_SEED = 2021


@dataclass(frozen=True)
class Ratings:
    """Holds R ratings, with the names and types of movie_lens/100k-ratings."""

    movie_id: np.ndarray  # text or bytes [R]
    user_id: np.ndarray  # text or bytes [R]
    user_rating: np.ndarray  # float32 [R], 1 to 5

    def __len__(self) -> int:
        return len(self.user_rating)

    @property
    def high(self) -> np.ndarray:
        """Returns the labels, bool [R]."""
        return self.user_rating >= HIGH

    def take(self, rows: np.ndarray) -> Ratings:
        return Ratings(self.movie_id[rows], self.user_id[rows], self.user_rating[rows])

    def dataset(self) -> Any:
        """Makes a `tf.data.Dataset` of single ratings, in their order.

        Its elements are {'movie_id': string, 'user_id': string, 'user_rating': float32}.
        """
        import tensorflow.compat.v1 as tf

        return tf.data.Dataset.from_tensor_slices(
            {"movie_id": self.movie_id, "user_id": self.user_id, "user_rating": self.user_rating}
        )


@dataclass(frozen=True)
class Split:
    train: Ratings
    test: Ratings
    reference: str | None = None  # a line on what the scores on `test` are to be compared with


def load(options: Options, report: Callable[[str], None], fail: Callable[[str], None]) -> Split:
    """Loads or generates the ratings that the options ask for.

    `report` gets what happens on the way. `fail` gets what is wrong with the data directory, and
    doesn't return.
    """
    if not options.generated:
        movielens_100k = datasets_package.reader("movielens.movielens_100k", "--generated", fail)
        from common.data_preparation import DownloadFailed

        try:
            ratings = Ratings(*movielens_100k.load(options.data_dir, report))
            train, test = split(len(ratings))
            return Split(ratings.take(train), ratings.take(test))
        except DownloadFailed as failure:
            report(
                f"movie_lens/100k-ratings could not be downloaded, so generated ratings take its "
                f"place ({failure})"
            )
        except OSError as error:
            fail(f"movie_lens/100k-ratings could not be prepared: {error}")
    return generate(options.ratings)


def generate(count: int, seed: int = 0) -> Split:
    generated = generated_ratings.generate(count, seed)
    ratings = Ratings(generated.movie_id, generated.user_id, generated.user_rating)
    train, test = split(count)
    labels, probability = ratings.high[test], generated.probability[test]
    best_auc = metrics.auc(labels, probability)
    best_log_loss = metrics.log_loss(labels, probability)
    return Split(
        ratings.take(train),
        ratings.take(test),
        f"the best possible on these generated ratings is AUC {best_auc:.4f}  "
        f"log loss {best_log_loss:.4f}",
    )


def split(count: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the places of the ratings to train on, and of those held out, among `count`."""
    order = np.random.default_rng(SPLIT_SEED).permutation(count)
    test = max(1, round(HELD_OUT * count))
    return np.sort(order[test:]), np.sort(order[:test])
