"""What a request returns: updates while it runs, and a completion with its metrics at the end."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Literal

from dflash_jax.acceptance import Acceptance
from dflash_jax.engine import display
from dflash_jax.engine.containers import Queue
from dflash_jax.engine.logprob_records import TokenLogprob
from dflash_jax.engine.sequence import Sequence

FinishReason = Literal["stop", "length", "abort", "error"]


@dataclasses.dataclass(frozen=True)
class Metrics:
    """What speculation did for a request, in vLLM's conventions.

    Attributes:
      drafts_proposed: drafted tokens that the target ran.
      drafts_accepted: those that became output; the target's own token after them does not count.
      drafted_request_steps: rounds in which it ran any.
      accept_rate: accepted / proposed; None when nothing was drafted.
      mean_acceptance_length: 1 + accepted / steps; None when nothing was drafted.
      ttft_s: seconds from arrival to the first token.
      tpot_s: seconds per token after the first; None for a single token.
      preemptions: how often it gave its pages back and was resumed.
      cached_tokens: prompt tokens taken from the prefix cache.
      damaged_drafts: rounds in which the draft's scores were not finite, which costs acceptance and nothing else.
    """

    drafts_proposed: int
    drafts_accepted: int
    drafted_request_steps: int
    accept_rate: float | None
    mean_acceptance_length: float | None
    ttft_s: float | None
    tpot_s: float | None
    preemptions: int
    cached_tokens: int
    damaged_drafts: int = 0


@dataclasses.dataclass(frozen=True)
class Completion:
    """A finished request.

    Attributes:
      id: the request's.
      prompt_tokens: length of its prompt.
      token_ids: what it produced, the stop token included if one ended it.
      text: decoded, without special tokens and without the stop string; None without a tokenizer.
      finish_reason: "stop" (stop token or string), "length", "abort" or "error".
      error: what went wrong, for "error".
      fallback: why it stopped speculating, if it did.
      metrics: see `Metrics`.
      produced_per_round: tokens of each round, the prefill's first token not counted.
      drafted_blocks: what was drafted in each of those rounds.
      verified_per_round: how many of those drafted tokens the target ran, from the first on.
      logprobs: one record for each of `token_ids`, if the request asked for log-probabilities.
      prompt_logprobs: one for each token of the prompt, if it asked for those; None stands for the first, which
        follows nothing. A request that ended before its whole prompt was run has as many as were run.
      others: what `generate` returns of a prompt's samples after the first, which is this one; see `samples`.
    """

    id: str
    prompt_tokens: int
    token_ids: tuple[int, ...]
    text: str | None
    finish_reason: FinishReason
    error: str | None
    fallback: str | None
    metrics: Metrics
    produced_per_round: tuple[int, ...]
    drafted_blocks: tuple[tuple[int, ...], ...]
    verified_per_round: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] | None = None
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    others: tuple[Completion, ...] = ()

    @property
    def samples(self) -> tuple[Completion, ...]:
        """All samples of the prompt in order, this one the first of them; only this one where `n` is 1."""
        return (self, *self.others)

    def __repr__(self) -> str:
        return display.completion_text(self)

    def _repr_html_(self) -> str:
        return display.completion_html(self)


@dataclasses.dataclass(frozen=True)
class Update:
    """What one step brought one request.

    Attributes:
      id: the request's.
      token_ids: new tokens.
      text: new text that is final; "" while a character is incomplete, None without a tokenizer.
      completion: set when the request finished in this step.
      logprobs: one record for each of `token_ids`, if the request asked for log-probabilities.
      prompt_logprobs: with the first token, those of the prompt, if the request asked for them; see `Completion`.
    """

    id: str
    token_ids: tuple[int, ...]
    text: str | None
    completion: Completion | None = None
    logprobs: tuple[TokenLogprob, ...] | None = None
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None

    def then(self, later: Update) -> Update:
        """This update and a later one of the same request as one."""
        text = None if self.text is None or later.text is None else self.text + later.text
        return Update(
            self.id,
            self.token_ids + later.token_ids,
            text,
            later.completion,
            None if self.logprobs is None else self.logprobs + (later.logprobs or ()),
            later.prompt_logprobs if self.prompt_logprobs is None else self.prompt_logprobs,
        )


def join_updates(undelivered: Queue[Update], updates: Iterable[Update]) -> Queue[Update]:
    """Undelivered updates with new ones added, joined to one per request."""
    for update in updates:
        before = undelivered.get(update.id)
        if before is None:
            undelivered = undelivered.append(update.id, update)
        else:
            undelivered = undelivered.replace(update.id, before.then(update))
    return undelivered


def metrics_of(sequence: Sequence) -> Metrics:
    """The metrics of a request so far."""
    drafted = [
        (produced - 1, verified)
        for produced, verified in zip(sequence.produced_per_round, sequence.verified_per_round, strict=True)
        if verified
    ]
    acceptance = Acceptance(sum(p for _, p in drafted), sum(a for a, _ in drafted), len(drafted))
    first, last, count = sequence.first_token, sequence.last_token, len(sequence.output)
    return Metrics(
        **acceptance.counts(),
        accept_rate=acceptance.accept_rate,
        mean_acceptance_length=acceptance.mean_acceptance_length,
        ttft_s=None if first is None else first - sequence.arrived,
        tpot_s=(last - first) / (count - 1) if first is not None and last is not None and count > 1 else None,
        preemptions=sequence.preemptions,
        cached_tokens=sequence.cached_tokens,
        damaged_drafts=sequence.damaged_drafts,
    )


def completion_of(sequence: Sequence, text: str | None, reason: FinishReason, error: str | None = None) -> Completion:
    """What came of a request that ends."""
    return Completion(
        id=sequence.id,
        prompt_tokens=len(sequence.request.prompt),
        token_ids=tuple(sequence.output),
        text=text,
        finish_reason=reason,
        error=error,
        fallback=sequence.fallback,
        metrics=metrics_of(sequence),
        produced_per_round=tuple(sequence.produced_per_round),
        drafted_blocks=tuple(sequence.drafted_blocks),
        verified_per_round=tuple(sequence.verified_per_round),
        logprobs=None if sequence.request.sampling.logprobs is None else tuple(sequence.logprobs),
        prompt_logprobs=prompt_logprobs_of(sequence),
    )


def prompt_logprobs_of(sequence: Sequence) -> tuple[TokenLogprob | None, ...] | None:
    """Those of a request's prompt as far as it was run, if it asked for them."""
    return None if sequence.request.sampling.prompt_logprobs is None else (None, *sequence.prompt_logprobs)
