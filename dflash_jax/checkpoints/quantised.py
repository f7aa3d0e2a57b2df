"""Quantised Hugging Face checkpoints: their weights as floats, so that the rest of the loader is the same for all.

`quantization_config` in config.json says how a checkpoint was quantised; each way has tensors and names of its own.
Activations that were to be quantised too are left as they are.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from dflash_jax.checkpoints.json_file import read_object
from dflash_jax.checkpoints.quant_packed import awq, gptq
from dflash_jax.checkpoints.quant_scaled import compressed, fp8
from dflash_jax.checkpoints.quant_settings import Settings, Tensors
from dflash_jax.checkpoints.safetensors_io import open_directory
from dflash_jax.errors import CheckpointError, quote
from dflash_jax.families.leaf import StoredTensor

_METHODS: dict[str, Callable[[Tensors, Settings], dict[str, StoredTensor]]] = {
    "fp8": fp8,
    "compressed-tensors": compressed,
    "awq": awq,
    "gptq": gptq,
}


def open_weights(directory: Path) -> dict[str, StoredTensor]:
    """The tensors of a Hugging Face directory, dequantised when read where its config says that they are quantised.

    Raises:
      CheckpointError: no weights, a quantisation that cannot be read, or tensors that are not as it lays them out.
    """
    stored = open_directory(directory)
    file = directory / "config.json"
    settings = read_object(file).get("quantization_config")
    if not settings:
        return stored
    method = settings.get("quant_method") if isinstance(settings, dict) else [settings]
    if not isinstance(method, str) or method not in _METHODS:
        raise CheckpointError(
            f"quantization_config in {file} has quant_method {quote(method)}, but weights must be plain floats or "
            f"quantised by one of {', '.join(_METHODS)}; a GGUF file of the model can be read too"
        )
    return _METHODS[method](stored, Settings(settings, file))
