"""Describes the rules by which gradients change weights, as in `tf.compat.v1.train`. g is the
sum of the gradients, w the weight.

`update` takes them, and again in every step if something changes. The numbers that the host writes
here are uploaded if they differ from the previous step's. `applied` is the truth with which kernels
are compared.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import ClassVar

import numpy as np

# New weights and slots.
Applied = tuple[np.ndarray, tuple[np.ndarray, ...]]


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

    def applied(self, w: np.ndarray, g: np.ndarray, slots: Sequence[np.ndarray]) -> Applied:
        """Applies the rule to weights [R, D] and their slots in NumPy.

        Args:
            w, g: float64 [R, D].
            slots: float64, each [R, D], or of a row-wise rule [R, 1].
        """
        raise NotImplementedError


class SGD(Rule):
    """w -= rate g. `GradientDescentOptimizer`."""

    kernel, slots = "sgd", 0

    def applied(self, w: np.ndarray, g: np.ndarray, slots: Sequence[np.ndarray]) -> Applied:
        return w - self.rate * g, ()


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

    def applied(self, w: np.ndarray, g: np.ndarray, slots: Sequence[np.ndarray]) -> Applied:
        m = self.momentum * slots[0] + g
        return w - self.rate * (g + self.momentum * m if self.nesterov else m), (m,)


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
        return [self.rate, self.epsilon, 0.0]

    def applied(self, w: np.ndarray, g: np.ndarray, slots: Sequence[np.ndarray]) -> Applied:
        a = slots[0] + g * g
        return w - self.rate * g / (np.sqrt(a) + self.epsilon), (a,)


@dataclasses.dataclass(frozen=True)
class KerasAdagrad(Rule):
    """a += g²; w -= rate g / sqrt(a + epsilon). Adagrad of `tf.keras.optimizers`; slots: a."""

    epsilon: float = 1e-7
    kernel = "adagrad"

    def numbers(self) -> list[float]:
        return [self.rate, self.epsilon]

    def options(self) -> list[float]:
        return [self.rate, 0.0, self.epsilon]

    def applied(self, w: np.ndarray, g: np.ndarray, slots: Sequence[np.ndarray]) -> Applied:
        a = slots[0] + g * g
        return w - self.rate * g / np.sqrt(a + self.epsilon), (a,)


@dataclasses.dataclass(frozen=True)
class RowWiseAdagrad(Rule):
    """a += mean(g²), one number per row; w -= rate g / (sqrt(a) + epsilon).
    `collective.train.RowWiseAdagradOptimizer`; slots: a, [V, 1].
    """

    epsilon: float = 0.0
    kernel, row_wise = "row_wise_adagrad", True

    def options(self) -> list[float]:
        return [self.rate, self.epsilon]

    def applied(self, w: np.ndarray, g: np.ndarray, slots: Sequence[np.ndarray]) -> Applied:
        a = slots[0] + (g * g).mean(1, keepdims=True)
        return w - self.rate * g / (np.sqrt(a) + self.epsilon), (a,)


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

    def applied(self, w: np.ndarray, g: np.ndarray, slots: Sequence[np.ndarray]) -> Applied:
        m = self.beta1 * slots[0] + (1 - self.beta1) * g
        v = self.beta2 * slots[1] + (1 - self.beta2) * g * g
        return w - self.corrected_rate() * m / (np.sqrt(v) + self.epsilon), (m, v)


class KerasAdam(Adam):
    """Adam of `tf.keras.optimizers`, which computes with 1 - beta1 and 1 - beta2; slots: m, v."""

    @property
    def operation(self) -> str:
        return "KerasAdam"

    def numbers(self) -> list[float]:
        return [self.corrected_rate(), 1 - self.beta1, 1 - self.beta2, self.epsilon]

    def options(self) -> list[float]:
        rate, rest1, rest2, epsilon = self.numbers()
        return [rate, self.beta1, self.beta2, epsilon, rest1, rest2]


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

    def applied(self, w: np.ndarray, g: np.ndarray, slots: Sequence[np.ndarray]) -> Applied:
        a, p = slots[0] + g * g, -self.power
        linear = slots[1] + g + 2 * self.shrinkage * w - (a**p - slots[0] ** p) / self.rate * w
        nearest = np.clip(linear, -self.l1, self.l1)
        return (nearest - linear) / (a**p / self.rate + 2 * self.l2), (a, linear)


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

    def applied(self, w: np.ndarray, g: np.ndarray, slots: Sequence[np.ndarray]) -> Applied:
        s = self.decay * slots[0] + (1 - self.decay) * g * g
        m = self.momentum * slots[1] + self.rate * g / np.sqrt(s + self.epsilon)
        return w - m, (s, m)


class CenteredRMSProp(RMSProp):
    """c = decay c + (1 - decay) g in addition; m = momentum m + rate g / sqrt(s + epsilon - c²).
    Slots: s, m, c.
    """

    kernel, slots = "centered_rmsprop", 3

    def applied(self, w: np.ndarray, g: np.ndarray, slots: Sequence[np.ndarray]) -> Applied:
        s = self.decay * slots[0] + (1 - self.decay) * g * g
        c = self.decay * slots[2] + (1 - self.decay) * g
        m = self.momentum * slots[1] + self.rate * g / np.sqrt(s + self.epsilon - c**2)
        return w - m, (s, m, c)


RULES = (
    SGD,
    Momentum,
    Adagrad,
    KerasAdagrad,
    RowWiseAdagrad,
    Adam,
    KerasAdam,
    Ftrl,
    RMSProp,
    CenteredRMSProp,
)

# Rules with numbers of each kind, by which kernels are checked.
EXAMPLES: tuple[Rule, ...] = (
    SGD(0.1),
    Momentum(0.1, 0.9),
    Momentum(0.1, 0.8, True),
    Adagrad(0.1),
    Adagrad(0.1, 1e-3),
    KerasAdagrad(0.1, 1e-2),
    RowWiseAdagrad(0.1, 1e-3),
    Adam(0.01, step=3, lazy=True),
    Adam(0.01, step=2),
    KerasAdam(0.01, step=2),
    Ftrl(0.1, 0.01, 0.02),
    Ftrl(0.1),
    Ftrl(0.1, 0.2, 0.3, 0.1),
    Ftrl(0.1, 0.1, 0.2, power=-0.7),
    RMSProp(0.01, 0.9, 0.5, 1e-3),
    CenteredRMSProp(0.01, 0.9, 0.5, 1e-3),
)
