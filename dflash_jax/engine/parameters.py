"""Checks of sampling parameters, one function for each kind of value; all raise one sentence by name."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any, TypeGuard

from dflash_jax.errors import RequestError, quote, reason

MAX_LOGIT_BIAS = 1024
"""Tokens whose logits a request can shift."""

MAX_BAD_WORDS = 128
"""Bad words a request can have: each is looked for, as up to two sequences of tokens, at every position."""

PROCESSED = (
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
    "allowed_token_ids",
    "bad_words",
    "min_tokens",
)
"""The parameters that change the target's logits. A request with their defaults needs no logits processors."""


def require(name: str, value: Any, holds: bool, wanted: str) -> None:
    """Raises RequestError unless the value is as it must be."""
    if not holds:
        raise RequestError(f"sampling.{name} is {quote(value)}; it must be {wanted}")


def is_int(value: object) -> TypeGuard[int]:
    """Whether a value is an integer; True and False are none."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_real(value: object) -> bool:
    """Whether a value is a finite number."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:
        # An integer of hundreds of digits.
        return False


def is_token(value: object) -> bool:
    """Whether a value can be a token id of some vocabulary."""
    return is_int(value) and 0 <= value < 2**31


def check_penalty(name: str, value: Any) -> float:
    """A presence or frequency penalty."""
    require(name, value, is_real(value) and -2 <= value <= 2, "from -2 to 2")
    return value


def check_repetition_penalty(name: str, value: Any) -> float:
    """A repetition penalty."""
    require(name, value, is_real(value) and value > 0, "above 0; 1 does nothing, more makes repetition rarer")
    return value


def check_logit_bias(name: str, value: Any) -> tuple[tuple[int, float], ...]:
    """What is added to some tokens' logits, as pairs in order of token. JSON has strings as keys, so those may be."""
    wanted = f"a mapping of at most {MAX_LOGIT_BIAS} token ids to numbers from -100 to 100"
    pairs = value.items() if isinstance(value, Mapping) else value
    # The form in which it is kept is taken too, so that parameters can be copied.
    are_pairs = isinstance(value, Mapping) or (
        isinstance(value, list | tuple) and all(isinstance(pair, list | tuple) and len(pair) == 2 for pair in value)
    )
    require(name, value, are_pairs and len(value) <= MAX_LOGIT_BIAS, wanted)
    kept: dict[int, float] = {}
    for key, bias in pairs:
        token = int(key) if isinstance(key, str) and key.isascii() and key.isdigit() and len(key) < 12 else key
        bias = bias.item() if hasattr(bias, "item") else bias
        token = token.item() if hasattr(token, "item") else token
        if not is_token(token) or not is_real(bias) or not -100 <= bias <= 100:
            raise RequestError(f"sampling.{name} has {quote(key)}: {quote(bias)}; it must be {wanted}")
        if token in kept:
            raise RequestError(f"sampling.{name} has token {token} twice; each token can be given one number")
        kept[token] = float(bias)
    return tuple(sorted(kept.items()))


def check_allowed_token_ids(name: str, value: Any) -> tuple[int, ...] | None:
    """The tokens that may be said, in order; None for all."""
    if value is None:
        return None
    holds = isinstance(value, list | tuple) and len(value) > 0 and all(map(is_token, value))
    require(name, value, holds, "a list of at least one token id, or null to allow all")
    return tuple(sorted(set(value)))


def check_bad_words(name: str, value: Any) -> tuple[str, ...]:
    """Strings that must not be said."""
    words = (value,) if isinstance(value, str) else value
    holds = isinstance(words, list | tuple) and all(isinstance(word, str) and word.strip() for word in words)
    require(name, value, holds, "a list of strings, none of them blank")
    if len(words) > MAX_BAD_WORDS:
        raise RequestError(f"sampling.{name} has {len(words)} strings; at most {MAX_BAD_WORDS} are supported")
    return tuple(words)


GRAMMARS = ("json", "regex", "choice")
"""What can describe a structured output."""


def check_structured_outputs(name: str, value: Any) -> tuple[str, str] | None:
    """What the output must be, as a pair of one of `GRAMMARS` and its text; None for anything."""
    if value is None:
        return None
    wanted = 'one of {"json": schema}, {"regex": text} and {"choice": [texts]}'
    pairs = list(value.items()) if isinstance(value, Mapping) else [value]
    # The form in which it is kept is taken too, so that parameters can be copied.
    one = len(pairs) == 1 and isinstance(pairs[0], list | tuple) and len(pairs[0]) == 2 and pairs[0][0] in GRAMMARS
    require(name, value, one, wanted)
    kind, given = pairs[0]
    if kind == "regex":
        require(name, value, isinstance(given, str) and given != "", wanted)
        return kind, given
    if isinstance(given, str):
        try:
            given = json.loads(given)
        except ValueError as error:
            raise RequestError(
                f"sampling.{name} has {kind} {quote(given)}, which is no JSON ({reason(error)})"
            ) from None
    if kind == "json":
        require(name, value, isinstance(given, Mapping), wanted + ", the schema an object")
    if kind == "choice":
        texts = isinstance(given, list | tuple) and len(given) > 0 and all(isinstance(t, str) and t for t in given)
        require(name, value, texts, wanted + ", none of them empty")
    try:
        return kind, json.dumps(given, ensure_ascii=False)
    except (TypeError, ValueError) as error:
        raise RequestError(f"sampling.{name} is no JSON ({reason(error)}); it must be {wanted}") from None


def check_min_tokens(name: str, value: Any, max_tokens: int) -> int:
    """How many tokens come before any that may end the output."""
    require(name, value, is_int(value) and value >= 0, "0 or a positive integer")
    if value > max_tokens:
        raise RequestError(f"sampling.{name} is {value}, more than sampling.max_tokens {max_tokens}; it must not be")
    return value
