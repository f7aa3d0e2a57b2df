"""Every mutant can still be applied, and its gate is still there; `python -m tests.mutants.run` shows them red."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.mutants.mutants import MUTANTS, Mutant
from tests.mutants.run import apply, copy_package

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: f"{mutant.name}, {mutant.gate.split('::')[1]}")
def test_a_mutant_can_be_applied_and_its_gate_is_there(mutant: Mutant, tmp_path):
    copy_package(tmp_path)
    apply(mutant, tmp_path)
    file, _, test = mutant.gate.partition("::")
    functions = {
        node.name for node in ast.walk(ast.parse((ROOT / file).read_text())) if isinstance(node, ast.FunctionDef)
    }
    classes = {node.name for node in ast.walk(ast.parse((ROOT / file).read_text())) if isinstance(node, ast.ClassDef)}
    assert test.partition("[")[0].split("::")[0] in functions | classes
