"""Qwen3 in numpy and float64, without a cache, pages, blocks or JAX: what log-probabilities are checked against."""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file


@functools.cache
def _weights(directory: Path) -> dict[str, np.ndarray]:
    tensors = load_file(directory / "model.safetensors")
    return {name.removeprefix("model."): tensor.astype(np.float64) for name, tensor in tensors.items()}


def full_logprobs(directory: Path, tokens: Sequence[int]) -> np.ndarray:
    """[tokens, vocab]: at each place the log-softmax of the next token's logits, of a dense Qwen3 checkpoint."""
    config, w = json.loads((directory / "config.json").read_text()), _weights(directory)
    heads, groups, dim = config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]
    count = len(tokens)

    def norm(x, name):
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + config["rms_norm_eps"]) * w[f"{name}.weight"]

    frequency = config["rope_parameters"]["rope_theta"] ** (-np.arange(0, dim, 2) / dim)
    angle = np.arange(count)[:, None, None] * frequency

    def rotate(x):
        first, second = np.split(x, 2, axis=-1)
        cos, sin = np.cos(angle), np.sin(angle)
        return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)

    def softmax(x):
        e = np.exp(x - x.max(-1, keepdims=True))
        return e / e.sum(-1, keepdims=True)

    causal = np.tril(np.ones((count, count), bool))
    x = w["embed_tokens.weight"][list(tokens)]
    for layer in range(config["num_hidden_layers"]):
        at = f"layers.{layer}"
        h = norm(x, f"{at}.input_layernorm")
        q, k, v = ((h @ w[f"{at}.self_attn.{name}_proj.weight"].T).reshape(count, -1, dim) for name in ("q", "k", "v"))
        q, k = rotate(norm(q, f"{at}.self_attn.q_norm")), rotate(norm(k, f"{at}.self_attn.k_norm"))
        k, v = (np.repeat(part, heads // groups, axis=1) for part in (k, v))
        scores = np.where(causal, np.einsum("qhd,khd->hqk", q, k) / np.sqrt(dim), -np.inf)
        mixed = np.einsum("hqk,khd->qhd", softmax(scores), v).reshape(count, -1)
        x = x + mixed @ w[f"{at}.self_attn.o_proj.weight"].T
        h = norm(x, f"{at}.post_attention_layernorm")
        gate = h @ w[f"{at}.mlp.gate_proj.weight"].T
        x = x + (gate / (1 + np.exp(-gate)) * (h @ w[f"{at}.mlp.up_proj.weight"].T)) @ w[f"{at}.mlp.down_proj.weight"].T
    return log_softmax(norm(x, "norm") @ w["lm_head.weight"].T)


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """In float64."""
    shifted = logits.astype(np.float64) - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
