"""Which carrier a job's collectives have, and why."""

from __future__ import annotations

import pytest
import tensorflow.compat.v1 as tf

from collective.ops import carriers, native_library, shared_memory

LAUNCHED = {
    "HOROVOD_GLOO_RENDEZVOUS_ADDR": "127.0.0.1",
    "HOROVOD_GLOO_RENDEZVOUS_PORT": "4711",
}


@pytest.fixture(autouse=True)
def job(monkeypatch):
    """Makes a rank of two, whose peer has nothing against sharing, with no choice yet."""
    for names in shared_memory._IDENTITIES:
        for name in names:
            monkeypatch.delenv(name, raising=False)
    for name, value in LAUNCHED.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv(carriers.VARIABLE, raising=False)
    monkeypatch.setattr(carriers, "_joined", None)
    monkeypatch.setattr(carriers, "_unavailable", "")
    monkeypatch.setattr(carriers, "_scope_choice", None)
    monkeypatch.setattr(native_library, "missing", lambda: None)
    monkeypatch.setattr(tf.config, "list_physical_devices", lambda kind: [])
    monkeypatch.setattr(shared_memory, "share", lambda job, r, n, problem, use, patience: problem)


@pytest.mark.parametrize(
    ("size", "here", "words"),
    [(2, 2, None), (1, 1, "there is one rank"), (2, 1, "the ranks are on several hosts")],
)
def test_ranks_of_one_host_share_memory(size, here, words):
    carriers.join(0, size, here)
    carrier = "shared_memory" if words is None else "horovod"
    assert carriers.in_force() == carriers.of_agreement() == carrier
    assert (words or "shared memory of the ranks of this host") in carriers.explanation()


def test_a_job_that_nothing_tells_from_others_goes_by_horovod(monkeypatch):
    for name in LAUNCHED:
        monkeypatch.delenv(name)
    carriers.join(0, 2, 2)
    assert carriers.in_force() == "horovod"
    assert "what started the ranks doesn't say" in carriers.explanation()


def test_a_rank_with_a_gpu_or_without_compiled_operations_says_so(monkeypatch):
    monkeypatch.setattr(tf.config, "list_physical_devices", lambda kind: [f"{kind}:0"])
    carriers.join(1, 2, 2)
    assert carriers.explanation() == "Horovod: the ranks have GPUs"
    monkeypatch.setattr(native_library, "missing", lambda: "they were not built")
    monkeypatch.setattr(carriers, "_joined", None)
    carriers.join(1, 2, 2)
    assert carriers.in_force() == carriers.of_agreement() == "horovod"
    carriers.use("shared_memory")
    assert carriers.explanation() == (
        "Horovod, not shared memory as of scope(carrier='shared_memory'): the compiled operations "
        "are missing: they were not built"
    )


@pytest.mark.parametrize(
    ("variable", "scope", "carrier", "agreement", "words"),
    [
        ("", None, "shared_memory", "shared_memory", "shared memory of the ranks of this host"),
        ("auto", None, "shared_memory", "shared_memory", "shared memory of the ranks of this host"),
        ("horovod", None, "horovod", "horovod", "Horovod, by COLLECTIVE_CARRIER=horovod"),
        ("Shared_Memory", None, "shared_memory", "shared_memory", ", by COLLECTIVE_CARRIER="),
        ("", "horovod", "horovod", "shared_memory", "Horovod, by scope(carrier='horovod')"),
        ("horovod", "shared_memory", "horovod", "horovod", ": COLLECTIVE_CARRIER=horovod"),
    ],
)
def test_scope_comes_before_the_environment(
    monkeypatch, variable, scope, carrier, agreement, words
):
    monkeypatch.setenv(carriers.VARIABLE, variable)
    carriers.join(0, 2, 2)
    carriers.use(scope)
    assert (carriers.in_force(), carriers.of_agreement()) == (carrier, agreement)
    assert carriers.explanation().endswith(words) or words in carriers.explanation()


def test_ranks_meet_once(monkeypatch):
    met = []
    monkeypatch.setattr(shared_memory, "share", lambda *arguments: met.append(arguments))
    carriers.join(0, 2, 2)
    carriers.join(0, 2, 2)
    assert len(met) == 1 and carriers.in_force() == "shared_memory"


def test_another_name_is_no_carrier(monkeypatch):
    monkeypatch.setenv(carriers.VARIABLE, "gloo")
    with pytest.raises(ValueError, match="COLLECTIVE_CARRIER=gloo: .* auto, horovod, shared_mem"):
        carriers.join(0, 2, 2)
