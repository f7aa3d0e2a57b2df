"""Training in mixed precision: matrices are multiplied in bfloat16 and summed in float32; all else is float32."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, PyTree

from dflash_jax.models.weights import TargetParams, is_matrix
from dflash_jax.training.values import Dtype

_PADDING = 32


@struct.dataclass
class MixedMatrix:
    """A matrix that `x @ matrix` multiplies by in mixed precision, in whichever model it stands."""

    value: Float[Array, "inputs outputs"]

    def __rmatmul__(self, x: Float[Array, "*batch inputs"]) -> Float[Array, "*batch outputs"]:
        flat = mixed_matmul(x.reshape(-1, x.shape[-1]), self.value)
        return flat.reshape(*x.shape[:-1], flat.shape[-1])


def in_precision(params: PyTree, dtype: Dtype) -> PyTree:
    """Weights that compute in the given precision; their gradients are float32 all the same."""
    if dtype == "float32":
        return params
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: MixedMatrix(leaf) if is_matrix(path, leaf) else leaf, params
    )


def rounded(target: TargetParams, dtype: Dtype) -> TargetParams:
    """A target that only runs forward, computing in the given precision.

    The matrices of its layers and its LM head are kept in bfloat16; everything between products stays float32.
    """
    if dtype == "float32":
        return target
    layers = jax.tree.map(
        lambda x: MixedMatrix(x.value.astype(jnp.bfloat16)) if isinstance(x, MixedMatrix) else x,
        in_precision(target.layers, dtype),
        is_leaf=lambda x: isinstance(x, MixedMatrix),
    )
    head = target.embedding.T if target.lm_head is None else target.lm_head
    return target.replace(layers=layers, lm_head=head.astype(jnp.bfloat16))


@jax.custom_vjp
def mixed_matmul(
    x: Float[Array, "batch inputs"], matrix: Float[Array, "inputs outputs"]
) -> Float[Array, "batch outputs"]:
    """x @ matrix, and gradients, from bfloat16 operands with float32 sums."""
    return _dot(x.astype(jnp.bfloat16), matrix.astype(jnp.bfloat16))


def _forward(x, matrix):
    x, matrix = x.astype(jnp.bfloat16), matrix.astype(jnp.bfloat16)
    return _dot(x, matrix), (x, matrix)


def _backward(residuals, gradient):
    x, matrix = residuals
    gradient = gradient.astype(jnp.bfloat16)
    # XLA's fast bfloat16 product on CPUs takes no transposed left operand. The padding, which adds zeros to
    # sums, keeps the transpose from being folded into the product.
    turned = jnp.pad(x.T, ((0, 0), (0, _PADDING)))
    return _dot_transposed(gradient, matrix), _dot(turned, jnp.pad(gradient, ((0, _PADDING), (0, 0))))


mixed_matmul.defvjp(_forward, _backward)


@jax.custom_vjp
def mixed_matmul_transposed(
    x: Float[Array, "batch inputs"], matrix: Float[Array, "outputs inputs"]
) -> Float[Array, "batch outputs"]:
    """x @ matrix.T in the same precision. The matrix is a constant: no gradient reaches it."""
    return _dot_transposed(x.astype(jnp.bfloat16), matrix.astype(jnp.bfloat16))


def _transposed_forward(x, matrix):
    return mixed_matmul_transposed(x, matrix), matrix


def _transposed_backward(matrix, gradient):
    return _dot(gradient.astype(jnp.bfloat16), matrix.astype(jnp.bfloat16)), None


mixed_matmul_transposed.defvjp(_transposed_forward, _transposed_backward)


def _dot(left, right):
    return jax.lax.dot_general(left, right, (((1,), (0,)), ((), ())), preferred_element_type=jnp.float32)


def _dot_transposed(left, right):
    return jax.lax.dot_general(left, right, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
