"""What a checkpoint is, without loading its weights."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

import jax.numpy as jnp

from dflash_jax.checkpoints import orbax_io, quantised
from dflash_jax.checkpoints.gguf_config import check_metadata, gguf_target_config, gguf_target_tensors
from dflash_jax.checkpoints.gguf_io import open_gguf
from dflash_jax.checkpoints.hf_config import architecture, is_draft
from dflash_jax.checkpoints.json_file import read_object
from dflash_jax.checkpoints.load import read_draft_config, read_target_config
from dflash_jax.checkpoints.sources import resolve
from dflash_jax.checkpoints.table import named_tensors, table
from dflash_jax.checkpoints.tensors import check_tensors
from dflash_jax.families import FAMILIES
from dflash_jax.families.leaf import Tensors
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
      matrices: parameters of its matrices and its embedding, which weights of bfloat16 are.
      stored: parameters among them that `weights: file` holds as they are stored, and the bytes they take.
    """

    source: Path
    format: Literal["safetensors", "orbax", "gguf"]
    architecture: str
    role: Literal["target", "draft"]
    parameters: int
    bytes_on_disk: int
    dtypes: dict[str, int]
    config: TargetConfig | DraftConfig
    matrices: int = 0
    stored: tuple[int, int] = (0, 0)

    def weight_bytes(self, dtype: str, weights: str | None = None) -> int:
        """Bytes of all weights when held as `load_target` is told to."""
        itemsize = jnp.dtype(dtype).itemsize
        if weights == "file":
            parameters, size = self.stored
            return (self.parameters - parameters) * itemsize + size
        if weights == "bfloat16":
            return (self.parameters - self.matrices) * itemsize + self.matrices * 2
        return self.parameters * itemsize


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
        sizes = _sizes(config, {})
    else:
        stored = quantised.open_weights(source)
        named = named_tensors(config, stored)
        check_tensors(config, table(config), named, source)
        sizes = _sizes(config, named)
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
        **sizes,
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
        **_sizes(config, named),
    )


def _sizes(config: TargetConfig | DraftConfig, tensors: Tensors) -> dict[str, Any]:
    matrices = [leaf for leaf in table(config) if leaf.may_be_compact]
    held = [leaf for leaf in matrices if leaf.name in tensors and tensors[leaf.name].stored is not None]
    return {
        "matrices": sum(leaf.size for leaf in matrices),
        "stored": (sum(leaf.size for leaf in held), sum(tensors[leaf.name].stored_bytes for leaf in held)),
    }


def _count(dtypes: Iterable[str]) -> dict[str, int]:
    return dict(collections.Counter(dtypes).most_common())
