"""Runs one session of a random program of tables, for tests/jobs/test_table_programs.py.

Arguments: the seed, a folder, which keeps checkpoint and program for the job that goes on.
"""

import pickle
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from collective import CollectiveStrategy  # noqa: E402
from collective.coordination import barrier  # noqa: E402
from tests.ranks.table_program_sessions import Program  # noqa: E402

seed, folder = int(sys.argv[1]), Path(sys.argv[2])
strategy = CollectiveStrategy()
rank, size = strategy.rank(), strategy.world_size()
kept = folder / "program"
program = pickle.loads(kept.read_bytes()) if kept.exists() else Program(seed, str(folder), size)
program.run_session(strategy, rank)
barrier.exchange(None, "read", {})
if rank == 0:
    kept.write_bytes(pickle.dumps(program))
    steps = program.references[0].step
    rows = sum(len(reference.rows) for reference in program.references)
    print(f"after step {steps} on {size}: rows {rows}")
