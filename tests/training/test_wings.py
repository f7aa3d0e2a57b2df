"""The wings of dflash_jax/training: what may import what."""

from __future__ import annotations

import ast
import graphlib
from pathlib import Path

import dflash_jax.training

ROOT = Path(dflash_jax.training.__file__).parent
PACKAGE = "dflash_jax.training."


def wing_imports() -> dict[str, set[str]]:
    """For each wing, and each module beside the wings, those that it imports from."""
    graph: dict[str, set[str]] = {}
    for file in ROOT.rglob("*.py"):
        wing = file.relative_to(ROOT).parts[0].removesuffix(".py")
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(PACKAGE):
                graph.setdefault(wing, set()).add(node.module.removeprefix(PACKAGE).split(".")[0])
    return {wing: others - {wing} for wing, others in graph.items() if wing != "__init__"}


def test_imports_between_wings_have_no_cycle():
    graphlib.TopologicalSorter(wing_imports()).prepare()


def test_nothing_below_a_run_knows_of_runs_and_training_does_not_need_corpora():
    graph = wing_imports()
    assert {wing for wing, others in graph.items() if "run" in others} == set()
    assert {wing for wing, others in graph.items() if "corpora" in others} == set()
