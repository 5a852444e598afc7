"""A host's ranks that merge what they ask for get the rows of NumPy, and owners the gradients."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from collective.ops import placement
from collective.ops.exchange import embedding_bag, request_merging
from collective.ops.exchange.embedding_bag import DYNAMIC, STATIC, SUM, BagMember, Section

V, DIMS, KINDS = 40, (3, 5), (STATIC, DYNAMIC)
SECTIONS = [Section(0, 3), Section(1, 5), Section(0, 3, True, True), Section(1, 5, True)]
MEMBERS = [
    BagMember(0, 3),
    BagMember(1, 5),
    BagMember(1, 5),
    BagMember(2, 3, SUM, True),
    BagMember(3, 5, SUM),
]
POOLS = [BagMember(m.section, m.dim, SUM, True) if m.combiner else m for m in MEMBERS]
COUNTED = [False, True]


def owner_of(kind, keys, ranks):
    return keys % ranks if kind == STATIC else placement.dynamic(ranks).owner(keys)


class Rank:
    """Holds what one rank looks up."""

    def __init__(self, draw, most):
        sizes = draw.integers(0, most + 1, len(MEMBERS))
        self.ids = [draw.integers(0, V, size) for size in sizes]
        self.samples = [np.sort(draw.integers(0, 4, size)) for size in sizes[3:]]
        self.weights = draw.integers(1, 4, sizes[3]).astype(np.float32)


def exchange(parts):
    """Carries an all-to-all out: parts[i][k] is what i sends k; returns what each k gets."""
    return [list(got) for got in zip(*parts)]


def rows_of(keys, kind, ranks):
    """Returns the local rows of an owner's keys; a dynamic table has key k in row k + 1."""
    return keys if kind == STATIC else keys + 1


def run(hosts, here, ranks_data, tables):
    """Returns the results, the gradients by owner and table, and the counts by owner."""
    ranks = hosts * here
    shards = [
        [
            tf.get_variable(f"s{r}_{t}", initializer=shard, use_resource=True)
            for t, shard in enumerate(of_rank)
        ]
        for r, of_rank in enumerate(tables)
    ]
    asked = [
        embedding_bag.request(
            [tf.constant(x) for x in data.ids],
            [tf.constant(x) for x in data.samples],
            [tf.constant(data.weights)],
            MEMBERS,
            SECTIONS,
            KINDS,
            ranks,
            COUNTED,
            hosts,
        )
        for data in ranks_data
    ]

    def by_proxy(splits):
        return tf.reduce_sum(tf.reshape(splits, [here, hosts]), 1)

    def within(parts):
        return sum((exchange(parts[h * here : (h + 1) * here]) for h in range(hosts)), [])

    def between(parts):
        out = [None] * ranks
        for number in range(here):
            for h, got in enumerate(exchange(parts[number::here])):
                out[h * here + number] = got
        return out

    to_proxies = within([tf.split(a.message, by_proxy(a.splits), num=here) for a in asked])
    merged = [
        request_merging.merge(tf.concat(got, 0), SECTIONS, KINDS, here, hosts, COUNTED)
        for got in to_proxies
    ]
    requests = between([tf.split(m.message, m.splits, num=hosts) for m in merged])
    sizes, flats, heard, counts = [], [], [], []
    for r, got in enumerate(requests):
        message = tf.concat(got, 0)
        splits = tf.stack([tf.size(x) for x in got])[:, None]
        number = r % here
        splits = tf.reshape(tf.pad(splits, [[0, 0], [number, here - 1 - number]]), [ranks])
        response = embedding_bag.respond(message, splits, SECTIONS, KINDS, ranks, COUNTED)
        rows = [rows_of(keys, kind, ranks) for keys, kind in zip(response.keys, KINDS)]
        flat = embedding_bag.gather(
            [v.handle for v in shards[r]],
            rows,
            message,
            splits,
            SECTIONS,
            KINDS,
            ranks,
            [v.shape for v in shards[r]],
            COUNTED,
        )
        flats.append(flat)
        sizes.append(tf.reshape(response.row_splits, [hosts, here])[:, number])
        heard.append(response.keys[1])
        counts.append(response.counts[0])
    back = between([tf.split(flat, size, num=hosts) for flat, size in zip(flats, sizes)])
    spread = [
        tf.split(
            request_merging.spread(tf.concat(got, 0), m, SECTIONS, hosts), m.row_splits, num=here
        )
        for got, m in zip(back, merged)
    ]
    results = []
    for got, a in zip(within(spread), asked):
        results.append(
            embedding_bag.pool(tf.concat(got, 0), a.positions, a.samples, a.scales, POOLS, a.counts)
        )
    loss = tf.add_n([tf.reduce_sum(tf.square(x)) for of_rank in results for x in of_rank])
    gradients = tf.gradients(loss, [v for of_rank in shards for v in of_rank])
    with tf.Session() as session:
        session.run(tf.global_variables_initializer())
        return session.run([results, gradients, list(zip(heard, counts))])


@pytest.mark.parametrize(("hosts", "here", "most"), [(2, 2, 30), (3, 2, 9), (2, 3, 0), (1, 2, 5)])
def test_merged_requests_give_the_rows_and_gradients_of_numpy(hosts, here, most):
    ranks, draw = hosts * here, np.random.default_rng(hosts + 10 * here)
    whole = [draw.integers(-3, 4, (V, dim)).astype(np.float32) for dim in DIMS]
    # Row k of rank r: key k N + r of the static table, key k - 1 of the dynamic one.
    tables = [
        [whole[0][r::ranks], np.concatenate([np.zeros((1, DIMS[1]), np.float32), whole[1]])]
        for r in range(ranks)
    ]
    data = [Rank(draw, most) for _ in range(ranks)]
    with tf.Graph().as_default():
        results, gradients, counted = run(hosts, here, data, tables)
    expected = [np.zeros((V, dim)) for dim in DIMS]
    for rank, of_rank in zip(data, results):
        for m, (member, ids) in enumerate(zip(MEMBERS, rank.ids)):
            table = SECTIONS[member.section].table
            rows = whole[table][ids].astype(np.float64)
            if member.combiner:
                samples = rank.samples[m - 3]
                weights = rank.weights if m == 3 else np.ones(len(ids))
                out = np.zeros((samples.max(initial=-1) + 1, member.dim))
                np.add.at(out, samples, rows * weights[:, None])
                np.testing.assert_array_equal(of_rank[m], out)
                np.add.at(expected[table], ids, 2 * out[samples] * weights[:, None])
            else:
                np.testing.assert_array_equal(of_rank[m], rows)
                np.add.at(expected[table], ids, 2 * rows)
    found = [np.zeros((V, dim)) for dim in DIMS]
    for i, slices in enumerate(gradients):
        r, table = divmod(i, 2)
        keys = slices.indices * ranks + r if table == 0 else slices.indices - 1
        assert len(set(keys)) == len(keys)
        assert (owner_of(KINDS[table], keys, ranks) == r).all()
        found[table][keys] += slices.values
    for one, other in zip(found, expected):
        np.testing.assert_array_equal(one, other)
    # How often each key of the counted table was asked for, pooled or not; no host asks twice for
    # a key that isn't pooled.
    times = np.zeros(V, np.int64)
    for keys, of_keys in counted:
        np.add.at(times, keys, of_keys)
    wanted = np.concatenate([x for rank in data for x in (rank.ids[1], rank.ids[2], rank.ids[4])])
    np.testing.assert_array_equal(times, np.bincount(wanted, minlength=V))


def test_a_key_of_several_ranks_leaves_their_host_once():
    ids = [np.array(x, np.int64) for x in ([4, 8, 4], [8, 4, 12])]
    with tf.Graph().as_default(), tf.Session() as session:
        asked = [
            embedding_bag.request([x], [], [], [BagMember(0, 2)], [Section(0, 2)], [0], 4, (), 2)
            for x in ids
        ]
        # Of 2 hosts of 2 ranks: what both ask of proxy 0, of owners 0 and 2.
        messages = [a.message[: a.splits[0] + a.splits[1]] for a in asked]
        merged = request_merging.merge(tf.concat(messages, 0), [Section(0, 2)], [0], 2, 2)
        merged = session.run(merged)
    assert merged.message.tolist() == [3, 3, 4, 8, 12, 0, 0]
    assert merged.splits.tolist() == [5, 2] and merged.row_splits.tolist() == [4, 6]
    assert merged.positions.tolist() == [0, 2, 2, 0, 4] and merged.bags.tolist() == [2, 0, 3, 0]


@pytest.mark.parametrize(("hosts", "here"), [(2, 2), (3, 2), (1, 3), (2, 1)])
def test_an_owner_sends_a_host_one_row_a_key_in_the_order_of_the_proxy(hosts, here):
    """Of an unpooled section of dimension 2, and a pooled one of dimension 1."""
    draw = np.random.default_rng(3)
    sections = [Section(0, 2), Section(0, 1, True)]
    keys = [draw.integers(0, 6, draw.integers(0, 5)) for _ in range(hosts * here)]
    keys = [np.array(list(dict.fromkeys(x)), np.int64) for x in keys]  # distinct, in order
    bags = [draw.integers(0, 3) for _ in keys]
    messages, rows, wanted, sizes = [], [], [], []
    for of_rank, count in zip(keys, bags):
        # Each bag of the pooled section has one key; lengths are int32, two to a word.
        lengths = np.ones(count + count % 2, np.int32)
        lengths[count:] = 0
        head = [len(of_rank), len(of_rank), count, count]
        messages.append(np.concatenate([head, of_rank, np.full(count, 9), lengths.view(np.int64)]))
        rows.append(np.concatenate([np.repeat(of_rank, 2), draw.random(count)]))
    for host in range(hosts):
        of_host = range(host * here, (host + 1) * here)
        distinct = list(dict.fromkeys(np.concatenate([keys[r] for r in of_host]).tolist()))
        pooled = [rows[r][2 * len(keys[r]) :] for r in of_host]
        wanted.append(np.concatenate([np.repeat(np.array(distinct, float), 2), *pooled]))
        sizes.append(len(wanted[-1]))
    with tf.Graph().as_default(), tf.Session() as session:
        message = tf.constant(np.concatenate(messages).astype(np.int64))
        merged = request_merging.merge(message, sections, [0], here, hosts, by_owner=True)
        flat = tf.constant(np.concatenate(rows).astype(np.float32))
        first, splits = request_merging.first(flat, merged, sections, hosts)
        words = tf.constant([len(x) for x in messages], tf.int32)
        counted = request_merging.row_splits(message, words, sections)
        proxies = [
            request_merging.merge(
                tf.constant(np.concatenate(messages[h * here : (h + 1) * here]).astype(np.int64)),
                sections,
                [0],
                here,
                1,
            )
            for h in range(hosts)
        ]
        spread = [
            request_merging.spread(part, proxy, sections, 1)
            for part, proxy in zip(tf.split(first, splits, num=hosts), proxies)
        ]
        got, got_sizes, elements, everyones = session.run([first, splits, counted, spread])
    np.testing.assert_array_equal(got, np.concatenate(wanted).astype(np.float32))
    assert got_sizes.tolist() == sizes and elements.tolist() == [len(x) for x in rows]
    np.testing.assert_array_equal(
        np.concatenate(everyones), np.concatenate(rows).astype(np.float32)
    )


@pytest.mark.parametrize(
    ("rows", "positions", "bags", "problem"),
    [
        ([1.0], [0, 2], [1, 1], "positions of rows of 2"),
        ([1.0] * 6, [0, 2], [1, 1], "there are 6 elements, but the askers have 4"),
        ([1.0] * 4, [2, 2], [1, 1], "rows came for 0 of the 4"),
        ([1.0] * 4, [0, 2], [1], "1 positions are of no bag"),
    ],
)
def test_wrong_positions_of_rows_are_an_error(rows, positions, bags, problem):
    with tf.Graph().as_default(), tf.Session() as session:
        places = tf.constant(positions, tf.int32), tf.constant(bags, tf.int64)
        merged = request_merging.MergedRequests(None, None, None, *places)
        first, _ = request_merging.first(tf.constant(rows), merged, [Section(0, 2)], 1)
        with pytest.raises(tf.errors.InvalidArgumentError, match=problem):
            session.run(first)


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ([1, 1], "has 3 words, and 2 are left"),
        ([-1, 0], "section 0 has -1 bags of 0 keys"),
        ([1, 1, 7, 0, 0, 5], "words over"),
        ([1, 0, 7, 0, 0], "malformed"),
    ],
)
def test_a_malformed_message_is_an_error(words, problem):
    with tf.Graph().as_default(), tf.Session() as session:
        merged = request_merging.merge(tf.constant(words, tf.int64), [Section(0, 2)], [0], 2, 1)
        with pytest.raises(tf.errors.InvalidArgumentError, match=problem):
            session.run(merged.message)
