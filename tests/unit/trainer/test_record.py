"""The record of a Trainer is JSON: reading it runs nothing; a damaged one is refused by name."""

from __future__ import annotations

import json
import random

import numpy as np
import pytest

from collective.ops.communication import collectives
from collective.trainer import record
from collective.trainer.record import TrainingRecord

collectives.init()


def test_what_is_written_is_read(tmp_path):
    written = TrainingRecord(str(tmp_path), "a", "train:model_fn", {"lr": 0.1}, 12)
    written.before_checkpoint(3, 1.5)
    written.validated(3, {"auc": np.float32(0.5), "step": np.int64(3), "summary": b"\0"})
    found = record.read(str(tmp_path))
    assert found == written
    assert found.validations == {3: {"auc": 0.5, "step": 3, "summary": None}}
    assert record.read(str(tmp_path / "none")) is None


def test_generators_continue(tmp_path):
    kept = TrainingRecord(str(tmp_path))
    random.gauss(0, 1)  # leaves half of a pair
    np.random.standard_normal()
    kept.before_checkpoint(2, 0.0)
    drawn = [random.gauss(0, 1), random.random(), np.random.standard_normal(), np.random.random()]
    record.read(str(tmp_path)).restore_generators(2)
    again = [random.gauss(0, 1), random.random(), np.random.standard_normal(), np.random.random()]
    assert again == drawn


def test_a_checkpoint_forgets_later_steps(tmp_path):
    """A job died after step 6 was noted, before its checkpoint was complete."""
    kept = TrainingRecord(str(tmp_path))
    for step in (0, 2, 4, 6):
        kept.before_checkpoint(step, float(step))
        kept.validated(step, {"loss": 1.0})
    assert list(kept.seconds) == list(kept.generators) == [2, 4, 6]
    kept.before_checkpoint(4, 4.5)
    assert kept.seconds == {2: 2.0, 4: 4.5} and list(kept.validations) == [0, 2, 4]


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"seconds": {"x": 1}}', '{"unknown": 1}'])
def test_a_damaged_record_is_refused(tmp_path, text):
    (tmp_path / record.FILE).write_text(text)
    with pytest.raises(ValueError, match="trainer.json' isn't the record of a Trainer"):
        record.read(str(tmp_path))


def test_only_plain_hyperparameters_are_kept():
    params = {"lr": 0.1, "layers": [8, 4], "made": object(), 3: "three"}
    assert record.plain_params(params) == {"lr": 0.1, "layers": [8, 4], "3": "three"}
    assert json.dumps(record.plain_params(params))
