"""Defines PERSIA's hyperparameters of embeddings, with their name and signature."""

from __future__ import annotations

import dataclasses
import math

import tensorflow.compat.v1 as tf

from collective.policy import TablePolicy, is_real


@dataclasses.dataclass(frozen=True)
class EmbeddingConfig:
    """Holds the hyperparameters of embeddings, which become a `collective.TablePolicy`.

    Args:
        emb_initialization: (lower, upper): a new row's elements are drawn uniformly from
            [lower, upper). Default (-0.01, 0.01).
        admit_probability: the probability with which a key without a row gets one, from 0 to 1.
            Default 1: every key does. (`TablePolicy.admit_probability`)
        weight_bound: b: after an update all elements of the updated rows are in [-b, b]. Above 0;
            default 10; infinity means no bound. (`TablePolicy.weight_bound`)

    Raises:
        ValueError: an option has an invalid value.
    """

    emb_initialization: tuple[float, float] = (-0.01, 0.01)
    admit_probability: float = 1.0
    weight_bound: float = 10

    def __post_init__(self) -> None:
        bounds = self.emb_initialization
        if not (
            isinstance(bounds, (tuple, list))
            and len(bounds) == 2
            and all(is_real(bound) and math.isfinite(bound) for bound in bounds)
            and bounds[0] <= bounds[1]
        ):
            raise ValueError(
                "EmbeddingConfig(emb_initialization=…) is (lower, upper), two numbers with lower "
                f"<= upper, not {bounds!r}."
            )
        object.__setattr__(self, "emb_initialization", tuple(bounds))
        if not (is_real(self.admit_probability) and 0 <= self.admit_probability <= 1):
            raise ValueError(
                "EmbeddingConfig(admit_probability=…) is a number from 0 to 1, not "
                f"{self.admit_probability!r}."
            )
        if not (is_real(self.weight_bound) and self.weight_bound > 0):
            raise ValueError(
                f"EmbeddingConfig(weight_bound=…) is a number above 0, not {self.weight_bound!r}."
            )

    def to_policy(self) -> TablePolicy:
        """Returns the policy for the options that have an equivalent."""
        return TablePolicy(
            initializer=tf.random_uniform_initializer(*self.emb_initialization),
            weight_bound=None if self.weight_bound == math.inf else self.weight_bound,
            admit_probability=None if self.admit_probability == 1 else self.admit_probability,
        )

    def without_effect(self) -> dict[str, str]:
        """Returns the given options that have no effect yet, and what that means."""
        return {}
