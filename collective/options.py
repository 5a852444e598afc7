"""The options of scope() and embedding_scope(): which values they may have, and what other
libraries' become.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

from collective import accumulation, comparing
from collective.profiling import profiler

# Tuning that scripts pass to other libraries: accepted, and said to be without effect.
# HybridBackend registers emb_backend, emb_num_groups, comm_…, grad_lazy_sync and so on with its
# context; SparseOperationKit takes the rest in its layers.
FOREIGN_PREFIXES = ("emb_", "comm_", "grad_", "data_")
FOREIGN: frozenset[str] = frozenset(
    {
        "sharding",
        "use_hierarchical_embedding_lookup",
        "batch_size",
        "model_dir",
        "keep_checkpoint_max",
        "keep_checkpoint_every_n_hours",
        "mode",
        "global_batch_size",
        "max_vocabulary_size_per_gpu",
        "slot_num",
        "max_nnz",
        "max_feature_num",
        "nnz_per_slot",
        "use_hashtable",
        "dynamic_input",
        "var_type",
        "key_type",
        "init_capacity",
        "max_capacity",
        "hotness",
    }
)

# The values of options, the default first.
DTYPES = (None, "float32", "float16", "bfloat16")
CHOICES: dict[str, tuple[Any, ...]] = {
    "embedding_gradients": ("mean", "sum"),
    "missing_slots": ("error", "fresh"),
    "grouping": (True, False),
    "wire_dtype": DTYPES,
    "gradient_wire_dtype": DTYPES,
    "plan": ("print", "quiet"),
    "dense_compression": ("none", "fp16", "bf16"),
    "prefetch_keys": (False, True),
    "deterministic": (False, True),
}


def check(options: Mapping[str, Any]) -> None:
    """Raises ValueError for values of scope()'s options that are none, and OSError where the
    profile's folder can't be made.
    """
    for name, values in CHOICES.items():
        if options.get(name, values[0]) not in values:
            raise ValueError(
                f"scope({name}=…) is {' or '.join(map(repr, values))}, not {options[name]!r}."
            )
    profiler.check(options)
    accumulation.check(options)
    comparing.check(options)


def check_rows(options: Mapping[str, Any]) -> None:
    """Raises ValueError for embedding_scope(min_rows=…) that isn't a number of rows."""
    rows = options.get("min_rows", 0)
    if isinstance(rows, bool) or not isinstance(rows, int) or rows < 0:
        raise ValueError(f"embedding_scope(min_rows=…) is a whole number from 0, not {rows!r}.")


def known(what: str, options: dict[str, Any], known: dict[str, Any]) -> dict[str, Any]:
    """The options of ours; one warning for those of other libraries."""
    foreign = sorted(
        o for o in options if o not in known and (o in FOREIGN or o.startswith(FOREIGN_PREFIXES))
    )
    unknown = sorted(o for o in options if o not in known and o not in foreign)
    if unknown:
        raise TypeError(
            f"{what}() has no option {', '.join(unknown)}. Its options: "
            f"{', '.join(known) or 'none'}."
        )
    if foreign:
        warnings.warn(
            f"{what}(): {', '.join(foreign)} tunes another library and has no effect "
            f"here; leave it out to silence "
            "this.",
            stacklevel=3,
        )
    return {o: v for o, v in options.items() if o in known}
