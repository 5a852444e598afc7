"""The table of the names of NVIDIA's distributed-embeddings.

Source: `distributed_embeddings/__init__.py`, and its packages `python.layers` and `python.ops`.
"""

from __future__ import annotations

from collective.compat.framework import Framework, refused, same_numbers, works

_HERE = "collective.compat.distributed_embeddings_stand_in"

DISTRIBUTED_EMBEDDINGS = Framework(
    "distributed-embeddings",
    "distributed-embeddings",
    marks=("distributed_embeddings",),
    aliases=tuple(
        (f"distributed_embeddings.{module}", "distributed_embeddings")
        for module in (
            "dist_model_parallel",
            "python.layers.dist_model_parallel",
            "python.layers.embedding",
            "python.ops.embedding_lookup_ops",
        )
    ),
    names=tuple(
        make(f"distributed_embeddings.{name}", f"{_HERE}.{module}.{name}", note, "0.2.0")
        for make, module, name, note in (
            (
                same_numbers,
                "layer",
                "DistributedEmbedding",
                "a table of each layer, by rows; tables of up to data_parallel_threshold elements "
                "are replicated",
            ),
            (
                works,
                "strategy",
                "DistEmbeddingStrategy",
                "each rank has all inputs in `input_ids_list`, in the order of their tables",
            ),
            (same_numbers, "training", "DistributedGradientTape", "the tape as it is"),
            (same_numbers, "training", "DistributedOptimizer", "the optimizer as it is"),
            (works, "training", "broadcast_variables", "tables are left alone"),
            (works, "training", "BroadcastGlobalVariablesCallback", "tables are left alone"),
            (same_numbers, "embedding", "Embedding", "outside of the above a replicated layer"),
            (same_numbers, "embedding", "ConcatOneHotEmbedding", "a replicated layer"),
            (same_numbers, "embedding", "embedding_lookup", "a sample without ids gets zeros"),
        )
    )
    + (
        works(
            "distributed_embeddings.__version__",
            "collective.__version__",
            "this library's",
            "0.2.0",
        ),
        refused(
            "distributed_embeddings.IntegerLookup",
            "give keys of any number to collective.keras.layers.Embedding, which has open keys, or "
            "number them by tf.keras.layers.IntegerLookup.",
            "0.2.0",
        ),
    ),
)
