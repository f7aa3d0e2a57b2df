"""GGUF metadata said in the words of `config.json`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float

from dflash_jax.checkpoints.rope import write_rope
from dflash_jax.checkpoints.tensors import StoredTensor
from dflash_jax.errors import CheckpointError
from dflash_jax.models.config import RopeConfig
from dflash_jax.models.layers import inverse_wavelengths

ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM", "qwen3moe": "Qwen3MoeForCausalLM"}

# What every Llama 3.1, 3.2 and 3.3 was stretched with; a GGUF file keeps only the resulting factors.
_LLAMA3 = RopeConfig(kind="llama3", low_freq_factor=1.0, high_freq_factor=4.0, original_max_position=8192)


def config_fields(metadata: Mapping[str, Any], tensors: Mapping[str, StoredTensor], file: Path) -> dict[str, Any]:
    """The `config.json` fields of the model in a GGUF file.

    Args:
      metadata: the file's metadata, by key.
      tensors: its tensors by GGUF name, which say what the metadata does not.
      file: for messages.

    Raises:
      CheckpointError: an architecture, a RoPE or a key that is missing or not supported.
    """
    kind = metadata.get("general.architecture")
    if kind not in ARCHITECTURES:
        raise CheckpointError(
            f"{file} is of architecture {kind!r}, but a GGUF file must be of one of {', '.join(ARCHITECTURES)}"
        )

    def get(key: str, default: Any = None) -> Any:
        value = metadata.get(f"{kind}.{key}", default)
        if value is None:
            raise CheckpointError(f"{kind}.{key} is missing from the metadata of {file}")
        if isinstance(value, list):
            raise CheckpointError(f"{kind}.{key} in {file} differs from layer to layer; it must be one number for all")
        return value

    hidden, heads = get("embedding_length"), get("attention.head_count")
    head_dim = get("attention.key_length", hidden // heads)
    if get("attention.value_length", head_dim) != head_dim or get("rope.dimension_count", head_dim) != head_dim:
        raise CheckpointError(
            f"{file} has keys of {head_dim}, values of {get('attention.value_length', head_dim)} and rotates "
            f"{get('rope.dimension_count', head_dim)} dimensions per head; all three must be equal"
        )
    fields = {
        "architectures": [ARCHITECTURES[kind]],
        "hidden_size": hidden,
        "num_hidden_layers": get("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": get("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "intermediate_size": get("feed_forward_length"),
        "rms_norm_eps": get("attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": get("context_length"),
        "vocab_size": tensors["token_embd.weight"].shape[0] if "token_embd.weight" in tensors else get("vocab_size"),
        "tie_word_embeddings": "output.weight" not in tensors,
        "attention_bias": "blk.0.attn_q.bias" in tensors,
        "mlp_bias": "blk.0.ffn_gate.bias" in tensors,
        "rope_parameters": _rope(metadata, kind, head_dim, tensors.get("rope_freqs.weight"), file),
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": [
            metadata[key] for key in ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id") if key in metadata
        ],
    }
    if kind == "qwen3moe":
        fields |= {
            "num_experts": get("expert_count"),
            "num_experts_per_tok": get("expert_used_count"),
            "moe_intermediate_size": get("expert_feed_forward_length"),
            # The format has no key for it: every Qwen3-MoE that was converted normalises.
            "norm_topk_prob": True,
        }
    return fields


def _rope(
    metadata: Mapping[str, Any], kind: str, head_dim: int, factors: StoredTensor | None, file: Path
) -> dict[str, Any]:
    theta = float(metadata.get(f"{kind}.rope.freq_base", 10_000.0))
    scaling = metadata.get(f"{kind}.rope.scaling.type", "none")
    if factors is not None:
        return _llama3(factors.read().astype(np.float64), theta, head_dim, file)
    factor = float(metadata.get(f"{kind}.rope.scaling.factor", 1.0))
    match scaling:
        case "none":
            return {"rope_theta": theta, "rope_type": "default"}
        case "linear":
            return {"rope_theta": theta, "rope_type": "linear", "factor": factor}
        case "yarn":
            original = metadata.get(f"{kind}.rope.scaling.original_context_length")
            extra = float(metadata.get(f"{kind}.rope.scaling.attn_factor", 1.0))
            return {
                "rope_theta": theta,
                "rope_type": "yarn",
                "factor": factor,
                "original_max_position_embeddings": original,
                "attention_factor": extra * (1.0 + 0.1 * float(np.log(max(factor, 1.0)))),
            }
    raise CheckpointError(f"{file} scales RoPE by {scaling!r}, but it must be 'none', 'linear' or 'yarn'")


def _llama3(factors: Float[np.ndarray, " pairs"], theta: float, head_dim: int, file: Path) -> dict[str, Any]:
    """Llama 3.1's settings, recovered from the factor of each wavelength and checked against them."""
    stretched = dataclasses.replace(_LLAMA3, theta=theta, factor=float(factors.max()))
    plain = inverse_wavelengths(RopeConfig(theta=theta), head_dim)
    if factors.shape != plain.shape or not np.allclose(
        plain / inverse_wavelengths(stretched, head_dim), factors, rtol=1e-3
    ):
        raise CheckpointError(
            f"the RoPE factors in rope_freqs.weight of {file} are not those of Llama 3.1 (low 1, high 4, "
            "original context 8192), the only ones that can be read from GGUF; "
            "use the model's Hugging Face directory instead"
        )
    return write_rope(stretched)
