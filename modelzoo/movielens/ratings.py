"""The ratings: movie_lens/100k-ratings of tensorflow-datasets or generated ones, and which of them
are held out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import generated
import measures
import numpy as np
from arguments import Options

HIGH = 4.0  # stars: the model predicts whether a rating is at least this high
HELD_OUT = 0.2  # of all ratings
# whatever --seed says: models of different seeds are compared on the same ratings
SPLIT_SEED = 2021


@dataclass(frozen=True)
class Ratings:
    """R ratings, with the names and types of movie_lens/100k-ratings."""

    movie_id: np.ndarray  # text or bytes [R]
    user_id: np.ndarray  # text or bytes [R]
    user_rating: np.ndarray  # float32 [R], 1 to 5

    def __len__(self) -> int:
        return len(self.user_rating)

    @property
    def high(self) -> np.ndarray:
        """[R] bool: the labels."""
        return self.user_rating >= HIGH

    def take(self, rows: np.ndarray) -> Ratings:
        return Ratings(self.movie_id[rows], self.user_id[rows], self.user_rating[rows])

    def dataset(self) -> Any:
        """A `tf.data.Dataset` of single ratings, in their order: {'movie_id', 'user_id': string,
        'user_rating': float32}.
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


def load(chosen: Options, say: Callable[[str], None], fail: Callable[[str], None]) -> Split:
    """The ratings that the options ask for. `fail` gets what is wrong with a data directory, and
    doesn't return.
    """
    if not chosen.generated:
        import movielens_100k  # here, because tensorflow-datasets takes its time

        try:
            every = Ratings(*movielens_100k.load(chosen.folder, say))
            train, test = held_out(len(every))
            return Split(every.take(train), every.take(test))
        except movielens_100k.DownloadFailed as failure:
            say(
                f"movie_lens/100k-ratings could not be downloaded, so generated ratings take its "
                f"place ({failure})"
            )
        except OSError as error:
            fail(f"movie_lens/100k-ratings could not be prepared: {error}")
    return generate(chosen.ratings)


def generate(count: int, seed: int = 0) -> Split:
    made = generated.generate(count, seed)
    every = Ratings(made.movie_id, made.user_id, made.user_rating)
    train, test = held_out(count)
    known = made.probability[test]
    return Split(
        every.take(train),
        every.take(test),
        f"the best possible on these generated ratings is AUC "
        f"{measures.auc(every.high[test], known):.4f}  "
        f"log loss {measures.log_loss(every.high[test], known):.4f}",
    )


def held_out(count: int) -> tuple[np.ndarray, np.ndarray]:
    """The places of the training ratings and of those that are held out, among `count`."""
    order = np.random.default_rng(SPLIT_SEED).permutation(count)
    test = max(1, round(HELD_OUT * count))
    return np.sort(order[test:]), np.sort(order[:test])
