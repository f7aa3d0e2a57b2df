"""RoPE settings of a `config.json`, in either spelling, read and written.

Follows transformers' `modeling_rope_utils.py`, defaults included.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from dflash_jax.errors import ConfigError, quote
from dflash_jax.models.config import RopeConfig
from dflash_jax.schema import Schema, check

Theta = Annotated[float, Field(gt=1.0, le=1e12)]
"""Base of the wavelengths; at 1 they would all be one."""
Factor = Annotated[float, Field(ge=1e-6, le=1e6)]
"""How far something is stretched, or a bound of a band."""
OriginalContext = Annotated[int, Field(ge=1, le=2**31 - 1)]
"""Context length before stretching."""

_LAYER_TYPES = {"full_attention", "sliding_attention"}
_KINDS = ("default", "linear", "llama3", "yarn")
# A config.json may have these beside its RoPE settings or among them.
_EITHER = ("rope_theta", "partial_rotary_factor", "original_max_position_embeddings")


def _zero_is_none(value: Any) -> Any:
    return None if type(value) in (int, float) and value == 0 else value


_Optional = Annotated[Factor | None, BeforeValidator(_zero_is_none)]
"""transformers takes 0 for absent in these."""


class _RopeFields(Schema):
    rope_theta: Theta | None = None
    partial_rotary_factor: Annotated[float, Field(ge=0.0, le=1.0)] | None = None
    rope_type: str | None = None
    type: str | None = None
    factor: Factor | None = None
    original_max_position_embeddings: OriginalContext | None = None
    low_freq_factor: Factor | None = None
    high_freq_factor: Factor | None = None
    beta_fast: _Optional = None
    beta_slow: _Optional = None
    attention_factor: Factor | None = None
    mscale: _Optional = None
    mscale_all_dim: _Optional = None
    truncate: bool | None = None


def read_rope(fields: Mapping[str, Any], max_position: int, source: str, *, partial: float | None = None) -> RopeConfig:
    """RoPE from `rope_theta` and `rope_scaling`, or from `rope_parameters`.

    Args:
      fields: the whole `config.json`.
      max_position: what `original_max_position_embeddings` defaults to.
      source: where the fields are from, for messages.
      partial: what `partial_rotary_factor` defaults to; None for a family that turns whole heads.

    Raises:
      ConfigError: a kind or option of RoPE that the models do not have, or one that is missing or out of range.
    """
    section, settings = _section(fields, source)
    beside = check(_RopeFields, {name: fields.get(name) for name in _EITHER}, source)
    rope = check(_RopeFields, settings, source, label=lambda name: f"{section}.{name}")
    theta = rope.rope_theta or beside.rope_theta or 10_000.0
    given = _first(rope.partial_rotary_factor, beside.partial_rotary_factor, 1.0 if partial is None else partial)
    if partial is None and given != 1.0:
        raise ConfigError(f"partial_rotary_factor {given} in {source} is not supported; it must be 1 or absent")
    read = _read_kind(rope, beside, theta, max_position, source)
    return dataclasses.replace(read, partial=given)


def _read_kind(rope: _RopeFields, beside: _RopeFields, theta: float, max_position: int, source: str) -> RopeConfig:
    kind = _first(rope.rope_type, rope.type, "default")
    if kind not in _KINDS:
        raise ConfigError(
            f"rope_type {quote(kind)} in {source} is not supported; it must be one of {', '.join(_KINDS)}"
        )
    if kind == "default":
        return RopeConfig(theta=theta)
    if kind == "linear":
        return RopeConfig(theta=theta, kind="linear", factor=_needed(rope, "factor", kind, source))
    original = beside.original_max_position_embeddings or rope.original_max_position_embeddings or max_position
    if not original:
        raise ConfigError(
            f"original_max_position_embeddings is missing from the RoPE settings in {source}, and "
            f"max_position_embeddings is 0; rope_type {kind!r} stretches one of them"
        )
    if kind == "yarn":
        return _read_yarn(rope, theta, original, max_position, source)
    low, high = _needed(rope, "low_freq_factor", kind, source), _needed(rope, "high_freq_factor", kind, source)
    if low >= high:
        raise ConfigError(f"low_freq_factor {low} in {source} is not below high_freq_factor {high}, as it must be")
    return RopeConfig(
        theta=theta,
        kind="llama3",
        factor=_needed(rope, "factor", kind, source),
        original_max_position=original,
        low_freq_factor=low,
        high_freq_factor=high,
    )


def _section(fields: Mapping[str, Any], source: str) -> tuple[str, Mapping[str, Any]]:
    """The RoPE settings, and what they stand under."""
    name = "rope_scaling" if fields.get("rope_scaling") not in (None, {}) else "rope_parameters"
    rope = {} if fields.get(name) is None else fields[name]
    if isinstance(rope, Mapping) and rope and set(rope) <= _LAYER_TYPES:
        kinds = list(rope.values())
        if any(kind != kinds[0] for kind in kinds):
            raise ConfigError(f"rope_parameters in {source} differ between layer types; every layer must share one")
        name, rope = f"{name}.{next(iter(rope))}", kinds[0]
    if not isinstance(rope, Mapping):
        raise ConfigError(f"{name} in {source} is {quote(rope)}, but it must be an object")
    return name, rope


def _read_yarn(rope: _RopeFields, theta: float, original: int, max_position: int, source: str) -> RopeConfig:
    if rope.truncate is False:
        raise ConfigError(f"yarn's 'truncate': false in {source} is not supported; it must be true or absent")
    factor = rope.factor or max_position / original
    if not factor:
        raise ConfigError(f"factor is missing from the RoPE settings in {source}; rope_type 'yarn' needs it")
    attention_factor = rope.attention_factor
    if attention_factor is None:
        attention_factor = _mscale(factor)
        if rope.mscale and rope.mscale_all_dim:
            attention_factor = _mscale(factor, rope.mscale) / _mscale(factor, rope.mscale_all_dim)
    return RopeConfig(
        theta=theta,
        kind="yarn",
        factor=factor,
        original_max_position=original,
        beta_fast=32.0 if rope.beta_fast is None else rope.beta_fast,
        beta_slow=1.0 if rope.beta_slow is None else rope.beta_slow,
        attention_factor=attention_factor,
    )


def _mscale(factor: float, scale: float = 1.0) -> float:
    return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0


def longest_context(rope: RopeConfig, max_position: int) -> int:
    """Tokens of context that a checkpoint is good for.

    Stretching often is added to a `config.json` whose `max_position_embeddings` stays what it was.

    Args:
      rope: as read from the config.
      max_position: `max_position_embeddings`; 0 if it is not known.
    """
    match rope.kind:
        case "linear":
            max_position = round(max_position * rope.factor)
        case "yarn":
            max_position = max(max_position, round(rope.original_max_position * rope.factor))
    return min(max_position, 2**31 - 1)


def unstretched_context(rope: RopeConfig, longest: int) -> int:
    """The `max_position_embeddings` from which `longest_context` makes `longest`."""
    return round(longest / rope.factor) if rope.kind == "linear" else longest


def with_scaling(fields: Mapping[str, Any], scaling: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a `config.json` with other RoPE scaling.

    Args:
      fields: contents of `config.json`; its `rope_theta` stays unless the scaling gives one.
      scaling: what `rope_scaling` shall be.
    """
    _, rope = _section(fields, "config.json")
    kept = {name: rope[name] for name in _EITHER[:2] if rope.get(name) is not None}
    dropped = ("rope_scaling", *(name for name in _EITHER if name in scaling))
    rest = {name: value for name, value in fields.items() if name not in dropped}
    return {**rest, "rope_parameters": {**kept, **scaling}}


def write_rope(rope: RopeConfig) -> dict[str, Any]:
    """`rope_parameters` that `read_rope` reads back the same."""
    fields: dict[str, Any] = {"rope_theta": rope.theta, "rope_type": rope.kind}
    if rope.partial != 1.0:
        fields["partial_rotary_factor"] = rope.partial
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


def _needed(rope: _RopeFields, name: str, kind: str, source: str) -> float:
    value = getattr(rope, name)
    if value is None:
        raise ConfigError(f"{name} is missing from the RoPE settings in {source}; rope_type {kind!r} needs it")
    return value


def _first(*values: Any) -> Any:
    return next(value for value in values if value is not None)
