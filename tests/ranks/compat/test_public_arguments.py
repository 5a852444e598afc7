"""Each argument of other frameworks' names that are this library's own works, or is refused.

What an option's policy does to numbers has tests of its own (`test_admission`, `test_eviction`,
`test_first_rows`, `test_rows_in_file`): here an option is one of a policy's, or changes nothing.
"""

import inspect

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import collective
from collective.compat import deeprec_functions
from collective.compat.names.deeprec import DEEPREC
from collective.compat.names.hybridbackend import HYBRIDBACKEND
from collective.compat.names.sok import SOK
from collective.policy import FirstRows, TablePolicy, policy_of

pytestmark = [pytest.mark.ranks(1), pytest.mark.backends("hb")]
ROWS = np.arange(24, dtype=np.float32).reshape(8, 3)
WORKS, NO_EFFECT, REFUSED = "works", "no effect", "refused"
FILES = {"storage_type": collective.StorageType.DRAM_SSDHASH, "storage_path": "folder"}
BLOOM = {"filter_freq": 2, "max_element_size": 9, "false_positive_probability": 0.1}


def policy(**options):
    """Returns the policy of an embedding variable's options."""
    return policy_of(collective.EmbeddingVariableOption(**options), "a test")


def filtered(kind=collective.CBFFilter, **options):
    return policy(filter_option=kind(**options))


def stored(**options):
    return policy(storage_option=collective.StorageOption(**{**FILES, **options}))


def drawn(**options):
    return policy(init_option=collective.InitializerOption(**options))


def started(**options):
    return policy(ckpt=collective.CheckpointOption(**options)).first_rows


def run(values):
    with tf.Session() as session:
        session.run(tf.global_variables_initializer())
        return session.run(values)


def deviation(rows):
    """Returns the deviation of first rows that are scaled by the number of rows."""
    initializer = tf.variance_scaling_initializer(mode="fan_in", distribution="untruncated_normal")
    option = collective.InitializerOption(initializer, default_value_dim=rows)
    table = deeprec_functions.get_embedding_variable(
        "t", 4, ev_option=collective.EmbeddingVariableOption(init_option=option)
    )
    found = tf.nn.embedding_lookup(table, tf.range(9999, dtype=tf.int64))
    step = tf.train.GradientDescentOptimizer(0.0).minimize(tf.reduce_sum(found))
    return run([found, step])[0].std()


def parts():
    """Returns a matrix in two variables, of which TensorFlow counts rows by a strategy."""
    return [tf.get_variable(f"part_{i}", initializer=ROWS[4 * i : 4 * i + 4]) for i in range(2)]


def looked_up(**kwargs):
    """Looks up the ids 1, 2 and 5 of two samples by the sparse lookup, unless told otherwise."""
    ids = tf.SparseTensor([[0, 0], [0, 1], [1, 0]], tf.constant([1, 2, 5], tf.int64), [2, 2])
    given = {"params": [tf.get_variable("t", initializer=ROWS)], "sp_ids": [ids]}
    found = collective.group_embedding_lookup_sparse(**(given | {"combiners": ["sum"]} | kwargs))
    return run(found)[0]


def dense(**kwargs):
    given = {"params": [tf.get_variable("t", initializer=ROWS)], "ids": [tf.constant([1, 5])]}
    return run(collective.group_embedding_lookup(**(given | kwargs)))[0]


def weights(values):
    return [tf.SparseTensor([[0, 0], [0, 1], [1, 0]], values, [2, 2])]


POOLED = np.stack([ROWS[1] + ROWS[2], ROWS[5]])


def trained(kind, **kwargs):
    """Returns a weight after three updates by an optimizer of `collective.train`, and all names."""
    step = tf.train.get_or_create_global_step()
    given = {} if kind == "AdamAsyncOptimizer" else {"global_step": step}
    optimizer = getattr(collective.train, kind)(**({"learning_rate": 0.1} | given | kwargs))
    weight = tf.get_variable("w", initializer=[[1.0], [2.0]])
    loss = tf.reduce_sum(tf.square(tf.gather(weight, [0])))
    train = optimizer.minimize(loss, global_step=step)
    with tf.Session() as session:
        session.run(tf.global_variables_initializer())
        for _ in range(3):
            session.run(train)
        return session.run(weight), [v.op.name for v in tf.global_variables()]


def changes(name, kwargs, default):
    """Tells whether an optimizer updates otherwise with these arguments than with others."""
    found, _ = trained(name, **kwargs)
    with tf.Graph().as_default():
        return not np.array_equal(found, trained(name, **default)[0])


def of_optimizer(name, default, arguments):
    """Returns the checks of an optimizer's arguments, each of them with another value."""
    return {
        **{
            argument: (
                WORKS,
                lambda argument=argument, value=value: changes(
                    name, {**default, argument: value()}, default
                ),
            )
            for argument, value in arguments.items()
        },
        "use_locking": (REFUSED, lambda: trained(name, use_locking=True)),
        "name": (WORKS, lambda: "w/Other" in " ".join(trained(name, name="Other")[1])),
    }


def of_adagrad_decay(name):
    return of_optimizer(
        name,
        {"accumulator_decay_step": 1, "accumulator_decay_rate": 0.5},
        {
            "learning_rate": lambda: 0.2,
            "global_step": lambda: tf.constant(0),  # With it nothing decays.
            "initial_accumulator_value": lambda: 0.3,
            "accumulator_decay_step": lambda: 2,
            "accumulator_decay_rate": lambda: 0.9,
        },
    )


def queue(**kwargs):
    return collective.data.WorkQueue(**({"works": list("abcdefgh"), "shuffle": False} | kwargs))


def dealt(**kwargs):
    items = tf.data.make_one_shot_iterator(queue(**kwargs).input_dataset().batch(99)).get_next()
    return b"".join(run(items)).decode()


# For each argument what it does, and a check that is true, or raises where it is refused.
ARGUMENTS = {
    "EmbeddingVariableOption": {
        "ht_type": (NO_EFFECT, lambda: policy(ht_type="a type") == TablePolicy()),
        "ht_partition_num": (NO_EFFECT, lambda: policy(ht_partition_num=3) == TablePolicy()),
        "evict_option": (
            WORKS,
            lambda: policy(evict_option=collective.GlobalStepEvict(5)).steps_to_live == 5,
        ),
        "ckpt": (WORKS, lambda: started(ckpt_to_load_from="m") == FirstRows("m")),
        "filter_option": (WORKS, lambda: filtered(collective.CounterFilter) == TablePolicy()),
        "storage_option": (WORKS, lambda: stored().storage == "dram_ssd"),
        "init_option": (WORKS, lambda: drawn() == TablePolicy()),
    },
    "InitializerOption": {
        "initializer": (WORKS, lambda: drawn(initializer=tf.abs).initializer is tf.abs),
        # A variance of 1 / rows.
        "default_value_dim": (WORKS, lambda: abs(deviation(400) - 0.05) < 0.002),
        "default_value_no_permission": (
            WORKS,
            lambda: drawn(default_value_no_permission=3).default_value_no_permission == 3,
        ),
    },
    "CounterFilter": {
        "filter_freq": (
            WORKS,
            lambda: filtered(collective.CounterFilter, filter_freq=3) == TablePolicy(filter_freq=3),
        ),
    },
    "CBFFilter": {
        "filter_freq": (WORKS, lambda: filtered(**BLOOM).filter_freq == 2),
        "max_element_size": (WORKS, lambda: filtered(**BLOOM).max_element_size == 9),
        "false_positive_probability": (
            WORKS,
            lambda: filtered(**BLOOM).false_positive_probability == 0.1,
        ),
        "counter_type": (
            WORKS,
            lambda: filtered(**BLOOM, counter_type=tf.uint8).counter_type == "uint8",
        ),
    },
    "GlobalStepEvict": {
        "steps_to_live": (
            WORKS,
            lambda: (
                policy(evict_option=collective.GlobalStepEvict(steps_to_live=5)).steps_to_live == 5
            ),
        )
    },
    "L2WeightEvict": {
        "l2_weight_threshold": (
            WORKS,
            lambda: (
                policy(
                    evict_option=collective.L2WeightEvict(l2_weight_threshold=0.5)
                ).l2_weight_threshold
                == 0.5
            ),
        )
    },
    "StorageOption": {
        "storage_type": (WORKS, lambda: stored().storage == "dram_ssd"),
        "storage_type of no kind": (
            REFUSED,
            lambda: stored(storage_type=collective.StorageType.HBM_DRAM),
        ),
        "storage_path": (WORKS, lambda: stored(storage_path="there").storage_path == "there"),
        "storage_size": (WORKS, lambda: stored(storage_size=[7]).storage_size == 7),
        "cache_strategy": (
            NO_EFFECT,
            lambda: stored(cache_strategy=collective.CacheType.LRU) == stored(),
        ),
    },
    "CheckpointOption": {
        "ckpt_to_load_from": (WORKS, lambda: started(ckpt_to_load_from="m") == FirstRows("m")),
        "tensor_name_in_ckpt": (
            WORKS,
            lambda: started(ckpt_to_load_from="m", tensor_name_in_ckpt="t") == FirstRows("m", "t"),
        ),
        "always_load_from_specific_ckpt": (
            REFUSED,
            lambda: started(ckpt_to_load_from="m", always_load_from_specific_ckpt=True),
        ),
        "init_data_source": (REFUSED, lambda: started(init_data_source="rows.csv")),
    },
    "feature_column.group_embedding_column_scope": {
        "name": (
            NO_EFFECT,
            lambda: (
                collective.feature_column.group_embedding_column_scope(name="g").__enter__() is None
            ),
        ),
    },
    "group_embedding_lookup": {
        "params": (WORKS, lambda: np.array_equal(dense(), ROWS[[1, 5]])),
        "ids": (WORKS, lambda: np.array_equal(dense(ids=[[[7]]]), ROWS[[[7]]])),
        "partition_strategy": (
            WORKS,
            lambda: np.array_equal(dense(params=[parts()], partition_strategy="div"), ROWS[[1, 5]]),
        ),
        "name": (WORKS, lambda: dense(name="here") is not None and has_scope("here")),
    },
    "group_embedding_lookup_sparse": {
        "params": (WORKS, lambda: np.array_equal(looked_up(), POOLED)),
        "sp_ids": (
            WORKS,
            lambda: np.array_equal(looked_up(sp_ids=[tf.sparse.from_dense([[7]])]), ROWS[7:]),
        ),
        "combiners": (
            WORKS,
            lambda: np.array_equal(looked_up(combiners=["mean"]), POOLED / [[2], [1]]),
        ),
        "sp_weights": (
            WORKS,
            lambda: np.array_equal(
                looked_up(sp_weights=weights([1.0, 0.0, -1.0])), [ROWS[1], -ROWS[5]]
            ),
        ),
        "partition_strategy": (
            WORKS,
            lambda: np.array_equal(looked_up(params=[parts()], partition_strategy="div"), POOLED),
        ),
        "is_sequence": (
            WORKS,
            lambda: np.array_equal(
                looked_up(is_sequence=True), [[ROWS[1], ROWS[2]], [ROWS[5], 0 * ROWS[5]]]
            ),
        ),
        "params_num_per_group": (
            NO_EFFECT,
            lambda: np.array_equal(looked_up(params_num_per_group=1), POOLED),
        ),
        "name": (WORKS, lambda: looked_up(name="here") is not None and has_scope("here")),
    },
    "train.AdamAsyncOptimizer": of_optimizer(
        "AdamAsyncOptimizer",
        {"apply_sparse_rmsprop": False},
        {
            "learning_rate": lambda: 0.2,
            "beta1": lambda: 0.5,
            "beta2": lambda: 0.5,
            "epsilon": lambda: 1.0,
            "apply_sparse_rmsprop": lambda: True,
        },
    ),
    **{
        f"train.{name}": of_adagrad_decay(name)
        for name in ("AdagradDecayOptimizer", "AdagradDecayOptimizerV2")
    },
    "RunConfig": {
        "args": (WORKS, lambda: collective.RunConfig("m").model_dir == "m"),
        "kwargs": (WORKS, lambda: collective.RunConfig(keep_checkpoint_max=3).keep_checkpoint_max),
        **{
            f"save_incremental_checkpoint_{unit}": (
                WORKS,
                lambda unit=unit: (
                    vars(collective.RunConfig(**{f"save_incremental_checkpoint_{unit}": 5}))[
                        f"save_incremental_checkpoint_{unit}"
                    ]
                    == 5
                ),
            )
            for unit in ("secs", "steps")
        },
    },
    # Of DeepRec's name, which is a class of this one.
    "data.WorkQueue": {
        "works": (WORKS, lambda: dealt() == "abcdefgh"),
        "num_epochs": (WORKS, lambda: dealt(num_epochs=2) == "abcdefghabcdefgh"),
        "shuffle": (WORKS, lambda: dealt() != dealt(shuffle=True)),
        "seed": (
            WORKS,
            lambda: dealt(shuffle=True, seed=1) not in (dealt(shuffle=True), dealt()),
        ),
        "prefix": (WORKS, lambda: dealt(prefix="x", works=["a", "b"]) == "xaxb"),
        "num_slices": (NO_EFFECT, lambda: dealt(num_slices=3) == dealt()),
        "name": (WORKS, lambda: queue(name="other").name.startswith("other")),
    },
}
CASES = [
    pytest.param(kind, check, id=f"{name}: {argument}")
    for name, of_name in ARGUMENTS.items()
    for argument, (kind, check) in of_name.items()
]
# Values; what a script doesn't call: the argument of a session that saves increments; and classes
# of tensorflow-estimator.
NO_FUNCTIONS = {
    "StorageType",
    "CacheType",
    "__version__",
    "checkpoint.save_increment",
    "estimator.EstimatorSpec",
    "estimator.RunConfig",
}


def has_scope(name):
    return any(op.name.startswith(f"{name}/") for op in tf.get_default_graph().get_operations())


@pytest.mark.matrix
@pytest.mark.parametrize("kind, check", CASES)
def test_an_argument(strategy, size, kind, check):
    if size > 1:
        return  # What arguments do on several ranks is what they do on one.
    with strategy.scope(plan="quiet"), tf.Graph().as_default():
        if kind == REFUSED:
            with pytest.raises((NotImplementedError, ValueError)):
                check()
        else:
            assert check()


def test_all_arguments_are_here():
    ours = {
        name.ours.removeprefix("collective.")
        for framework in (DEEPREC, HYBRIDBACKEND, SOK)
        for name in framework.names
        if name.kind == "works" and name.ours.startswith("collective.")
    }
    public = {name for name in ours if not name.startswith("compat.")} - NO_FUNCTIONS
    assert {*ARGUMENTS} == {*public, "data.WorkQueue"}
    for name, of_name in ARGUMENTS.items():
        found = collective
        for word in name.split("."):
            found = getattr(found, word)
        parameters = {*inspect.signature(found).parameters}
        assert parameters <= {*of_name}, name
        assert {argument.partition(" ")[0] for argument in of_name} <= parameters, name
