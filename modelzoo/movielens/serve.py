"""Asks an exported model, with TensorFlow alone: how likely is it that a user gives a movie at
least four stars?

    python modelzoo/movielens/serve.py /tmp/ratings --user 42 --movies 1 50 1682 never-seen
"""

from __future__ import annotations

import argparse
import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # TensorFlow's notes on this machine

import tensorflow as tf  # noqa: E402  after what it is told by the environment


def latest(folder: str) -> str:
    """`folder`, if it is a SavedModel, else the newest of those in it, whose names are the seconds
    since 1970.
    """
    if tf.saved_model.contains_saved_model(folder):
        return folder
    there = [
        name
        for name in (tf.io.gfile.listdir(folder) if tf.io.gfile.isdir(folder) else [])
        if name.rstrip("/").isdigit()
    ]
    if not there:
        raise SystemExit(
            f"serve.py: error: no SavedModel in {folder}: --export-dir of train.py makes one"
        )
    return os.path.join(folder, max(there, key=lambda name: int(name.rstrip("/"))))


def ask(folder: str, user: str, movies: list[str]) -> list[float]:
    """The probability that `user` gives at least four stars, for each of `movies`."""
    rate = tf.saved_model.load(latest(folder)).signatures["serving_default"]
    answer = rate(user_id=tf.fill([len(movies)], user), movie_id=tf.constant(movies, tf.string))
    return [float(p) for p in answer["probability"]]


def main() -> None:
    parser = argparse.ArgumentParser(description="Asks a model that train.py has exported.")
    parser.add_argument("folder", help="what --export-dir of train.py said")
    parser.add_argument("--user", required=True, help="the id of a user")
    parser.add_argument("--movies", nargs="+", required=True, help="ids of movies")
    given = parser.parse_args()
    for movie, probability in zip(given.movies, ask(given.folder, given.user, given.movies)):
        print(f"user {given.user}  movie {movie}  {probability:.4f}")


if __name__ == "__main__":
    main()
