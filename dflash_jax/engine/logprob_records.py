"""Log-probabilities as a request returns them: one small record for each token."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from dflash_jax.sampling import Logprobs

MAX_LOGPROBS = 20
"""Most likely tokens that a request can be told at each place, beside the token itself."""

_SIZES = (0, 1, 5, MAX_LOGPROBS)
"""How many of them a program finds: each size is compiled for itself, so there are few."""


class TopLogprob(NamedTuple):
    """One of the most likely tokens at a place.

    Attributes:
      token_id: the token.
      text: its own text, special tokens shown and bytes of incomplete characters as U+FFFD; None without a tokenizer.
      logprob: natural logarithm of its probability.
    """

    token_id: int
    text: str | None
    logprob: float


class TokenLogprob(NamedTuple):
    """A token of an output or a prompt, and how likely the target found it there.

    The probability is the target's own, of its logits as they are: before temperature, top-k, top-p and min-p.

    Attributes:
      token_id, text, logprob: see `TopLogprob`.
      rank: 1 for the most likely token of the vocabulary; of equally likely ones the lowest id comes first.
      top: the most likely tokens at this place, as many as were asked for, best first.
    """

    token_id: int
    text: str | None
    logprob: float
    rank: int
    top: tuple[TopLogprob, ...] = ()


def size_for(wanted: Iterable[int | None]) -> int | None:
    """How many of the most likely tokens a program is to find, so that every row gets what it wants.

    Args:
      wanted: by each row; None for nothing.

    Returns:
      One of a few sizes, or None if no row wants any log-probabilities.
    """
    asked = [count for count in wanted if count is not None]
    return min(size for size in _SIZES if size >= max(asked)) if asked else None


def records(
    tokens: Sequence[int], found: Logprobs, top: int, text_of: Callable[[int], str | None]
) -> list[TokenLogprob]:
    """The records of some tokens of one row.

    Args:
      tokens: they are.
      found: of these tokens and maybe of more after them.
      top: how many of the most likely tokens were asked for.
      text_of: a token's own text.
    """
    count = len(tokens)
    logprob, rank, names, values = (
        np.asarray(part)[:count].tolist() for part in (found.logprob, found.rank, found.top_tokens, found.top_logprobs)
    )
    return [
        TokenLogprob(
            token,
            text_of(token),
            logprob[at],
            rank[at],
            tuple(
                TopLogprob(name, text_of(name), value)
                for name, value in zip(names[at][:top], values[at][:top], strict=True)
            ),
        )
        for at, token in enumerate(tokens)
    ]


def from_plain(values: Sequence) -> TokenLogprob:
    """A record of its values as JSON keeps them."""
    token_id, text, logprob, rank, top = values
    return TokenLogprob(token_id, text, logprob, rank, tuple(TopLogprob(*one) for one in top))
