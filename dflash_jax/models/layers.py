"""The parts both models are made of, as pure functions of weights.

Norms, softmax and rotary angles are computed in float32 whatever the weights' dtype, as the
reference implementations (transformers' Qwen3 and Llama) do.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from dflash_jax.kernels.dispatch import Implementation
from dflash_jax.kernels.experts import mix_experts
from dflash_jax.models.config import MoeConfig, RopeConfig, TransformerConfig
from dflash_jax.models.weights import AttentionWeights, Linear, MlpWeights, MoeWeights


def linear(x: Float[Array, "*batch inputs"], weights: Linear) -> Float[Array, "*batch outputs"]:
    """x @ weight + bias."""
    y = x @ weights.weight
    return y if weights.bias is None else y + weights.bias


def rms_norm(
    x: Float[Array, "*batch channels"], weight: Float[Array, " channels"], eps: float
) -> Float[Array, "*batch channels"]:
    """RMSNorm over the last axis (arXiv 1910.07467)."""
    return weight * _normalised(x, eps).astype(x.dtype)


def norm(
    x: Float[Array, "*batch channels"], weight: Float[Array, " channels"], config: TransformerConfig
) -> Float[Array, "*batch channels"]:
    """RMSNorm as the model has it."""
    if not config.zero_centred_norms:
        return rms_norm(x, weight, config.rms_norm_eps)
    return (_normalised(x, config.rms_norm_eps) * (1.0 + weight.astype(jnp.float32))).astype(x.dtype)


def _normalised(x: Float[Array, "*batch channels"], eps: float) -> Float[Array, "*batch channels"]:
    """In float32."""
    x32 = x.astype(jnp.float32)
    return x32 * jax.lax.rsqrt(jnp.mean(jnp.square(x32), axis=-1, keepdims=True) + eps)


def inverse_wavelengths(rope: RopeConfig, head_dim: int) -> np.ndarray:
    """Radians per position of each rotary pair, float32 [half as many as channels that turn].

    Follows transformers' `modeling_rope_utils.py`; "llama3" is Llama 3.1's band interpolation and
    "yarn" is arXiv 2309.00071.
    """
    head_dim = rope.rotated(head_dim)
    exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    plain = (1.0 / np.power(np.float32(rope.theta), exponents)).astype(np.float32)
    match rope.kind:
        case "default":
            return plain
        case "linear":
            return plain / np.float32(rope.factor)
        case "llama3":
            rotations = rope.original_max_position * plain / np.float32(2 * math.pi)
            keep = (rotations - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
            keep = np.clip(keep, 0.0, 1.0)
        case "yarn":
            low, high = (
                head_dim * math.log(rope.original_max_position / (beta * 2 * math.pi)) / (2 * math.log(rope.theta))
                for beta in (rope.beta_fast, rope.beta_slow)
            )
            low, high = max(math.floor(low), 0), min(math.ceil(high), head_dim - 1)
            pairs = np.arange(head_dim // 2, dtype=np.float32)
            keep = 1.0 - np.clip((pairs - low) / max(high - low, 1e-3), 0.0, 1.0)
    return (plain * keep + plain / rope.factor * (1.0 - keep)).astype(np.float32)


def apply_rope(
    x: Float[Array, "rows tokens heads head_dim"], positions: Int[Array, "rows tokens"], rope: RopeConfig
) -> Float[Array, "rows tokens heads head_dim"]:
    """Rotates pairs (i, i + rotated / 2) of each head by its position (Hugging Face's half-split layout)."""
    rotated = rope.rotated(x.shape[-1])
    angles = positions[..., None, None].astype(jnp.float32) * inverse_wavelengths(rope, x.shape[-1])
    cos = (jnp.cos(angles) * rope.attention_factor).astype(x.dtype)
    sin = (jnp.sin(angles) * rope.attention_factor).astype(x.dtype)
    first, second, rest = jnp.split(x, [rotated // 2, rotated], axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin, rest], axis=-1)


def project_q(
    x: Float[Array, "rows tokens hidden"],
    positions: Int[Array, "rows tokens"],
    weights: AttentionWeights,
    config: TransformerConfig,
) -> Float[Array, "rows tokens heads head_dim"]:
    """Queries, normalised per head where the model does, rotated."""
    return project_gated_q(x, positions, weights, config)[0]


def project_gated_q(
    x: Float[Array, "rows tokens hidden"],
    positions: Int[Array, "rows tokens"],
    weights: AttentionWeights,
    config: TransformerConfig,
) -> tuple[Float[Array, "rows tokens heads head_dim"], Float[Array, "rows tokens heads head_dim"] | None]:
    """Queries as of `project_q`, and the logits of attention's gate; None where it has none."""
    q, gate = linear(x, weights.q_proj).reshape(*x.shape[:2], config.num_heads, -1), None
    if config.attention_gate:
        q, gate = jnp.split(q, 2, axis=-1)
    if weights.q_norm is not None:
        q = norm(q, weights.q_norm, config)
    return apply_rope(q, positions, config.rope), gate


def project_kv(
    x: Float[Array, "rows tokens hidden"],
    positions: Int[Array, "rows tokens"],
    weights: AttentionWeights,
    config: TransformerConfig,
) -> tuple[Float[Array, "rows tokens kv_heads head_dim"], Float[Array, "rows tokens kv_heads head_dim"]]:
    """Keys (normalised per head where the model does, rotated) and values."""
    shape = (*x.shape[:2], config.num_kv_heads, config.head_dim)
    k = linear(x, weights.k_proj).reshape(shape)
    if weights.k_norm is not None:
        k = norm(k, weights.k_norm, config)
    return apply_rope(k, positions, config.rope), linear(x, weights.v_proj).reshape(shape)


def mlp(x: Float[Array, "*batch hidden"], weights: MlpWeights) -> Float[Array, "*batch hidden"]:
    """SwiGLU: down(silu(gate(x)) * up(x)) (arXiv 2002.05202)."""
    return linear(jax.nn.silu(linear(x, weights.gate_proj)) * linear(x, weights.up_proj), weights.down_proj)


def moe(
    x: Float[Array, "rows tokens hidden"],
    weights: MoeWeights,
    config: MoeConfig,
    *,
    implementation: Implementation | None = None,
) -> Float[Array, "rows tokens hidden"]:
    """Qwen3-MoE's sparse MLP, with the expert that all tokens share where the model has one."""
    tokens = x.reshape(-1, x.shape[-1])
    routes = jax.nn.softmax((tokens @ weights.router).astype(jnp.float32), axis=-1)
    shares, experts = jax.lax.top_k(routes, config.experts_per_token)
    if config.normalize_top_k:
        shares = shares / shares.sum(-1, keepdims=True)
    matrices = weights.gate_proj, weights.up_proj, weights.down_proj
    mixed = mix_experts(tokens, experts, shares, *matrices, implementation=implementation)
    if weights.shared is not None:
        mixed = mixed + jax.nn.sigmoid(tokens @ weights.shared.gate) * mlp(tokens, weights.shared.mlp)
    return mixed.reshape(x.shape).astype(x.dtype)
