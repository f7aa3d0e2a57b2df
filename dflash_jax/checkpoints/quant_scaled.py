"""Weights quantised to 8 bits: each keeps its shape and name, and its scales stand beside it."""

from __future__ import annotations

import re

import numpy as np

from dflash_jax.checkpoints.quant_settings import Settings, Tensors, misfit
from dflash_jax.errors import quote
from dflash_jax.families.leaf import HostArray, Stored, StoredTensor
from dflash_jax.kernels.compact import GROUP_UNIT

_SCALES = ("F64", "F32", "F16", "BF16", "F8_E8M0")
# Scales of what is not quantised here: inputs, outputs and cached keys and values.
_OTHER_SCALES = re.compile(r"(.*\.)?(input_scale|output_scale|activation_scale|k_scale|v_scale)")


def fp8(stored: Tensors, settings: Settings) -> dict[str, StoredTensor]:
    """`fp8` of transformers (`FineGrainedFP8Config`), and AutoFP8's, whose scales are called `weight_scale`."""
    settings.choose("fmt", ("e4m3",), "e4m3")
    settings.choose("expert_dtype", ("fp8",), "fp8")
    return _scaled(stored, settings.block("weight_block_size", settings.get("weight_block_size")), "F8_E4M3")


def compressed(stored: Tensors, settings: Settings) -> dict[str, StoredTensor]:
    """compressed-tensors of 8 bits, floats or integers, with a scale per tensor, row or block."""
    settings.choose("format", ("float-quantized", "int-quantized", "naive-quantized"), "")
    groups = settings.get("config_groups", {})
    kinds = set()
    for name, group in groups.items() if isinstance(groups, dict) else ():
        weights = group.get("weights") if isinstance(group, dict) else None
        if not isinstance(weights, dict) or weights.get("num_bits") != 8 or weights.get("symmetric", True) is not True:
            raise settings.fault(f"config_groups[{quote(name)}].weights", weights, "symmetric 8 bits")
        key, kind = f"config_groups[{quote(name)}].weights", weights.get("type", "int")
        if kind not in ("int", "float"):
            raise settings.fault(f"{key}.type", kind, "'int' or 'float'")
        block = settings.block(f"{key}.block_structure", weights.get("block_structure"))
        kinds.add((block, "I8" if kind == "int" else "F8_E4M3"))
    if len(kinds) != 1:
        raise settings.fault("config_groups", groups, "groups of weights of the same type with the same blocks")
    return _scaled(stored, *kinds.pop())


def _scaled(stored: Tensors, block: tuple[int, int] | None, dtype: str) -> dict[str, StoredTensor]:
    scales = {name + end: name for name in stored for end in ("_scale_inv", "_scale") if name + end in stored}
    dense = {
        name: tensor for name, tensor in stored.items() if name not in scales and not _OTHER_SCALES.fullmatch(name)
    }
    for scale, name in scales.items():
        dense[name] = _scaled_tensor(stored[name], stored[scale], block, dtype)
    return dense


def _scaled_tensor(
    weight: StoredTensor, scale: StoredTensor, block: tuple[int, int] | None, dtype: str
) -> StoredTensor:
    if weight.dtype != dtype or len(weight.shape) < 2 or 0 in weight.shape:
        raise misfit(
            weight,
            f"is of dtype {weight.dtype} and shape {list(weight.shape)} but has a scale beside it, "
            f"so that it must be {dtype} of two axes or more",
        )
    if scale.dtype not in _SCALES:
        raise misfit(scale, f"is of dtype {scale.dtype}, but scales must be one of {', '.join(_SCALES)}")
    rows, columns = weight.shape[-2:]
    steps = _steps(weight.shape, scale.shape, block)
    if steps is None:
        blocks = f" in blocks of {list(block)}" if block else ""
        raise misfit(
            scale, f"has shape {list(scale.shape)}, which is no scale for a weight of {list(weight.shape)}{blocks}"
        )
    leading = len(weight.shape) - 2
    grid = (-(-rows // steps[0]), -(-columns // steps[1]))

    def load(slices: tuple[slice, ...]) -> HostArray:
        first, rest = slices[:leading], slices[leading:]
        values = _floats(weight.read(*first))
        factors = _floats(scale.read(*(first if len(scale.shape) == len(weight.shape) else ())))
        if len(scale.shape) == len(weight.shape):
            # Repeated along columns last, so that the larger array is made once.
            factors = np.repeat(factors, steps[0], axis=-2)[..., :rows, :]
            factors = np.repeat(factors, steps[1], axis=-1)[..., :columns]
        with np.errstate(all="ignore"):  # what is not finite is told with the tensor's name
            values *= factors
        return values[(slice(None),) * leading + rest]

    def stored() -> Stored:
        factors = _floats(scale.read()).reshape(grid)
        return Stored(weight.dtype, weight.read(), np.repeat(factors, steps[0], axis=0)[:rows], steps[1])

    if leading or (steps[1] < columns and steps[1] % GROUP_UNIT):
        return StoredTensor(weight.name, weight.file, weight.shape, weight.dtype, load)
    size = rows * (columns + 4 * grid[1])
    return StoredTensor(weight.name, weight.file, weight.shape, weight.dtype, load, stored, size)


def _floats(array: HostArray) -> HostArray:
    with np.errstate(over="ignore"):
        return array.astype(np.float32)


def _steps(weight: tuple[int, ...], scale: tuple[int, ...], block: tuple[int, int] | None) -> tuple[int, int] | None:
    """Rows and columns of a weight that share a scale; None if the shapes say that it is none."""
    rows, columns = weight[-2:]
    if block is None:
        if scale in ((), (1,), (*weight[:-2], 1, 1)):
            return rows, columns
        return (1, columns) if scale == (*weight[:-1], 1) else None
    # A block may be larger than any memory.
    block = (min(block[0], rows), min(block[1], columns))
    grid = (-(-rows // block[0]), -(-columns // block[1]))
    return block if scale == (*weight[:-2], *grid) else None
