"""Which models wrote a state's contexts: their configs and weights, by content.

Keys and values on the device mean something only to the target and the draft that wrote them. Another
drafter of the same shapes would read them without complaint and draft worse, and no token would change;
so a state carries the identity of its models, and an engine that continues from it compares.
"""

from __future__ import annotations

import dataclasses
import hashlib
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PyTree, UInt32

from dflash_jax.engine.state import Models
from dflash_jax.kernels.compact import Compact, is_compact
from dflash_jax.models.config import DraftConfig, TargetConfig
from dflash_jax.models.matrix import Matrix, is_matrix
from dflash_jax.programs import Program


@dataclasses.dataclass(frozen=True)
class ModelIdentity:
    """One model by content.

    Attributes:
      name: what it is, for messages.
      digest: of its config and every weight, in hexadecimal; the same however the weights are laid out, and for compact
        ones the same as for what they are widened to.
    """

    name: str
    digest: str

    def __str__(self) -> str:
        return f"{self.name} ({self.digest[:8]})"


@dataclasses.dataclass(frozen=True)
class ModelsIdentity:
    """The target and the draft, if any, that write a state's contexts."""

    target: ModelIdentity
    draft: ModelIdentity | None = None

    def difference(self, other: ModelsIdentity) -> str | None:
        """What differs, as a clause for a message, `self` being the writer and `other` the reader; None if equal."""
        for kind in ("target", "draft"):
            wrote, reads = getattr(self, kind), getattr(other, kind)
            if wrote != reads:
                return f"its contexts were written by {wrote or 'no draft'}, and the {kind} here is {reads or 'none'}"
        return None


def identify(models: Models, target: ModelIdentity | None = None) -> ModelsIdentity:
    """The identity of an engine's models. Reads every weight once, on the device.

    Args:
      models: the models.
      target: the target's identity, if it is known; its weights are then not read.
    """
    target = target or _identify(models.target, models.target_config)
    if models.draft is None or models.draft_config is None:
        return ModelsIdentity(target)
    return ModelsIdentity(target, _identify(models.draft, models.draft_config))


def _identify(params: PyTree, config: TargetConfig | DraftConfig) -> ModelIdentity:
    kind = f"{config.family} target" if isinstance(config, TargetConfig) else f"{config.title} draft"
    name = f"a {kind} of {config.num_layers} layers and hidden size {config.hidden_size}"
    leaves = jax.tree_util.tree_leaves_with_path(params, is_leaf=lambda node: is_matrix(node) or is_compact(node))
    sums = [(jax.tree_util.keystr(path), leaf.dtype.name, _checksum(leaf)) for path, leaf in leaves]
    digest = hashlib.sha256(repr(config).encode())
    for path, dtype, checksum in jax.device_get(sums):
        digest.update(f"{path} {dtype} ".encode() + np.asarray(checksum).tobytes())
    return ModelIdentity(name, digest.hexdigest())


def _checksum(leaf: Array | Matrix | Compact) -> Array:
    if isinstance(leaf, Matrix):
        return _sums(leaf.value, transposed=leaf.layout == "out_in")
    return _sums(leaf, transposed=False)


@partial(Program, static=("transposed",))
def _sums(array: Array | Compact, *, transposed: bool) -> UInt32[Array, 2]:
    """Two sums over an array's bits, each weighted by its place, so that a value that moves changes them.

    Integer sums that wrap come out the same in whatever order they are taken.
    """
    array = array.astype(jnp.float32) if isinstance(array, Compact) else array
    bits = jax.lax.bitcast_convert_type(array, jnp.dtype(f"uint{8 * array.dtype.itemsize}")).astype(jnp.uint32)
    bits = bits.reshape(-1, bits.shape[-1]) if bits.ndim else bits.reshape(1, 1)
    row, column = (jax.lax.broadcasted_iota(jnp.uint32, bits.shape, axis) for axis in (0, 1))
    if transposed:
        row, column = column, row
    sums = []
    for of_row, of_column, offset in ((0x9E3779B1, 0x85EBCA77, 0x27D4EB2F), (0xC2B2AE3D, 0x165667B1, 0x2545F491)):
        weight = (row * jnp.uint32(of_row) + column * jnp.uint32(of_column)) | jnp.uint32(1)
        term = (bits + jnp.uint32(offset)) * weight
        sums.append(jnp.sum(term ^ (term >> 15), dtype=jnp.uint32))
    return jnp.stack(sums)
