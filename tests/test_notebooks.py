from __future__ import annotations

import re
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


def test_every_notebook_is_named_in_the_docs_and_the_docs_name_no_other():
    named = re.findall(r"\(\.\./notebooks/([^)]+)\)", (ROOT / "docs" / "analysis.md").read_text())
    assert named == [path.name for path in NOTEBOOKS] and len(named) == 7


@pytest.mark.parametrize("path", NOTEBOOKS, ids=[path.stem for path in NOTEBOOKS])
def test_a_notebook_runs_from_top_to_bottom(path):
    notebook = nbformat.read(path, as_version=4)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert all(cell.get("execution_count") for cell in code), "kept without outputs"
    assert len(code) <= 10 and path.stat().st_size < 300_000, "a page with few cells, and small pictures"
    client = NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(path.parent)}})
    client.execute()
