"""A request in flight: its tokens so far, its slot and pages, and what each round produced."""

from __future__ import annotations

import dataclasses

from dflash_jax.engine.containers import Log
from dflash_jax.engine.logprob_records import TokenLogprob
from dflash_jax.engine.pages import page_hash
from dflash_jax.engine.request import Request


@dataclasses.dataclass(frozen=True)
class Sequence:
    """A request and its progress.

    Attributes:
      request: what was asked.
      arrived: when, in seconds on the engine's clock.
      output: tokens produced.
      slot: where it lives on the device; None while it waits.
      pages: its physical pages in order of position.
      position: tokens in its pages.
      opened: its slot holds its entry; the first chunk of its prompt writes it.
      load: the checkpoint that its slot's recurrent state begins with.
      saves: numbers of pages at whose end its recurrent state is to be kept.
      published: how many of `pages` are known to the prefix cache.
      hashes: of its full pages, as far as they were needed.
      produced_per_round: tokens that each round added to the output.
      drafted_blocks: what was drafted in each of those rounds.
      verified_per_round: how many of those drafted tokens the target ran.
      fallback: why it no longer drafts although the engine does, if so.
      logprobs: of the output, if its request asks for them.
      prompt_logprobs: of the prompt's second token and those after it, as far as they are known.
      preemptions: how often it had to give its pages back.
      cached_tokens: prompt tokens it did not have to run, over all its admissions.
      damaged_drafts: rounds in which the draft's scores were not finite.
      first_token, last_token: when those were seen, on the engine's clock.
    """

    request: Request
    arrived: float
    output: Log[int] = dataclasses.field(default_factory=Log)
    slot: int | None = None
    pages: Log[int] = dataclasses.field(default_factory=Log)
    position: int = 0
    opened: bool = False
    load: int | None = None
    saves: tuple[int, ...] = ()
    published: int = 0
    hashes: Log[bytes] = dataclasses.field(default_factory=Log)
    produced_per_round: Log[int] = dataclasses.field(default_factory=Log)
    drafted_blocks: Log[tuple[int, ...]] = dataclasses.field(default_factory=Log)
    verified_per_round: Log[int] = dataclasses.field(default_factory=Log)
    fallback: str | None = None
    logprobs: Log[TokenLogprob] = dataclasses.field(default_factory=Log)
    prompt_logprobs: Log[TokenLogprob] = dataclasses.field(default_factory=Log)
    preemptions: int = 0
    cached_tokens: int = 0
    damaged_drafts: int = 0
    first_token: float | None = None
    last_token: float | None = None

    @property
    def id(self) -> str:
        """The request's."""
        return self.request.id

    @property
    def to_run(self) -> int:
        """Tokens that must be in the pages before it decodes: the prompt, and on resumption all output but the last."""
        return len(self.request.prompt) + max(len(self.output) - 1, 0)

    @property
    def decoding(self) -> bool:
        """Its prompt is done."""
        return self.slot is not None and len(self.output) > 0 and self.position >= self.to_run

    def tokens(self, start: int, stop: int) -> tuple[int, ...]:
        """Tokens at positions start..stop-1 of prompt and output together."""
        prompt = self.request.prompt
        first, last = max(start - len(prompt), 0), max(stop - len(prompt), 0)
        return prompt[start:stop] + self.output[first:last]

    @property
    def shareable(self) -> int:
        """Tokens that need not be run where they are in pages already: others' log-probabilities were not kept."""
        complete = 1 + len(self.prompt_logprobs) >= len(self.request.prompt)
        wanted = self.request.sampling.prompt_logprobs is not None and not complete
        return len(self.prompt_logprobs) if wanted else max(self.to_run - 1, 0)

    def following(self, start: int, stop: int) -> tuple[int, ...]:
        """Prompt tokens after positions start..stop-1, if log-probabilities of any of them are yet to be found."""
        prompt = self.request.prompt
        wanted = self.request.sampling.prompt_logprobs is not None
        news = min(stop, len(prompt) - 1) > len(self.prompt_logprobs)
        return prompt[start + 1 : stop + 1] if wanted and news else ()

    def hashed(self, pages: int, page_size: int) -> Sequence:
        """The sequence with the hashes of its first `pages` pages known; each is computed once."""
        if pages <= len(self.hashes):
            return self
        new: list[bytes] = []
        parent = self.hashes[-1] if self.hashes else None
        for page in range(len(self.hashes), pages):
            parent = page_hash(parent, self.tokens(page * page_size, (page + 1) * page_size))
            new.append(parent)
        return dataclasses.replace(self, hashes=self.hashes.extend(new))

    def __repr__(self) -> str:
        where = "waiting" if self.slot is None else f"slot {self.slot}, {len(self.pages)} pages"
        return (
            f"Sequence({self.id!r}: {where}, prompt {len(self.request.prompt)}, position {self.position}, "
            f"output {len(self.output)})"
        )
