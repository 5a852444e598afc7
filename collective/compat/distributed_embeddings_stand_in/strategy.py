"""Decides what distributed-embeddings' strategies decide, as far as a script can see it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from collective.policy import is_whole

STRATEGIES = ("basic", "memory_balanced", "memory_optimized")


class DistEmbeddingStrategy:
    """Says which tables are replicated, and in which order inputs are given with dp_input=False.

    Rows of all other tables are dealt to all ranks, whatever the strategy is.

    Args:
        embeddings: T layers, whose configurations have `input_dim` and `output_dim`.
        world_size: N.
        strategy: one of STRATEGIES.
        input_table_map: the table of each input. Default None: one input for each table.
        column_slice_threshold: no effect.
        row_slice_threshold: tables of at least as many elements keep the shape of their outputs.
        data_parallel_threshold: tables of at most as many elements are replicated.
        gpu_embedding_size: no effect.

    Attributes:
        strategy: its name.
        global_configs: the configurations of the layers.
        input_table_map: the table of each input.
        table_groups: the tables that are replicated, those that are neither, and those of at least
            row_slice_threshold elements.
        input_ids_list: the inputs of each rank: all, in the order of their tables.

    Raises:
        ValueError: there is no such strategy; or there are no layers, or one without dimensions; or
            the map has another table than these.
    """

    def __init__(
        self,
        embeddings: Sequence[Any],
        world_size: int,
        strategy: str = "basic",
        input_table_map: Sequence[int] | None = None,
        column_slice_threshold: int | None = None,
        row_slice_threshold: int | None = None,
        data_parallel_threshold: int | None = None,
        gpu_embedding_size: int | None = None,
    ):
        if strategy not in STRATEGIES:
            raise ValueError(f"Unsupported shard strategy {strategy!r}: {', '.join(STRATEGIES)}.")
        self.strategy = strategy
        self.column_slice_threshold = column_slice_threshold
        self.row_slice_threshold = row_slice_threshold
        self.data_parallel_threshold = data_parallel_threshold
        self.gpu_embedding_size = gpu_embedding_size
        self.global_configs = [layer.get_config() for layer in embeddings]
        if not self.global_configs:
            raise ValueError("DistributedEmbedding needs a list of at least one embedding layer.")
        for layer, config in zip(embeddings, self.global_configs):
            if not all(is_whole(config.get(each)) for each in ("input_dim", "output_dim")):
                raise ValueError(
                    f"The layer '{layer.name}' tells DistributedEmbedding no numbers of rows and "
                    "columns: its get_config() must have 'input_dim' and 'output_dim'."
                )
        tables = range(len(self.global_configs))
        if input_table_map is None:
            input_table_map = tables
        self.input_table_map = list(input_table_map)
        for place, table in enumerate(self.input_table_map):
            if not (is_whole(table) and table in tables):
                raise ValueError(
                    f"input_table_map[{place}] is {table!r}: tables are 0 to {len(tables) - 1}."
                )
        self.table_groups: list[list[int]] = [[], [], []]
        for table, config in enumerate(self.global_configs):
            elements = config["input_dim"] * config["output_dim"]
            is_small = data_parallel_threshold and elements <= data_parallel_threshold
            is_large = row_slice_threshold and elements >= row_slice_threshold
            self.table_groups[0 if is_small else 2 if is_large else 1].append(table)
        ordered = sorted(range(len(self.input_table_map)), key=self.input_table_map.__getitem__)
        self.input_ids_list = [list(ordered) for _ in range(world_size)]
