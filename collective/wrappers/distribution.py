"""Refuses strategies of `tf.distribute` together with scope(), which distributes the training.

Both would make replicas of variables, and add up gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow.compat.v2 as tf2


def scope(original: Callable[..., Any], strategy: Any) -> Any:
    """Replaces `tf.distribute.Strategy.scope`.

    Raises:
        NotImplementedError: it is any other strategy than the default one, which Keras opens, too.
    """
    if not tf2.distribute.has_strategy() and strategy is not tf2.distribute.get_strategy():
        _refuse(strategy)
    return original(strategy)


def refuse_open() -> None:
    """Refuses a strategy of `tf.distribute` in whose scope the caller is.

    Raises:
        NotImplementedError: there is one.
    """
    if tf2.distribute.has_strategy():
        _refuse(tf2.distribute.get_strategy())


def _refuse(strategy: Any) -> None:
    raise NotImplementedError(
        f"tf.distribute's {type(strategy).__name__} can't be used together with "
        "CollectiveStrategy().scope(), which distributes the training itself: leave it out. "
        "`collective launch` starts a process for each GPU, or with -np 2 two of them."
    )
