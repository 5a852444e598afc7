"""Small scripts that use other frameworks' names as their own scripts do run as they are."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.jobs import pool

# It has no scope, and takes what a model zoo's scripts for one process or parameter servers take.
MODEL = """
import collections
import sys
import tensorflow as tf
from tensorflow.python.client import timeline
from tensorflow.python.ops import partitioned_variables

tf.logging.set_verbosity(tf.logging.ERROR)
stock = "--tf" in sys.argv

def data(records):
    dataset = tf.data.Dataset.from_tensor_slices(records).repeat(4).batch(4)
    iterator = tf.data.Iterator.from_structure(
        tf.data.get_output_types(dataset), tf.data.get_output_shapes(dataset))
    return iterator.get_next(), iterator.make_initializer(dataset)

features, init = data({{
    "clicked": [1.0, 0.0, 0.0, 1.0], "I1": [0.1, 0.5, -0.2, 0.4], "C1": [b"a", b"b", b"a", b"c"],
    "C2": [b"x", b"y", b"z", b"x"], "item": [3, 1, 3, 7]}})
config = tf.ConfigProto()
config.inter_op_parallelism_threads = 1
hooks, fusion = [tf.train.StopAtStepHook(last_step=4)], {{}}
if not stock:
    import pkg_resources
    assert "deeprec" in pkg_resources.get_distribution("TensorFlow").version
    evict = tf.GlobalStepEvict(steps_to_live=None)
    option = tf.EmbeddingVariableOption(evict_option=evict, filter_option=tf.CounterFilter(0))
    features = tf.staged(features, num_threads=4, capacity=40)
    config.graph_options.optimizer_options.do_smart_stage = True
    config.graph_options.optimizer_options.do_op_fusion = True
    config.graph_options.optimizer_options.async_embedding_options.threads_num = 4
    config.session_stage_subgraph_thread_pool.add()
    config.session_stage_subgraph_thread_pool[0].inter_op_threads_num = 8
    hooks.append(tf.make_prefetch_hook())
    fusion = {{"do_fusion": True}}
labels = tf.reshape(tf.to_float(features.pop("clicked")), [-1, 1])
columns = [tf.feature_column.numeric_column("I1", shape=(1,))]
for name, initializer in (("C1", tf.ones_initializer()), ("C2", tf.constant_initializer(0.5))):
    if stock or name == "C1":
        column = tf.feature_column.categorical_column_with_hash_bucket(name, 10000)
    else:
        column = tf.feature_column.categorical_column_with_embedding(name, ev_option=option)
    columns.append(tf.feature_column.embedding_column(
        column, dimension=3, combiner="mean", initializer=initializer, **fusion))
partitioner = partitioned_variables.min_max_variable_partitioner(
    max_partitions=0, min_slice_size=8 << 20)
outputs = {{}}
layer = tf.feature_column.input_layer(features, columns, cols_to_output_tensors=outputs)
with tf.variable_scope("input_layer", partitioner=partitioner, reuse=tf.AUTO_REUSE):
    items = tf.get_variable("items", [10, 3], initializer=tf.constant_initializer(0.25))
    layer = tf.concat([layer, tf.nn.embedding_lookup(items, features["item"])], 1)
with tf.variable_scope("dnn", partitioner=partitioner) as scope:
    layer = tf.layers.dense(layer, 3, tf.nn.relu, kernel_initializer=tf.constant_initializer(0.1))
logits = tf.layers.dense(layer, 1, kernel_initializer=tf.constant_initializer(0.3))
logits = tf.add(logits, tf.feature_column.linear_model(features, columns[:1], **fusion))
loss = tf.losses.mean_squared_error(labels, tf.sigmoid(logits))
step = tf.train.get_or_create_global_step()
optimizer = tf.train.AdagradOptimizer(0.5)
if not stock:
    assert tf.train.AdamAsyncOptimizer(0.1) and tf.train.AdagradDecayOptimizer(0.1, step)
train_op = optimizer.minimize(loss, global_step=step)
saver = tf.train.Saver(max_to_keep=1, **({{}} if stock else {{"incremental_save_restore": True}}))
scaffold = tf.train.Scaffold(
    local_init_op=tf.group(tf.local_variables_initializer(), init), saver=saver)
with tf.train.MonitoredTrainingSession(
        is_chief=True, hooks=hooks, scaffold=scaffold, checkpoint_dir={folder!r},
        save_checkpoint_steps=4, save_checkpoint_secs=None, config=config) as session:
    while not session.should_stop():
        print("loss", session.run([loss, train_op])[0], flush=True)
print("tables", *sorted(v.op.name for v in tf.global_variables() if "Table" in type(v).__name__))
"""


def losses(output: str, rank: int | None = None) -> list[float]:
    prefix = "" if rank is None else rf"\[{rank}\] "
    return [float(x) for x in re.findall(rf"^{prefix}loss (\S+)$", output, re.M)]


@pytest.mark.slow
def test_a_script_of_deeprec_without_a_scope(tmp_path: Path):
    """Every rank reads the same records: the losses are those of plain TensorFlow."""
    script, plain = tmp_path / "train.py", tmp_path / "plain.py"
    script.write_text(MODEL.format(folder=str(tmp_path / "model")))
    version_1 = "import tensorflow.compat.v1 as tf; tf.disable_v2_behavior()"
    plain.write_text(
        MODEL.format(folder=str(tmp_path / "plain")).replace("import tensorflow as tf", version_1)
    )
    launched = ("--device", "cpu", "-np")
    alone = pool.launch(*launched, 1, plain, "--tf")
    assert alone.returncode == 0, alone.stdout
    done = pool.launch(*launched, 2, "--as", "deeprec", "--embedding-scope", "auto", script)
    assert done.returncode == 0, done.stdout
    want = losses(alone.stdout)
    assert len(want) == 4 and want[3] < want[0]
    for rank in range(2):
        assert losses(done.stdout, rank) == pytest.approx(want, rel=1e-5)
    embeddings = [f"input_layer/C{i}_embedding/embedding_weights" for i in (1, 2)]
    assert f"[0] tables {' '.join([*embeddings, 'input_layer/items'])}\n" in done.stdout
    for idle in ("tf.staged", "tf.OptimizerOptions.do_smart_stage", "linear_model(do_fusion=)"):
        assert done.stdout.count(f"{idle} has no effect here: ") == 1


WITH_A_SCOPE = {
    "deeprec": """
import tensorflow as tf
from tensorflow.python.distribute.group_embedding_collective_strategy import CollectiveStrategy

strategy = CollectiveStrategy()
with strategy.scope(), tf.Graph().as_default():
    with strategy.embedding_scope():
        static = tf.get_variable(
            "var_1", shape=(1000, 3), initializer=tf.ones_initializer(tf.float32),
            partitioner=tf.fixed_size_partitioner(num_shards=strategy.world_size()))
        dynamic = tf.get_embedding_variable(
            "ev", embedding_dim=3, initializer=tf.ones_initializer(),
            ev_option=tf.EmbeddingVariableOption(evict_option=None, filter_option=None))
    rows = tf.nn.embedding_lookup(static, tf.cast([0, 1, 2, 5, 6, 7], tf.int64))
    rows = tf.concat([rows, *tf.nn.group_embedding_lookup([dynamic], [tf.constant([5, 9])])], 0)
    scope = tf.variable_scope("kept", reuse=tf.AUTO_REUSE)
    with scope.keep_weights(dtype=tf.float32):
        kept = tf.layers.dense(tf.cast(rows, tf.bfloat16), 1, name="short")
    kernel = next(v for v in tf.global_variables() if v.op.name == "kept/short/kernel")
    assert kept.dtype == tf.bfloat16 and kernel.dtype.base_dtype == tf.float32
    loss = tf.reduce_sum(tf.multiply(rows, 2.0))
    optimizer = tf.train.FtrlOptimizer(0.1, l1_regularization_strength=2.0)
    train_op = optimizer.apply_gradients(optimizer.compute_gradients(loss))
    with tf.train.MonitoredTrainingSession("") as session:
        for _ in range(2):
            print("loss", session.run([loss, train_op])[0])
""",
    "hybridbackend": """
import tensorflow as tf
import hybridbackend.tensorflow as hb

def train():
    ids = tf.constant([1, 2, 2])
    with hb.scope(sharding=True):
        with tf.variable_scope("a", partitioner=tf.fixed_size_partitioner(hb.context.world_size)):
            weights = tf.get_embedding_variable(
                "w", key_dtype=tf.int64, embedding_dim=2, initializer=tf.ones_initializer())
    with hb.embedding_scope(), tf.device("/cpu:0"):
        more = tf.get_variable("more", shape=(5, 2), initializer=tf.ones_initializer())
    rows = tf.nn.embedding_lookup(weights, ids) + tf.nn.embedding_lookup(more, ids)
    loss = tf.reduce_mean(rows)
    labels, predictions = tf.constant([1.0, 0.0, 1.0]), tf.constant([0.9, 0.1, 0.8])
    auc, update = hb.metrics.auc(labels=labels, predictions=predictions, name="auc")
    with tf.control_dependencies([update]):
        train_op = hb.train.GradientDescentOptimizer(0.1).minimize(loss)

    def evaluate():
        dataset = tf.data.Dataset.range(1, 6).shard(hb.context.world_size, hb.context.rank).batch(1)
        batch = tf.data.make_one_shot_iterator(dataset).get_next()
        with hb.embedding_scope():
            more = tf.get_variable("more", shape=(5, 2), initializer=tf.ones_initializer())
        row = tf.nn.embedding_lookup(more, batch % 5)
        return {"mean": tf.metrics.mean(batch), "row": (tf.reduce_sum(row), tf.no_op())}

    history = []
    hooks = [hb.train.EvaluationHook(evaluate, every_n_iter=1, history=history)]
    with tf.train.MonitoredTrainingSession("", hooks=hooks) as session:
        for _ in range(2):
            print("loss", session.run([loss, train_op])[0])
    assert [values["mean"] for values in history] == [3.0, 3.0], history

with hb.scope(data_sync_drop_remainder=False):
    train()
""",
    "sok": """
import numpy as np
import tensorflow as tf
import horovod.tensorflow as hvd
import sparse_operation_kit as sok

hvd.init()
session = tf.compat.v1.Session(config=tf.compat.v1.ConfigProto())
sok.init()
static = sok.Variable(np.arange(12, dtype=np.float32).reshape(6, 2))
local = sok.Variable(np.ones([4, 2], np.float32), mode="localized:0")
dynamic = sok.DynamicVariable(dimension=2, initializer="13", var_type="hbm")
other = tf.Variable([[0, 1, 2]])
assert [len(part) for part in sok.filter_variables([other, static, local, dynamic])] == [3, 1]
ids = tf.RaggedTensor.from_row_lengths(tf.constant([1, 5, 2], tf.int64), [2, 1])
params = [static, local, dynamic]
rows = sok.lookup_sparse(params, [ids, ids % 4, ids], None, ["sum", "mean", "mean"])
rows.append(sok.all2all_dense_embedding(static, tf.constant([0, 3])))
loss = tf.add_n([tf.reduce_sum(each) for each in rows])
optimizer = sok.OptimizerWrapper(tf.compat.v1.train.GradientDescentOptimizer(0.5))
train_op = optimizer.apply_gradients(zip(tf.gradients(loss, params), params))
session.run(tf.compat.v1.global_variables_initializer())
for _ in range(2):
    print("loss", session.run([loss, train_op])[0])
with session.as_default():
    before = static.eval(session)
    sok.dump("{folder}", [static], optimizer)
    session.run(tf.compat.v1.global_variables_initializer())
    sok.load("{folder}", [static], optimizer)
    np.testing.assert_array_equal(static.eval(session), before)
""",
    "horovod": """
import tensorflow as tf
import horovod.tensorflow as hvd

hvd.init()
config = tf.ConfigProto()
config.gpu_options.visible_device_list = str(hvd.local_rank())
weights = tf.get_variable("w", [4, 2], initializer=tf.ones_initializer())
loss = tf.reduce_mean(tf.nn.embedding_lookup(weights, [hvd.rank(), 2]))
global_step = tf.train.get_or_create_global_step()
optimizer = hvd.DistributedOptimizer(tf.train.GradientDescentOptimizer(0.1))
train_op = optimizer.minimize(loss, global_step=global_step)
hooks = [hvd.BroadcastGlobalVariablesHook(0), tf.train.StopAtStepHook(last_step=2)]
with tf.train.MonitoredTrainingSession(
    checkpoint_dir="{folder}" if hvd.rank() == 0 else None, hooks=hooks, config=config
) as session:
    while not session.should_stop():
        print("loss", session.run([loss, train_op])[0])
""",
    "distributed-embeddings": """
import tensorflow as tf
import horovod.tensorflow as hvd
import distributed_embeddings
from distributed_embeddings import dist_model_parallel as dmp
from distributed_embeddings.python.layers import dist_model_parallel, embedding
from distributed_embeddings.python.ops.embedding_lookup_ops import embedding_lookup
from tensorflow.keras import initializers

kinds = {each.DistributedEmbedding for each in (dmp, dist_model_parallel, distributed_embeddings)}
assert len(kinds) == 1 and embedding_lookup is distributed_embeddings.embedding_lookup
hvd.init()
layer = dmp.DistributedEmbedding([
    tf.keras.layers.Embedding(4, 2, initializers.Ones()),
    embedding.Embedding(6, 2, "ones", combiner="sum"),
], strategy="memory_balanced")
inputs = [tf.constant([0, 1, 2, 2]), tf.constant([[1], [5], [0], [1]])]
inputs = [tf.split(each, hvd.size())[hvd.rank()] for each in inputs]
optimizer = tf.keras.optimizers.SGD(0.8)

@tf.function
def train():
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(tf.concat(layer(inputs), 1))
    gradients = dmp.DistributedGradientTape(tape).gradient(loss, layer.trainable_variables)
    optimizer.apply_gradients(zip(gradients, layer.trainable_variables))
    return loss

for step in range(2):
    print("loss", hvd.allreduce(train()).numpy())
    dmp.broadcast_variables(layer.variables, root_rank=0)
""",
    "tfra": """
import tensorflow as tf
import horovod.tensorflow as hvd
import tensorflow_recommenders_addons as tfra
from tensorflow_recommenders_addons import dynamic_embedding as de
from tensorflow_recommenders_addons.dynamic_embedding.keras.layers import HvdAllToAllEmbedding

assert tfra.dynamic_embedding is de and de.keras.layers.embedding.Embedding is (
    de.keras.layers.BasicEmbedding)
hvd.init()
de.enable_train_mode()
config = de.HkvHashTableConfig(init_capacity=4, max_capacity=8, max_hbm_for_values=128)
creator = de.HkvHashTableCreator(config=config, saver=de.FileSystemSaver(proc_size=1, proc_rank=0))
layer = HvdAllToAllEmbedding(embedding_size=2, initializer=1.0, name="a", kv_creator=creator)
model = tf.keras.Sequential([layer])
optimizer = de.DynamicEmbeddingOptimizer(tf.keras.optimizers.SGD(0.8), synchronous=True)
model.compile(optimizer, lambda labels, rows: tf.reduce_mean(rows))
ids = tf.constant([[hvd.rank() + 2**40], [5]], tf.int64)
for step in range(2):
    got = model.fit(ids, tf.zeros([2, 1]), batch_size=2, verbose=0, callbacks=[
        de.keras.callbacks.DEHvdBroadcastGlobalVariablesCallback(root_rank=0),
        de.keras.callbacks.ModelCheckpoint("{folder}"),
    ])
    print("loss", got.history["loss"][0])
try:
    de.get_variable("table")
except NotImplementedError as error:
    assert "de.get_variable is not supported: make a layer" in str(error)
""",
}
# Of the second step on one rank, by hand. SOK's is the sum over ranks, which is asked for alike.
SECOND = {
    # Sums of gradients are their mean: each element of a row is 2's gradient, of FTRL.
    "deeprec": None,
    # 1 + 1 less twice 0.1 / 6 for the row of 1, and twice 0.2 / 6 for the row of 2, of both.
    "hybridbackend": 2 - 2 * (0.1 / 6 + 2 * 0.2 / 6) / 3,
    "sok": None,
    # Ranks 0 and 1 read rows rank and 2; each element of row 2 has a quarter, of the other 1 / 8.
    "horovod": 1 - (0.1 / 4 + 0.1 / 8) / 2,
    # 0.8 / 16 less for each time that a row is looked up; in each table half of the lookups are of
    # a row that is looked up twice.
    "distributed-embeddings": 1 - (0.8 / 16 + 2 * 0.8 / 16) / 2,
    # As above: rank 0 and rank 1 have a row each, and one together.
    "tfra": 1 - (0.8 / 4 + 0.8 / 8) / 2,
}


@pytest.mark.matrix
@pytest.mark.parametrize("framework", WITH_A_SCOPE)
def test_a_script_of(framework: str, tmp_path: Path):
    script = tmp_path / "train.py"
    script.write_text(WITH_A_SCOPE[framework].replace("{folder}", str(tmp_path / "saved")))
    # The pool has loaded Horovod, and by it `tf.keras` as Keras 3 next to later TensorFlow.
    is_new = framework == "tfra"
    done = pool.launch("-np", 2, "--device", "cpu", "--as", framework, script, pool=not is_new)
    assert done.returncode == 0, done.stdout
    first, second = losses(done.stdout, 0)
    assert second < first and losses(done.stdout, 1) == [first, second]
    if SECOND[framework] is not None:
        assert second == pytest.approx(SECOND[framework], rel=1e-6)


SOK_IN_VERSION_2 = """
import numpy as np
import tensorflow as tf
import horovod.tensorflow as hvd
import sparse_operation_kit as sok
from optimizers import optimizer

hvd.init()
sok.init()
assert tf.executing_eagerly() and list(map(int, tf.__version__.split(".")[:2])) == sok.tf_version
static = sok.Variable(np.arange(12, dtype=np.float32).reshape(6, 2))
local = sok.Variable(np.ones([4, 2], np.float32), mode="localized:0")
dynamic = sok.DynamicVariable(dimension=2, initializer="13", var_type="hbm")
dense = tf.Variable([[1.0], [1.0]])
tables, others = sok.filter_variables([dense, static, local, dynamic])
ids = tf.RaggedTensor.from_row_lengths(tf.constant([1, 5, 2], tf.int64), [2, 1])
of_tables = sok.OptimizerWrapper(optimizer)

@tf.function
def train(ids):
    with tf.GradientTape() as tape:
        rows = sok.lookup_sparse(tables, [ids, ids % 4, ids], combiners=["sum", "mean", "mean"])
        loss = tf.reduce_sum(tf.matmul(tf.add_n(rows), dense))
    of_rows, of_dense = tape.gradient(loss, [tables, others])
    of_tables.apply_gradients(zip(of_rows, tables))
    optimizer.apply_gradients(zip([hvd.allreduce(each) for each in of_dense], others))
    return loss

for _ in range(2):
    print("loss", float(train(ids)))
sok.dump("{folder}", tables, of_tables)
before = static.numpy()
static.assign(tf.zeros(static.shape))
sok.load("{folder}", tables, of_tables)
np.testing.assert_array_equal(static.numpy(), before)
"""


@pytest.mark.matrix
def test_a_script_of_sok_in_tensorflow_2(tmp_path: Path):
    (tmp_path / "optimizers.py").write_text(
        "import tensorflow as tf\noptimizer = tf.keras.optimizers.legacy.SGD(0.01)\n"
    )
    script = tmp_path / "train.py"
    script.write_text(SOK_IN_VERSION_2.replace("{folder}", str(tmp_path / "saved")))
    done = pool.launch("-np", 2, "--device", "cpu", "--as", "sok", script)
    assert done.returncode == 0, done.stdout
    first, second = losses(done.stdout, 0)
    # Rows 1 and 5, and 2, of each: 2 + 3 + 10 + 11 + 4 + 5, 1 for each value, 13 for each value.
    assert first == 35 + 4 + 52 and second < first
    assert losses(done.stdout, 1) == [first, second]


OWN_RESULT = """
import tensorflow as tf
import horovod.tensorflow as hvd

hvd.init()
weight, mean = tf.Variable(1.0), tf.keras.metrics.Mean()
optimizer = tf.keras.optimizers.legacy.SGD(0.1)

@tf.function
def train(x):
    with tf.GradientTape() as tape:
        loss = weight * x
    tape = hvd.DistributedGradientTape(tape)
    optimizer.apply_gradients(zip(tape.gradient(loss, [weight]), [weight]))
    mean.update_state(x)

train(tf.constant(hvd.rank() + 1.0))
if hvd.rank() == 1:
    print("mean", float(mean.result()))
"""


@pytest.mark.matrix
def test_a_metric_of_horovods_script_is_each_ranks_own(tmp_path: Path):
    """One rank may ask for it alone."""
    script = tmp_path / "train.py"
    script.write_text(OWN_RESULT)
    done = pool.launch("-np", 2, "--device", "cpu", "--as", "horovod", script, pool=False)
    assert done.returncode == 0 and "[1] mean 2.0\n" in done.stdout, done.stdout


@pytest.mark.matrix
def test_a_script_without_a_scope_is_told(tmp_path: Path):
    script = tmp_path / "train.py"
    script.write_text("import tensorflow as tf\nprint(tf.__version__)\n")
    done = pool.launch("-np", 2, "--device", "cpu", "--as", "deeprec", script)
    assert done.returncode == 0 and "[1] 1.15.5\n" in done.stdout
    assert "[0] collective: " in done.stdout and "--embedding-scope auto" in done.stdout


ESTIMATOR = """
import os
import tensorflow as tf
import horovod.tensorflow as hvd

hvd.init()
folder = "{folder}" if hvd.rank() == 0 else None
column = tf.feature_column.categorical_column_with_identity("id", 10)
columns = [tf.feature_column.embedding_column(column, 2, initializer=tf.ones_initializer())]

def input_fn():
    records = {"id": [1, 2, 3, 4]}, [[1.0], [0.0], [1.0], [0.0]]
    return tf.data.Dataset.from_tensor_slices(records).batch(2).repeat(8)

def model_fn(features, labels, mode, params):
    layer = tf.feature_column.input_layer(features, columns)
    loss = tf.losses.mean_squared_error(labels, tf.layers.dense(layer, 1))
    step = tf.train.get_or_create_global_step()
    train_op = tf.train.AdagradOptimizer(0.1).minimize(loss, global_step=step)
    return tf.estimator.EstimatorSpec(mode, loss=loss, train_op=train_op)

def main(_):
    made = {
        "own": tf.estimator.Estimator(model_fn, folder and folder + "/own", params={}),
        "ready": tf.estimator.DNNRegressor(
            [4], columns, folder and folder + "/ready", config=tf.estimator.RunConfig(),
            loss_reduction=tf.losses.Reduction.SUM_OVER_BATCH_SIZE),
    }
    for name, estimator in made.items():
        train = tf.estimator.TrainSpec(input_fn, max_steps=4)
        metrics, _ = tf.estimator.train_and_evaluate(
            estimator, train, tf.estimator.EvalSpec(input_fn, steps=None))
        print(name, metrics["global_step"], metrics["loss"], estimator.model_dir)

if __name__ == "__main__":
    tf.app.run()
"""


@pytest.mark.matrix
def test_estimators_of_a_script_without_a_scope(tmp_path: Path):
    """TensorFlow's own and a ready-made one train on all ranks, in rank 0's folder."""
    script = tmp_path / "train.py"
    script.write_text(ESTIMATOR.replace("{folder}", str(tmp_path)))
    done = pool.launch(
        "-np", 2, "--device", "cpu", "--as", "horovod", "--embedding-scope", "auto", script
    )
    assert done.returncode == 0, done.stdout
    for name in ("own", "ready"):
        told = re.findall(rf"^\[(\d)\] {name} (\S+) (\S+) (\S+)$", done.stdout, re.M)
        (first, second) = sorted(told)
        assert first[1:] == second[1:] and first[1] == "4" and first[3] == f"{tmp_path}/{name}"


OF_TWO_FRAMEWORKS = """
import tensorflow as tf
import horovod.tensorflow as hvd
import sparse_operation_kit as sok
import hybridbackend.tensorflow as hb

hvd.init()
sok.init()
option = tf.EmbeddingVariableOption(filter_option=tf.CounterFilter(filter_freq=0))
tables = [
    tf.get_embedding_variable("ev", 2, initializer=tf.ones_initializer(), ev_option=option),
    sok.DynamicVariable(dimension=2, initializer="1", var_type="hbm"),
]
ids = tf.RaggedTensor.from_row_lengths(tf.constant([1, 2**40], tf.int64), [1, 1])
rows = sok.lookup_sparse(tables, [ids, ids], None, ["sum", "sum"])
loss = tf.add_n([tf.reduce_sum(each) for each in rows])
train_op = tf.train.GradientDescentOptimizer(0.125).minimize(loss)
with tf.Session() as session:
    session.run(tf.global_variables_initializer())
    for _ in range(2):
        print("loss", session.run([loss, train_op])[0])
assert hb.context.world_size == hvd.size()
"""


@pytest.mark.matrix
@pytest.mark.parametrize("framework", ["deeprec", "hybridbackend", "sok"])
def test_a_script_has_the_names_of_two_frameworks(framework: str, tmp_path: Path):
    script = tmp_path / "train.py"
    script.write_text(OF_TWO_FRAMEWORKS)
    done = pool.launch("-np", 2, "--device", "cpu", "--as", framework, script)
    assert done.returncode == 0, done.stdout
    # Two tables with two rows of two ones; gradients are the sum over two ranks.
    assert losses(done.stdout, 0) == losses(done.stdout, 1) == [8.0, 8 - 8 * 2 * 0.125]
