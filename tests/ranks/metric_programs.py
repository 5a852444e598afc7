"""Builds metrics of scripts' own, and Keras's: each is (value, update) of scores and labels."""

import tensorflow.compat.v1 as tf
import tensorflow.compat.v2 as tf2
from tensorflow.python.ops.metrics_impl import metric_variable

BINS = 4


def own_variable(name, first, shape=()):
    """Makes a metric's variable as scripts do that know nothing of `metric_variable`."""
    return tf.Variable(
        tf.fill(shape, first),
        trainable=False,
        collections=[tf.GraphKeys.LOCAL_VARIABLES, tf.GraphKeys.METRIC_VARIABLES],
        name=name,
    )


def counter(score, label):
    total, count = metric_variable([], tf.float32, name="total"), own_variable("count", 0)
    update = tf.group(total.assign_add(tf.reduce_sum(score)), tf.assign_add(count, tf.size(score)))
    return total / tf.cast(count, tf.float32), update


def counter_by_assign(score, label):
    """The value is what `assign` returns: the state after the update."""
    total = tf.get_local_variable(
        "sum",
        [],
        initializer=tf.zeros_initializer(),
        collections=[tf.GraphKeys.LOCAL_VARIABLES, tf.GraphKeys.METRIC_VARIABLES],
    )
    return tf.identity(total), total.assign(total + tf.reduce_sum(score))


def subtracted(score, label):
    total = metric_variable([], tf.float32, name="subtracted")
    return -total, tf.group(
        total.assign_sub(tf.reduce_sum(score)), total.assign_add(tf.reduce_sum(label))
    )


def histogram(score, label):
    counts = metric_variable([BINS], tf.float32, name="histogram")
    places = tf.cast(score * BINS, tf.int32)
    update = tf.group(counts.scatter_add(tf.IndexedSlices(tf.ones_like(score), places)))
    return counts / tf.reduce_sum(counts), update


def largest(score, label):
    most = metric_variable([], tf.float32, name="largest")
    return tf.identity(most), most.assign(tf.maximum(most, tf.reduce_max(score)))


def smallest(score, label):
    least = own_variable("smallest", 9.0)
    return least + 0.0, tf.assign(least, tf.minimum(tf.reduce_min(score), least))


def largest_by_bin(score, label):
    most = own_variable("largest_by_bin", -1.0, [BINS])
    places = tf.cast(score * BINS, tf.int32)
    return tf.identity(most), most.scatter_max(tf.IndexedSlices(score, places))


def numbers_of_other_types(score, label):
    whole, wide = own_variable("whole", -9), own_variable("wide", 0.0)
    double = metric_variable([2], tf.float64, name="double")
    places = tf.cast(score * 10, tf.int32)
    update = tf.group(
        whole.assign(tf.maximum(whole, tf.reduce_max(places))),
        wide.assign(wide + tf.cast(tf.reduce_sum(places), tf.float32)),
        double.assign_add(
            tf.cast(tf.stack([tf.reduce_sum(score), tf.reduce_sum(label)]), tf.float64)
        ),
    )
    return tf.concat([double, tf.cast([whole], tf.float64), tf.cast([wide], tf.float64)], 0), update


def span(score, label):
    """A maximum, a minimum and a sum make one value."""
    most, least = own_variable("most", -9.0), own_variable("least", 9.0)
    count = own_variable("number", 0.0)
    update = tf.group(
        most.assign(tf.maximum(most, tf.reduce_max(score))),
        least.assign(tf.minimum(least, tf.reduce_min(score))),
        count.assign_add(tf.cast(tf.size(score), tf.float32)),
    )
    return (most - least) / count, update


def in_a_branch(score, label):
    """The update is made in a branch; the state is read outside of it."""
    total = metric_variable([], tf.float32, name="in_branch")
    added = tf.reduce_sum(score)
    update = tf.cond(
        added > 0, lambda: tf.identity(total.assign_add(added)), lambda: tf.identity(total)
    )
    return tf.identity(total), update.op


def of_keras(make, takes_label=True):
    def build(score, label):
        metric = make()
        update = metric.update_state(*([label[:, None]] if takes_label else []), score[:, None])
        tf.get_collection_ref("initializers").extend(v.initializer for v in metric.variables)
        return metric.result(), update

    return build


class Total(tf2.keras.metrics.Metric):
    """A metric of a script's own, which Keras updates in a function."""

    def __init__(self):
        super().__init__(name="total_of_ones_own")
        self.total = self.add_weight(name="total", initializer="zeros")

    def update_state(self, x, sample_weight=None):
        self.total.assign_add(tf.reduce_sum(x))

    def result(self):
        return self.total * 2.0


class Largest(tf2.keras.metrics.Metric):
    def __init__(self):
        super().__init__(name="largest_of_ones_own")
        self.most = self.add_weight(name="most", initializer="zeros")

    def update_state(self, x, sample_weight=None):
        self.most.assign(tf.maximum(self.most, tf.reduce_max(x)))

    def result(self):
        return self.most


K = tf2.keras.metrics
COUNTED = {
    "counter": counter,
    "counter_by_assign": counter_by_assign,
    "subtracted": subtracted,
    "histogram": histogram,
    "largest": largest,
    "smallest": smallest,
    "largest_by_bin": largest_by_bin,
    "numbers_of_other_types": numbers_of_other_types,
    "span": span,
    "in_a_branch": in_a_branch,
    "keras_mean": of_keras(K.Mean, False),
    "keras_auc": of_keras(lambda: K.AUC(num_thresholds=20)),
    "keras_mse": of_keras(K.MeanSquaredError),
    "keras_precision": of_keras(lambda: K.Precision(0.4)),
    "keras_own": of_keras(Total, False),
    "keras_own_largest": of_keras(Largest, False),
    "tf_mean": lambda score, label: tf.metrics.mean(score),
}


def product(score, label):
    state = own_variable("product", 1.0)
    return tf.identity(state), state.assign(state * tf.reduce_prod(score))


def moving_average(score, label):
    state = metric_variable([], tf.float32, name="average")
    return tf.identity(state), state.assign(0.9 * state + 0.1 * tf.reduce_mean(score))


def moving_average_by_difference(score, label):
    state = metric_variable([], tf.float32, name="average")
    return tf.identity(state), state.assign_sub(0.1 * (state - tf.reduce_mean(score)))


def welford(score, label):
    """Each addition depends on the state. The value reads none but additions to `squares`."""
    count, mean = metric_variable([], tf.float32, name="n"), metric_variable([], tf.float32)
    squares = metric_variable([], tf.float32, name="squares")
    number = count + tf.cast(tf.size(score), tf.float32)
    shift = tf.reduce_sum(score - mean)
    moved = mean + shift / number
    more = tf.reduce_sum((score - mean) * (score - moved))
    with tf.control_dependencies([more, moved]):
        update = tf.group(
            squares.assign_add(more), mean.assign_add(shift / number), count.assign(number)
        )
    return tf.sqrt(squares), update


def last(score, label):
    state = metric_variable([], tf.float32, name="last")
    return tf.identity(state), state.assign(score[-1])


def last_that_is_fetched(score, label):
    """Nothing but the assignment reads the state."""
    state = metric_variable([], tf.float32, name="last")
    return state.assign(score[-1]), tf.no_op()


def best_average(score, label):
    """A largest value, but of what each rank has for itself."""
    average, _ = moving_average(score, label)
    best = own_variable("best", -9.0)
    update = best.assign(tf.maximum(best, average))
    return best * 1.0, update.op


def last_that_is_fed(score, label):
    state = metric_variable([], tf.float32, name="last")
    return state * 1.0, state.assign(tf.placeholder_with_default(3.0, [])).op


def sum_from_one(score, label):
    state = own_variable("from_one", 1.0)
    return tf.identity(state), state.assign_add(tf.reduce_sum(score))


def saturated(score, label):
    """Whether it is added to depends on what it is."""
    state = metric_variable([], tf.float32, name="saturated")
    update = tf.cond(
        state < 3.0,
        lambda: tf.identity(state.assign_add(tf.reduce_sum(score))),
        lambda: tf.constant(0.0),
    )
    return tf.identity(state), update.op


def sum_and_largest(score, label):
    state = metric_variable([], tf.float32, name="both")
    return tf.identity(state), tf.group(
        state.assign_add(1.0), state.assign(tf.maximum(state, tf.reduce_max(score)))
    )


class Product(tf2.keras.metrics.Metric):
    def __init__(self):
        super().__init__(name="product_of_ones_own")
        self.product = self.add_weight(name="product_of_keras", initializer="ones")

    def update_state(self, _, x, sample_weight=None):
        self.product.assign(self.product * tf.reduce_prod(x))

    def result(self):
        return self.product + 0.0


# With the name of the variable that can't become one.
REFUSED = {
    "product": (product, "product"),
    "moving_average": (moving_average, "average"),
    "moving_average_by_difference": (moving_average_by_difference, "average"),
    "welford": (welford, "squares"),
    "last": (last, "last"),
    "last_that_is_fetched": (last_that_is_fetched, "last"),
    "best_average": (best_average, "best"),
    "last_that_is_fed": (last_that_is_fed, "last"),
    "sum_from_one": (sum_from_one, "from_one"),
    "saturated": (saturated, "saturated"),
    "sum_and_largest": (sum_and_largest, "both"),
    "keras_own_product": (of_keras(Product), "product_of_keras"),
}
