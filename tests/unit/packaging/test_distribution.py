"""The distribution is `collective-strategy`: its name, what it requires, and how PyPI shows it."""

from __future__ import annotations

import email
import email.message
import re
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from test_pins import project, pyproject

import collective

ROOT = Path(__file__).resolve().parents[3]
TEXTS = ("*.md", "*.py", "*.sh", "*.toml", "*.txt", "*.yaml", "Makefile", "Dockerfile")
FOLDERS = ("benchmarks", "collective", "docker", "docs", "launch", "modelzoo", "ops", "strategies")
# What pip takes for the other project: the name alone, with extras, a version or a file's ending.
OLD_NAME = re.compile(
    r"pip3? (?:install|download|show)(?: -\S+)* '?collective(?![\w-])"
    r"|\bcollective\[[a-z]"
    r"|\bcollective(?:==|>=|~=)"
    r"|\bcollective-(?:…|\*|[0-9][\w.]*-)\S*\.whl"
)


@pytest.fixture(scope="module")
def metadata(tmp_path_factory: pytest.TempPathFactory) -> email.message.Message:
    folder = tmp_path_factory.mktemp("metadata")
    command = [sys.executable, "setup.py", "-q", "egg_info", "--egg-base", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    (file,) = folder.glob("*/PKG-INFO")
    return email.message_from_string(file.read_text(encoding="utf-8"))


def texts() -> list[Path]:
    places = [ROOT, *(ROOT / name for name in (*FOLDERS, "tools"))]
    found = [path for place in places for text in TEXTS for path in place.glob(text)]
    inside = [path for name in FOLDERS for text in TEXTS for path in (ROOT / name).rglob(text)]
    return sorted({*found, *inside})


@pytest.mark.parametrize(
    "text",
    [
        "pip install 'collective[data]'",
        "pip install collective",
        "pip install -U collective==0.1.0",
        "unneeded_packages.py 'collective[data,gpu]'",
        "dist/collective-*.whl",
        "collective-0.1.0-cp311-cp311-linux_x86_64.whl",
    ],
)
def test_the_other_projects_name_is_recognised(text: str):
    assert OLD_NAME.search(text)


@pytest.mark.parametrize(
    "text", ["pip install 'collective-strategy[data]'", "python -m collective", "collective check"]
)
def test_our_names_are_not_taken_for_it(text: str):
    assert not OLD_NAME.search(text)


def test_nothing_installs_the_other_project():
    lines = [
        f"{path.relative_to(ROOT)}: {line.strip()}"
        for path in texts()
        for line in path.read_text(encoding="utf-8").splitlines()
        if OLD_NAME.search(line)
    ]
    assert not lines


@pytest.mark.slow
def test_metadata_say_whose_it_is_and_where(metadata: email.message.Message):
    assert metadata["Name"] == "collective-strategy"
    assert metadata["Version"] == collective.__version__
    assert metadata["Author"] and metadata["Description-Content-Type"] == "text/markdown"
    urls = dict(line.split(", ") for line in metadata.get_all("Project-URL") or [])
    assert {"Homepage", "Documentation", "Changelog", "Issues"} <= set(urls)
    assert all(url.startswith(urls["Homepage"]) for url in urls.values())


def test_the_shown_readme_has_links_that_hold_everywhere(metadata: email.message.Message):
    payload = metadata.get_payload()
    text = payload if isinstance(payload, str) and payload.strip() else metadata["Description"]
    links = re.findall(r"\]\(([^)\s]+)\)", text)
    assert len(links) > 20 and all(link.startswith("https://") for link in links)
    homepage = project()["urls"]["Homepage"]
    raw = homepage.replace("github.com", "raw.githubusercontent.com")
    for link in links:
        page = re.match(rf"({homepage}/blob|{raw})/v{collective.__version__}/([^#]+)", link)
        assert page and (ROOT / page[2]).is_file(), link


def test_a_python_without_tensorflow_gets_as_far_as_the_sentence_about_python():
    """Build requirements come first: one that isn't to be had hides what the package says."""
    supported = ("3.9", "3.10", "3.11", "3.12", "3.13")
    for text in pyproject()["build-system"]["requires"]:
        requirement = Requirement(text)
        if requirement.name != "setuptools":
            for version in (*supported, "3.8", "3.14"):
                holds = requirement.marker and requirement.marker.evaluate(
                    {"python_version": version, "python_full_version": f"{version}.1"}
                )
                assert bool(holds) == (version in supported), text


def test_an_example_needs_what_the_library_does_not():
    required = {Requirement(text).name for text in project()["dependencies"]}
    assert not required & {"tensorflow-datasets", "tensorflow-metadata", "pyarrow", "horovod"}
    extras = project()["optional-dependencies"]
    assert "tensorflow-datasets" in {Requirement(text).name for text in extras["datasets"]}


def test_pyarrow_is_bounded_wherever_it_comes_from():
    """Later releases import with NumPy 2 only, and say nothing of it in their metadata."""
    brings_pyarrow = {"pyarrow", "tensorflow-datasets"}
    for name, texts_of_extra in project()["optional-dependencies"].items():
        requirements = {each.name: each for each in map(Requirement, texts_of_extra)}
        if brings_pyarrow & set(requirements):
            assert not requirements["pyarrow"].specifier.contains("22.0.0"), name
            assert requirements["pyarrow"].specifier.contains("21.0.0"), name


def test_the_supported_version_is_this_one():
    minor = collective.__version__.rpartition(".")[0]
    assert f"gets fixes: {minor}." in (ROOT / "SECURITY.md").read_text(encoding="utf-8")


def test_the_changelog_has_the_version():
    headings = re.findall(r"^## \[(.+?)\](.*)$", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert headings[0][0] == "Unreleased"
    version, date = headings[1]
    assert version == collective.__version__ and re.fullmatch(r" - \d{4}-\d\d-\d\d", date)
