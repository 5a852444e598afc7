"""strategy.estimator gives plain tf.estimator's results on any number of ranks."""

import contextlib
import json
import os

import numpy as np
import pytest
import tensorflow.compat.v1 as tf
import tensorflow.compat.v2 as tf2

from collective import RankError
from collective import estimator as tf_estimator
from collective.tensorflow_internals.estimators import estimator as estimator_lib
from tests.ranks import reference
from tests.ranks.estimators import (
    BATCH,
    IDS,
    LABELS,
    WEIGHTS,
    assert_equal,
    everyones,
    few_metrics,
    made,
    model,
    plain,
    records,
    told,
)

pytestmark = [pytest.mark.either_backend, pytest.mark.backends("hb"), pytest.mark.double]


def many_metrics(labels, p, weights):
    yes, m = tf.cast(p > 0.4, tf.float32), tf.metrics
    thresholds = [0.3, 0.5]
    whole, guess = tf.cast(labels, tf.int64), tf.cast(yes, tf.int64)
    ranked = tf.stack([1 - p, p], 1)
    return {
        "mean": m.mean(p, weights),
        "accuracy": m.accuracy(labels, yes),
        "auc": m.auc(labels, p, weights),
        "pr": m.auc(labels, p, curve="PR", summation_method="careful_interpolation"),
        "precision": m.precision(labels, yes),
        "recall": m.recall(labels, yes, weights),
        "rmse": m.root_mean_squared_error(labels, p),
        "mae": m.mean_absolute_error(labels, p),
        "mse": m.mean_squared_error(labels, p, weights),
        "relative": m.mean_relative_error(labels, p, tf.ones_like(p)),
        "below": m.percentage_below(p, 0.4),
        "iou": m.mean_iou(whole, guess, 2),
        "per_class": m.mean_per_class_accuracy(whole, guess, 2),
        "tensor": m.mean_tensor(tf.reduce_mean(ranked, 0)),
        "tp": m.true_positives(labels, yes),
        "fn_at": m.false_negatives_at_thresholds(labels, p, thresholds),
        "tn": m.true_negatives(labels, yes, weights),
        "recall_at": m.recall_at_thresholds(labels, p, thresholds),
        "precision_at": m.precision_at_thresholds(labels, p, thresholds),
        "sensitivity": m.sensitivity_at_specificity(labels, p, 0.5),
        "specificity": m.specificity_at_sensitivity(labels, p, 0.5),
        "recall_k": m.recall_at_k(whole[:, None], ranked, 1),
        "precision_k": m.precision_at_k(whole[:, None], ranked, 1),
        "average_k": m.average_precision_at_k(whole[:, None], ranked, 2),
        "cosine": m.mean_cosine_distance(ranked, ranked + 0.1, 1),
    }


# -- evaluate


@pytest.mark.matrix
def test_all_metrics_are_those_of_one_process(strategy, folder):
    got = made(strategy, folder, metrics=many_metrics).evaluate(records(17))
    assert_equal(got, plain(folder, many_metrics).evaluate(records(17)))


@pytest.mark.slow
@pytest.mark.sample(2)
@pytest.mark.parametrize("count, steps", [(1, None), (3 * BATCH + 1, None), (30, 3), (5, 7)])
def test_every_record_counts_once(strategy, folder, count, steps):
    """The last batch is short, some ranks have none; `steps` are batches of the whole input."""
    want = plain(folder, few_metrics).evaluate(records(count), steps=steps)
    results = made(strategy, folder, metrics=few_metrics).evaluate(records(count), steps=steps)
    assert_equal(results, want)
    assert (
        len(
            {
                json.dumps(text["results"])
                for text in told(results={k: float(v) for k, v in results.items()})
            }
        )
        == 1
    )


def test_no_records_at_all(strategy, folder):
    with strategy.scope(), tf.Graph().as_default():
        assert made(strategy, folder, metrics=few_metrics).evaluate(records(0))["loss"] == 0


def keras_metrics(labels, p, weights):
    auc, mean = tf2.keras.metrics.AUC(num_thresholds=50), tf2.keras.metrics.Mean()
    auc.update_state(labels, p)
    mean.update_state(p, weights)
    precision, recall = tf.metrics.precision(labels, p > 0.3), tf.metrics.recall(labels, p > 0.3)
    f1 = 2 * precision[0] * recall[0] / (precision[0] + recall[0])
    return {"auc": auc, "mean": mean, "f1": (f1, tf.group(precision[1], recall[1]))}


@pytest.mark.matrix
def test_keras_metrics_and_combinations(strategy, folder):
    got = made(strategy, folder, metrics=keras_metrics).evaluate(records(13))
    assert_equal(got, plain(folder, keras_metrics).evaluate(records(13)))


@pytest.mark.long
def test_a_metric_of_several_values(strategy, folder):
    """TensorFlow takes any structure of tensors for a metric's value."""

    def several(labels, p, weights):
        mean, update = tf.metrics.mean(p, weights)
        recall, counted = tf.metrics.recall(labels, p > 0.3)
        return {"several": ((mean, {"recall": tf.stack([recall])}), tf.group(update, counted))}

    (mean, others) = made(strategy, folder, metrics=several).evaluate(records(13))["several"]
    (mean_of_all, others_of_all) = plain(folder, several).evaluate(records(13))["several"]
    assert_equal({"mean": mean, **others}, {"mean": mean_of_all, **others_of_all})


def test_a_metric_in_a_local_variable_is_of_all_records(strategy, folder):
    """What a metric of an evaluation reads is its state, in whatever collection."""

    def own(labels, p, weights):
        total = tf.get_local_variable("total", [], initializer=tf.zeros_initializer())
        return {"own": (tf.identity(total), tf.assign_add(total, tf.reduce_sum(p)))}

    got = made(strategy, folder, metrics=own).evaluate(records(9))
    assert_equal(got, plain(folder, own).evaluate(records(9)))


def test_a_metric_of_ones_own_must_be_everyones(strategy, folder, rank, size):
    def own(labels, p, weights):
        return {"own": (tf.constant(rank + 1.0), tf.no_op())}

    estimator = made(strategy, folder, metrics=own)
    if size == 1:
        assert estimator.evaluate(records(9))["own"] > 0
    else:
        with pytest.raises(ValueError, match="metric 'own' is .* on rank 0 and"):
            estimator.evaluate(records(9))


def test_an_error_in_one_ranks_model_fn_is_one_on_all(strategy, folder, rank, size):
    def trouble(mode):
        if rank == size - 1:
            raise KeyError("boom")

    estimator = made(strategy, folder, trouble=trouble)
    with pytest.raises(KeyError if rank == size - 1 else RankError, match="boom"):
        estimator.evaluate(records(9))
    assert made(strategy, folder).evaluate(records(9))["loss"] > 0


def test_different_arguments_are_an_error_on_all(strategy, folder, rank, size):
    if size == 1:
        return
    with pytest.raises(RankError, match=r"evaluate: steps is 3 on rank 0 and 4 on rank 1"):
        made(strategy, folder).evaluate(records(30), steps=3 + min(rank, 1))


# -- whose records


@pytest.mark.slow
@pytest.mark.parametrize("seed", [None, 3])
def test_batches_are_dealt_in_one_order(strategy, folder, rank, size, seed):
    """A shuffle without a seed is the same on every rank, and another one the next time."""

    def input_fn():
        data = {"ids": IDS[:37], "weight": WEIGHTS[:37], "number": np.arange(37)}
        data = tf2.data.Dataset.from_tensor_slices(data).shuffle(100).repeat(2).batch(BATCH)
        return data.map(lambda x: x, num_parallel_calls=2)

    estimator = made(strategy, folder, config=tf_estimator.RunConfig(tf_random_seed=seed))
    orders = []
    for _ in range(2):
        mine = [p["number"] for p in estimator.predict(input_fn)]
        everyone = everyones(mine)
        assert sorted(x for numbers in everyone for x in numbers) == sorted([*range(37)] * 2)
        assert max(map(len, everyone)) - min(map(len, everyone)) <= BATCH
        orders.append(everyone)
    assert (orders[0] == orders[1]) == (seed is not None)


def test_input_context(strategy, folder, rank, size):
    def input_fn(input_context, mode):
        assert (input_context.num_input_pipelines, input_context.input_pipeline_id) == (size, rank)
        assert input_context.num_replicas_in_sync == size and mode == "infer"
        return records(20)().shard(
            input_context.num_input_pipelines, input_context.input_pipeline_id
        )

    numbers = [p["number"] for p in made(strategy, folder).predict(input_fn)]
    assert sorted(x for numbers in everyones(numbers) for x in numbers) == list(range(20))


@pytest.mark.matrix
def test_undealt_input(strategy, folder, rank, size):
    estimator = made(strategy, folder, shard=False, metrics=few_metrics)
    assert [p["number"] for p in estimator.predict(records(9))] == list(range(9))
    # `steps` are of each rank's own input, and it may be shorter than that
    counts = [2 * BATCH, 5 * BATCH, BATCH, 30]
    got = estimator.evaluate(records(counts[rank]), steps=4)
    want = plain(folder, few_metrics).evaluate(
        lambda: _joined([records(count)().take(4) for count in counts[:size]])
    )
    assert_equal(got, want)


def _joined(datasets):
    for other in datasets[1:]:
        datasets[0] = datasets[0].concatenate(other)
    return datasets[0]


def test_tensors_cannot_be_dealt(strategy, folder, size):
    def input_fn():
        return {"ids": tf.constant(IDS[:4]), "weight": tf.constant(WEIGHTS[:4])}, tf.constant(
            LABELS[:4]
        )

    if size > 1:
        with pytest.raises(Exception, match="shard_input=False"):
            made(strategy, folder).evaluate(input_fn, steps=1)
    undealt = made(strategy, folder, shard=False).evaluate(input_fn, steps=2)
    assert_equal(undealt, plain(folder).evaluate(input_fn, steps=2))


def test_an_input_that_is_sharded_already_is_warned_of(strategy, folder, size):
    with (
        pytest.warns(UserWarning, match="already uses shard")
        if size > 1
        else contextlib.nullcontext()
    ):
        list(made(strategy, folder).predict(lambda: records(9)().shard(1, 0).prefetch(1)))


# -- predict


@pytest.mark.sample(2)
@pytest.mark.parametrize("count", [0, 1, 23])
@pytest.mark.parametrize("singly", [True, False])
def test_gathered_predictions(strategy, folder, rank, count, singly):
    got = list(
        made(strategy, folder).predict(records(count), gather=True, yield_single_examples=singly)
    )
    want = list(plain(folder).predict(records(count), yield_single_examples=singly))
    assert len(got) == (len(want) if rank == 0 else 0)
    for ours, theirs in zip(got, want):
        assert_equal(ours, theirs)


@pytest.mark.slow
def test_a_reader_of_gathered_predictions_may_stop(strategy, folder, rank):
    estimator = made(strategy, folder)
    if rank == 0:
        for prediction in estimator.predict(records(30), ["p"], gather=True):
            assert set(prediction) == {"p"}
            break
    else:
        estimator.predict(records(30), ["p"], gather=True)
    assert estimator.evaluate(records(9))["loss"] > 0


@pytest.mark.slow
def test_predictions_that_one_rank_stops_reading(strategy, folder, rank, size):
    """It ends for all."""
    estimator, seen = made(strategy, folder), 0
    for _ in estimator.predict(records(100)):
        seen += 1
        if rank == 0 and seen == BATCH + 1:
            break
    assert BATCH <= seen <= 2 * BATCH + 1
    assert estimator.evaluate(records(9))["loss"] > 0


# -- configuration


def test_a_temporary_folder_is_everyones(strategy):
    estimator = made(strategy, None)
    assert len({text["folder"] for text in told(folder=estimator.model_dir)}) == 1
    assert os.path.isdir(estimator.model_dir)


def test_folders_that_differ(strategy, folder, rank, size):
    """Rank 0's counts for all; without one there is nothing to agree on."""
    if size == 1:
        return
    estimator = made(strategy, os.path.join(folder, str(rank)))
    assert estimator.model_dir == os.path.join(folder, "0")
    with pytest.raises(RankError, match="model_dir is None on rank 0 and .* on rank 1"):
        made(strategy, os.path.join(folder, str(rank)) if rank else None)


def test_configuration(strategy, folder, monkeypatch):
    monkeypatch.setenv(
        "TF_CONFIG",
        json.dumps(
            {
                "cluster": {"chief": ["a:1"], "worker": ["b:1"], "ps": ["c:1"]},
                "task": {"type": "worker", "index": 0},
            }
        ),
    )
    session = tf.ConfigProto(inter_op_parallelism_threads=3, device_filters=["/job:ps"])
    config = tf_estimator.RunConfig(
        session_config=session, save_checkpoints_steps=7, keep_checkpoint_max=2, tf_random_seed=9
    )
    with pytest.warns(UserWarning, match="TF_CONFIG and device_filters .* no effect"):
        estimator = made(strategy, folder, config=config)
    ours = estimator.config
    assert (ours.save_checkpoints_steps, ours.keep_checkpoint_max, ours.tf_random_seed) == (7, 2, 9)
    assert (
        ours.is_chief and not ours.cluster_spec and ours.master == "" and ours.num_ps_replicas == 0
    )
    assert (
        ours.session_config.inter_op_parallelism_threads == 3
        and not ours.session_config.device_filters
    )
    assert (
        list(config.session_config.device_filters) == ["/job:ps"] and estimator.model_dir == folder
    )
    assert isinstance(estimator, estimator_lib.EstimatorV2) and isinstance(
        estimator, tf_estimator.Estimator
    )
    # Where TensorFlow has no Estimators of its own, the configuration itself is refused.
    refused = ValueError if tf.__version__.startswith("2.15.") else NotImplementedError
    with pytest.raises(refused, match="tf.distribute"):
        made(
            strategy,
            folder,
            config=tf_estimator.RunConfig(train_distribute=tf2.distribute.get_strategy()),
        )


def test_options(strategy, folder):
    with pytest.raises(TypeError, match="estimator.. has no option nothing"):
        strategy.estimator(model(strategy.embedding_scope), folder, nothing=1)
    with pytest.warns(UserWarning, match="comm_pubsub_device"):
        strategy.estimator(
            model(strategy.embedding_scope), folder, params={}, comm_pubsub_device="x"
        )


def test_parameters_are_a_copy(strategy, folder):
    params = {"scale": 2.0}
    estimator = made(strategy, folder, params)
    params["scale"] = 0.0
    assert estimator.params == {"scale": 2.0}
    assert estimator.evaluate(records(5))["loss"] != pytest.approx(np.log(2))


# -- for comparison


def test_tensorflows_own_estimator_is_refused_on_several_ranks(strategy, rank, size, folder):
    """Each rank would train on all of the input, and an evaluation would count every record N
    times.
    """
    with strategy.scope():
        own = tf_estimator.Estimator(
            model(strategy.embedding_scope), os.path.join(folder, f"own_{rank}"), params={}
        )
        with (
            pytest.raises(TypeError, match="strategy.estimator")
            if size > 1
            else contextlib.nullcontext()
        ):
            own.train(records(8), steps=1)


def test_a_tables_value_and_the_names_of_variables_dont_depend_on_the_number_of_ranks(
    strategy, folder
):
    estimator = made(strategy, folder)
    estimator.train(records(0), steps=1)  # no record: the initial values
    np.testing.assert_array_equal(estimator.get_variable_value("t"), reference.table_values(10, 2))
    assert estimator.get_variable_names() == ["global_step", "t", "t/Adagrad", "w", "w/Adagrad"]
