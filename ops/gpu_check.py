"""Checks the kernels of a GPU, and measures how fast they are.

    collective gpu-check [--json FILE] [--family NAME ...] [--seed N]
        [--no-times | --no-checks] [--keys N] [--processes N] [--small]
    collective launch -m collective.ops.gpu_check --tensorflow

Every kernel is held against its reference in NumPy, then timed compared with a copy from device to
device in the same run. Needs a GPU, CuPy and NumPy. The exit code is 0 if all is well, 1 if a
kernel is wrong, 2 if there is no GPU or no CuPy.

A row of the table has the median, the 10th and the 90th percentile of the time on the device, in
milliseconds; useful bytes a second; these in percent of the copy's; and whether the host's time
is included, either since the kernel waits for the device, or since the device was idle while the
host launched, which should not be. Where PyTorch can use the GPU, it computes the whole step, too,
and the times are compared. The file is a list of such rows, each with the GPU's name, versions and
date.

NumPy's references take most of the time: of 2**24 keys they need ten minutes in one process. --keys
gives the checks fewer keys, --processes runs so many families' checks at once, each in a process of
its own, before anything is timed. --no-checks only times.

With --small every check runs at small sizes, nothing is timed, and each array is an allocation of
its own, outside which nothing may be written. That is for NVIDIA's compute-sanitizer, which looks
for errors of memory and for races in shared memory:

    compute-sanitizer --tool memcheck --error-exitcode 3 collective gpu-check --small
    compute-sanitizer --tool racecheck --error-exitcode 3 collective gpu-check --small

With --tensorflow it is the binding to TensorFlow that is checked, on as many ranks as are launched,
compared with NumPy in float64: exchanges, gradients, every optimizer's rule, a table that grows;
then how long a step and a call of kernels take. Needs all of collective:

    collective launch -m collective.ops.gpu_check --tensorflow [--case NAME ...]

Each case is reported as it ends: a rule's name, by distinct rows; with ".owner" after it, pooled
by the owner; "growing", a table that grows. A fault of the GPU ends a process, so that one for each
case tells most.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np

from collective.ops.counting import counted
from collective.ops.gpu import checks
from collective.ops.gpu.checks import processes, timing
from collective.ops.gpu.cupy_device import CupyDevice
from collective.ops.gpu.device import Device

_COLUMNS = "{:<30} {:>5} {:<22} {:>9} {:>9} {:>9} {:>8} {:>6} {:>9} {:<5}"
_PYTORCH = ", PyTorch"


def check(device: Device, families: Sequence[str], scale: checks.Scale, seed: int) -> int:
    """Runs all checks, reports each, and returns the number of failures."""
    failed = 0
    for name in families:
        for one in checks.family(name).CHECKS:
            begin = time.monotonic()
            # Printed before the check: a fault of the GPU may end the process.
            print(f"{name}: {one.__name__}: ", end="", flush=True)
            try:
                one(device, scale, np.random.default_rng(seed))
                device.synchronize()
                print(f"ok ({time.monotonic() - begin:.1f} s)", flush=True)
            except AssertionError as error:
                failed += 1
                print(f"WRONG\n{error}", flush=True)
            except Exception:
                failed += 1
                print(f"FAILED\n{traceback.format_exc()}", flush=True)
                if _is_lost(device):
                    return failed
    return failed


def _is_lost(device: Device) -> bool:
    """Tells whether a kernel's fault has made the GPU useless for this process."""
    try:
        device.synchronize()
    except Exception as error:
        print(
            f"gpu_check: nothing can run on the GPU any more ({error}): check the families one by "
            "one (--family)",
            file=sys.stderr,
        )
        return True
    return False


def measure(
    device: Device,
    families: Sequence[str],
    scale: checks.Scale,
    seed: int,
    repeats: int = timing.REPEATS,
    keep: Callable[[list[timing.Row]], None] = lambda rows: None,
) -> list[timing.Row]:
    """Times all kernels and prints the table; `keep` gets all rows so far after each one."""
    copied = timing.copy_bandwidth(device, scale, repeats)
    print(
        "\n"
        f"{device.versions()}\n"
        f"a copy from device to device moves {copied / 1e9:,.0f} GB/s, read and written\n"
    )
    print(
        _COLUMNS.format(
            "kernel", "dim", "dtype", "ms", "p10", "p90", "GB/s", "% copy", "Gkeys/s", "host"
        )
    )
    rows = []
    for name in families:
        for measurement in checks.family(name).measurements(
            device, scale, np.random.default_rng(seed)
        ):
            row = timing.row(device, measurement, copied, repeats)
            rows.append(row)
            keep(rows)
            print(
                _COLUMNS.format(
                    row.kernel,
                    row.dim or "",
                    row.dtype or "",
                    f"{row.ms:.4f}",
                    f"{row.ms_p10:.4f}",
                    f"{row.ms_p90:.4f}",
                    f"{row.gb_per_s:,.0f}",
                    f"{row.percent_of_copy:.0f}",
                    "" if row.gkeys_per_s is None else f"{row.gkeys_per_s:.2f}",
                    row.host,
                ),
                flush=True,
            )
    for line in compared_with_pytorch(rows):
        print(line, flush=True)
    return rows


def compared_with_pytorch(rows: Sequence[timing.Row]) -> list[str]:
    """Compares the time of each PyTorch row with the time of our own kernels."""
    ms = {row.kernel: row.ms for row in rows}
    pairs = [
        (kernel[: -len(_PYTORCH)], pytorch_ms)
        for kernel, pytorch_ms in ms.items()
        if kernel.endswith(_PYTORCH)
    ]
    return [
        f'PyTorch takes {pytorch_ms / ms[kernel]:.2f} times as long as "{kernel}"'
        for kernel, pytorch_ms in pairs
    ]


def write(file: Path, device: Device, rows: Sequence[timing.Row]) -> None:
    """Writes `rows` as JSON, each with the versions, the GPU and the date of the measurement."""
    torch = {"torch": sys.modules["torch"].__version__} if sys.modules.get("torch") else {}
    about = {
        **device.versions(),
        **torch,
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d"),
    }
    file.write_text(
        json.dumps([{**row._asdict(), **about} for row in rows], indent=1) + "\n", encoding="utf-8"
    )


def check_tensorflow(seed: int, names: Sequence[str]) -> int:
    """Checks the binding with these cases, or with all, on the launched ranks; returns the exit
    code.
    """
    os.environ.setdefault("COLLECTIVE_KERNELS", "gpu")
    # TensorFlow is needed only here.
    from collective.ops import kernel_device
    from collective.ops.binding_checks import growing, training
    from collective.ops.communication import collectives
    from collective.ops.exchange import dispatch

    cases: dict[str, Callable[[], list[str]]] = {
        name + ending: partial(training.check, seed, name, by_owner)
        for name in training.RULES
        for ending, by_owner in (("", False), (".owner", True))
    }
    cases["growing"] = lambda: growing.check(seed, training.config())
    if unknown := [name for name in names if name not in cases]:
        print(f"gpu_check: --case {unknown[0]}: known are {', '.join(cases)}", file=sys.stderr)
        return 2
    collectives.init()
    rank = collectives.rank()
    try:
        dispatch.operations()
    except RuntimeError as error:
        print(f"gpu_check: rank {rank}: {error}", file=sys.stderr)
        return 2
    failed = 0
    for name in names or cases:
        begin = time.monotonic()
        try:
            wrong = cases[name]()
        except Exception:
            wrong = [traceback.format_exc()]
        failed += bool(wrong)
        verdict = "WRONG" if wrong else "right"
        print(f"rank {rank}: {name}: {verdict} ({time.monotonic() - begin:.1f} s)", flush=True)
        print("".join(f"{line}\n" for line in wrong), end="", flush=True)
    print(f"rank {rank} of {collectives.size()}: {kernel_device.chosen()}", flush=True)
    if not names and not failed:
        print("\n".join(training.report(seed)), flush=True)
    return 1 if failed else 0


def _parser(prog: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog,
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the table there, too")
    parser.add_argument(
        "--family", action="append", choices=checks.FAMILIES, help="these kernels only"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the inputs")
    parser.add_argument("--no-times", action="store_true", help="check only")
    parser.add_argument("--no-checks", action="store_true", help="time only")
    parser.add_argument(
        "--keys", type=int, metavar="N", help=f"the most keys of a check ({checks.FULL.keys:,})"
    )
    parser.add_argument(
        "--processes",
        type=int,
        default=1,
        metavar="N",
        help="check so many families at once, each in a process of its own (1)",
    )
    parser.add_argument(
        "--small", action="store_true", help="check only, at small sizes: under compute-sanitizer"
    )
    parser.add_argument(
        "--tensorflow",
        action="store_true",
        help="check the binding to TensorFlow instead, on all ranks",
    )
    parser.add_argument(
        "--case", action="append", default=[], metavar="NAME", help="of --tensorflow: this one only"
    )
    return parser


def _parsed(parser: argparse.ArgumentParser, arguments: Sequence[str] | None) -> argparse.Namespace:
    options = parser.parse_args(arguments)
    if options.no_checks and (options.no_times or options.small):
        only = "--small" if options.small else "--no-times"
        parser.error(f"--no-checks with {only}, which only checks: nothing is left to do")
    if options.keys is not None and options.keys < checks.FEWEST_KEYS:
        parser.error(
            f"--keys {options.keys}: the checks need {checks.FEWEST_KEYS:,} or more; leave it out "
            f"for {checks.FULL.keys:,}"
        )
    if options.processes < 1:
        parser.error(f"--processes {options.processes}: give 1 or more")
    return options


def _check_side_by_side(families: Sequence[str], options: argparse.Namespace) -> str:
    """Checks in processes; returns what failed, '' if nothing did."""
    arguments = ["--no-times", "--seed", str(options.seed)]
    arguments += ["--small"] if options.small else []
    arguments += [] if options.keys is None else ["--keys", str(options.keys)]
    failed = processes.check(families, options.processes, arguments)
    return f"{counted(failed, 'family', 'families')} of {len(families)} failed" if failed else ""


def main(arguments: Sequence[str] | None = None, prog: str = "collective gpu-check") -> int:
    """Runs the command line; returns the exit code."""
    options = _parsed(_parser(prog), arguments)
    if options.tensorflow:
        return check_tensorflow(options.seed, options.case)
    families = options.family or checks.FAMILIES
    try:
        device = CupyDevice(pooled=not options.small)
    except RuntimeError as error:
        print(f"gpu_check: {error}", file=sys.stderr)
        return 2
    scale = checks.SMALL if options.small else checks.FULL
    if options.keys is not None:
        scale = scale._replace(keys=options.keys)
    failed = ""
    if options.processes > 1 and not options.no_checks:
        failed = _check_side_by_side(families, options)
    elif not options.no_checks:
        count = check(device, families, scale, options.seed)
        failed = f"{counted(count, 'check')} failed" if count else ""
    if not options.no_times and not options.small and not (failed and _is_lost(device)):

        def keep(rows: list[timing.Row]) -> None:
            if options.json is not None:
                write(options.json, device, rows)

        measure(device, families, checks.FULL, options.seed, keep=keep)
    if failed:
        print(f"gpu_check: {failed}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
