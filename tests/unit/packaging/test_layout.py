"""Three top-level folders are sub-packages, imported by their full name only, in one direction."""

from __future__ import annotations

import ast
import collections
import functools
import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
SUBPACKAGES = ("launch", "strategies", "ops")
PROGRAMS = ("tests", "modelzoo", "benchmarks", "docker", "docs", "tools")
MOST_LINES = 600
MOST_FILES = 25  # in a folder
# The layers of the package, from the lowest: a folder or a file of collective/ each. A part imports
# from lower layers only, not even from its neighbours.
LAYERS = (
    ("tensorflow_internals", "version", "yaml_file"),
    ("policy",),
    ("errors", "options"),
    ("job",),
    ("launch",),
    ("build_horovod", "horovod_source"),
    ("testing",),
    ("ops",),
    ("planner",),
    ("strategies",),
    ("scope",),
    ("startup",),
    ("tables",),
    ("embedding_variable",),
    ("feature_column", "features", "group_embedding", "train"),
    ("coordination",),
    ("replication",),
    ("gradients",),
    ("checkpoint", "prefetch"),
    ("data",),
    ("wrappers",),
    ("plan", "serving"),
    ("profiling",),
    ("monitoring",),
    ("estimator", "keras"),
    ("integrations",),
    ("interception",),
    ("strategy",),
    ("trainer",),
    ("inference",),
    ("compat",),
    ("run_script",),
    ("__main__",),
    ("__init__",),
)


def modules(folder: str) -> Iterator[tuple[str, Path]]:
    """Yields the name and file of each module under a top-level folder, links not followed."""
    package = f"collective.{folder}" if folder in SUBPACKAGES else folder
    for directory, _, files in os.walk(ROOT / folder):
        inner = Path(directory).relative_to(ROOT / folder).parts
        for file in sorted(files):
            if file.endswith(".py"):
                yield ".".join((package, *inner, file[: -len(".py")])), Path(directory) / file


def imported(name: str, file: Path) -> set[str]:
    """Returns the full names that a module imports; `from package import it` is `package.it`."""
    names = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"), str(file))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            package = importlib.util.resolve_name(
                "." * node.level + (node.module or ""), name.rpartition(".")[0]
            )
            names |= {f"{package}.{alias.name}" for alias in node.names}
    return names


def within(name: str, packages: tuple[str, ...]) -> bool:
    return any(name == package or name.startswith(f"{package}.") for package in packages)


@functools.cache
def package_modules() -> dict[str, Path]:
    """Returns the files of all modules of the package, by their names."""
    files = dict(pair for folder in ("collective", *SUBPACKAGES) for pair in modules(folder))
    return {name.removesuffix(".__init__"): file for name, file in files.items()}


def imported_modules(name: str, file: Path) -> set[str]:
    """Returns the modules of the package that a module imports, without itself."""
    known = package_modules()
    package = f"{name}.__init__" if file.name == "__init__.py" else name
    found = set()
    for imported_name in imported(package, file):
        while imported_name not in known and "." in imported_name:
            imported_name = imported_name.rpartition(".")[0]
        found.add(imported_name)
    return {other for other in found if other in known} - {name}


def part(name: str) -> str:
    """Returns the part of the package, a folder or a file, that a module belongs to."""
    return name.split(".")[1] if "." in name else "__init__"


def circles(arrows: dict[str, set[str]]) -> Iterator[list[str]]:
    """Yields paths along arrows that end where they began."""
    done: set[str] = set()

    def visit(name: str, path: tuple[str, ...]) -> Iterator[list[str]]:
        if name in path:
            yield [*path[path.index(name) :], name]
        elif name not in done:
            for other in sorted(arrows[name]):
                yield from visit(other, (*path, name))
            done.add(name)

    for name in sorted(arrows):
        yield from visit(name, ())


@pytest.mark.parametrize("folder", SUBPACKAGES)
def test_the_package_holds_a_relative_link_to_the_top_level_folder(folder: str):
    assert os.readlink(ROOT / "collective" / folder) == f"../{folder}"
    assert (ROOT / folder / "__init__.py").is_file(), f"{folder}/ is no package"


@pytest.mark.slow
@pytest.mark.parametrize("folder", ("collective", *SUBPACKAGES, *PROGRAMS))
def test_sub_packages_are_imported_by_their_full_name(folder: str):
    """A plain `import ops` loads the module a second time: two copies of its state."""
    plain = {
        str(file.relative_to(ROOT)): sorted(names)
        for name, file in modules(folder)
        if (names := {n for n in imported(name, file) if within(n, SUBPACKAGES)})
    }
    assert not plain, f"write collective.ops for ops, and so on: {plain}"


@pytest.mark.slow
def test_imports_point_down():
    """A module may import from its own folder, and from layers below: also inside functions."""
    layer_of = {member: i for i, layer in enumerate(LAYERS) for member in layer}
    upward = [
        f"{file.relative_to(ROOT)} imports {other}"
        for name, file in package_modules().items()
        for other in sorted(imported_modules(name, file))
        if part(name) != part(other) and layer_of[part(other)] >= layer_of[part(name)]
    ]
    assert not upward, "\n".join(["only layers below may be imported:", *upward])


@pytest.mark.slow(always=True)
def test_folders_inside_a_folder_do_not_import_each_other():
    """In a folder that has folders, these and its own files form no circle either."""
    imports = {name: imported_modules(name, file) for name, file in package_modules().items()}
    for folder in sorted({name.rpartition(".")[0] for name in imports if name.count(".") > 1}):
        inside = {name for name in imports if name.startswith(f"{folder}.")}
        parts = {name: name[len(folder) + 1 :].split(".")[0] for name in inside}
        arrows: dict[str, set[str]] = {part: set() for part in parts.values()}
        for name in inside:
            found = {parts[other] for other in imports[name] & inside}
            arrows[parts[name]] |= found - {parts[name]}
        circle = next(iter(circles(arrows)), [])
        assert not circle, f"{folder}: {' -> '.join(circle)}"


@pytest.mark.slow
def test_no_modules_import_each_other():
    """There is no circle of imports, within a folder or beyond, for types only or in functions."""
    imports = {name: imported_modules(name, file) for name, file in package_modules().items()}
    circle = next(circles(imports), [])
    assert not circle, f"a circle: {' -> '.join(circle)}"


def test_the_architecture_page_lists_these_layers():
    """docs/architecture.md has a row for each layer, the highest first."""
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    rows = page.partition("| layer |")[2].partition("\n\n")[0].splitlines()[2:]
    listed = [set(re.findall(r"`([a-z0-9_]+)(?:/|\.py)`", row.split("|")[1])) for row in rows]
    programs, *parts = listed
    assert programs == {"modelzoo", "benchmarks"}
    assert parts == [set(layer) for layer in reversed(LAYERS) if layer != ("__init__",)]


@pytest.mark.parametrize(
    "name",
    [
        "collective",
        "collective.__main__",
        "collective.launch",
        "collective.launch.__main__",
        "collective.profiling.report.__main__",
    ],
)
def test_tensorflow_is_not_loaded_on_import(name: str):
    program = f'import sys, {name}; print(*sorted({{"tensorflow", "horovod"}} & set(sys.modules)))'
    loaded = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, check=True, capture_output=True, text=True
    )
    assert loaded.stdout.split() == []


@pytest.mark.parametrize("folder", ("collective", *SUBPACKAGES, "modelzoo", "benchmarks"))
def test_no_module_is_long(folder: str):
    lines = {
        str(file.relative_to(ROOT)): len(file.read_text(encoding="utf-8").splitlines())
        for _, file in modules(folder)
    }
    assert not {file: count for file, count in lines.items() if count > MOST_LINES}


def test_no_file_of_cpp_is_long():
    lines = {
        str(file.relative_to(ROOT)): len(file.read_text(encoding="utf-8").splitlines())
        for kind in ("*.cc", "*.h", "*.cu", "*.cuh")
        for file in (ROOT / "ops").rglob(kind)
    }
    assert len(lines) > 50
    assert not {file: count for file, count in lines.items() if count > MOST_LINES}


def test_no_folder_is_full():
    counts = collections.Counter(
        str(file.parent.relative_to(ROOT)) for file in package_modules().values()
    )
    assert not {folder: count for folder, count in counts.items() if count > MOST_FILES}


# Short modules whose only importer lies next to them, each with what speaks for a file of its own.
SHORT_MODULES = {
    "collective.checkpoint.files.bundle_writer": "only imports make bundles of bare numbers",
    "collective.coordination.hash_seed": "is about Python, not about meetings",
    "collective.data.permutation": "is a published algorithm",
    "collective.data.streams.stream_order": "is a pure function with a truth of its own",
    "collective.estimator.prediction": "gathers predictions; the Estimator trains and evaluates",
    "collective.gradients.part_functions": "alone looks into functions",
    "collective.inference.server.request_metrics": "is about Prometheus, not about answers",
    "collective.interception.determinism": "is an option of its own",
    "collective.interception.distribution_patches": "is about replicas, which are ranks here",
    "collective.interception.horovod_patches": "is about Horovod, which may be missing",
    "collective.interception.loss_patches": "is about losses; the list of all is long enough",
    "collective.launch.command_line.short_help": "is a text for people",
    "collective.launch.output.output_tail": "is a data structure with tests of its own",
    "collective.launch.output.progress_bars": "is about programs that draw bars",
    "collective.monitoring.storage_limit": "is a check of its own",
    "collective.ops.gpu.checks.pytorch": "needs PyTorch",
    "collective.tables.rows.whole_values": "is about locks and constants, not about numbers",
    "collective.tensorflow_internals.estimator_gaps": "runs before what it fills can be imported",
    "collective.ops.gpu.compiled_launches": "names the sources of compiled operations",
    "collective.ops.gpu.reference.owners": "is the reference of one kernel function",
    "collective.ops.communication.mixed_carrier": "is a carrier",
    "collective.ops.communication.nccl_carrier": "is a carrier",
    "collective.profiling.history": "keeps points over time; the writer writes files",
    "collective.profiling.summaries": "writes TensorBoard's format",
    "collective.profiling.table_counter": "counts keys of tables",
    "collective.serving.unfinished": "is about exports that were cut off",
    "collective.trainer.metrics_file": "writes a format that others read",
    "collective.trainer.progress_bar": "is about terminals",
}
FEWEST_LINES = 80


@pytest.mark.slow
def test_no_module_is_a_cut_off():
    """A short module that only its neighbour imports belongs into that, or has a reason."""
    modules_ = package_modules()
    importers: dict[str, set[str]] = {name: set() for name in modules_}
    for name, file in modules_.items():
        for other in imported_modules(name, file):
            importers[other].add(name)
    short = {
        name
        for name, file in modules_.items()
        if not file.name.startswith("__")
        and len(file.read_text(encoding="utf-8").splitlines()) < FEWEST_LINES
        and [other.rpartition(".")[0] for other in importers[name]] == [name.rpartition(".")[0]]
    }
    assert short == set(SHORT_MODULES)


def test_only_commands_import_the_launcher():
    """The library and the launcher share what `job/` has, and nothing else."""
    importers = {
        name
        for name in package_modules()
        if any(
            within(other, ("collective.launch",))
            for other in imported_modules(name, package_modules()[name])
        )
    }
    outside = {name for name in importers if not within(name, ("collective.launch",))}
    assert outside <= {"collective.__main__"}


PRIVATE = ("tensorflow.python", "tensorflow.core", "tensorflow_estimator", "keras")
MOST_PRIVATE = 12


@pytest.mark.slow
def test_private_modules_of_tensorflow_are_imported_in_one_place():
    """Another TensorFlow is then a matter of these modules."""
    importers = {
        name
        for name, file in package_modules().items()
        if any(within(other, PRIVATE) for other in imported(name, file))
    }
    assert {name.rpartition(".")[0] for name in importers} == {"collective.tensorflow_internals"}
    assert len(importers) <= MOST_PRIVATE
