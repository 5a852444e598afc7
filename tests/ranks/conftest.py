"""Cases that run on every rank of one launch: `python -m collective.launch -np N -m pytest
tests/ranks`.

They know their rank and hold for any N, also without the launcher. After each case the ranks
exchange their outcomes, so that one rank's failure is every rank's and all go on in step.
"""

import os
import tempfile
import traceback

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import hypothesis  # noqa: E402
import pytest  # noqa: E402
import tensorflow.compat.v1 as tf  # noqa: E402

from collective import CollectiveStrategy  # noqa: E402
from collective.coordination.agreement import SideChannel  # noqa: E402
from collective.options import ScopeOptions  # noqa: E402
from collective.scope import SCOPES  # noqa: E402

tf.logging.set_verbosity(tf.logging.ERROR)
# No shrinking and no database: every rank must draw the same examples (the seed comes with
# --hypothesis-seed).
hypothesis.settings.register_profile(
    "ranks",
    database=None,
    deadline=None,
    max_examples=int(os.environ.get("COLLECTIVE_TEST_EXAMPLES", "20")),
    phases=[hypothesis.Phase.explicit, hypothesis.Phase.generate],
    suppress_health_check=list(hypothesis.HealthCheck),
)
hypothesis.settings.load_profile("ranks")

# Whether a case that doesn't say groups its lookups: numbers are the same.
GROUPING = os.environ.get("COLLECTIVE_TEST_GROUPING", "on") == "on"
SCOPES.defaults = ScopeOptions(grouping=GROUPING)

_strategy = CollectiveStrategy()
_channel = SideChannel()


def pytest_report_header(config):
    backend = os.environ.get("COLLECTIVE_STRATEGY", "hb") + (
        "" if GROUPING else ", lookups not grouped"
    )
    return f"rank {_strategy.rank()} of {_strategy.world_size()}, backend {backend}"


@pytest.fixture(scope="session")
def strategy():
    return _strategy


@pytest.fixture
def rank():
    return _strategy.rank()


@pytest.fixture
def size():
    return _strategy.world_size()


@pytest.fixture
def folder():
    """One temporary folder for all ranks."""
    with tempfile.TemporaryDirectory() as made:
        yield _channel.texts({"folder": made})[0]["folder"]
        _channel.texts({})  # nobody is in it any more


@pytest.hookimpl(hookwrapper=True)
def pytest_pyfunc_call(pyfuncitem):
    outcome = yield
    mine = ""
    if outcome.excinfo is not None:
        mine = "".join(traceback.format_exception_only(outcome.excinfo[0], outcome.excinfo[1]))[
            :2000
        ]
    told = _channel.texts({"case": pyfuncitem.name, "failed": mine})
    cases = {text["case"] for text in told}
    if len(cases) > 1:
        pytest.exit(f"the ranks are out of step: {sorted(cases)}", returncode=3)
    elsewhere = [f"rank {r}: {text['failed']}" for r, text in enumerate(told) if text["failed"]]
    if elsewhere and not mine:
        outcome.force_exception(AssertionError("failed on other ranks:\n" + "\n".join(elsewhere)))
