"""Why acceptance is low: runs some prompts, tries the draft with other contexts at the same places, and says what it found."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dflash_jax.acceptance import total_acceptance
from dflash_jax.analysis.acceptance import by_position
from dflash_jax.analysis.doctor.controls import Controls, choose_places
from dflash_jax.analysis.doctor.findings import Diagnosis, Finding, diagnosis
from dflash_jax.analysis.doctor.setup_checks import check_prompts, check_setup
from dflash_jax.analysis.doctor.told import Told, read_told
from dflash_jax.analysis.rounds import Rounds, rounds_of
from dflash_jax.engine import Completion, Engine, SamplingParams
from dflash_jax.errors import RequestError, StateError
from dflash_jax.models.weights import DraftParams

BETTER = 1.25
"""A change counts if it brings so many times the drafted tokens that are kept,"""

AT_LEAST = 0.15
"""and so many more of them in a round."""

APART = 0.1
"""The engine's acceptance and that of the training forward differ if one keeps so much less of the other's tokens."""

WEAK = 0.5
"""A draft that keeps fewer tokens in a round than this guesses badly."""

_FEW = 8
"""Rounds, below which controls say nothing."""

_MASKS = 8
"""Other mask tokens that are tried."""

Say = Callable[[str], None]


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
    findings += _check_controls(engine, told, tokens, completions, rounds, say)
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
        rates = ", ".join(f"{rate:.2f}" for rate in known.rate)
        found.append(
            Finding(
                "acceptance",
                "notice" if length - 1 < WEAK else "fine",
                f"{length:.2f} tokens a round over {total.drafted_request_steps} rounds; each drafted position is kept, if "
                f"those before it are, with {rates}",
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
                f"the draft's scores were not finite in {damaged} rounds; its weights are damaged or overflow in this dtype",
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
    worse = not inside.reached.sum() or _better(near, far)
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
    level = "problem" if missing > 0.02 else "fine"
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
    version = (
        ""
        if config is None or config.version == 2
        else "; a DFlash draft proposes its best tokens only, DFlash 2 samples"
    )
    return [
        Finding(
            "sampling",
            "problem" if _better(*lengths) else "fine",
            f"{lengths[0]:.2f} tokens a round greedily and {lengths[1]:.2f} at temperature {wanted.temperature}{version}",
        )
    ]


def _check_controls(
    engine: Engine,
    told: Told,
    prompts: Sequence[Sequence[int]],
    completions: Sequence[Completion],
    rounds: Rounds,
    say: Say,
) -> list[Finding]:
    """What the draft does with other contexts at the same places."""
    models, config = engine.models, engine.models.draft_config
    if config is None or not isinstance(models.draft, DraftParams):
        return [Finding("controls", "unknown", "the draft is of a kind of its own, which the controls cannot run")]
    texts = [[*prompt, *one.token_ids] for prompt, one in zip(prompts, completions, strict=True)]
    config = dataclasses.replace(config, block_size=1 + engine.k)
    places = choose_places(texts, [len(prompt) for prompt in prompts], rounds, engine.k)
    if len(places) < _FEW:
        return [
            Finding(
                "controls",
                "unknown",
                f"only {len(places)} rounds have a whole block after them, and controls need {_FEW}; give more prompts, or "
                "longer answers",
            )
        ]
    say("trying other contexts")
    shifted = _shifted(config.target_layer_ids, models.target_config.num_layers)
    controls = Controls(models.replace(draft_config=config), places, [*config.target_layer_ids, *sum(shifted, ())])
    own = controls.acceptance()
    found = [_check_served(own, 1 + float(places.kept.mean()), models.shortlist is not None, engine)]
    found += _check_listening(controls, own)
    found.append(_check_layers(controls, own, config.target_layer_ids, shifted))
    say("trying other mask tokens")
    found.append(_check_mask(engine, controls, own, told))
    found += _check_rope(engine, controls, own, told)
    if told.trained_acceptance is not None:
        found.append(_check_trained(own, told.trained_acceptance))
    if own - 1 < WEAK:
        found.append(
            Finding(
                "weak_draft",
                "problem",
                f"the training forward too keeps only {own - 1:.2f} drafted tokens a round on these answers; unless another "
                "finding says why, the draft has not learned this kind of text",
            )
        )
    return found


def _better(good: float, bad: float) -> bool:
    """Whether an acceptance length is better by more than chance and rounding make it."""
    return good - 1 > BETTER * (bad - 1) and good - bad > AT_LEAST


def _check_served(own: float, served: float, shortlisted: bool, engine: Engine) -> Finding:
    apart = (own - 1) - (served - 1)
    figures = f"the engine kept {served - 1:.2f} drafted tokens in the rounds that were tried, the training forward {own - 1:.2f}"
    if apart > APART * (own - 1) and apart > AT_LEAST:
        why = (
            "the shortlist, the dtype or a kernel"
            if shortlisted
            else "the dtype, the context in the engine's pages or a kernel"
        )
        return Finding(
            "served_otherwise",
            "problem",
            f"{figures}: serving loses what training has ({why}); compare engine.dtype float32 and the other "
            "implementations of the kernels",
        )
    return Finding("served_otherwise", "fine", figures)


def _check_listening(controls: Controls, own: float) -> list[Finding]:
    without, shuffled, others = controls.acceptance(controls.zeroed()), controls.acceptance(controls.shuffled()), None
    if (swapped := controls.others()) is not None:
        others = controls.acceptance(swapped)
    figures = (
        f"{own:.2f} tokens a round with its context, {without:.2f} with zeros, {shuffled:.2f} with the context shuffled"
    )
    if others is not None:
        figures += f", {others:.2f} with another request's"
    if not _better(own, without):
        return [
            Finding(
                "does_not_listen",
                "problem",
                f"{figures}: the draft does not use its context; it is untrained, or its context is not what it was trained on",
            )
        ]
    if not _better(own, shuffled):
        return [
            Finding(
                "does_not_listen", "notice", f"{figures}: the draft uses what its context says, and not in which order"
            )
        ]
    return [Finding("does_not_listen", "fine", f"{figures}: the draft listens")]


def _shifted(ids: Sequence[int], layers: int) -> list[tuple[int, ...]]:
    """The same layers, counted from one earlier or later, as far as there are such."""
    moved = [tuple(layer + by for layer in ids) for by in (-1, 1)]
    return [each for each in moved if min(each) >= 0 and max(each) < layers]


def _check_layers(controls: Controls, own: float, ids: Sequence[int], shifted: Sequence[tuple[int, ...]]) -> Finding:
    tried = {each: controls.acceptance(controls.features(each)) for each in shifted}
    best = max(tried, key=lambda each: tried[each], default=None)
    if best is not None and _better(tried[best], own):
        return Finding(
            "feature_layers",
            "problem",
            f"with the states after layers {list(best)} the draft keeps {tried[best] - 1:.2f} tokens a round, with those after "
            f"{list(ids)} it keeps {own - 1:.2f}; its target_layer_ids are counted from another layer",
        )
    if not tried:
        return Finding("feature_layers", "unknown", f"there are no layers beside {list(ids)} to compare with")
    others = ", ".join(f"{list(each)}: {length:.2f}" for each, length in tried.items())
    return Finding("feature_layers", "fine", f"states after layers {list(ids)} serve best; others would bring {others}")


def _check_mask(engine: Engine, controls: Controls, own: float, told: Told) -> Finding:
    mask, vocabulary = controls.config.mask_token_id, engine.models.target_config.vocab_size
    likely = [] if told.config is None else [told.config.mask_token_id]
    if engine.tokenizer is not None:
        named = (
            engine.tokenizer.special_id(name) for name in ("<|MASK|>", "<|mask|>", "<mask>", "[MASK]", "<|endoftext|>")
        )
        likely += [token for token in named if token is not None]
    likely += [*engine.models.target_config.eos_token_ids, *range(vocabulary - 1, max(0, vocabulary - 6), -1)]
    others = [token for token in dict.fromkeys(likely) if token != mask and 0 <= token < vocabulary][:_MASKS]
    tried = {token: controls.acceptance(mask_token_id=token) for token in others}
    best = max(tried, key=lambda token: tried[token])
    if _better(tried[best], own):
        return Finding(
            "mask_token",
            "problem",
            f"with token {best} as its mask the draft keeps {tried[best] - 1:.2f} tokens a round, with {mask} "
            f"{own - 1:.2f}; set draft.mask_token_id {best}",
        )
    return Finding("mask_token", "fine", f"token {mask} serves best as the mask of {1 + len(others)} that were tried")


def _check_rope(engine: Engine, controls: Controls, own: float, told: Told) -> list[Finding]:
    """Other rotary embeddings: that of the draft's own config.json, and the target's."""
    config = controls.config
    ropes = {engine.models.target_config.rope: "the target's"}
    if told.config is not None:
        ropes[told.config.rope] = "that of its config.json"
    found = []
    for rope, whose in ropes.items():
        if rope == config.rope or rope.partial != config.rope.partial:
            continue
        other = controls.acceptance(config=dataclasses.replace(config, rope=rope))
        if _better(other, own):
            found.append(
                Finding(
                    "rope",
                    "problem",
                    f"with {whose} rotary embedding (theta {rope.theta:g}, {rope.kind}) the draft keeps {other - 1:.2f} tokens "
                    f"a round, with its own (theta {config.rope.theta:g}, {config.rope.kind}) {own - 1:.2f}",
                )
            )
    return found[:1]


def _check_trained(own: float, trained: float) -> Finding:
    figures = f"{trained:.2f} tokens a round on held-out text when it was trained, {own:.2f} on these answers, both teacher forced"
    if _better(trained, own):
        return Finding(
            "other_text",
            "problem",
            f"{figures}: these prompts are not what it was trained on, or another finding says what is wrong",
        )
    return Finding("other_text", "fine", figures)
