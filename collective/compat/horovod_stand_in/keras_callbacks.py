"""Has Horovod's callbacks for `fit`.

Inside scope() logs are of all ranks before callbacks get them, and replicated variables are equal.
What is left to do is to give all ranks the weights that one has loaded, and the learning rate.

Source: Horovod 0.28.1, horovod/_keras/callbacks.py (what the callbacks do, and when).
"""

from __future__ import annotations

from typing import Any, Callable

from collective.compat.framework import say_once
from collective.compat.horovod_stand_in import process, training
from collective.tensorflow_internals.keras import Callback, backend


class BroadcastGlobalVariablesCallback(Callback):
    """Gives all ranks rank `root_rank`'s weights when training starts, tables left alone.

    A model that has no weights yet starts with rank 0's.

    Args:
        root_rank: the rank whose weights all get.
        device: no effect.

    Raises:
        NotImplementedError: when training starts, `root_rank` isn't 0, and the model has no
            weights yet.
    """

    def __init__(self, root_rank: int, device: str = ""):
        super().__init__()
        del device
        self.root_rank = root_rank

    def on_train_begin(self, logs: Any = None) -> None:
        """Broadcasts the weights, and the variables that the optimizer has."""
        if not self.model.built:
            if self.root_rank != 0:
                raise NotImplementedError(
                    f"BroadcastGlobalVariablesCallback({self.root_rank}): the model "
                    f"'{self.model.name}' has no weights yet, and starts with rank 0's. Build it "
                    "before, or give rank 0."
                )
            return
        of_optimizer = self.model.optimizer.variables
        made = of_optimizer() if callable(of_optimizer) else of_optimizer
        training.broadcast_variables([*self.model.variables, *made], self.root_rank)


class MetricAverageCallback(Callback):
    """Does nothing: inside scope() the logs of an epoch are of all ranks.

    Args:
        device: no effect.
    """

    def __init__(self, device: str = ""):
        super().__init__()
        del device
        self._supports_tf_logs = True  # needs no values


class LearningRateScheduleCallback(Callback):
    """Sets the learning rate to `initial_lr` times a multiplier, in some epochs.

    Args:
        initial_lr: the rate that is multiplied.
        multiplier: a number, or a function of the epoch, which has a fraction if not `staircase`.
        start_epoch: the first epoch, from 0.
        end_epoch: the epoch after the last one; None: all that follow.
        staircase: whether the rate stays the same in an epoch.
        momentum_correction: whether momentum is scaled as the rate is, while the rate changes. Only
            the legacy optimizers have a momentum that can change.
        steps_per_epoch: how many steps an epoch has; Default: what Keras knows.

    Raises:
        ValueError: there is no initial_lr; or when training starts, nobody knows steps_per_epoch.
    """

    def __init__(
        self,
        initial_lr: float,
        multiplier: float | Callable[[float], float],
        start_epoch: int = 0,
        end_epoch: int | None = None,
        staircase: bool = True,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
    ):
        super().__init__()
        if not initial_lr:
            raise ValueError("LearningRateScheduleCallback(initial_lr=…) has to be given.")
        self.initial_lr, self.multiplier = initial_lr, multiplier
        self.start_epoch, self.end_epoch = start_epoch, end_epoch
        self.staircase = staircase or not callable(multiplier)
        self.momentum_correction = momentum_correction
        self.steps_per_epoch: Any = steps_per_epoch
        self._epoch = 0
        self._momentum: float | None = None

    def on_train_begin(self, logs: Any = None) -> None:
        """Finds the steps of an epoch."""
        if self.staircase or self.steps_per_epoch:
            return
        self.steps_per_epoch = self.params.get("steps")
        if not self.steps_per_epoch:
            raise ValueError(
                f"{type(self).__name__}: Keras doesn't know how many steps an epoch has; give "
                "steps_per_epoch."
            )

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Notes the epoch."""
        self._epoch = epoch

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Sets the rate of the step."""
        is_later = self.end_epoch is not None and self._epoch >= self.end_epoch
        if self._epoch < self.start_epoch or is_later:
            return
        if not self.staircase:
            self._set(self._epoch + batch / self.steps_per_epoch)
        elif batch == 0:
            self._set(self._epoch)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Takes back a correction of the momentum."""
        if self._momentum is not None:
            backend.set_value(self.model.optimizer.momentum, self._momentum)
            self._momentum = None

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Adds the rate to the logs."""
        if logs is not None:
            logs["lr"] = float(backend.get_value(self.model.optimizer.learning_rate))

    def _set(self, epoch: float) -> None:
        optimizer, multiplier = self.model.optimizer, self.multiplier
        old = float(backend.get_value(optimizer.learning_rate))
        factor = multiplier(epoch) if callable(multiplier) else multiplier
        new = self.initial_lr * factor
        backend.set_value(optimizer.learning_rate, new)
        momentum = getattr(optimizer, "momentum", None)
        if not self.momentum_correction or momentum is None or new == old or not old:
            return
        if hasattr(momentum, "assign"):
            self._momentum = float(backend.get_value(momentum))
            backend.set_value(momentum, self._momentum * new / old)
        elif momentum:
            say_once(
                f"{type(self).__name__}(momentum_correction=True) has no effect here: the momentum "
                f"of {type(optimizer).__name__} can't change; that of tf.keras.optimizers.legacy "
                "can"
            )


class LearningRateWarmupCallback(LearningRateScheduleCallback):
    """Raises the learning rate from `initial_lr / N`, on N ranks, to `initial_lr`.

    Args:
        initial_lr: the rate after the warmup.
        warmup_epochs: how many epochs it takes.
        momentum_correction, steps_per_epoch: as of `LearningRateScheduleCallback`.
        verbose: whether rank 0 says when it is over.
    """

    def __init__(
        self,
        initial_lr: float,
        warmup_epochs: int = 5,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
        verbose: int = 0,
    ):
        ranks = process.size()

        def rising(epoch: float) -> float:
            # As if the step were made: an epoch ends with a whole multiple.
            done = (epoch + 1 / self.steps_per_epoch) / warmup_epochs
            return (1 + done * (ranks - 1)) / ranks

        super().__init__(
            initial_lr, rising, 0, warmup_epochs, False, momentum_correction, steps_per_epoch
        )
        self.verbose = verbose

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Adds the rate to the logs, and says when the warmup is over."""
        super().on_epoch_end(epoch, logs)
        if self.verbose and epoch + 1 == self.end_epoch and process.rank() == 0:
            rate = float(backend.get_value(self.model.optimizer.learning_rate))
            print(f"\nEpoch {epoch + 1}: the learning rate has reached {rate:g}.")
