"""DFlash (arXiv 2602.06036): the best token of each position, all positions at once."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from dflash_jax.kernels.context import Context, KeyValues
from dflash_jax.kernels.dispatch import Implementation
from dflash_jax.models import draft
from dflash_jax.models.config import DraftConfig
from dflash_jax.models.drafters.protocol import Proposal
from dflash_jax.models.lm_head import LmHead, draft_head
from dflash_jax.models.weights import DraftParams, TargetParams
from dflash_jax.sampling import Sampler


class DFlash:
    """A block of masks in one pass, the LM head's best tokens as candidates, and a choice among them.

    A kind that differs in the choice overrides `choose`, and its config's `candidates`.
    """

    def context_entries(
        self,
        params: DraftParams,
        config: DraftConfig,
        features: Float[Array, "rows tokens features"],
        positions: Int[Array, "rows tokens"],
    ) -> KeyValues:
        """Keys and values of the features, layer by layer."""
        return draft.context_entries(params, config, features, positions)

    def propose(
        self,
        params: DraftParams,
        config: DraftConfig,
        target: TargetParams,
        context: Context,
        anchor: Int[Array, " rows"],
        drafts: int,
        sampler: Sampler,
        *,
        shortlist: LmHead | None = None,
        implementation: Implementation | None = None,
    ) -> Proposal:
        """See `Drafter.propose`."""
        run = draft.run_block(params, config, target.embedding, context, anchor, drafts, implementation=implementation)
        hidden = run[:, 1:]
        with jax.named_scope("lm_head"):
            head = draft_head(config, target, shortlist)
            # The second best tells how sure the draft is of the best.
            scores, tokens = head.best(hidden, max(config.candidates, min(2, head.size)), implementation=implementation)
        positions = context.row_lengths()[:, None] + 1 + jnp.arange(drafts)
        candidates, best = tokens[..., : config.candidates], scores[..., : config.candidates]
        proposal = self.choose(
            params, hidden, candidates, best, anchor, positions, sampler, implementation=implementation
        )
        return proposal.replace(margin=scores[..., 0] - scores[..., min(1, scores.shape[-1] - 1)])

    def choose(
        self,
        params: Any,
        hidden: Float[Array, "rows drafts hidden"],
        candidates: Int[Array, "rows drafts candidates"],
        scores: Float[Array, "rows drafts candidates"],
        anchor: Int[Array, " rows"],
        positions: Int[Array, "rows drafts"],
        sampler: Sampler,
        *,
        implementation: Implementation | None = None,
    ) -> Proposal:
        """The proposal among the candidates of each position, best first.

        Here it is the best one, with q one-hot, under sampling too: the positions are independent marginals, and
        drawing each one alone makes blocks that the target rejects.
        """
        best = candidates[..., :1]
        certain = jnp.where(jnp.isfinite(scores[..., :1]), 1.0, jnp.nan)
        return Proposal(best[..., 0], best, certain.astype(jnp.float32))
