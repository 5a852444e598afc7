"""Trains, validates and saves by periods, over `strategy.estimator`: `collective.Trainer`.

    from collective.trainer import Batch, Epoch, Record, Seconds

    trainer = collective.Trainer(model_fn, params, model_dir="model", global_batch_size=4096)
    trainer.fit(training_data, test_data, max_length=Epoch(3), validation_period=Batch(1000))

The units say how often something happens, `Batch(1000)`, or at which positions, `Batch([10, 50])`.
They are the same positions on any number of ranks. (`Batch` counts batches here; a batch of data is
a `collective.data.Batch`.)

Source: `determined.pytorch`, https://docs.determined.ai/latest/model-dev-guide/api-guides/
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from collective.trainer.schedule import Batch, Epoch, Record, Seconds

if TYPE_CHECKING:
    from collective.trainer.loaded_model import LoadedModel
    from collective.trainer.trainer import Trainer, Training

__all__ = ["Batch", "Epoch", "LoadedModel", "Record", "Seconds", "Trainer", "Training"]


def __getattr__(name: str) -> Any:
    # The units need no TensorFlow.
    if name in ("Trainer", "Training"):
        from collective.trainer import trainer

        return getattr(trainer, name)
    if name == "LoadedModel":
        from collective.trainer import loaded_model

        return loaded_model.LoadedModel
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
