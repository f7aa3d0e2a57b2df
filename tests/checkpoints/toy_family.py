"""A family that nobody published: what the steps of docs/families.md come to.

It is a multimodal checkpoint's text model, with experts in every other layer, stacked, and norms of queries and keys.
"""

from dflash_jax.families import Family, Gguf, fields, gguf, parts
from dflash_jax.families.leaf import leave_out
from dflash_jax.models.config import LayerConfig, MoeConfig
from dflash_jax.schema import Width, check


class ToyFields(fields.TargetFields):
    num_toys: Width
    toy_size: Width = 8


def read(values, source):
    found = check(ToyFields, values, source)
    moe = MoeConfig(found.num_toys, 2, found.toy_size, True)
    layers = tuple(LayerConfig(moe=moe if index % 2 else None) for index in range(found.num_hidden_layers))
    return found.target(values, source, family="toy", layers=layers, qk_norm=True)


def write(config):
    moe = next(layer.moe for layer in config.layers if layer.moe)
    return {**fields.write_target(config), "num_toys": moe.num_experts, "toy_size": moe.intermediate_size}


def params(config):
    def layer(index):
        name, moe = f"model.layers.{index}", config.layers[index].moe
        if moe is None:
            return parts.decoder_layer(config, name, parts.dense_mlp(config, f"{name}.mlp"))
        return parts.decoder_layer(config, name, parts.sparse_mlp(moe, config.hidden_size, f"{name}.toys"))

    return parts.target_params(config, layer)


def tensors(config, stored):
    text = leave_out(stored, {"model.visual.": "the vision tower", "mtp.": "the head that predicts several tokens"})
    return parts.split_experts(
        {name.replace("model.language_model.", "model."): tensor for name, tensor in text.items()}
    )


class ToyKeys(gguf.Schema):
    expert_count: Width
    expert_feed_forward_length: Width


def read_gguf(file):
    keys = gguf.read_keys(ToyKeys, file)
    return {
        **gguf.read_fields(file),
        "num_toys": keys.expert_count,
        "toy_size": keys.expert_feed_forward_length,
    }


TOYS = {
    "ffn_gate_inp": "toys.gate",
    "ffn_gate_exps": "toys.experts.gate_proj",
    "ffn_up_exps": "toys.experts.up_proj",
    "ffn_down_exps": "toys.experts.down_proj",
}

FAMILY = Family(
    name="toy",
    architectures=("ToyForCausalLM", "ToyForConditionalGeneration"),
    read=read,
    write=write,
    params=params,
    tensors=tensors,
    gguf=Gguf("toy", read_gguf, gguf.NAMES, gguf.LAYER_NAMES | TOYS, tensors),
)
