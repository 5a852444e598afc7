"""Prints the report of an evaluation: a line with its scores."""

from __future__ import annotations

from collections.abc import Callable

from collective import estimator as estimators
from common.counting import counted


class ScoreReporter(estimators.Exporter):
    """Reports the scores of each evaluation of `train_and_evaluate`; exports nothing."""

    name = "scores"

    def __init__(self, ratings: int, report: Callable[[str], None]):
        self._ratings, self._report = ratings, report

    def export(
        self,
        estimator: estimators.Estimator,
        export_path: str,
        checkpoint_path: str,
        eval_result: dict,
        is_the_final_export: bool,
    ) -> None:
        self._report(score_line(eval_result, self._ratings))


def score_line(scores: dict, ratings: int) -> str:
    return (
        f"test AUC {scores['auc']:.4f}  log loss {scores['log_loss']:.4f}  "
        f"({counted(ratings, 'rating')}, after step {scores['global_step']})"
    )
