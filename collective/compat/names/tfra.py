"""The table of the names of dynamic embeddings in TensorFlow Recommenders Addons.

Source: `tensorflow_recommenders_addons/dynamic_embedding/__init__.py`, and its packages `keras` and
`train`.
"""

from __future__ import annotations

from collective.compat.framework import Framework, Name, refused, same_numbers, works

_HERE = "collective.compat.tfra_stand_in"
_SINCE = "0.2.0"
_TABLE = "make a layer, such as de.keras.layers.HvdAllToAllEmbedding: its table has open keys."
_CHECKPOINT = (
    "give collective.keras.callbacks.Checkpoint(folder) to fit, or call its save(model) and "
    "restore(model)."
)
_AS_PLAIN = "its table is of all ranks; numbers are those of plain Keras's Embedding"
_CHECKPOINTED = "a checkpoint of this library"

TFRA = Framework(
    "tfra",
    "TensorFlow Recommenders Addons",
    marks=("tensorflow_recommenders_addons",),
    aliases=(("de.keras.layers.embedding", "de.keras.layers"),),
    names=(
        *(
            same_numbers(f"de.keras.layers.{name}", f"{_HERE}.layers.{name}", note, _SINCE)
            for name, note in (
                ("HvdAllToAllEmbedding", _AS_PLAIN),
                ("Embedding", _AS_PLAIN),
                ("BasicEmbedding", _AS_PLAIN),
                ("SquashedEmbedding", "one row of a sample's; as above"),
                ("FieldWiseEmbedding", "one row of a field's; as above"),
            )
        ),
        works(
            "de.keras.layers.LayerNormalization",
            f"{_HERE}.layers.LayerNormalization",
            "Keras's own",
            _SINCE,
        ),
        same_numbers(
            "de.DynamicEmbeddingOptimizer",
            f"{_HERE}.training.DynamicEmbeddingOptimizer",
            "the optimizer as it is: gradients are means over ranks, not sums",
            _SINCE,
        ),
        *(
            works(f"de.keras.{name}", f"{_HERE}.training.{ours}", note, _SINCE)
            for name, ours, note in (
                (
                    "callbacks.DEHvdBroadcastGlobalVariablesCallback",
                    "DEHvdBroadcastGlobalVariablesCallback",
                    "tables are left alone",
                ),
                ("callbacks.DEHvdModelCheckpoint", "DEHvdModelCheckpoint", _CHECKPOINTED),
                ("callbacks.ModelCheckpoint", "DEHvdModelCheckpoint", _CHECKPOINTED),
                ("models.save_model", "de_save_model", _CHECKPOINTED),
                ("models.de_save_model", "de_save_model", _CHECKPOINTED),
                ("models.de_hvd_save_model", "de_hvd_save_model", _CHECKPOINTED),
            )
        ),
        *(
            works(f"de.{name}", f"{_HERE}.options.{name}", note, _SINCE)
            for name, note in (
                ("enable_train_mode", ""),
                ("enable_inference_mode", "lookups that are made later get no gradients"),
                ("get_model_mode", ""),
                ("ModelMode", ""),
                ("HkvEvictStrategy", "no row is evicted"),
                ("TimestampRestrictPolicy", "`params.restrict` refuses to drop rows"),
                ("FrequencyRestrictPolicy", "`params.restrict` refuses to drop rows"),
            )
        ),
        *(
            Name(f"de.{name}", "no effect", f"{_HERE}.options.{name}", note, since=_SINCE)
            for name, note in (
                ("CuckooHashTableConfig", "tables are this library's."),
                ("CuckooHashTableCreator", "tables are this library's."),
                ("HkvHashTableConfig", "tables grow as needed, and evict no rows."),
                ("HkvHashTableCreator", "tables grow as needed, and evict no rows."),
                ("FileSystemSaver", "every rank's rows are in the checkpoints of this library."),
            )
        ),
        *(
            refused(f"de.{name}", note, _SINCE)
            for names, note in (
                (
                    "Variable get_variable TrainableWrapper DistributedVariableWrapper "
                    "DEResourceVariable create_slots trainable_wrapper_filter CuckooHashTable "
                    "HkvHashTable embedding_lookup embedding_lookup_sparse "
                    "embedding_lookup_unique safe_embedding_lookup_sparse "
                    "shadow_ops.ShadowVariable shadow_ops.embedding_lookup "
                    "shadow_ops.embedding_lookup_unique shadow_ops.HvdVariable",
                    _TABLE,
                ),
                (
                    "KVCreator RedisTable RedisTableConfig RedisTableCreator",
                    "leave kv_creator out: a table is in the memory of all ranks.",
                ),
                (
                    "RestrictPolicy",
                    "give the layer no policy, or one of the two that there are.",
                ),
                (
                    "warm_start WarmStartHook train.Checkpoint train.DECheckpoint train.DEHvdSaver",
                    _CHECKPOINT,
                ),
            )
            for name in names.split()
        ),
        works(
            "tensorflow_recommenders_addons.__version__",
            "collective.__version__",
            "this library's",
            _SINCE,
        ),
    ),
)
