"""`hb.keras.Model` trains, evaluates and predicts as plain TensorFlow does in one process."""

import contextlib
import tempfile

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from collective.compat.names.hybridbackend import HYBRIDBACKEND

pytestmark = pytest.mark.either_backend
NAMES = {name.theirs: name for name in HYBRIDBACKEND.names}

BATCH, STEPS, EPOCHS, KEYS = 12, 2, 2, 11  # a batch of all ranks
IDS = np.arange(BATCH * STEPS * EPOCHS) * 7 % KEYS
LABELS = (np.arange(len(IDS)) % 3 == 0).astype(np.float32)[:, None]
SEEN = slice(0, 20)  # records of evaluations
keras = tf.keras


def named(theirs):
    return NAMES[theirs].resolve()


def layers(sharding):
    """Returns the function of a model's score: of a table, and of layers with and without names."""
    with sharding():
        rows = keras.layers.Embedding(
            KEYS,
            3,
            embeddings_initializer=tf.constant_initializer(np.arange(33.0).reshape(11, 3) / 50),
        )
    hidden = keras.layers.Dense(4, kernel_initializer=tf.constant_initializer(0.3))
    score = keras.layers.Dense(
        1, "sigmoid", kernel_initializer="ones", kernel_regularizer=keras.regularizers.l2(0.01)
    )

    def call(ids):
        with sharding():
            found = rows(ids)
        return score(hidden(found))

    return call, [rows, hidden, score]


def model(base, sharding, functional=False):
    """Returns a model of a class that is derived from `base`, or of tensors."""
    if functional:
        ids = keras.Input([], dtype=tf.int64, name="id")
        return base(inputs={"id": ids}, outputs=layers(sharding)[0](ids))

    class Ranking(base):
        def __init__(self):
            super().__init__()
            self.score, self.parts = layers(sharding)

        def call(self, features):
            return self.score(features["id"])

    return Ranking()


def compiled(optimizer, functional=False, metrics=(), **weights):
    """Returns `hb.keras.Model`, with loss and metrics."""
    made = model(named("hb.keras.Model"), named("hb.embedding_scope"), functional)
    if weights:
        made.load_weights(**weights)
    made.compile(optimizer, "binary_crossentropy", list(metrics))
    return made


def dataset(records, batch):
    elements = ({"id": IDS[records]}, LABELS[records])
    return tf.data.Dataset.from_tensor_slices(elements).batch(batch)


def mine(rank, size):
    """Returns this rank's batches of the training: its part of each batch of all ranks."""
    part = BATCH // size
    records = np.arange(len(IDS)).reshape(-1, size, part)[:, rank].ravel()
    return dataset(records, part)


def unequal(rank, size):
    """Returns this rank's records of an evaluation: the first has one, the last has most."""
    cuts = [0, *range(1, size), SEEN.stop]
    return dataset(slice(cuts[rank], cuts[rank + 1]), 4)


class Plain:
    """Trains the model in a session of plain TensorFlow, by the batches of all ranks."""

    def __init__(self, optimizer):
        with tf.Graph().as_default() as graph:
            self._feeds = tf.placeholder(tf.int64, [None]), tf.placeholder(tf.float32, [None, 1])
            built = model(keras.Model, contextlib.nullcontext)
            self._scores = built({"id": self._feeds[0]})
            crossentropy = keras.losses.binary_crossentropy(self._feeds[1], self._scores)
            self._loss = tf.reduce_mean(crossentropy) + tf.add_n(built.losses)
            if isinstance(made := optimizer(), tf.train.Optimizer):
                self._train = made.minimize(self._loss)
            else:
                self._train = made.get_updates(self._loss, tf.trainable_variables())
            auc = keras.metrics.AUC()
            self._count = auc.update_state(self._feeds[1], self._scores)
            self._auc = auc.result()
            self._clear = tf.variables_initializer(auc.variables)
            self._session = tf.Session(graph=graph)
            self._session.run([tf.global_variables_initializer(), tf.local_variables_initializer()])

    def _run(self, fetches, records):
        return self._session.run(fetches, dict(zip(self._feeds, (IDS[records], LABELS[records]))))

    def trained(self, epoch):
        """Returns the mean loss of an epoch's steps."""
        batches = np.arange(len(IDS)).reshape(EPOCHS, STEPS, BATCH)[epoch]
        return np.mean([self._run([self._loss, self._train], batch)[0] for batch in batches])

    def evaluated(self):
        self._session.run(self._clear)
        loss, scores, _ = self._run([self._loss, self._scores, self._count], SEEN)
        accuracy = np.mean((scores > 0.5) == (LABELS[SEEN] > 0.5))
        return {"loss": loss, "auc": self._session.run(self._auc), "accuracy": accuracy}

    def predicted(self, records):
        return self._run(self._scores, records)


def adagrad():
    return tf.train.AdagradOptimizer(0.3)


def adam():
    return keras.optimizers.Adam(0.05)


@pytest.fixture
def opens_scope(strategy):
    """Lets `hb.scope()` and so on use the strategy of the tests."""
    with strategy.scope(plan="quiet"), tf.Graph().as_default():
        yield


@pytest.mark.slow
@pytest.mark.parametrize("optimizer, functional", [(adagrad, False), (adam, True)])
def test_numbers_are_those_of_plain_tensorflow(strategy, rank, size, optimizer, functional):
    """Losses, metrics and outputs; validations have unequal data, and each record counts once."""
    plain, want = Plain(optimizer), {}
    for epoch in range(EPOCHS):
        want.setdefault("loss", []).append(plain.trained(epoch))
        for name, value in plain.evaluated().items():
            want.setdefault(f"val_{name}", []).append(value)
    with strategy.scope(plan="quiet"), tf.Graph().as_default():
        found = compiled(optimizer(), functional, [keras.metrics.AUC(name="auc"), "accuracy"])
        history = found.fit(
            mine(rank, size),
            epochs=EPOCHS,
            steps_per_epoch=STEPS,
            validation_data=unequal(rank, size),
            verbose=0,
        ).history
        for name, values in want.items():
            np.testing.assert_allclose(history[name], values, 2e-5, err_msg=name)
        evaluated = found.evaluate(unequal(rank, size), verbose=0)
        assert found.metrics_names == ["loss", "auc", "accuracy"]
        np.testing.assert_allclose(evaluated, list(plain.evaluated().values()), 2e-5)
        # The first rank predicts two batches, the others one.
        records = slice(0, 6 if rank == 0 else 3)
        scores = found.predict(dataset(records, 4), verbose=0)
        np.testing.assert_allclose(scores, plain.predicted(records), 2e-5)


@pytest.mark.slow
def test_training_goes_on_from_a_checkpoint(strategy, rank, size, folder):
    """With slots and all: the second half in another graph is the one of an uninterrupted run."""
    plain = Plain(adagrad)
    losses = [plain.trained(epoch) for epoch in range(EPOCHS)]
    for epoch in range(EPOCHS):
        with strategy.scope(plan="quiet"), tf.Graph().as_default():
            data = mine(rank, size).skip(epoch * STEPS)
            history = compiled(adagrad()).fit(
                data,
                initial_epoch=epoch,
                epochs=epoch + 1,
                steps_per_epoch=STEPS,
                checkpoint_dir=folder,
                keep_checkpoint_max=1,
                verbose=0,
            )
            np.testing.assert_allclose(history.history["loss"], [losses[epoch]], 2e-5)
    assert tf.train.latest_checkpoint(folder).endswith(f"-{STEPS * EPOCHS}")
    names = [name for name, _ in tf.train.list_variables(folder)]
    parts = [name for name in names if "embeddings/part_" in name]
    assert len(parts) == (size if size > 1 else 0), " ".join(names)
    assert len(tf.train.get_checkpoint_state(folder).all_model_checkpoint_paths) == 1
    with strategy.scope(plan="quiet"), tf.Graph().as_default():
        loaded = compiled(adagrad(), ckpt_dir=folder)
        scores = loaded.predict(dataset(SEEN, 4))
        np.testing.assert_allclose(scores, plain.predicted(SEEN), 2e-5)
    with strategy.scope(plan="quiet"), tf.Graph().as_default():
        read = compiled(adagrad())
        loss = read.evaluate(unequal(rank, size), checkpoint_dir=folder, verbose=0)
        assert loss == pytest.approx(plain.evaluated()["loss"], rel=2e-5)


@pytest.mark.slow
def test_weights_of_a_part(opens_scope, rank, size, folder):
    """`scope` takes some variables; others keep their initializers."""
    first = compiled(adagrad())
    first.fit(mine(rank, size), checkpoint_dir=folder, verbose=0)
    names = [v.op.name for v in tf.trainable_variables()]
    score = next(name for name in names if name.endswith("kernel") and "_1" in name)
    with tf.Session() as session, tf.Graph().as_default():
        del session
        want = tf.train.load_variable(folder, score)
        part = compiled(adagrad(), ckpt_dir=folder, scope=score)
        part.predict(dataset(SEEN, 4))
        variables = {v.op.name: v for v in tf.trainable_variables()}
        assert np.allclose(part._state.session.run(variables.pop(score)), want)
        hidden = next(v for name, v in variables.items() if name.endswith("kernel"))
        assert np.allclose(part._state.session.run(hidden), 0.3)


@pytest.mark.slow
def test_the_best_is_kept(strategy, rank, size, folder):
    """Of epochs whose loss falls, then rises: labels of the second half of the data are turned."""
    with strategy.scope(plan="quiet"), tf.Graph().as_default():
        found = compiled(tf.train.GradientDescentOptimizer(0.1))
        turned = mine(rank, size).map(lambda x, y: (x, 1 - y)).repeat()
        data = mine(rank, size).concatenate(turned)
        history = found.fit(
            data,
            epochs=4,
            steps_per_epoch=STEPS,
            validation_data=unequal(rank, size),
            checkpoint_dir=folder,
            save_best_only=True,
            verbose=0,
        ).history["val_loss"]
        best = int(np.argmin(history))
        assert 0 < best < 3, history
        state = tf.train.get_checkpoint_state(folder).all_model_checkpoint_paths
        assert [path.rpartition("-")[2] for path in state] == [str(STEPS * (best + 1))]
        loss = found.evaluate(unequal(rank, size), checkpoint_dir=folder, verbose=0)
        assert loss == pytest.approx(history[best], rel=1e-5)


def test_training_ends_with_the_data(opens_scope, rank, size, capfd):
    """Without steps_per_epoch an epoch is all of it; what `verbose` prints is rank 0's."""
    history = compiled(adagrad()).fit(mine(rank, size), epochs=3)
    assert len(history.history["loss"]) == 1
    printed = capfd.readouterr().out
    assert ("epoch 1/3: 4 steps, loss" in printed) == (rank == 0)
    assert ("the data ended in epoch 1 of 3" in printed) == (rank == 0)


def test_a_validation_in_parts_goes_on(opens_scope, rank, size):
    """`validation_steps` batches each time, then the next ones; `validation_freq` skips epochs."""
    found = compiled(tf.train.GradientDescentOptimizer(0.0))
    history = found.fit(
        mine(rank, size),
        epochs=4,
        steps_per_epoch=1,
        validation_data=mine(rank, size),
        validation_steps=1,
        validation_freq=2,
        verbose=0,
    ).history
    # Nothing is learned: a validation by a batch has the loss of the training by that batch.
    np.testing.assert_allclose(history["val_loss"], history["loss"][:2], 1e-6)


@pytest.mark.slow
def test_an_export_answers(strategy, rank, size, folder):
    plain = Plain(adagrad)
    for epoch in range(EPOCHS):
        plain.trained(epoch)
    with strategy.scope(plan="quiet"), tf.Graph().as_default():
        found = compiled(adagrad())
        with pytest.raises(ValueError, match="there is no checkpoint. Give fit a checkpoint_dir"):
            found.export_saved_model(f"{folder}/served", dict)
        found.fit(mine(rank, size), checkpoint_dir=f"{folder}/model", verbose=0)
        found.evaluate(unequal(rank, size), verbose=0)  # The checkpoint is still fit's.

        def signature():
            ids = tf.placeholder(tf.int64, [None])
            scores = model(named("hb.keras.Model"), named("hb.embedding_scope"))({"id": ids})
            return tf.saved_model.predict_signature_def({"id": ids}, {"score": scores})

        path = found.export_saved_model(f"{folder}/served", signature)
    with tf.Graph().as_default(), tf.Session() as session:
        loaded = tf.saved_model.load(session, ["serve"], path).signature_def
        answer = next(iter(loaded.values()))
        scores = session.run(answer.outputs["score"].name, {answer.inputs["id"].name: IDS[SEEN]})
    np.testing.assert_allclose(scores, plain.predicted(SEEN), 2e-5)


VALUES = {
    "fit": {
        **{"y": 1, "callbacks": [1], "validation_split": 0.1, "class_weight": {0: 1.0}},
        **{"sample_weight": 1},
    },
    "evaluate": {"y": 1, "callbacks": [1], "sample_weight": 1},
    "predict": {"callbacks": [1]},
    "compile": {
        **{
            "clipnorm": 1.0,
            "clipvalue": 1.0,
            "loss_weights": [1.0],
            "sample_weight_mode": "temporal",
        },
        **{
            "weighted_metrics": ["auc"],
            "target_tensors": [1],
            "distribute": 1,
            "run_eagerly": True,
        },
    },
}
IDLE = {
    "batch_size": 1,
    "shuffle": True,
    "max_queue_size": 3,
    "workers": 3,
    "use_multiprocessing": True,
}


@pytest.mark.ranks(1)
@pytest.mark.parametrize("function, name", [(f, name) for f in VALUES for name in VALUES[f]])
def test_arguments_that_are_refused(opens_scope, function, name):
    made = compiled(adagrad())
    given = [adagrad(), "mse"] if function == "compile" else [dataset(SEEN, 4)]
    with pytest.raises(NotImplementedError, match=rf"{function}\({name}=…\) is not supported: "):
        getattr(made, function)(*given, **{name: VALUES[function][name]})
    with pytest.raises(TypeError, match="there is no argument 'other'"):
        getattr(made, function)(*given, other=1)


@pytest.mark.long
@pytest.mark.ranks(1)
def test_arguments_without_effect(opens_scope):
    """A dataset has batches and an order of its own: numbers are the same with them."""
    made = compiled(tf.train.GradientDescentOptimizer(0.0))
    want = made.evaluate(dataset(SEEN, 4), verbose=0)
    for name, value in IDLE.items():
        assert made.evaluate(dataset(SEEN, 4), verbose=0, **{name: value}) == want
        found = made.fit(dataset(SEEN, 4), verbose=0, **{name: value})
        assert found.history["loss"] == pytest.approx([want])
    scores = made.predict(dataset(SEEN, 4))
    assert np.array_equal(made.predict(dataset(SEEN, 4), batch_size=1), scores)


WRONG = {
    "a sum": (
        lambda m: m.compile(adagrad(), keras.losses.MeanSquaredError(reduction="sum")),
        "reduction='sum'",
    ),
    "losses": (lambda m: m.compile(adagrad(), ["mse"]), r"compile\(loss=list\) is not supported"),
    "metrics": (lambda m: m.compile(adagrad(), "mse", {}), r"compile\(metrics=dict\)"),
    "no optimizer": (lambda m: m.compile(loss="mse"), r"compile\(optimizer=NoneType\)"),
    "no loss": (lambda m: (m.compile(adagrad()), m.fit(dataset(SEEN, 4))), "call compile"),
    "no dataset": (lambda m: m.fit(np.zeros(3)), r"fit\(x=…\) is ndarray: give a tf.data.Dataset"),
    "no labels": (
        lambda m: m.evaluate(dataset(SEEN, 4).map(lambda x, y: x)),
        r"evaluate\(x=…\) is a dataset of ",
    ),
    "weights": (
        lambda m: m.fit(dataset(SEEN, 4).map(lambda x, y: (x, y, y))),
        r"fit\(x=…\) is a dataset of ",
    ),
    "mode": (lambda m: m.fit(dataset(SEEN, 4), mode="best"), r"mode='best'\) is 'auto', 'min'"),
    "monitor": (
        lambda m: m.fit(dataset(SEEN, 4), save_best_only=True),
        r"monitor='val_loss', save_best_only=True\): the values are loss\.",
    ),
    "no checkpoint": (
        lambda m: m.evaluate(dataset(SEEN, 4), checkpoint_dir=f"{tempfile.mkdtemp()}/none"),
        "/none' has no checkpoint",
    ),
    "load after compile": (lambda m: m.load_weights("there"), "call it before compile"),
    "save": (lambda m: m.save("there"), r"Model\.save is not supported: use fit"),
    "one batch": (lambda m: m.train_on_batch(1), r"train_on_batch is not supported: use fit"),
    "unequal ranks": (
        lambda m: named("hb.keras.Model")(train_drop_remainder=False),
        r"train_drop_remainder=…\) is not supported: training ends",
    ),
}


@pytest.mark.ranks(1)
@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_named(opens_scope, name):
    call, message = WRONG[name]
    with pytest.raises((NotImplementedError, ValueError, RuntimeError), match=message):
        call(compiled(adagrad()))


@pytest.mark.ranks(1)
def test_outputs_that_are_no_tensor(opens_scope):
    class Two(named("hb.keras.Model")):
        def call(self, features):
            return {"score": features["id"]}

    with pytest.raises(NotImplementedError, match="predict: the model returns dict; one tensor"):
        Two().predict(dataset(SEEN, 4))


@pytest.mark.slow
def test_weights_that_a_checkpoint_lacks(opens_scope, rank, size, folder):
    """Keep their initializers, or are an error if the script asks for it."""
    compiled(adagrad()).fit(mine(rank, size), checkpoint_dir=folder, verbose=0)
    with tf.Graph().as_default():
        other = model(named("hb.keras.Model"), named("hb.embedding_scope"))
        other.score = keras.layers.Dense(1)
        other.call = lambda features: other.score(tf.cast(features["id"], tf.float32)[:, None])
        other.load_weights(folder, skip_mismatched=False)
        with pytest.raises(ValueError, match="the checkpoint has no .*skip_mismatched=True leaves"):
            other.predict(dataset(SEEN, 4))
