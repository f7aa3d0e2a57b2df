"""What ends a text: what the configs name, less what the vocabulary does not have, else what the tokenizer names."""

import dataclasses
import json
import shutil

import gguf
import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import models as tokenizer_models
from transformers import PreTrainedTokenizerFast

from dflash_jax.checkpoints import describe, load_target
from dflash_jax.engine import Engine, EngineConfig, SamplingParams
from dflash_jax.engine.state import Models
from tests.checkpoints.test_gguf import BASE, LLAMA, write_gguf

CONTROL, NORMAL = gguf.TokenType.CONTROL, gguf.TokenType.NORMAL


@pytest.fixture
def directory(golden, tmp_path):
    """A target of 64 tokens whose configs and tokenizer name the end tokens that are asked for."""

    def make(config=None, generation=None, tokenizer=None, base="recall-target"):
        copy = shutil.copytree(golden / base, tmp_path / "target")
        fields = json.loads((copy / "config.json").read_text())
        del fields["eos_token_id"]
        if config is not None:
            fields["eos_token_id"] = None if config == "null" else config
        (copy / "config.json").write_text(json.dumps(fields))
        (copy / "generation_config.json").write_text(json.dumps({"eos_token_id": generation}))
        if tokenizer is not None:
            vocab = {f"t{index}": index for index in range(fields["vocab_size"] + 4)}
            backend = Backend(tokenizer_models.WordLevel(vocab, unk_token="t0"))
            PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=tokenizer).save_pretrained(copy)
        return copy

    return make


@pytest.mark.parametrize(
    ("config", "generation", "kept"),
    [([62, 64], None, (62,)), (99, None, ()), (10**9, 62, (62,)), ([3, -1], [2**70], (3,)), (None, [99, 5], (5,))],
)
def test_end_tokens_outside_the_vocabulary_are_dropped_with_a_note(directory, caplog, config, generation, kept):
    loaded = load_target(directory(config, generation))
    assert loaded.config.eos_token_ids == kept
    (record,) = caplog.records
    assert "outside the vocabulary of 64 tokens" in record.getMessage()
    assert str(loaded.source / "config.json") in record.getMessage()


def test_end_tokens_outside_the_vocabulary_refuse_no_request(directory):
    loaded = load_target(directory([62, 64]))
    engine = Engine(Models(loaded.params, loaded.config), EngineConfig(max_model_len=32))
    (answer,) = engine.generate([[1, 2, 3]], SamplingParams(max_tokens=3))
    assert answer.error is None


def test_a_bos_outside_the_vocabulary_is_none(directory):
    copy = directory(62)
    fields = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**fields, "bos_token_id": 64}))
    assert load_target(copy).config.bos_token_id is None


@pytest.mark.parametrize("config", [None, "null", []])
def test_the_tokenizers_eos_ends_a_text_when_no_config_names_one(directory, config):
    assert load_target(directory(config, tokenizer="t7")).config.eos_token_ids == (7,)


def test_the_tokenizers_eos_wins_over_a_default_that_no_config_names(directory):
    loaded = load_target(directory(tokenizer="t7", base="tiny-llama-rope3-tied"))
    assert loaded.config.eos_token_ids == (7,)


@pytest.mark.parametrize(("config", "generation"), [(62, None), (None, 62)])
def test_a_config_that_names_an_end_wins_over_the_tokenizer(directory, config, generation):
    assert load_target(directory(config, generation, tokenizer="t7")).config.eos_token_ids == (62,)


@pytest.mark.parametrize("tokenizer", [None, "t66"])
def test_without_any_end_in_the_vocabulary_there_is_none(directory, tokenizer):
    assert load_target(directory(tokenizer=tokenizer)).config.eos_token_ids == ()


def test_only_the_engine_learns_of_the_tokenizers_eos(directory):
    assert describe(directory(tokenizer="t7")).config.eos_token_ids == ()


@pytest.fixture
def gguf_ends(models, tmp_path):
    """The end tokens of a GGUF file with a vocabulary of 24 tokens, some of them special."""

    def ends(special=(), kind=CONTROL, config=LLAMA, **ids):
        special = dict(special)
        tokens = [special.get(index, f"t{index}") for index in range(24)]
        kinds = [kind if index in special else NORMAL for index in range(24)]
        metadata = [("add_tokenizer_model", "llama"), ("add_token_list", tokens), ("add_token_scores", [0.0] * 24)]
        metadata += [("add_token_types", kinds)]
        metadata += [(f"add_{name}_token_id", value) for name, value in ids.items()]
        return load_target(write_gguf(tmp_path / "m.gguf", config, models.params(config), metadata=metadata))

    return ends


def test_gguf_ends_are_its_eos_eot_and_eom(gguf_ends):
    assert gguf_ends(eos=3, eot=4, eom=5).config.eos_token_ids == (3, 4, 5)


@pytest.mark.parametrize("text", ["<|im_end|>", "<|eot_id|>", "<end_of_turn>", "<|end|>", "<|eom_id|>"])
def test_gguf_without_eot_ends_at_well_known_ends_of_turns(gguf_ends, text):
    assert gguf_ends({9: text}, eos=3).config.eos_token_ids == (3, 9)


def test_gguf_with_an_eot_needs_no_well_known_ones(gguf_ends):
    assert gguf_ends({9: "<|im_end|>", 10: "<|end|>"}, eos=3, eot=10).config.eos_token_ids == (3, 10)


def test_gguf_text_that_only_looks_like_an_end_of_turn_is_none(gguf_ends):
    assert gguf_ends({9: "<|im_end|>"}, kind=NORMAL, eos=3).config.eos_token_ids == (3,)


def test_gguf_ids_outside_the_vocabulary_are_dropped_with_a_note(gguf_ends, caplog):
    loaded = gguf_ends(bos=24, eos=99, eot=10**9, pad=77, unk=30)
    assert loaded.config.eos_token_ids == ()
    assert loaded.config.bos_token_id is None
    (record,) = caplog.records
    for part in ("eos_token_id 99", "eot_token_id 1000000000", "bos_token_id 24", str(loaded.source)):
        assert part in record.getMessage()
    assert loaded.tokenizer.decode([1, 2]).replace(" ", "") == "t1t2"


def test_gguf_ids_outside_the_vocabulary_without_a_tokenizer_are_dropped_too(models, tmp_path, caplog):
    config = dataclasses.replace(BASE)
    metadata = [("add_eos_token_id", 99), ("add_bos_token_id", 10**9)]
    loaded = load_target(write_gguf(tmp_path / "m.gguf", config, models.params(config), metadata=metadata))
    assert (loaded.config.eos_token_ids, loaded.config.bos_token_id) == ((), None)
    assert "[99] outside the vocabulary of 24 tokens" in caplog.text
