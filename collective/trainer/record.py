"""Keeps what a Trainer must know to continue, next to the checkpoints: `<model_dir>/trainer.json`.

    before a checkpoint     continue_id, seconds, the states of Python's and NumPy's generators
    after a validation      its metrics, by step

It is JSON, so reading one runs no code of whoever wrote it. The states of the newest checkpoints
are kept, because a job may die before the newest one is complete.
"""

from __future__ import annotations

import dataclasses
import json
import os
import random
from typing import Any

import numpy as np
import tensorflow.compat.v1 as tf

from collective.checkpoint.files import commit
from collective.coordination import barrier
from collective.ops.communication import collectives

FILE = "trainer.json"
_STATES_KEPT = 3


@dataclasses.dataclass
class TrainingRecord:
    """Holds what is known of the training in a folder; all ranks have the same.

    Attributes:
        folder: the folder.
        continue_id: the id of the training; None if it was given none.
        model_fn: the module and name of the function that builds the model, if it has such a name.
        params: the hyperparameters that JSON can hold.
        batch: the records of a global batch.
        seconds: of training, by the steps of the newest checkpoints.
        generators: the states of rank 0's generators, likewise.
        validations: metrics, by step.
    """

    folder: str
    continue_id: str | None = None
    model_fn: str | None = None
    params: dict[str, Any] = dataclasses.field(default_factory=dict)
    batch: int = 0
    seconds: dict[int, float] = dataclasses.field(default_factory=dict)
    generators: dict[int, Any] = dataclasses.field(default_factory=dict)
    validations: dict[int, dict[str, Any]] = dataclasses.field(default_factory=dict)

    def before_checkpoint(self, step: int, seconds: float) -> None:
        """Notes what belongs to the checkpoint of a step, before it is saved. Every rank calls it.

        Steps after it are forgotten: they were those of a job that died, or was begun again.
        """
        self.validations = {at: each for at, each in self.validations.items() if at <= step}
        self.seconds = _newest({**self.seconds, step: seconds}, step)
        self.generators = _newest({**self.generators, step: _states()}, step)
        self._write()

    def validated(self, step: int, metrics: dict[str, Any]) -> None:
        """Notes the metrics of a step. Every rank calls it."""
        self.validations[step] = {name: _plain(value) for name, value in metrics.items()}
        self._write()

    def restore_generators(self, step: int) -> None:
        """Lets Python's and NumPy's generators continue from the checkpoint of a step."""
        if step in self.generators:
            _restore(self.generators[step])

    def _write(self) -> None:
        def write() -> None:
            if collectives.rank() == 0:
                text = json.dumps({**dataclasses.asdict(self), "folder": None}, indent=1)
                path = os.path.join(self.folder, FILE)
                with tf.io.gfile.GFile(path + ".new", "w") as file:
                    file.write(text)
                commit.sync(path + ".new")
                commit.move(path + ".new", path)

        barrier.run_on_all_ranks(None, f"writing '{os.path.join(self.folder, FILE)}'", write)


def read(folder: str) -> TrainingRecord | None:
    """Reads the record in a folder; None if there is none.

    Raises:
        ValueError: it is damaged.
    """
    path = os.path.join(folder, FILE)
    if not tf.io.gfile.exists(path):
        return None
    with tf.io.gfile.GFile(path) as file:
        text = file.read()
    try:
        fields = {**json.loads(text), "folder": folder}
        for name in ("seconds", "generators", "validations"):
            fields[name] = {int(step): value for step, value in fields[name].items()}
        return TrainingRecord(**fields)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(
            f"'{path}' isn't the record of a Trainer ({type(error).__name__}: {error}). Move it "
            "away: the checkpoints next to it then count as those of no continue_id."
        ) from error


def _newest(by_step: dict[int, Any], step: int) -> dict[int, Any]:
    """Returns the entries of the newest steps up to `step`."""
    kept = sorted(at for at in by_step if at <= step)[-_STATES_KEPT:]
    return {at: by_step[at] for at in kept}


def _states() -> Any:
    """Returns the states of Python's and NumPy's generators, as JSON can hold them."""
    version, numbers, gauss = random.getstate()
    state: Any = np.random.get_state()
    name, keys, *rest = state
    if name != "MT19937":  # The script has given NumPy another one, which it has to restore.
        return [[version, list(numbers), gauss], None]
    return [[version, list(numbers), gauss], [name, keys.tolist(), *map(_plain, rest)]]


def _restore(states: Any) -> None:
    (version, numbers, gauss), of_numpy = states
    random.setstate((version, tuple(numbers), gauss))
    if of_numpy is not None:
        name, keys, *rest = of_numpy
        np.random.set_state((name, np.array(keys, np.uint32), *rest))


def _plain(value: Any) -> Any:
    """Returns a value as JSON can hold it; what it can't, such as a summary, as None."""
    if isinstance(value, (np.ndarray, np.generic)):
        return value.tolist() if value.dtype.kind in "biuf" else None
    return value if isinstance(value, (bool, int, float, str)) else None


def plain_params(params: Any) -> dict[str, Any]:
    """Returns the hyperparameters that JSON can hold."""
    kept = {}
    for name, value in dict(params).items():
        try:
            json.dumps(value)
        except (TypeError, ValueError):
            continue
        kept[str(name)] = value
    return kept
