"""Hybrids in GGUF files that llama.cpp's own converter made; `benchmarks/gguf_record.py` ran it."""

from __future__ import annotations

import dataclasses
import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax.checkpoints import load_target
from dflash_jax.checkpoints.table import param_at, table
from dflash_jax.models.target import lm_head
from dflash_jax.training.data.features import run_sequences
from tests.pairs import GOLDEN

CONVERTED = GOLDEN / "llama.cpp"
NAMES = ("qwen3_5", "qwen3_5_moe", "qwen3_next")


@pytest.mark.parametrize("name", NAMES)
def test_what_llama_cpp_converted_is_what_it_was_converted_from(name):
    source, found = load_target(CONVERTED / name), load_target(CONVERTED / f"{name}.gguf")
    # The file's numbers are float32.
    epsilon = float(np.float32(source.config.rms_norm_eps))
    assert found.config == dataclasses.replace(source.config, rms_norm_eps=epsilon)
    for leaf in table(source.config):
        one, other = (np.asarray(param_at(of.params, leaf.path), np.float32) for of in (found, source))
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-6, err_msg=leaf.path)


@pytest.mark.parametrize("name", NAMES)
def test_logits_of_what_llama_cpp_converted_are_those_of_the_source(name):
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 48, (2, 24)), jnp.int32)
    logits = []
    for file in (CONVERTED / name, CONVERTED / f"{name}.gguf"):
        target = load_target(file)
        params = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float32), target.params)
        logits.append(lm_head(params, run_sequences(params, target.config, tokens).hidden))
    assert np.abs(logits[0]).max() > 1
    np.testing.assert_allclose(logits[1], logits[0], rtol=0, atol=2e-4)


def test_llama_cpps_block_of_the_head_that_predicts_several_tokens_is_left_out(caplog):
    with caplog.at_level(logging.WARNING):
        target = load_target(CONVERTED / "qwen3_5.gguf")
    assert target.config.num_layers == 3
    assert sum("the head that predicts several tokens left out" in line for line in caplog.messages) == 1
