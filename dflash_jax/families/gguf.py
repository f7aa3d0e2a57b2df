"""What families share in GGUF files: metadata said in the words of `config.json`, and tensor names.

Keys and names are those of llama.cpp's `gguf-py/gguf/constants.py`.
"""

from __future__ import annotations

import math
from typing import Annotated, Any, TypeVar

from pydantic import Field

from dflash_jax.errors import CheckpointError, quote
from dflash_jax.families.family import GgufFile
from dflash_jax.families.rope import Factor, OriginalContext, Theta
from dflash_jax.schema import Epsilon, Heads, Layers, Positions, Schema, VocabSize, Width, check

_Keys = TypeVar("_Keys", bound=Schema)

NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


class TransformerKeys(Schema):
    """Keys of a transformer, which the file has with the architecture's name before them."""

    block_count: Layers
    context_length: Positions
    embedding_length: Width
    feed_forward_length: Width
    vocab_size: VocabSize | None = None
    head_count: Heads = Field(alias="attention.head_count")
    head_count_kv: Heads | None = Field(default=None, alias="attention.head_count_kv")
    key_length: Heads | None = Field(default=None, alias="attention.key_length")
    value_length: Heads | None = Field(default=None, alias="attention.value_length")
    layer_norm_rms_epsilon: Epsilon = Field(alias="attention.layer_norm_rms_epsilon")
    rope_dimensions: Heads | None = Field(default=None, alias="rope.dimension_count")
    rope_theta: Theta = Field(default=10_000.0, alias="rope.freq_base")
    scaling_type: str = Field(default="none", alias="rope.scaling.type")
    scaling_factor: Annotated[float, Field(ge=0.0, le=1e9)] = Field(default=1.0, alias="rope.scaling.factor")
    original_context: OriginalContext | None = Field(default=None, alias="rope.scaling.original_context_length")
    attention_factor: Factor = Field(default=1.0, alias="rope.scaling.attn_factor")


def read_keys(model: type[_Keys], file: GgufFile) -> _Keys:
    """The keys of a file's architecture.

    Raises:
      CheckpointError: one is missing, differs from layer to layer, or has a value it cannot have.
    """
    prefix = f"{file.metadata['general.architecture']}."
    values = {key.removeprefix(prefix): value for key, value in file.metadata.items() if key.startswith(prefix)}
    for name, field in model.model_fields.items():
        key = field.alias or name
        if isinstance(values.get(key), list):
            raise CheckpointError(
                f"{prefix}{key} in {file.file} differs from layer to layer; it must be one number for all"
            )
    source = f"the metadata of {file.file}"
    return check(model, values, source, error=CheckpointError, label=lambda key: f"{prefix}{key}")


def read_fields(
    file: GgufFile, keys_of: type[TransformerKeys] = TransformerKeys, *, partial: bool = False
) -> dict[str, Any]:
    """The fields of `config.json` that every family has.

    Args:
      file: the file.
      keys_of: the keys of a transformer as the family has them.
      partial: whether the family may turn a part of each head only.

    Raises:
      CheckpointError: a key that is missing or has a value it cannot have, or a RoPE that is not supported.
    """
    keys, tensors, metadata = read_keys(keys_of, file), file.tensors, file.metadata
    head_dim = keys.key_length or keys.embedding_length // keys.head_count
    values, rotated = keys.value_length or head_dim, keys.rope_dimensions or head_dim
    if head_dim != values or (not partial and head_dim != rotated):
        raise CheckpointError(
            f"{file.file} has keys of {head_dim}, values of {values} and rotates "
            f"{rotated} dimensions per head; all three must be equal"
        )
    embedding = tensors.get("token_embd.weight")
    rope = _rope(keys, file)
    if partial:
        rope["partial_rotary_factor"] = _factor(rotated, head_dim)
    return {
        "vocab_size": keys.vocab_size if embedding is None else embedding.shape[0],
        "hidden_size": keys.embedding_length,
        "num_hidden_layers": keys.block_count,
        "num_attention_heads": keys.head_count,
        "num_key_value_heads": keys.head_count_kv or keys.head_count,
        "head_dim": head_dim,
        "intermediate_size": keys.feed_forward_length,
        "rms_norm_eps": keys.layer_norm_rms_epsilon,
        "max_position_embeddings": keys.context_length,
        "tie_word_embeddings": "output.weight" not in tensors,
        "attention_bias": "blk.0.attn_q.bias" in tensors,
        "rope_parameters": rope,
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
    }


def _factor(rotated: int, head_dim: int) -> float:
    """The factor from which `RopeConfig.rotated` makes as many channels."""
    factor = rotated / head_dim
    return factor if int(head_dim * factor) == rotated else math.nextafter(factor, math.inf)


def _rope(keys: TransformerKeys, file: GgufFile) -> dict[str, Any]:
    # Files that are not stretched may have the factor 0.
    factor = keys.scaling_factor or 1.0
    match keys.scaling_type:
        case "none":
            return {"rope_theta": keys.rope_theta, "rope_type": "default"}
        case "linear":
            return {"rope_theta": keys.rope_theta, "rope_type": "linear", "factor": factor}
        case "yarn":
            return {
                "rope_theta": keys.rope_theta,
                "rope_type": "yarn",
                "factor": factor,
                "original_max_position_embeddings": keys.original_context,
                "attention_factor": keys.attention_factor * (1.0 + 0.1 * math.log(max(factor, 1.0))),
            }
    raise CheckpointError(
        f"{file.file} scales RoPE by {quote(keys.scaling_type)}, but it must be 'none', 'linear' or 'yarn'"
    )
