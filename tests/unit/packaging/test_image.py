"""docker/ agrees with set-up, with the launcher and with itself, as far as reading can tell."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement

from collective.build_horovod import TENSORFLOW as REQUIRED
from collective.launch.cli import emitted, make_plan, parse_options
from tests.image import dockerfile
from tests.image.build_context import BuildContext

ROOT = Path(__file__).resolve().parents[3]
IMAGES = ("cpu", "gpu")
GPU_SETTINGS = "GPU=1 HOROVOD_CUDA_HOME=$(echo /nvidia/cuda-12.*)"
DOCKERFILE = dockerfile.read((ROOT / "docker" / "Dockerfile").read_text(encoding="utf-8"))
CONTEXT = BuildContext(ROOT)


TENSORFLOW = DOCKERFILE.stages["builder"].all("ARG")[0].pairs()["TENSORFLOW"]


def pins(name: str, tensorflow: str = TENSORFLOW) -> dict[str, str]:
    path = ROOT / "tools" / "pins" / f"tensorflow{tensorflow}" / name
    lines = path.read_text(encoding="utf-8").splitlines()
    return dict(line.split("==") for line in lines if not line.startswith("#"))


def commands(image: str) -> list[str]:
    """Returns the RUN commands of an image's packages, its wheel and the image itself."""
    names = (f"{image}-packages", f"{image}-wheel", image)
    return [run.text for name in names for run in DOCKERFILE.stages[name].all("RUN")]


def compose() -> dict:
    return yaml.safe_load((ROOT / "docker" / "compose.yaml").read_text(encoding="utf-8"))


# Pins.


def test_the_tensorflow_of_the_image_is_the_newest():
    newest, *_ = supported()
    assert newest == TENSORFLOW
    (command,) = DOCKERFILE.stages["builder"].all("ENV")
    assert command.pairs()["TENSORFLOW"] == "${TENSORFLOW}"  # set-up and the stages after it see it


def test_the_python_of_the_image_is_one_that_every_tensorflow_has():
    installed = " ".join(run.text for run in DOCKERFILE.stages["base"].all("RUN"))
    (python,) = re.findall(r"\bpython(\d+\.\d+)\b", installed)
    assert all(python in pythons for pythons in supported().values())
    builder = " ".join(run.text for run in DOCKERFILE.stages["builder"].all("RUN"))
    assert f"python{python}-venv" in builder


def supported() -> dict[str, list[str]]:
    """Returns the Pythons of each TensorFlow that set-up installs, the newest first."""
    setup = (ROOT / "tools" / "setup.sh").read_text(encoding="utf-8")
    (listed,) = re.findall(r"^readonly -A PYTHONS=\((.*)\)$", setup, re.M)
    return {name: each.split() for name, each in re.findall(r"\[(.*?)\]='(.*?)'", listed)}


@pytest.mark.parametrize("image", IMAGES)
def test_set_up_alone_chooses_versions(image: str):
    """No package is installed but by set-up's pins, and by the wheel of this checkout."""
    installs = [text for text in commands(image) if "pip install" in text]
    assert len(installs) == 1
    assert "--no-deps" in installs[0] and "--no-index" in installs[0]
    assert any("tools/setup.sh --dependencies" in text for text in commands(image))
    assert not re.search(r"==|~=|>=", " ".join(commands(image)))


def test_the_gpu_image_has_set_ups_cuda_cudnn_and_nccl():
    gpu = pins("gpu.txt")
    release = ".".join(gpu["nvidia-cuda-runtime-cu12"].split(".")[:2])
    assert release == "12.5"
    assert DOCKERFILE.stages["cuda"].parent.startswith(f"nvidia/cuda:{release}.")
    (run,) = (run for run in DOCKERFILE.stages["gpu-packages"].all("RUN") if "setup.sh" in run.text)
    (compiler,) = (mount for mount in run.mounts() if mount.get("from") == "cuda")
    assert compiler["source"] == "/usr/local"
    assert run.text.startswith(f"{GPU_SETTINGS} ")
    assert f"={compiler['target']}/" not in GPU_SETTINGS  # found by its name, of any release
    assert f"(echo {compiler['target']}/cuda-12.*)" in GPU_SETTINGS
    assert "-devel-" in DOCKERFILE.stages["cuda"].parent  # the others have no compiler
    assert gpu["nvidia-cudnn-cu12"].startswith("9.")
    assert gpu["cupy-cuda12x"].startswith("14.")
    assert "nvidia-nccl-cu12" in gpu
    assert not any("GPU=1" in text for text in commands("cpu"))


def test_the_compiler_for_an_older_tensorflow_is_named_where_it_is_asked_for():
    release = ".".join(pins("gpu.txt", "2.15")["nvidia-cuda-runtime-cu12"].split(".")[:2])
    for name in ("Dockerfile", "README.md"):
        text = (ROOT / "docker" / name).read_text(encoding="utf-8")
        (named,) = re.findall(r"--build-arg CUDA=nvidia/cuda:([\d.]+)-devel-", text)
        assert named.startswith(f"{release}.")


def test_both_images_are_built_alike():
    """What was never run, the GPU's image, differs from what is run in as little as can be."""
    extras = ",gpu]' 'tensorflow[and-cuda]'"
    gpu = [text.replace(f"{GPU_SETTINGS} ", "").replace(extras, "]'") for text in commands("gpu")]
    assert gpu == commands("cpu")


def test_serving_is_of_a_supported_release():
    """An export has stock operations: it answers in each of them (test_export_versions.py)."""
    name, _, release = compose()["services"]["serving"]["image"].partition(":")
    assert name == "tensorflow/serving"
    assert Requirement(REQUIRED).specifier.contains(release)


# What a container is.


def test_the_cpu_image_is_the_default():
    last = list(DOCKERFILE.stages.values())[-1]
    assert last.parent == "cpu" and not last.instructions


@pytest.mark.parametrize("image", ["mpi", *IMAGES])
def test_a_container_is_no_roots(image: str):
    uid, gid = DOCKERFILE.last(image, "USER").text.split(":")
    assert int(uid) > 0 and int(gid) > 0  # numbers: Kubernetes knows no names
    stages = DOCKERFILE.lineage(image)
    assert any(f"--uid {uid}" in run.text for stage in stages for run in stage.all("RUN"))
    keywords = [one.keyword for one in DOCKERFILE.stages[image].instructions]
    assert set(keywords[keywords.index("USER", -3) + 1 :]) <= {"WORKDIR", "CMD"}


@pytest.mark.parametrize("image", IMAGES)
def test_a_container_has_an_init_process_and_a_health_check(image: str):
    init, *program = DOCKERFILE.last(image, "ENTRYPOINT").exec_form()
    installed = " ".join(run.text for run in DOCKERFILE.stages["base"].all("RUN"))
    assert init == "tini" and f" {init} " in installed
    assert program == ["--", "/opt/collective/docker/entrypoint.sh"]
    check = DOCKERFILE.last(image, "HEALTHCHECK")
    assert check.flag("interval") and check.flag("timeout")
    assert "health_check.py" in check.text


@pytest.mark.parametrize("image", IMAGES)
def test_an_image_has_no_compiler_and_no_source_of_packages(image: str):
    """They are in the stages before: an image takes from these the environment alone."""
    assert [stage.name for stage in DOCKERFILE.lineage(image)] == ["base", "runtime", image]
    copies = [copy for copy in DOCKERFILE.stages[image].all("COPY") if copy.flag("from")]
    assert [(copy.flag("from"), copy.text) for copy in copies] == [
        (f"{image}-packages", "/opt/collective/.venv .venv")
    ]
    installed = " ".join(
        run.text for stage in DOCKERFILE.lineage(image) for run in stage.all("RUN")
    )
    assert not re.search(r"g\+\+|gcc|build-essential|cmake|-dev\b", installed)


@pytest.mark.parametrize("stage", DOCKERFILE.stages)
def test_layers_hold_no_package_lists_and_no_caches(stage: str):
    for run in DOCKERFILE.stages[stage].all("RUN"):
        if "apt-get" in run.text:
            assert "--no-install-recommends" in run.text
            assert run.text.endswith("rm -rf /var/lib/apt/lists/*")
        if "pip install" in run.text or "pip wheel" in run.text:
            assert "--no-cache-dir" in run.text
        if "setup.sh" in run.text:
            cache = DOCKERFILE.last("builder", "ENV").pairs()["PIP_CACHE_DIR"]
            assert {"type": "cache", "target": cache} in run.mounts()


@pytest.mark.parametrize("image", IMAGES)
def test_without_arguments_the_census_example_is_trained(image: str):
    command = DOCKERFILE.last(image, "CMD").exec_form()
    options = parse_options(in_checkout(command))
    assert options.command == (str(ROOT / "modelzoo" / "census_income" / "train.py"),)
    assert options.ranks == ("2" if image == "cpu" else None)


def in_checkout(words: list[str]) -> list[str]:
    return [word.replace("/opt/collective", str(ROOT)) for word in words]


# The image for the MPI operator.


def test_the_mpi_image_is_another_one_with_ssh():
    """It is built on the CPU's, on the GPU's, or on one of a user's."""
    assert DOCKERFILE.arguments["MPI_FROM"] == DOCKERFILE.stages["mpi"].parent == "cpu"
    installed = " ".join(run.text for run in DOCKERFILE.stages["mpi"].all("RUN"))
    assert "openssh-client openssh-server" in installed
    assert "rm -rf /etc/ssh/ssh_host_*" in installed  # a key in an image is everybody's
    places = dict(
        reversed(copy.text.rsplit(" ", 1)) for copy in DOCKERFILE.stages["mpi"].all("COPY")
    )
    assert places == {
        "/etc/ssh/ssh_config.d/collective.conf": "docker/ssh_config",
        "/opt/collective/docker/": "docker/sshd_config docker/ssh_server.py",
    }


def settings(name: str) -> dict[str, str]:
    lines = (ROOT / "docker" / name).read_text(encoding="utf-8").splitlines()
    pairs = (line.split() for line in lines if line.strip() and not line.startswith("#"))
    return {word: value for word, value in pairs}


def test_a_key_alone_opens_a_worker():
    server, client = settings("sshd_config"), settings("ssh_config")
    assert server["AuthenticationMethods"] == "publickey"
    for word in ("PasswordAuthentication", "KbdInteractiveAuthentication", "PermitRootLogin"):
        assert server[word] == "no"
    assert "HostKey" not in server  # it is made at each start
    assert server["Port"] == client["Port"] == "2222"
    assert int(server["Port"]) > 1024  # the server is no root's


# Manifests for several hosts.


def emits() -> dict[str, list[str]]:
    """Returns the command lines in README.md that print a manifest, by the file that they write."""
    text = (ROOT / "docker" / "README.md").read_text(encoding="utf-8").replace("\\\n", " ")
    lines = re.findall(r"^    collective launch (--emit .*) >(\S+)$", text, re.M)
    return {file: shlex.split(words) for words, file in lines}


def test_every_manifest_has_its_command_line():
    listed = {str(file.relative_to(ROOT)) for file in (ROOT / "docker" / "k8s").iterdir()}
    assert emits().keys() == {*listed, "docker/hosts.yaml"}


@pytest.mark.parametrize("file", emits())
def test_a_manifest_is_what_emit_prints(file: str):
    """After a change: run the command lines of docker/README.md."""
    assert (ROOT / file).read_text(encoding="utf-8") == emitted(parse_options(emits()[file]))


def test_two_containers_are_two_hosts():
    hosts = yaml.safe_load((ROOT / "docker" / "hosts.yaml").read_text(encoding="utf-8"))["services"]
    assert len(hosts) == 2
    for service in hosts.values():
        assert service["image"] == "collective:cpu"
        options = parse_options(in_checkout(service["command"]))
        assert make_plan(options, {"CUDA_VISIBLE_DEVICES": ""}).size == 2
        made = " ".join(run.text for run in DOCKERFILE.stages["runtime"].all("RUN"))
        (volume,) = service["volumes"]
        assert volume.endswith(":/out") and "/out" in made


# What an image is built from.


@pytest.mark.parametrize(
    "path",
    [
        ".venv/bin/python",
        ".venv/lib/python3.11/site-packages/collective/__init__.py",
        ".venvs/3.10/bin/python",
        ".git/config",
        ".mypy_cache/x",
        ".pytest_cache/x",
        ".ruff_cache/x",
        ".hypothesis/x",
        ".env",
        "build/lib/x.py",
        "dist/x.whl",
        "data/census-income/adult.data",
        "checkpoints/model.ckpt-1.index",
        "logs/x",
        "out/x",
        "train.log",
        "tests/conftest.py",
        "collective/__pycache__/strategy.cpython-311.pyc",
        "ops/_native.tensorflow-2.21.0.so",
        "modelzoo/census_income/.pytest_cache/x",
        "collective.egg-info/PKG-INFO",
        "tools/pin.sh",
        "docker/compose.yaml",
    ],
)
def test_the_build_context_leaves_out(path: str):
    assert not CONTEXT.holds(path)


def test_the_build_context_holds_all_of_the_package_and_its_programs():
    listed = ["git", "ls-files", "collective", "launch", "ops", "strategies", "modelzoo"]
    tracked = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True)
    if tracked.returncode:
        pytest.skip(f"no list of the checkout's files: {tracked.stderr}")
    for path in tracked.stdout.splitlines():
        assert CONTEXT.holds(path), path


@pytest.mark.parametrize("stage", DOCKERFILE.stages)
def test_everything_that_is_copied_is_in_the_build_context(stage: str):
    for copy in DOCKERFILE.stages[stage].all("COPY"):
        if copy.flag("from"):
            assert copy.flag("from") in DOCKERFILE.stages
            continue
        *sources, _ = copy.text.split()
        for source in sources:
            assert CONTEXT.files(source), source
    for run in DOCKERFILE.stages[stage].all("RUN"):
        for mount in run.mounts():
            assert mount["type"] in ("bind", "cache", "secret")
            assert mount.get("from", "base") in DOCKERFILE.stages


@pytest.mark.parametrize(
    "patterns, held, left_out",
    [
        ("*\n!a", ["a", "a/b/c"], ["b", "b/a"]),
        ("*\n!a/b\n**/*.so", ["a/b", "a/b/c"], ["a/c", "a/b/x.so", "a/b/c/x.so"]),
        ("**/.*_cache\n# no pattern", ["a_cache"], [".x_cache", "a/.x_cache/b"]),
        ("a/**/c\n!a/b/c/d", ["a/b", "a/b/c/d"], ["a/c", "a/b/c", "a/b/x/c", "a/b/c/e"]),
        ("*.py[cod]", ["a.py", "b/a.pyc"], ["a.pyc"]),
    ],
)
def test_patterns_of_dockerignore(
    tmp_path: Path, patterns: str, held: list[str], left_out: list[str]
):
    (tmp_path / ".dockerignore").write_text(patterns)
    context = BuildContext(tmp_path)
    assert {path: context.holds(path) for path in (*held, *left_out)} == {
        **dict.fromkeys(held, True),
        **dict.fromkeys(left_out, False),
    }


# compose.yaml.


def test_compose_has_the_job_tensorboard_and_serving():
    services = compose()["services"]
    assert set(services) == {"train", "train-gpu", "tensorboard", "serving"}
    for name, target in (("train", "cpu"), ("train-gpu", "gpu")):
        build = services[name]["build"]
        assert build["target"] == target in DOCKERFILE.stages
        assert (ROOT / "docker" / build["context"] / build["dockerfile"]).samefile(
            ROOT / "docker" / "Dockerfile"
        )
        assert services[name]["image"] == f"collective:{target}"
    assert services["tensorboard"]["image"] == "collective:cpu"
    assert services["tensorboard"]["command"][0] == "tensorboard"
    assert any("[data,datasets,serve,tensorboard]" in text for text in commands("cpu"))
    gpus = services["train-gpu"]["deploy"]["resources"]["reservations"]["devices"]
    assert gpus == [{"driver": "nvidia", "count": "all", "capabilities": ["gpu"]}]


@pytest.mark.parametrize("service, ranks", [("train", "2"), ("train-gpu", None)])
def test_the_job_exports_where_serving_looks(
    service: str, ranks: str | None, monkeypatch: pytest.MonkeyPatch
):
    from census_income.options import parse

    monkeypatch.delenv("COLLECTIVE_DATA_DIR", raising=False)
    services = compose()["services"]
    options = parse_options(in_checkout(services[service]["command"]))
    assert options.ranks == ranks
    assert make_plan(options, {"CUDA_VISIBLE_DEVICES": ""}).command[1:] == options.command
    _, *arguments = options.command
    training = parse(arguments)
    serving = services["serving"]["environment"]
    assert training.export_dir == f"{serving['MODEL_BASE_PATH']}/{serving['MODEL_NAME']}"
    assert f"--logdir={training.checkpoint_dir}" in services["tensorboard"]["command"]
    volumes = {name: one["volumes"][0] for name, one in services.items()}
    assert volumes == {
        "train": "out:/out",
        "train-gpu": "out:/out",
        "tensorboard": "out:/out:ro",
        "serving": "out:/out:ro",
    }
    made = " ".join(run.text for run in DOCKERFILE.stages["runtime"].all("RUN"))
    assert "/out" in made  # a new volume gets that folder's rights
