"""Acceptance measured by decoding with the engine, which teacher forcing only estimates."""

from __future__ import annotations

from collections.abc import Sequence

from dflash_jax.acceptance import total_acceptance
from dflash_jax.checkpoints import LoadedTarget
from dflash_jax.engine import Engine, EngineConfig, Models
from dflash_jax.models.config import DraftConfig
from dflash_jax.models.weights import DraftParams


def engine_acceptance(
    target: LoadedTarget,
    draft_config: DraftConfig,
    draft: DraftParams,
    prompts: Sequence[Sequence[int]],
    max_tokens: int,
) -> dict[str, float | None]:
    """Answers prompts greedily with the draft, and measures acceptance.

    Args:
      target: the model that the draft is for.
      draft_config, draft: the draft, for raw features.
      prompts: token ids.
      max_tokens: longest answer; the model's end tokens end it too.

    Returns:
      `mean_acceptance_length` and `accept_rate` over all answers (vLLM's conventions); None if nothing was drafted.
    """
    longest = max(len(prompt) for prompt in prompts) + max_tokens
    config = EngineConfig(max_slots=min(8, len(prompts)), max_model_len=longest, prefix_cache=False)
    engine = Engine(Models(target.params, target.config, draft, draft_config), config)
    completions = engine.generate(list(prompts), {"max_tokens": max_tokens})
    return total_acceptance(completion.metrics for completion in completions).ratios()
