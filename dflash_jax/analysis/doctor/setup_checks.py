"""What can be said before anything is run: the settings against what is told about the draft."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from dflash_jax.analysis.doctor.findings import Finding
from dflash_jax.analysis.doctor.told import Told, read_vocabulary
from dflash_jax.checkpoints import Tokenizer
from dflash_jax.engine import Engine
from dflash_jax.errors import DflashError
from dflash_jax.models.config import DraftConfig
from dflash_jax.training.data.features import fingerprint

_ASKED = [{"role": "user", "content": "1"}]


def check_setup(engine: Engine, told: Told, target_source: Path | None = None) -> list[Finding]:
    """Everything about an engine's settings."""
    return [
        *_check_block(engine),
        *_check_config(engine, told),
        *_check_thinking(engine.tokenizer, told),
        *_check_target(engine, told),
        *_check_vocabulary(engine, told, target_source),
    ]


def _check_block(engine: Engine) -> Iterable[Finding]:
    config, k, width = _config(engine), engine.k, engine.host.policy.width
    trained = config.block_size - 1
    if k > trained:
        yield Finding(
            "k", "problem", f"draft.k is {k}, and the draft was trained to propose {trained}; what comes after is noise"
        )
    elif k < trained:
        yield Finding(
            "k",
            "notice",
            f"draft.k is {k}, and the draft was trained to propose {trained}: a shorter block drafts other tokens, and "
            f"no round can bring more than {k + 1}; draft.width {k} with whole blocks keeps what it drafts",
        )
    else:
        yield Finding("k", "fine", f"draft.k is {k}, as trained")
    if isinstance(width, int) and width < k:
        yield Finding("width", "notice", f"draft.width is {width}, so no round keeps more than {width} of {k} tokens")


def _check_config(engine: Engine, told: Told) -> Iterable[Finding]:
    config = _config(engine)
    if told.config is None:
        yield Finding(
            "config",
            "unknown",
            "nothing is told of the draft's own config.json, so its settings were not compared with it",
        )
        return
    for name, cause, setting in (
        ("mask_token_id", "mask_token", "draft.mask_token_id"),
        ("rope", "rope", "draft.rope_scaling"),
        ("target_layer_ids", "feature_layers", "the draft's target_layer_ids"),
    ):
        here, there = getattr(config, name), getattr(told.config, name)
        if here != there:
            yield Finding(
                cause,
                "problem",
                f"{setting} is {_short(here)}, and the draft's config.json has {_short(there)}; use that",
            )
    dtype = jnp.dtype(engine.models.target.embedding.dtype).name
    if told.dtype is not None and told.dtype != dtype:
        yield Finding(
            "dtype",
            "notice",
            f"the engine computes in {dtype}, and the draft's config.json names {told.dtype}; with engine.dtype "
            f"{told.dtype} its features are those it was trained on",
        )


def _short(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _check_thinking(tokenizer: Tokenizer | None, told: Told) -> Iterable[Finding]:
    if tokenizer is None or not tokenizer.has_chat_template:
        return
    try:
        here, on, off = (
            tokenizer.chat_text(_ASKED, chat_template_kwargs=kwargs)
            for kwargs in ({}, {"enable_thinking": True}, {"enable_thinking": False})
        )
    except DflashError:
        yield Finding(
            "thinking_mode", "unknown", "the chat template cannot write a plain question, so nothing was seen"
        )
        return
    if on == off:
        return
    thinking = here == on
    now = "on" if thinking else "off"
    if told.thinking is None:
        yield Finding(
            "thinking_mode",
            "notice",
            f"the chat template has thinking {now}, and nothing says for which mode the draft was trained; "
            f"try target.chat_template_kwargs {{enable_thinking: {str(not thinking).lower()}}}",
        )
    elif told.thinking != thinking:
        yield Finding(
            "thinking_mode",
            "problem",
            f"the chat template has thinking {now}, and the draft's card says it is for thinking "
            f"{'on' if told.thinking else 'off'}; set target.chat_template_kwargs "
            f"{{enable_thinking: {str(told.thinking).lower()}}}",
        )
    else:
        yield Finding("thinking_mode", "fine", f"thinking is {now}, as the draft's card says")


def _check_target(engine: Engine, told: Told) -> Iterable[Finding]:
    if told.target_fingerprint is None:
        return
    if engine.models.target.embedding.dtype != jnp.float32:
        yield Finding(
            "other_target",
            "unknown",
            "whether this is the target of the draft's training shows only with engine.dtype float32",
        )
        return
    same = fingerprint(engine.models.target, engine.models.target_config) == told.target_fingerprint
    yield (
        Finding("other_target", "fine", "the target has the weights that the draft was trained for")
        if same
        else Finding(
            "other_target",
            "problem",
            "the target's weights or config are not those that the draft was trained for (run.json has another "
            "fingerprint); serve that target, or train the draft on from here",
        )
    )


def _check_vocabulary(engine: Engine, told: Told, target_source: Path | None) -> Iterable[Finding]:
    if engine.tokenizer is not None and engine.tokenizer.vocab_size > engine.models.target_config.vocab_size:
        yield Finding(
            "vocabulary",
            "problem",
            f"the tokenizer has {engine.tokenizer.vocab_size} tokens and the models "
            f"{engine.models.target_config.vocab_size}, so some text cannot be said; use the model's own tokenizer",
        )
    own = None if target_source is None or not target_source.is_dir() else read_vocabulary(target_source)
    if own is None or told.tokenizer is None or own == told.tokenizer:
        return
    others = [piece for piece, token in told.tokenizer.items() if own.get(piece) != token]
    piece = others[0] if others else next(piece for piece in own if piece not in told.tokenizer)
    yield Finding(
        "vocabulary",
        "problem",
        f"the draft's tokenizer.json is not the target's: {piece!r} is token {told.tokenizer.get(piece)} there and "
        f"{own.get(piece)} here; the draft was trained for a model with other tokens",
    )


def check_prompts(engine: Engine, prompts: Sequence[Any]) -> list[Finding]:
    """Whether the prompts are written as those of the target's own text."""
    tokenizer = engine.tokenizer
    if tokenizer is None or not tokenizer.has_chat_template:
        return []
    plain = sum(isinstance(prompt, str) for prompt in prompts)
    if not plain:
        if any(isinstance(prompt, Mapping) or (prompt and isinstance(prompt[0], Mapping)) for prompt in prompts):
            return [Finding("chat_template", "fine", "the prompts are chats, written by the target's template")]
        return []
    return [
        Finding(
            "chat_template",
            "notice",
            f"{plain} of {len(prompts)} prompts are plain text, though the target has a chat template; a draft that "
            "was trained on chats guesses better if they are messages",
        )
    ]


def _config(engine: Engine) -> DraftConfig:
    assert engine.models.draft_config is not None
    return engine.models.draft_config
