"""Why acceptance is low: runs some prompts, tries the draft with other contexts, and says what was found."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dflash_jax.acceptance import total_acceptance
from dflash_jax.analysis.acceptance import by_position
from dflash_jax.analysis.doctor.control_checks import WEAK, Say, better, check_controls
from dflash_jax.analysis.doctor.findings import Diagnosis, Finding, Level, diagnosis
from dflash_jax.analysis.doctor.setup_checks import check_prompts, check_setup
from dflash_jax.analysis.doctor.told import Told, read_told
from dflash_jax.analysis.rounds import Rounds, rounds_of
from dflash_jax.engine import Completion, Engine, SamplingParams
from dflash_jax.errors import RequestError, StateError


def diagnose(
    engine: Engine,
    prompts: Sequence[Any],
    *,
    sampling: SamplingParams | Mapping[str, Any] | None = None,
    max_tokens: int = 64,
    told: Told | str | Path | None = None,
    target_source: str | Path | None = None,
    say: Say = lambda doing: None,
) -> Diagnosis:
    """Looks for what keeps acceptance low.

    The prompts are answered greedily, as far as `max_tokens`, and the draft is then tried again at up to 32 of the
    rounds: with the same context, with none, with a shuffled one, with other feature layers and other mask tokens.

    Args:
      engine: with the draft, and nothing in flight; it stays as it is.
      prompts: as `Engine.generate` takes them; some that are usual for the draft. Six are enough.
      sampling: how they are sampled when served, to see what sampling itself costs.
      max_tokens: of each answer.
      told: what is told about the draft, or its directory.
      target_source: the target's directory, for its tokenizer's file.
      say: is told what is being done.

    Raises:
      StateError: the engine has no draft, or requests in flight.
      RequestError: there are no prompts, or one cannot be served.
    """
    if engine.k == 0:
        raise StateError("the engine has no draft, so there is no acceptance to look at; give its config a draft")
    if engine.has_work:
        raise StateError("the engine has requests in flight; diagnose an idle one")
    if not len(prompts):
        raise RequestError("there are no prompts; give some that are usual for the draft")
    told = read_told(told) if isinstance(told, str | Path) else told or Told()
    findings = [
        *check_setup(engine, told, None if target_source is None else Path(target_source)),
        *check_prompts(engine, prompts),
    ]
    say("answering the prompts")
    tokens = [engine.tokenize(prompt) for prompt in prompts]
    greedy = {"temperature": 0.0, "max_tokens": max_tokens, "ignore_eos": False}
    # Widths that are chosen by the clock would hide what the draft can do.
    whole = engine.fork(width=None if engine.host.policy.width == "auto" else engine.host.policy.width)
    completions = whole.generate(tokens, greedy)
    rounds = rounds_of(completions)
    findings += _check_run(engine, completions, rounds, tokens, told)
    findings += _check_shortlist(engine, completions)
    if sampling is not None:
        say("sampling")
        findings += _check_sampling(engine, tokens, sampling, max_tokens, completions)
    findings += check_controls(engine, told, tokens, completions, rounds, say)
    return diagnosis(findings)


def _check_run(
    engine: Engine, completions: Sequence[Completion], rounds: Rounds, prompts: Sequence[Sequence[int]], told: Told
) -> list[Finding]:
    """What the answers alone say."""
    found = []
    total = total_acceptance(one.metrics for one in completions)
    length = total.mean_acceptance_length
    if length is None:
        found.append(Finding("acceptance", "problem", "no round had a draft; the other findings say why"))
    else:
        known = by_position(rounds)
        rates = ", ".join("-" if np.isnan(rate) else f"{rate:.2f}" for rate in known.rate)
        found.append(
            Finding(
                "acceptance",
                "notice" if length - 1 < WEAK else "fine",
                f"{length:.2f} tokens a round over {total.drafted_request_steps} rounds; each drafted position is "
                f"kept, if those before it are, with {rates}",
            )
        )
    fallen = [one for one in completions if one.fallback is not None]
    if fallen:
        found.append(
            Finding(
                "fallback",
                "problem",
                f"{len(fallen)} of {len(completions)} requests were not drafted for: {fallen[0].fallback}",
            )
        )
    damaged = sum(one.metrics.damaged_drafts for one in completions)
    if damaged:
        found.append(
            Finding(
                "damaged_drafts",
                "problem",
                f"the draft's scores were not finite in {damaged} rounds; its weights are damaged or overflow in this "
                "dtype",
            )
        )
    return found + _check_range(completions, rounds, prompts, told)


def _check_range(
    completions: Sequence[Completion], rounds: Rounds, prompts: Sequence[Sequence[int]], told: Told
) -> list[Finding]:
    """Whether contexts are longer than what the draft knows."""
    limits = [limit for limit in (told.max_positions, told.trained_tokens) if limit is not None]
    longest = max(len(prompt) + len(one.token_ids) for prompt, one in zip(prompts, completions, strict=True))
    if not limits:
        return [Finding("rope_range", "unknown", "nothing says for how long contexts the draft was made")]
    limit = min(limits)
    if longest <= limit:
        return [
            Finding("rope_range", "fine", f"contexts of up to {longest} tokens are within the {limit} it was made for")
        ]
    place = np.array([len(prompt) for prompt in prompts])[rounds.request] + rounds.start
    inside, outside = (by_position(rounds.where(mask)) for mask in (place <= limit, place > limit))
    near, far = inside.tokens_per_round, outside.tokens_per_round
    figures = f"{far:.2f} tokens a round past them"
    if inside.reached.sum():
        figures += f", {near:.2f} within"
    worse = not inside.reached.sum() or better(near, far)
    return [
        Finding(
            "rope_range",
            "problem" if worse and outside.reached.sum() else "notice",
            f"contexts grow to {longest} tokens, and the draft was made for {limit}: {figures}; "
            "draft.max_context stops drafting there, and draft.rope_scaling may stretch it",
        )
    ]


def _check_shortlist(engine: Engine, completions: Sequence[Completion]) -> list[Finding]:
    shortlist = engine.models.shortlist
    if shortlist is None or shortlist.tokens is None:
        return []
    said = np.array([token for one in completions for token in one.token_ids])
    missing = float(np.mean(~np.isin(said, np.asarray(shortlist.tokens))))
    level: Level = "problem" if missing > 0.02 else "fine"
    sentence = f"{missing:.1%} of the answers' tokens are not on draft.shortlist, and are never drafted"
    return [Finding("shortlist", level, sentence + ("; make it longer" if level == "problem" else ""))]


def _check_sampling(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    sampling: SamplingParams | Mapping[str, Any],
    max_tokens: int,
    greedy: Sequence[Completion],
) -> list[Finding]:
    wanted = sampling if isinstance(sampling, SamplingParams) else SamplingParams().override(sampling)
    if not wanted.temperature:
        return []
    wanted = dataclasses.replace(wanted, max_tokens=max_tokens)
    sampled = engine.fork(width=None if engine.host.policy.width == "auto" else engine.host.policy.width)
    lengths = [
        total_acceptance(one.metrics for one in run).mean_acceptance_length or 1.0
        for run in (greedy, sampled.generate(list(prompts), wanted))
    ]
    config = engine.models.draft_config
    first = config is not None and config.version == 1
    version = "; a DFlash draft proposes its best tokens only, DFlash 2 samples" if first else ""
    return [
        Finding(
            "sampling",
            "problem" if better(*lengths) else "fine",
            f"{lengths[0]:.2f} tokens a round greedily, {lengths[1]:.2f} at temperature {wanted.temperature}{version}",
        )
    ]
