"""The shapes of plans: what programs an engine may need, before it has any request."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from dflash_jax.engine.host import HostState
from dflash_jax.engine.pages import pages_for
from dflash_jax.engine.plan import Chunk, Decode, Plan, at_width, bucket
from dflash_jax.engine.request import SamplingParams
from dflash_jax.engine.width import Width, likely_widths


def possible_plans(
    host: HostState,
    sampling: SamplingParams | None = None,
    *,
    requests: int | None = None,
    plain: int = 0,
    processed: bool = False,
) -> list[Plan]:
    """A plan without requests for each shape that a plan nearly always has.

    A request that was preempted and needs more new pages at once than others has a wider table: that is not here.

    Args:
      host: the engine's half, of which no request matters.
      sampling: what the requests ask for.
      requests: in flight at once, at most; as many as there are slots by default.
      plain: so many of them at most when all in flight decode without drafting.
      processed: some of them need logits processors, which doubles the number of plans.
    """
    policy = host.policy
    slots = policy.max_slots
    rows = [*_buckets(1, min(requests or slots, slots), slots)]
    budget = policy.prefill_chunk
    plans = [
        Plan(chunks=(chunk,) * count, chunk_width=width)
        for chunk in _chunks(sampling)
        for width in _buckets(-(-budget // 4), budget, budget)
        for count in rows
        if count == 1 or width * count <= budget
    ]
    rounds = policy.rounds_per_step
    table_width = pages_for(rounds * (1 + policy.k), host.pool.page_size)
    wanted = {(count, width) for count in rows for width in likely_widths(host.experience, count, policy.k)}
    if plain:
        wanted |= {(count, Width(0, count)) for count in _buckets(1, min(plain, slots), slots)}
    for count, width in sorted(wanted):
        plan = Plan(decodes=(_decode(sampling),) * count, table_width=table_width, rounds=rounds)
        plans.append(at_width(plan, host, width))
    return plans + [_processed(plan) for plan in plans] if processed else plans


def _processed(plan: Plan) -> Plan:
    """The plan with a row, in no slot, that needs logits processors."""
    if plan.chunks:
        row = Chunk(id="", slot=-1, tokens=(), last=False, known_next=None, opening=None, processed=True)
        return dataclasses.replace(plan, chunks=(row, *plan.chunks[1:]))
    return dataclasses.replace(plan, decodes=(Decode(id="", slot=-1, processed=True), *plan.decodes[1:]))


def _chunks(sampling: SamplingParams | None) -> list[Chunk | None]:
    """Rows with nothing in them, as the pieces of a prompt ask for log-probabilities: the last, and those before it."""
    if sampling is None or (sampling.logprobs is None and sampling.prompt_logprobs is None):
        return [None]
    following = () if sampling.prompt_logprobs is None else (0,)
    chunk = Chunk("", -1, (), False, None, None, None, sampling.logprobs, following, sampling.prompt_logprobs)
    before = dataclasses.replace(chunk, logprobs=None) if following else None
    return [chunk] if before == chunk else [chunk, before]


def _decode(sampling: SamplingParams | None) -> Decode | None:
    """The same of a row that runs rounds."""
    return None if sampling is None or sampling.logprobs is None else Decode("", -1, logprobs=sampling.logprobs)


def _buckets(smallest: int, most: int, largest: int) -> Iterator[int]:
    """The sizes that `bucket` gives counts up to `most`."""
    size = bucket(1, smallest, largest)
    yield size
    while size < most:
        size = bucket(size + 1, smallest, largest)
        yield size
