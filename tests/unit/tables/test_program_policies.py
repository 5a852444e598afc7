"""The random programs of tables try every pair of a policy's options with every optimizer."""

import itertools

from tests.ranks.conftest import PROGRAMS
from tests.ranks.table_programs import OPTIMIZERS, TABLES, beginning, random_policy


def test_policies_of_programs_have_every_pair_of_options_with_every_optimizer():
    kinds = {
        "admission": lambda policy: policy.counts_keys or policy.draws_keys,
        "eviction": lambda policy: policy.steps_to_live or policy.l2_weight_threshold,
        "bound": lambda policy: policy.weight_bound,
        "capacity": lambda policy: policy.capacity,
        "storage": lambda policy: policy.storage,
    }
    missing = set(itertools.product(OPTIMIZERS, itertools.combinations(kinds, 2)))
    for seed in range(*map(int, PROGRAMS["all"].split(":"))):
        rng, optimizer = beginning(seed)
        for _ in range(TABLES):
            policy = random_policy(rng, optimizer, "folder", on_device=False)
            has = [kind for kind, is_on in kinds.items() if is_on(policy)]
            missing -= {(optimizer, pair) for pair in itertools.combinations(has, 2)}
    # Adam moves all rows of a table in every step, which a table with a file refuses.
    assert {optimizer for optimizer, pair in missing if "storage" in pair} == {"adam"}
    assert all("storage" in pair for _, pair in missing)
