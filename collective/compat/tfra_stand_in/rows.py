"""Has what scripts ask the table of a layer, its `params`."""

from __future__ import annotations

from typing import Any, NoReturn

import numpy as np
import tensorflow.compat.v1 as tf

from collective.ops.counting import counted


class Rows:
    """Tells about the rows of a layer's table that this rank has.

    Args:
        layer: the layer.
        restrict_policy: the class of a policy.
    """

    def __init__(self, layer: Any, restrict_policy: Any):
        self._layer, self.restrict_policy = layer, restrict_policy

    @property
    def name(self) -> str:
        """Returns the table's name."""
        return str(self._layer.embeddings.name)

    @property
    def dim(self) -> int:
        """Returns D, the values in a row."""
        return int(self._layer.embedding_size)

    @property
    def key_dtype(self) -> tf.DType:
        """Returns the type of the keys."""
        return self._layer.key_dtype

    @property
    def value_dtype(self) -> tf.DType:
        """Returns the type of the values."""
        return tf.float32

    def size(self) -> tf.Tensor:
        """Returns how many rows this rank has, int64 []."""
        self._check_is_eager("size")
        return tf.constant(self._layer.embeddings.local_count(), tf.int64)

    def export(self) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns this rank's keys [n], and their rows [n, D]."""
        self._check_is_eager("export")
        none = np.zeros([0]), np.zeros([0, self.dim])
        blocks = [*self._layer.embeddings.export()] or [none]
        keys, rows = (np.concatenate(each) for each in zip(*blocks))
        return tf.constant(keys, self.key_dtype), tf.constant(rows, tf.float32)

    def restrict(self, num_reserved: int, trigger: int | None = None) -> None:
        """Does nothing while this rank has at most `trigger` rows.

        Args:
            num_reserved: how many rows are to be kept.
            trigger: default: num_reserved.

        Raises:
            NotImplementedError: there are more rows.
        """
        limit, rows = num_reserved if trigger is None else trigger, int(self.size())
        if rows > limit:
            raise NotImplementedError(
                f"params.restrict(…) of the layer '{self._layer.name}' is not supported: the table "
                f"has {counted(rows, 'row')} here, and the limit is {limit}. "
                "Leave restrict out, so that the table grows; or make the model in a graph, where "
                "collective.TablePolicy(capacity=…) evicts rows."
            )

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(
            f"params.{name} is not supported: params has size(), export() and restrict(). "
            "`embeddings` of the layer is the table itself, with local_count(), export() and "
            "import_()."
        )

    @staticmethod
    def _check_is_eager(what: str) -> None:
        if not tf.executing_eagerly():
            raise NotImplementedError(
                f"params.{what}() in a tf.function is not supported: call it outside of functions."
            )
