"""What is asked and heard, word by word, against a model of the format in NumPy."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import tensorflow.compat.v1 as tf
from bag_exchange import given

from collective.ops import placement
from collective.ops.exchange import embedding_bag
from collective.ops.placement import ON_ONE_RANK

EDGES = [-(2**63), -(2**63) + 1, -(2**32), -3, -1, 0, 1, 2**31, 2**32 - 1, 2**32, 2**63 - 1]


@pytest.fixture(autouse=True)
def graph() -> Any:
    with tf.Graph().as_default() as made:
        yield made


def owner_of(kind: int, keys: np.ndarray, ranks: int) -> np.ndarray:
    # NumPy's remainder isn't negative
    if kind >= ON_ONE_RANK:
        return np.full(keys.shape, kind // ON_ONE_RANK - 1)
    return keys % ranks if kind == embedding_bag.STATIC else placement.dynamic(ranks).owner(keys)


def packed(values: Any, dtype: Any) -> np.ndarray:
    values = np.asarray(values, dtype)
    return np.append(values, np.zeros(len(values) % 2, dtype)).view(np.int64)


class Model:
    """What `ask` must return, and what each rank's words hold."""

    def __init__(
        self,
        ids: list[np.ndarray],
        samples: dict[int, np.ndarray],
        weights: dict[int, np.ndarray],
        members: list[embedding_bag.BagMember],
        sections: list[embedding_bag.Section],
        kinds: list[int],
        ranks: int,
    ):
        keys: list[list[list[int]]] = [[[] for _ in sections] for _ in range(ranks)]
        lengths: list[list[list[int]]] = [[[] for _ in sections] for _ in range(ranks)]
        factors: list[list[list[float]]] = [[[] for _ in sections] for _ in range(ranks)]
        # (rank, section, bag) of each position
        places: list[list[tuple[int, int, int]]] = [[] for _ in members]
        self.samples, self.scales = [], []
        first_place: dict[tuple[int, int], tuple[int, int, int]] = {}
        for m, member in enumerate(members):
            s, section = member.section, sections[member.section]
            owners = owner_of(kinds[section.table], ids[m], ranks)
            if not section.pooled:
                for key, owner in zip(ids[m].tolist(), owners.tolist()):
                    if (s, key) not in first_place:
                        first_place[s, key] = (owner, s, len(keys[owner][s]))
                        keys[owner][s].append(key)
                    places[m].append(first_place[s, key])
                continue
            of_bags, scales = [], []
            given_weights = weights.get(m, np.ones(len(ids[m])))
            for sample in np.unique(samples[m]):
                of = samples[m] == sample
                total = {
                    embedding_bag.SUM: 1.0,
                    embedding_bag.MEAN: given_weights[of].sum(),
                    embedding_bag.SQRTN: math.sqrt((given_weights[of] ** 2).sum()),
                }
                for rank in np.unique(owners[of]):
                    mine = of & (owners == rank)
                    places[m].append((rank, s, len(lengths[rank][s])))
                    keys[rank][s] += ids[m][mine].tolist()
                    lengths[rank][s].append(int(mine.sum()))
                    factors[rank][s] += given_weights[mine].tolist()
                    of_bags.append(sample)
                    scales.append(1 / total[member.combiner] if total[member.combiner] else 0.0)
            self.samples.append(np.array(of_bags, np.int64))
            self.scales.append(np.array(scales, np.float32))
        self.words, self.row_splits, first, offset = [], [], {}, 0
        for rank in range(ranks):
            header, body, before = [], [np.empty(0, np.int64)], offset
            for s, section in enumerate(sections):
                count = len(lengths[rank][s]) if section.pooled else len(keys[rank][s])
                header += [count, len(keys[rank][s])]
                body += [np.array(keys[rank][s], np.int64), packed(lengths[rank][s], np.int32)]
                if section.weighted:
                    body.append(packed(factors[rank][s], np.float32))
                first[rank, s] = offset
                offset += count * section.dim
            self.words.append(np.concatenate([np.array(header, np.int64), *body]))
            self.row_splits.append(offset - before)
        self.positions = [
            np.array([first[rank, s] + bag * sections[s].dim for rank, s, bag in each], np.int32)
            for each in places
        ]


def check(
    ids: list[Any],
    members: list[embedding_bag.BagMember],
    sections: list[embedding_bag.Section],
    kinds: list[int],
    ranks: int,
    samples: dict[int, Any] | None = None,
    weights: dict[int, Any] | None = None,
) -> None:
    arrays = [np.asarray(each, np.int64) for each in ids]
    of = {m: np.asarray(each, np.int64) for m, each in (samples or {}).items()}
    factors = {m: np.asarray(each, np.float32) for m, each in (weights or {}).items()}
    model = Model(arrays, of, factors, members, sections, kinds, ranks)
    asked = embedding_bag.request(
        [given(each) for each in arrays],
        [given(of[m]) for m in sorted(of)],
        [given(factors[m], np.float32) for m in sorted(factors)],
        members,
        sections,
        kinds,
        ranks,
    )
    # Every rank asks for the same: what an owner hears is the same words N times, as far as they
    # are its own.
    parts = tf.split(asked.message, asked.splits, num=ranks)
    heard = [
        embedding_bag.respond(
            tf.concat([part] * ranks, 0), tf.fill([ranks], tf.size(part)), sections, kinds, ranks
        )
        for part in parts
    ]
    with tf.Session() as session:
        got, words, answers = session.run([asked, parts, heard])
    for one, other in zip(words, model.words):
        np.testing.assert_array_equal(one, other)
    np.testing.assert_array_equal(got.splits, list(map(len, model.words)))
    np.testing.assert_array_equal(got.row_splits, model.row_splits)
    for one, other in zip(got.positions, model.positions):
        np.testing.assert_array_equal(one, other)
    for one, other in zip(got.samples, model.samples):
        np.testing.assert_array_equal(one, other)
    for one, other in zip(got.scales, model.scales):
        np.testing.assert_allclose(one, other, rtol=1e-6)
    for rank, (keys, row_splits, counts, _) in enumerate(answers):
        assert counts == []  # No table of these counts keys.
        np.testing.assert_array_equal(row_splits, [model.row_splits[rank]] * ranks)
        header, body = words[rank][: 2 * len(sections)], words[rank][2 * len(sections) :]
        wanted: list[list[int]] = [[] for _ in kinds]
        for s, section in enumerate(sections):
            bag_count, key_count = header[2 * s : 2 * s + 2]
            mine, body = body[:key_count], body[key_count:]
            wanted[section.table] += (
                mine // ranks if kinds[section.table] == embedding_bag.STATIC else mine
            ).tolist()
            body = body[
                section.pooled * ((bag_count + 1) // 2)
                + section.weighted * ((key_count + 1) // 2) :
            ]
        for table, each in enumerate(keys):
            np.testing.assert_array_equal(each, wanted[table] * ranks)


def one_section(kind: int, *ids: Any, ranks: int) -> None:
    check(
        list(ids),
        [embedding_bag.BagMember(0, 3)] * len(ids),
        [embedding_bag.Section(0, 3)],
        [kind],
        ranks,
    )


def colliding(count: int, bits: int = 40) -> np.ndarray:
    """Keys that begin their search in the same place: what is multiplied is small, so the upper
    bits of the product are 0.
    """
    inverse = pow(0x9E3779B97F4A7C15, -1, 2**64)
    mixed = np.array([i * inverse % 2**64 for i in range(1, count + 1)], np.uint64)
    return (mixed ^ (mixed >> np.uint64(32))).view(np.int64)


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
@pytest.mark.parametrize("kind", [embedding_bag.STATIC, embedding_bag.DYNAMIC])
def test_keys_of_one_section(kind: int, ranks: int):
    rng = np.random.default_rng(ranks)
    for ids in (
        [],
        [7],
        [7] * 50,
        range(100),
        EDGES,
        EDGES * 3,
        rng.integers(-(2**63), 2**63 - 1, 300),
        rng.integers(0, 50, 300),
        rng.integers(0, 65536, 300),
        rng.integers(0, 65537, 300) | 65536,
        np.arange(300) * 2**40,
        np.arange(300) + np.iinfo(np.int64).min,
        colliding(300),
        rng.zipf(1.2, 2000) % 10**6,
    ):
        one_section(kind, ids, ranks=ranks)
    one_section(kind, EDGES, [], [5, 5, 0], rng.integers(-5, 5, 40), ranks=ranks)


def test_one_kernel_after_many_keys():
    """Its scratch memory is kept, and must not remember keys."""
    ids = tf.placeholder(tf.int64, [None])
    section, member = embedding_bag.Section(0, 1), embedding_bag.BagMember(0, 1)
    asked = embedding_bag.request(
        [ids, ids],
        [],
        [],
        [member, embedding_bag.BagMember(1, 1)],
        [section, section],
        [embedding_bag.STATIC],
        1,
    )
    rng = np.random.default_rng(3)
    with tf.Session() as session:
        for count, most in (
            (5, 10),
            (3000, 2000),
            (20, 2**40),
            (30000, 2**40),
            (9, 10),
            (0, 1),
            (40000, 65535),
            (100, 2**17),
        ):
            keys = rng.integers(0, most, count)
            got = session.run(asked, {ids: keys})
            distinct, first, inverse = np.unique(keys, return_index=True, return_inverse=True)
            order = np.argsort(first)
            ranked = np.empty_like(order)
            ranked[order] = np.arange(len(order))
            np.testing.assert_array_equal(
                got.message, [*[len(order)] * 4, *distinct[order], *distinct[order]]
            )
            np.testing.assert_array_equal(got.positions[0], ranked[inverse])
            np.testing.assert_array_equal(got.positions[1], ranked[inverse] + len(order))


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_random_sections(ranks: int):
    rng = np.random.default_rng(ranks)
    for _ in range(12):
        kinds = [int(rng.integers(ON_ONE_RANK * (1 + ranks))) for _ in range(3)]
        sections = [
            embedding_bag.Section(
                int(rng.integers(3)),
                int(rng.integers(1, 20)),
                bool(pooled),
                bool(pooled and rng.random() < 0.5),
            )
            for pooled in rng.integers(0, 2, 6)
        ]
        members = [
            embedding_bag.BagMember(
                s, section.dim, int(rng.integers(section.pooled, 4)), section.weighted
            )
            for s, section in enumerate(sections)
        ]
        members += [
            embedding_bag.BagMember(s, sections[s].dim)
            for s in rng.integers(0, 6, 4)
            if not sections[s].pooled
        ]
        members = [members[i] for i in rng.permutation(len(members))]
        ids = [rng.choice([*EDGES, *range(9)], int(rng.integers(0, 40))) for _ in members]
        samples = {
            m: np.sort(rng.integers(0, 12, len(ids[m])))
            for m, member in enumerate(members)
            if sections[member.section].pooled
        }
        weights = {
            m: rng.choice([-1.0, 0.0, 0.5, 2.0], len(ids[m]))
            for m in samples
            if members[m].weighted
        }
        check(ids, members, sections, kinds, ranks, samples, weights)


def test_more_owners_than_a_word_has_bits():
    rng = np.random.default_rng(0)
    ids, samples = rng.integers(0, 1000, 300), np.sort(rng.integers(0, 20, 300))
    check(
        [ids, ids],
        [embedding_bag.BagMember(0, 2, embedding_bag.MEAN), embedding_bag.BagMember(1, 2)],
        [embedding_bag.Section(0, 2, True), embedding_bag.Section(0, 2)],
        [embedding_bag.STATIC],
        70,
        {0: samples},
    )


def test_samples_far_apart():
    check(
        [[1, 2, 3, 4]],
        [embedding_bag.BagMember(0, 2, embedding_bag.SQRTN)],
        [embedding_bag.Section(0, 2, True)],
        [embedding_bag.STATIC],
        2,
        {0: [0, 5, 2**40, 2**40]},
    )


@pytest.mark.parametrize("combiner", [embedding_bag.SUM, embedding_bag.MEAN, embedding_bag.SQRTN])
def test_weights_that_sum_to_zero(combiner: int):
    check(
        [[1, 2, 3, 4, 5]],
        [embedding_bag.BagMember(0, 2, combiner, True)],
        [embedding_bag.Section(0, 2, True, True)],
        [embedding_bag.STATIC],
        2,
        {0: [0, 0, 1, 1, 2]},
        {0: [1, -1, 0, 0, -2]},
    )


def test_bounds():
    rng = np.random.default_rng(0)
    ids = [
        rng.integers(-(2**63), 2**63 - 1, 1001),
        np.array([], np.int64),
        np.array([5]),
        np.array(EDGES),
        np.array([-7, -9]),
    ]
    with tf.Session() as session:
        got = session.run(embedding_bag.bounds([given(each) for each in ids]))
    empty = (2**63 - 1, -(2**63))
    np.testing.assert_array_equal(
        got,
        [
            (min(each, default=empty[0]), max(each, default=empty[1]))
            for each in map(np.ndarray.tolist, ids)
        ],
    )
