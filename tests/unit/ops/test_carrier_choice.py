"""Which carrier a job's collectives have, and why."""

from __future__ import annotations

import pytest
import tensorflow.compat.v1 as tf

from collective.ops import native_library
from collective.ops.communication import carrier_choice, horovod_library, nccl, shared_memory
from collective.ops.communication.membership import Process
from collective.scope import ScopeStack

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
    monkeypatch.delenv(carrier_choice.VARIABLE, raising=False)
    monkeypatch.setattr(carrier_choice._meeting, "joined", None)
    monkeypatch.setattr(carrier_choice._meeting, "unavailable", "")
    monkeypatch.setattr(carrier_choice._meeting, "scope_choice", None)
    monkeypatch.setattr(carrier_choice._meeting, "has_memory", False)
    monkeypatch.setattr(carrier_choice._meeting, "has_nccl", False)
    monkeypatch.setattr(native_library, "missing", lambda: None)
    monkeypatch.setattr(tf.config, "list_physical_devices", lambda kind: [])
    monkeypatch.setattr(shared_memory, "share", lambda job, r, n, problem, use, patience: problem)


def join(rank, size, here, words=None):
    """Joins; `words` are those of all ranks, if there are several hosts."""
    process = Process(rank, size, rank % here, here)
    carrier_choice.join(process, lambda own: words or [own] * size)


@pytest.mark.parametrize(
    ("size", "here", "words"),
    [(2, 2, None), (1, 1, "there is one rank"), (2, 1, "every host has one rank")],
)
def test_ranks_of_one_host_share_memory(size, here, words):
    join(0, size, here)
    carrier = "shared_memory" if words is None else "horovod"
    assert carrier_choice.in_force() == carrier_choice.of_agreement() == carrier
    assert (words or "shared memory of the ranks of this host") in carrier_choice.explanation()


def test_a_job_that_nothing_tells_from_others_goes_by_horovod(monkeypatch):
    for name in LAUNCHED:
        monkeypatch.delenv(name)
    join(0, 2, 2)
    assert carrier_choice.in_force() == "horovod"
    assert "what started the ranks doesn't say" in carrier_choice.explanation()


def test_a_rank_with_a_gpu_or_without_compiled_operations_says_so(monkeypatch):
    monkeypatch.setattr(tf.config, "list_physical_devices", lambda kind: [f"{kind}:0"])
    join(1, 2, 2)
    assert carrier_choice.explanation() == "Horovod: the ranks have GPUs"
    monkeypatch.setattr(native_library, "missing", lambda: "they were not built")
    monkeypatch.setattr(carrier_choice._meeting, "joined", None)
    join(1, 2, 2)
    assert carrier_choice.in_force() == carrier_choice.of_agreement() == "horovod"
    carrier_choice.use("shared_memory")
    assert carrier_choice.explanation() == (
        "Horovod, though scope(carrier='shared_memory') asks for shared memory: the compiled "
        "operations "
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
    monkeypatch.setenv(carrier_choice.VARIABLE, variable)
    join(0, 2, 2)
    carrier_choice.use(scope)
    assert (carrier_choice.in_force(), carrier_choice.of_agreement()) == (carrier, agreement)
    assert carrier_choice.explanation().endswith(words) or words in carrier_choice.explanation()


def test_ranks_meet_once(monkeypatch):
    met = []
    monkeypatch.setattr(shared_memory, "share", lambda *arguments: met.append(arguments))
    join(0, 2, 2)
    join(0, 2, 2)
    assert len(met) == 1 and carrier_choice.in_force() == "shared_memory"


def test_another_name_is_no_carrier(monkeypatch):
    monkeypatch.setenv(carrier_choice.VARIABLE, "gloo")
    with pytest.raises(ValueError, match="COLLECTIVE_CARRIER=gloo: .* auto, horovod, shared_mem"):
        join(0, 2, 2)


@pytest.mark.parametrize(
    ("words", "explanation"),
    [
        (
            ["0 ", "1 ", "0 ", "1 "],
            "shared memory between the ranks of a host, Horovod between hosts",
        ),
        (
            ["0 ", "1 ", "0 ", "0 "],
            "shared memory between the ranks of a host, Horovod between hosts",
        ),
        (["0 ", "0 ", "0 ", "0 "], "Horovod: every host has one rank"),
        (
            ["0 ", "1 ", "0 ", "1 no room"],
            "Horovod: on the host of rank 3: no room",
        ),
        (
            ["0 ", "0 ", "1 ", "1 "],
            "Horovod: the ranks of a host don't follow each other: rank 3 is number 1 of its host",
        ),
    ],
)
def test_hosts_share_memory_within_each_or_not_at_all(words, explanation):
    join(1, 4, 2, words)
    assert carrier_choice.explanation() == explanation
    is_mixed = explanation.startswith("shared")
    assert carrier_choice.in_force() == ("mixed" if is_mixed else "horovod")
    assert carrier_choice.of_agreement() == carrier_choice.in_force()


def test_ranks_of_a_host_meet_by_themselves(monkeypatch):
    met = []
    monkeypatch.setattr(shared_memory, "share", lambda *arguments: met.append(arguments))
    join(3, 4, 2, ["0 ", "1 ", "0 ", "1 "])
    ((job, rank, size, *_),) = met
    assert (rank, size) == (1, 2) and job.endswith("host of rank 2")
    assert carrier_choice.ranks_of_host() == range(2, 4)


@pytest.fixture
def with_nccl(monkeypatch):
    """Makes GPUs and NCCL be there; returns who has started it."""
    started = []
    monkeypatch.setattr(tf.config, "list_physical_devices", lambda kind: [f"{kind}:0"])
    monkeypatch.setattr(nccl, "_of_nccl", lambda: None)
    monkeypatch.setattr(nccl, "start", lambda rank, ranks: started.append((rank, ranks)))
    return started


def test_nccl_carries_everything_but_headers(with_nccl, monkeypatch):
    monkeypatch.setenv(carrier_choice.VARIABLE, "nccl")
    join(1, 2, 2)
    assert with_nccl == [(1, 2)]
    assert carrier_choice.in_force() == carrier_choice.of_broadcasts() == "nccl"
    assert carrier_choice.of_agreement() == "shared_memory"
    assert carrier_choice.explanation() == (
        "NCCL between the GPUs of this host, by COLLECTIVE_CARRIER=nccl"
    )
    carrier_choice.use("auto")  # Never NCCL, nor the host's memory for GPUs.
    assert carrier_choice.in_force() == "horovod"
    assert carrier_choice.explanation() == "Horovod: the ranks have GPUs"


def test_nccl_by_a_scope_leaves_the_agreement_as_it_was(with_nccl):
    join(0, 2, 2)
    assert carrier_choice.in_force() == "horovod" and not with_nccl
    carrier_choice.use("nccl")
    assert carrier_choice.in_force() == "nccl" and with_nccl == [(0, 2)]
    assert carrier_choice.of_agreement() == carrier_choice.of_broadcasts() == "horovod"
    assert carrier_choice.explanation().endswith("by scope(carrier='nccl')")


def test_one_rank_needs_no_nccl(monkeypatch):
    monkeypatch.setenv(carrier_choice.VARIABLE, "nccl")
    join(0, 1, 1)
    assert carrier_choice.in_force() == carrier_choice.of_agreement() == "horovod"
    assert carrier_choice.explanation().endswith(
        "COLLECTIVE_CARRIER=nccl asks for NCCL: there is one rank"
    )


def without_nccl():
    raise OSError("libnccl.so.2: cannot open shared object file")


@pytest.mark.parametrize(
    ("gpus", "here", "functions", "words"),
    [
        ([], 2, None, "TensorFlow sees none: look at nvidia-smi, .* leave the choice to"),
        (["GPU"], 2, without_nccl, r"no NCCL \(libnccl.so.2: .*pip install nvidia-nccl-cu12"),
        (["GPU"], 1, lambda: None, "of one host only, and these ranks are on several: 'horovod'"),
    ],
)
def test_nccl_that_cannot_be_is_an_error_with_the_fix(monkeypatch, gpus, here, functions, words):
    monkeypatch.setattr(tf.config, "list_physical_devices", lambda kind: gpus)
    monkeypatch.setattr(nccl, "_of_nccl", functions)
    monkeypatch.setenv(carrier_choice.VARIABLE, "nccl")
    with pytest.raises(RuntimeError, match=f"^COLLECTIVE_CARRIER=nccl: .*{words}"):
        join(0, 2, here)
    monkeypatch.setenv(carrier_choice.VARIABLE, "horovod")
    monkeypatch.setattr(carrier_choice._meeting, "joined", None)
    join(0, 2, here)
    with pytest.raises(RuntimeError, match=rf"^scope\(carrier='nccl'\): .*{words}"):
        carrier_choice.use("nccl")
    assert carrier_choice.in_force() == "horovod"


def test_a_scope_that_cannot_be_is_not_open():
    """What refuses an option leaves the options in force as they were."""
    stack, refused = ScopeStack(), []

    def changed(options):
        if options is not None and options.carrier == "nccl":
            refused.append(options)
            raise RuntimeError("no GPU")

    stack.connect(lambda: None, lambda: None, changed)
    with pytest.raises(RuntimeError, match="no GPU"):
        stack.enter({"carrier": "nccl"})
    assert refused and not stack.is_open


# ---- Without Horovod


@pytest.fixture
def no_horovod(monkeypatch):
    monkeypatch.setattr(horovod_library, "missing", "No module named 'horovod'")


def test_ranks_of_one_host_need_no_horovod(no_horovod):
    join(0, 2, 2)
    assert carrier_choice.in_force() == carrier_choice.of_agreement() == "shared_memory"


@pytest.mark.parametrize(("missing", "patience"), [("", 30), ("No module", 600)])
def test_ranks_that_horovod_has_not_brought_together_wait_longer(monkeypatch, missing, patience):
    monkeypatch.setattr(horovod_library, "missing", missing)
    waited = []
    monkeypatch.setattr(shared_memory, "share", lambda *arguments: waited.append(arguments[-1]))
    join(0, 2, 2)
    assert waited == [patience]


def test_several_hosts_need_horovod(no_horovod):
    with pytest.raises(ImportError, match="several hosts exchange by Horovod, which isn't inst"):
        join(0, 2, 1)


def test_ranks_that_share_no_memory_need_horovod(no_horovod, monkeypatch):
    monkeypatch.setattr(native_library, "missing", lambda: "there is no library")
    with pytest.raises(ImportError, match=r"can't share memory \(the compiled .* no library\)"):
        join(0, 2, 2)


def test_who_asks_for_horovod_needs_it(no_horovod, monkeypatch):
    join(0, 2, 2)
    with pytest.raises(ImportError, match=r"scope\(carrier='horovod'\) asks for Horovod"):
        carrier_choice.use("horovod")
    monkeypatch.setattr(carrier_choice._meeting, "joined", None)
    monkeypatch.setenv(carrier_choice.VARIABLE, "horovod")
    with pytest.raises(ImportError, match="COLLECTIVE_CARRIER=horovod asks for Horovod"):
        join(0, 2, 2)


def test_one_rank_never_needs_horovod(no_horovod, monkeypatch):
    monkeypatch.setenv(carrier_choice.VARIABLE, "horovod")
    join(0, 1, 1)
    carrier_choice.use("horovod")


def test_gpus_of_one_host_take_nccl_where_there_is_no_horovod(no_horovod, monkeypatch):
    monkeypatch.setattr(tf.config, "list_physical_devices", lambda kind: [kind])
    monkeypatch.setattr(nccl, "problem", lambda: None)
    monkeypatch.setattr(nccl, "start", lambda rank, size: "")
    join(0, 2, 2)
    assert carrier_choice.in_force() == carrier_choice.of_broadcasts() == "nccl"
    assert carrier_choice.of_agreement() == "shared_memory"


def test_a_place_is_read_of_what_the_launcher_says():
    assert Process.of({}) == Process(0, 1, 0, 1)
    said = {"RANK": "3", "SIZE": "4", "LOCAL_RANK": "1", "LOCAL_SIZE": "2"}
    described = {f"HOROVOD_{name}": value for name, value in said.items()}
    assert Process.of(described) == Process(3, 4, 1, 2)
    del described["HOROVOD_LOCAL_RANK"]
    with pytest.raises(ValueError, match="HOROVOD_LOCAL_RANK=None.*Start the job with"):
        Process.of(described)
