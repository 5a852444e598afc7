"""Generated ratings, for where MovieLens can't be had.

Every rating is drawn from a distribution that is a known function of its user and its movie. So the
best AUC and the best log loss that any model can be expected to reach on the ratings that are held
out are known: those of the true probability of a high rating.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import erf, sqrt

import numpy as np

USERS, MOVIES = 943, 1682  # as many as in movie_lens/100k-ratings
TASTES = 2
SPREAD = 0.8  # of ratings of one movie by people of one taste, standard deviation in stars


@dataclass(frozen=True)
class GeneratedRatings:
    """Holds R ratings, with the element types of movie_lens/100k-ratings."""

    movie_id: np.ndarray  # text [R]
    user_id: np.ndarray  # text [R]
    user_rating: np.ndarray  # float32 [R], 1 to 5 stars
    probability: np.ndarray  # float64 [R], of at least 4 stars


def generate(count: int, seed: int = 0) -> GeneratedRatings:
    """Draws ratings; the same arguments give the same ones."""
    random = np.random.default_rng(seed)
    user = random.choice(USERS, size=count, p=_popularity(USERS, 0.5))
    movie = random.choice(MOVIES, size=count, p=_popularity(MOVIES, 0.8))
    mildness, quality = 0.5 * random.normal(size=USERS), 0.7 * random.normal(size=MOVIES)
    taste, character = random.normal(size=(USERS, TASTES)), random.normal(size=(MOVIES, TASTES))
    stars = (
        3.5
        + mildness[user]
        + quality[movie]
        + 0.4 * (taste[user] * character[movie]).sum(1) / sqrt(TASTES)
    )
    drawn = stars + SPREAD * random.normal(size=count)
    return GeneratedRatings(
        movie_id=np.char.mod("%d", movie + 1),
        user_id=np.char.mod("%d", user + 1),
        user_rating=np.clip(np.floor(drawn + 0.5), 1, 5).astype(np.float32),
        # of drawn >= 3.5, which is 4 stars or more
        probability=_normal_cdf((stars - 3.5) / SPREAD),
    )


def _popularity(count: int, power: float) -> np.ndarray:
    """Makes probabilities of which a few are large and most are small."""
    weight = np.arange(1, count + 1) ** -power
    return weight / weight.sum()


def _normal_cdf(values: np.ndarray) -> np.ndarray:
    return np.array([(1 + erf(value / sqrt(2))) / 2 for value in values])
