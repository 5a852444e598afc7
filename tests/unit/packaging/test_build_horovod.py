"""`collective build-horovod` builds as set-up does, and changes Horovod only."""

from __future__ import annotations

import importlib.metadata
import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from collective import build_horovod, horovod_source

ROOT = Path(__file__).resolve().parents[3]
SETUP = (ROOT / "tools" / "setup.sh").read_text(encoding="utf-8")


class Builds:
    """Stands in for the programs that are run: notes them, and makes the files they would make."""

    def __init__(self) -> None:
        self.commands: list[list[str]] = []
        self.environments: list[Mapping[str, str]] = []
        self.seen_packages = ""
        self.is_installed = False

    def run(self, command: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
        self.commands.append(list(command))
        self.environments.append(environment)
        log.touch()
        if "venv" in command:
            packages = Path(command[-1]) / "lib" / "python3.11" / "site-packages"
            packages.mkdir(parents=True)
        elif command[1].endswith("horovod_source.py"):
            environment_folder = Path(command[0]).parents[1]
            (path_file,) = environment_folder.glob("lib/*/site-packages/*.pth")
            self.seen_packages = path_file.read_text()
            folder = Path(command[-1])
            folder.mkdir()
            (folder / "horovod-0.28.1-cp311-cp311-linux_x86_64.whl").touch()
        elif "install" in command and command[-1].endswith(".whl"):
            self.is_installed = True


@pytest.fixture
def builds(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Builds:
    stand_in = Builds()
    monkeypatch.setattr(build_horovod, "run_logged", stand_in.run)
    monkeypatch.setattr(build_horovod, "works", lambda gpu: stand_in.is_installed)
    monkeypatch.setattr(build_horovod.tempfile, "tempdir", str(tmp_path))
    for name in ("HOROVOD_NCCL_HOME", "HOROVOD_CUDA_HOME", "CUDA_HOME", "LDFLAGS", "CXX"):
        monkeypatch.delenv(name, raising=False)
    return stand_in


def test_it_builds_what_set_up_builds():
    assignments = re.search(r"horovod_build=\((.*?)\n\)", SETUP, re.DOTALL).group(1)
    assert dict(re.findall(r"(\w+)=(\S+)", assignments)) == build_horovod.SETTINGS
    for_gpus = re.search(r"horovod_build\+=\((.*?)\n\)", SETUP, re.DOTALL).group(1)
    given = r'(\w+)=(?:"\$\{\1:-(.*?)\}"|(\S+))'
    settings = {name: default or value for name, default, value in re.findall(given, for_gpus)}
    assert settings == build_horovod.GPU_SETTINGS
    pinned = (ROOT / "tools" / "pin.sh").read_text(encoding="utf-8")
    tools = re.search(r"readonly BUILD=\((.*)\)", pinned).group(1)
    assert set(re.findall(r"'(.*?)'", tools)) == {
        build_horovod.HOROVOD,
        *(tool for tool in build_horovod.TOOLS if tool != "packaging"),
    }


def test_it_builds_in_an_environment_of_its_own(builds: Builds, tmp_path: Path):
    assert build_horovod.main([]) == 0
    environment, tools, wheel, install = builds.commands
    assert environment[:3] == [sys.executable, "-m", "venv"]
    python = f"{environment[3]}/bin/python"
    assert tools == [python, "-m", "pip", "install", *build_horovod.TOOLS]
    assert wheel[:3] == [python, horovod_source.__file__, "horovod==0.28.1"]
    assert install[:6] == [python, "-m", "pip", "--python", sys.executable, "install"]
    assert "--no-deps" in install
    settings = builds.environments[2]
    assert build_horovod.SETTINGS.items() <= settings.items()
    assert settings["PATH"].startswith(f"{environment[3]}/bin:")
    assert not Path(environment[3]).exists() and not list(tmp_path.iterdir())


def test_the_environment_sees_the_installed_packages(builds: Builds):
    build_horovod.main([])
    folder = importlib.metadata.distribution("tensorflow").locate_file("")
    assert str(folder) in builds.seen_packages.splitlines()


def test_where_horovod_works_nothing_is_done(builds: Builds, capsys: pytest.CaptureFixture[str]):
    builds.is_installed = True
    assert build_horovod.main([]) == 0
    assert builds.commands == []
    assert "nothing to do" in capsys.readouterr().err


def test_the_wheel_can_be_kept_instead(builds: Builds, tmp_path: Path):
    builds.is_installed = True
    assert build_horovod.main(["--wheel-dir", str(tmp_path / "wheels")]) == 0
    assert [path.name[:8] for path in (tmp_path / "wheels").iterdir()] == ["horovod-"]
    assert not any(command[-1].endswith(".whl") for command in builds.commands)


def test_all_that_is_missing_is_said_at_once(
    builds: Builds, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(build_horovod.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(build_horovod.shutil, "which", lambda name: None)
    assert build_horovod.main([]) == 1
    version = "{}.{}".format(*sys.version_info)
    assert capsys.readouterr().err == (
        "build_horovod: missing: TensorFlow, g++, make, the venv module of Python. To install: "
        f"pip install 'tensorflow>=2.15.1,<2.22'; apt-get install g++ make python{version}-venv\n"
    )
    assert builds.commands == []


def test_for_gpus_it_links_with_the_nccl_of_tensorflow(
    builds: Builds, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    nccl, nvcc = tmp_path / "nvidia" / "nccl", tmp_path / "cuda" / "bin" / "nvcc"
    (nccl / "lib").mkdir(parents=True)
    nvcc.parent.mkdir(parents=True)
    nvcc.write_text("#!/bin/sh\necho Cuda compilation tools, release 12.2, V12.2.140\n")
    nvcc.chmod(0o755)
    monkeypatch.setenv("HOROVOD_CUDA_HOME", str(tmp_path / "cuda"))
    monkeypatch.setattr(build_horovod, "_nccl_folder", lambda: nccl)
    assert build_horovod.main(["--gpu"]) == 0
    settings = builds.environments[2]
    assert settings["HOROVOD_GPU_OPERATIONS"] == "NCCL"
    assert settings["HOROVOD_CUDA_HOME"] == str(tmp_path / "cuda")
    assert settings["LDFLAGS"] == f"-Wl,-rpath,{nccl}/lib"
    assert settings["HOROVOD_NCCL_HOME"] != str(nccl)
    assert settings["PATH"].startswith(f"{nvcc.parent}:"), "it asks the first nvcc there"
    nvcc.write_text("#!/bin/sh\necho release 11.8\n")
    builds.is_installed = False
    assert build_horovod.main(["--gpu"]) == 1


@pytest.mark.parametrize("cuda, compiler", [("12.2", 12), ("12.4", 13), ("12.9", 14)])
def test_a_compiler_that_is_too_new_for_nvcc_is_named(
    builds: Builds,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    cuda: str,
    compiler: int,
):
    """Else nvcc refuses it minutes later, in the middle of the build."""
    for name, said in [("nvcc", f"release {cuda}"), ("g++", f"{compiler + 1}.2.0")]:
        file = tmp_path / "bin" / name
        file.parent.mkdir(exist_ok=True)
        file.write_text(f"#!/bin/sh\necho {said}\n")
        file.chmod(0o755)
    monkeypatch.setenv("HOROVOD_CUDA_HOME", str(tmp_path))
    monkeypatch.setattr(build_horovod, "_nccl_folder", lambda: tmp_path)
    monkeypatch.setenv("CXX", str(tmp_path / "bin" / "g++"))
    assert build_horovod.main(["--gpu"]) == 1 and builds.commands == []
    said = capsys.readouterr().err
    assert f"missing: g++ {compiler} or older, which is what nvcc {cuda} takes" in said
    assert f"{tmp_path}/bin/g++ is {compiler + 1}; CXX= names another" in said
    (tmp_path / "bin" / "g++").write_text(f"#!/bin/sh\necho {compiler}.1\n")
    build_horovod._check_machine(gpu=True)


def test_set_up_takes_the_same_compilers():
    (script,) = re.findall(r"newest=(\d+) found\n(.*?)\n    found=", SETUP, re.DOTALL)
    later = re.findall(r"-lt (\d+) \] \|\| newest=(\d+)", script[1])
    known = [(0, int(script[0])), *((int(first), int(newest)) for first, newest in later)]
    assert known == list(build_horovod.NEWEST_COMPILERS)


def test_a_build_that_fails_shows_the_end_of_its_output(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    log = tmp_path / "log"
    command = [sys.executable, "-c", "print('one'); print('cmake: broken'); raise SystemExit(3)"]
    with pytest.raises(build_horovod.BuildError) as error:
        build_horovod.run_logged(command, dict(os.environ), log)
    assert "    cmake: broken\n" in str(error.value) and str(log) in str(error.value)
