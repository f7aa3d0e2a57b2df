"""DFlash 2: a path through the candidates of consecutive positions, each scored after the one before."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from dflash_jax.kernels.dispatch import Implementation
from dflash_jax.kernels.selector import select_path
from dflash_jax.models.drafters.dflash import DFlash
from dflash_jax.models.drafters.protocol import Proposal
from dflash_jax.models.weights import DraftParams
from dflash_jax.sampling import Purpose, Sampler, gumbel


class DFlash2(DFlash):
    """DFlash with a candidate selector."""

    def choose(
        self,
        params: DraftParams,
        hidden: Float[Array, "rows drafts hidden"],
        candidates: Int[Array, "rows drafts candidates"],
        scores: Float[Array, "rows drafts candidates"],
        anchor: Int[Array, " rows"],
        positions: Int[Array, "rows drafts"],
        sampler: Sampler,
        *,
        implementation: Implementation | None = None,
    ) -> Proposal:
        """The selector's path from the anchor; sampled where the temperature is above 0."""
        assert params.selector is not None
        # No noise is drawn as long as every row is greedy.
        noise = jax.lax.cond(
            jnp.any(sampler.temperature > 0),
            lambda: gumbel(sampler.seed, positions, Purpose.PROPOSE, candidates.shape[-1]),
            lambda: jnp.zeros(candidates.shape, jnp.float32),
        )
        with jax.named_scope("selector"):
            tokens, probs = select_path(
                candidates,
                scores,
                hidden @ params.selector.hidden_projection,
                anchor,
                params.selector.predecessor_codebook,
                params.selector.successor_codebook,
                sampler.temperature,
                noise,
                implementation=implementation,
            )
        return Proposal(tokens, candidates, probs)
