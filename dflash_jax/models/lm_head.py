"""The LM head: the one place that knows where its matrix is, its layout, and how its logits are scaled."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Float, Int

from dflash_jax.kernels import lm_head as ops
from dflash_jax.kernels.dispatch import Implementation
from dflash_jax.models.config import DraftConfig
from dflash_jax.models.matrix import Matrix
from dflash_jax.models.weights import TargetParams

FORBIDDEN = -1e30
"""The score of a forbidden token among a draft's candidates."""


class LmHead(struct.PyTreeNode):
    """From final hidden states to logits.

    Attributes:
      weight: hidden states to logits.
      tokens: the token id of each logit, ascending, so that of equal logits the lowest id is the best; None for the
        whole vocabulary.
      multiplier: scales the logits.
      softcap: c of c * tanh(logits / c), after that; None for no cap.
      process: what becomes of logits before the best are chosen, given `tokens` too; minus infinity forbids a token.
    """

    weight: Matrix
    tokens: Int[Array, " listed"] | None = None
    multiplier: float = struct.field(pytree_node=False, default=1.0)
    softcap: float | None = struct.field(pytree_node=False, default=None)
    process: Callable[[Array, Array | None], Array] | None = struct.field(pytree_node=False, default=None)

    @property
    def size(self) -> int:
        """How many tokens it has logits for."""
        return self.weight.shape[1]

    def logits(
        self, hidden: Float[Array, "*batch hidden"], *, implementation: Implementation | None = None
    ) -> Float[Array, "*batch logits"]:
        """Logits in float32, of the whole vocabulary or of a shortlist."""
        return ops.head_logits(
            hidden,
            self.weight.value,
            layout=self.weight.layout,
            multiplier=self.multiplier,
            softcap=self.softcap,
            implementation=implementation,
        )

    def best(
        self, hidden: Float[Array, "*batch hidden"], top_k: int, *, implementation: Implementation | None = None
    ) -> tuple[Float[Array, "*batch best"], Int[Array, "*batch best"]]:
        """The `top_k` largest logits and their tokens, best first; of equal ones the lowest ids."""
        if self.process is not None:
            return self._best_processed(hidden, top_k, implementation)
        values, tokens = ops.best_tokens(
            hidden,
            self.weight.value,
            layout=self.weight.layout,
            top_k=top_k,
            multiplier=self.multiplier,
            softcap=self.softcap,
            implementation=implementation,
        )
        return values, tokens if self.tokens is None else self.tokens[tokens]

    def _best_processed(self, hidden, top_k: int, implementation: Implementation | None):
        assert self.process is not None
        logits = self.process(self.logits(hidden, implementation=implementation), self.tokens)
        values, at = jax.lax.top_k(logits, top_k)
        # A forbidden token is a candidate where too few are allowed. It is a bad one, and no damage.
        values = jnp.where(values == -jnp.inf, FORBIDDEN, values)
        return values, at if self.tokens is None else self.tokens[at]

    def writes_logits(
        self, hidden: Float[Array, "*batch hidden"], *, implementation: Implementation | None = None
    ) -> bool:
        """Whether the argmax by `best` writes all logits to memory, where others may as well use them."""
        weight = self.weight
        return ops.writes_logits(hidden, weight.value, layout=weight.layout, implementation=implementation)


def target_head(params: TargetParams) -> LmHead:
    """The target's LM head; the embedding itself, not a copy, if it is tied."""
    return LmHead(Matrix(params.embedding, "out_in") if params.lm_head is None else params.lm_head)


def make_shortlist(params: TargetParams, tokens: Sequence[int]) -> LmHead:
    """The target's head for some tokens only: most of a vocabulary is rare, and its LM head large. It is a copy."""
    ids = jax.device_put(np.array(sorted(set(tokens)), np.int32))
    return LmHead(_with_outputs(target_head(params).weight, ids), ids)


@jax.jit
def _with_outputs(weight: Matrix, ids: Int[Array, " taken"]) -> Matrix:
    return weight.with_outputs(ids)


def draft_head(config: DraftConfig, params: TargetParams, shortlist: LmHead | None = None) -> LmHead:
    """The target's head, or a shortlist of it, with its logits scaled and capped as the draft's config says."""
    head = target_head(params) if shortlist is None else shortlist
    return head.replace(multiplier=config.output_multiplier, softcap=config.final_logit_softcap)
