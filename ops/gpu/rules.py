"""Describes the rules by which gradients change weights, as in `tf.compat.v1.train`. g is the
sum of the gradients, w the weight.

`update` takes them, and again in every step if something changes. The numbers that the host writes
here are uploaded if they differ from the previous step's.
"""

from __future__ import annotations

import dataclasses
import math
from typing import ClassVar


@dataclasses.dataclass(frozen=True)
class Rule:
    """Has the properties of all rules.

    Attributes:
        rate: the learning rate.
        kernel: the name of its kernel.
        slots: how many slots it has.
        row_wise: whether a slot has one number per row instead of the table's dimension.
    """

    rate: float
    kernel: ClassVar[str]
    slots: ClassVar[int] = 1
    row_wise: ClassVar[bool] = False

    @property
    def operation(self) -> str:
        """Returns its name for the compiled operations that take `numbers`."""
        return type(self).__name__

    def numbers(self) -> list[float]:
        """Returns the inputs of a compiled operation."""
        return self.options()

    def options(self) -> list[float]:
        """Returns what the kernel is given, in the order of rules.cuh."""
        return [self.rate]


class SGD(Rule):
    """w -= rate g. `GradientDescentOptimizer`."""

    kernel, slots = "sgd", 0


@dataclasses.dataclass(frozen=True)
class Momentum(Rule):
    """m = momentum m + g; w -= rate m, or with nesterov rate (g + momentum m). `MomentumOptimizer`;
    slots: m.
    """

    momentum: float = 0.9
    nesterov: bool = False
    kernel = "momentum"

    @property
    def operation(self) -> str:
        return "NesterovMomentum" if self.nesterov else "Momentum"

    def numbers(self) -> list[float]:
        return [self.rate, self.momentum]

    def options(self) -> list[float]:
        return [*self.numbers(), float(self.nesterov)]


@dataclasses.dataclass(frozen=True)
class Adagrad(Rule):
    """a += g²; w -= rate g / (sqrt(a) + epsilon). `AdagradOptimizer`, whose epsilon is 0; slots: a.

    Without epsilon, 0 / 0 is NaN: begin with a positive `a`.
    """

    epsilon: float = 0.0
    kernel = "adagrad"

    def numbers(self) -> list[float]:
        if self.epsilon != 0:
            raise ValueError(f"the compiled Adagrad has no epsilon, but this one {self.epsilon}")
        return [self.rate]

    def options(self) -> list[float]:
        return [self.rate, self.epsilon]


@dataclasses.dataclass(frozen=True)
class RowWiseAdagrad(Rule):
    """a += mean(g²), one number per row; w -= rate g / (sqrt(a) + epsilon).
    `collective.train.RowWiseAdagradOptimizer`; slots: a, [V, 1].
    """

    epsilon: float = 0.0
    kernel, row_wise = "row_wise_adagrad", True

    def options(self) -> list[float]:
        return [self.rate, self.epsilon]


@dataclasses.dataclass(frozen=True)
class Adam(Rule):
    """m = beta1 m + (1 - beta1) g; v = beta2 v + (1 - beta2) g²; w -= r m / (sqrt(v) + epsilon).
    `AdamOptimizer`; slots: m, v.

    r = rate sqrt(1 - beta2**step) / (1 - beta1**step). Rows without a gradient have g = 0, too,
    unless it is lazy.

    Attributes:
        step: the number of the step, from 1.
        corrected: whether `rate` is already r.
        lazy: whether rows without a gradient stay as they are.
    """

    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8
    step: int = 1
    lazy: bool = False
    corrected: bool = False
    kernel, slots = "adam", 2

    @property
    def operation(self) -> str:
        return "LazyAdam" if self.lazy else "Adam"

    def numbers(self) -> list[float]:
        return [self.corrected_rate(), self.beta1, self.beta2, self.epsilon]

    def options(self) -> list[float]:
        return [*self.numbers(), 1 - self.beta1, 1 - self.beta2]

    def corrected_rate(self) -> float:
        """Returns r."""
        if self.corrected:
            return self.rate
        return self.rate * math.sqrt(1 - self.beta2**self.step) / (1 - self.beta1**self.step)


@dataclasses.dataclass(frozen=True)
class Ftrl(Rule):
    """FTRL-Proximal as in `FtrlOptimizer`; slots: a ("accum"), l ("linear").

    With p = -power and a' = a + g²: l += g + 2 shrinkage w - (a'^p - a^p) / rate w; a = a';
    w = (clip(l, -l1, l1) - l) / (a^p / rate + 2 l2). Its beta, if it has one, adds beta / (2 rate)
    to l2.
    """

    l1: float = 0.0
    l2: float = 0.0
    shrinkage: float = 0.0
    power: float = -0.5
    kernel, slots = "ftrl", 2

    def options(self) -> list[float]:
        return [self.rate, self.l1, self.l2, self.shrinkage, self.power]


@dataclasses.dataclass(frozen=True)
class RMSProp(Rule):
    """s = decay s + (1 - decay) g²; m = momentum m + rate g / sqrt(s + epsilon); w -= m.
    `RMSPropOptimizer`; slots: s, m.
    """

    decay: float = 0.9
    momentum: float = 0.0
    epsilon: float = 1e-10
    kernel, slots = "rmsprop", 2

    def numbers(self) -> list[float]:
        return [self.rate, self.decay, self.momentum, self.epsilon]

    def options(self) -> list[float]:
        return [self.rate, self.decay, 1 - self.decay, self.momentum, self.epsilon]


class CenteredRMSProp(RMSProp):
    """c = decay c + (1 - decay) g in addition; m = momentum m + rate g / sqrt(s + epsilon - c²).
    Slots: s, m, c.
    """

    kernel, slots = "centered_rmsprop", 3


RULES = (SGD, Momentum, Adagrad, RowWiseAdagrad, Adam, Ftrl, RMSProp, CenteredRMSProp)
