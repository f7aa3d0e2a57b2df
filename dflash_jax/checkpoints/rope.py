"""RoPE settings of a `config.json`, in either spelling, read and written.

Follows transformers' `modeling_rope_utils.py`, defaults included.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from dflash_jax.errors import ConfigError
from dflash_jax.models.config import RopeConfig

_LAYER_TYPES = {"full_attention", "sliding_attention"}
_KINDS = ("default", "linear", "llama3", "yarn")


def read_rope(fields: Mapping[str, Any], max_position: int, source: str) -> RopeConfig:
    """RoPE from `rope_theta` and `rope_scaling`, or from `rope_parameters`.

    Args:
      fields: the whole `config.json`.
      max_position: what `original_max_position_embeddings` defaults to.
      source: where the fields are from, for messages.

    Raises:
      ConfigError: a kind or option of RoPE that the models do not have, or one that is missing.
    """
    rope = _rope_fields(fields, source)
    theta = float(_first(rope.get("rope_theta"), fields.get("rope_theta"), 10_000.0))
    partial = _first(rope.get("partial_rotary_factor"), fields.get("partial_rotary_factor"), 1.0)
    if partial != 1.0:
        raise ConfigError(f"partial_rotary_factor {partial} in {source} is not supported; it must be 1 or absent")
    kind = _first(rope.get("rope_type"), rope.get("type"), "default")
    if kind not in _KINDS:
        raise ConfigError(f"rope_type {kind!r} in {source} is not supported; it must be one of {', '.join(_KINDS)}")
    if kind == "default":
        return RopeConfig(theta=theta)
    original = int(
        _first(
            fields.get("original_max_position_embeddings"), rope.get("original_max_position_embeddings"), max_position
        )
    )
    if kind == "yarn":
        return _read_yarn(rope, theta, original, max_position, source)
    factor = float(_needed(rope, "factor", kind, source))
    if kind == "linear":
        return RopeConfig(theta=theta, kind="linear", factor=factor)
    return RopeConfig(
        theta=theta,
        kind="llama3",
        factor=factor,
        original_max_position=original,
        low_freq_factor=float(_needed(rope, "low_freq_factor", kind, source)),
        high_freq_factor=float(_needed(rope, "high_freq_factor", kind, source)),
    )


def _rope_fields(fields: Mapping[str, Any], source: str) -> Mapping[str, Any]:
    rope = fields.get("rope_scaling") or fields.get("rope_parameters") or {}
    if rope and set(rope) <= _LAYER_TYPES:
        kinds = list(rope.values())
        if any(kind != kinds[0] for kind in kinds):
            raise ConfigError(f"rope_parameters in {source} differ between layer types; every layer must share one")
        return kinds[0]
    return rope


def _read_yarn(rope: Mapping[str, Any], theta: float, original: int, max_position: int, source: str) -> RopeConfig:
    if not rope.get("truncate", True):
        raise ConfigError(f"yarn's 'truncate': false in {source} is not supported; it must be true or absent")
    factor = float(_first(rope.get("factor"), max_position / original))
    attention_factor = rope.get("attention_factor")
    if attention_factor is None:
        scale, all_dim = rope.get("mscale"), rope.get("mscale_all_dim")
        attention_factor = _mscale(factor)
        if scale and all_dim:
            attention_factor = _mscale(factor, scale) / _mscale(factor, all_dim)
    return RopeConfig(
        theta=theta,
        kind="yarn",
        factor=factor,
        original_max_position=original,
        beta_fast=float(rope.get("beta_fast") or 32),
        beta_slow=float(rope.get("beta_slow") or 1),
        attention_factor=float(attention_factor),
    )


def _mscale(factor: float, scale: float = 1.0) -> float:
    return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0


def write_rope(rope: RopeConfig) -> dict[str, Any]:
    """`rope_parameters` that `read_rope` reads back the same."""
    fields: dict[str, Any] = {"rope_theta": rope.theta, "rope_type": rope.kind}
    if rope.kind != "default":
        fields["factor"] = rope.factor
    if rope.kind in ("llama3", "yarn"):
        fields["original_max_position_embeddings"] = rope.original_max_position
    if rope.kind == "llama3":
        fields |= {"low_freq_factor": rope.low_freq_factor, "high_freq_factor": rope.high_freq_factor}
    if rope.kind == "yarn":
        fields |= {
            "beta_fast": rope.beta_fast,
            "beta_slow": rope.beta_slow,
            "attention_factor": rope.attention_factor,
        }
    return fields


def _needed(rope: Mapping[str, Any], name: str, kind: str, source: str) -> Any:
    if rope.get(name) is None:
        raise ConfigError(f"{name} is missing from the RoPE settings in {source}; rope_type {kind!r} needs it")
    return rope[name]


def _first(*values: Any) -> Any:
    return next(value for value in values if value is not None)
