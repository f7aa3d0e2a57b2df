"""Requests: what is asked of the engine, and how it is to answer."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

from dflash_jax.engine.logprob_records import MAX_LOGPROBS
from dflash_jax.engine.parameters import (
    PROCESSED,
    check_allowed_token_ids,
    check_bad_words,
    check_logit_bias,
    check_min_tokens,
    check_penalty,
    check_repetition_penalty,
    check_structured_outputs,
    require,
)
from dflash_jax.engine.parameters import is_int as _is_int
from dflash_jax.engine.parameters import is_real as _is_real
from dflash_jax.errors import RequestError, cut, quote
from dflash_jax.settings import suggest

MAX_STOP_TOKENS = 8
"""Stop token ids a request can have."""

MAX_SAMPLES = 1024
"""Samples that a prompt can have."""

MAX_STOP_STRINGS = 256
"""Stop strings a request can have: each of them is looked for at every character of the text."""


@dataclasses.dataclass(frozen=True)
class SamplingParams:
    """How a request samples and when it ends.

    Numbers may be numpy's or JAX's, too.

    Attributes:
      temperature: 0 is greedy.
      max_tokens: tokens to produce at most.
      top_p: keep the smallest set of most likely tokens with this much probability; 1 keeps all.
      top_k: keep the k most likely tokens; 0 keeps all.
      min_p: keep tokens at least this likely relative to the most likely one; 0 keeps all.
      seed: of the random draws; two requests with equal prompt and seed sample the same tokens.
      n: how many answers to sample, 1 to `MAX_SAMPLES`. Sample i is the answer of a request of its own with the seed
        (seed + i) mod 2**32; see `samples_of`. More than one needs a temperature above 0.
      stop: strings that end the text. One that is exactly a special token is also that token's id.
      stop_token_ids: further token ids that end it, beside the model's own.
      ignore_eos: go on past the model's end-of-sequence tokens.
      speculation: draft for this request; False decodes it plainly.
      logprobs: return the log-probability of each output token and those of so many of the most likely tokens at its
        place, 0 to `MAX_LOGPROBS`; None returns none. They are of the target's logits as they are, before temperature,
        top-k, top-p and min-p (what vLLM calls `raw_logprobs`).
      prompt_logprobs: the same for the tokens of the prompt. Such a prompt is run whole: cached pages hold no logits.
      skip_special_tokens: leave special tokens out of the text.
      include_stop_str_in_output: let the text end with the stop string that ended it.
      repetition_penalty: divides the positive logits of tokens that are in the prompt or the output, and multiplies
        the negative ones; 1 does nothing.
      presence_penalty: subtracted from the logits of tokens that are in the output; from -2 to 2.
      frequency_penalty: subtracted once for each time that a token is in the output; from -2 to 2.
      logit_bias: what is added to the logits of some tokens, from -100 to 100: a mapping, kept as pairs.
      allowed_token_ids: the only tokens that may be said; None for all.
      bad_words: strings that must not be said: the tokens of each, with and without a space before it, never follow
        each other in the output.
      min_tokens: neither a token nor a stop string ends the output before it has this many tokens.
      structured_outputs: what the text must be: {"json": schema}, {"regex": text} or {"choice": [texts]}; kept as a
        pair. Once it is complete the request ends.

    What a request samples from is the target's distribution after `logit_bias`, the penalties, what is forbidden, and
    then temperature, top-k, top-p and min-p.

    Raises:
      RequestError: a value is outside its range.
    """

    temperature: float = 0.0
    max_tokens: int = 64
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int = 0
    n: int = 1
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    speculation: bool = True
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[str, ...] = ()
    min_tokens: int = 0
    structured_outputs: Mapping[str, Any] | tuple[str, str] | None = None

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            object.__setattr__(self, field.name, _plain(getattr(self, field.name)))
        object.__setattr__(self, "stop", (self.stop,) if isinstance(self.stop, str) else self.stop)
        for name, wanted in (("stop", "a string or a list of strings"), ("stop_token_ids", "a list of token ids")):
            self._require(name, isinstance(getattr(self, name), list | tuple), wanted)
            object.__setattr__(self, name, tuple(getattr(self, name)))
        if len(self.stop) > MAX_STOP_STRINGS:
            raise RequestError(f"sampling.stop has {len(self.stop)} strings; at most {MAX_STOP_STRINGS} are supported")
        self._require("temperature", _is_real(self.temperature) and self.temperature >= 0, "0 or more")
        self._require("max_tokens", _is_int(self.max_tokens) and self.max_tokens >= 1, "an integer of 1 or more")
        self._require("top_p", _is_real(self.top_p) and 0 < self.top_p <= 1, "above 0 and at most 1")
        self._require("top_k", _is_int(self.top_k) and 0 <= self.top_k < 2**31, "0 (all) or a positive integer")
        self._require("min_p", _is_real(self.min_p) and 0 <= self.min_p <= 1, "between 0 and 1")
        self._require("seed", _is_int(self.seed) and 0 <= self.seed < 2**32, "an integer of 0 to 2**32 - 1")
        self._require("n", _is_int(self.n) and 1 <= self.n <= MAX_SAMPLES, f"an integer of 1 to {MAX_SAMPLES}")
        if self.n > 1 and self.temperature == 0:
            raise RequestError(
                f"sampling.n is {self.n} and sampling.temperature 0, so that all samples would be equal; give a "
                "temperature above 0, or n 1"
            )
        self._require("stop", all(isinstance(s, str) and s for s in self.stop), "a list of strings, none of them empty")
        self._require(
            "stop_token_ids", all(_is_int(t) and 0 <= t < 2**31 for t in self.stop_token_ids), "a list of token ids"
        )
        for name in ("logprobs", "prompt_logprobs"):
            count = getattr(self, name)
            self._require(
                name,
                count is None or (_is_int(count) and 0 <= count <= MAX_LOGPROBS),
                f"the number of most likely tokens to return beside each token, 0 to {MAX_LOGPROBS}, or null for none",
            )
        for name in ("ignore_eos", "speculation", "skip_special_tokens", "include_stop_str_in_output"):
            self._require(name, isinstance(getattr(self, name), bool), "true or false")
        for name, check in _CHECKS.items():
            object.__setattr__(self, name, check(name, getattr(self, name)))
        check_min_tokens("min_tokens", self.min_tokens, self.max_tokens)

    def _require(self, name: str, holds: bool, wanted: str) -> None:
        require(name, getattr(self, name), holds, wanted)

    @property
    def biases(self) -> tuple[tuple[int, float], ...]:
        """`logit_bias` as pairs of a token and what is added, in order of token."""
        assert isinstance(self.logit_bias, tuple)
        return self.logit_bias

    @property
    def is_processed(self) -> bool:
        """Whether it needs logits processors."""
        return any(getattr(self, name) != _DEFAULTS[name] for name in PROCESSED)

    def override(self, values: Mapping[str, Any]) -> SamplingParams:
        """These parameters with some replaced. None stands for a parameter that is not given.

        Raises:
          RequestError: a name is unknown (the message gives the nearest known one, or all) or a value is bad.
        """
        if not isinstance(values, Mapping):
            raise RequestError(f"sampling is {quote(values)}; it must be a mapping such as {{temperature: 0.7}}")
        known = [field.name for field in dataclasses.fields(self)]
        for name in values:
            if name not in known:
                raise RequestError(f"unknown sampling key {quote(name)}; {suggest(str(name), known)}")
        try:
            return dataclasses.replace(self, **{name: value for name, value in values.items() if value is not None})
        except TypeError as error:
            raise RequestError(f"sampling has a value of the wrong type: {cut(str(error))}") from None


def _plain(value: Any) -> Any:
    """A value with numbers and lists of numpy or JAX as Python's own."""
    if isinstance(value, list | tuple):
        return tuple(map(_plain, value))
    return value.tolist() if hasattr(value, "dtype") and hasattr(value, "tolist") else value


_CHECKS = {
    "repetition_penalty": check_repetition_penalty,
    "presence_penalty": check_penalty,
    "frequency_penalty": check_penalty,
    "logit_bias": check_logit_bias,
    "allowed_token_ids": check_allowed_token_ids,
    "bad_words": check_bad_words,
    "structured_outputs": check_structured_outputs,
}

_DEFAULTS = {field.name: field.default for field in dataclasses.fields(SamplingParams)}


@dataclasses.dataclass(frozen=True)
class Request:
    """What was asked.

    Attributes:
      id: unique among the requests in flight.
      prompt: token ids.
      sampling: how to answer.
      stop_tokens: all token ids that end it, the model's own and those of stop strings included.
      limit: tokens it may produce: `max_tokens`, or what the model length leaves.
      bad_words: the token sequences of the sampling's `bad_words`.
    """

    id: str
    prompt: tuple[int, ...]
    sampling: SamplingParams
    stop_tokens: tuple[int, ...]
    limit: int
    bad_words: tuple[tuple[int, ...], ...] = ()

    def __post_init__(self) -> None:
        if len(self.stop_tokens) > MAX_STOP_TOKENS:
            raise RequestError(
                f"request {self.id!r} has {len(self.stop_tokens)} stop token ids, the model's own and special tokens "
                f"among its stop strings included; at most {MAX_STOP_TOKENS} are supported"
            )

    @functools.cached_property
    def is_processed(self) -> bool:
        """Whether it needs logits processors; see `engine.processors`."""
        return self.sampling.is_processed

    @property
    def longest(self) -> int:
        """Tokens that are ever in the pages for it: all but the last one produced."""
        return len(self.prompt) + self.limit - 1


def sample_id(request_id: str, index: int) -> str:
    """The id of a request's sample: `request_id` itself for the first, then `request_id#1`, `request_id#2`, ..."""
    return f"{request_id}#{index}" if index else request_id


def samples_of(request_id: str, sampling: SamplingParams) -> list[tuple[str, SamplingParams]]:
    """The ids of a request's samples and what each of them asks for: a request of its own, with a seed of its own.

    Log-probabilities of the prompt, which are the same for all, are asked for by the first.
    """
    samples = [(request_id, dataclasses.replace(sampling, n=1))]
    for index in range(1, sampling.n):
        own = dataclasses.replace(sampling, n=1, seed=(sampling.seed + index) % 2**32, prompt_logprobs=None)
        samples.append((sample_id(request_id, index), own))
    return samples
