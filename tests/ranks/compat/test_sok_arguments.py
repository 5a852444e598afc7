"""Each argument of each name of SparseOperationKit works, changes no number, or is refused."""

import inspect
import weakref
from datetime import datetime, timezone

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import collective
from collective.compat import sok_functions, sok_variables
from collective.compat.names.sok import SOK
from collective.ops.communication.collectives import rank, size
from collective.scope import SCOPES

pytestmark = [pytest.mark.ranks(1), pytest.mark.backends("hb")]
NAMES = {name.theirs.removeprefix("sok."): name for name in SOK.names}
WHOLE = np.arange(8, dtype=np.float32).reshape(4, 2)
ONES = tf.ones_initializer()
INITIALIZED = weakref.WeakKeyDictionary()  # The names of variables, by session.


def sok(name, /, *args, **kwargs):
    return NAMES[name].resolve()(*args, **kwargs)


def run(values):
    """Computes values in the graph's session, in which new variables are initialized first."""
    session = tf.get_default_session() or tf.InteractiveSession()
    initialized = INITIALIZED.setdefault(session, set())
    new = {v.op.name: v.initializer for v in tf.global_variables() if v.op.name not in initialized}
    session.run(list(new.values()))
    initialized.update(new)
    return session.run(values)


def static(**kwargs):
    return sok("Variable", **({"initial_value": WHOLE} | kwargs))


def dynamic(**kwargs):
    return sok("DynamicVariable", **({"dimension": 2, "initializer": "3"} | kwargs))


def rows(variable, ids=(0, 3)):
    return run(sok("all2all_dense_embedding", variable, tf.constant(list(ids))))


def looked_up(**kwargs):
    """Looks the ids 1, 2 and 1 of two samples up in WHOLE, unless told otherwise."""
    ids = tf.SparseTensor([[0, 0], [0, 1], [1, 0]], tf.constant([1, 2, 1], tf.int64), [2, 2])
    return run(sok("lookup_sparse", **({"params": static(), "sp_ids": ids} | kwargs)))


def trained(variable, optimizer):
    loss = tf.reduce_sum(sok("all2all_dense_embedding", variable, tf.constant([3])))
    step = optimizer.apply_gradients(zip(tf.gradients(loss, [variable]), [variable]))
    run(step)
    return rows(variable)


def layer(name, **kwargs):
    """Makes a layer, and returns it with its rows of four keys."""
    pools = name == "DistributedEmbedding"
    own = {"combiner": "sum", "max_nnz": 2} if pools else {"nnz_per_slot": 2}
    sizes = {"max_vocabulary_size_per_gpu": 4, "embedding_vec_size": 2, "slot_num": 2}
    made = sok(name, **(sizes | own | {"embedding_initializer": ONES} | kwargs))
    keys = [[1, 2], [3, 3]]
    if kwargs.get("dynamic_input"):
        keys = keys[0]
    return made, run(made(tf.sparse.from_dense(keys) if pools else tf.constant([keys][-1:])))


def of_layers(name):
    """Returns the checks of the arguments that both layers have."""
    return {
        "max_vocabulary_size_per_gpu": lambda: (
            layer(name, max_vocabulary_size_per_gpu=9, use_hashtable=False)[
                0
            ].embedding_variable.shape.as_list()
            == [9, 2]
        ),
        "embedding_vec_size": lambda: layer(name, embedding_vec_size=3)[1].shape[-1] == 3,
        "slot_num": lambda: layer(name)[1].shape[:2] == (1, 2),
        "use_hashtable": lambda: (
            [layer(name, use_hashtable=on)[0].embedding_variable.rows for on in (True, False)]
            == [None, 4]
        ),
        "key_dtype": lambda: same(lambda **to: layer(name, **to)[1], key_dtype=tf.int32),
        "embedding_initializer": lambda: (
            np.unique(layer(name, embedding_initializer="zeros")[1]) == [0]
        ).all(),
    }


def same(make, **kwargs):
    """Tells whether arguments change no number."""
    return np.array_equal(make(**kwargs), make())


def dumped(folder, variables, optimizer=None, loaded=None):
    """Dumps a variable that was trained, trains on, loads it, and tells whether rows are back."""
    before = [rows(v) for v in variables]
    sok("dump", folder, variables if len(variables) > 1 else variables[0], optimizer)
    for v in variables:
        run(v.assign(v.read_value() * 2))
    sok("load", folder, loaded or variables, optimizer)
    return all(np.array_equal(rows(v), old) for v, old in zip(variables, before))


def with_slots(folder):
    v, optimizer = static(), tf.train.MomentumOptimizer(0.5, 0.9)
    trained(v, optimizer)
    slot = optimizer.get_slot(v, "momentum")
    sok("dump", folder, [v], optimizer)
    momentum = run(slot.read_value())
    run(slot.initializer)
    sok("load", folder, [v], optimizer)
    return momentum.any() and np.array_equal(run(slot.read_value()), momentum)


def since(**kwargs):
    v = dynamic()
    rows(v)
    given = {"sok_vars": v, "time_threshold": datetime(2020, 1, 1, tzinfo=timezone.utc)}
    return sok("incremental_model_dump", **(given | kwargs))[0][0].tolist()


def scope_of(name, **kwargs):
    """Opens what a function opens until the process ends, and closes it; tells if it was open."""
    try:
        sok(name, **kwargs)
        return SCOPES.options.embedding_gradients == "sum"
    finally:
        if sok_functions._scope:
            sok_functions._scope.pop().__exit__(None, None, None)


def in_trainable(v):
    return any(v is each for each in tf.trainable_variables())


def some():
    return [static(), tf.get_variable("w", [2]), dynamic()]


def assigned():
    """Gives two keys rows, and returns (keys, rows) as they are then."""
    v = dynamic()
    run(sok("assign", v, indices=[7, 5], values=[[3.0, 4.0], [1.0, 2.0]]))
    keys, found = run(sok("export", v))
    return keys.tolist(), found.tolist()


WORKS, NO_EFFECT, REFUSED = "works", "no effect", "refused"
# For each argument what it does, and a check that is true, or raises where it is refused.
ARGUMENTS = {
    "init": {
        "comm_tool": (REFUSED, lambda _: sok("init", comm_tool="mpi")),
        "use_legacy_optimizer": (
            NO_EFFECT,
            lambda _: scope_of("init", use_legacy_optimizer=False) and scope_of("init"),
        ),
    },
    "Init": {"options": (NO_EFFECT, lambda _: scope_of("Init", global_batch_size=8))},
    "Variable": {
        "args": (WORKS, lambda _: np.array_equal(rows(sok("Variable", WHOLE * 2)), WHOLE[::3] * 2)),
        "kwargs": (WORKS, lambda _: np.array_equal(rows(static()), WHOLE[::3])),
        "mode": (WORKS, lambda _: static(mode="localized:0").target_gpu == 0),
        "mode of no kind": (REFUSED, lambda _: static(mode="replicated")),
    },
    "DistributedVariable": {
        "initial_value": (WORKS, lambda _: np.array_equal(rows(static()), WHOLE[::3])),
        "trainable": (
            WORKS,
            lambda _: in_trainable(static()) and not in_trainable(static(trainable=False)),
        ),
        "collections": (
            WORKS,
            lambda _: static(collections=["mine"]) is tf.get_collection("mine")[0],
        ),
        "validate_shape": (
            NO_EFFECT,
            lambda _: same(lambda **to: rows(static(**to)), validate_shape=False),
        ),
        "caching_device": (
            NO_EFFECT,
            lambda _: same(lambda **to: rows(static(**to)), caching_device="/cpu:0"),
        ),
        "name": (
            WORKS,
            lambda _: (
                [static(name="t").op.name for _ in range(2)] == ["t", "t_1"]
                and static().op.name.startswith("sok_static_Variable_")
            ),
        ),
        "dtype": (WORKS, lambda _: static(dtype=tf.float64).dtype.base_dtype == tf.float64),
        "variable_def": (REFUSED, lambda _: static(variable_def=object())),
        "import_scope": (REFUSED, lambda _: static(import_scope="there")),
        "constraint": (
            REFUSED,
            lambda _: trained(static(constraint=tf.abs), tf.train.GradientDescentOptimizer(1.0)),
        ),
        "distribute_strategy": (
            NO_EFFECT,
            lambda _: same(lambda **to: rows(static(**to)), distribute_strategy=object()),
        ),
        "synchronization": (
            WORKS,
            lambda _: (
                static(
                    synchronization=tf.VariableSynchronization.ON_READ, trainable=False
                ).synchronization
                == tf.VariableSynchronization.ON_READ
            ),
        ),
        "aggregation": (
            WORKS,
            lambda _: (
                static(aggregation=tf.VariableAggregation.MEAN).aggregation
                == tf.VariableAggregation.MEAN
            ),
        ),
        "shape": (
            WORKS,
            lambda _: (
                static(initial_value=None, shape=[9, 3], initializer=ONES).global_shape == (9, 3)
            ),
        ),
        "initializer": (
            WORKS,
            lambda _: (rows(static(initial_value=None, shape=[9, 3], initializer=ONES)) == 1).all(),
        ),
        "neither": (REFUSED, lambda _: static(initial_value=None)),
        "global_gpu_id": (WORKS, lambda _: static(global_gpu_id=rank()).global_gpu_id == rank()),
        "another global_gpu_id": (REFUSED, lambda _: static(global_gpu_id=rank() + 1)),
        "num_gpus": (WORKS, lambda _: static(num_gpus=size()).num_gpus == size()),
        "another num_gpus": (REFUSED, lambda _: static(num_gpus=size() + 1)),
        "target_gpu": (REFUSED, lambda _: static(target_gpu=size())),
    },
    "DynamicVariable": {
        "dimension": (WORKS, lambda _: rows(dynamic(dimension=5)).shape == (2, 5)),
        "initializer": (WORKS, lambda _: (rows(dynamic()) == 3).all()),
        "initializer of no kind": (REFUSED, lambda _: dynamic(initializer="orthogonal")),
        "initializer random, hbm": (
            WORKS,
            lambda _: (
                np.abs(rows(dynamic(initializer="random", var_type="hbm"), range(999))).max()
                == pytest.approx(0.05, rel=0.01)
            ),
        ),
        "initializer random, hybrid": (
            WORKS,
            lambda _: (
                rows(dynamic(initializer=None), range(9999)).std() == pytest.approx(1, rel=0.03)
            ),
        ),
        "var_type": (WORKS, lambda _: dynamic(var_type="hbm").backend_type == "hbm"),
        "var_type of no kind": (REFUSED, lambda _: dynamic(var_type="ssd")),
        "name": (WORKS, lambda _: [dynamic(name="d").op.name for _ in range(2)] == ["d", "d_1"]),
        "constraint": (REFUSED, lambda _: dynamic(constraint=tf.abs)),
        "trainable": (
            WORKS,
            lambda _: in_trainable(dynamic()) and not in_trainable(dynamic(trainable=False)),
        ),
        "key_type": (
            WORKS,
            lambda _: (
                sok("export", dynamic(key_type=tf.int32, var_type="hbm"))[0].dtype == tf.int32
            ),
        ),
        "key_type of hybrid": (REFUSED, lambda _: dynamic(key_type=tf.int32)),
        "dtype": (WORKS, lambda _: dynamic(dtype=tf.float64).handle_dtype == tf.float64),
        "mode": (WORKS, lambda _: dynamic(mode="localized:0").placement.holder == 0),
        "tuning": (
            NO_EFFECT,
            lambda _: same(
                lambda **to: rows(dynamic(**to)),
                init_capacity=1,
                max_capacity=1,
                max_hbm_for_vectors=1,
                evict_strategy="kLru",
                filter_ratio=0.5,
            ),
        ),
    },
    "lookup_sparse": {
        "params": (WORKS, lambda _: np.array_equal(looked_up(), [WHOLE[1:3].mean(0), WHOLE[1]])),
        "sp_ids": (
            WORKS,
            lambda _: np.array_equal(
                looked_up(params=[static()], sp_ids=[tf.sparse.from_dense([[0, 3]])]), [WHOLE[3:]]
            ),
        ),
        "sp_weights": (
            WORKS,
            lambda _: np.array_equal(
                looked_up(
                    sp_weights=tf.SparseTensor([[0, 0], [0, 1], [1, 0]], [1.0, -3.0, 5.0], [2, 2])
                ),
                [(WHOLE[1] - 3 * WHOLE[2]) / -2, WHOLE[1]],
            ),
        ),
        "combiners": (
            WORKS,
            lambda _: np.array_equal(looked_up(combiners="sum"), [WHOLE[1:3].sum(0), WHOLE[1]]),
        ),
        "use_low_frequency_filter": (REFUSED, lambda _: looked_up(use_low_frequency_filter=True)),
    },
    "all2all_dense_embedding": {
        "param": (WORKS, lambda _: np.array_equal(rows(static()), WHOLE[::3])),
        "indices": (
            WORKS,
            lambda _: np.array_equal(rows(static(), [[1], [1]])[:, 0], WHOLE[[1, 1]]),
        ),
    },
    "sparse_read_and_evict": {
        "var": (REFUSED, lambda _: sok("sparse_read_and_evict", static(), tf.range(2))),
        "indices": (
            WORKS,
            lambda _: (run(sok("sparse_read_and_evict", dynamic(), tf.range(2))[0]) == 3).all(),
        ),
        "name": (
            WORKS,
            lambda _: (
                sok("sparse_read_and_evict", dynamic(), tf.range(2), "found")[0].op.name == "found"
            ),
        ),
    },
    "export": {"var": (WORKS, lambda _: sok("export", static()) is None)},
    "assign": {
        "var": (WORKS, lambda _: sok("assign", static(), [1], [[1.0, 2.0]]) is None),
        **{
            argument: (WORKS, lambda _: assigned() == ([5, 7], [[1, 2], [3, 4]]))
            for argument in ("indices", "values")
        },
    },
    "OptimizerWrapper": {
        "optimizer": (
            WORKS,
            lambda _: np.array_equal(
                trained(static(), sok("OptimizerWrapper", tf.train.GradientDescentOptimizer(0.5))),
                WHOLE[::3] - [[0], [0.5]],
            ),
        ),
        "amsgrad of Keras's Adam": (
            REFUSED,
            lambda _: sok("OptimizerWrapper", tf.keras.optimizers.Adam(amsgrad=True)),
        ),
        "Keras's RMSprop": (
            REFUSED,
            lambda _: trained(dynamic(), sok("OptimizerWrapper", tf.keras.optimizers.RMSprop(0.1))),
        ),
    },
    "SGD": {
        "lr": (
            WORKS,
            lambda _: np.array_equal(trained(static(), sok("SGD", 2.0)), WHOLE[::3] - [[0], [2]]),
        )
    },
    "filter_variables": {
        "vars": (WORKS, lambda _: [len(x) for x in sok("filter_variables", vars=some())] == [2, 1])
    },
    "split_embedding_variable_from_others": {
        "variables": (
            WORKS,
            lambda _: (
                [len(x) for x in sok("split_embedding_variable_from_others", variables=some())]
                == [2, 1]
            ),
        )
    },
    **{
        name: {
            "path": (WORKS, lambda folder: dumped(folder, [static()])),
            f"{name}_vars": (
                WORKS,
                lambda folder: dumped(folder, [static(), static(initial_value=WHOLE + 1)]),
            ),
            "optimizer": (WORKS, with_slots),
        }
        for name in ("dump", "load")
    },
    "incremental_model_dump": {
        "sok_vars": (REFUSED, lambda _: since(sok_vars=static())),
        "time_threshold": (
            WORKS,
            lambda _: (
                since() == [0, 3]
                and since(time_threshold=datetime(2999, 1, 1, tzinfo=timezone.utc)) == []
            ),
        ),
        "sess": (
            WORKS,
            lambda _: rows(static()) is not None and since(sess=tf.get_default_session()),
        ),
    },
    "DistributedEmbedding": {
        "combiner": (
            WORKS,
            lambda _: (
                (layer("DistributedEmbedding", combiner="Mean")[1] == 1).all()
                and (layer("DistributedEmbedding")[1] == 2).all()
            ),
        ),
        "max_nnz": (
            NO_EFFECT,
            lambda _: same(lambda **to: layer("DistributedEmbedding", **to)[1], max_nnz=9),
        ),
        "max_feature_num": (
            NO_EFFECT,
            lambda _: same(lambda **to: layer("DistributedEmbedding", **to)[1], max_feature_num=9),
        ),
    },
    "All2AllDenseEmbedding": {
        "nnz_per_slot": (WORKS, lambda _: layer("All2AllDenseEmbedding")[1].shape == (1, 2, 2, 2)),
        "dynamic_input": (
            WORKS,
            lambda _: layer("All2AllDenseEmbedding", dynamic_input=True)[1].shape[-1] == 2,
        ),
    },
}

for _name in ("DistributedEmbedding", "All2AllDenseEmbedding"):
    for _argument, _check in of_layers(_name).items():
        _kind = NO_EFFECT if _argument == "key_dtype" else WORKS
        ARGUMENTS[_name][_argument] = _kind, lambda _, check=_check: check()
CASES = [
    pytest.param(kind, check, id=f"{name}: {argument}")
    for name, of_name in ARGUMENTS.items()
    for argument, (kind, check) in of_name.items()
]


@pytest.mark.matrix
@pytest.mark.parametrize("kind, check", CASES)
def test_an_argument(strategy, size, tmp_path, kind, check):
    if size > 1:
        return  # The checks know all rows; what a rank is shown of several: `test_sok_variables`.
    with strategy.scope(plan="quiet"), tf.Graph().as_default():
        try:
            if kind == REFUSED:
                with pytest.raises((NotImplementedError, ValueError, RuntimeError, TypeError)):
                    check(str(tmp_path))
            else:
                assert check(str(tmp_path))
        finally:
            session = tf.get_default_session()
            if session is not None:
                session.close()


def test_all_arguments_are_here(strategy):
    """Names that take no argument with an effect, and classes for `isinstance`, have none."""
    of_classes = {
        "DistributedVariable": sok_variables.make,
        "DynamicVariable": sok_variables.make_dynamic,
    }
    # Those that any name of this kind takes.
    known = {"self", "kind", "args", "kwargs"}
    for name in ("LocalizedVariable", "set_comm_tool", "OptimizerScope"):
        assert name not in ARGUMENTS and NAMES[name].kind in ("works", "no effect")
    for name, row in NAMES.items():
        if row.kind != "works" or not row.theirs.startswith("sok.") or name == "LocalizedVariable":
            continue
        if not callable(row.resolve()):
            assert name == "tf_version"
            continue
        parameters = inspect.signature(of_classes.get(name, row.resolve())).parameters
        assert set(parameters) - known <= set(ARGUMENTS[name]), name


# What a refused name's message says to do instead; of others a case above does it.
ADVISED = {
    "optimizers.Adam": lambda: tf.train.AdamOptimizer(0.5),
    "tf.keras.optimizers.Adam": lambda: tf.train.AdamOptimizer(0.5),
    "tf.keras.optimizers.lazy_adam.LazyAdamOptimizer": lambda: collective.train.LazyAdamOptimizer(
        0.5
    ),
    "tf.keras.mixed_precision.LossScaleOptimizer": lambda: (
        tf.keras.mixed_precision.LossScaleOptimizer(
            tf.keras.optimizers.legacy.SGD(0.5), dynamic=False, initial_scale=1
        )
    ),
}
ADVISED_ABOVE = {"raw_ops", "TFDistributedEmbedding", "Saver"}


@pytest.mark.matrix
def test_what_is_advised_works(strategy):
    refused = {
        name for name, row in NAMES.items() if row.kind == "refused" and "sok." in row.theirs
    }
    assert refused == {*ADVISED, *ADVISED_ABOVE}
    for make in ADVISED.values():
        with strategy.scope(plan="quiet"), tf.Graph().as_default():
            np.testing.assert_allclose(trained(static(), make()), WHOLE[::3] - [[0], [0.5]], 1e-4)
            tf.get_default_session().close()
