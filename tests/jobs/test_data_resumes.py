"""Jobs that are killed, and started again on another number of ranks, use each record once."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from collective.checkpoint import read_table
from tests.jobs import pool

SEED = int(os.environ.get("COLLECTIVE_TEST_SEED") or 1)
RECORDS, EPOCHS, BATCH, LR = 50, 3, 12, 0.1  # 12 batches, and 6 records

SCRIPT = """
import json, os, signal, sys, time
import numpy as np
import tensorflow.compat.v1 as tf
from collective import CollectiveStrategy, data

tf.logging.set_verbosity(tf.logging.ERROR)
folder, kind, launch, victim, moment = *sys.argv[1:4], int(sys.argv[4]), int(sys.argv[5])
strategy = CollectiveStrategy()
rank = strategy.rank()


def die(lines):
    # What all ranks have trained is to be written down.
    files = [f'{folder}/used_{launch}_{r}' for r in range(strategy.world_size())]
    while not all(os.path.exists(file) and open(file).read().count('\\n') >= lines for file in files):
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL)


def dataset():
    if kind == 'pipeline':
        records = tf.data.TextLineDataset(f'{folder}/records').shuffle(20, seed=5).repeat(3)
    elif kind == 'records':
        records = data.records(f'{folder}/records', format='lines', shuffle=True, seed=5, epochs=3)
    else:
        records = data.parquet(f'{folder}/records.parquet', shuffle=True, seed=5, epochs=3)
    batches = data.resumable(records, batch_size=12)
    if kind == 'parquet':
        return batches.map(lambda batch: batch['id']).prefetch(2)
    return batches.map(lambda lines: tf.strings.to_number(lines, tf.int64)).prefetch(2)


with strategy.scope(prefetch_keys=True, plan='quiet'), tf.Graph().as_default():
    ids = tf.data.make_one_shot_iterator(dataset()).get_next()
    with strategy.embedding_scope():
        table = tf.get_variable('t', [50, 2], initializer=tf.ones_initializer())
    w = tf.get_variable('w', [2], initializer=tf.ones_initializer())
    loss = tf.reduce_mean(tf.square(tf.nn.embedding_lookup(table, ids) * w - 0.5))
    step = tf.train.get_or_create_global_step()
    train = tf.train.GradientDescentOptimizer(0.1).minimize(loss, global_step=step)
    with tf.train.MonitoredTrainingSession(
        checkpoint_dir=f'{folder}/saved', save_checkpoint_steps=3, log_step_count_steps=None
    ) as session, open(f'{folder}/used_{launch}_{rank}', 'w') as used:
        first = session.run_step_fn(lambda step_context: step_context.session.run(step))
        print(json.dumps({'first': int(first)}), file=used, flush=True)
        lines = 1
        while not session.should_stop():
            if rank == victim and moment == lines - 1:
                die(lines)
            lines += 1
            batch, _ = session.run([ids, train])
            print(json.dumps(batch.tolist()), file=used, flush=True)
"""


def steps_of(folder: Path, launch: int, ranks: int) -> tuple[int, list[list[int]]]:
    """Returns the step at which a launch began, and the records of each step of all its ranks."""
    of_ranks = []
    for rank in range(ranks):
        lines = (folder / f"used_{launch}_{rank}").read_text().splitlines()
        of_ranks.append([json.loads(line) for line in lines])
    firsts = {lines[0]["first"] for lines in of_ranks}
    assert len(firsts) == 1
    steps = zip(*(lines[1:] for lines in of_ranks))
    return firsts.pop(), [sorted(id for part in step for id in part) for step in steps]


def write_records(folder: Path) -> None:
    (folder / "records").write_text("".join(f"{i}\n" for i in range(RECORDS)))
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    table = pyarrow.table({"id": np.arange(RECORDS)})
    parquet.write_table(table, folder / "records.parquet", row_group_size=9)


def train_until_the_end(folder: Path, kind: str, launches: list[tuple[int, int, int]]) -> None:
    """Runs jobs, (ranks, which rank is killed, before which step), the last of which isn't."""
    write_records(folder)
    script = folder / "train.py"
    script.write_text(SCRIPT)
    used: dict[int, list[int]] = {}
    for launch, (ranks, victim, moment) in enumerate(launches):
        options = ("-np", ranks, "--device", "cpu", "--tee", "0")
        done = pool.launch(*options, script, folder, kind, launch, victim, moment, timeout=120)
        is_killed = "SIGKILL" in done.stdout
        assert is_killed == (done.returncode != 0)
        first, steps = steps_of(folder, launch, ranks)
        assert first <= len(used)
        for number, ids in enumerate(steps, first):
            # Also what a later job takes again, because no checkpoint has it.
            assert used.setdefault(number, ids) == ids
    assert not is_killed
    batches = [used[number] for number in range(len(used))]
    assert [len(batch) for batch in batches] == [BATCH] * 12 + [RECORDS * EPOCHS - 12 * BATCH]
    assert sorted(id for batch in batches for id in batch) == sorted([*range(RECORDS)] * EPOCHS)
    if kind != "pipeline":  # which shuffles a part at a time
        assert batches[:4] != [list(range(i, i + BATCH)) for i in range(0, 48, BATCH)]
    table, weight = plainly_trained(batches, RECORDS)
    saved = str(folder / "saved")
    assert int(tf.train.load_variable(saved, "data/position")) == 13
    np.testing.assert_allclose(tf.train.load_variable(saved, "w"), weight, rtol=1e-5)
    latest = tf.train.latest_checkpoint(saved)
    rows = np.concatenate([block for _, block in read_table(latest, "t")])
    np.testing.assert_allclose(rows, table, rtol=1e-5)


def plainly_trained(batches: list[list[int]], rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the table and the weight after gradient descent on batches, in float64."""
    table, weight = np.ones((rows, 2)), np.ones(2)
    for ids in batches:
        values = table[ids]
        error = 2 * (values * weight - 0.5) / values.size
        gradient = np.zeros_like(table)
        np.add.at(gradient, ids, error * weight)
        table, weight = table - LR * gradient, weight - LR * (error * values).sum(0)
    return table, weight


@pytest.mark.sample(1)
@pytest.mark.matrix
@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", ["records", "pipeline", "parquet"])
def test_a_killed_job_goes_on_at_another_number_of_ranks(tmp_path, kind):
    """It dies before its first step, too, and at once again."""
    kills = [(2, 1, 5), (1, 0, 4), (3, 2, 0), (2, 0, 1)]
    train_until_the_end(tmp_path, kind, [*kills, (3, -1, 0)])


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", ["records", "pipeline", "parquet"])
def test_twenty_kills_at_any_step(tmp_path, kind):
    chance = random.Random(f"{kind} {SEED}")
    launches = []
    for _ in range(20):
        ranks = chance.choice([1, 2, 3])
        launches.append((ranks, chance.randrange(ranks), chance.randrange(5)))
    train_until_the_end(tmp_path, kind, [*launches, (2, -1, 0)])
