"""The fields of `config.json` that families share: read with their types and ranges, and written."""

from __future__ import annotations

from typing import Any

from dflash_jax.errors import ConfigError, quote
from dflash_jax.families.family import Fields
from dflash_jax.families.rope import longest_context, read_rope, unstretched_context, write_rope
from dflash_jax.models.config import LayerConfig, RopeConfig, TargetConfig, TransformerConfig
from dflash_jax.schema import Epsilon, Heads, Layers, Names, Positions, Schema, TokenIds, VocabSize, Width


class TransformerFields(Schema):
    """The sizes of a target or draft. A family gives the defaults of its class in transformers."""

    vocab_size: VocabSize
    hidden_size: Width
    num_hidden_layers: Layers
    num_attention_heads: Heads
    num_key_value_heads: Heads | None = None
    head_dim: Heads | None = None
    intermediate_size: Width
    max_position_embeddings: Positions
    rms_norm_eps: Epsilon | None = None
    hidden_act: str = "silu"
    attention_bias: bool | None = False
    quantization_config: dict[str, Any] | None = None

    def sizes(self, fields: Fields, source: str) -> dict[str, Any]:
        """What `TransformerConfig` takes from them.

        Args:
          fields: all of `config.json`, for the RoPE in it.
          source: the file, for messages.

        Raises:
          ConfigError: an activation or a RoPE that is not supported.
        """
        if self.hidden_act not in ("silu", "swish"):
            raise ConfigError(f"hidden_act {quote(self.hidden_act)} in {source} is not supported; it must be 'silu'")
        head_dim = self.head_dim or self.hidden_size // self.num_attention_heads
        if head_dim < 2:
            raise ConfigError(
                f"{source} gives {self.num_attention_heads} heads to a hidden_size of {self.hidden_size}, which "
                "leaves none of them a channel; head_dim must be 2 or more"
            )
        return {
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "num_heads": self.num_attention_heads,
            "num_kv_heads": self.num_key_value_heads or self.num_attention_heads,
            "head_dim": head_dim,
            "intermediate_size": self.intermediate_size,
            "rms_norm_eps": 1e-6 if self.rms_norm_eps is None else self.rms_norm_eps,
            "rope": self.rope(fields, source),
            "attention_bias": bool(self.attention_bias),
        }

    def rope(self, fields: Fields, source: str) -> RopeConfig:
        """The RoPE in `config.json`; arguments as of `sizes`."""
        return read_rope(fields, self.max_position_embeddings, source)


class TargetFields(TransformerFields):
    """What targets have beside the sizes."""

    tie_word_embeddings: bool | None = False
    bos_token_id: int | None = None
    eos_token_id: TokenIds = ()

    def target(
        self, fields: Fields, source: str, *, family: str, layers: tuple[LayerConfig, ...], qk_norm: bool, **more: Any
    ) -> TargetConfig:
        """The target; arguments as of `TargetConfig` and `sizes`, `more` what else it has."""
        sizes = self.sizes(fields, source)
        return TargetConfig(
            **sizes,
            layers=layers,
            qk_norm=qk_norm,
            family=family,
            tied_embeddings=bool(self.tie_word_embeddings),
            max_position=longest_context(sizes["rope"], self.max_position_embeddings),
            eos_token_ids=tuple(dict.fromkeys(self.eos_token_id)),
            bos_token_id=self.bos_token_id,
            **more,
        )


class WindowFields(Schema):
    """Sliding windows as Qwen3 has them."""

    sliding_window: Positions | None = 4096
    use_sliding_window: bool | None = None
    max_window_layers: Positions = 28
    layer_types: Names | None = None

    def kinds(self, depth: int, source: str) -> list[str]:
        """The type of each layer: `layer_types`, or the first `max_window_layers` full and the rest sliding."""
        if self.layer_types is None:
            first = self.max_window_layers if self.use_sliding_window and self.sliding_window is not None else depth
            return ["full_attention" if index < first else "sliding_attention" for index in range(depth)]
        if len(self.layer_types) != depth:
            raise ConfigError(
                f"layer_types in {source} has {len(self.layer_types)} entries for {depth} layers; it must have one each"
            )
        return self.layer_types


def layer_window(kind: str, window: int | None, source: str) -> int | None:
    """The window of a layer of a type. Raises ConfigError for an unknown type, or a sliding one without a window."""
    if kind == "full_attention":
        return None
    if kind != "sliding_attention":
        raise ConfigError(
            f"layer type {quote(kind)} in {source} is not supported; it must be 'full_attention' or 'sliding_attention'"
        )
    if window is None:
        raise ConfigError(
            f"{source} has layers of type 'sliding_attention' but no window for them; "
            "sliding_window must be a number and use_sliding_window not false"
        )
    return window


def write_sizes(config: TransformerConfig) -> dict[str, Any]:
    """The fields of `TransformerFields`."""
    return {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.intermediate_size,
        "hidden_act": "silu",
        "rms_norm_eps": config.rms_norm_eps,
        "rope_parameters": write_rope(config.rope),
        "attention_bias": config.attention_bias,
    }


def write_target(config: TargetConfig) -> dict[str, Any]:
    """The fields of `TargetFields`."""
    eos = config.eos_token_ids
    return {
        **write_sizes(config),
        "model_type": config.family,
        "tie_word_embeddings": config.tied_embeddings,
        "max_position_embeddings": unstretched_context(config.rope, config.max_position),
        "bos_token_id": config.bos_token_id,
        "eos_token_id": None if not eos else eos[0] if len(eos) == 1 else list(eos),
    }


def write_windows(layers: tuple[LayerConfig, ...]) -> dict[str, Any]:
    """The fields of `WindowFields`. Raises ConfigError for windows of several sizes."""
    windows = {layer.window for layer in layers if layer.window is not None}
    if len(windows) > 1:
        raise ConfigError(f"layers have windows {sorted(windows)}, but config.json can say only one for all")
    return {
        "layer_types": ["full_attention" if layer.window is None else "sliding_attention" for layer in layers],
        "sliding_window": windows.pop() if windows else None,
        "use_sliding_window": any(layer.window is not None for layer in layers),
    }
