"""Params as Orbax checkpoints, with the config beside them as a Hugging Face `config.json`."""

from __future__ import annotations

import json
from pathlib import Path

import jax
import orbax.checkpoint as ocp

from dflash_jax.checkpoints.hf_config import config_fields, draft_config, is_draft, target_config
from dflash_jax.checkpoints.json_file import read_object
from dflash_jax.checkpoints.staging import new_directory
from dflash_jax.checkpoints.table import Config, Params, build_params, param_at, table
from dflash_jax.checkpoints.tensors import numpy_dtype
from dflash_jax.errors import CheckpointError

_ARRAYS = "params"
_DTYPES = "params_dtypes.json"


def is_checkpoint(directory: Path) -> bool:
    """Whether the directory is one that `save_params` wrote."""
    return (directory / _DTYPES).is_file()


def save_params(directory: str | Path, config: Config, params: Params) -> Path:
    """Saves a target's or draft's params, dtypes and all.

    Args:
      directory: where to; it must not exist, or be empty.
      config, params: the model.

    Returns:
      The directory.

    Raises:
      CheckpointError: the directory has something in it.
    """
    arrays = {leaf.path: param_at(params, leaf.path) for leaf in table(config)}
    with new_directory(Path(directory)) as scratch:
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(scratch / _ARRAYS, arrays)
        (scratch / "config.json").write_text(json.dumps(config_fields(config), indent=2) + "\n")
        dtypes = {path: str(array.dtype) for path, array in arrays.items()}
        (scratch / _DTYPES).write_text(json.dumps(dtypes, indent=2) + "\n")
    return Path(directory)


def restore_params(directory: str | Path) -> tuple[Config, Params]:
    """The config and params that `save_params` saved, bit for bit.

    Raises:
      CheckpointError: not such a checkpoint, or a damaged one.
    """
    directory = Path(directory)
    if not is_checkpoint(directory):
        raise CheckpointError(f"{directory} is not a checkpoint of save_params: it has no {_DTYPES}")
    file = directory / "config.json"
    fields = read_object(file)
    read = draft_config if is_draft(fields, str(file)) else target_config
    config: Config = read(fields, source=str(file))
    return config, restore_arrays(directory, config)


def stored_dtypes(directory: Path) -> list[str]:
    """The dtype of each array of a checkpoint of `save_params`."""
    return list(read_object(directory / _DTYPES).values())


def restore_arrays(directory: Path, config: Config, dtype: str | None = None) -> Params:
    """The params of a checkpoint whose config is known, in its own dtypes or cast to one."""
    dtypes = read_object(directory / _DTYPES)
    try:
        wanted = {
            leaf.path: jax.ShapeDtypeStruct(leaf.param_shape, numpy_dtype(dtypes[leaf.path])) for leaf in table(config)
        }
        with ocp.StandardCheckpointer() as checkpointer:
            arrays = checkpointer.restore((directory / _ARRAYS).absolute(), wanted)
    except Exception as error:  # Orbax raises many classes, none of its own
        raise CheckpointError(f"the params in {directory} cannot be restored ({error})") from error
    if dtype is not None:
        cast = numpy_dtype(dtype)
        arrays = {path: array.astype(cast) for path, array in arrays.items()}
    return build_params(config, arrays)
