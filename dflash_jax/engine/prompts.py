"""What people type for prompts and sampling: one prompt or many, in any of the forms a prompt has."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from dflash_jax.engine.request import SamplingParams
from dflash_jax.errors import RequestError, quote
from dflash_jax.text.chat import CHAT_KEYS

Prompt = str | Sequence[int] | np.ndarray | jax.Array | Sequence[Mapping[str, Any]] | Mapping[str, Any]
"""Text; token ids as a list or an array; chat messages; or a mapping as a job's line is one, of `prompt`, `messages` or
`prompt_token_ids`, other `text.chat.CHAT_KEYS` beside `messages`, and optionally `id` and `sampling`."""

Prompts = Prompt | Iterable[Prompt]
"""One prompt, or any iterable of prompts."""

Sampling = SamplingParams | Mapping[str, Any]
"""Parameters, or those that differ from the defaults."""

_TOKENS = ("prompt", "prompt_token_ids")


class Asked(NamedTuple):
    """A prompt and what comes with it.

    Attributes:
      prompt: without the keys that are no part of it.
      sampling: how to answer.
      request_id: the id it names; None if it names none.
    """

    prompt: Prompt
    sampling: SamplingParams
    request_id: str | None


def read_prompts(
    prompts: Prompts, sampling: Sampling | Sequence[Sampling] | None, parameters: Mapping[str, Any]
) -> list[Asked]:
    """Each prompt with its sampling parameters.

    Args:
      prompts: one or many.
      sampling: for all of them, or one for each.
      parameters: that win over `sampling`; a prompt's own win over these.

    Raises:
      RequestError: it cannot be told what is asked; the message says what would be right.
    """
    each = _as_list(prompts)
    if sampling is None or isinstance(sampling, SamplingParams | Mapping):
        of_each = [read_sampling(sampling, parameters)] * len(each)
    elif isinstance(sampling, Sequence) and not isinstance(sampling, str) and len(sampling) == len(each):
        of_each = [read_sampling(one, parameters) for one in sampling]
    else:
        raise RequestError(
            f"sampling is {quote(sampling)}; for {len(each)} prompts it must be a SamplingParams or a mapping, or a "
            f"list of {len(each)} of these"
        )
    return [read_prompt(prompt, own) for prompt, own in zip(each, of_each, strict=True)]


def read_prompt(prompt: Prompt, sampling: Sampling | None = None, parameters: Mapping[str, Any] | None = None) -> Asked:
    """One prompt with its sampling parameters; see `read_prompts`."""
    sampling = read_sampling(sampling, parameters)
    if not isinstance(prompt, Mapping) or "role" in prompt:
        return Asked(prompt, sampling, None)
    given = {key: value for key, value in prompt.items() if value is not None}
    name, own = given.pop("id", None), given.pop("sampling", None)
    if name is not None and (not isinstance(name, str | int) or isinstance(name, bool)):
        raise RequestError(f"the prompt's id is {quote(name)}; it must be a string or an integer")
    if own is not None:
        sampling = sampling.override(own)
    return Asked(_without_names(given), sampling, None if name is None else str(name))


def read_sampling(sampling: Any, parameters: Mapping[str, Any] | None = None) -> SamplingParams:
    """Sampling parameters of what was typed, with others that win over them."""
    if not isinstance(sampling, SamplingParams):
        sampling = SamplingParams().override({} if sampling is None else sampling)
    return sampling.override(parameters) if parameters else sampling


def _without_names(given: dict[str, Any]) -> Prompt:
    """The text or the tokens of a mapping; the mapping itself where it is a conversation."""
    named = [key for key in (*_TOKENS, "messages") if key in given]
    if len(named) > 1:
        raise RequestError(f"the prompt has {' and '.join(named)}; it must have one of them")
    if not named:
        keys = ", ".join(map(str, given)) or "no keys"
        raise RequestError(
            f"the prompt is a mapping of {quote(keys)}; it must have one of prompt, messages and prompt_token_ids"
        )
    if named == ["messages"]:
        return given
    [key], value = named, given[named[0]]
    for other in given:
        if other != key:
            where = "it goes with messages" if other in CHAT_KEYS else "it may have id and sampling"
            raise RequestError(f"the prompt has the key {quote(other)} beside {key}; {where}")
    if isinstance(value, str) != (key == "prompt"):
        wanted = "a string" if key == "prompt" else "a list of token ids"
        raise RequestError(f"{key} is {quote(value)}; it must be {wanted}")
    return value


def _as_list(prompts: Prompts) -> list[Prompt]:
    """All prompts, of whatever holds them; a single one as a list of it."""
    if isinstance(prompts, np.ndarray | jax.Array):
        if prompts.ndim == 0 or (prompts.ndim > 2):
            raise RequestError(
                f"prompts is an array of shape {prompts.shape}; it must have a row of token ids for each prompt, or be "
                "one such row"
            )
        prompts = prompts.tolist()
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if isinstance(prompts, bytes) or not isinstance(prompts, Iterable):
        raise RequestError(
            f"prompts is {quote(prompts)}; it must be a prompt (text, token ids, messages or a mapping) or several"
        )
    each: list[Any] = list(prompts)
    if each and (all(map(_is_token, each)) or all(isinstance(one, Mapping) and "role" in one for one in each)):
        return [each]
    return each


def _is_token(value: object) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)
