"""A signal at moments of every kind of save: the checkpoint before, or the new one, is restored,
whole; the next save leaves no litter.
"""

import ast
import os
import random

import pytest

from tests.jobs import pool

SEED = int(os.environ.get("COLLECTIVE_TEST_SEED") or 1)
PROGRAM = pool.ROOT / "tests/jobs/dying_in_saves.py"
KINDS = ("blocking", "background", "increment")
SIGNALS = ("KILL", "TERM", "STOP")
LEAST = {"blocking": 60, "background": 70, "increment": 100}  # moments of a save


def job(folder, ranks, victims="", kind="blocking", moment=0, name="KILL"):
    """Restores the latest state and checks it, looks for litter, and makes each kind of save twice;
    in the second one of `kind` the signal strikes, if at all.
    """
    options = ("-np", ranks, "--device", "cpu", "--stall-timeout", 6, "--grace", 1)
    done = pool.launch(*options, PROGRAM, folder, victims, kind, moment, name, timeout=180)
    return done.returncode, done.stdout


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "seed",
    [
        pytest.param(SEED, marks=pytest.mark.matrix),
        *(pytest.param(SEED + i, marks=pytest.mark.long) for i in range(1, 5)),
    ],
)
def test_six_moments(tmp_path, seed):
    """A chain of jobs, each struck in a save, the next one restoring what is there."""
    print(f"COLLECTIVE_TEST_SEED={seed}")
    draw, folder = random.Random(seed), tmp_path / "saved"
    folder.mkdir()
    code, out = job(folder, 2)
    assert code == 0, out
    counted = [line.split("moments")[1] for line in out.splitlines() if "moments" in line]
    most = {kind: max(ast.literal_eval(c.strip())[kind] for c in counted) for kind in KINDS}
    assert all(most[kind] >= LEAST[kind] for kind in KINDS), most
    for i in range(6):
        # Of five seeds each kind meets each signal.
        kind, name = KINDS[i % 3], SIGNALS[(i + i // 3 + seed) % 3]
        victims, moment = draw.choice(["0", "1", "0,1"]), draw.randrange(1, most[kind])
        print("struck:", victims, "by", name, "at", moment, "of", kind)
        code, out = job(folder, 2, victims, kind, moment, name)
        assert "restored" in out, out
        # Rank 1 has fewer moments than rank 0; told to stop at the very end, a job is through.
        is_through = "moments" in out and (victims == "1" or name == "TERM")
        assert code != 0 or is_through, out
    code, out = job(folder, draw.choice([1, 2, 3]))
    assert code == 0 and "moments" in out, out
