"""Stored tensors and params: reading the ones into the others, and back.

A checkpoint of any format is presented as stored tensors under Hugging Face names, read one by one;
this module knows nothing of files.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import ml_dtypes
import numpy as np

from dflash_jax.checkpoints.table import Config, Params, build_params, packed_tensors, param_at, table
from dflash_jax.errors import CheckpointError, ConfigError, quote
from dflash_jax.families.leaf import HostArray, Leaf, StoredTensor
from dflash_jax.kernels.compact import Compact, compact, rounded
from dflash_jax.kernels.compact import all_finite as all_weights_finite
from dflash_jax.kernels.matmul import Layout
from dflash_jax.models.config import TargetConfig
from dflash_jax.models.matrix import Matrix

_NUMPY_DTYPES = {"float32": np.dtype(np.float32), "bfloat16": np.dtype(ml_dtypes.bfloat16)}
_FLOATS = ("float64", "float32", "float16", "bfloat16")
# Older checkpoints store what the config determines.
_HARMLESS = re.compile(r"(.*\.)?rotary_emb\.inv_freq")


def numpy_dtype(dtype: str) -> np.dtype:
    """The numpy dtype of weights. Raises ConfigError for any but float32 and bfloat16."""
    if not isinstance(dtype, str) or dtype not in _NUMPY_DTYPES:
        raise ConfigError(f"dtype {quote(dtype)} is not one weights can have; it must be 'float32' or 'bfloat16'")
    return _NUMPY_DTYPES[dtype]


def assemble(
    config: Config,
    tensors: Mapping[str, StoredTensor],
    source: Path,
    dtype: str,
    layout: Layout = "in_out",
    weights: str | None = None,
) -> Params:
    """Params of a model from its stored tensors.

    Args:
      config: what the model is.
      tensors: stored tensors by Hugging Face name.
      source: the checkpoint, for messages.
      dtype: "float32" or "bfloat16"; of activations, and of every weight that is not held otherwise.
      layout: of the matrices. Checkpoints have [outputs, inputs], so that "out_in" saves transposing them.
      weights: how matrices and the embedding are held, one of `HELD`; None as `dtype`.

    Raises:
      CheckpointError: a tensor is missing, unexpected or misshapen, or has values that are not finite.
      ConfigError: weights of float32 for activations of bfloat16.
    """
    leaves = table(config)
    check_weights(weights, dtype, "target" if isinstance(config, TargetConfig) else "draft")
    check_tensors(config, leaves, tensors, source)
    cast = numpy_dtype(dtype)

    def read(leaf: Leaf) -> jax.Array | Matrix | Compact:
        if leaf.may_be_compact and (held := _compact(tensors[leaf.name], dtype, weights)) is not None:
            return held
        if leaf.is_matrix and layout == "out_in":
            return Matrix(jax.device_put(_weights(tensors[leaf.name], cast)), layout)
        # Unlike jnp.asarray, it compiles nothing.
        return jax.device_put(_read(leaf, tensors, cast))

    # Most of the time is numpy's, which lets go of the interpreter.
    with ThreadPoolExecutor(min(os.cpu_count() or 1, 4)) as pool:
        arrays = dict(zip((leaf.path for leaf in leaves), pool.map(read, leaves), strict=True))
    return build_params(config, arrays)


def check_weights(weights: str | None, dtype: str, role: str = "target") -> None:
    """Raises ConfigError unless a target's or a draft's weights can be held so for activations of the dtype."""
    numpy_dtype(dtype)
    if weights is not None and weights not in HELD:
        raise ConfigError(f"{role}.weights is {quote(weights)}; it must be one of {', '.join(map(repr, HELD))}")
    if weights == "float32" and dtype == "bfloat16":
        raise ConfigError(
            f"{role}.weights is 'float32' and engine.dtype 'bfloat16'; weights of float32 need activations of float32"
        )


HELD = ("file", "float32", "bfloat16", "int8")
"""How matrices can be held.

"file" is as they are stored, where that is a format of `kernels.compact`; "float32" and "bfloat16" are cast to it;
"int8" is rounded to 8 bits in groups of 32 inputs, and what is stored in 8 bits or fewer as it is stored.
"""


def _compact(tensor: StoredTensor, dtype: str, weights: str | None) -> Compact | None:
    """A matrix that is held otherwise than in the dtype of activations; None if it is not."""
    if (weights == "file" and holds_stored(tensor, dtype)) or (weights == "int8" and stored_in_8_bits(tensor)):
        assert tensor.stored is not None
        stored = tensor.stored()
        # If it has values that are not finite, reading them says where.
        if all_weights_finite(stored.codes, stored.format, stored.scales):
            return compact(stored.codes, stored.format, stored.scales, stored.group, dtype)
    if weights == "int8":
        return rounded(_weights(tensor, numpy_dtype("float32")), dtype)
    if weights == "bfloat16" and dtype == "float32":
        return compact(_weights(tensor, numpy_dtype("bfloat16")), "BF16", dtype=dtype)
    return None


def holds_stored(tensor: StoredTensor, dtype: str) -> bool:
    """Whether params for activations of a dtype hold a matrix as it is stored, which is not an array of that dtype."""
    return tensor.stored is not None and (tensor.dtype, dtype) != ("BF16", "bfloat16")


def stored_in_8_bits(tensor: StoredTensor) -> bool:
    """Whether a matrix is stored in 8 bits or fewer for each weight, so that rounding it would only harm it."""
    return tensor.stored is not None and tensor.dtype not in ("F16", "BF16")


def check_tensors(config: Config, leaves: Iterable[Leaf], tensors: Mapping[str, StoredTensor], source: Path) -> None:
    """Raises CheckpointError unless the tensors are exactly those of the table, with its shapes."""
    # Filled as tensors are found, so that a config which asks for millions costs no more than the file has.
    expected: set[str] = set()
    for leaf in leaves:
        for name in leaf.names:
            expected.add(name)
            if name not in tensors:
                raise CheckpointError(
                    f"tensor {quote(name)} of shape {list(leaf.shape)} "
                    f"is missing from {source}, though its config asks for it"
                )
            found = tensors[name]
            if found.shape != leaf.shape:
                raise CheckpointError(
                    f"tensor {quote(found.name)} in {found.file} has shape {list(found.shape)}, "
                    f"but the model's config makes it {list(leaf.shape)}"
                )
    for name, found in tensors.items():
        if name not in expected and not _is_harmless(config, name):
            raise CheckpointError(
                f"tensor {quote(found.name)} of shape {list(found.shape)} in {found.file} is no part of the model "
                f"its config describes; the config or the file must be another model's"
            )


def _is_harmless(config: Config, name: str) -> bool:
    tied = isinstance(config, TargetConfig) and config.tied_embeddings
    return bool(_HARMLESS.fullmatch(name)) or (tied and name == "lm_head.weight")


def _read(leaf: Leaf, tensors: Mapping[str, StoredTensor], dtype: np.dtype) -> HostArray:
    if not leaf.experts:
        return _oriented(_weights(tensors[leaf.name], dtype), leaf)
    stacked = np.empty(leaf.param_shape, dtype)
    for expert, name in enumerate(leaf.names):
        stacked[expert] = _oriented(_weights(tensors[name], dtype), leaf)
    return stacked


def _weights(tensor: StoredTensor, dtype: np.dtype) -> HostArray:
    """A tensor's values in the dtype they will be held in. Raises CheckpointError unless all are finite floats."""
    stored = tensor.read()
    if stored.dtype.name not in _FLOATS:
        raise CheckpointError(
            f"tensor {quote(tensor.name)} in {tensor.file} is of dtype {tensor.dtype}, "
            f"but weights must be one of F64, F32, F16, BF16, or quantised as its config says"
        )
    with np.errstate(all="ignore"):  # what is not finite is told below
        array = stored.astype(dtype)
    if not all_finite(array):
        where = np.argwhere(~np.isfinite(array))[0].tolist()
        raise CheckpointError(
            f"tensor {quote(tensor.name)} in {tensor.file} has {stored[tuple(where)]} at {where}, "
            f"which is not finite as {dtype.name}; every weight must be"
        )
    return array


def all_finite(array: HostArray) -> bool:
    """Whether float32 or bfloat16 weights have neither NaN nor infinity among them, without a mask of their size."""
    if not array.size:
        return True
    if array.dtype == ml_dtypes.bfloat16:
        # numpy has no vector code for bfloat16; its exponent is all ones where a value is not finite.
        return bool((array.view(np.uint16) & 0x7F80).max() < 0x7F80)
    return bool(np.isfinite(array.max()) and np.isfinite(array.min()))


def _oriented(array: HostArray, leaf: Leaf) -> HostArray:
    return array.T if leaf.transposed else array


def disassemble(config: Config, params: Params, dtype: str) -> Iterator[tuple[str, Callable[[], HostArray], int]]:
    """A model's tensors as checkpoints have them.

    Yields:
      For each tensor its Hugging Face name, a function that makes it in the given dtype, and its
      size in bytes, so that a writer need not hold them all.

    Raises:
      CheckpointError: an array of the params has not the shape the config gives it.
    """
    cast = numpy_dtype(dtype)
    tensors: dict[str, StoredTensor] = {}
    for leaf in table(config):
        array = param_at(params, leaf.path)
        if array is None or array.shape != leaf.param_shape:
            found = "missing" if array is None else f"of shape {list(array.shape)}"
            raise CheckpointError(
                f"the params' {leaf.path} is {found}, but the config makes it {list(leaf.param_shape)}"
            )
        for expert, name in enumerate(leaf.names):

            def load(slices: tuple[slice, ...], leaf=leaf, array=array, expert=expert) -> HostArray:
                one = np.asarray(array[expert] if leaf.experts else array)
                return np.ascontiguousarray(_oriented(one, leaf).astype(cast))[slices]

            tensors[name] = StoredTensor(name, Path(), leaf.shape, dtype, load)
    for name, tensor in packed_tensors(config, tensors).items():
        yield name, tensor.read, math.prod(tensor.shape) * cast.itemsize
