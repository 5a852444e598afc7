"""Generates the workload of step.py: sizes of the tables, batches of ids, and the traffic that they
need. NumPy only.

Symbols: N ranks, F features, each with a table of its own, B samples a rank, D the tables'
dimension, K ids of a batch.

The tables have the sizes of Criteo-Kaggle's 26 categorical features, clipped to [100, 1,000,000].
Ids follow Zipf's law with exponent 1.05 and are scattered over the table by a fixed permutation.
Samples have one id for each feature, or a number of them that is drawn uniformly (from 1 to 10,
say), to be sum-pooled.

With F > 26 the same number of ids, and about as many rows, are spread over F tables: sizes repeat,
each divided by F / 26 (not below 100), and a rank takes B × 26 / F samples. With F < 26 there are
as many samples, and fewer ids.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

# Of Criteo-Kaggle's 26 categorical features.
CRITEO_ROWS = [1460, 583, 10131227, 2202608, 305, 24, 12517, 633, 3, 93145, 5683, 8351593, 3194]
CRITEO_ROWS += [27, 14992, 5461306, 10, 5652, 2173, 4, 7046547, 18, 15, 286181, 105, 142572]
FEATURES = len(CRITEO_ROWS)
FEWEST_ROWS = 100
# Numbers of a sample that enter the network in addition to the embeddings.
DENSE_FEATURES = 13
# Units of hidden layers; the bottom network ends in D units, the top one in 1.
BOTTOM, TOP = (512, 256), (512, 256)
# By networks: the units of the top layers. Gradients of `wide` are 15 MB.
TOPS = {"dlrm": TOP, "wide": (1024,) * 4}
SLOTS = {"adagrad": 1, "ftrl": 2, "sgd": 0, "lazy_adam": 2}


@dataclasses.dataclass(frozen=True)
class Setting:
    """Says what to measure.

    Attributes:
        ranks: N.
        tables: F.
        dim: D.
        ids: the smallest and the largest number of ids of a sample and feature. (1, 1): plain
            lookups, nothing is pooled.
        batch: samples of all ranks together, with up to 26 tables; see `samples`.
        backend: COLLECTIVE_STRATEGY.
        optimizer: a key of SLOTS.
        network: 'dlrm'; 'wide', the same with larger layers; 'none', the logit then being a fixed
            weighted sum of the embeddings; or 'squares', the loss then being half the embeddings'
            squares, without a product.
        input: 'feed', 'dataset' or 'memory', how a batch reaches the graph; the last copies none.
        dynamic: tables of this library take any key; the other programs have static ones.
        policy: options of the `collective.TablePolicy` of dynamic tables.
        steps, warmup: how many are timed, and come before that.
        zipf: the exponent; 0 draws ids uniformly.
        min_rows, max_rows: the smallest and the largest table.
        pool: different batches of a rank, taken in turn.
        seed: of the data.
        inter_op: threads that run operations.
        intra_op: threads within an operation.
        scope: options of scope().
    """

    ranks: int = 2
    tables: int = FEATURES
    dim: int = 16
    ids: tuple[int, int] = (1, 1)
    batch: int = 8192
    backend: str = "hb"
    optimizer: str = "adagrad"
    network: str = "none"
    input: str = "feed"
    dynamic: bool = False
    policy: dict[str, Any] = dataclasses.field(default_factory=dict)
    steps: int = 40
    warmup: int = 10
    zipf: float = 1.05
    min_rows: int = FEWEST_ROWS
    max_rows: int = 1_000_000
    pool: int = 20
    seed: int = 2024
    inter_op: int = 1
    intra_op: int = 1
    scope: dict[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def samples(self) -> int:
        """Returns B, the samples of one rank."""
        return max(1, round(self.batch * FEATURES / max(self.tables, FEATURES) / self.ranks))

    @property
    def pooled(self) -> bool:
        return self.ids != (1, 1)

    def rows(self) -> list[int]:
        """Returns the rows of each table."""
        shrink = max(1.0, self.tables / FEATURES)
        clipped = [min(max(rows, FEWEST_ROWS), 1_000_000) for rows in CRITEO_ROWS]
        return [
            min(max(int(clipped[f % FEATURES] / shrink), self.min_rows), self.max_rows)
            for f in range(self.tables)
        ]

    def shard_bytes(self) -> int:
        """Returns the bytes of one rank's shards with the optimizer's slots, float32."""
        rows = sum(-(-rows_of_table // self.ranks) for rows_of_table in self.rows())
        return rows * self.dim * 4 * (1 + SLOTS[self.optimizer])

    def layers(self) -> list[tuple[int, int]]:
        """Returns (inputs, units) of the network's layers, bottom ones first."""
        if self.network not in TOPS:
            return []
        vectors = self.tables + 1
        bottom = [DENSE_FEATURES, *BOTTOM, self.dim]
        top = [self.dim + vectors * (vectors - 1) // 2, *TOPS[self.network], 1]
        return [*zip(bottom, bottom[1:]), *zip(top, top[1:])]

    def dense_parameters(self) -> int:
        """Counts the numbers in the network, which an allreduce carries."""
        return sum(inputs * units + units for inputs, units in self.layers())

    def save(self, folder: Path) -> None:
        (folder / "setting.json").write_text(json.dumps(dataclasses.asdict(self)))

    @classmethod
    def load(cls, folder: Path) -> Setting:
        fields = json.loads((folder / "setting.json").read_text())
        return cls(**{**fields, "ids": tuple(fields["ids"])})


def shapes(setting: Setting) -> dict[str, tuple[str, list[int | None]]]:
    """Returns (dtype, shape) of the arrays of a batch.

    ids      [F, B], or pooled [K], feature by feature and sample by sample
    indices  [K, 2], pooled only: (sample, position) of each id, as in a `tf.SparseTensor`
    sizes    [F], pooled only: how many ids each feature has
    label    [B, 1], 0 or 1
    dense    [B, 13], with a network only
    """
    arrays: dict[str, tuple[str, list[int | None]]]
    if setting.pooled:
        arrays = {
            "ids": ("int64", [None]),
            "indices": ("int64", [None, 2]),
            "sizes": ("int64", [setting.tables]),
        }
    else:
        arrays = {"ids": ("int64", [setting.tables, setting.samples])}
    arrays["label"] = ("float32", [setting.samples, 1])
    if setting.layers():
        arrays["dense"] = ("float32", [setting.samples, DENSE_FEATURES])
    return arrays


def _id_source(setting: Setting, feature: int, rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns (cumulative probabilities, ids), the most frequent id first."""
    return _shares(setting, rows), np.random.default_rng([setting.seed, 1, feature]).permutation(
        rows
    )


def _shares(setting: Setting, rows: int) -> np.ndarray:
    """Returns the cumulative probabilities of the ids, the most frequent one first."""
    shares = np.cumsum(np.arange(1, rows + 1, dtype=np.float64) ** -setting.zipf)
    return shares / shares[-1]


def batches(setting: Setting, rank: int) -> Iterator[dict[str, np.ndarray]]:
    """Generates the rank's `pool` batches, each a dict of arrays as in `shapes`."""
    rng = np.random.default_rng([setting.seed, 2, rank])
    low, high = setting.ids
    lengths = rng.integers(low, high + 1, (setting.pool, setting.tables, setting.samples))
    parts: list[list[np.ndarray]] = [[] for _ in range(setting.pool)]
    for feature, rows in enumerate(setting.rows()):
        shares, ids = _id_source(setting, feature, rows)
        for part, counts in zip(parts, lengths[:, feature].sum(1)):
            drawn = np.minimum(np.searchsorted(shares, rng.random(counts)), rows - 1)
            part.append(ids[drawn].astype(np.int64))
    for part, counts in zip(parts, lengths):
        batch = {"ids": np.concatenate(part)}
        if setting.pooled:
            batch["indices"] = np.concatenate([_indices(samples) for samples in counts])
            batch["sizes"] = counts.sum(1).astype(np.int64)
        else:
            batch["ids"] = batch["ids"].reshape(setting.tables, setting.samples)
        batch["label"] = rng.integers(0, 2, (setting.samples, 1)).astype(np.float32)
        if setting.layers():
            batch["dense"] = rng.random((setting.samples, DENSE_FEATURES), np.float32)
        yield batch


def _indices(counts: np.ndarray) -> np.ndarray:
    """Returns [K, 2] (sample, position) for samples with `counts` ids."""
    first = np.cumsum(counts) - counts
    samples = np.repeat(np.arange(len(counts), dtype=np.int64), counts)
    return np.stack([samples, np.arange(len(samples), dtype=np.int64) - first[samples]], 1)


def by_feature(
    setting: Setting, batch: dict[str, np.ndarray]
) -> list[tuple[np.ndarray, np.ndarray]]:
    """Returns (ids, the sample of each id) of each feature."""
    if not setting.pooled:
        return [(ids, np.arange(setting.samples)) for ids in batch["ids"]]
    ends = np.cumsum(batch["sizes"])[:-1]
    return list(zip(np.split(batch["ids"], ends), np.split(batch["indices"][:, 0], ends)))


def traffic(setting: Setting, batch: dict[str, np.ndarray]) -> np.ndarray:
    """Counts what a rank needs for a batch.

    With hb, and with sok where nothing is pooled, a rank sends each distinct key of a table and
    gets its row. With sok it sends each key, and four bytes for the number of keys of each (sample,
    feature) that has some on an owner; it gets one row for each of these pairs.

    Returns:
        [N, 2] int64, by owner: words of 8 bytes that it sends, rows that it gets.
    """
    ranks = setting.ranks
    words_and_rows = np.zeros([ranks, 2], np.int64)
    for ids, samples in by_feature(setting, batch):
        if setting.backend == "sok" and setting.pooled:
            keys = np.bincount(ids % ranks, minlength=ranks)
            rows = np.bincount(np.unique(samples * ranks + ids % ranks) % ranks, minlength=ranks)
            words_and_rows += np.stack([keys + (rows + 1) // 2, rows], 1)
        else:
            words_and_rows += np.bincount(np.unique(ids) % ranks, minlength=ranks)[:, None]
    return words_and_rows


class MergedKeys:
    """Tells how many distinct keys a host's ranks have together, as expected.

    That over the sum of each rank's is the least that merging on each host leaves of what hosts
    exchange. The setting's ranks are on `hosts` hosts.
    """

    def __init__(self, setting: Setting, hosts: int):
        self._ranks, self._ids = setting.ranks // hosts, sum(setting.ids) / 2
        # Of each row the logarithm of the probability that an id isn't its.
        self._misses = [
            np.log1p(-np.minimum(np.diff(_shares(setting, rows), prepend=0), 1 - 1e-12))
            for rows in setting.rows()
        ]

    def share(self, samples: int) -> float:
        """Returns the share that is left with so many samples of a rank."""
        together, own = (
            sum(-np.expm1(ranks * samples * self._ids * misses).sum() for misses in self._misses)
            for ranks in (self._ranks, 1)
        )
        return float(together / (self._ranks * own))

    def samples_for(self, share: float) -> int | None:
        """Returns from how many samples of a rank on, a power of 2, no more than `share` is left.

        None if it takes more than 2**24.
        """
        low, high = 0, 25
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if self.share(2**middle) <= share else (middle + 1, high)
        return None if low == 25 else 2**low


def write(setting: Setting, folder: Path) -> None:
    """Writes everything that the ranks read.

    These are the setting, all batches, and their `traffic`, [pool, N askers, N owners, 2].
    """
    setting.save(folder)
    traffic_of_batches = np.zeros([setting.pool, setting.ranks, setting.ranks, 2], np.int64)
    for rank in range(setting.ranks):
        for i, batch in enumerate(batches(setting, rank)):
            traffic_of_batches[i, rank] = traffic(setting, batch)
            for name, array in batch.items():
                np.save(folder / f"{name}.{rank}.{i}.npy", array)
    np.save(folder / "traffic.npy", traffic_of_batches)


def read(setting: Setting, folder: Path, rank: int) -> list[dict[str, np.ndarray]]:
    """Maps the rank's batches into memory.

    A mapped array starts on 64 bytes, so that TensorFlow takes it without a copy.
    """
    rank_batches = []
    for i in range(setting.pool):
        batch = {}
        for name in shapes(setting):
            batch[name] = np.load(folder / f"{name}.{rank}.{i}.npy", mmap_mode="r")
            batch[name].max()  # reads every page, before anything is timed
        rank_batches.append(batch)
    return rank_batches
