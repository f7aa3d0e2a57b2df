"""What makes a run impossible, checked before its first step."""

from __future__ import annotations

from dflash_jax.errors import ConfigError
from dflash_jax.models.config import DraftConfig, TargetConfig
from dflash_jax.training.config import TrainConfig
from dflash_jax.training.data.dataset import Dataset
from dflash_jax.training.objective.sampled_softmax import SubsetPlan

# Of a step: their features alone are some kilobytes each.
_MAX_STEP_TOKENS = 2**25


def check_shapes(config: TrainConfig) -> None:
    """Raises ConfigError unless the sizes of a step fit each other."""
    section = config.optimiser
    if section.sequences % section.accumulate:
        raise ConfigError(
            f"optimiser.accumulate {section.accumulate} does not divide optimiser.sequences {section.sequences}; "
            "a step is computed in equal parts"
        )
    tokens = section.sequences * config.data.max_length
    if tokens > _MAX_STEP_TOKENS:
        raise ConfigError(
            f"optimiser.sequences {section.sequences} of data.max_length {config.data.max_length} are {tokens:,} "
            f"tokens in a step; make one smaller, it can have {_MAX_STEP_TOKENS:,}"
        )
    for name, anchors in (("optimiser", section.anchors), ("evaluation", config.evaluation.anchors)):
        if anchors > config.data.max_length:
            raise ConfigError(
                f"{name}.anchors {anchors} is more than data.max_length {config.data.max_length}; "
                "a sequence has no more places for anchors than tokens"
            )


def check_draft(
    config: TrainConfig, draft: DraftConfig, target: TargetConfig, dataset: Dataset, plan: SubsetPlan
) -> None:
    """Raises ConfigError unless the draft can be trained on the data and evaluated with the target."""
    if draft.block_size > config.data.max_length:
        raise ConfigError(
            f"the draft's blocks of {draft.block_size} tokens are longer than data.max_length "
            f"{config.data.max_length}; the last positions would never be trained"
        )
    tokens = len(plan.frequent) + plan.drawn
    if draft.selector is not None and tokens < draft.selector.top_k:
        raise ConfigError(
            f"the loss runs over {tokens} tokens (loss.frequent, loss.drawn and loss.unseen), fewer than the "
            f"{draft.selector.top_k} candidates of the selector; raise loss.frequent"
        )
    section = config.evaluation
    if section.engine_every is None:
        return
    asked = [dataset.sequence(int(index)).prompt_len for index in dataset.held_out[: section.engine_prompts]]
    prompt = max(asked, default=0)
    longest = prompt + section.engine_tokens
    if 0 < target.max_position < longest:
        raise ConfigError(
            f"evaluation.engine_tokens {section.engine_tokens} after a prompt of {prompt} tokens is more than "
            f"the {target.max_position} that the target was made for; make it smaller"
        )
