"""Which carrier a job's collectives have, and why."""

from __future__ import annotations

import pytest

from collective.ops import carriers, native_library

LAUNCHED = {
    "COLLECTIVE_SHARED_MEMORY": "/proc/1/fd/3",
    "WORLD_SIZE": "2",
    "CUDA_VISIBLE_DEVICES": "",
}


@pytest.fixture(autouse=True)
def job(monkeypatch):
    """Makes a rank of two, as the launcher starts it, with no choice yet."""
    for name, value in LAUNCHED.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv(carriers.VARIABLE, raising=False)
    monkeypatch.setattr(carriers, "_rank_and_size", (0, 2))
    monkeypatch.setattr(carriers, "_scope_choice", None)
    monkeypatch.setattr(carriers, "_open", lambda: None)
    monkeypatch.setattr(native_library, "missing", lambda: None)
    carriers.unavailable.cache_clear()
    yield
    carriers.unavailable.cache_clear()


@pytest.mark.parametrize(
    ("changes", "size", "words"),
    [
        ({}, 2, None),
        ({}, 1, "there is one rank"),
        ({"COLLECTIVE_SHARED_MEMORY": ""}, 2, "not started by python -m collective.launch"),
        ({"OMPI_COMM_WORLD_RANK": "0"}, 2, "started by another program below"),
        ({}, 4, "started by another program below"),
        ({"CUDA_VISIBLE_DEVICES": "0"}, 2, "the ranks have GPUs"),
    ],
)
def test_memory_is_shared_only_where_it_is_certain(changes, size, words):
    why = carriers.why_unavailable({**LAUNCHED, **changes}, size)
    assert why is None if words is None else words in why


@pytest.mark.parametrize(
    ("variable", "scope", "carrier", "agreement", "words"),
    [
        ("", None, "horovod", "horovod", None),
        ("auto", None, "horovod", "horovod", None),
        ("horovod", None, "horovod", "horovod", "Horovod, by COLLECTIVE_CARRIER=horovod"),
        ("shared_memory", None, "shared_memory", "shared_memory", "shared memory of the ranks"),
        ("", "shared_memory", "shared_memory", "horovod", "by scope(carrier='shared_memory')"),
        ("shared_memory", "horovod", "horovod", "shared_memory", "Horovod, by scope(carrier"),
    ],
)
def test_scope_comes_before_the_environment(
    monkeypatch, variable, scope, carrier, agreement, words
):
    monkeypatch.setenv(carriers.VARIABLE, variable)
    carriers.use(scope)
    assert (carriers.in_force(), carriers.of_agreement()) == (carrier, agreement)
    said = carriers.explanation()
    assert said is None if words is None else words in said


def test_without_compiled_operations_it_is_horovod_and_the_plan_says_so(monkeypatch):
    monkeypatch.setenv(carriers.VARIABLE, "shared_memory")
    monkeypatch.setattr(native_library, "missing", lambda: "they were not built")
    assert carriers.in_force() == carriers.of_agreement() == "horovod"
    assert carriers.explanation() == (
        "Horovod, not shared memory as of COLLECTIVE_CARRIER=shared_memory: the compiled "
        "operations are missing: they were not built"
    )


def test_another_name_is_no_carrier(monkeypatch):
    monkeypatch.setenv(carriers.VARIABLE, "gloo")
    with pytest.raises(ValueError, match="COLLECTIVE_CARRIER=gloo: .* auto, horovod, shared_mem"):
        carriers.join(0, 2)
