"""What an engine asks of a draft, whatever its kind.

A new kind is one file: a `DraftConfig` (or a subclass) whose `kind` names it, its weights, and a `Drafter` that is
registered under that name. A kind that only chooses among the candidates in another way inherits from `DFlash`.
"""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from dflash_jax.errors import ConfigError
from dflash_jax.kernels.context import Context, KeyValues
from dflash_jax.kernels.dispatch import Implementation
from dflash_jax.models.lm_head import LmHead
from dflash_jax.models.weights import TargetParams
from dflash_jax.sampling import Sampler


class Proposal(struct.PyTreeNode):
    """Drafted tokens with the distribution they were drawn from.

    `probs[r, l]` is q over `candidates[r, l]`; every other token has probability 0. A greedy proposal
    puts 1 on the drafted token. Where the draft's scores are not finite, neither is q.

    `margin[r, l]` is how far the best score of a position lies above the second, before anything is drawn. It tells
    how sure the draft is, and so which tokens are worth verifying; None if a kind of draft cannot say.
    """

    tokens: Int[Array, "rows drafts"]
    candidates: Int[Array, "rows drafts candidates"]
    probs: Float[Array, "rows drafts candidates"]
    margin: Float[Array, "rows drafts"] | None = None

    def first(self, count: int) -> Proposal:
        """The first `count` tokens of each block."""
        return jax.tree.map(lambda leaf: leaf[:, :count], self)


def without_damage(proposal: Proposal, vocab_size: int) -> tuple[Proposal, Bool[Array, " rows"]]:
    """A proposal that can be verified, also where the draft's scores are not finite.

    A row whose q is not finite proposes tokens of the vocabulary, any, with q one-hot: that costs acceptance, and the
    output stays what it is.

    Returns:
      The proposal, and which rows were damaged.
    """
    damaged = ~jnp.all(jnp.isfinite(proposal.probs), axis=(1, 2))
    tokens = jnp.clip(proposal.tokens, 0, vocab_size - 1)
    certain = (jnp.arange(proposal.probs.shape[-1]) == 0).astype(proposal.probs.dtype)

    def mend(instead, of):
        return jnp.where(damaged.reshape(-1, *[1] * (of.ndim - 1)), instead, of)

    mended = Proposal(
        mend(tokens, proposal.tokens),
        mend(tokens[..., None], proposal.candidates),
        mend(certain, proposal.probs),
        None if proposal.margin is None else mend(0, proposal.margin),
    )
    return mended, damaged


@runtime_checkable
class Drafter(Protocol):
    """A kind of draft: pure functions of its weights and config."""

    def context_entries(
        self,
        params: Any,
        config: Any,
        features: Float[Array, "rows tokens features"],
        positions: Int[Array, "rows tokens"],
    ) -> KeyValues:
        """What is kept of committed tokens in the draft's pages, which have the config's layers, heads and head_dim.

        Args:
          params, config: the draft.
          features: the target's hidden states after the config's `target_layer_ids`, concatenated.
          positions: absolute position of each token.
        """
        ...

    def propose(
        self,
        params: Any,
        config: Any,
        target: TargetParams,
        context: Context,
        anchor: Int[Array, " rows"],
        drafts: int,
        sampler: Sampler,
        *,
        shortlist: LmHead | None = None,
        implementation: Implementation | None = None,
    ) -> Proposal:
        """Drafts tokens for the positions after each row's anchor.

        What it draws at random must be keyed by the request's seed, the position and `Purpose.PROPOSE`, so that it
        neither depends on other requests nor is used again by the verification.

        Args:
          params, config: the draft.
          target: whose embedding and LM head it uses.
          context: the draft's pages; every row's holds exactly the tokens before its anchor.
          anchor: last committed token of each row.
          drafts: tokens to draft, k.
          sampler: of each row; a proposal at temperature 0 is greedy.
          shortlist: the part of the LM head to propose from; all of it when absent.
          implementation: of the kernels; see `kernels.dispatch`.
        """
        ...


_DRAFTERS: dict[str, Drafter] = {}


def register(kind: str, drafter: Drafter) -> None:
    """Makes a drafter the one of all configs of a kind."""
    _DRAFTERS[kind] = drafter


def drafter_of(config: Any) -> Drafter:
    """The drafter of a draft's config.

    Raises:
      ConfigError: nobody registered its kind.
    """
    if config.kind not in _DRAFTERS:
        raise ConfigError(f"the draft's kind {config.kind!r} is none of {', '.join(sorted(_DRAFTERS))}")
    return _DRAFTERS[config.kind]
