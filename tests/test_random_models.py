"""Random models on several ranks: other seeds for each number of ranks and backend, the same ones
every time.
"""

import pytest

from tests.test_ranks import launch

JOBS = [(2, "hb"), (2, "sok"), (3, "hb"), (3, "sok")]


def trained_as_in_plain_tensorflow(monkeypatch, job, seeds, timeout):
    """`seeds` models, of which no other job has one."""
    ranks, backend = JOBS[job]
    monkeypatch.setenv("COLLECTIVE_TEST_MODELS", f"{job * seeds}:{(job + 1) * seeds}")
    done = launch(
        ranks, "tests/ranks/test_random_models.py", seed=0, backend=backend, timeout=timeout
    )
    assert done.returncode == 0, "the output above has the model, and the seed to run it alone"
    assert f"{seeds} passed" in done.stdout


@pytest.mark.timeout(400)
@pytest.mark.parametrize("job", range(len(JOBS)), ids=str)
def test_random_models(monkeypatch, job):
    trained_as_in_plain_tensorflow(monkeypatch, job, seeds=5, timeout=380)


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("job", range(len(JOBS)), ids=str)
def test_more_random_models(monkeypatch, job):
    trained_as_in_plain_tensorflow(monkeypatch, job, seeds=75, timeout=3500)
