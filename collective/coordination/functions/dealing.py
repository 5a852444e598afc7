"""Lets ranks compare what eager code deals to them, where `fit` begins and after calls that train.

Calls are counted from where the ranks have begun together, with a `fit` or with variables that are
new to them, and compared after 1, 2, 4, 8, … of them: a million calls have twenty exchanges.
"""

from __future__ import annotations

from collective.coordination import barrier, coordinator
from collective.coordination.dealt_input import EAGER_INPUT
from collective.ops.communication import collectives


def begin_again() -> None:
    """Counts calls from here on; every rank calls it."""
    coordinator.instance().training_calls = 0


def after_training() -> None:
    """Counts a call that has trained with all ranks, and compares if it is time.

    Raises:
        RankError: as `compare` does.
    """
    if collectives.size() == 1:
        return
    ranks = coordinator.instance()
    ranks.training_calls += 1
    if ranks.training_calls & (ranks.training_calls - 1) == 0:
        compare()


def compare() -> None:
    """Compares what was dealt so far; every rank calls it.

    Raises:
        RankError: the ranks deal from other elements, or in another order; on every rank.
    """
    dealt = EAGER_INPUT.dealt
    reports = barrier.run_on_all_ranks(
        None,
        "compares what is dealt to the ranks",
        lambda: None if dealt is None else dealt.report(None),
    )
    if dealt is not None and None not in reports:
        error = dealt.judge(reports)
        if error is not None:
            raise error
