"""Options of scopes: which there are, and which are another library's."""
from __future__ import annotations

import warnings
from typing import Any

# Tuning that scripts pass to other libraries: accepted, and said to be without effect. HybridBackend registers emb_backend,
# emb_num_groups, comm_…, grad_lazy_sync and so on with its context; SparseOperationKit takes the rest in its layers.
FOREIGN_PREFIXES = ('emb_', 'comm_', 'grad_', 'data_')
FOREIGN: frozenset[str] = frozenset({
    'sharding', 'use_hierarchical_embedding_lookup', 'batch_size', 'model_dir', 'keep_checkpoint_max',
    'keep_checkpoint_every_n_hours', 'mode',
    'global_batch_size', 'max_vocabulary_size_per_gpu', 'slot_num', 'max_nnz', 'max_feature_num', 'nnz_per_slot',
    'use_hashtable', 'dynamic_input', 'var_type', 'key_type', 'init_capacity', 'max_capacity', 'hotness'})


def known(what: str, options: dict[str, Any], own: dict[str, Any]) -> dict[str, Any]:
    """The options of ours; one warning for those of other libraries."""
    foreign = sorted(o for o in options if o not in own and (o in FOREIGN or o.startswith(FOREIGN_PREFIXES)))
    unknown = sorted(o for o in options if o not in own and o not in foreign)
    if unknown:
        raise TypeError(f"{what}() has no option {', '.join(unknown)}. Its options: {', '.join(own) or 'none'}.")
    if foreign:
        warnings.warn(f"{what}(): {', '.join(foreign)} tunes another library and has no effect here; leave it out to silence "
                      'this.', stacklevel=3)
    return {o: v for o, v in options.items() if o in own}
