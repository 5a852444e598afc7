"""Searches a learning rate and a batch size for the census job, by Optuna (pip install optuna).

    python modelzoo/census_income/search.py --trials 20 [-np 2] [--set max_length.epochs=2]

Each trial is a job of its own, in a folder of its own: `collective launch job.yaml --set …`. What
this program doesn't know goes on to it. A study that is interrupted continues: its results are in
`census_search/study.db`, the models next to it.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

import optuna

import collective

JOB = Path(__file__).with_name("job.yaml")
CHECKOUT = JOB.parents[2]  # where the job file's paths begin


def objective(trial: optuna.Trial, folder: Path, options: list[str]) -> float:
    """Trains with a trial's values; returns the AUC of the best checkpoint."""
    values = {
        "hyperparameters.learning_rate": trial.suggest_float("learning_rate", 0.01, 0.3, log=True),
        "hyperparameters.global_batch_size": 384 * trial.suggest_int("batch_factor", 1, 4),
        "checkpoints.folder": folder / str(trial.number),
    }
    settings = [word for name, value in values.items() for word in ("--set", f"{name}={value}")]
    launcher = [sys.executable, "-m", "collective", "launch"]
    subprocess.run([*launcher, str(JOB), *settings, *options], cwd=CHECKOUT, check=True)
    return float(collective.load(str(folder / str(trial.number) / "best")).metrics["auc"])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0],
        epilog="Other options are those of `collective launch`.",
        allow_abbrev=False,
    )
    parser.add_argument("--trials", type=int, default=20, help="how many jobs to start (20)")
    parser.add_argument("--folder", default="census_search", help="where models and results go")
    own, options = parser.parse_known_args()
    folder = Path(own.folder).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    study = optuna.create_study(
        direction="maximize",
        study_name="census-income",
        storage=f"sqlite:///{folder / 'study.db'}",  # continues after an interruption
        load_if_exists=True,
    )
    study.optimize(lambda trial: objective(trial, folder, options), n_trials=own.trials)
    print(f"best AUC {study.best_value:.4f} with {study.best_params}")


if __name__ == "__main__":
    main()
