"""Params as Orbax checkpoints, with the config beside them as a Hugging Face `config.json`."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from dflash_jax.checkpoints.digests import digest, is_whole
from dflash_jax.checkpoints.hf_config import config_fields, draft_config, is_draft, target_config
from dflash_jax.checkpoints.json_file import read_object
from dflash_jax.checkpoints.staging import new_directory
from dflash_jax.checkpoints.table import Config, Params, build_params, param_at, table
from dflash_jax.checkpoints.tensors import check_weights, numpy_dtype
from dflash_jax.errors import CheckpointError, ConfigError, quote, reason
from dflash_jax.families import Leaf
from dflash_jax.kernels.compact import Compact, compact, rounded
from dflash_jax.models.config import TargetConfig

_ARRAYS = "params"
_DTYPES = "params_dtypes.json"
_FILES = "params_files.json"


def is_checkpoint(directory: Path) -> bool:
    """Whether the directory is one that `save_params` wrote."""
    return (directory / _DTYPES).is_file()


def checkpointing() -> ModuleType:
    """orbax.checkpoint, which takes a while to import that a model from elsewhere need not wait for."""
    import orbax.checkpoint

    return orbax.checkpoint


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
        with checkpointing().StandardCheckpointer() as checkpointer:
            checkpointer.save(scratch / _ARRAYS, arrays)
        (scratch / "config.json").write_text(json.dumps(config_fields(config), indent=2) + "\n")
        dtypes = {path: str(array.dtype) for path, array in arrays.items()}
        (scratch / _DTYPES).write_text(json.dumps(dtypes, indent=2) + "\n")
        files = {str(file.relative_to(scratch)): digest(file) for file in _files(scratch / _ARRAYS)}
        (scratch / _FILES).write_text(json.dumps(files, indent=2) + "\n")
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
    return [quote(dtype).strip("'") for dtype in read_object(directory / _DTYPES).values()]


def restore_arrays(directory: Path, config: Config, dtype: str | None = None, weights: str | None = None) -> Params:
    """The params of a checkpoint whose config is known, in its own dtypes or as `assemble` holds them."""
    _check_whole(directory)
    wanted = {leaf.path: jax.ShapeDtypeStruct(leaf.param_shape, _dtype(directory, leaf.path)) for leaf in table(config)}
    try:
        with checkpointing().StandardCheckpointer() as checkpointer:
            arrays = checkpointer.restore((directory / _ARRAYS).absolute(), wanted)
    except Exception as error:  # Orbax raises many classes, none of its own
        raise CheckpointError(f"the params in {directory} cannot be restored ({reason(error)})") from error
    for path, array in arrays.items():
        if not jnp.isfinite(array).all():
            raise CheckpointError(f"the params' {path} in {directory} has values that are not finite; none may be")
    if dtype is not None:
        check_weights(weights, dtype, "target" if isinstance(config, TargetConfig) else "draft")
        arrays = {leaf.path: _held(leaf, arrays[leaf.path], dtype, weights) for leaf in table(config)}
    return build_params(config, arrays)


def _held(leaf: Leaf, array: Array, dtype: str, weights: str | None) -> Array | Compact:
    def out_in(dtype: str) -> np.ndarray:
        values = np.asarray(array.astype(numpy_dtype(dtype)))
        return np.ascontiguousarray(values.T if leaf.transposed else values)

    short = weights == "bfloat16" or (weights == "file" and array.dtype == jnp.bfloat16)
    if leaf.may_be_compact and weights == "int8":
        return rounded(out_in("float32"), dtype)
    if leaf.may_be_compact and short and dtype == "float32":
        return compact(out_in("bfloat16"), "BF16", dtype=dtype)
    return array.astype(numpy_dtype(dtype))


def _check_whole(directory: Path) -> None:
    """Refuses params with a file that is missing, cut or changed; TensorStore reads some of them as other numbers."""
    for name, expected in read_object(directory / _FILES).items():
        file = directory / name
        if ".." in Path(name).parts or not file.is_relative_to(directory / _ARRAYS):
            raise CheckpointError(
                f"{directory / _FILES} names {quote(name)}, which is no file of {directory / _ARRAYS}"
            )
        if not is_whole(file, expected):
            raise CheckpointError(
                f"{file} is missing, cut or changed: it has not the digest that {_FILES} noted when it was saved"
            )


def _dtype(directory: Path, path: str) -> np.dtype:
    dtypes = read_object(directory / _DTYPES)
    if path not in dtypes:
        raise CheckpointError(f"{path} is missing from {directory / _DTYPES}, though its config asks for it")
    try:
        return numpy_dtype(dtypes[path])
    except ConfigError as error:
        raise CheckpointError(f"{path} in {directory / _DTYPES}: {error}") from None


def _files(directory: Path) -> list[Path]:
    return sorted(file for file in directory.rglob("*") if file.is_file())
