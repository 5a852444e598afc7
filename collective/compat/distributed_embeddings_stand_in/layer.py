"""Has distributed-embeddings' layer, which makes tables of embedding layers."""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow.compat.v1 as tf
import tensorflow.compat.v2 as tf2

from collective.compat.distributed_embeddings_stand_in.embedding import Embedding
from collective.compat.distributed_embeddings_stand_in.strategy import DistEmbeddingStrategy
from collective.compat.framework import say_once
from collective.compat.horovod_stand_in import process
from collective.ops.communication import collectives
from collective.ops.counting import counted
from collective.scope import SCOPES
from collective.tables.table import Sharded, shard_view
from collective.tensorflow_internals.keras import Layer, package
from collective.wrappers.keras import get_table


class DistributedEmbedding(Layer):
    """Looks up inputs in the tables of several embedding layers, on all ranks together.

    It makes layers of its own, by the configurations of those given. Their weights are tables,
    whose rows are dealt to all ranks, or as COLLECTIVE_PLACEMENT says.

    Args:
        embeddings: T layers, one weight each: `tf.keras.layers.Embedding`, `Embedding`, or others
            whose configuration has `input_dim` and `output_dim`.
        strategy: 'basic', 'memory_balanced' or 'memory_optimized'. No effect.
        column_slice_threshold: no effect.
        row_slice_threshold: tables of at least as many elements keep the shape of their outputs;
            see `call`.
        dp_input: True (default): a rank gives its own samples [B, …] of all inputs, in their order.
            False: it gives the samples [N · B, …] of all N ranks, of the inputs
            `strategy.input_ids_list[rank]`, and gets the outputs of its own, of which the first
            rank's are first.
        input_table_map: the table of each input. Default None: one input for each table.
        data_parallel_threshold: tables of at most as many elements are replicated. Like
            row_slice_threshold it has no effect with dp_input=False.
        gpu_embedding_size: no effect, which rank 0 says.
        **kwargs: Keras's `name`, `trainable` and `dtype`.

    Attributes:
        strategy: a `DistEmbeddingStrategy`.

    Raises:
        RuntimeError: no scope() is open.
        ValueError: an argument isn't one of these.
    """

    def __init__(
        self,
        embeddings: Sequence[Any],
        strategy: str = "basic",
        column_slice_threshold: int | None = None,
        row_slice_threshold: int | None = None,
        dp_input: bool = True,
        input_table_map: Sequence[int] | None = None,
        data_parallel_threshold: int | None = None,
        gpu_embedding_size: int | None = None,
        **kwargs: Any,
    ):
        super().__init__(**kwargs)
        if not SCOPES.is_open:
            raise RuntimeError(
                "DistributedEmbedding makes tables, and needs scope(): start the script by "
                "`collective launch --as distributed-embeddings`, or make the model in "
                "`with strategy.scope():`."
            )
        if not process.is_initialized():
            process.init()
        self.world_size, self.rank = collectives.size(), collectives.rank()
        self.dp_input = dp_input
        if not dp_input and self.world_size > 1:
            say_once(
                "DistributedEmbedding(dp_input=False) has each rank read the samples of all ranks, "
                "of all inputs. With dp_input=True it reads its own only "
                "(distributed-embeddings' examples: --dp_input)."
            )
        if gpu_embedding_size is not None:
            say_once(
                "DistributedEmbedding(gpu_embedding_size=) has no effect here: all tables are in "
                "the memory of the device that computes."
            )
        has_groups = self.world_size > 1 and dp_input
        self.strategy = DistEmbeddingStrategy(
            embeddings,
            self.world_size,
            strategy,
            input_table_map,
            column_slice_threshold,
            row_slice_threshold if has_groups else None,
            data_parallel_threshold if has_groups else None,
            gpu_embedding_size,
        )
        self.tables = [
            (Embedding if type(layer) is package.layers.Embedding else type(layer)).from_config(
                dict(config)
            )
            for layer, config in zip(embeddings, self.strategy.global_configs)
        ]

    def build(self, input_shape: Any = None) -> None:
        """Makes the tables.

        Raises:
            ValueError: a layer has another number of weights than one.
        """
        used: set[str] = set()
        for number, layer in enumerate(self.tables):
            name = layer.name if layer.name not in used else f"{layer.name}_{number}"
            used.add(name)
            is_replicated = number in self.strategy.table_groups[0]
            SCOPES.enter_embedding({"placement": "replicated"} if is_replicated else {})
            try:
                with tf2.name_scope(f"{self.name}/{name}/"):
                    self._build(layer, input_shape[0] if input_shape else None)
            finally:
                SCOPES.leave_embedding()
            if len(layer.weights) != 1:
                raise ValueError(
                    f"'{self.name}' makes a table of each layer's weight, and the layer "
                    f"'{layer.name}' has {counted(len(layer.weights), 'weight')} instead of one."
                )
        self.built = True

    @staticmethod
    def _build(layer: Any, input_shape: Any) -> None:
        """Builds a layer whose `add_weight` makes tables, whatever its class is."""
        options = SCOPES.embedding_options
        assert options is not None
        getter = functools.partial(get_table, options, layer.name)
        layer.add_weight = functools.partial(layer.add_weight, getter=getter)
        try:
            layer.build(input_shape)
        finally:
            del layer.add_weight
        layer.built = True  # A class's own `build` may leave it.

    def call(self, inputs: Sequence[Any]) -> list[Any]:
        """Looks up each input in its table.

        Args:
            inputs: a list, of this rank's samples, or with dp_input=False of all ranks': tensors,
                `tf.RaggedTensor`s or `tf.SparseTensor`s.

        Returns:
            The outputs, in the order of `input_table_map`. On several ranks each is a matrix
            [B, K · D], as in distributed-embeddings, except those of replicated tables and of
            tables above row_slice_threshold, and ragged ones: these are as the layers return them.

        Raises:
            ValueError: it is another number of inputs.
            tf.errors.InvalidArgumentError: ranks do not divide the samples of all.
        """
        return self._outputs(inputs)

    @tf.autograph.experimental.do_not_convert
    def _outputs(self, inputs: Sequence[Any]) -> list[Any]:
        wanted = len(self.strategy.input_table_map)
        if not isinstance(inputs, (list, tuple)) or len(inputs) != wanted:
            given = len(inputs) if isinstance(inputs, (list, tuple)) else type(inputs).__name__
            raise ValueError(
                f"'{self.name}' takes a list of {counted(wanted, 'input')}, not {given}."
            )
        if not self.dp_input:
            order = self.strategy.input_ids_list[self.rank]
            inputs = [x for _, x in sorted(zip(order, inputs), key=lambda pair: pair[0])]
            inputs = [self._own_samples(x) for x in inputs]
        return [self._looked_up(*each) for each in zip(self.strategy.input_table_map, inputs)]

    def _own_samples(self, inputs: Any) -> Any:
        """Returns this rank's part [B, …] of the samples [N · B, …] of all ranks."""
        if self.world_size == 1:
            return inputs
        if not isinstance(inputs, (tf.RaggedTensor, tf.SparseTensor)):
            inputs = tf.convert_to_tensor(inputs)
        if isinstance(inputs, tf.RaggedTensor):
            count = inputs.nrows(tf.int64)
        else:
            is_sparse = isinstance(inputs, tf.SparseTensor)
            shape = inputs.dense_shape if is_sparse else tf.shape(inputs, out_type=tf.int64)
            count = shape[0]
        divided = tf.debugging.assert_equal(
            count % self.world_size,
            tf.zeros([], tf.int64),
            message=f"'{self.name}' has dp_input=False, and its inputs have the samples of all "
            f"ranks: their number is a multiple of {self.world_size}, the number of ranks.",
        )
        with tf.control_dependencies([] if divided is None else [divided]):
            own = tf.identity(count) // self.world_size
        if isinstance(inputs, tf.SparseTensor):
            start = tf.concat([[self.rank * own], tf.zeros_like(shape[1:])], 0)
            return tf.sparse.slice(inputs, start, tf.concat([[own], shape[1:]], 0))
        return inputs[self.rank * own : (self.rank + 1) * own]

    def _looked_up(self, table: int, ids: Any) -> Any:
        out = tf.cast(self.tables[table](ids), self.compute_dtype)
        is_matrix = self.world_size > 1 and table in self.strategy.table_groups[1]
        if not is_matrix or isinstance(out, tf.RaggedTensor) or out.shape.rank in (None, 2):
            return out
        width = out.shape[1:].as_list()
        if None in width:
            return tf.reshape(out, [tf.shape(out)[0], -1])
        return tf.reshape(out, [-1, math.prod(width)])

    def _variables(self) -> list[Any]:
        """Returns the tables in the order of the layers, also if some aren't trainable."""
        return [weight for layer in self.tables for weight in layer.weights]

    def get_weights(self, all_ranks: bool = False) -> list[np.ndarray]:
        """Returns the whole tables as arrays, in the order of the layers; all ranks call it.

        Args:
            all_ranks: whether all ranks get them. Default False: rank 0, the others an empty list.
        """
        is_wanted = all_ranks or self.rank == 0
        found = []
        for variable in self._variables():
            whole = variable.numpy()  # of all ranks, one after the other
            if is_wanted:
                found.append(whole)
        return found

    def set_weights(
        self, weights: Sequence[Any], chunk: int = 134217728, use_lock: bool = False
    ) -> None:
        """Gives tables their values; all ranks call it with the same.

        Args:
            weights: an array [V, D] for each layer, or the path of its .npy file.
            chunk, use_lock: no effect: a rank reads its own rows only.

        Raises:
            ValueError: it is another number of arrays, or the layer isn't built yet; or an array
                has another shape than its table.
        """
        del chunk, use_lock
        if len(weights) != len(self._variables()):
            raise ValueError(
                f"set_weights of '{self.name}' got {counted(len(weights), 'array')}, and it has "
                f"{counted(len(self._variables()), 'table')}"
                + ("." if self.built else ": it isn't built yet. Call it once before.")
            )
        arrays = [
            np.load(os.fspath(each), mmap_mode="r")
            if isinstance(each, (str, os.PathLike))
            else np.asarray(each)
            for each in weights
        ]
        for array, variable in zip(arrays, self._variables()):
            if list(array.shape) != variable.shape.as_list():
                raise ValueError(
                    f"set_weights of '{self.name}': the array for '{variable.name}' has the shape "
                    f"{list(array.shape)}, the table {variable.shape.as_list()}."
                )
        for array, variable in zip(arrays, self._variables()):
            if not isinstance(variable, Sharded):
                variable.assign(array)
                continue
            own = variable.ids_of_rows(tf.range(variable.shard_shape[0], dtype=tf.int64))
            with shard_view():
                variable.assign(array[own.numpy()])
