"""What the controls mean: a draft at the same places with other contexts, layers, masks and rotary embeddings."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from dflash_jax.analysis.doctor.controls import Controls, choose_places
from dflash_jax.analysis.doctor.findings import Finding
from dflash_jax.analysis.doctor.told import Told
from dflash_jax.analysis.rounds import Rounds
from dflash_jax.engine import Completion, Engine
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

_MASK_NAMES = ("<|MASK|>", "<|mask|>", "<mask>", "[MASK]", "<|endoftext|>")
"""Special tokens that drafts are trained with as their mask."""

Say = Callable[[str], None]


def check_controls(
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
                f"only {len(places)} rounds have a whole block after them, and controls need {_FEW}; "
                "give more prompts, or longer answers",
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
                f"the training forward too keeps only {own - 1:.2f} drafted tokens a round on these answers; unless "
                "another finding says why, the draft has not learned this kind of text",
            )
        )
    return found


def better(good: float, bad: float) -> bool:
    """Whether an acceptance length is better by more than chance and rounding make it."""
    return good - 1 > BETTER * (bad - 1) and good - bad > AT_LEAST


def _check_served(own: float, served: float, shortlisted: bool, engine: Engine) -> Finding:
    apart = (own - 1) - (served - 1)
    figures = (
        f"the engine kept {served - 1:.2f} drafted tokens a round in the rounds that were tried, the training forward "
        f"{own - 1:.2f}"
    )
    if apart > APART * (own - 1) and apart > AT_LEAST:
        first = "the shortlist" if shortlisted else "the context in the engine's pages"
        why = f"{first}, the dtype or a kernel"
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
    if not better(own, without):
        return [
            Finding(
                "does_not_listen",
                "problem",
                f"{figures}: the draft does not use its context; it is untrained, or its context is not what it was "
                "trained on",
            )
        ]
    if not better(own, shuffled):
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
    if best is not None and better(tried[best], own):
        return Finding(
            "feature_layers",
            "problem",
            f"with the states after layers {list(best)} the draft keeps {tried[best] - 1:.2f} tokens a round, with "
            f"those after {list(ids)} it keeps {own - 1:.2f}; its target_layer_ids are counted from another layer",
        )
    if not tried:
        return Finding("feature_layers", "unknown", f"there are no layers beside {list(ids)} to compare with")
    others = ", ".join(f"{list(each)}: {length:.2f}" for each, length in tried.items())
    return Finding(
        "feature_layers",
        "fine",
        f"no other layers serve better than {list(ids)}, which bring {own:.2f} tokens a round; {others}",
    )


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
    if better(tried[best], own):
        return Finding(
            "mask_token",
            "problem",
            f"with token {best} as its mask the draft keeps {tried[best] - 1:.2f} tokens a round, with {mask} "
            f"{own - 1:.2f}; set draft.mask_token_id {best}",
        )
    return Finding(
        "mask_token", "fine", f"no other mask token of {len(others)} that were tried serves better than {mask}"
    )


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
        if better(other, own):
            found.append(
                Finding(
                    "rope",
                    "problem",
                    f"with {whose} rotary embedding (theta {rope.theta:g}, {rope.kind}) the draft keeps "
                    f"{other - 1:.2f} tokens a round, with its own (theta {config.rope.theta:g}, {config.rope.kind}) "
                    f"{own - 1:.2f}",
                )
            )
    return found[:1]


def _check_trained(own: float, trained: float) -> Finding:
    figures = (
        f"{trained:.2f} tokens a round on held-out text when it was trained, {own:.2f} on these answers, both teacher "
        "forced"
    )
    if better(trained, own):
        return Finding(
            "other_text",
            "problem",
            f"{figures}: these prompts are not what it was trained on, or another finding says what is wrong",
        )
    return Finding("other_text", "fine", figures)
