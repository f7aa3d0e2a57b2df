"""The Python in the documentation runs as it is written."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("page", ["python-api.md"])
def test_the_python_of_a_page_runs_from_top_to_bottom(page, tmp_path, monkeypatch, capsys):
    for name in ("tests", "configs"):
        (tmp_path / name).symlink_to(ROOT / name)
    monkeypatch.chdir(tmp_path)
    text = (ROOT / "docs" / page).read_text()
    names: dict = {"__name__": "__main__"}
    blocks = list(re.finditer(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE))
    assert blocks
    for block in blocks:
        line = text[: block.start()].count("\n") + 1
        # With the page's line numbers, so that what fails is found.
        exec(compile("\n" * line + block[1], f"docs/{page}", "exec"), names)
