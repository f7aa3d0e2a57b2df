"""The one type of a weight that activations are multiplied by: its values, their layout, and the precision."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Int, PyTree

from dflash_jax.kernels.compact import Compact, is_compact, widened
from dflash_jax.kernels.matmul import Layout, matmul


class Matrix(struct.PyTreeNode):
    """What `x @ matrix` multiplies an array x by.

    Attributes:
      value: the values; a compact matrix, which is "out_in", widens them as it is read.
      layout: "in_out" is [inputs, outputs], for XLA; "out_in" is [outputs, inputs], for native code. Native products
        have no derivative, so weights that are trained are "in_out".
      mixed: round both factors to bfloat16 and sum in float32, as training in mixed precision does.
    """

    value: Float[Array, "rows columns"] | Compact
    layout: Layout = struct.field(pytree_node=False, default="in_out")
    mixed: bool = struct.field(pytree_node=False, default=False)

    # numpy would otherwise make an array of objects of it.
    __array_ufunc__ = None

    def __rmatmul__(self, x: Float[Array, "*batch inputs"]) -> Float[Array, "*batch outputs"]:
        return matmul(jnp.asarray(x), self.value, layout=self.layout, mixed=self.mixed)

    @property
    def shape(self) -> tuple[int, int]:
        """(inputs, outputs), in either layout."""
        rows, columns = self.value.shape
        return (rows, columns) if self.layout == "in_out" else (columns, rows)

    @property
    def dtype(self) -> jnp.dtype:
        """Of the values."""
        return self.value.dtype

    @property
    def in_out(self) -> Float[Array, "inputs outputs"]:
        """The values as [inputs, outputs]."""
        return widened(self.laid_out("in_out").value)

    @property
    def out_in(self) -> Float[Array, "outputs inputs"]:
        """The values as [outputs, inputs]."""
        return widened(self.laid_out("out_in").value)

    def laid_out(self, layout: Layout) -> Matrix:
        """The matrix in a layout; itself if it has that layout, and widened if it was compact and has not."""
        return self if layout == self.layout else self.replace(value=widened(self.value).T, layout=layout)

    def with_outputs(self, outputs: Int[Array, " chosen"]) -> Matrix:
        """The matrix of some outputs, kept as this one is."""
        if isinstance(self.value, Compact):
            return self.replace(value=self.value.take(outputs))
        return self.replace(value=self.value[outputs] if self.layout == "out_in" else self.value[:, outputs])

    @property
    def is_compact(self) -> bool:
        """Whether it is kept as a checkpoint has it."""
        return is_compact(self.value)


def is_matrix(node: Any) -> bool:
    """Whether a node of a pytree is a matrix."""
    return isinstance(node, Matrix)


def map_matrices(function: Callable[[Matrix], Matrix], tree: PyTree) -> PyTree:
    """The tree with every matrix replaced; the same tree if all are replaced by themselves."""
    nodes, form = jax.tree.flatten(tree, is_leaf=is_matrix)
    new = [function(node) if is_matrix(node) else node for node in nodes]
    return (
        tree
        if all(after is before for after, before in zip(new, nodes, strict=True))
        else jax.tree.unflatten(form, new)
    )
