"""What a logits processor is."""

from __future__ import annotations

from typing import ClassVar

from flax import struct
from jaxtyping import Array, Bool, Float

from dflash_jax.engine.processors.block import Block
from dflash_jax.engine.request import Request


class Processor(struct.PyTreeNode):
    """A change of logits. An instance is what it keeps for each slot, or for each row of a step.

    What depends on the output is worked out from the request's tokens, in `Block`, and kept nowhere else. So nothing
    here can fall behind them when a request is preempted, forked or restored.

    Attributes:
      parameters: the fields of `SamplingParams` that ask for it.
    """

    parameters: ClassVar[tuple[str, ...]] = ()

    @classmethod
    def empty(cls, entries: int, vocab_size: int) -> Processor:
        """Entries, numpy arrays, that change nothing."""
        raise NotImplementedError

    def fill(self, entry: int, request: Request) -> None:
        """Writes what a request asks for into one of the numpy entries."""
        raise NotImplementedError

    def wanted(self) -> Bool[Array, " rows"]:
        """Rows whose request asks for it."""
        raise NotImplementedError

    def apply(self, logits: Float[Array, "rows positions vocab"], block: Block) -> Float[Array, "rows positions vocab"]:
        """The changed logits of each position; minus infinity forbids a token."""
        raise NotImplementedError
