"""Saves at N ranks and restores at N': every row and slot bit for bit, and training goes on as if
nothing had happened.
"""

import json
from pathlib import Path

import numpy as np
import pytest

from tests.jobs import pool

MODEL = '''
import sys
import numpy as np
import tensorflow.compat.v1 as tf
from collective import train

tf.logging.set_verbosity(tf.logging.ERROR)
OPTIMIZERS = {
    'sgd': lambda: tf.train.GradientDescentOptimizer(0.1), 'momentum': lambda: tf.train.MomentumOptimizer(0.1, 0.9),
    'adagrad': lambda: tf.train.AdagradOptimizer(0.1), 'adam': lambda: tf.train.AdamOptimizer(0.01),
    'ftrl': lambda: tf.train.FtrlOptimizer(0.1, l1_regularization_strength=0.001),
    'decay': lambda: train.AdagradDecayOptimizer(0.1, tf.train.get_or_create_global_step(), accumulator_decay_step=2),
    'async': lambda: train.AdamAsyncOptimizer(0.01)}
KEYS = np.array([-2 ** 63, -1, 0, 2 ** 63 - 1, *np.random.default_rng(1).integers(-2 ** 63, 2 ** 63 - 1, 16)], np.int64)
SMALL = 2                                       # rows of a table that is smaller than three ranks


def batch(i):
    return np.random.default_rng([7, i]).integers(0, 20, 12)


def start(name, rows):
    return tf.constant_initializer(np.random.default_rng([len(name), rows]).normal(0, 1, (rows, 3)).astype(np.float32))


def build(scope, dynamic):
    """For each optimizer a static, a small and, if `dynamic` makes them, a dynamic table: ids, keys, losses, all updates."""
    ids, keys = tf.placeholder(tf.int64, [None]), tf.placeholder(tf.int64, [None])
    step = tf.train.get_or_create_global_step()
    losses, updates = {}, []
    for name, optimizer in OPTIMIZERS.items():
        with scope():
            tables = [tf.get_variable(name + '/static', [20, 3], initializer=start(name, 20)),
                      tf.get_variable(name + '/small', [SMALL, 3], initializer=start(name, SMALL))]
        w = tf.get_variable(name + '/w', initializer=np.linspace(-1, 1, 3).astype(np.float32))
        found = [tf.nn.embedding_lookup(tables[0], ids), tf.nn.embedding_lookup(tables[1], ids % SMALL)]
        losses[name] = tf.reduce_mean(tf.square((found[0] + found[1]) * w - 0.3))
        total = losses[name]
        if dynamic is not None:
            row = tf.nn.embedding_lookup(dynamic(name + '/dynamic'), keys)
            other = tf.get_variable(name + '/other', initializer=np.linspace(-1, 1, 3).astype(np.float32))
            losses[name + '/dynamic'] = tf.reduce_mean(tf.square(row * other - 0.2))
            total += losses[name + '/dynamic']
        updates.append(optimizer().minimize(total))
    with tf.control_dependencies(updates):
        return ids, keys, losses, tf.assign_add(step, 1)
'''

# (Ranks, which launches' checkpoints they restore, by their ranks).
ROUND = [(1, []), (2, [1]), (3, [2]), (1, [3, 2])]

PLAIN = (
    MODEL
    + """
import contextlib, json
with tf.Graph().as_default():
    ids, _, losses, train = build(contextlib.nullcontext, None)
    with tf.Session() as session:
        session.run(tf.global_variables_initializer())
        print('losses', json.dumps([{k: float(v) for k, v in session.run([losses, train], {ids:
                                    batch(i)})[0].items()} for i in range(5)]))
"""
)

RANKS = (
    MODEL
    + '''
import collective, json
from collective import CollectiveStrategy, Table, checkpoint
from collective.tables.table import shard_of

strategy = CollectiveStrategy()
rank, ranks = strategy.rank(), strategy.world_size()


def dynamic(name):
    # Some have a column in addition to the slots, with the steps in which rows were used last.
    policy = collective.TablePolicy(steps_to_live=1000) if name.startswith('ad') else None
    return collective.get_embedding_variable(name, 3, initializer=tf.ones_initializer(), ev_option=policy)


def steps(session, model, first, last):
    ids, keys, losses, train = model
    told = []
    for i in range(first, last):
        mine = np.split(batch(i), ranks)[rank]
        values = session.run([losses, train], {ids: mine, keys: KEYS[mine]})[0]
        told.append({k: float(v) for k, v in values.items()})
    return told


def held(session):
    """What this rank holds: {variable: (keys, rows)}, read past all that saves and restores."""
    keys, rows = {}, {}
    for v in tf.global_variables():
        table = shard_of(v)
        if table is None:
            continue
        if table.rows is None:
            table.initialize_slot_rows(session, [] if v is table else [v])
            found = list(table.ascending(session, 1000))
            keys[v.op.name], local = (np.concatenate(x) for x in zip(*found)) if found else (np.zeros(0, np.int64),) * 2
        else:
            keys[v.op.name] = np.arange(rank, table.rows, ranks)
            local = keys[v.op.name] // ranks
        rows[v.op.name] = tf.raw_ops.ResourceGather(resource=v.handle, indices=local, dtype=v.dtype)
    return {name: (keys[name], values) for name, values in session.run(rows).items()}


def dump(path, session):
    np.savez(path, **{f'{name}:{what}': array for name, pair in held(session).items() for what, array in zip('kr', pair)})


def check(folder, saved_by, session):
    there = {}
    for r in range(saved_by):
        with np.load(f'{folder}/held_{r}.npz') as file:
            for name in {key[:-2] for key in file}:
                there.setdefault(name, {}).update(zip(file[name + ':k'].tolist(), file[name + ':r']))
    mine = held(session)
    assert mine.keys() == there.keys() and len(there) > 10
    count = 0
    for name, (keys, rows) in mine.items():
        for key, row in zip(keys.tolist(), rows):
            assert row.tobytes() == there[name][key].tobytes(), (name, key, row, there[name][key])
            count += 1
    return count


increments = sys.argv.pop(1) == 'increments'
for argument in sys.argv[2:]:                   # N:folder, saved by N ranks
    saved_by, _, folder = argument.partition(':')
    with strategy.scope(), tf.Graph().as_default():
        model = build(strategy.embedding_scope, dynamic)
        with tf.Session() as session:
            tf.train.Saver().restore(session, tf.train.latest_checkpoint(folder))
            assert session.run(tf.train.get_global_step()) == 3
            count = check(folder, int(saved_by), session)
            told = steps(session, model, 3, 5)
    json.dump(told, open(f'{folder}/after_{ranks}_{rank}.json', 'w'))
    print('checked', saved_by, count)

def remove(session):
    for table in tf.global_variables():
        if isinstance(table, collective.DynamicTable):
            table.remove(session, KEYS[::3])


folder = sys.argv[1]
with strategy.scope(), tf.Graph().as_default():
    model = build(strategy.embedding_scope, dynamic)
    saver = tf.train.Saver()
    if increments:
        checkpoint.enable_increments(folder)
    with tf.Session() as session:
        session.run(tf.global_variables_initializer())
        told = steps(session, model, 0, 1)
        if increments:
            saver.save(session, f'{folder}/m', global_step=1)
        told += steps(session, model, 1, 2)
        remove(session)
        if increments:
            checkpoint.save_increment(session, folder)
        told += steps(session, model, 2, 3)
        if increments:
            checkpoint.save_increment(session, folder)
        else:
            saver.save(session, f'{folder}/m', global_step=3)
        dump(f'{folder}/held_{rank}.npz', session)
        told += steps(session, model, 3, 5)
json.dump(told, open(f'{folder}/losses_{rank}.json', 'w'))
'''
)


def run(script, *arguments, ranks=None, backend="hb"):
    environment = {"COLLECTIVE_STRATEGY": backend}
    if ranks:
        options = ("-np", ranks, "--device", "cpu", "--tee", "0")
        done = pool.launch(*options, script, *arguments, environment=environment)
    else:
        done = pool.python(script, *arguments, environment=environment)
    assert done.returncode == 0
    return done.stdout


def mean_losses(pattern, ranks):
    """Returns [{name: the mean of the ranks' losses}] for each step."""
    told = [json.loads(Path(str(pattern).replace("*", str(r))).read_text()) for r in range(ranks)]
    return [
        {name: np.mean([step[name] for step in steps]) for name in steps[0]} for steps in zip(*told)
    ]


def compare(got, want):
    assert len(got) == len(want)
    for one, other in zip(got, want):
        for name, value in other.items():
            assert one[name] == pytest.approx(value, rel=1e-4), name


@pytest.mark.matrix
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "launches, saved",
    [
        ([(2, []), (1, [2])], "whole"),
        # A base and increments have whole tables in the base.
        pytest.param(ROUND, "increments", marks=pytest.mark.long),
        pytest.param(ROUND, "whole", marks=pytest.mark.long),
    ],
)
def test_saved_at_one_number_of_ranks_and_restored_at_another(tmp_path, launches, saved):
    """Optimizers with slots of every kind (none, by element, one number a row, one in all), static
    and dynamic tables, and tables of fewer rows than ranks.

    Each launch restores what launches of other numbers of ranks saved, and saves. Two ranks run the
    other backend: what one writes the other reads.
    """
    (tmp_path / "plain.py").write_text(PLAIN)
    (tmp_path / "ranks.py").write_text(RANKS)
    plain = json.loads(run(tmp_path / "plain.py").partition("losses ")[2])
    folders = {}
    for ranks, restored in launches:
        folder = tmp_path / f"by_{ranks}_{len(folders)}"
        folder.mkdir()
        out = run(
            tmp_path / "ranks.py",
            saved,
            folder,
            *(f"{n}:{folders[n]}" for n in restored),
            ranks=ranks,
            backend="sok" if ranks == 2 else "hb",
        )
        assert out.count("checked") == len(restored)
        whole = mean_losses(folder / "losses_*.json", ranks)
        compare(whole, plain)
        for n in restored:
            compare(
                mean_losses(folders[n] / f"after_{ranks}_*.json", ranks),
                mean_losses(folders[n] / "losses_*.json", n)[3:],
            )
        folders[ranks] = folder
