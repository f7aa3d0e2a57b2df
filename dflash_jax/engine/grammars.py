"""Structured output: which tokens a grammar allows after some output, and drafts that follow it.

The grammars are llguidance's. A matcher here is only a cache: what it says follows from the request and its output.
"""

from __future__ import annotations

import dataclasses
import json
import threading
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jaxtyping import UInt32

from dflash_jax.checkpoints import Tokenizer
from dflash_jax.engine.containers import Log
from dflash_jax.engine.request import Request
from dflash_jax.errors import RequestError, quote, reason
from dflash_jax.models.config import TargetConfig
from dflash_jax.models.drafters import Proposal
from dflash_jax.sampling.masks import ALL, WORD, has_tokens, only_token, set_tokens


@dataclasses.dataclass(frozen=True)
class Constraint:
    """A request whose output a grammar decides, and its output so far."""

    request: Request
    output: Log[int]


class Grammars:
    """The grammars of one target's requests."""

    def __init__(self, tokenizer: Tokenizer, target: TargetConfig):
        """Makes them; nothing is loaded before it is needed.

        Args:
          tokenizer: of the texts that grammars describe.
          target: which may have more logits than the tokenizer has tokens.
        """
        self._tokenizer, self._target = tokenizer, target
        self._vocabulary: Any = None
        self._compiled: dict[tuple[str, str], Any] = {}
        self._matchers: dict[str, _Matcher] = {}
        # Forks share the grammars, and may be run by several threads.
        self._lock = threading.Lock()

    @property
    def words(self) -> int:
        """Words of a mask."""
        return -(-self._target.vocab_size // WORD)

    def check(self, structured: tuple[str, str]) -> None:
        """Refuses a grammar that cannot be followed.

        Raises:
          RequestError: it is none, or llguidance is not installed.
        """
        if structured in self._compiled:
            return
        try:
            from llguidance import LLMatcher
        except ImportError:
            raise RequestError(
                "sampling.structured_outputs needs the package llguidance; pip install 'dflash_jax[structured]'"
            ) from None
        if self._vocabulary is None:
            self._vocabulary = _vocabulary(self._tokenizer, self._target)
        kind, text = structured
        try:
            matcher = LLMatcher(self._vocabulary, _source(kind, text), log_level=0)
            error = matcher.get_error()
        except ValueError as refused:
            error = str(refused)
        if error:
            message = reason(ValueError(error))
            raise RequestError(f"sampling.structured_outputs has {kind} {quote(text)}, which cannot be used: {message}")
        if len(self._compiled) >= _MOST_COMPILED:
            self._compiled.pop(next(iter(self._compiled)))
        self._compiled[structured] = matcher

    def first_masks(self, constraints: Sequence[Constraint | None]) -> UInt32[np.ndarray, "rows 1 words"]:
        """What each row may say first, or next; None may say anything."""
        masks = self._all(len(constraints), 1)
        with self._lock:
            for row, constraint in enumerate(constraints):
                if constraint is not None:
                    masks[row, 0] = self._matcher(constraint, None).mask(self.words)
        return masks

    def follow(
        self, constraints: Sequence[Constraint | None], block: Proposal | None, width: int
    ) -> tuple[Proposal | None, UInt32[np.ndarray, "rows positions words"]]:
        """Drafted blocks that the grammars allow, as far as there are any, and what they allow at each position.

        Args:
          constraints: of the rows.
          block: what was proposed, with q finite; None if nothing was.
          width: how many drafted tokens are verified at most.

        Returns:
          The proposal with tokens that a grammar forbids replaced, q with them; and the masks after the anchor and
          after each drafted token. After one that is forbidden all the same, they mean nothing.
        """
        assert block is not None or width == 0, "drafted tokens are to be verified, and there are none"
        masks = self._all(len(constraints), 1 + width)
        if block is not None:
            copies: Any = {name: np.array(getattr(block, name)) for name in ("tokens", "candidates", "probs")}
            block = block.replace(**copies)
        with self._lock:
            before, self._matchers = self._matchers, {}
            for row, constraint in enumerate(constraints):
                if constraint is not None:
                    matcher = self._matcher(constraint, before.get(constraint.request.id))
                    self._matchers[constraint.request.id] = matcher
                    matcher.follow(
                        masks[row], None if block is None else jax.tree.map(lambda leaf, at=row: leaf[at], block)
                    )
        return block, masks

    def _all(self, rows: int, positions: int) -> np.ndarray:
        return np.full((rows, positions, self.words), ALL, np.uint32)

    def _matcher(self, constraint: Constraint, known: _Matcher | None) -> _Matcher:
        """A matcher that has consumed the output; the known one is used if it has consumed the beginning of it."""
        structured = constraint.request.sampling.structured_outputs
        assert isinstance(structured, tuple)
        output = tuple(constraint.output)
        if known is None or not known.is_before(constraint.request, output):
            self.check(structured)
            known = _Matcher(constraint.request, self._compiled[structured].deep_copy(), self._vocabulary.eos_tokens)
        known.consume(output)
        return known


_MOST_COMPILED = 256
"""Grammars that are kept compiled."""


class _Matcher:
    """Where a request is in its grammar."""

    def __init__(self, request: Request, matcher: Any, ends: Sequence[int]):
        self._request, self._matcher, self._ends = request, matcher, ends
        self._consumed: tuple[int, ...] = ()

    def is_before(self, request: Request, output: tuple[int, ...]) -> bool:
        """Whether it is of such a request, and has consumed the output or the beginning of it."""
        own = self._request
        same = own is request or (own.sampling, own.stop_tokens) == (request.sampling, request.stop_tokens)
        return same and output[: len(self._consumed)] == self._consumed

    def consume(self, output: tuple[int, ...]) -> None:
        """Takes the rest of the output."""
        self._matcher.try_consume_tokens(list(output[len(self._consumed) :]))
        self._consumed = output

    def follow(self, masks: np.ndarray, block: Proposal | None) -> None:
        """Writes what is allowed at each position of a block, whose numpy arrays are changed to fit."""
        advanced = 0
        for position, mask in enumerate(masks):
            mask[:] = self.mask(len(mask))
            if block is None or position == len(masks) - 1:
                break
            drafted: Any = block
            token = choose_allowed(
                mask, drafted.tokens[position], drafted.candidates[position], drafted.probs[position]
            )
            drafted.tokens[position] = token
            # Nothing follows a token that is forbidden, nor one that ends the request.
            if not has_tokens(mask, token) or self._matcher.try_consume_tokens([int(token)]) != 1:
                break
            advanced += 1
        if advanced:
            self._matcher.rollback(advanced)

    def mask(self, words: int) -> UInt32[np.ndarray, " words"]:
        """The tokens that may come next; those that end the request once the text is complete."""
        matcher, mask = self._matcher, np.zeros(words, np.uint32)
        if not matcher.is_stopped():
            allowed = np.frombuffer(matcher.compute_bitmask(), np.uint32)[:words]
            mask[: len(allowed)] = allowed
            # What ends a text is the request's business, not the tokenizer's.
            set_tokens(mask, [end for end in self._ends if end < words * WORD], False)
        if matcher.is_accepting():
            set_tokens(mask, self._request.stop_tokens, True)
        return mask


def choose_allowed(mask: np.ndarray, token: Any, candidates: np.ndarray, probs: np.ndarray) -> Any:
    """A drafted token that a mask allows, if there is one; changes its candidates and q in place to fit.

    Whatever was drawn that is forbidden becomes the likeliest allowed candidate, which therefore takes over the
    probability of the forbidden ones. So the draw keeps following q, and the output the target's distribution.

    Args:
      mask: of the tokens allowed here.
      token: what was drawn.
      candidates, probs: q at this position, best candidate first.
    """
    allowed = has_tokens(mask, candidates)
    if allowed.all() or not np.isfinite(probs).all():
        return token
    if allowed.any():
        best = int(np.argmax(np.where(allowed, probs, -1)))
        probs[best] += probs[~allowed].sum()
        probs[~allowed] = 0
        return token if has_tokens(mask, token) else candidates[best]
    forced = only_token(mask)
    if forced is None:
        return token
    candidates[0] = forced
    probs[:] = 0
    probs[0] = 1
    return candidates[0]


_COMPACT: Any = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""JSON as `json.dumps` writes it. Where any white space may come, a small model can go on with it for ever."""


def _source(kind: str, text: str) -> str:
    """A grammar in llguidance's own form."""
    from llguidance import LLMatcher

    if kind == "json":
        return LLMatcher.grammar_from_json_schema(text, defaults=_COMPACT)
    if kind == "regex":
        return LLMatcher.grammar_from_regex(text)
    return LLMatcher.grammar_from_lark("start: " + " | ".join(json.dumps(choice) for choice in json.loads(text)))


def _vocabulary(tokenizer: Tokenizer, target: TargetConfig) -> Any:
    """llguidance's form of a tokenizer."""
    from llguidance.hf import from_tokenizer

    larger = target.vocab_size if target.vocab_size > tokenizer.vocab_size else None
    # Without any, the library would take the first token for it.
    ends = [end for end in target.eos_token_ids if end < max(tokenizer.vocab_size, target.vocab_size)]
    return from_tokenizer(tokenizer.backend, n_vocab=larger, eos_token=ends or tokenizer.eos_token_id)
