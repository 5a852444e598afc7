"""Any number of ranks restores all of a checkpoint that an earlier version wrote on two ranks."""

from pathlib import Path

import numpy as np
import tensorflow.compat.v1 as tf

from collective import checkpoint
from collective.checkpoint.files import tensor_bundle
from collective.checkpoint.files.layout import FORMAT_ENTRY, LAYOUT_ENTRY
from tests.golden import golden_checkpoint

PREFIX = str(Path(__file__).resolve().parents[2] / "golden" / "version_1" / "m")

# Two steps of Momentum, rate and momentum 0.5, by hand. A row that one of the two ranks looked up
# has the gradient 1/2, so its slot is 0.5 and then 0.75, and it moved by (0.5 + 0.75) / 2; one that
# both did, and the bias, twice as much.
USER = np.array(
    [
        [0 - 0.625, 0.25 - 0.625],
        [1 - 0.625, 1.25 - 0.625],
        [2, 2.25],
        [3, 3.25],
        [4 - 1.25, 4.25 - 1.25],
    ]
)
USER_SLOT = np.array([0.75, 0.75, 0, 0, 1.5])
# key: (row, slot)
ITEM = {-1: (1 - 1.25, 1.5), 7: (1 - 0.625, 0.75), 2**63 - 1: (1 - 0.625, 0.75)}


def test_version_1(strategy, rank, size):
    with strategy.scope(), tf.Graph().as_default():
        ids, keys, rows, train, bias, slots = golden_checkpoint.build(strategy)
        saver = tf.train.Saver()
        with tf.Session() as session:
            saver.restore(session, PREFIX)
            user, item = session.run(rows, {ids: range(5), keys: [*ITEM, 8]})
            np.testing.assert_array_equal(user, USER)
            np.testing.assert_array_equal(item, [[row, row] for row, _ in ITEM.values()] + [[0, 0]])
            np.testing.assert_array_equal(session.run(bias), [-0.25, 0.75])
            np.testing.assert_array_equal(session.run(slots[2]), [1.5, 1.5])
            assert session.run(tf.train.get_global_step()) == 2
            # The third step tells the slots: a row moves by (its slot / 2 + its gradient) / 2.
            session.run(train, {ids: range(5), keys: list(ITEM)})
            user, item = session.run(rows, {ids: range(5), keys: list(ITEM)})
            np.testing.assert_array_equal(user, USER - (USER_SLOT[:, None] / 2 + 1) / 2)
            np.testing.assert_array_equal(
                item, [[row - (slot / 2 + 1) / 2] * 2 for row, slot in ITEM.values()]
            )
        opened = tensor_bundle.Bundle(PREFIX)
        ours = {v.op.name for v in tf.global_variables()}
        others = opened.entries.keys() - opened.layout.entries() - {LAYOUT_ENTRY, FORMAT_ENTRY}
        assert others == {"bias", "bias/Momentum", "global_step"}
        assert ours == others | opened.layout.tables.keys()


def test_version_1_is_read_without_ranks():
    ((first, rows),) = checkpoint.read_table(PREFIX, "user")
    assert first == 0
    np.testing.assert_array_equal(rows, USER)
    ((keys, rows),) = checkpoint.read_table(PREFIX, "item/Momentum")
    assert keys.tolist() == sorted(ITEM)
    np.testing.assert_array_equal(rows, [[ITEM[k][1]] * 2 for k in keys.tolist()])
