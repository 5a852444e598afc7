"""Jobs whose loaders and ranks are killed use each sample of a stream once."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
import tensorflow.compat.v1 as tf
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from collective.checkpoint import read_table
from tests.jobs import pool
from tests.jobs.test_data_resumes import plainly_trained, steps_of

pytest.importorskip("pyarrow.flight")
LENGTHS, BATCH, LAST = (4, 7), 12, 6  # batches of two streams; the last one of each is smaller

LOADER = """
import os, sys
import numpy as np
from collective import data

LENGTHS, BATCH, LAST = (4, 7), 12, 6


def batches(stream, streams, first):
    assert streams == 2
    for number in range(first, LENGTHS[stream]):
        size = LAST if number == LENGTHS[stream] - 1 else BATCH
        yield data.Batch(ids={'id': 100 * stream + BATCH * number + np.arange(size)})


number = os.environ['COLLECTIVE_LOADER']
with open(f'{sys.argv[1]}/loader_{number}', 'w') as file:
    file.write(str(os.getpid()))
data.serve_stream(batches)
"""

SCRIPT = """
import json, os, signal, sys, time
import tensorflow.compat.v1 as tf
from collective import CollectiveStrategy, data

tf.logging.set_verbosity(tf.logging.ERROR)
restarts = int(os.environ['COLLECTIVE_RESTART_COUNT'])
folder, launch, plan = sys.argv[1], int(sys.argv[2]) + restarts, json.loads(sys.argv[3])
strategy = CollectiveStrategy()
rank = strategy.rank()


def die(lines):
    # What all ranks have trained is to be written down.
    files = [f'{folder}/used_{launch}_{r}' for r in range(strategy.world_size())]
    while not all(os.path.exists(file) and open(file).read().count('\\n') >= lines for file in files):
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL)


with strategy.scope(plan='quiet'), tf.Graph().as_default():
    dataset = data.stream(batch_size=12, timeout=60).prefetch(1)
    ids = tf.data.make_one_shot_iterator(dataset).get_next()['ids']['id'].values
    with strategy.embedding_scope():
        table = tf.get_variable('t', [200, 2], initializer=tf.ones_initializer())
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
            for loader in plan['loaders'].get(str(lines - 1), []) if rank == 0 else []:
                if not restarts:
                    os.kill(int(open(f'{folder}/loader_{loader}').read()), signal.SIGKILL)
            if rank == plan['victim'] and lines - 1 == plan['step']:
                die(lines)
            lines += 1
            batch, _ = session.run([ids, train])
            print(json.dumps(batch.tolist()), file=used, flush=True)
"""


def expected() -> list[list[int]]:
    """Returns the samples of each global batch: the streams take turns until they end."""
    batches = []
    for number in range(max(LENGTHS)):
        for stream, length in enumerate(LENGTHS):
            if number < length:
                first = 100 * stream + BATCH * number
                size = LAST if number == length - 1 else BATCH
                batches.append(list(range(first, first + size)))
    return batches


def train_until_the_end(folder: Path, launches: list[dict]) -> None:
    """Runs jobs that kill a rank before a step, and loaders before others; the last kills none.

    The launcher restarts ranks and loaders as often as a plan says, and the rank is killed again.
    """
    for name, text in (("loader.py", LOADER), ("train.py", SCRIPT)):
        (folder / name).write_text(text)
    truth = expected()
    launches = [*launches, {"ranks": 2, "victim": -1, "step": 0, "loaders": {}}]
    attempt = 0
    for plan in launches:
        restarts = plan.get("restarts", 0)
        options = ("-np", plan["ranks"], "--device", "cpu", "--tee", "0")
        if restarts:
            options += ("--max-restarts", restarts, "--restart-pause", 0)
        loaders = ("--data-loaders", 2, f"{folder / 'loader.py'} {folder}")
        script = (folder / "train.py", folder, attempt, json.dumps(plan))
        done = pool.launch(*options, *loaders, *script, timeout=150)
        is_killed = "root cause" in done.stdout
        assert is_killed == (done.returncode != 0), done.stdout
        for _ in range(restarts + 1):
            first, steps = steps_of(folder, attempt, plan["ranks"])
            assert steps == truth[first : first + len(steps)]
            attempt += 1
    assert not is_killed
    assert first + len(steps) == len(truth)
    saved = str(folder / "saved")
    assert int(tf.train.load_variable(saved, "data/position")) == len(truth)
    table, weight = plainly_trained(truth, 200)
    np.testing.assert_allclose(tf.train.load_variable(saved, "w"), weight, rtol=1e-5)
    latest = tf.train.latest_checkpoint(saved)
    rows = np.concatenate([block for _, block in read_table(latest, "t")])
    np.testing.assert_allclose(rows, table, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_ranks_and_loaders_are_killed_and_each_sample_comes_once(tmp_path):
    kill = {"ranks": 2, "victim": 1, "step": 4, "loaders": {"1": [0], "2": [1]}}
    restarted = {**kill, "restarts": 1}
    train_until_the_end(tmp_path, [restarted, {**kill, "ranks": 3, "loaders": {"0": [0, 1]}}])


PLANS = st.lists(
    st.integers(1, 3).flatmap(
        lambda ranks: st.fixed_dictionaries(
            {
                "ranks": st.just(ranks),
                "victim": st.integers(0, ranks - 1),
                "step": st.integers(0, 5),
                "loaders": st.dictionaries(
                    st.sampled_from("01234"), st.lists(st.integers(0, 1), max_size=2), max_size=2
                ),
            }
        )
    ),
    max_size=3,
)


@pytest.mark.long
@pytest.mark.timeout(7200)
def test_a_hundred_plans_of_kills(tmp_path):
    number = iter(range(1 << 30))

    @settings(
        max_examples=int(os.environ.get("COLLECTIVE_TEST_EXAMPLES") or 100),
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(PLANS)
    def run(launches):
        folder = tmp_path / str(next(number))
        folder.mkdir()
        train_until_the_end(folder, launches)

    run()


@pytest.mark.slow
def test_a_loader_that_fails_is_named_and_started_again(tmp_path):
    """One that ends by itself isn't; the ranks then say where they looked for it."""
    (tmp_path / "loader.py").write_text(
        "import os, sys, time\n"
        "print('at', os.environ['COLLECTIVE_LOADERS'], 'rank', os.environ.get('RANK'))\n"
        f"mark = {str(tmp_path / 'mark')!r}\n"
        "if not os.path.exists(mark):\n"
        "    open(mark, 'w').close()\n"
        "    sys.exit(7)\n"
    )
    (tmp_path / "train.py").write_text(
        "import tensorflow.compat.v1 as tf\n"
        "from collective import data\n"
        "with tf.Graph().as_default():\n"
        "    data.stream(timeout=3)\n"
    )
    done = pool.launch(
        *("-np", 1, "--device", "cpu", "--log-dir", tmp_path / "logs"),
        *("--data-loaders", 1, tmp_path / "loader.py", tmp_path / "train.py"),
        timeout=100,
    )
    assert done.returncode == 1
    assert "collective launch: loader 0 ended with exit code 7: it starts again in 0.5 s" in (
        done.stdout
    )
    assert "collective launch: loader 0 ended with exit code 0: it isn't started again" in (
        done.stdout
    )
    assert done.stdout.count("[loader 0] at 127.0.0.1:") == 2
    assert "rank None" in done.stdout
    address = done.stdout.partition("[loader 0] at ")[2].split()[0]
    assert f"StreamError: the loader at {address} has been out of reach for" in done.stdout
    assert (tmp_path / "logs/loader.0/stdout").read_text().count("at ") == 2
