"""A kind of draft that the package does not have, in this one file: a config, weights and a drafter."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from flax import struct

from dflash_jax import ConfigError, Engine, EngineConfig
from dflash_jax.kernels.context import KeyValues
from dflash_jax.models.config import DraftConfig
from dflash_jax.models.drafters import DFlash, Proposal, drafter_of, register
from dflash_jax.models.matrix import Matrix
from dflash_jax.sampling import Purpose, gumbel
from tests.pairs import PAIRS, SAMPLING, SIZES, alone, cases, models

PAIR = PAIRS[1]


@dataclasses.dataclass(frozen=True)
class ToyConfig(DraftConfig):
    """One page entry per token, and candidates that are drawn from all alike."""

    kind = "toy"

    @property
    def candidates(self) -> int:
        return 4


class ToyParams(struct.PyTreeNode):
    mix: Matrix


class Toy:
    """Proposes from the LM head's best tokens after the mean of the context's last features."""

    def context_entries(self, params, config, features, positions):
        kept = (features @ params.mix).reshape(1, *positions.shape, config.num_kv_heads, config.head_dim)
        return KeyValues(kept, jnp.zeros_like(kept).at[..., 0].set(positions[None, :, :, None]))

    def propose(self, params, config, target, context, anchor, drafts, sampler, *, shortlist=None, implementation=None):
        length = context.row_lengths()
        # What was written for the last token before the anchor: its entry and its position.
        last = jnp.maximum(length - 1, 0)
        rows = context.block_table[jnp.maximum(context.idx_mapping, 0)]
        page = jnp.take_along_axis(rows, (last // context.pages.k.shape[2])[:, None], axis=1)[:, 0]
        at = jnp.maximum(page, 0), last % context.pages.k.shape[2]
        where = context.pages.v[0][at][:, 0, 0]
        positions = length[:, None] + 1 + jnp.arange(drafts)
        candidates = (anchor[:, None, None] + positions[..., None] + jnp.arange(config.candidates)) % config.vocab_size
        # A context that is not the row's own shows in every token.
        candidates = jnp.where((where == last)[:, None, None], candidates, 0).astype(jnp.int32)
        noise = gumbel(sampler.seed, positions, Purpose.PROPOSE, config.candidates)
        hot = (sampler.temperature > 0)[:, None]
        chosen = jnp.where(hot, jnp.argmax(noise, -1), 0)
        even = jnp.full(candidates.shape, 1 / config.candidates)
        one_hot = jax.nn.one_hot(chosen, config.candidates)
        tokens = jnp.take_along_axis(candidates, chosen[..., None], axis=-1)[..., 0]
        return Proposal(tokens, candidates, jnp.where(hot[..., None], even, one_hot))


class SecondBest(DFlash):
    """Another correction of the same candidates: one method."""

    def choose(self, params, hidden, candidates, scores, anchor, positions, sampler, *, implementation=None):
        second = candidates[..., 1:2]
        return Proposal(second[..., 0], second, jnp.ones(second.shape, jnp.float32))


@dataclasses.dataclass(frozen=True)
class SecondBestConfig(DraftConfig):
    kind = "second best"


register("toy", Toy())
register("second best", SecondBest())


def toy_models():
    of = models(PAIR)
    config = ToyConfig(
        **{field.name: getattr(of.draft_config, field.name) for field in dataclasses.fields(of.draft_config)}
    )
    config = dataclasses.replace(config, layers=config.layers[:1], conv=None, selector=None)
    width = of.draft_config.hidden_size * len(config.target_layer_ids), config.num_kv_heads * config.head_dim
    return of.replace(draft=ToyParams(Matrix(jnp.ones(width) / width[0])), draft_config=config)


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.8, "seed": 3}], ids=["greedy", "sampled"])
def test_a_drafter_in_one_file_drafts_through_the_engine(sampling):
    served = Engine(toy_models(), EngineConfig(**SIZES), k=3)
    prompts = [case["prompt"] for case in cases(PAIR)[:3]]
    together = served.generate(prompts, {**SAMPLING, **sampling})
    for prompt, completion in zip(prompts, together, strict=True):
        assert completion.drafted_blocks and all(len(block) == 3 for block in completion.drafted_blocks)
        position = len(prompt)
        for block, produced in zip(completion.drafted_blocks, completion.produced_per_round, strict=True):
            anchor = completion.token_ids[position - len(prompt)]
            options = [{(anchor + position + 1 + i + c) % 64 for c in range(4)} for i in range(3)]
            assert all(token in option for token, option in zip(block, options, strict=True)), (block, options)
            position += produced
        [by_itself] = Engine(toy_models(), EngineConfig(**SIZES), k=3).generate([prompt], {**SAMPLING, **sampling})
        assert by_itself.drafted_blocks == completion.drafted_blocks
        if not sampling:
            assert completion.token_ids == alone(None, tuple(prompt)).token_ids


def test_another_choice_among_the_candidates_is_one_method():
    of = models(PAIR)
    fields = {field.name: getattr(of.draft_config, field.name) for field in dataclasses.fields(of.draft_config)}
    of = of.replace(draft_config=SecondBestConfig(**fields))
    prompt = cases(PAIR)[0]["prompt"]
    [completion] = Engine(of, EngineConfig(**SIZES)).generate([prompt], SAMPLING)
    assert completion.token_ids == alone(None, tuple(prompt)).token_ids
    assert completion.drafted_blocks != alone(PAIR, tuple(prompt)).drafted_blocks


def test_a_kind_that_nobody_registered_is_refused_by_name():
    @dataclasses.dataclass(frozen=True)
    class Unknown(ToyConfig):
        kind = "eagle"

    config = toy_models().draft_config
    unknown = Unknown(**{field.name: getattr(config, field.name) for field in dataclasses.fields(config)})
    with pytest.raises(ConfigError, match="the draft's kind 'eagle' is none of dflash, dflash2, second best, toy"):
        drafter_of(unknown)
