"""Times FBGEMM's embedding tables on one GPU: what a lookup costs, and its backward pass, which
updates the tables.

    python benchmarks/gpu_fbgemm.py RESULTS.json [--packages FOLDER] [--repeats 30] [--small]
        [CASE ...]

`SplitTableBatchedEmbeddingBagsCodegen` with dimension 128 and float32; ids are int64. The cases:

    published       10 tables, 104,857 ids each, one a sample, not pooled, Adam: FBGEMM's own
                    workload of 1,048,570 ids of which about 350,280 are distinct. Ids follow a
                    power law with exponent 1.05, over as many rows as make that number likely
    dlrm-1          26 tables, 4 GiB of weights, 65,536 samples, 1 id a sample, summed, Adagrad
    dlrm-10         the same, 1 to 10 ids a sample
    dlrm-1-v2       as dlrm-1, with FBGEMM's experimental forward kernel
    dlrm-10-v2      as dlrm-10, with it
    dlrm-1-rowwise  as dlrm-1, with row-wise Adagrad: one number of state a row instead of 128

The ids of dlrm are Zipf-like, with exponent 1.2, hashed; all cases with as many ids a sample have
the same ones.

Times are medians in milliseconds. `forward` and `backward` are of the device alone, by its events:
the host has launched all of both before the device begins. A case in which it hasn't, as where
FBGEMM waits for the device, is marked `late`. `wall` is of both together, by the host's clock, from
an idle device to an idle device.

GB/s are of a floor, in which everything is read and written once: with K ids, U distinct ones, S
rows of the result of dimension D, and s states (Adagrad 1, Adam 2)

    forward         8 K ids, 4 D U of rows read; 4 D S written
    backward        8 K ids, 4 D S of gradients, 4 D U (1 + s) of rows and states read, and as many
                    written

At first, lookups and one update by each optimizer are compared with PyTorch's own operations, on
small tables. FOLDER has the package fbgemm_gpu. `--small` shrinks all cases, and without a GPU they
run on the CPU (where FBGEMM can't do all of them): a rehearsal.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import time
import traceback
import warnings
from pathlib import Path
from typing import Any, Callable, NamedTuple

import numpy as np
import torch

DIM = 128
WARM_UPS = 5
PUBLISHED_TABLES, PUBLISHED_IDS, PUBLISHED_DISTINCT, EXPONENT = 10, 104857, 350280, 1.05
TABLES, SAMPLES, ROWS = 26, 65536, 2**32 // (4 * DIM) // 26
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_LIMIT = 3  # the longest filling, as a power of 4


class Batch(NamedTuple):
    """Holds what is looked up, and the gradients of the result.

    Attributes:
        ids: [K] int64, by table, then sample.
        offsets: [T B + 1] int64, the first id of each sample of each table.
        tables: T.
        distinct: U, of all tables together.
    """

    ids: Any
    offsets: Any
    tables: int
    distinct: int

    @staticmethod
    def of(ids: list[np.ndarray], lengths: np.ndarray) -> Batch:
        """Makes one of the ids of each table and the [T, B] numbers of ids of each sample."""
        offsets = np.concatenate([[0], np.cumsum(lengths)])
        distinct = sum(len(np.unique(part)) for part in ids)
        return Batch(np.concatenate(ids), offsets, len(ids), distinct)

    def there(self, device: str) -> Batch:
        """Copies the arrays to a device."""
        ids, offsets = (torch.from_numpy(array).to(device) for array in (self.ids, self.offsets))
        return self._replace(ids=ids, offsets=offsets)


class Case(NamedTuple):
    """Says what is timed: how many `rows` each table has, the two `batches` that take turns, and
    what FBGEMM is told.
    """

    name: str
    rows: int
    batches: list[Batch]
    optimizer: str
    pooled: bool
    options: dict[str, Any]


# ---- ids ----------------------------------------------------------------------------------------


def power_law(rows: int) -> np.ndarray:
    """Returns [rows] float64, the probability of each row, the most frequent first."""
    weights = np.arange(1, rows + 1, dtype=np.float64) ** -EXPONENT
    return weights / weights.sum()


def expected_distinct(probabilities: np.ndarray, ids: int) -> float:
    return float(-np.expm1(ids * np.log1p(-probabilities)).sum())


def rows_for(distinct: int, ids: int) -> int:
    """Finds how many rows a table has if so many distinct ones are expected among its ids."""
    low, high = distinct, 40_000_000
    while high - low > low // 1000:
        middle = (low + high) // 2
        if expected_distinct(power_law(middle), ids) < distinct:
            low = middle
        else:
            high = middle
    return high


def published(ids: int, distinct: int, rng: np.random.Generator) -> tuple[int, list[Batch]]:
    """Draws two batches of FBGEMM's workload; returns the rows of each table, too."""
    rows = rows_for(distinct, ids)
    up_to = np.cumsum(power_law(rows))
    by_rank = [rng.permutation(rows) for _ in range(PUBLISHED_TABLES)]  # frequent ones lie anywhere

    def drawn(of: np.ndarray) -> np.ndarray:
        ranks = np.searchsorted(up_to, rng.random(ids), side="right")
        return of[ranks.clip(max=rows - 1)]

    lengths = np.ones((PUBLISHED_TABLES, ids), np.int64)
    return rows, [Batch.of([drawn(of) for of in by_rank], lengths) for _ in range(2)]


def zipf(size: int, rows: int, rng: np.random.Generator) -> np.ndarray:
    """Draws [`size`] int64 below `rows`: Zipf's distribution with exponent 1.2, hashed, so that
    frequent ones lie anywhere.
    """
    return (
        (rng.zipf(1.2, size).astype(np.uint64) * _GOLDEN >> np.uint64(20)) % np.uint64(rows)
    ).astype(np.int64)


def dlrm(samples: int, rows: int, most: int, rng: np.random.Generator) -> list[Batch]:
    """Draws two batches of 1 to `most` ids a sample and table."""
    batches = []
    for _ in range(2):
        lengths = rng.integers(1, most + 1, (TABLES, samples))
        ids = zipf(int(lengths.sum()), rows, rng)
        batches.append(Batch.of(np.split(ids, np.cumsum(lengths.sum(1))[:-1]), lengths))
    return batches


def cases(small: bool, names: list[str]) -> list[Case]:
    """Draws the inputs of the cases with these names, or of all."""
    ids, distinct = (1000, 5000) if small else (PUBLISHED_IDS, PUBLISHED_DISTINCT)
    samples, rows = (64, 1000) if small else (SAMPLES, ROWS)
    rng, found = np.random.default_rng(0), []
    one, ten = dlrm(samples, rows, 1, rng), dlrm(samples, rows, 10, rng)
    v2 = {"use_experimental_tbe": True}
    if not names or "published" in names:
        many, batches = published(ids, distinct // PUBLISHED_TABLES, rng)
        found.append(Case("published", many, batches, "ADAM", False, {}))
    found += [
        Case("dlrm-1", rows, one, "EXACT_ADAGRAD", True, {}),
        Case("dlrm-10", rows, ten, "EXACT_ADAGRAD", True, {}),
        Case("dlrm-1-v2", rows, one, "EXACT_ADAGRAD", True, v2),
        Case("dlrm-10-v2", rows, ten, "EXACT_ADAGRAD", True, v2),
        Case("dlrm-1-rowwise", rows, one, "EXACT_ROWWISE_ADAGRAD", True, {}),
    ]
    return [case for case in found if not names or case.name in names]


# ---- FBGEMM -------------------------------------------------------------------------------------


def load(packages: Path | None) -> None:
    """Imports FBGEMM; says what is wrong with a library that doesn't load, and goes on without."""
    if packages is not None:
        sys.path.insert(0, str(packages.resolve()))
    load_library = torch.ops.load_library

    def tolerant(path: str) -> None:
        try:
            load_library(path)
        except OSError as error:
            print(f"{Path(path).name} doesn't load: {error.__cause__ or error}", flush=True)

    torch.ops.load_library = tolerant
    logging.disable(logging.WARNING)  # it doesn't know its own release
    try:
        import fbgemm_gpu
    finally:
        logging.disable(logging.NOTSET)
        torch.ops.load_library = load_library
    print(f"fbgemm_gpu {fbgemm_gpu.__version__}, {fbgemm_gpu.__variant__}", flush=True)


def tables(
    device: str, rows: int, number: int, optimizer: str, pooled: bool, **options: Any
) -> torch.nn.Module:
    """Makes FBGEMM's tables, with weights in [-1, 1]. Ids aren't checked: that is the fastest."""
    from fbgemm_gpu import split_table_batched_embeddings_ops_common as common
    from fbgemm_gpu import split_table_batched_embeddings_ops_training as training
    from fbgemm_gpu.split_embedding_configs import EmbOptimType

    place = (
        (common.EmbeddingLocation.DEVICE, training.ComputeDevice.CUDA)
        if device == "cuda"
        else (common.EmbeddingLocation.HOST, training.ComputeDevice.CPU)
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made = training.SplitTableBatchedEmbeddingBagsCodegen(
            [(rows, DIM, *place)] * number,
            optimizer=EmbOptimType[optimizer],
            pooling_mode=common.PoolingMode.SUM if pooled else common.PoolingMode.NONE,
            bounds_check_mode=common.BoundsCheckMode.NONE,
            stochastic_rounding=False,
            device=torch.device(device, 0) if device == "cuda" else torch.device(device),
            **options,
        )
    for weights in made.split_embedding_weights():
        weights.uniform_(-1, 1)
    return made


# ---- checks -------------------------------------------------------------------------------------


def looked_up(weights: list[torch.Tensor], batch: Batch, pooled: bool) -> torch.Tensor:
    """Returns what the lookup must: [B, T D] sums in float64, or [K, D] rows."""
    device, samples = batch.ids.device, (len(batch.offsets) - 1) // batch.tables
    firsts = batch.offsets[::samples].tolist()
    found = []
    for t, table in enumerate(weights):
        rows = table.index_select(0, batch.ids[firsts[t] : firsts[t + 1]]).double()
        if pooled:
            lengths = batch.offsets[t * samples : (t + 1) * samples + 1].diff()
            of = torch.repeat_interleave(torch.arange(samples, device=device), lengths)
            rows = torch.zeros(samples, DIM, device=device).double().index_add_(0, of, rows)
        found.append(rows)
    return torch.cat(found, 1 if pooled else 0)


def updated(
    weights: list[torch.Tensor], batch: Batch, gradients: torch.Tensor, pooled: bool, rate: float
) -> list[torch.Tensor]:
    """Returns the weights after the first step of Adagrad or Adam, where epsilon is 1: of both it
    is rate g / (|g| + 1), g the sum of a row's gradients.
    """
    device, samples = batch.ids.device, (len(batch.offsets) - 1) // batch.tables
    firsts, made = batch.offsets[::samples].tolist(), []
    for t, table in enumerate(weights):
        lengths = batch.offsets[t * samples : (t + 1) * samples + 1].diff()
        of = torch.repeat_interleave(torch.arange(samples, device=device), lengths)
        part = (
            gradients[:, t * DIM : (t + 1) * DIM].index_select(0, of)
            if pooled
            else gradients[firsts[t] : firsts[t + 1]]
        ).double()
        ids = batch.ids[firsts[t] : firsts[t + 1]]
        summed = torch.zeros_like(table, dtype=torch.float64).index_add_(0, ids, part)
        made.append(table.double() - rate * summed / (summed.abs() + 1))
    return made


def check(device: str, optimizer: str, pooled: bool, **options: Any) -> None:
    """Compares a lookup and, of what keeps a state for each weight, an update with PyTorch's.

    Raises:
        AssertionError: they differ.
    """
    rng, rate = np.random.default_rng(1), 0.05
    lengths = rng.integers(1, 11 if pooled else 2, (3, 500))
    ids = [zipf(int(number), 300, rng) for number in lengths.sum(1)]
    batch = Batch.of(ids, lengths).there(device)
    made = tables(device, 300, 3, optimizer, pooled, learning_rate=rate, eps=1.0, **options)
    before = [weights.clone() for weights in made.split_embedding_weights()]
    got = made(batch.ids, batch.offsets)
    torch.testing.assert_close(got.double(), looked_up(before, batch, pooled), rtol=1e-5, atol=1e-5)
    gradients = torch.randn_like(got)
    got.backward(gradients)
    if optimizer == "EXACT_ROWWISE_ADAGRAD":
        return
    wanted = updated(before, batch, gradients, pooled, rate)
    for weights, one in zip(made.split_embedding_weights(), wanted):
        torch.testing.assert_close(weights.double(), one, rtol=1e-5, atol=1e-5)


def check_all(device: str) -> dict[str, str]:
    """Makes all checks; returns what each of them said."""
    said = {}
    for optimizer, pooled, options in (
        ("EXACT_ADAGRAD", True, {}),
        ("EXACT_ADAGRAD", True, {"use_experimental_tbe": True}),
        ("EXACT_ADAGRAD", False, {}),
        ("EXACT_ROWWISE_ADAGRAD", True, {}),
        ("ADAM", False, {}),
    ):
        name = ", ".join([optimizer, "summed" if pooled else "not pooled", *options])
        try:
            check(device, optimizer, pooled, **options)
            said[name] = "right"
        except Exception as error:
            said[name] = f"{type(error).__name__}: {error}"
        print(f"check {name}: {said[name]}", flush=True)
    return said


# ---- times --------------------------------------------------------------------------------------


class _OnHost:
    """Stands in for a device's events if there is no device."""

    def record(self) -> None:
        self.at = time.perf_counter()

    def query(self) -> bool:
        return False

    def elapsed_time(self, end: _OnHost) -> float:
        return 1e3 * (end.at - self.at)


class Clock:
    """Times two pieces of work that follow each other, on the device alone."""

    def __init__(self, device: str):
        self._gpu, self._power = device == "cuda", 0

    def synchronize(self) -> None:
        if self._gpu:
            torch.cuda.synchronize()

    def __call__(self, first: Callable[[], Any], second: Callable[[Any], Any]) -> list[float]:
        """Returns the milliseconds of each, and whether the device had to wait for the host."""
        while True:
            events: list[Any] = [
                torch.cuda.Event(enable_timing=True) if self._gpu else _OnHost() for _ in range(3)
            ]
            self.synchronize()
            if self._gpu:
                torch.cuda._sleep(4_000_000 * 4**self._power)  # about 2 ms, and more
            events[0].record()
            result = first()
            events[1].record()
            second(result)
            late = events[0].query()
            events[2].record()
            self.synchronize()
            if not late or self._power == _LIMIT:
                break
            self._power += 1
        forward, backward = (events[n].elapsed_time(events[n + 1]) for n in range(2))
        return [forward, backward, float(late)]


def floors(batch: Batch, results: int, states: float) -> tuple[float, float]:
    """Counts the bytes of the forward and the backward pass, as the page says."""
    ids, result, rows = 8 * len(batch.ids), 4 * DIM * results, 4 * DIM * batch.distinct
    return ids + result + rows, ids + result + 2 * rows * (1 + states)


def measure(device: str, case: Case, repeats: int) -> dict[str, Any]:
    """Times a case."""
    made = tables(
        device,
        case.rows,
        case.batches[0].tables,
        case.optimizer,
        case.pooled,
        learning_rate=0.05 if case.optimizer != "ADAM" else 0.001,
        **case.options,
    )
    batches = [batch.there(device) for batch in case.batches]
    gradients = [1e-3 * torch.randn_like(made(one.ids, one.offsets).detach()) for one in batches]
    clock, taken, walls = Clock(device), [], []

    def forward(turn: int) -> Any:
        return made(batches[turn].ids, batches[turn].offsets)

    for number in range(WARM_UPS + repeats):
        turn = number % 2
        times = clock(lambda: forward(turn), lambda got: got.backward(gradients[turn]))  # noqa: B023
        if number >= WARM_UPS:
            taken.append(times)
    for number in range(repeats):
        clock.synchronize()
        began = time.perf_counter()
        forward(number % 2).backward(gradients[number % 2])
        clock.synchronize()
        walls.append(1e3 * (time.perf_counter() - began))
    spread = np.percentile(np.array(taken), [50, 10, 90], 0)[:, :2]
    states = {"ADAM": 2, "EXACT_ADAGRAD": 1, "EXACT_ROWWISE_ADAGRAD": 1 / DIM}[case.optimizer]
    results = gradients[0].numel() // DIM
    bytes_moved = np.mean([floors(batch, results, states) for batch in case.batches], 0)
    return {
        "case": case.name,
        "optimizer": case.optimizer,
        "tables": case.batches[0].tables,
        "rows": case.rows,
        "ids": [len(batch.ids) for batch in case.batches],
        "distinct": [batch.distinct for batch in case.batches],
        "forward_ms": dict(zip(("median", "p10", "p90"), spread[:, 0])),
        "backward_ms": dict(zip(("median", "p10", "p90"), spread[:, 1])),
        "wall_ms": float(np.median(walls)),
        "forward_gb_per_s": bytes_moved[0] / spread[0, 0] / 1e6,
        "backward_gb_per_s": bytes_moved[1] / spread[0, 1] / 1e6,
        "late": any(late for _, _, late in taken),
    }


def line(row: dict[str, Any]) -> str:
    return (
        f"{row['case']:<15} {row['optimizer']:<22} {row['tables']} tables of {row['rows']:,} rows, "
        f"{np.mean(row['ids']):,.0f} ids, {np.mean(row['distinct']):,.0f} distinct: "
        f"forward {row['forward_ms']['median']:.4f} ms {row['forward_gb_per_s']:,.0f} GB/s, "
        f"backward {row['backward_ms']['median']:.4f} ms {row['backward_gb_per_s']:,.0f} GB/s, "
        f"wall {row['wall_ms']:.4f} ms{', late' if row['late'] else ''}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("results", type=Path)
    parser.add_argument("cases", nargs="*", metavar="CASE")
    parser.add_argument("--packages", type=Path, metavar="FOLDER")
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--small", action="store_true")
    arguments = parser.parse_intermixed_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    gpu = torch.cuda.get_device_name() if device == "cuda" else None
    print(f"PyTorch {torch.__version__} on {gpu or 'the CPU'}", flush=True)
    load(arguments.packages)
    report: dict[str, Any] = {"torch": torch.__version__, "gpu": gpu, "rows": []}
    report["checks"] = check_all(device)
    for case in cases(arguments.small, arguments.cases):
        try:
            report["rows"].append(measure(device, case, arguments.repeats))
            print(line(report["rows"][-1]), flush=True)
        except Exception:  # the other cases can be timed
            report["rows"].append({"case": case.name, "error": traceback.format_exc()})
            print(f"{case.name} failed:\n{traceback.format_exc()}", flush=True)
        arguments.results.write_text(json.dumps(report, indent=1) + "\n")
        if device == "cuda":
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
