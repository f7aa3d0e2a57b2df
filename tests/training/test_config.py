"""docs/training-config.md has every key, with the default that the program has."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from dflash_jax.training.config import PretrainSection, TrainConfig
from dflash_jax.training.corpora.config import CorpusConfig

TEXT = (Path(__file__).parents[2] / "docs" / "training-config.md").read_text()
BLOCKS = [yaml.safe_load(block) for block in re.findall(r"```yaml\n(.*?)```", TEXT, re.DOTALL)]
NEEDED = "..."


def schema(model, found) -> dict:
    """What the docs should say about a model, as deep as they go into it."""
    expected = {}
    for name, field in model.model_fields.items():
        said = found.get(name)
        if field.is_required():
            inner = field.annotation
            deeper = isinstance(said, dict) and hasattr(inner, "model_fields")
            expected[name] = schema(inner, said) if deeper else NEEDED
        elif hasattr(field.default, "model_dump"):
            expected[name] = field.default.model_dump(exclude_unset=model is CorpusConfig)
        else:
            expected[name] = list(field.default) if isinstance(field.default, tuple) else field.default
    return expected


@pytest.mark.parametrize(("model", "number"), [(TrainConfig, 0), (PretrainSection, 1), (CorpusConfig, 2)])
def test_the_docs_have_every_key_and_its_default(model, number):
    found = BLOCKS[number]
    if model is CorpusConfig:
        assert found["target"] == {"path": NEEDED}
        found = {**found, "target": NEEDED}
    assert found == schema(model, found)
