"""Messages count in words: '1 table', '2 tables', never '1 tables'."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from collective.ops.counting import counted
from common import counting

ROOT = Path(__file__).resolve().parents[3]
NOUNS = (
    "batches|checks|devices|exchanges|fields|groups|ids|keys|kinds|lines|lookups|machines|members|"
    "offsets|operations|others|params|parts|places|processes|ranks|ratings|rows|samples|seconds|"
    "sections|slots|steps|tables|values|variables|words"
)
PLURAL = rf" ((?!of |updates )[a-z-]+ )?({NOUNS})\b(?!/)"
LINKS = ("collective/launch/", "collective/ops/", "collective/strategies/")
# Numbers that are never 1 where they are said.
NEVER_ONE = {
    "collective/job/hosts.py": "the limit is above one",
    "collective/job/training_apart.py": "there are several ranks",
    "collective/data/same_records.py": "there are several ranks",
    "collective/estimator/input_sharding.py": "there are several ranks",
    "collective/estimator/refusal.py": "there are several ranks",
    "collective/monitoring/input_check.py": "there are several ranks",
    "collective/gradients/accumulation.py": "it accumulates over several batches",
    "collective/run_script.py": "there are several ranks",
    "collective/startup.py": "one of several is said",
    "collective/profiling/report/findings.py": "it is the largest of several ranks, in thousands",
    "collective/profiling/report/step_section.py": "there are more ranks than are shown",
    "collective/profiling/breakdown.py": "several exchanges were put together",
    "ops/communication/hierarchy.py": "each of several hosts has several ranks",
    "modelzoo/common/command_line.py": "one rank divides every batch",
    "modelzoo/census_income/fit.py": "the model and the data have a given size",
    "modelzoo/census_income/train.py": "the model and the data have a given size",
    "modelzoo/census_income/train_estimator.py": "the model and the data have a given size",
    "ops/binding_checks/growing.py": "the checks have many keys",
    "ops/gpu/checks/hash_table.py": "the checks have many keys",
    "ops/gpu/checks/step.py": "the checks have many ids and tables",
    "ops/binding_checks/training.py": "the checks have many steps and tables",
    "ops/gpu/hash_table.py": "hash tables have many slots and rows",
    "ops/gpu/occurrences.py": "it is beyond a limit of 2**31",
    "ops/gpu/segments.py": "it is beyond a limit",
    "ops/gpu_check.py": "the checks have many rules",
}


@pytest.mark.parametrize(
    "number, text", [(0, "0 rows"), (1, "1 row"), (2, "2 rows"), (12000, "12,000 rows")]
)
def test_a_number_with_its_noun(number, text):
    assert counted(number, "row") == text
    assert counting.counted(number, "row") == text.replace(",", "")


def test_a_plural_of_its_own():
    assert (counted(1, "index", "indices"), counted(2, "index", "indices")) == (
        "1 index",
        "2 indices",
    )


def plurals(file: Path) -> Iterator[str]:
    """Yields what follows a number in a file's f-strings, where that is a plural."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if not isinstance(node, ast.JoinedStr):
            continue
        for number, following_text in zip(node.values, node.values[1:]):
            if isinstance(number, ast.FormattedValue) and isinstance(following_text, ast.Constant):
                match = re.match(
                    rf" ((?!of |updates )[a-z-]+ )?({NOUNS})\b(?!/)", str(following_text.value)
                )
                is_counted = ast.unparse(number.value).startswith("counted(")
                if match and not is_counted and number.conversion == -1:
                    yield f"{ast.unparse(number.value)}{match[0]}"


@pytest.mark.slow
def test_no_message_has_a_plural_after_a_number_that_may_be_one():
    found = {}
    for folder in ("collective", "ops", "strategies", "modelzoo"):
        for file in sorted((ROOT / folder).rglob("*.py")):
            path = str(file.relative_to(ROOT))
            is_link = path.startswith(LINKS)
            if not is_link and path not in NEVER_ONE:
                found[path] = list(plurals(file))
    assert {path: texts for path, texts in found.items() if texts} == {}
