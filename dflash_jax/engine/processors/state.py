"""All logits processors of the slots, and the tokens they look at."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from dflash_jax.engine.processors.allowed import AllowedTokens
from dflash_jax.engine.processors.bad_words import BadWords
from dflash_jax.engine.processors.bias import LogitBias
from dflash_jax.engine.processors.block import block_of
from dflash_jax.engine.processors.min_tokens import MinTokens
from dflash_jax.engine.processors.penalties import Penalties
from dflash_jax.engine.processors.protocol import Processor
from dflash_jax.engine.request import Request

PROCESSORS: tuple[type[Processor], ...] = (LogitBias, Penalties, AllowedTokens, BadWords, MinTokens)
"""In the order in which they are applied."""

Process = Callable[[Array], Array]
"""From logits of some positions of each row, [rows, positions, vocab], to what the request makes of them."""


class Processors(struct.PyTreeNode):
    """What logits processors keep for each slot.

    It is allocated for the first request that needs any, and no program of a step without such a request has it.

    Attributes:
      active: the slot's request needs them; written whole by each step, from its plan. Other slots' entries may be
        those of requests that are long gone.
      history: tokens of prompt and output by position, the anchor's included.
      prompt_len: how many of them are the prompt.
      entries: of each of `PROCESSORS`.
    """

    active: Bool[Array, " slots"]
    history: Int[Array, "slots length"]
    prompt_len: Int[Array, " slots"]
    entries: tuple[Processor, ...]


class Room(NamedTuple):
    """What the sizes of a slot's entry follow from.

    Attributes:
      length: tokens it can hold.
      vocab_size: the target's.
    """

    length: int
    vocab_size: int


def empty_processors(slots: int, room: Room) -> Processors:
    """Numpy entries that change nothing."""
    fields: dict[str, Any] = dict(
        active=np.zeros(slots, bool),
        history=np.zeros((slots, room.length), np.int32),
        prompt_len=np.zeros(slots, np.int32),
        entries=tuple(processor.empty(slots, room.vocab_size) for processor in PROCESSORS),
    )
    return Processors(**fields)


def processor_entries(requests: Sequence[tuple[Request, tuple[int, ...]] | None], room: Room) -> Processors:
    """Entries for slots that are opened, one for each request with its tokens so far; those of None change nothing."""
    entries: Any = empty_processors(len(requests), room)
    for row, opened in enumerate(requests):
        if opened is not None:
            request, tokens = opened
            entries.history[row, : len(tokens)] = tokens
            entries.prompt_len[row] = len(request.prompt)
            for entry in entries.entries:
                entry.fill(row, request)
    return entries


def processing(
    processors: Processors,
    slot: Int[Array, " rows"],
    length: Int[Array, " rows"],
    drafts: Int[Array, "rows drafts"],
    stop_tokens: Int[Array, "rows stop_tokens"],
) -> Process:
    """What the rows' requests do to logits.

    Args:
      processors: of all slots.
      slot: of each row.
      length: tokens that are committed.
      drafts: those drafted after them, `UNKNOWN` (-1) for ones that are yet to be proposed.
      stop_tokens: that end each row's request.
    """
    own = jax.tree.map(lambda leaf: leaf[slot], processors)
    block = block_of(own.history, length, own.prompt_len, drafts, stop_tokens)

    def process(logits: Float[Array, "rows positions vocab"]) -> Float[Array, "rows positions vocab"]:
        logits = logits.astype(jnp.float32)
        for entry in own.entries:
            wanted = own.active & entry.wanted()

            def apply(logits, entry=entry, wanted=wanted):
                # Rows that do not ask for it keep their logits to the bit.
                return jnp.where(wanted[:, None, None], entry.apply(logits, block), logits)

            logits = jax.lax.cond(jnp.any(wanted), apply, lambda logits: logits, logits)
        return logits

    return process


def record_tokens(
    processors: Processors,
    idx_mapping: Int[Array, " rows"],
    start: Int[Array, " rows"],
    tokens: Int[Array, "rows tokens"],
    count: Int[Array, " rows"],
) -> Processors:
    """With the first `count` tokens of each row at its positions from `start` on; -1 rows are left out."""
    slots, length = processors.history.shape
    offsets = jnp.arange(tokens.shape[1])
    at = jnp.where(offsets < count[:, None], start[:, None] + offsets, length)
    slot = jnp.where(idx_mapping >= 0, idx_mapping, slots)[:, None]
    return processors.replace(history=processors.history.at[slot, at].set(tokens, mode="drop"))
