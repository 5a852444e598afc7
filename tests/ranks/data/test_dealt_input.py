"""What Python orders is dealt once, from one order on all ranks, or is an error on all of them.

The records are powers of two: a sum tells which were counted.
"""

import contextlib
import random
import warnings

import numpy as np
import pyarrow.parquet
import pytest
import tensorflow.compat.v1 as tf

import collective
from collective import RankError
from collective import estimator as tf_estimator
from collective.ops.communication import collectives
from tests.ranks import reference
from tests.ranks.estimators import told

pytestmark = [pytest.mark.either_backend, pytest.mark.backends("hb")]

RECORDS = 2 ** np.arange(16)


def shuffled_by_python():
    numbers = RECORDS.tolist()
    random.shuffle(numbers)
    return tf.data.Dataset.from_tensor_slices(numbers)


def sampled():
    """As pandas.DataFrame.sample does."""
    return tf.data.Dataset.from_tensor_slices(RECORDS[np.random.choice(16, 16, replace=False)])


def generated(body):
    return lambda: tf.data.Dataset.from_generator(
        body, output_signature=tf.TensorSpec([], tf.int64)
    )


def one_by_one():
    left = RECORDS.tolist()
    while left:
        yield left.pop(random.randrange(len(left)))


ALIKE = {
    "random.shuffle": shuffled_by_python,
    "numpy.random": lambda: tf.data.Dataset.from_tensor_slices(np.random.permutation(RECORDS)),
    "sample": sampled,
    "generator": generated(lambda: iter(np.random.permutation(RECORDS))),
    "draws": generated(one_by_one),
}


def by_rank(seeds):
    """Records in an order that each rank has for itself."""
    order = seeds(collectives.rank()).permutation(RECORDS)
    return tf.data.Dataset.from_tensor_slices(order)


def in_a_folders_order():
    """As os.listdir gives names on another file system, and a set of objects its own."""
    numbers = RECORDS if collectives.rank() == 0 else np.roll(RECORDS, 3)
    return tf.data.Dataset.from_tensor_slices(numbers)


UNLIKE = {
    "default_rng": lambda: by_rank(lambda rank: np.random.default_rng()),
    "by rank": lambda: by_rank(np.random.default_rng),
    "listdir": in_a_folders_order,
    "generator": generated(lambda: iter(np.random.default_rng().permutation(RECORDS))),
    "late": lambda: tf.data.Dataset.from_tensor_slices(
        np.concatenate([RECORDS[:12], np.roll(RECORDS[12:], collectives.rank() % 2)])
    ),
}


class Kept(tf.train.SessionRunHook):
    """Keeps the records of each run."""

    def __init__(self):
        self.records = []

    def before_run(self, context):
        return tf.train.SessionRunArgs(context.session.graph.get_tensor_by_name("records:0"))

    def after_run(self, context, values):
        self.records += values.results.tolist()


def estimator(strategy, folder, shard_input=True):
    def model_fn(features, labels, mode):
        records = tf.identity(features, name="records")
        with strategy.embedding_scope():
            table = reference.table("t", 4, 2)
        loss = tf.reduce_mean(tf.nn.embedding_lookup(table, records % 4))
        return tf_estimator.EstimatorSpec(
            mode,
            loss=loss,
            train_op=tf.train.AdagradOptimizer(0.1).minimize(loss, tf.train.get_global_step()),
            eval_metric_ops={"mean": tf.metrics.mean(tf.cast(records, tf.float32))},
            predictions={"record": records},
        )

    return strategy.estimator(model_fn, folder, shard_input=shard_input)


@contextlib.contextmanager
def seeds_of_its_own(rank, states_follow=False):
    """Gives each rank other numbers, and holds that they are its own afterwards."""
    before = random.getstate(), np.random.get_state()
    random.seed(rank)
    np.random.seed(rank)
    yield
    if rank:
        drawn = random.random(), np.random.random_sample()
        random.seed(rank)
        np.random.seed(rank)
        assert drawn == (random.random(), np.random.random_sample())
    random.setstate(before[0])
    np.random.set_state(before[1])


def everyones(records):
    return [text["records"] for text in told(records=[int(x) for x in records])]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ALIKE)
def test_an_estimator_counts_every_record_once(strategy, folder, rank, size, kind):
    """And in another order each time."""

    def input_fn():
        return ALIKE[kind]().batch(2)

    with seeds_of_its_own(rank):
        trained = []
        for _ in range(2):
            kept = Kept()
            model = estimator(strategy, folder).train(input_fn, hooks=[kept])
            trained.append(everyones(kept.records))
            assert model.evaluate(input_fn)["mean"] == pytest.approx(RECORDS.mean())
    for by_rank in trained:
        numbers = [x for numbers in by_rank for x in numbers]
        if 16 % (2 * size) == 0:
            assert sorted(numbers) == RECORDS.tolist()
        assert len(set(numbers)) == len(numbers)
    assert trained[0] != trained[1]


@pytest.mark.slow
def test_train_and_evaluate(strategy, folder, rank, size):
    def training_input():
        return ALIKE["generator"]().repeat(4).batch(2)

    def input_fn():
        return ALIKE["random.shuffle"]().batch(2)

    with seeds_of_its_own(rank), strategy.scope():
        metrics, _ = tf_estimator.train_and_evaluate(
            estimator(strategy, folder),
            tf_estimator.TrainSpec(training_input, max_steps=8),
            tf_estimator.EvalSpec(input_fn, steps=None, throttle_secs=0),
        )
    assert metrics["mean"] == pytest.approx(RECORDS.mean())


@pytest.mark.parametrize("kind", ["random.shuffle", "generator"])
def test_the_scripts_own_seed_gives_the_order_of_one_process(strategy, folder, rank, kind):
    random.seed(5)
    np.random.seed(5)
    predictions = estimator(strategy, folder).predict(lambda: ALIKE[kind]().batch(1))
    got = everyones(p["record"] for p in predictions)
    random.seed(5)
    np.random.seed(5)
    if kind == "generator":
        want = np.random.permutation(RECORDS).tolist()
    else:
        want = RECORDS.tolist()
        random.shuffle(want)
    assert got == [want[r :: len(got)] for r in range(len(got))]


@pytest.mark.parametrize("kind", UNLIKE)
@pytest.mark.parametrize("way", ["train", "evaluate"])
def test_another_order_on_each_rank_is_an_error_of_an_estimator(strategy, folder, size, kind, way):
    def input_fn():
        return UNLIKE[kind]().batch(2)

    if size == 1:
        return
    model = estimator(strategy, folder)
    with pytest.raises(RankError, match="input_fn is not the same on all ranks") as raised:
        getattr(model, way)(input_fn)
    assert "input_context" in str(raised.value) and "rank 0" in str(raised.value)
    assert len({text["error"] for text in told(error=str(raised.value))}) == 1


def loop(strategy, dataset, trains, monitored):
    """Runs a session over a dataset; returns this rank's records."""
    records = []
    with strategy.scope(plan="quiet"), tf.Graph().as_default():
        batch = tf.data.make_one_shot_iterator(dataset()).get_next()
        with strategy.embedding_scope():
            table = reference.table("t", 4, 2)
        loss = tf.reduce_mean(tf.nn.embedding_lookup(table, batch % 4))
        step = tf.train.get_or_create_global_step()
        fetch = tf.train.AdagradOptimizer(0.1).minimize(loss, step) if trains else loss
        if monitored:
            with tf.train.MonitoredTrainingSession("") as session:
                while not session.should_stop():
                    records += session.run([batch, fetch])[0].tolist()
            return records
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            while True:
                try:
                    records += session.run([batch, fetch])[0].tolist()
                except tf.errors.OutOfRangeError:
                    return records


@pytest.mark.slow
@pytest.mark.parametrize("kind", UNLIKE)
@pytest.mark.parametrize("trains", [True, False])
@pytest.mark.parametrize("monitored", [True, False])
@pytest.mark.sample(8)
def test_another_order_on_each_rank_is_an_error_of_shard(strategy, size, kind, trains, monitored):
    if size == 1:
        return

    def dataset():
        return strategy.shard(UNLIKE[kind]()).batch(2)

    with pytest.raises(RankError, match=r"strategy\.shard\(\): the dataset is not the same") as one:
        loop(strategy, dataset, trains, monitored)
    assert "strategy.shard(dataset).shuffle" in str(one.value)
    assert len({text["error"] for text in told(error=str(one.value))}) == 1


@pytest.mark.parametrize("trains", [True, False])
@pytest.mark.parametrize("shuffles", [True, False])
def test_a_list_of_parquet_files_in_another_order(strategy, tmp_path, rank, size, trains, shuffles):
    files = [str(tmp_path / f"{i}.parquet") for i in range(2 * size)]
    for i, path in enumerate(files):
        pyarrow.parquet.write_table(pyarrow.table({"id": np.arange(4) + 4 * i}), path)
    if shuffles and rank > 0:
        files.reverse()

    def dataset():
        return collective.data.parquet(files, batch_size=2).map(lambda batch: batch["id"])

    if size == 1 or not shuffles:
        dealt = told(records=loop(strategy, dataset, trains, True))
        assert sorted(record for each in dealt for record in each["records"]) == list(
            range(8 * size)
        )
        return
    with pytest.raises(RankError, match=r"data\.parquet\(\): .* is not the same on all ranks"):
        loop(strategy, dataset, trains, True)


@pytest.mark.parametrize("trains", [True, False])
def test_one_order_that_ranks_have_by_a_seed(strategy, size, trains):
    def dataset():
        order = np.random.default_rng(7).permutation(RECORDS)
        return strategy.shard(tf.data.Dataset.from_tensor_slices(order)).shuffle(8).batch(1)

    numbers = sorted(x for own in everyones(loop(strategy, dataset, trains, True)) for x in own)
    assert len(set(numbers)) == len(numbers) >= 16 - 16 % size
    assert trains or numbers == RECORDS.tolist()


def test_another_number_of_records_on_each_rank(strategy, rank, size):
    """The first ones are the same."""
    if size == 1:
        return

    def dataset():
        return strategy.shard(tf.data.Dataset.from_tensor_slices(RECORDS[: 16 - rank])).batch(2)

    with pytest.raises(RankError, match="another number of elements") as raised:
        loop(strategy, dataset, False, False)
    assert "16 (16 records) on rank 0 | 15 (15 records) on rank 1" in str(raised.value)


def test_the_same_records_in_another_order_are_called_that(strategy, size):
    if size == 1:
        return
    with pytest.raises(RankError, match="the same records in another order on rank 0 | rank 1"):
        loop(strategy, lambda: strategy.shard(UNLIKE["late"]()).batch(2), False, False)


FORMS = {
    "dict": lambda x: {"a": x, "b": tf.as_string(x)},
    "sparse": lambda x: (tf.sparse.from_dense(tf.stack([x, x])), x),
    "ragged": lambda x: tf.RaggedTensor.from_row_lengths(tf.stack([x, x, 1]), [2, 1]),
    "wide": lambda x: tf.fill([3, 200], x),
    "nested": lambda x: ((x, {"b": tf.cast(x, tf.float32)}), tf.zeros([2, 0])),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("batched", [True, False])
def test_elements_of_any_form(strategy, size, form, batched):
    """Alike they pass, in any order of its own they don't."""

    def taken(unlike):
        with strategy.scope(plan="quiet"), tf.Graph().as_default():
            numbers = UNLIKE["listdir"]() if unlike else tf.data.Dataset.from_tensor_slices(RECORDS)
            dataset = numbers.take(12).map(FORMS[form])
            dataset = dataset.batch(2) if batched else dataset
            dataset = strategy.shard(dataset)
            element = tf.data.make_one_shot_iterator(dataset).get_next()
            with strategy.embedding_scope():
                table = reference.table("t", 4, 2)
            part = tf.nest.flatten(element, expand_composites=True)[0]
            with tf.control_dependencies([part]):
                loss = tf.reduce_mean(tf.nn.embedding_lookup(table, [1]))
            count = 0
            with tf.Session() as session:
                session.run(tf.global_variables_initializer())
                with contextlib.suppress(tf.errors.OutOfRangeError):
                    while True:
                        session.run(loss)
                        count += 1
        return count

    assert sum(text["count"] for text in told(count=taken(False))) == (6 if batched else 12)
    if size > 1:
        with pytest.raises(RankError, match="is not the same on all ranks"):
            taken(True)


@pytest.mark.long
def test_numbers_that_each_rank_draws_with_the_records_are_warned_of(strategy, folder, rank, size):
    """Each record is used once, with the numbers of its rank."""

    def noise():
        return np.random.default_rng().random(40).astype(np.float32)

    def input_fn():
        data = (np.tile(RECORDS, 3)[:40], noise())
        return tf.data.Dataset.from_tensor_slices(data).map(lambda x, _: x).batch(2)

    def noisy_input_fn():
        data = {"record": np.tile(RECORDS, 3)[:40], "noise": noise()}
        return tf.data.Dataset.from_tensor_slices(data).batch(2)

    def dataset():
        return strategy.shard(noisy_input_fn()).map(lambda batch: batch["record"])

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        estimator(strategy, folder).train(input_fn)
        numbers = [x for own in everyones(loop(strategy, dataset, False, True)) for x in own]
    told_of = [
        w for w in caught if "'noise' differ between ranks, while 'record'" in str(w.message)
    ]
    assert sorted(numbers) == sorted(np.tile(RECORDS, 3)[:40].tolist())
    assert len(told_of) == (size > 1 and rank == 0)


@pytest.mark.long
def test_data_of_each_ranks_own_are_no_error(strategy, folder, rank):
    def own():
        return tf.data.Dataset.from_tensor_slices(RECORDS[rank:12] * 3 ** (rank % 2)).batch(2)

    for shard_input, input_fn in [(False, own), (True, lambda input_context: own())]:
        model = estimator(strategy, folder, shard_input)
        model.train(input_fn)
        model.evaluate(input_fn)
    loop(strategy, own, True, True)
    loop(strategy, own, False, True)


def test_files_that_an_input_context_shares_out(strategy, folder, rank):
    """Each rank shuffles all files, and takes its own."""

    def input_fn(input_context):
        files = RECORDS.tolist()
        random.shuffle(files)
        own = files[input_context.input_pipeline_id :: input_context.num_input_pipelines]
        return tf.data.Dataset.from_tensor_slices(own).batch(1)

    with seeds_of_its_own(rank):
        numbers = [p["record"] for p in estimator(strategy, folder).predict(input_fn)]
    assert sorted(x for own in everyones(numbers) for x in own) == RECORDS.tolist()


@pytest.mark.parametrize("passes", [2, 3])
def test_an_iterator_that_starts_again(strategy, rank, size, passes):
    """Ranks that differ in a later pass alone differ."""
    if size == 1:
        return

    def run(unlike):
        with strategy.scope(plan="quiet"), tf.Graph().as_default():
            fed = tf.placeholder(tf.int64, [None])
            dataset = tf.data.Dataset.from_tensor_slices(fed)
            iterator = tf.data.make_initializable_iterator(strategy.shard(dataset).batch(2))
            with strategy.embedding_scope():
                table = reference.table("t", 4, 2)
            loss = tf.reduce_mean(tf.nn.embedding_lookup(table, iterator.get_next() % 4))
            with tf.Session() as session:
                session.run(tf.global_variables_initializer())
                for number in range(passes):
                    last = number == passes - 1
                    records = np.roll(RECORDS, rank if unlike and last else number)
                    session.run(iterator.initializer, {fed: records})
                    with contextlib.suppress(tf.errors.OutOfRangeError):
                        while True:
                            session.run(loss)

    run(False)
    with pytest.raises(RankError, match="is not the same on all ranks"):
        run(True)


@pytest.mark.parametrize("is_same", [True, False])
def test_samples_of_ragged_batches_are_dealt(strategy, rank, size, is_same):
    """They are compared like others: ranks that order them differently get an error."""
    numbers = np.arange(24, dtype=np.int64)
    numbers = numbers if is_same or rank else numbers[::-1]
    rows = [numbers[: i + 1].tolist() for i in range(24)]
    expected = contextlib.nullcontext()
    if size > 1 and not is_same:
        expected = pytest.raises(RankError, match="not the same on all ranks")
    with strategy.scope(plan="quiet"), tf.Graph().as_default():
        ragged = tf.data.Dataset.from_tensors(tf.ragged.constant(rows, dtype=tf.int64))
        dataset = strategy.shard(ragged.unbatch()).batch(2)
        batch = tf.data.make_one_shot_iterator(dataset).get_next()
        with strategy.embedding_scope():
            table = reference.table("t", 24, 2)
        found = tf.nn.embedding_lookup(table, batch.values)
        step = tf.train.get_or_create_global_step()
        train = tf.train.GradientDescentOptimizer(0.1).minimize(tf.reduce_sum(found), step)
        lengths, seen = batch.row_lengths(), []
        with expected, tf.train.MonitoredTrainingSession() as session:
            while not session.should_stop():
                seen += session.run([lengths, train])[0].tolist()
    if is_same:
        assert seen == list(range(1, 25))[rank::size]
