"""The prompts of a sweep: all of one length, the same in every run."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator

import numpy as np

from dflash_jax.bench.config import SweepConfig
from dflash_jax.engine import Engine, SamplingParams
from dflash_jax.errors import ConfigError, RequestError
from dflash_jax.jobs.config import InputFile
from dflash_jax.jobs.reader import Item, read_items

_DISTINCT = 8
"""Prompts that differ; the lowest level runs each of them."""


@dataclasses.dataclass(frozen=True)
class SweepPrompts:
    """Prompts, and in words where they are from."""

    token_ids: tuple[tuple[int, ...], ...]
    source: str


def make_prompts(loaded: Engine, plain: Engine, config: SweepConfig, tokens: int, seed: int) -> SweepPrompts:
    """Prompts of so many tokens: from the config's input, if it has one, else random.

    Those of the input are cut to length. One that is too short is continued by the target itself, greedily,
    because a draft predicts text well only if it is text that the target would write.

    Args:
      loaded: has the tokenizer and the models.
      plain: an idle engine that decodes plainly, to continue prompts with.
      config: may name an input file.
      tokens: length of each prompt.
      seed: of random ones.

    Raises:
      ConfigError: the input has no prompt that can be run.
    """
    if config.input is None:
        return SweepPrompts(_random_prompts(loaded, tokens, seed), f"{tokens} random tokens each, seed {seed}")
    path = config.input.path
    found = list(itertools.islice(_tokenized(loaded, config.input), _DISTINCT))
    if not found:
        raise ConfigError(f"{path} has no prompt that can be run; mend it, or --set input=null for random tokens")
    cut, short = sum(len(p) > tokens for p in found), sum(len(p) < tokens for p in found)
    prompts = tuple(_continued(plain, prompt[:tokens], tokens) for prompt in found)
    return SweepPrompts(
        prompts,
        f"the first {len(found)} of {path}, {cut} cut and {short} continued by the target to {tokens} tokens",
    )


def _tokenized(loaded: Engine, settings: InputFile) -> Iterator[tuple[int, ...]]:
    limit = loaded.models.target_config.vocab_size
    for item in read_items(settings, SamplingParams()):
        if not isinstance(item, Item):
            continue
        try:
            prompt = loaded.tokenize(item.prompt)
        except RequestError:
            continue
        if all(0 <= token < limit for token in prompt):
            yield prompt


def _continued(plain: Engine, prompt: tuple[int, ...], tokens: int) -> tuple[int, ...]:
    if len(prompt) == tokens:
        return prompt
    [completion] = plain.generate([prompt], {"max_tokens": tokens - len(prompt), "ignore_eos": True})
    return prompt + completion.token_ids


def _random_prompts(loaded: Engine, tokens: int, seed: int) -> tuple[tuple[int, ...], ...]:
    target, draft, tokenizer = loaded.models.target_config, loaded.models.draft_config, loaded.tokenizer
    special = {*target.eos_token_ids, target.bos_token_id}
    if draft is not None:
        special.add(draft.mask_token_id)
    limit = target.vocab_size if tokenizer is None else min(target.vocab_size, tokenizer.vocab_size)
    rng = np.random.default_rng(seed)

    def ordinary() -> Iterator[int]:
        while True:
            token = int(rng.integers(limit))
            # A special token is one that text leaves out.
            if token not in special and (tokenizer is None or tokenizer.decode([token])):
                yield token

    draw = ordinary()
    return tuple(tuple(itertools.islice(draw, tokens)) for _ in range(_DISTINCT))
