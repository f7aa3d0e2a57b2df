"""Weights packed into 32-bit integers, transposed, with a scale and a zero for each group of inputs: AWQ and GPTQ."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from jaxtyping import Float, Int, UInt8

from dflash_jax.checkpoints.quant_settings import Settings, Tensors, misfit
from dflash_jax.families.leaf import HostArray, StoredTensor

# Column j of eight lies in the nibble at place j of this (AutoAWQ packs columns 0, 2, 4, 6, 1, 3, 5, 7 upwards).
_AWQ_NIBBLES = [0, 4, 1, 5, 2, 6, 3, 7]


def awq(stored: Tensors, settings: Settings) -> dict[str, StoredTensor]:
    """AWQ as AutoAWQ's GEMM version packs it: eight outputs in an integer."""
    settings.choose("version" if settings.get("version") else "format", ("gemm",), "gemm")
    settings.choose("bits", (4,), 4)
    settings.choose("zero_point", (True,), True)
    group_size = settings.group_size()

    def weight(parts: _Parts) -> tuple[tuple[int, int], Callable[[], Float[np.ndarray, "inputs outputs"]]]:
        qweight, scales, qzeros = parts("qweight"), parts("scales"), parts("qzeros")
        inputs, outputs = qweight.shape[0], qweight.shape[1] * 8
        groups = 1 if group_size == -1 else inputs // group_size
        size = inputs if group_size == -1 else group_size
        parts.expect("qweight", (groups * size, outputs // 8))
        parts.expect("qzeros", (groups, outputs // 8))
        parts.expect("scales", (groups, outputs))

        def read() -> Float[np.ndarray, "inputs outputs"]:
            values = _unpack(qweight.read(), 4)[..., _AWQ_NIBBLES].reshape(inputs, outputs)
            zeros = _unpack(qzeros.read(), 4)[..., _AWQ_NIBBLES].reshape(groups, outputs)
            return _dequantise(values, zeros, scales.read(), np.arange(inputs) // size)

        return (inputs, outputs), read

    return _packed(stored, weight, "AWQ-4")


def gptq(stored: Tensors, settings: Settings) -> dict[str, StoredTensor]:
    """GPTQ as AutoGPTQ and GPTQModel pack it: several inputs in an integer of `qweight`, several outputs in one of
    `qzeros`. Format 1 stores zeros less one."""
    bits = settings.choose("bits", (4, 8), 4)
    key = "checkpoint_format" if settings.get("checkpoint_format") else "format"
    less_one = settings.choose(key, ("gptq", "gptq_v2"), "gptq") == "gptq"
    symmetric = settings.choose("sym", (True, False), True)
    if settings.get("dynamic"):
        raise settings.fault("dynamic", settings.get("dynamic"), "the same bits and groups for all layers")
    ordered = settings.choose("desc_act", (True, False), False)
    group_size, per, middle = settings.group_size(), 32 // bits, 1 << (bits - 1)

    def weight(parts: _Parts) -> tuple[tuple[int, int], Callable[[], Float[np.ndarray, "inputs outputs"]]]:
        qweight, scales, qzeros = parts("qweight"), parts("scales"), parts("qzeros")
        inputs, outputs = qweight.shape[0] * per, qweight.shape[1]
        groups = 1 if group_size == -1 else -(-inputs // group_size)
        parts.expect("scales", (groups, outputs))
        parts.expect("qzeros", (groups, outputs // per))
        order = parts("g_idx") if ordered or "g_idx" in parts else None
        if order is not None:
            parts.expect("g_idx", (inputs,))

        def read() -> Float[np.ndarray, "inputs outputs"]:
            values = _unpack(qweight.read(), bits).swapaxes(1, 2).reshape(inputs, outputs)
            zeros = _unpack(qzeros.read(), bits).reshape(groups, outputs)
            if symmetric and zeros.min() == zeros.max() and zeros[0, 0] in (middle - 1, middle):
                # Some writers leave a symmetric zero as it is and still call the format 1.
                zeros = np.full_like(zeros, middle)
            elif less_one:
                zeros = (zeros + np.uint8(1)) & np.uint8((1 << bits) - 1)
            index = np.arange(inputs) // (inputs if group_size == -1 else min(group_size, inputs))
            if order is not None:
                index = order.read()
                if index.min() < 0 or index.max() >= groups:
                    raise misfit(order, f"names groups {index.min()} to {index.max()} of {groups}")
            return _dequantise(values, zeros, scales.read(), index)

        return (inputs, outputs), read

    return _packed(stored, weight, f"GPTQ-{bits}")


class _Parts:
    """The tensors that make up one packed weight."""

    def __init__(self, stored: Tensors, base: str):
        self._stored, self._base = stored, base

    def __contains__(self, part: str) -> bool:
        return f"{self._base}.{part}" in self._stored

    def __call__(self, part: str) -> StoredTensor:
        whole = self._stored[f"{self._base}.qweight"]
        if part not in self:
            raise misfit(whole, f"has no {part} beside it")
        tensor, axes = self._stored[f"{self._base}.{part}"], 1 if part == "g_idx" else 2
        dtypes = ("F16", "BF16", "F32") if part == "scales" else ("I32",)
        if tensor.dtype not in dtypes or len(tensor.shape) != axes or 0 in tensor.shape:
            raise misfit(
                tensor,
                f"is of dtype {tensor.dtype} and shape {list(tensor.shape)}, "
                f"but {part} must be {' or '.join(dtypes)} of {axes} axes",
            )
        return tensor

    def expect(self, part: str, shape: tuple[int, ...]) -> None:
        if self(part).shape != shape:
            raise misfit(self(part), f"has shape {list(self(part).shape)}, but {part} must be of {list(shape)} here")


def _packed(
    stored: Tensors,
    weight: Callable[[_Parts], tuple[tuple[int, int], Callable[[], Float[np.ndarray, "inputs outputs"]]]],
    dtype: str,
) -> dict[str, StoredTensor]:
    """Weights under their usual names, [outputs, inputs], in place of the parts that they are packed into."""
    bases = [name.removesuffix(".qweight") for name in stored if name.endswith(".qweight")]
    parts = {f"{base}.{part}" for base in bases for part in ("qweight", "qzeros", "scales", "g_idx")}
    dense = {name: tensor for name, tensor in stored.items() if name not in parts}
    for base in bases:
        (inputs, outputs), read = weight(_Parts(stored, base))

        def load(slices: tuple[slice, ...], read=read) -> HostArray:
            return read().T[slices]

        whole = stored[f"{base}.qweight"]
        dense[f"{base}.weight"] = StoredTensor(whole.name, whole.file, (outputs, inputs), dtype, load)
    return dense


def _unpack(packed: Int[np.ndarray, "rows columns"], bits: int) -> UInt8[np.ndarray, "rows columns per"]:
    """The numbers in each integer, lowest bits first."""
    shifts = np.arange(0, 32, bits, dtype=np.uint32)
    return ((packed.view(np.uint32)[..., None] >> shifts) & np.uint32((1 << bits) - 1)).astype(np.uint8)


def _dequantise(
    values: UInt8[np.ndarray, "inputs outputs"],
    zeros: UInt8[np.ndarray, "groups outputs"],
    scales: Float[np.ndarray, "groups outputs"],
    group: Int[np.ndarray, " inputs"],
) -> Float[np.ndarray, "inputs outputs"]:
    with np.errstate(all="ignore"):
        return (values.astype(np.float32) - zeros.astype(np.float32)[group]) * scales.astype(np.float32)[group]
