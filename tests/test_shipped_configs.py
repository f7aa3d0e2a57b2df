"""Every configuration in the repository runs as it stands, on models and counts that a test can pay for."""

from __future__ import annotations

import dataclasses
import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from dflash_jax import cli
from dflash_jax.checkpoints import save_draft, save_target
from dflash_jax.checkpoints.shortlist import write_shortlist
from dflash_jax.settings import read_settings
from tests.checkpoints.conftest import DFLASH2, QWEN3, random_params
from tests.checkpoints.test_tokenizer import byte_level
from tests.training.recall import write_data

# A recipe's base is no run: its stages extend it.
RECIPES = (file for file in Path("drafters").glob("*/recipe/*.yaml") if file.name != "base.yaml")
CONFIGS = sorted([*Path("configs").glob("*.yaml"), *RECIPES])
TARGET = dataclasses.replace(QWEN3, vocab_size=260, eos_token_ids=(257,), max_position=4096)
DRAFT = dataclasses.replace(DFLASH2, vocab_size=260, mask_token_id=259, num_target_layers=2)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Path:
    """A pair that has learnt nothing, with a tokenizer of bytes, and sequences for training."""
    directory = tmp_path_factory.mktemp("tiny")
    save_target(directory / "target", TARGET, random_params(TARGET))
    byte_level().save_pretrained(directory / "target")
    save_draft(directory / "draft", DRAFT, random_params(DRAFT))
    write_shortlist(directory / "shortlist.json", range(0, 260, 2))
    write_data(directory / "sequences")
    return directory


def changed(fields: dict[str, Any], section: str, **values: Any) -> None:
    """Overrides what a section says already."""
    if section in fields:
        fields[section] |= {name: value for name, value in values.items() if name in fields[section]}


def of_a_job(fields: dict[str, Any], tiny: Path, tmp: Path) -> list[str]:
    with open(fields["input"]["path"], encoding="utf-8") as lines:
        (tmp / "prompts.jsonl").write_text("".join(itertools.islice(lines, 2)))
    fields["target"] = {"path": str(tiny / "target")}
    changed(fields, "draft", path=str(tiny / "draft"), shortlist=str(tiny / "shortlist.json"))
    fields["engine"] |= {"max_slots": 2, "max_model_len": 2048}
    fields["sampling"]["max_tokens"] = 4
    fields["input"]["path"], fields["output"]["path"] = str(tmp / "prompts.jsonl"), str(tmp / "out.jsonl")
    changed(fields, "report", compare_requests=1)
    return ["generate"]


def of_a_corpus(fields: dict[str, Any], tiny: Path, tmp: Path) -> list[str]:
    fields["target"] = {"path": str(tiny / "target")}
    fields["engine"] |= {"max_slots": 2, "max_model_len": 4096}
    # Hot enough that one token in 260 ends a message.
    fields |= {"output": str(tmp / "corpus.jsonl"), "conversations": 6, "answer_tokens": 8}
    if "instructions" not in fields and "prompts" not in fields:
        fields |= {"question_temperature": 50.0, "question_min_p": 0.0, "question_tokens": 400}
    return ["data", "generate"]


def of_a_run(fields: dict[str, Any], tiny: Path, tmp: Path) -> list[str]:
    fields["output"] = str(tmp / "run")
    if "pretrain" in fields:
        fields["target"] = str(tmp / "target")
        sizes = {"hidden_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}
        changed(fields["pretrain"], "shape", **sizes, intermediate_size=32)
        changed(fields["pretrain"], "optimiser", steps=2, sequences=2)
        changed(fields["data"], "rule", sequences=64, length=64)
        fields["data"]["path"] = str(tmp / "sequences")
    else:
        fields["target"] = str(tiny / "target")
        fields["data"]["path"] = str(tiny / "sequences")
        changed(fields, "draft", path=str(tiny / "draft"), mask_token_id=259, target_layer_ids=[0, 1])
    changed(fields, "draft", num_layers=1, intermediate_size=16, selector_rank=8, selector_top_k=4)
    changed(fields, "data", max_length=64, held_out=0.2, features=str(tmp / "features"))
    changed(fields, "loss", frequent=16, drawn=8)
    changed(fields, "optimiser", steps=2, sequences=2, anchors=4, accumulate=1)
    changed(fields, "checkpoint", every=2)
    changed(fields, "evaluation", every=2, sequences=2, anchors=4, engine_every=2, engine_prompts=1, engine_tokens=4)
    return ["train"]


def shrunk(fields: dict[str, Any], tiny: Path, tmp: Path) -> list[str]:
    """Edits a configuration and returns the command it is for."""
    if "input" in fields:
        return of_a_job(fields, tiny, tmp)
    return of_a_corpus(fields, tiny, tmp) if "conversations" in fields else of_a_run(fields, tiny, tmp)


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_a_shipped_config_runs(config, tiny, tmp_path):
    fields = read_settings(str(config))
    command = shrunk(fields, tiny, tmp_path)
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(fields))
    cli.app([*command, str(tmp_path / "config.yaml")], standalone_mode=False)
    match command:
        case ["generate"]:
            rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
            assert len(rows) == 2 and all("error" not in row or row["error"] is None for row in rows)
        case ["data", "generate"]:
            assert (tmp_path / "corpus.jsonl").read_text().strip()
        case ["train"]:
            assert any((tmp_path / "run").rglob("model.safetensors"))


def test_there_are_configs():
    assert len(CONFIGS) > 5
