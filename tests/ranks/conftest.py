"""Runs the cases on every rank of one launch (tests/rank_plugin launches them).

They know their rank and hold for any N. After each case the ranks exchange their outcomes, so that
one rank's failure is every rank's and all go on in step.
"""

from __future__ import annotations

import functools
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
from collective.tables.policies import bloom_filter  # noqa: E402
from collective.tensorflow_internals.keras import backend  # noqa: E402
from tests import gpu_double, nccl_double  # noqa: E402
from tests.rank_plugin import inside_a_rank  # noqa: E402
from tests.rank_plugin.configuration import Configuration  # noqa: E402
from tests.rank_plugin.reports import ELSEWHERE  # noqa: E402

# Whether a case that doesn't say groups its lookups: numbers are the same.
GROUPING = os.environ.get("COLLECTIVE_TEST_GROUPING", "on") == "on"
# Of each property, by tier.
EXAMPLES = {"test": 2, "slow": 2, "matrix": 3, "all": 50}
# The seeds of random models: how many, or first:last.
MODELS = {"test": "1", "slow": "1", "matrix": "1:11", "all": "0:300"}
KERAS_MODELS = {"test": "2", "slow": "2", "matrix": "2:20", "all": "0:300"}
# The seeds of random programs, of which each runs four.
PROGRAMS = {"test": "0:5", "slow": "0:5", "matrix": "5:9", "all": "0:50"}


def pytest_configure(config):
    os.environ.setdefault("COLLECTIVE_TEST_MODELS", MODELS[config.option.tier])
    os.environ.setdefault("COLLECTIVE_TEST_KERAS_MODELS", KERAS_MODELS[config.option.tier])
    os.environ.setdefault("COLLECTIVE_TEST_PROGRAMS", PROGRAMS[config.option.tier])
    if not inside_a_rank():
        return  # the launching process only collects the cases
    tf.logging.set_verbosity(tf.logging.ERROR)
    # No shrinking and no database: every rank must draw the same examples (the seed comes with
    # --hypothesis-seed).
    hypothesis.settings.register_profile(
        "ranks",
        database=None,
        deadline=None,
        max_examples=int(
            os.environ.get("COLLECTIVE_TEST_EXAMPLES") or EXAMPLES[config.option.tier]
        ),
        phases=[hypothesis.Phase.explicit, hypothesis.Phase.generate],
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    hypothesis.settings.load_profile("ranks")
    text = os.environ.get("COLLECTIVE_TEST_CONFIGURATION")
    two_levels = bool(text) and Configuration.parse(text).carrier == "two_levels"
    SCOPES.defaults = ScopeOptions(grouping=GROUPING, hierarchical=True if two_levels else "auto")
    if text and Configuration.parse(text).double:
        gpu_double.use()
    if text and Configuration.parse(text).carrier == "nccl" and not Configuration.parse(text).gpu:
        nccl_double.use()


@functools.cache
def _strategy():
    return CollectiveStrategy()


@functools.cache
def _channel():
    _strategy()
    return SideChannel()


def pytest_collection_finish():
    if inside_a_rank():
        _channel()  # TensorFlow keeps the thread counts of a process's first session


def pytest_report_header(config):
    if not inside_a_rank():
        return None
    backend = os.environ.get("COLLECTIVE_STRATEGY", "hb") + (
        "" if GROUPING else ", lookups not grouped"
    )
    return f"rank {_strategy().rank()} of {_strategy().world_size()}, backend {backend}"


@pytest.fixture(scope="session")
def strategy():
    return _strategy()


@pytest.fixture
def rank():
    return _strategy().rank()


@pytest.fixture
def size():
    return _strategy().world_size()


@pytest.fixture
def folder():
    """Makes one temporary folder for all ranks."""
    with tempfile.TemporaryDirectory() as made:
        yield _channel().texts({"folder": made})[0]["folder"]
        _channel().texts({})  # nobody is in it any more


@pytest.fixture(params=["v1", "v2", "references"])
def flavour(request):
    """Sets control flow of either version, and variables of the first version."""
    if request.param != "v2":
        tf.disable_control_flow_v2()
    if request.param == "references":
        tf.disable_resource_variables()
    yield request.param
    tf.enable_control_flow_v2()
    tf.enable_resource_variables()


@pytest.hookimpl(hookwrapper=True)
def pytest_pyfunc_call(pyfuncitem):
    outcome = yield
    failure = ""
    if outcome.excinfo is not None:
        failure = "".join(traceback.format_exception_only(*outcome.excinfo[:2]))[:2000]
    try:
        texts = _channel().texts({"case": pyfuncitem.name, "failed": failure})
    except tf.errors.OpError as error:
        said = failure or "it ended well here"
        raise AssertionError(f"ranks can't tell each other how the case ended: {said}") from error
    cases = {text["case"] for text in texts}
    if len(cases) > 1:
        pytest.exit(f"the ranks are out of step: {sorted(cases)}", returncode=3)
    elsewhere = [f"rank {r}: {text['failed']}" for r, text in enumerate(texts) if text["failed"]]
    if elsewhere and not failure:
        outcome.force_exception(AssertionError(ELSEWHERE + "\n" + "\n".join(elsewhere)))


@pytest.fixture(autouse=True)
def _no_seed_of_keras():
    """Takes back a case's `tf.keras.utils.set_random_seed`, from which the others would draw."""
    yield
    vars(backend._SEED_GENERATOR).pop("generator", None)


@pytest.fixture
def crowded(monkeypatch):
    """Makes Bloom filters so small that keys share counters, alike on 1, 2 and 3 ranks."""
    monkeypatch.setattr(bloom_filter, "PARTITIONS", 6)
    bloom_filter.size.cache_clear()
    yield
    bloom_filter.size.cache_clear()
