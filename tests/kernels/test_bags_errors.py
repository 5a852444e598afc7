"""The compiled operations answer, or say what is wrong, whatever they are given; none crashes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow.compat.v1 as tf
from bag_exchange import given, variable

from collective.ops import native_library
from collective.ops.exchange import embedding_bag

SECTIONS = [
    embedding_bag.Section(0, 3),
    embedding_bag.Section(1, 2, True, True),
    embedding_bag.Section(0, 3, True),
]
KINDS = [embedding_bag.STATIC, embedding_bag.DYNAMIC]
RANKS = 2


@pytest.fixture(autouse=True)
def graph() -> Any:
    with tf.Graph().as_default() as made:
        yield made


def refused(fetches: Any, *words: str) -> None:
    with tf.Session() as session, pytest.raises(tf.errors.InvalidArgumentError) as error:
        session.run(tf.global_variables_initializer())
        session.run(fetches)
    for word in words:
        assert word in str(error.value)


def ask(
    ids: Any,
    members: list[embedding_bag.BagMember],
    sections: list[embedding_bag.Section],
    samples: Any = (),
    weights: Any = (),
) -> embedding_bag.Request:
    return embedding_bag.request(
        [given(each) for each in ids],
        [given(each) for each in samples],
        [given(each, np.float32) for each in weights],
        members,
        sections,
        [0] * 9,
        RANKS,
    )


@pytest.mark.parametrize("samples", [[0, 1, 0], [-1, 0, 0], [3, 2, 2]])
def test_samples_that_do_not_ascend(samples: list[int]):
    refused(
        ask(
            [[1, 2, 3]],
            [embedding_bag.BagMember(0, 2, embedding_bag.SUM)],
            [embedding_bag.Section(0, 2, True)],
            [samples],
        ),
        "member 0",
        "ascend",
    )
    rows, positions = tf.zeros([8]), given([0, 2, 4], np.int32)
    for gradient in (False, True):
        pooled = embedding_bag.pool(
            rows,
            [positions],
            [given(samples)],
            [],
            [embedding_bag.BagMember(0, 2, embedding_bag.SUM)],
        )
        refused(tf.gradients(pooled, rows) if gradient else pooled, "member 0", "ascend")


def test_inputs_of_other_lengths():
    pooled, weighted = embedding_bag.Section(0, 2, True), embedding_bag.Section(0, 2, True, True)
    refused(
        ask([[1, 2]], [embedding_bag.BagMember(0, 2, embedding_bag.SUM)], [pooled], [[0, 0, 0]]),
        "[2]",
        "[3]",
    )
    refused(
        ask(
            [[1, 2]],
            [embedding_bag.BagMember(0, 2, embedding_bag.SUM, True)],
            [weighted],
            [[0, 0]],
            [[1.0]],
        ),
        "[2]",
        "[1]",
    )
    rows, positions = tf.zeros([8]), given([0, 2], np.int32)
    refused(
        embedding_bag.pool(
            rows, [positions], [given([0])], [], [embedding_bag.BagMember(0, 2, embedding_bag.SUM)]
        ),
        "[2]",
        "[1]",
    )
    refused(
        embedding_bag.pool(
            rows,
            [positions],
            [given([0, 0])],
            [given([1.0, 1.0, 1.0], np.float32)],
            [embedding_bag.BagMember(0, 2, embedding_bag.SUM, True)],
        ),
        "[2]",
        "[3]",
    )


def test_attributes_that_contradict_each_other():
    refused(
        ask([[1]], [embedding_bag.BagMember(5, 2)], [embedding_bag.Section(0, 2)]),
        "member 0",
        "section 5",
    )
    refused(
        ask([[1]], [embedding_bag.BagMember(0, 2)], [embedding_bag.Section(0, 2, True)]), "combiner"
    )
    refused(
        ask(
            [[1], [2]],
            [embedding_bag.BagMember(0, 2, embedding_bag.SUM)] * 2,
            [embedding_bag.Section(0, 2, True)],
            [[0], [0]],
        ),
        "one member",
    )
    refused(
        ask([[1]], [embedding_bag.BagMember(0, 2)], [embedding_bag.Section(0, 2, False, True)]),
        "weights",
    )
    refused(
        ask([[1]], [embedding_bag.BagMember(0, 2)], [embedding_bag.Section(0, 2)], [[0]]),
        "1 samples",
    )
    refused(
        embedding_bag.pool(
            tf.zeros([8]),
            [given([0], np.int32)],
            [],
            [given([1.0], np.float32)],
            [embedding_bag.BagMember(0, 2, weighted=True)],
        ),
        "weights, but no combiner",
    )


@pytest.mark.parametrize(
    "positions", [[-1], [7], [2**31 - 1], [-(2**31)], [0, 6, 7], [0, 1, 2, 3, 4, 5, 6, 99]]
)
def test_positions_outside(positions: list[int]):
    for rows, member in (
        (tf.zeros([8]), embedding_bag.BagMember(0, 2)),
        (tf.zeros([8]), embedding_bag.BagMember(0, 2, embedding_bag.MEAN)),
        (tf.zeros([0]), embedding_bag.BagMember(0, 2)),
        (tf.zeros([1]), embedding_bag.BagMember(0, 2)),
    ):
        samples = [given(range(len(positions)))] if member.combiner else []
        pooled = embedding_bag.pool(rows, [given(positions, np.int32)], samples, [], [member])
        refused(pooled, "member 0", "positions")
        refused(tf.gradients(pooled, rows), "member 0", "positions")


def test_a_sample_that_no_memory_could_hold():
    for sample in (2**62, 2**63 - 1, 2**31, 2**30):
        refused(
            embedding_bag.pool(
                tf.zeros([8]),
                [given([0], np.int32)],
                [given([sample])],
                [],
                [embedding_bag.BagMember(0, 2, embedding_bag.SUM)],
            ),
            str(sample),
        )


def test_a_gradient_of_another_shape():
    rows, positions = tf.zeros([8]), given([0, 2], np.int32)
    pooled = embedding_bag.pool(rows, [positions], [], [], [embedding_bag.BagMember(0, 2)])
    for shape in ([3, 2], [2, 3], [4]):
        gradient = tf.placeholder_with_default(tf.ones(shape), None)
        made = native_library.library().collective_pool_gradient(
            rows,
            [positions],
            [],
            [],
            [gradient],
            [],
            members=[0],
            sections=[0],
            dims=[2],
            combiners=[0],
            weighted=[False],
            max_norms=[0.0],
        )
        refused(made.flat, "member 0", "[2, 2]")
    assert pooled


def words(*bags_and_keys: int, body: Any = ()) -> list[int]:
    return [*bags_and_keys, *body]


def one() -> int:
    """Returns two int32 of 1."""
    return (1 << 32) + 1


GOOD = [2, 2, 2, 3, 1, 1, 4, 6, 10, 20, 30, (2 << 32) + 1, 0, 0, 8, 1]
MALFORMED = {
    "nothing at all": ([], [0, 0]),
    "a header that is cut short": ([0] * 11, [6, 5]),
    "splits that are too long": ([0] * 12, [6, 7]),
    "splits that are too short": ([0] * 12, [6, 5]),
    "negative splits": ([0] * 12, [18, -6]),
    "one of the splits only": ([0] * 6, [6]),
    "keys that are not there": ([1, 1, 0, 0, 0, 0] + [0] * 6, [6, 6]),
    "keys left over": ([0] * 7 + [0] * 6, [7, 6]),
    "more keys than there can be": ([2**62, 2**62, 0, 0, 0, 0] + [0] * 6, [6, 6]),
    "negative keys": ([-1, -1, 0, 0, 0, 0] + [0] * 6, [6, 6]),
    "negative bags": ([0, 0, -1, 0, 0, 0] + [0] * 6, [6, 6]),
    "bags that are not keys": ([1, 2, 0, 0, 0, 0, 5, 6] + [0] * 6, [8, 6]),
    "lengths that do not sum up": ([0, 0, 0, 0, 1, 2, 5, 6, 1] + [0] * 6, [9, 6]),
    "lengths below zero": ([0, 0, 0, 0, 2, 1, 5, (-1 << 32) + 2] + [0] * 6, [8, 6]),
    "weights that are not there": ([0, 0, 1, 1, 0, 0, 5, 1] + [0] * 6, [8, 6]),
}


def all_that_reads(message: Any, splits: Any) -> list[Any]:
    """Every operation that is given a received message."""
    message, splits = given(message), given(splits, np.int32)
    handles, rows = (
        [variable(np.zeros([9, 3])).handle, variable(np.zeros([9, 2])).handle],
        [given([0]), given([0])],
    )
    layout = dict(
        ranks=RANKS,
        section_tables=[s.table for s in SECTIONS],
        kinds=KINDS,
        dims=[s.dim for s in SECTIONS],
        pooled=[s.pooled for s in SECTIONS],
        weighted=[s.weighted for s in SECTIONS],
        max_norms=[0.0] * 3,
        shapes=[None] * 2,
    )
    library = native_library.library()
    return [
        embedding_bag.respond(message, splits, SECTIONS, KINDS, RANKS)[1],
        embedding_bag.gather(handles, rows, message, splits, SECTIONS, KINDS, RANKS, [None, None]),
        library.collective_reduce_rows(
            given([0.0], np.float32), handles, rows, message, splits, [], **layout
        )[0][0],
        library.collective_spread_rows(
            [tf.zeros([1, 3]), tf.zeros([1, 2])],
            [given([0], np.int32)] * 2,
            handles,
            rows,
            message,
            splits,
            [],
            **layout,
        ),
    ]


@pytest.mark.parametrize("case", MALFORMED)
def test_malformed_messages(case: str):
    for fetch in all_that_reads(*MALFORMED[case]):
        refused(fetch)


def test_a_message_with_any_word_changed():
    """Either it still means something or it is refused."""
    message, splits = tf.placeholder(tf.int64, [None]), tf.placeholder(tf.int32, [None])
    heard = embedding_bag.respond(message, splits, SECTIONS, KINDS, RANKS)
    good = [*GOOD, *[0] * 6]
    refusals = 0
    with tf.Session() as session:
        keys, row_splits, *_ = session.run(heard, {message: good, splits: [len(GOOD), 6]})
        np.testing.assert_array_equal(keys[0], [2, 3, 4])
        np.testing.assert_array_equal(keys[1], [10, 20, 30])
        np.testing.assert_array_equal(row_splits, [2 * 3 + 2 * 2 + 3, 0])
        for at in range(len(good)):
            for value in (-(2**63), -1, 0, 1, 2, 3, 5, 2**31 - 1, 2**31, 2**32, 2**62, 2**63 - 1):
                changed = list(good)
                changed[at] = value
                try:
                    session.run(heard, {message: changed, splits: [len(GOOD), 6]})
                except tf.errors.InvalidArgumentError:
                    refusals += 1
    assert refusals > 100


def exchanged(
    rows: Any, sections: list[embedding_bag.Section], keys: Any, shape: Any = (4, 3)
) -> list[Any]:
    """Gather, and its gradient, of `keys` of one static table on one rank, whose row numbers are
    said to be `rows`.
    """
    ids = [given(keys)]
    pooled = sections[0].pooled
    asked = embedding_bag.request(
        ids,
        [given(range(len(keys)))] * pooled,
        [],
        [embedding_bag.BagMember(0, 3, embedding_bag.SUM * pooled)],
        sections,
        [0],
        1,
    )
    flat = embedding_bag.gather(
        [variable(np.ones(shape)).handle],
        [given(rows)],
        asked.message,
        asked.splits,
        sections,
        [0],
        1,
        [shape],
    )
    return [flat, tf.gradients(flat, flat.op.inputs[0])[0].values]


@pytest.mark.parametrize("pooled", [False, True])
def test_local_rows_outside(pooled: bool):
    for rows, row in (([0, 4], 4), ([-1, 0], -1), ([2**62, 0], 2**62), ([0, -(2**63)], -(2**63))):
        refused(
            exchanged(rows, [embedding_bag.Section(0, 3, pooled)], [0, 1])[0],
            "table 0",
            f"row {row}",
            "are 4",
        )
    refused(
        exchanged([0], [embedding_bag.Section(0, 3, pooled)], [0], (0, 3))[0], "table 0", "are 0"
    )
    for fetch in exchanged([0, 4], [embedding_bag.Section(0, 3, True, max_norm=1.0)], [0, 1]):
        refused(fetch, "table 0", "4")


def test_row_numbers_and_gradients_of_another_count():
    for fetch in exchanged([0, 1, 2], [embedding_bag.Section(0, 3)], [0, 1]):
        refused(fetch, "2 rows", "3 row numbers")
    asked = ask([[0, 2]], [embedding_bag.BagMember(0, 3)], [embedding_bag.Section(0, 3)])
    reduced = native_library.library().collective_reduce_rows(
        tf.zeros([7]),
        [variable(np.ones([4, 3])).handle],
        [given([0, 1])],
        asked.message,
        [8, 2],
        [],
        ranks=2,
        section_tables=[0],
        kinds=[0],
        dims=[3],
        pooled=[False],
        weighted=[False],
        max_norms=[0.0],
        shapes=[None],
    )
    refused(reduced[0][0], "7", "6")


def test_a_shard_of_another_dimension_or_that_is_not_initialized():
    refused(
        exchanged([0], [embedding_bag.Section(0, 3)], [0], (4, 2))[0], "table 0", "of 2", "of 3"
    )
    handle = tf.Variable(np.ones([4, 3], np.float32), use_resource=True).handle
    asked = ask([[0]], [embedding_bag.BagMember(0, 3)], [embedding_bag.Section(0, 3)])
    flat = embedding_bag.gather(
        [handle],
        [given([0])],
        asked.message[:3],
        [3, 0],
        [embedding_bag.Section(0, 3)],
        [0],
        1,
        [None],
    )
    del flat
    gathered = embedding_bag.gather(
        [handle],
        [given([0])],
        given([1, 1, 0]),
        given([3], np.int32),
        [embedding_bag.Section(0, 3)],
        [0],
        1,
        [None],
    )
    with tf.Session() as session, pytest.raises(tf.errors.FailedPreconditionError, match="table 0"):
        session.run(gathered)


def test_a_library_that_is_not_there_or_not_of_this_tensorflow(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
):
    monkeypatch.setattr(native_library, "_file", lambda: tmp_path / "_native.tensorflow-2.0.so")
    for others, word in (([], "not built"), (["1.2.3", "1.2.4"], "for TensorFlow 1.2.3, 1.2.4")):
        for other in others:
            (tmp_path / f"_native.tensorflow-{other}.so").touch()
        embedding_bag.missing.cache_clear()
        assert word in str(embedding_bag.missing()) and "make setup" in str(embedding_bag.missing())
        native_library.library.cache_clear()
        with pytest.raises(ImportError, match=word):
            native_library.library()
    monkeypatch.undo()
    embedding_bag.missing.cache_clear()
    native_library.library.cache_clear()
    assert embedding_bag.missing() is None and native_library.library() is not None
