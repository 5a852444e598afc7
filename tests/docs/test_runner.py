"""The runner of pages notices what a page says and what doesn't hold."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs import blocks
from tests.docs.session import Session


def test_blocks_are_read_in_their_order():
    page = """\
# A page

<!-- docs: python
x = 1
-->

```python
print(x)
```

```text
1
```

<!-- docs: file a/b.py -->

```python
pass
```

- A list:

  <!-- docs: not run: needs
  two hosts -->
  ```sh
  ssh b
  ```
"""
    assert blocks.read(page) == [
        blocks.Block("python", "x = 1\n", 4),
        blocks.Block("python", "print(x)\n", 8),
        blocks.Block("text", "1\n", 12),
        blocks.Block("file", "pass\n", 18, "a/b.py"),
        blocks.Block("left out", "ssh b\n", 26, "needs two hosts"),
    ]


@pytest.mark.parametrize(
    "page, message",
    [
        ("```\nls\n```\n", "a block in ''"),
        ("```yaml\na: 1\n```\n", "a block in 'yaml'"),
        ("text\n\n    ls\n", "an indented block"),
        ("- a list\n\n      ls\n", "an indented block"),
        ("<!-- docs: file a.py -->\n\n# End\n", "no block follows 'file a.py'"),
        ("<!-- docs: nothing -->\n```sh\nls\n```\n", "nobody knows what 'nothing' means"),
    ],
)
def test_a_block_that_nobody_runs_is_an_error(page: str, message: str):
    with pytest.raises(blocks.PageError, match=message):
        blocks.read(page)


def test_lines_are_looked_for_in_their_order():
    printed = "first   1.25\nsecond\nlast\n"
    assert blocks.missing_output("first …\nlast\n", printed) == []
    assert blocks.missing_output("last\nfirst …\n", printed) == ["first …"]
    assert blocks.missing_output("sec\n", printed) == ["sec"]
    assert blocks.missing_output("…\nfirst 1.2…\n…\n", printed) == []


def shell(tmp_path: Path, page: str) -> None:
    Session("page.md", tmp_path).run(blocks.read(page))


def test_commands_share_a_folder_and_their_output_is_compared(tmp_path: Path):
    saved = "<!-- docs: file a.txt -->\n```text\nhello\n```\n"
    shell(tmp_path, saved + "```sh\ncat a.txt\n```\n```text\nhello\n```\n")
    assert (tmp_path / "work" / "a.txt").read_text() == "hello\n"


@pytest.mark.parametrize(
    "page, message",
    [
        ("```sh\necho 1\n```\n```text\n2\n```\n", "line 5, text:\n    2\n\nisn't printed"),
        ("```sh\necho no; exit 3\n```\n", "line 2, sh:\n    echo no; exit 3\n\nexit code 3\nno"),
        ("```sh\nfalse | cat\n```\n", "exit code 1"),
        ("```text\n2\n```\n", "no block that is run"),
    ],
)
def test_what_does_not_hold_is_named(tmp_path: Path, page: str, message: str):
    with pytest.raises(blocks.PageError) as found:
        shell(tmp_path, page)
    assert message in str(found.value)


@pytest.mark.long
def test_python_runs_on_two_ranks_with_what_came_before(tmp_path: Path):
    page = """\
```python
from collective import CollectiveStrategy

ranks = CollectiveStrategy().world_size()
```

```python
print(ranks, CollectiveStrategy().rank())
```

```text
2 0
2 1
```
"""
    shell(tmp_path, page)
    for name in ("error", "raised", "none"):
        (tmp_path / name).mkdir()
    divided = "```python\n1 / 0\n```\n"
    with pytest.raises(blocks.PageError, match="ZeroDivisionError"):
        shell(tmp_path / "error", divided)
    shell(tmp_path / "raised", "<!-- docs: raises ZeroDivisionError -->\n" + divided)
    with pytest.raises(blocks.PageError, match="instead of KeyError: no error"):
        shell(tmp_path / "none", "<!-- docs: raises KeyError -->\n```python\n1\n```\n")
