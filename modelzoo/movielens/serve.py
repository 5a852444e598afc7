"""Asks an exported model how likely it is that a user gives a movie at least four stars.

It needs TensorFlow alone:

    python modelzoo/movielens/serve.py /tmp/ratings --user 42 --movies 1 50 1682 never-seen
"""

from __future__ import annotations

import argparse
import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # TensorFlow's notes on this machine

import tensorflow as tf  # noqa: E402  it reads the environment when it is imported


def latest(folder: str) -> str:
    """Returns `folder`, if it is a SavedModel, else the newest SavedModel in it."""
    if tf.saved_model.contains_saved_model(folder):
        return folder
    names = tf.io.gfile.listdir(folder) if tf.io.gfile.isdir(folder) else []
    export_times = [name.rstrip("/") for name in names if name.rstrip("/").isdigit()]
    if not export_times:
        raise SystemExit(
            f"serve.py: error: no SavedModel in {folder}: --export-dir of train.py makes one"
        )
    return os.path.join(folder, max(export_times, key=int))  # seconds since 1970


def ask(folder: str, user: str, movies: list[str]) -> list[float]:
    """Returns the probability that `user` gives at least four stars, for each of `movies`."""
    rate = tf.saved_model.load(latest(folder)).signatures["serving_default"]
    answer = rate(user_id=tf.fill([len(movies)], user), movie_id=tf.constant(movies, tf.string))
    return [float(p) for p in answer["probability"]]


def main() -> None:
    parser = argparse.ArgumentParser(description="Asks a model that train.py has exported.")
    parser.add_argument("folder", help="what --export-dir of train.py said")
    parser.add_argument("--user", required=True, help="the id of a user")
    parser.add_argument("--movies", nargs="+", required=True, help="ids of movies")
    options = parser.parse_args()
    probabilities = ask(options.folder, options.user, options.movies)
    for movie, probability in zip(options.movies, probabilities):
        print(f"user {options.user}  movie {movie}  {probability:.4f}")


if __name__ == "__main__":
    main()
