"""A matrix that stays in memory as a checkpoint has it: codes of few bits with their scales, or floats of 16 bits.

Its values are those that the codes stand for, in float32, bit for bit as the formats define them. The product with it
(`kernels.matmul`) widens what it reads; nothing keeps the widened matrix.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Float, Int, Num, UInt8


@dataclasses.dataclass(frozen=True)
class Format:
    """How weights are kept.

    Attributes:
      dtype: of the array of codes.
      inputs: weights of a unit, the smallest part of a row that can be widened alone.
      size: elements of the array that a unit takes.
      widen: the weights of units [..., size] as [..., inputs]; scales of other arrays are not applied.
      scaled: whether there are scales in an array of their own.
      halves: where a unit has scales and offsets, as floats of 16 bits: their first bytes.
    """

    dtype: str
    inputs: int
    size: int
    widen: Callable[[Array], Array]
    scaled: bool = False
    halves: tuple[int, ...] = ()

    @property
    def dtype_of_codes(self) -> np.dtype:
        """Of the codes on the host."""
        return np.dtype(jnp.dtype(self.dtype))


GROUP_UNIT = 16
"""Inputs that share a scale are a multiple of this, unless all of a row do."""


class Compact(struct.PyTreeNode):
    """A matrix [outputs, inputs] as its format keeps it.

    Where an array is expected it stands for its values: it has their shape, `compact[rows]` is some of its rows
    widened, and `compact.astype(dtype)` all of them.

    Attributes:
      codes: a row of units for each output.
      scales: of groups of inputs, for formats whose codes do not hold them; [outputs, 0] for others.
      format: its name in `FORMATS`; GGUF's or safetensors' own.
      group: inputs that share a scale; 0 where the codes hold the scales.
      dtype_name: what rows are widened to, and what products are computed for: the dtype of activations.
    """

    codes: Num[Array, "outputs size"]
    scales: Float[Array, "outputs groups"]
    format: str = struct.field(pytree_node=False)
    group: int = struct.field(pytree_node=False, default=0)
    dtype_name: str = struct.field(pytree_node=False, default="float32")

    # numpy would otherwise make an array of objects of it.
    __array_ufunc__ = None

    @property
    def shape(self) -> tuple[int, int]:
        """(outputs, inputs)."""
        outputs, size = self.codes.shape
        kind = FORMATS[self.format]
        return outputs, size // kind.size * kind.inputs

    @property
    def ndim(self) -> int:
        """2."""
        return 2

    @property
    def size(self) -> int:
        """Number of weights."""
        outputs, inputs = self.shape
        return outputs * inputs

    @property
    def dtype(self) -> jnp.dtype:
        """Of widened rows and of products."""
        return jnp.dtype(self.dtype_name)

    @property
    def nbytes(self) -> int:
        """Bytes that it takes."""
        return self.codes.nbytes + self.scales.nbytes

    def __getitem__(self, rows: Int[Array, "*batch"]) -> Float[Array, "*batch inputs"]:
        return self._widened(self.codes[rows], self.scales[rows]).astype(self.dtype)

    def take(self, rows: Int[Array, " chosen"]) -> Compact:
        """Some rows, as they are kept."""
        return self.replace(codes=self.codes[rows], scales=self.scales[rows])

    def astype(self, dtype: Any) -> Float[Array, "outputs inputs"]:
        """All weights, widened to float32 and then cast."""
        return self._widened(self.codes, self.scales).astype(dtype)

    def _widened(
        self, codes: Num[Array, "*batch size"], scales: Float[Array, "*batch groups"]
    ) -> Float[Array, "*batch inputs"]:
        kind = FORMATS[self.format]
        values = kind.widen(codes.reshape(*codes.shape[:-1], -1, kind.size)).reshape(*codes.shape[:-1], self.shape[1])
        if not kind.scaled:
            return values
        # The last group may be cut.
        return values * jnp.repeat(scales, min(self.group, self.shape[1]), axis=-1)[..., : self.shape[1]]


def widened(matrix: Array | np.ndarray | Compact) -> Any:
    """The weights as an array in the dtype of activations; an array is itself."""
    return matrix.astype(matrix.dtype) if isinstance(matrix, Compact) else matrix


def is_compact(node: Any) -> bool:
    """Whether a node of a pytree is a compact matrix."""
    return isinstance(node, Compact)


def compact(
    codes: np.ndarray, format: str, scales: np.ndarray | None = None, group: int = 0, dtype: str = "float32"
) -> Compact:
    """A compact matrix of codes on the host.

    Args:
      codes: [outputs, size] in the format's dtype.
      format: its name in `FORMATS`.
      scales: [outputs, groups], for formats that have them.
      group: inputs that share a scale.
      dtype: of activations.

    Raises:
      ValueError: arrays that the format does not have.
    """
    kind = FORMATS[format]
    if codes.ndim != 2 or codes.dtype.name != kind.dtype or codes.shape[1] % kind.size:
        raise ValueError(
            f"codes of {format} are {kind.dtype} [outputs, units of {kind.size}], not {codes.dtype} {codes.shape}"
        )
    if kind.scaled:
        groups = -(-codes.shape[1] // group) if group else 0
        found = None if scales is None else scales.shape
        if scales is None or found != (codes.shape[0], groups):
            raise ValueError(f"scales of {format} are [outputs, groups of {group} inputs], not {found}")
    else:
        scales = np.zeros((codes.shape[0], 0), np.float32)
    return Compact(jax.device_put(np.array(codes)), jax.device_put(scales.astype(np.float32)), format, group, dtype)


def rounded(matrix: Float[np.ndarray, "outputs inputs"], dtype: str = "float32") -> Compact:
    """A matrix rounded to 8 bits: whole numbers up to 127, in groups of 32 inputs that share a scale.

    Args:
      matrix: finite values.
      dtype: of activations.
    """
    outputs, inputs = matrix.shape
    groups = -(-inputs // INT8_GROUP)
    padded = np.zeros((outputs, groups, INT8_GROUP), np.float32)
    padded.reshape(outputs, -1)[:, :inputs] = matrix
    scales = np.abs(padded).max(axis=2) / np.float32(127)
    # A group of zeros has no size, and one of the smallest numbers none that can be divided by.
    divisors = np.where(scales < np.finfo(np.float32).tiny, np.float32(np.inf), scales)
    codes = np.rint(padded / divisors[..., None]).astype(np.int8).reshape(outputs, -1)[:, :inputs]
    return compact(np.ascontiguousarray(codes), "I8", scales, INT8_GROUP, dtype)


def rounded_bytes(outputs: int, inputs: int) -> int:
    """What a matrix takes that `rounded` makes."""
    return outputs * (inputs + 4 * -(-inputs // INT8_GROUP))


INT8_GROUP = 32
"""Inputs that share a scale in what `rounded` makes."""


def all_finite(codes: np.ndarray, format: str, scales: np.ndarray | None = None) -> bool:
    """Whether every weight that the codes stand for is finite, from what scales them."""
    kind = FORMATS[format]
    if kind.halves:
        units = codes.reshape(*codes.shape[:-1], -1, kind.size)
        # The exponent of a float of 16 bits is all ones where it is not finite; the fields are little-endian.
        return not any(bool(np.any((units[..., at + 1] & 0x7C) == 0x7C)) for at in kind.halves)
    if codes.dtype.itemsize == 2:
        exponent = 0x7C00 if format == "F16" else 0x7F80
        return not bool(np.any((codes.view(np.uint16) & exponent) == exponent))
    assert scales is not None
    if codes.dtype != np.int8 and bool(np.any((codes.view(np.uint8) & 0x7F) == 0x7F)):
        return False
    largest = 128.0 if codes.dtype == np.int8 else float(jnp.finfo(jnp.float8_e4m3fn).max)
    with np.errstate(over="ignore", invalid="ignore"):
        return bool(np.all(np.isfinite(scales.astype(np.float32) * np.float32(largest))))


def _half(units: UInt8[Array, "*units size"], at: int) -> Float[Array, "*units 1"]:
    """The float of 16 bits at a byte of each unit."""
    bits = jax.lax.bitcast_convert_type(units[..., at : at + 2], jnp.float16)
    return bits.astype(jnp.float32)[..., None]


def _nibbles(codes: UInt8[Array, "*units half"]) -> UInt8[Array, "*units both"]:
    """The low halves of all bytes, then the high ones."""
    return jnp.concatenate([codes & 15, codes >> 4], axis=-1)


def _fifth_bits(bits: UInt8[Array, "*units 4"]) -> UInt8[Array, "*units 32"]:
    """16 where a bit is set, lowest bits first."""
    spread = (bits[..., None] >> jnp.arange(8, dtype=jnp.uint8)) & 1
    return spread.reshape(*bits.shape[:-1], 32) << 4


def _float(codes: Array) -> Array:
    return codes.astype(jnp.float32)


def _signed(codes: Array) -> Array:
    return jax.lax.bitcast_convert_type(codes, jnp.int8).astype(jnp.float32)


def _q8_0(units):
    return _half(units, 0) * _signed(units[..., 2:])


def _q4_0(units):
    return _half(units, 0) * (_float(_nibbles(units[..., 2:])) - 8)


def _q4_1(units):
    return _half(units, 0) * _float(_nibbles(units[..., 4:])) + _half(units, 2)


def _q5_0(units):
    codes = _nibbles(units[..., 6:]) | _fifth_bits(units[..., 2:6])
    return _half(units, 0) * (_float(codes) - 16)


def _q5_1(units):
    codes = _nibbles(units[..., 8:]) | _fifth_bits(units[..., 4:8])
    return _half(units, 0) * _float(codes) + _half(units, 2)


def _sub_scales(units):
    """The scales and the least values of eight times 32 weights, packed in 6 bits each."""
    first, second, third = units[..., 4:8], units[..., 8:12], units[..., 12:16]
    scales = jnp.concatenate([first & 63, (third & 15) | ((first >> 6) << 4)], axis=-1)
    least = jnp.concatenate([second & 63, (third >> 4) | ((second >> 6) << 4)], axis=-1)
    return _half(units, 0) * _float(scales), _half(units, 2) * _float(least)


def _q4_k(units):
    scales, least = _sub_scales(units)
    codes = _nibbles(units[..., 16:].reshape(*units.shape[:-1], 4, 32)).reshape(*units.shape[:-1], 8, 32)
    return (scales[..., None] * _float(codes) - least[..., None]).reshape(*units.shape[:-1], 256)


def _q5_k(units):
    scales, least = _sub_scales(units)
    codes = _nibbles(units[..., 48:].reshape(*units.shape[:-1], 4, 32)).reshape(*units.shape[:-1], 8, 32)
    fifth = (units[..., None, 16:48] >> jnp.arange(8, dtype=jnp.uint8)[:, None]) & 1
    codes = codes | (fifth << 4)
    return (scales[..., None] * _float(codes) - least[..., None]).reshape(*units.shape[:-1], 256)


def _q6_k(units):
    low = _nibbles(units[..., :128].reshape(*units.shape[:-1], 2, 64))
    low = low.reshape(*units.shape[:-1], 2, 4, 32)
    high = units[..., 128:192].reshape(*units.shape[:-1], 2, 1, 32)
    high = (high >> jnp.arange(0, 8, 2, dtype=jnp.uint8)[:, None]) & 3
    codes = _float(low | (high << 4)) - 32
    scales = _half(units, 208) * _signed(units[..., 192:208])
    return (scales[..., None] * codes.reshape(*units.shape[:-1], 16, 16)).reshape(*units.shape[:-1], 256)


FORMATS: Mapping[str, Format] = {
    "Q8_0": Format("uint8", 32, 34, _q8_0, halves=(0,)),
    "Q4_0": Format("uint8", 32, 18, _q4_0, halves=(0,)),
    "Q4_1": Format("uint8", 32, 20, _q4_1, halves=(0, 2)),
    "Q5_0": Format("uint8", 32, 22, _q5_0, halves=(0,)),
    "Q5_1": Format("uint8", 32, 24, _q5_1, halves=(0, 2)),
    "Q4_K": Format("uint8", 256, 144, _q4_k, halves=(0, 2)),
    "Q5_K": Format("uint8", 256, 176, _q5_k, halves=(0, 2)),
    "Q6_K": Format("uint8", 256, 210, _q6_k, halves=(208,)),
    "I8": Format("int8", 1, 1, _float, scaled=True),
    "F8_E4M3": Format("float8_e4m3fn", 1, 1, _float, scaled=True),
    "F16": Format("float16", 1, 1, _float),
    "BF16": Format("bfloat16", 1, 1, _float),
}
"""Every format, by the name that GGUF or safetensors has for it."""
