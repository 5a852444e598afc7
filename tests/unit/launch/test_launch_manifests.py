"""--emit: manifests that their schemas take, and that run the very command line that was given."""

from __future__ import annotations

import functools
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from collective.job.errors import UsageError
from collective.launch import cli
from collective.launch.cli import emitted, parse_options
from tests.manifest_schemas.checker import complaints, schemas

KINDS = ("trainjob", "mpijob", "slurm", "compose")
# What shells, YAML, Kubernetes and compose would each take for something else.
ODD_WORDS = (
    "--title=two words",
    "",
    "it's",
    'a "quoted" word',
    "$HOME",
    "$(HOME)",
    "$$(HOME)",
    "${HOME}",
    "$$$",
    "`id`",
    "back\\slash\\",
    "two\nlines",
    "tab\t",
    "*",
    "#no comment",
    "- item",
    "key: value",
    "yes",
    "0x1F",
    "1e3",
    "1e-3",
    "y",
    "0o17",
    "{a: b}",
    "&anchor",
    "!tag",
    "%",
    "ARGUMENTS STOPPED CORES PORTS",
    "naïve ☃",
    "; exit 3",
)


def emit(kind: str, *words: str) -> str:
    image = ["--image", "registry/collective:1"] if kind in ("trainjob", "mpijob") else []
    return emitted(parse_options(["--emit", kind, *image, *words]))


def documents(kind: str, *words: str) -> dict[str, Any]:
    return {one["kind"]: one for one in yaml.safe_load_all(emit(kind, *words))}


def trainjob(*words: str) -> dict[str, Any]:
    return documents("trainjob", *words)["TrainJob"]["spec"]


def mpijob(*words: str) -> dict[str, Any]:
    return documents("mpijob", *words)["MPIJob"]["spec"]


def compose(*words: str) -> dict[str, Any]:
    return yaml.safe_load(emit("compose", *words))


def patched_pod(spec: dict[str, Any]) -> dict[str, Any]:
    (patch,) = spec["runtimePatches"]
    (job,) = patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
    assert job["name"] == "node"  # that of the stock runtime
    return job["template"]["spec"]["template"]["spec"]


def directives(text: str) -> dict[str, str]:
    lines = (line for line in text.splitlines() if line.startswith("#SBATCH "))
    return dict(line[len("#SBATCH ") :].partition("=")[::2] for line in lines)


# The command line.


def kubernetes_expands(text: str, variables: dict[str, str]) -> str:
    """Does what Kubernetes does with an argument: $$ is a $, $(NAME) a variable's value."""
    return re.sub(
        r"\$\$|\$\(([^)]*)\)",
        lambda match: "$" if match[0] == "$$" else variables.get(match[1], match[0]),
        text,
    )


def compose_expands(text: str) -> str:
    """Does what compose does with a value: $$ is a $, and $NAME or ${NAME} a variable's value."""

    def value(match: re.Match[str]) -> str:
        if match[0] == "$$":
            return "$"
        raise AssertionError(f"{match[0]} in {text!r} would be replaced, or refused")

    return re.sub(r"\$\$|\$", value, text)


GIVEN = ["-np", "2", "--max-restarts=3", "--grace", "90s", "--device", "cpu", "--tee", "0"]
COMMAND = ["models/train.py", "--emit", "slurm", "--replicas", "3", *ODD_WORDS]


@pytest.fixture(params=[[], ["--"]], ids=["", "--"])
def mixed(request) -> list[str]:
    """Options of the launcher with those of --emit among them."""
    own = [["--replicas", "2"], ["--job-name=x"], ["--env", "A=-np"], ["--env=B=b"]]
    words = [*own[0], *GIVEN[:3], *own[1], *GIVEN[3:5], *own[2], *GIVEN[5:], *own[3]]
    return [*words, *request.param, *COMMAND]


def test_a_trainjob_runs_the_very_command_line(mixed: list[str]):
    trainer = trainjob(*mixed)["trainer"]
    assert trainer["command"] == ["python", "-m", "collective.launch"]
    words = [kubernetes_expands(word, {"HOME": "/root"}) for word in trainer["args"]]
    assert words == [*GIVEN, *COMMAND]


def test_an_mpijob_runs_the_very_command_line(mixed: list[str]):
    launcher = mpijob(*mixed)["mpiReplicaSpecs"]["Launcher"]["template"]["spec"]
    (container,) = launcher["containers"]
    assert container["command"] == ["python", "-m", "collective.launch"]
    words = [kubernetes_expands(word, {"HOME": "/root"}) for word in container["args"]]
    # There -np would be the number of all ranks: the host file has slotsPerWorker instead.
    assert words == [*GIVEN[2:], *COMMAND]


@pytest.mark.parametrize("given", ["-np 2", "-n 2", "-np2", "-n2", "-np=2", "--nproc-per-node=2"])
def test_the_host_file_of_an_mpijob_says_the_ranks_of_each_worker(given: str):
    spec = mpijob(
        "--tee", "0", *given.split(), "--no-python", "-n", "2", "--replicas", "3", "./run"
    )
    assert container(spec["mpiReplicaSpecs"]["Launcher"])["args"] == [
        *"--tee 0 --no-python ./run".split()
    ]
    assert spec["slotsPerWorker"] == 2


def scalars(node: yaml.Node, above: str = "") -> Iterator[tuple[str, yaml.ScalarNode]]:
    """Returns the values of a document as they are written, each with the keys above it."""
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            yield from scalars(value, f"{above}.{key.value}")
    elif isinstance(node, yaml.SequenceNode):
        for value in node.value:
            yield from scalars(value, above)
    else:
        yield above, node


# What YAML 1.1 or 1.2, or the readers of Kubernetes (goyaml.v2) and compose (go-yaml v3), take for
# a number or a boolean, and PyYAML for text.
OTHERS_NUMBERS = ("1e-3", "1.5e5", "1E5", "+.5e3", "0o17", "-0o17", "y", "N", "1_000.5e2")


@pytest.mark.parametrize("kind", ["trainjob", "mpijob", "compose"])
def test_arguments_are_text_for_every_reader_of_yaml(kind: str):
    variables = [f"--env=V{number}={text}" for number, text in enumerate(OTHERS_NUMBERS)]
    text = emit(kind, *variables, "--job-name", "y", "train.py", *OTHERS_NUMBERS)
    values = [one for node in yaml.compose_all(text) for one in scalars(node)]
    for given in OTHERS_NUMBERS:
        written = [(keys, node.style) for keys, node in values if node.value == given]
        assert len(written) >= 2
        assert {style for _, style in written} <= {"'", '"'}, written


@pytest.mark.parametrize("kind", KINDS)
def test_an_argument_that_no_manifest_can_have_is_refused(kind: str):
    word = os.fsdecode(b"--title=\xff")
    for words in (["train.py", word], ["--env", f"A={word}", "train.py"]):
        with pytest.raises(UsageError, match=r"xff' isn't: give the job arguments in UTF-8"):
            emit(kind, *words)


def test_a_script_that_looks_like_an_option_stays_one():
    assert trainjob("--", "-a.py", "--", "b")["trainer"]["args"] == ["--", "-a.py", "--", "b"]
    assert trainjob("-m", "a", "--", "b")["trainer"]["args"] == ["-m", "a", "--", "b"]


def test_compose_runs_the_very_command_line(mixed: list[str]):
    services = compose(*mixed)["services"]
    assert list(services) == ["host-0", "host-1"]
    for service in services.values():
        assert service["entrypoint"] == ["python", "-m", "collective.launch"]
        assert [compose_expands(word) for word in service["command"]] == [*GIVEN, *COMMAND]


@functools.cache
def compose_program() -> tuple[str, ...]:
    """Returns the words that run compose, without a daemon; none where it isn't installed."""
    for words in (("docker", "compose"), ("docker-compose",)):
        if shutil.which(words[0]) is None:
            continue
        if subprocess.run([*words, "version"], capture_output=True).returncode == 0:
            return words
    return ()


def understood_by_compose(text: str, folder: Path) -> dict[str, Any]:
    """Returns what compose itself makes of a file."""
    if not compose_program():
        pytest.skip("there is neither `docker compose` nor docker-compose (Debian: docker-compose)")
    manifest = yaml.safe_load(text)
    if compose_program() == ("docker-compose",):
        manifest.pop("name", None)  # its version 1 takes a name from the command line only
    (folder / "hosts.yaml").write_text(yaml.safe_dump(manifest))
    done = subprocess.run(
        [*compose_program(), "--file", "hosts.yaml", "config"],
        cwd=folder,
        env={"PATH": os.environ["PATH"], "HOME": str(folder), "COLLECTIVE_SECRET": "x" * 32},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return yaml.safe_load(done.stdout)


def test_compose_itself_understands_the_very_command_line(mixed: list[str], tmp_path: Path):
    services = understood_by_compose(emit("compose", *mixed), tmp_path)["services"]
    assert list(services) == ["host-0", "host-1"]
    for service in services.values():
        assert [compose_expands(word) for word in service["command"]] == [*GIVEN, *COMMAND]
        assert service["environment"]["COLLECTIVE_SECRET"] == "x" * 32


@pytest.mark.parametrize("file", ["hosts.yaml", "compose.yaml"])
def test_compose_itself_takes_the_files_of_the_images(file: str, tmp_path: Path):
    text = (Path(__file__).parents[3] / "docker" / file).read_text()
    assert understood_by_compose(text, tmp_path)["services"]


PYTHON = """#!{python}
import json, os, sys
names = ("SLURM_NODEID", "COLLECTIVE_SECRET_FILE", "QUOTED")
with open(os.environ["RECORDS"], "a") as file:
    secret = os.environ["COLLECTIVE_SECRET_FILE"]
    file.write(json.dumps([sys.argv[1:], {{name: os.environ.get(name) for name in names}},
                           open(secret).read(), oct(os.stat(secret).st_mode)]) + "\\n")
"""
SRUN = """#!/bin/bash
while [[ $1 == --* ]]; do shift; done
for node in 0 1; do SLURM_NODEID=$node "$@" || exit; done
"""
SCONTROL = """#!/bin/bash
if [[ $1 == show ]]; then echo first; echo second; else echo "$@" >>"$RECORDS"; fi
"""


@pytest.fixture
def slurm(tmp_path: Path):
    """Returns a function that starts a batch file where srun and scontrol are doubles."""

    def start(text: str, srun: str = SRUN) -> subprocess.Popen[str]:
        programs = tmp_path / "bin"
        programs.mkdir()
        texts = {"python": PYTHON.format(python=sys.executable), "srun": srun, "scontrol": SCONTROL}
        for name, program in texts.items():
            (programs / name).write_text(program)
            (programs / name).chmod(0o755)
        (tmp_path / "job.sbatch").write_text(text)
        return subprocess.Popen(
            ["bash", "job.sbatch"],
            env={
                "PATH": f"{programs}:/usr/bin:/bin",
                "HOME": "/root",
                "RECORDS": str(tmp_path / "records"),
                "SLURM_JOB_ID": "12345",
                "SLURM_JOB_NODELIST": "hosts[0-1]",
                "SLURM_NNODES": "2",
            },
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    return start


def test_slurm_runs_the_very_command_line(mixed: list[str], slurm, tmp_path: Path):
    batch = slurm(emit("slurm", "--env", "QUOTED=it's $HOME", *mixed))
    printed, _ = batch.communicate(timeout=60)
    assert (batch.returncode, printed) == (0, "")
    records = [json.loads(line) for line in (tmp_path / "records").read_text().splitlines()]
    hosts = ["--master-addr", "first", "--master-port", "22345"]
    assert [arguments for arguments, *_ in records] == [
        ["-m", "collective.launch", "--nnodes", "2", "--node-rank", node, *hosts, *GIVEN, *COMMAND]
        for node in "01"
    ]
    assert [variables["QUOTED"] for _, variables, *_ in records] == ["it's $HOME"] * 2
    secrets = {secret for _, _, secret, _ in records}
    assert len(secrets) == 1 and len(secrets.pop().strip()) >= 32
    assert {mode for *_, mode in records} == {"0o100600"}
    assert not (tmp_path / ".secret-12345").exists()  # it ends with the job


WAITING_SRUN = """#!/bin/bash
trap 'echo TERM >>"$RECORDS"; exit {code}' TERM
echo started >>"$RECORDS"
for _ in {{1..600}}; do sleep 0.1; done
"""


@pytest.mark.parametrize(
    "number, code, requeued",
    [
        (signal.SIGUSR1, 143, True),  # the time limit comes
        (signal.SIGTERM, 143, False),  # scancel, or Slurm puts it back by itself
        (signal.SIGUSR1, 1, False),  # it failed meanwhile
    ],
)
def test_a_stopped_job_of_slurm_saves_and_goes_back_to_the_queue(
    number: int, code: int, requeued: bool, slurm, tmp_path: Path
):
    batch = slurm(emit("slurm", "train.py"), WAITING_SRUN.format(code=code))
    records = tmp_path / "records"
    try:
        limit = time.monotonic() + 60
        while not records.exists():
            assert time.monotonic() < limit and batch.poll() is None
            time.sleep(0.02)
        batch.send_signal(number)
        batch.communicate(timeout=60)
    finally:
        batch.kill()
        batch.communicate()
    assert batch.returncode == code
    expected = ["started", "TERM", *(["requeue 12345"] if requeued else [])]
    assert records.read_text().splitlines() == expected


def test_slurm_asks_for_the_hosts():
    text = emit(
        "slurm",
        *shlex.split("--replicas 4 --gpus-per-replica 8 --cpus-per-replica 96"),
        *shlex.split("--memory-per-replica 1Ti --job-name ads --grace 100 train.py"),
    )
    assert directives(text) == {
        "--job-name": "ads",
        "--nodes": "4",
        "--ntasks-per-node": "1",
        "--cpus-per-task": "96",
        "--gpus-per-node": "8",
        "--mem": "1048576M",
        "--output": "%x-%j.out",
        "--open-mode": "append",
        "--requeue": "",
        "--signal": "B:USR1@115",
    }
    assert "--gpus-per-node" not in directives(emit("slurm", "train.py"))


# Schemas.

LINES = (
    "train.py",
    "--replicas 3 --gpus-per-replica 8 --cpus-per-replica 16 --memory-per-replica 512Gi "
    "--max-restarts 5 --grace 10m --env A=1 train.py",
    "--stall-timeout 0 -np 4 --volume ours:/data train.py",
)


@pytest.mark.parametrize("kind", ["trainjob", "mpijob", "compose"])
@pytest.mark.parametrize("line", LINES)
def test_the_schemas_take_a_manifest(kind: str, line: str):
    own = ["--own-runtime"] if kind == "trainjob" else []
    if kind == "compose":
        assert not list(complaints(compose(*line.split()), schemas("compose.yaml")))
        return
    known = schemas("kubernetes.yaml")
    for one in documents(kind, *own, *line.split()).values():
        assert not list(complaints(one, known[one["kind"]]))


@pytest.mark.parametrize(
    "change, words",
    [
        (lambda job: job["spec"]["trainer"].update(numNode=2), ".spec.trainer.numNode is unknown"),
        (lambda job: job["spec"]["trainer"].update(numNodes="2"), "numNodes: '2' is no integer"),
        (lambda job: job["spec"]["trainer"].update(args=[2]), "args[0]: 2 is no string"),
        (lambda job: job["spec"]["trainer"].update(numProcPerNode=0), "0 is below 1"),
        (lambda job: job["spec"].pop("runtimeRef"), ".spec.runtimeRef is missing"),
        (lambda job: job["metadata"].update(name="A"), ".metadata.name: 'A' doesn't match"),
        (lambda job: patched_pod(job["spec"]).update(restartPolicy="Never"), "is unknown"),
        (lambda job: job["spec"]["trainer"].update(resourcesPerNode={"limits": {"cpu": True}}), ""),
    ],
)
def test_the_schemas_refuse_what_is_wrong(change, words: str):
    job = documents("trainjob", "train.py")["TrainJob"]
    change(job)
    (complaint,) = complaints(job, schemas("kubernetes.yaml")["TrainJob"])
    assert words in complaint


# What is asked for.


def test_a_trainjob_runs_on_the_stock_runtime():
    spec = trainjob("--replicas", "3", "--gpus-per-replica", "8", "-np", "4", "train.py")
    assert spec["runtimeRef"] == {"kind": "ClusterTrainingRuntime", "name": "torch-distributed"}
    trainer = spec["trainer"]
    assert (trainer["image"], trainer["numNodes"]) == ("registry/collective:1", 3)
    assert trainer["numProcPerNode"] == 4  # PET_NPROC_PER_NODE
    # The runtime refuses a job that sets what it sets itself.
    assert not [one for one in trainer["env"] if one["name"].startswith("PET_")]


@pytest.mark.parametrize(
    "line, ranks",
    [
        ("", 1),
        ("--gpus-per-replica 8", 8),
        ("--gpus-per-replica 8 -np gpu", 8),
        ("--gpus-per-replica 8 -np 3", 3),
        ("--gpus-per-replica 1 --device cpu", 1),
        ("--gpus-per-replica 1 --device cpu -np 5", 5),
        ("--cpus-per-replica 6 -np cpu", 6),
        ("--cpus-per-replica 6", 1),
        ("-np 5", 5),
    ],
)
def test_ranks_are_counted_as_the_launcher_will_count_them(line: str, ranks: int):
    words = [*line.split(), "train.py"]
    assert trainjob(*words)["trainer"]["numProcPerNode"] == ranks
    assert mpijob(*words)["slotsPerWorker"] == ranks
    (host,) = compose(*words)["services"].values()
    assert host["environment"]["PET_NPROC_PER_NODE"] == str(ranks)


def test_resources_of_a_pod():
    words = "--gpus-per-replica 2 --cpus-per-replica 16 --memory-per-replica 64Gi train.py".split()
    asked = {
        "requests": {"cpu": "16", "memory": "65536Mi", "nvidia.com/gpu": "2"},
        "limits": {"memory": "65536Mi", "nvidia.com/gpu": "2"},
    }
    assert trainjob(*words)["trainer"]["resourcesPerNode"] == asked
    replicas = mpijob(*words)["mpiReplicaSpecs"]
    assert container(replicas["Worker"])["resources"] == asked
    assert container(replicas["Launcher"])["resources"] == {"requests": {"cpu": "1"}}
    assert trainjob("-np", "3", "x.py")["trainer"]["resourcesPerNode"] == {"requests": {"cpu": "3"}}


def container(replicas: dict[str, Any]) -> dict[str, Any]:
    (one,) = replicas["template"]["spec"]["containers"]
    return one


def pods(*words: str) -> list[tuple[dict[str, Any], dict[str, Any], list[dict[str, str]]]]:
    """Returns each kind of pod: its settings, its container, the container's environment."""
    spec = trainjob(*words)
    patch = patched_pod(spec)
    (node,) = patch["containers"]
    found = [(patch, node, spec["trainer"]["env"])]
    for replicas in mpijob(*words)["mpiReplicaSpecs"].values():
        found.append(
            (replicas["template"]["spec"], container(replicas), container(replicas)["env"])
        )
    return found


def test_pods_have_the_volume_the_secret_and_time_to_save():
    """A secret only where no ssh carries it: in the first kind of pod, a TrainJob's."""
    found = pods("--grace", "90.5", "--env", "A=$(B)", "train.py")
    for pod, one, environment in found:
        assert pod["terminationGracePeriodSeconds"] == 91 + 15
        sources = {volume["name"]: volume for volume in pod["volumes"]}
        folders = {mount["mountPath"]: sources[mount["name"]] for mount in one["volumeMounts"]}
        claim = folders["/out"]["persistentVolumeClaim"]["claimName"]
        assert claim == "train-checkpoints"
        assert pod["securityContext"]["fsGroup"] == 1000  # the image's user may read and write
        assert environment[-1] == {"name": "A", "value": "$$(B)"}
        if (pod, one, environment) != found[0]:
            assert len(environment) == 1 and set(folders) == {"/out"}
            continue
        secret = folders["/etc/collective"]["secret"]
        assert secret == {"secretName": "train-secret", "defaultMode": 0o440}
        file = {"name": "COLLECTIVE_SECRET_FILE", "value": "/etc/collective/secret"}
        assert environment[:-1] == [file]
        assert set(folders) == {"/out", "/etc/collective"}


def test_pods_with_gpus_have_shared_memory_for_nccl():
    for pod, one, _ in pods("--gpus-per-replica", "2", "train.py"):
        assert {"name": "shm", "emptyDir": {"medium": "Memory"}} in pod["volumes"]
        assert {"name": "shm", "mountPath": "/dev/shm"} in one["volumeMounts"]


@pytest.mark.parametrize("kind", ["trainjob", "mpijob"])
def test_the_claim_is_printed_unless_it_exists(kind: str):
    claim = documents(kind, "train.py")["PersistentVolumeClaim"]
    assert claim["metadata"]["name"] == "train-checkpoints"
    assert claim["spec"]["accessModes"] == ["ReadWriteMany"]
    assert claim["spec"]["resources"]["requests"]["storage"] == "100Gi"
    assert "PersistentVolumeClaim" not in documents(kind, "--volume", "ours", "train.py")
    sized = documents(kind, "--volume", "new:/data", "--volume-size", "5Gi", "train.py")
    assert sized["PersistentVolumeClaim"]["metadata"]["name"] == "new"


def test_an_own_runtime_has_a_probe_and_the_restarts():
    line = "--own-runtime --max-restarts 4 --grace 45 --stall-timeout 10m --job-name ads train.py"
    printed = documents("trainjob", *line.split())
    assert printed["TrainJob"]["spec"]["runtimeRef"] == {"kind": "TrainingRuntime", "name": "ads"}
    runtime = printed["TrainingRuntime"]
    assert runtime["metadata"]["name"] == "ads"
    assert runtime["spec"]["mlPolicy"]["torch"] == {}  # what sets PET_*
    template = runtime["spec"]["template"]["spec"]
    assert template["failurePolicy"] == {"maxRestarts": 4}
    (job,) = template["replicatedJobs"]
    assert job["name"] == "node" and job["template"]["spec"]["backoffLimit"] == 0
    pod = job["template"]["spec"]["template"]["spec"]
    assert pod["restartPolicy"] == "Never"
    check_patience(pod["containers"][0]["livenessProbe"], 600 + 60)


def check_patience(probe: dict[str, Any], least: int):
    """The launcher's own --stall-timeout has to come first."""
    assert probe["exec"]["command"][1] == "/opt/collective/docker/health_check.py"
    patience = (probe["failureThreshold"] - 1) * probe["periodSeconds"]
    assert least <= patience <= least + probe["periodSeconds"]


def test_workers_of_an_mpijob_are_reached_by_ssh():
    line = "--replicas 3 -np 2 --max-restarts 4 --grace 45 --stall-timeout 10m train.py".split()
    spec = mpijob(*line)
    worker = spec["mpiReplicaSpecs"]["Worker"]
    assert worker["replicas"] == 3
    assert container(worker)["startupProbe"]["tcpSocket"]["port"] == 2222
    assert spec["launcherCreationPolicy"] == "WaitForWorkersReady"
    assert spec["runPolicy"]["backoffLimit"] == 4
    check_patience(container(worker)["livenessProbe"], 600 + 60)
    assert "livenessProbe" not in container(
        mpijob("--stall-timeout", "0", *line[:-3], "x.py")["mpiReplicaSpecs"]["Worker"]
    )


def test_compose_has_hosts_with_gpus_of_their_own():
    line = "--replicas 2 --gpus-per-replica 2 --max-restarts 4 --memory-per-replica 1Gi train.py"
    printed = compose(*line.split())
    hosts = printed["services"]
    assert [host["environment"]["PET_NODE_RANK"] for host in hosts.values()] == ["0", "1"]
    assert {host["environment"]["PET_MASTER_ADDR"] for host in hosts.values()} == {"host-0"}
    assert {host["environment"]["PET_NNODES"] for host in hosts.values()} == {"2"}
    devices = [host["deploy"]["resources"]["reservations"]["devices"] for host in hosts.values()]
    assert [device["device_ids"] for (device,) in devices] == [["0", "1"], ["2", "3"]]
    for host in hosts.values():
        assert host["image"] == "collective:gpu" and host["shm_size"] == "1gb"
        assert host["restart"] == "on-failure:4" and host["stop_grace_period"] == "75s"
        assert host["deploy"]["resources"]["limits"] == {"memory": "1024m"}
        ((name, folder),) = [volume.split(":") for volume in host["volumes"]]
        assert name in printed["volumes"] and folder == "/out"
        assert host["environment"]["COLLECTIVE_SECRET"].startswith("${COLLECTIVE_SECRET:?")
    (host,) = compose("train.py")["services"].values()
    assert host["image"] == "collective:cpu" and "restart" not in host and "deploy" not in host


@pytest.mark.parametrize("kind", KINDS)
def test_no_secret_is_printed(kind: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("COLLECTIVE_SECRET", "do not tell anybody")
    assert "do not tell" not in emit(kind, "train.py")


@pytest.mark.parametrize(
    "command, name",
    [
        ("models/Train_Ads.py", "train-ads"),
        ("-m package.my_model", "my-model"),
        ("python3 -u a/b.py --x c.py", "b"),
        ("--no-python ./run.sh", "run-sh"),
        ("2fast.py", "collective"),
        (f"{'x' * 70}.py", "x" * 40),
    ],
)
def test_a_job_is_named_after_its_script(command: str, name: str):
    assert directives(emit("slurm", *command.split()))["--job-name"] == name


# What is refused.


@pytest.mark.parametrize(
    "line, words",
    [
        ("--emit slurm", "no script given"),
        ("--emit nomad train.py", "invalid choice: 'nomad'"),
        ("--emit slurm --dry-run train.py", "--emit and --dry-run contradict"),
        ("--emit trainjob train.py", "--emit trainjob needs --image: .*collective:cpu"),
        ("--emit trainjob --gpus-per-replica 1 train.py", "collective:gpu"),
        ("--emit mpijob train.py", "collective:mpi"),
        ("--emit compose --image a,b train.py", "--image 'a,b'"),
        ("--emit slurm --image a train.py", "--image is of no use with --emit slurm"),
        ("--emit slurm --volume a train.py", "--volume is of no use"),
        ("--emit slurm --secret a train.py", "--secret is of no use"),
        ("--emit mpijob --image a --secret a train.py", "--secret is of no use"),
        ("--emit compose --volume-size 1Gi train.py", "--volume-size is of no use"),
        ("--emit mpijob --image a --own-runtime train.py", "--own-runtime is of no use"),
        ("--emit slurm --replicas 0 train.py", "--replicas 0: give 1 or more"),
        ("--emit slurm --replicas x train.py", "invalid int value: 'x'"),
        ("--emit slurm --gpus-per-replica -1 train.py", "--gpus-per-replica -1: give 0 or more"),
        ("--emit slurm --cpus-per-replica 0 train.py", "--cpus-per-replica 0: give 1 or more"),
        ("--emit slurm --memory-per-replica 64G train.py", "'64G': .* as 64Gi"),
        ("--emit compose --volume A train.py", "'A' is no volume's name"),
        ("--emit compose --volume a:b train.py", "the folder 'b' isn't a path from the root"),
        ("--emit compose --volume a:/ train.py", "the folder '/'"),
        ("--emit trainjob --image a --volume-size 5 train.py", "--volume-size '5'"),
        ("--emit trainjob --image a --secret A_b train.py", "--secret 'A_b'"),
        ("--emit slurm --job-name Ads train.py", "--job-name 'Ads': give a DNS label"),
        ("--emit slurm --job-name 7 train.py", "--job-name '7'"),
        ("--emit slurm --job-name a- train.py", "--job-name 'a-'"),
        (f"--emit slurm --job-name {'a' * 41} train.py", "40 characters at most"),
        ("--emit slurm --env A train.py", "--env 'A': give NAME=VALUE"),
        ("--emit slurm --env 1=2 train.py", "--env '1=2'"),
        ("--emit slurm --env PET_NNODES=2 train.py", "--env PET_NNODES: the launcher or"),
        ("--emit slurm --env COLLECTIVE_SECRET=2 train.py", "--env COLLECTIVE_SECRET: the"),
        ("--emit slurm -np 0 train.py", "-np 0: give 1 rank or more"),
        ("--emit slurm -np x train.py", "-np x: give a number"),
        ("--emit slurm -np 3 --gpus-per-replica 2 train.py", "-np 3 ranks .* 2: a rank has a GPU"),
        ("--emit slurm -np gpu train.py", "-np gpu .*--gpus-per-replica"),
        ("--emit slurm -np cpu train.py", "-np cpu .*--cpus-per-replica"),
        ("--emit slurm --device gpu train.py", "--device gpu needs GPUs"),
        ("--emit slurm --max-restarts -1 train.py", "--max-restarts -1: give 0 or more"),
        ("--emit slurm --grace -1 train.py", "--grace -1"),
        ("--emit slurm --elastic train.py", "give --max-restarts, too"),
        (
            "--emit slurm --elastic --max-restarts 1 --replicas 2 train.py",
            "--elastic is for jobs of one host",
        ),
        ("--emit slurm --tee 1 train.py", "there is no rank 1"),
        ("--replicas 2 train.py", "--replicas is for --emit: give that, too"),
        ("--own-runtime train.py", "--own-runtime is for --emit"),
    ],
)
def test_what_no_scheduler_takes_is_refused(line: str, words: str, capsys):
    assert cli.main(line.split()) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    (complaint,) = printed.err.splitlines()
    assert complaint.startswith("collective launch: ")
    assert re.search(words, complaint)


@pytest.mark.parametrize(
    "line, option",
    [
        ("--nnodes 2", "--nnodes"),
        ("--nnodes=2", "--nnodes"),
        ("--node_rank 0", "--node-rank"),
        ("--master-addr=h", "--master-addr"),
        ("--master_port 1", "--master-port"),
        ("--standalone", "--standalone"),
        ("-H a,b", "-H"),
        ("-Ha:1,b:1", "-H"),
        ("--host a:1,b:1", "-H"),
        ("--hosts=a", "-H"),
        ("--hostfile hosts", "--hostfile"),
        ("-hostfile hosts", "--hostfile"),
    ],
)
def test_the_scheduler_says_which_hosts_there_are(line: str, option: str):
    with pytest.raises(UsageError, match=f"^{option} with --emit slurm: .*--replicas"):
        emit("slurm", *line.split(), "train.py")


def test_emit_prints_and_starts_nothing(capsys):
    """The script is in the image: nobody looks for it here."""
    line = "--emit compose --replicas 2 /opt/nowhere/train.py --epochs 3".split()
    assert cli.main(line) == 0
    printed = capsys.readouterr()
    assert printed.out == emit("compose", *line[2:]) and printed.err == ""


def test_a_line_that_could_break_out_of_a_name_is_refused():
    with pytest.raises(UsageError, match="--job-name"):
        emit("slurm", "--job-name", "a\n#SBATCH --x", "train.py")
    with pytest.raises(UsageError, match="--image"):
        emit("compose", "--image", "a\nb", "train.py")


# Loaders.

LOADERS = ("--data-loaders", "2", "loader.py --rows '$(A) b'", "--job-name", "ads")


@pytest.mark.parametrize("kind", ["trainjob", "compose"])
def test_loaders_have_containers_and_the_ranks_know_them(kind: str):
    """Each has an address that the ranks have, its number, and the secret."""
    if kind == "compose":
        document = compose(*LOADERS, "-np", "2", "train.py")
        assert not list(complaints(document, schemas("compose.yaml")))
        services = document["services"]
        assert services["host-0"]["command"] == ["-np", "2", "train.py"]
        listed = services["host-0"]["environment"]["COLLECTIVE_LOADERS"]
        assert listed == "loader-0:29600,loader-1:29600"
        for number in range(2):
            loader = services[f"loader-{number}"]
            assert loader["hostname"] == f"loader-{number}"
            command = [compose_expands(word) for word in loader["command"]]
            assert command == ["loader.py", "--rows", "$(A) b"]
            assert loader["environment"]["COLLECTIVE_LOADERS"] == listed
            assert loader["environment"]["COLLECTIVE_LOADER"] == str(number)
        return
    found = documents("trainjob", *LOADERS, "-np", "2", "--env", "A=1", "train.py")
    known = schemas("kubernetes.yaml")
    for one in found.values():
        assert not list(complaints(one, known[one["kind"]]))
    trainer = found["TrainJob"]["spec"]["trainer"]
    assert trainer["args"] == ["-np", "2", "train.py"]
    listed = {"name": "COLLECTIVE_LOADERS"}
    listed["value"] = "ads-loader-0.ads-loader:29600,ads-loader-1.ads-loader:29600"
    assert listed in trainer["env"]
    job, service = found["Job"], found["Service"]
    assert service["metadata"]["name"] == job["metadata"]["name"] == "ads-loader"
    assert service["spec"]["selector"] == {"batch.kubernetes.io/job-name": "ads-loader"}
    assert (job["spec"]["completions"], job["spec"]["completionMode"]) == (2, "Indexed")
    pod = job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert (pod["subdomain"], container["ports"]) == ("ads-loader", [{"containerPort": 29600}])
    command = [kubernetes_expands(word, {"A": "1"}) for word in container["command"]]
    assert command == ["python", "loader.py", "--rows", "$(A) b"]
    assert listed in container["env"] and {"name": "A", "value": "1"} in container["env"]
    (secret,) = [v for v in pod["volumes"] if "secret" in v]
    assert secret["secret"]["secretName"] == "ads-secret"
    variables = [each["name"] for each in container["env"]]
    assert {"COLLECTIVE_LOADER", "COLLECTIVE_SECRET_FILE"} <= set(variables)
    text = emit("trainjob", *LOADERS, "train.py")
    assert "kubectl delete job/ads-loader service/ads-loader" in text


@pytest.mark.parametrize("kind", ["mpijob", "slurm"])
def test_a_scheduler_without_containers_for_loaders_refuses_them(kind: str):
    with pytest.raises(UsageError, match=f"--data-loaders is of no use with --emit {kind}"):
        emit(kind, "--data-loaders", "1", "loader.py", "train.py")
