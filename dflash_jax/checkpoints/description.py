"""What a checkpoint is, without loading its weights."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Literal

import jax.numpy as jnp

from dflash_jax.checkpoints import orbax_io, quantised
from dflash_jax.checkpoints.gguf_config import check_metadata, gguf_target_config, gguf_target_tensors
from dflash_jax.checkpoints.gguf_io import open_gguf
from dflash_jax.checkpoints.hf_config import architecture, is_draft
from dflash_jax.checkpoints.json_file import read_object
from dflash_jax.checkpoints.load import read_draft_config, read_target_config
from dflash_jax.checkpoints.sources import resolve
from dflash_jax.checkpoints.table import named_tensors, table
from dflash_jax.checkpoints.tensors import check_tensors, stored_in_8_bits
from dflash_jax.families import FAMILIES
from dflash_jax.families.leaf import Tensors
from dflash_jax.kernels.compact import rounded_bytes
from dflash_jax.models.config import DraftConfig, TargetConfig


@dataclasses.dataclass(frozen=True)
class Description:
    """What a checkpoint's headers and config say.

    Attributes:
      source: its local path.
      format: how it is stored.
      architecture: as its config names it.
      role: what it is for.
      parameters: number of them.
      bytes_on_disk: size of the file, or of the files in the directory.
      dtypes: number of tensors of each dtype or quantisation.
      config: everything its config says.
      held: for each way to hold matrices in another dtype than activations (`tensors.HELD`), how many parameters it
        holds so, and the bytes they take.
    """

    source: Path
    format: Literal["safetensors", "orbax", "gguf"]
    architecture: str
    role: Literal["target", "draft"]
    parameters: int
    bytes_on_disk: int
    dtypes: dict[str, int]
    config: TargetConfig | DraftConfig
    held: Mapping[str, tuple[int, int]]

    def weight_bytes(self, dtype: str, weights: str | None = None) -> int:
        """Bytes of all weights when held as loading is told to."""
        parameters, size = self.held.get(weights or dtype, (0, 0))
        return (self.parameters - parameters) * jnp.dtype(dtype).itemsize + size


def describe(path: str | Path, mask_token_id: int | None = None) -> Description:
    """Describes a checkpoint, having checked that its tensors are those of its config.

    Args:
      path: anything `load_target` or `load_draft` takes.
      mask_token_id: as of `load_draft`.

    Raises:
      CheckpointError, ConfigError: as loading it would.
    """
    source = resolve(path)
    if source.suffix == ".gguf":
        return _describe_gguf(source)
    file = source / "config.json"
    fields = read_object(file)
    draft = is_draft(fields, str(file))
    config = read_draft_config(source, mask_token_id) if draft else read_target_config(source)
    if orbax_io.is_checkpoint(source):
        dtypes = _count(orbax_io.stored_dtypes(source))
        held = _held(config, {})
    else:
        stored = quantised.open_weights(source)
        named = named_tensors(config, stored)
        check_tensors(config, table(config), named, source)
        held = _held(config, named)
        dtypes = _count(tensor.dtype for tensor in stored.values())
    return Description(
        source=source,
        format="orbax" if orbax_io.is_checkpoint(source) else "safetensors",
        architecture=architecture(fields, str(file)),
        role="draft" if draft else "target",
        parameters=sum(leaf.size for leaf in table(config)),
        bytes_on_disk=sum(file.stat().st_size for file in source.rglob("*") if file.is_file()),
        dtypes=dtypes,
        config=config,
        held=held,
    )


def _describe_gguf(source: Path) -> Description:
    metadata, stored = open_gguf(source)
    metadata = check_metadata(metadata, source)
    config = gguf_target_config(metadata, stored, source)
    named = gguf_target_tensors(stored, config)
    check_tensors(config, table(config), named, source)
    return Description(
        source=source,
        format="gguf",
        architecture=FAMILIES[config.family].architectures[0],
        role="target",
        parameters=sum(leaf.size for leaf in table(config)),
        bytes_on_disk=sum(file.stat().st_size for file in {source, *(tensor.file for tensor in stored.values())}),
        dtypes=_count(tensor.dtype for tensor in stored.values()),
        config=config,
        held=_held(config, named),
    )


def _held(config: TargetConfig | DraftConfig, tensors: Tensors) -> dict[str, tuple[int, int]]:
    sizes: dict[str, list[tuple[int, int]]] = {"file": [], "bfloat16": [], "int8": []}
    for leaf in (leaf for leaf in table(config) if leaf.may_be_compact):
        tensor = tensors.get(leaf.name)
        stored = None if tensor is None or tensor.stored is None else (leaf.size, tensor.stored_bytes)
        if stored is not None:
            sizes["file"].append(stored)
        sizes["bfloat16"].append((leaf.size, 2 * leaf.size))
        short = tensor is not None and stored_in_8_bits(tensor)
        sizes["int8"].append(stored if stored and short else (leaf.size, rounded_bytes(*leaf.shape)))
    return {name: (sum(count for count, _ in each), sum(size for _, size in each)) for name, each in sizes.items()}


def _count(dtypes: Iterable[str]) -> dict[str, int]:
    return dict(collections.Counter(dtypes).most_common())
