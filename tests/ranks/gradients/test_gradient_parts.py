"""What a script computes of a table's gradient is of all ranks' rows, as in plain TensorFlow.

Plain TensorFlow has a row for each occurrence of a repeated id: its gradient is summed by id first,
as the library's is.
"""

import functools
import types

import numpy as np
import pytest
import tensorflow as tf2
import tensorflow.compat.v1 as tf

from collective import TableError
from tests.ranks import reference
from tests.ranks.assignments import warnings
from tests.ranks.training import IDS, X, compare, model

pytestmark = [pytest.mark.ranks(1, 3), pytest.mark.ungrouped]

V, D = 9, 3


def summed(gradient):
    """Returns slices with each id once: those of a table are."""
    ids, places = tf.unique(gradient.indices)
    values = tf.math.unsorted_segment_sum(gradient.values, places, tf.size(ids))
    return tf.IndexedSlices(values, ids, gradient.dense_shape)


def with_values(gradient, values):
    return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)


def decayed(g, table):
    rows = tf.gather(table, g.indices)
    return with_values(g, g.values + 0.1 * rows), {"sum": tf.reduce_sum(rows)}


def decayed_by_lookup(g, table):
    return with_values(g, g.values + 0.1 * tf.nn.embedding_lookup(table, g.indices)), {}


def counted(g, table):
    """Scales by how often a row was updated."""
    counter = tf.get_variable("counter", [V], initializer=tf.zeros_initializer(), trainable=False)
    with tf.control_dependencies(
        [tf.scatter_add(counter, g.indices, tf.ones_like(g.values[:, 0]))]
    ):
        counts = counter.read_value()
    return with_values(g, g.values / tf.gather(counts, g.indices)[:, None]), {"counts": counts}


def counted_by_ones(g, table):
    counter = tf.get_variable("counter", [V], tf.int32, tf.zeros_initializer(), trainable=False)
    return g, {"counter": tf.scatter_add(counter, g.indices, 1)}


def masked(g, table):
    frozen = tf.constant([1, 0, 1, 1, 0, 1, 1, 1, 0], tf.float32)
    return with_values(g, g.values * tf.gather(frozen, g.indices)[:, None]), {}


def masked_by_id(g, table):
    return with_values(
        g, tf.where(tf.equal(g.indices % 2, 0), g.values, tf.zeros_like(g.values))
    ), {}


def without_some_ids(g, table):
    kept = tf.greater(g.indices, 2)
    return tf.IndexedSlices(
        tf.boolean_mask(g.values, kept), tf.boolean_mask(g.indices, kept), g.dense_shape
    ), {}


def deduplicated(g, table):
    return summed(tf.IndexedSlices(g.values * 2.0, g.indices, g.dense_shape)), {}


def two_towers(g, table):
    both = tf.IndexedSlices(
        tf.concat([g.values, 0.5 * g.values], 0),
        tf.concat([g.indices, g.indices], 0),
        g.dense_shape,
    )
    clipped, norm = tf.clip_by_global_norm([summed(both)], 0.1)
    return clipped[0], {"norm": norm}


def clipped_values(g, table):
    return with_values(g, tf.clip_by_norm(g.values, 0.05)), {}


def clipped_slices(g, table):
    return tf.clip_by_norm(deduplicated(g, table)[0], 0.05), {}


def clipped_by_global_norm(g, table):
    clipped, norm = tf.clip_by_global_norm([g.values], 0.05)
    return with_values(g, clipped[0]), {"norm": norm}


def clipped_by_hand(g, table):
    norm = tf.sqrt(tf.reduce_sum(g.values**2))
    return with_values(g, g.values * tf.minimum(1.0, 0.05 / norm)), {"norm": norm}


def clipped_by_row(g, table):
    return with_values(g, tf.clip_by_norm(g.values, 0.02, axes=[1])), {}


def clipped_by_value(g, table):
    return with_values(g, tf.clip_by_value(g.values, -0.02, 0.01)), {}


def standardized(g, table):
    mean, variance = tf.nn.moments(g.values, [0])
    return with_values(g, (g.values - mean) / tf.sqrt(variance + 1e-3)), {
        "mean": mean,
        "variance": variance,
        "std": tf.math.reduce_std(g.values),
    }


def scaled_by_the_largest(g, table):
    largest = tf.reduce_max(tf.abs(g.values))
    return with_values(g, g.values / largest), {"largest": largest}


def scaled_by_number_of_rows(g, table):
    return with_values(g, g.values / tf.cast(tf.size(g.indices), tf.float32)), {}


def reductions(g, table):
    x = g.values
    return g, {
        "sum": tf.reduce_sum(x),
        "sum0": tf.reduce_sum(x, 0),
        "sum_kept": tf.reduce_sum(x, 0, keepdims=True),
        "mean": tf.reduce_mean(x),
        "mean0": tf.reduce_mean(x, 0),
        "of_rows": tf.reduce_max(tf.reduce_mean(x, 1)),
        "max": tf.reduce_max(x, 0),
        "min": tf.reduce_min(x),
        "prod": tf.reduce_prod(1 + x),
        "any": tf.reduce_any(x > 0.1),
        "all": tf.reduce_all(tf.is_finite(x)),
        "norm": tf.norm(x),
        "euclidean": tf.math.reduce_euclidean_norm(x, 0),
        "l2": tf.nn.l2_loss(x),
        "flat": tf.reduce_sum(tf.square(tf.reshape(x, [-1]))),
        "number": tf.shape(x)[0],
        "size": tf.size(x) * 2,
        "float_rows": tf.cast(tf.shape(g.indices)[0], tf.float32),
        "positive": tf.count_nonzero(x > 0),
        "largest_id": tf.reduce_max(g.indices),
        "first_id": tf.reduce_min(tf.cast(g.indices, tf.int32)),
        "gram": tf.matmul(x, x, transpose_a=True),
        "histogram": tf.histogram_fixed_width(x, [-1.0, 1.0], 5),
        "pairs": tf.size(g.indices) * (tf.size(g.indices) - 1),
        "pairs_of_numbers": tf.cast(tf.size(g.indices) * tf.shape(x)[0], tf.float32),
        "shape": tf.shape(x),
        "float_shape": tf.cast(tf.shape(x), tf.float32),
        "turned_shape": tf.gather(tf.shape(x), [1, 0]),
        "number_second": tf.stack([7, tf.size(g.indices)])[1],
        "number_first": tf.stack([7, tf.size(g.indices)])[0],
        "unstacked": tf.stack(tf.unstack(tf.shape(x))),
        "width": tf.sqrt(tf.cast(tf.unstack(tf.shape(x))[1], tf.float32)),
        "last_of_shape": tf.shape(x)[-1],
        "first_of_shape": tf.shape(x)[-2],
        "square": tf.zeros([tf.size(g.indices)] * 2),
        "nested": tf.reduce_sum(tf.square(x / tf.reduce_sum(tf.abs(x)))),
    }


def matrices(g, table):
    scattered = tf.scatter_nd(g.indices[:, None], g.values, [V, D])
    segments = tf.math.unsorted_segment_sum(g.values, g.indices, V)
    touched = tf.tensor_scatter_nd_update(tf.zeros([V]), g.indices[:, None], g.values[:, 0])
    parity = tf.math.unsorted_segment_sum(g.values, g.indices % 2, 2)
    return g, {
        "converted": tf.convert_to_tensor(g),
        "scattered": scattered,
        "segments": segments,
        "touched": touched,
        "parity": parity,
    }


def made_a_matrix(g, table):
    return tf.convert_to_tensor(g) * 0.5, {}


def a_scattered_matrix(g, table):
    return tf.scatter_nd(g.indices[:, None], g.values, [V, D]), {}


def normalized_matrix(g, table):
    matrix = tf.convert_to_tensor(g)
    return matrix / (tf.norm(matrix) + 1e-6), {"norm": tf.norm(matrix)}


def in_a_condition(g, table):
    do = tf.constant(True)
    return with_values(g, tf.cond(do, lambda: g.values * 0.5, lambda: g.values)), {}


USES = [
    decayed,
    decayed_by_lookup,
    counted,
    counted_by_ones,
    masked,
    masked_by_id,
    without_some_ids,
    deduplicated,
    two_towers,
    clipped_values,
    clipped_slices,
    clipped_by_global_norm,
    clipped_by_hand,
    clipped_by_row,
    clipped_by_value,
    standardized,
    scaled_by_the_largest,
    scaled_by_number_of_rows,
    reductions,
    matrices,
    made_a_matrix,
    a_scattered_matrix,
    normalized_matrix,
    in_a_condition,
]
OPTIMIZERS = {
    "adagrad": lambda: tf.train.AdagradOptimizer(0.3),
    "adam": lambda: tf.train.AdamOptimizer(0.05),
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("use", USES, ids=lambda use: use.__name__)
def test_a_use_of_a_tables_gradient(strategy, rank, size, use, optimizer):
    names = []

    def train(loss, variables):
        made = OPTIMIZERS[optimizer]()
        (g, table), (dense, w) = made.compute_gradients(loss, variables)
        changed, fetches = use(summed(g), table)
        names[:] = sorted(fetches)
        applied = made.apply_gradients([(changed, table), (dense, w)])
        return {"train": applied, **{name: tf.convert_to_tensor(fetches[name]) for name in names}}

    # Fetched in runs of their own: they are of the gradient before the update.
    want, got = compare(strategy, rank, size, train, rtol=1e-4, names=_Names(names))
    for of_plain, of_ranks in zip(want[:-1], got[:-1]):
        for name in names:
            np.testing.assert_allclose(
                of_ranks[name], of_plain[name], rtol=1e-4, atol=1e-6, err_msg=name
            )


@pytest.mark.parametrize("use", USES, ids=lambda use: use.__name__)
def test_so_it_is_of_a_table_that_one_rank_has(strategy, rank, size, use):
    """Its rows are its ids."""
    scopes = types.SimpleNamespace(
        scope=strategy.scope,
        embedding_scope=functools.partial(strategy.embedding_scope, placement="whole"),
    )

    def train(loss, variables):
        made = tf.train.AdagradOptimizer(0.3)
        (g, table), (dense, w) = made.compute_gradients(loss, variables)
        applied = made.apply_gradients([(use(summed(g), table)[0], table), (dense, w)])
        return {"train": applied}

    compare(scopes, rank, size, train, rtol=1e-4)


class _Names:
    """Names the fetches of a step, which only building the model tells."""

    def __init__(self, names):
        self._names = names

    def __iter__(self):
        return iter(["train", *self._names])


def test_slots_answer_by_id(strategy, rank, size):
    """A script damps rows by their accumulators, which it looks up by the gradient's ids."""

    def train(loss, variables):
        optimizer = tf.train.AdagradOptimizer(0.3)
        (g, table), (dense, w) = optimizer.compute_gradients(loss, variables)
        applied = optimizer.apply_gradients([(g, table), (dense, w)])
        g = summed(g)
        slot = optimizer.get_slot(table, "accumulator")
        with tf.control_dependencies([applied]):
            ids = tf.identity(g.indices)
        rows = tf.gather(slot, ids)
        looked_up = tf.nn.embedding_lookup(slot, ids)
        return {
            "train": applied,
            "sum": tf.reduce_sum(rows, 0),
            "by_lookup": tf.reduce_sum(looked_up, 0),
        }

    want, got = compare(strategy, rank, size, train, names=("train", "sum", "by_lookup"))
    for of_plain, of_ranks in zip(want[:-1], got[:-1]):
        for name in ("sum", "by_lookup"):
            np.testing.assert_allclose(of_ranks[name], of_plain[name], rtol=1e-5)


def test_gradients_added_up_by_hand(strategy, rank, size):
    """As scripts do that update by several batches: into matrices, then from them."""

    def train(loss, variables):
        optimizer = tf.train.AdamOptimizer(0.05)
        sums = [
            tf.Variable(tf.zeros(v.shape.as_list()), trainable=False, name=f"sum{i}")
            for i, v in enumerate(variables)
        ]
        gradients = optimizer.compute_gradients(loss, variables)
        add = [s.assign_add(tf.convert_to_tensor(g)) for s, (g, _) in zip(sums, gradients)]
        apply = optimizer.apply_gradients(list(zip([s.read_value() / 3 for s in sums], variables)))
        return {"train": tf.group(*add), "apply": apply}

    def build(embedding_scope):
        return model(embedding_scope, train)

    def runs(ids, x):
        return [(["train"], {"ids": ids, "x": x})] * 3 + [(["apply"], {}), (["rows", "w"], {})]

    want = reference.plain(build, runs(IDS, X))
    got = reference.sharded(
        strategy, build, runs(reference.part(IDS, rank, size), reference.part(X, rank, size))
    )
    for name in ("rows", "w"):
        np.testing.assert_allclose(got[-1][name], want[-1][name], rtol=1e-5, atol=1e-6)


def taken(strategy):
    with strategy.embedding_scope():
        table = reference.table("t", V, D)
    loss = tf.reduce_sum(tf.nn.embedding_lookup(table, [1, 2, 5]))
    return tf.gradients(loss, table)[0], table


REFUSED = {
    "sort": lambda g: tf.sort(g.values, 0),
    "top_k": lambda g: tf.nn.top_k(g.values[:, 0], 1)[0],
    "first": lambda g: g.values[:1],
    "cumsum": lambda g: tf.cumsum(g.values),
    "argmax": lambda g: tf.argmax(g.values, 0),
    "py_func": lambda g: tf.py_func(np.linalg.norm, [g.values], tf.float32),
    "below": lambda g: tf.concat([g.values, tf.ones([2, D])], 0),
    "unique_values": lambda g: tf.size(tf.unique(g.values[:, 0])[0]),
    "one_row": lambda g: tf.norm(tf.reshape(g.values, tf.stack([1, tf.size(g.values)])), axis=1),
    "places": lambda g: tf.unique(g.indices)[1],
    "softmax": lambda g: tf.nn.softmax(g.values[:, 0]),
}


@pytest.mark.parametrize("use", REFUSED)
def test_what_can_not_be_told_is_refused_where_it_is_run(strategy, size, use):
    if size == 1:
        return
    with strategy.scope(), tf.Graph().as_default():
        gradient, table = taken(strategy)
        wrong = REFUSED[use](gradient)
        train = tf.train.GradientDescentOptimizer(0.1).apply_gradients([(gradient, table)])
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            with pytest.raises(TableError, match="gradient of table 't'.*tf.convert_to_tensor"):
                session.run(wrong)
            session.run(train)


def test_a_replicated_variable_is_not_assigned_a_part(strategy, size):
    if size == 1:
        return
    with strategy.scope(), tf.Graph().as_default():
        gradient, _ = taken(strategy)
        kept = tf.Variable(tf.zeros([0, D]), validate_shape=False, trainable=False)
        keep = tf.assign(kept, gradient.values, validate_shape=False)
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            with pytest.raises(TableError, match="local_steps"):
                session.run(keep)


DYNAMIC_USES = [
    decayed,
    decayed_by_lookup,
    masked,
    masked_by_id,
    counted,
    without_some_ids,
    deduplicated,
    two_towers,
    clipped_values,
    clipped_by_hand,
    standardized,
]


@pytest.mark.parametrize("use", DYNAMIC_USES, ids=lambda use: use.__name__)
def test_a_use_of_a_dynamic_tables_gradient(strategy, rank, size, use):
    """Its indices are keys; the table for comparison, in plain TensorFlow, has a row for each."""

    def build(embedding_scope, rows):
        with embedding_scope():
            table = tf.get_variable("t", [rows, D], initializer=tf.constant_initializer(0.5))
        w = tf.get_variable("w", initializer=reference.table_values(D, 2, 1))
        ids, x = tf.placeholder(tf.int64, [None]), tf.placeholder(tf.float32, [None, D])
        rows = tf.nn.embedding_lookup(table, ids)
        loss = tf.reduce_mean(tf.square(tf.matmul(rows * x, w)) + rows[:, :2])
        optimizer = tf.train.AdagradOptimizer(0.3)
        (g, table), (dense, w) = optimizer.compute_gradients(loss, [table, w])
        changed, fetches = use(summed(g), table)
        applied = optimizer.apply_gradients([(changed, table), (dense, w)])
        return {"train": applied, "rows": rows, "w": w.read_value(), **fetches}, {
            "ids": ids,
            "x": x,
        }

    all_ids = np.unique(IDS)
    after = [(["rows"], {"ids": all_ids}), (["w"], {})]
    step = {"ids": IDS, "x": X}
    own = {name: reference.part(value, rank, size) for name, value in step.items()}
    want = reference.plain(lambda s: build(s, V), [(["train"], step)] * 3 + after)
    got = reference.sharded(strategy, lambda s: build(s, None), [(["train"], own)] * 3 + after)
    np.testing.assert_allclose(got[-2]["rows"], want[-2]["rows"], rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(got[-1]["w"], want[-1]["w"], rtol=1e-4, atol=1e-6)


def test_a_dynamic_tables_gradient_is_no_matrix(strategy):
    with strategy.scope(), tf.Graph().as_default():
        with strategy.embedding_scope():
            table = tf.get_variable("d", [None, D])
        gradient = tf.gradients(tf.reduce_sum(tf.nn.embedding_lookup(table, [1, 2])), table)[0]
        with pytest.raises(TableError, match="dynamic table 'd' can't become a matrix"):
            tf.convert_to_tensor(gradient)


def test_fetched_gradients_have_the_rows_of_all_ranks(strategy, rank, size):
    ids = np.array([1, 2, 2, 5, 7, 7])

    def build(embedding_scope):
        with embedding_scope():
            table = reference.table("t", V, D)
        fed = tf.placeholder(tf.int64, [None])
        loss = tf.reduce_mean(tf.nn.embedding_lookup(table, fed))
        gradient = summed(tf.gradients(loss, table)[0])
        return {"slices": gradient, "values": gradient.values}, {"ids": fed}

    def runs(ids):
        return [(["slices", "values"], {"ids": ids})]

    want = reference.plain(build, runs(ids))[0]
    got = reference.sharded(strategy, build, runs(reference.part(ids, rank, size)))[0]
    order = [np.argsort(result["slices"].indices) for result in (want, got)]
    for field in ("indices", "values"):
        np.testing.assert_allclose(
            getattr(got["slices"], field)[order[1]], getattr(want["slices"], field)[order[0]]
        )
    np.testing.assert_allclose(got["values"][order[1]], want["values"][order[0]])


def test_the_rule_of_bert(strategy, rank, size):
    """An optimizer of a script's own: it keeps moments itself, and assigns whole variables."""

    class Rule(tf.train.Optimizer):
        def __init__(self):
            super().__init__(False, "Rule")

        def apply_gradients(self, grads_and_vars, global_step=None, name=None):
            assignments = []
            for grad, param in grads_and_vars:
                m, v = (
                    tf.get_variable(
                        f"{param.op.name}/{slot}",
                        shape=param.shape.as_list(),
                        trainable=False,
                        initializer=tf.zeros_initializer(),
                    )
                    for slot in ("m", "v")
                )
                next_m = tf.multiply(0.9, m) + tf.multiply(0.1, grad)
                next_v = tf.multiply(0.999, v) + tf.multiply(0.001, tf.square(grad))
                update = next_m / (tf.sqrt(next_v) + 1e-6) + 0.01 * param
                assignments += [
                    param.assign(param - 0.05 * update),
                    m.assign(next_m),
                    v.assign(next_v),
                ]
            return tf.group(*assignments, name=name)

    def train(loss, variables):
        summed_up = [summed_or_dense(gradient) for gradient in tf.gradients(loss, variables)]
        gradients, _ = tf.clip_by_global_norm(summed_up, 1.0)
        return {"train": Rule().apply_gradients(zip(gradients, variables))}

    compare(strategy, rank, size, train, rtol=1e-4)


@pytest.mark.parametrize("kind", ["matrix", "clipped", "perturbation"])
def test_a_table_may_be_assigned_what_comes_of_its_gradient(strategy, rank, size, kind):
    """It is the same on all ranks: nobody is warned of a value that a rank alone knows."""
    with strategy.scope(plan="quiet"), tf.Graph().as_default(), warnings() as said:
        with strategy.embedding_scope():
            table = reference.table("t", 10, 2)
            other = tf.get_variable("other", [10, 2], trainable=False)
        rows = tf.nn.embedding_lookup(table, tf.placeholder(tf.int64, [None]))
        (gradient,) = tf.gradients(tf.reduce_mean(rows), [table])
        gradient = tf.convert_to_tensor(gradient)
        if kind == "clipped":
            (gradient,), _ = tf.clip_by_global_norm([gradient], 0.1)
        if kind == "perturbation":
            other.assign(tf.nn.l2_normalize(gradient, 1))
        else:
            table.assign(table - 0.1 * gradient)
    assert not said


def summed_or_dense(gradient):
    return summed(gradient) if isinstance(gradient, tf.IndexedSlices) else gradient


def test_an_adversarial_perturbation(strategy, rank, size):
    """FGM: the loss once more with the table moved along its gradient, then trained."""

    def train(loss, variables):
        table, w = variables
        matrix = tf.convert_to_tensor(tf.gradients(loss, table)[0])
        moved = 0.1 * matrix / (tf.norm(matrix) + 1e-6)
        with tf.control_dependencies([table.assign_add(moved)]):
            w_step = w.assign_sub(0.1 * tf.gradients(loss, w)[0])
        with tf.control_dependencies([w_step]):
            return {"train": table.assign_sub(moved * 1.5).op}

    compare(strategy, rank, size, train, rtol=1e-4)


class LayerwiseRate(tf.train.GradientDescentOptimizer):
    """Scales a variable's step by its norm over its gradient's, as LARS does."""

    def _trust(self, grad, var):
        return 0.1 * tf.norm(var) / (tf.norm(grad) + 1e-6)

    def _resource_apply_dense(self, grad, var):
        return super()._resource_apply_dense(grad * self._trust(grad, var), var)

    def _resource_apply_sparse(self, grad, var, indices):
        step = -0.3 * self._trust(grad, var) * grad
        return tf.raw_ops.ResourceScatterAdd(resource=var.handle, indices=indices, updates=step)

    def _resource_apply_sparse_duplicate_indices(self, grad, var, indices):
        return self._resource_apply_sparse(grad, var, indices)


def test_norms_that_an_optimizer_takes(strategy, rank, size):
    """An optimizer of a script's own is given shards: its norms are of the whole all the same."""

    def train(loss, variables):
        gradients = [summed_or_dense(gradient) for gradient in tf.gradients(loss, variables)]
        return {"train": LayerwiseRate(0.3).apply_gradients(zip(gradients, variables))}

    compare(strategy, rank, size, train, rtol=1e-4)


HAND_MADE = {
    "constants": lambda: tf.IndexedSlices(
        tf.constant(reference.table_values(3, D, 2)), tf.constant([1, 2, 7], tf.int64), None
    ),
    "of a variable": lambda: tf.IndexedSlices(
        2.0 * tf.get_variable("kept", initializer=reference.table_values(2, D, 3)),
        tf.constant([8, 0]),
        None,
    ),
}


@pytest.mark.parametrize("made", HAND_MADE)
def test_a_gradient_made_by_hand_the_same_on_every_rank(strategy, made):
    def build(embedding_scope):
        with embedding_scope():
            table = reference.table("t", V, D)
        optimizer = tf.train.AdagradOptimizer(0.3)
        train = optimizer.apply_gradients([(HAND_MADE[made](), table)])
        return {"train": train, "rows": tf.nn.embedding_lookup(table, tf.range(V))}, {}

    runs = [(["train"], {})] * 2 + [(["rows"], {})]
    want = reference.plain(build, runs)[-1]["rows"]
    np.testing.assert_allclose(
        reference.sharded(strategy, build, runs)[-1]["rows"], want, rtol=1e-5
    )


def test_a_norm_inside_a_function_is_refused(strategy, size):
    if size == 1:
        return
    with strategy.scope(), tf.Graph().as_default():
        with strategy.embedding_scope():
            table = reference.table("t", V, D)

        @tf2.function(autograph=False)
        def step():
            loss = tf.reduce_sum(tf.nn.embedding_lookup(table, [1, 2]))
            gradient = tf.gradients(loss, table)[0]
            changed = with_values(gradient, gradient.values / tf.norm(gradient.values))
            return tf.train.GradientDescentOptimizer(0.1).apply_gradients([(changed, table)])

        with pytest.raises(TableError, match="table 't'.*inside a function"):
            step()


def test_a_histogram_is_said_to_be_one_ranks(strategy, rank, size, caplog):
    if size == 1:
        return
    with strategy.scope(), tf.Graph().as_default(), caplog.at_level("WARNING", "tensorflow"):
        gradient, table = taken(strategy)
        summary = tf.summary.histogram("of_gradient", gradient.values)
        train = tf.train.GradientDescentOptimizer(0.1).apply_gradients([(gradient, table)])
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            session.run([train, summary])
    said = [r.getMessage() for r in caplog.records if "of_gradient" in r.getMessage()]
    assert len(said) == (rank == 0)
    assert not said or "table 't' that one rank owns" in said[0]


def test_a_gradient_combined_with_a_value_of_one_rank_is_refused(strategy, rank, size):
    """A script scales by its loss, which is another one on each rank; the mean is fine."""
    if size == 1:
        return
    with strategy.scope(), tf.Graph().as_default():
        with strategy.embedding_scope():
            table = reference.table("t", V, D)
        fed = tf.placeholder(tf.int64, [None])
        loss = tf.reduce_mean(tf.nn.embedding_lookup(table, fed))
        g = tf.gradients(loss, table)[0]
        train = tf.train.GradientDescentOptimizer(0.1).apply_gradients(
            [(with_values(g, g.values / loss), table)]
        )
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            with pytest.raises(TableError, match="table 't'.*allreduce"):
                session.run(train, {fed: [rank]})
