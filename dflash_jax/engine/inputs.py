"""A plan laid out as arrays: what a step takes from the host, row by row."""

from __future__ import annotations

from typing import Any

import numpy as np
from flax import struct
from jaxtyping import Array, Bool, Float, Int, UInt32

from dflash_jax.engine.plan import Chunk, Decode, Opening, Plan, needs_processors
from dflash_jax.engine.processors import Processors, Room, processor_entries
from dflash_jax.engine.request import MAX_STOP_TOKENS
from dflash_jax.engine.state import Slots
from dflash_jax.sampling import Sampler, device_temperature


class PrefillInputs(struct.PyTreeNode):
    """The chunks of a step.

    Attributes:
      idx_mapping: row to slot, -1 for an empty row.
      tokens: the chunks, padded.
      q_len: real tokens of each.
      last: the chunk ends its prompt.
      known_next: the token after the prompt, of a request that resumes; -1 to sample it.
      opens: the row's slot gets the row's entry first.
      entries: entries of the slots that are opened, one a row.
      loads: the checkpoint that the recurrent state of a slot that is opened begins with; -1 for zeros.
      saves: the checkpoint that keeps the recurrent state at the chunk's end; -1 for none.
      following: the prompt's token after each of the chunk's, where their log-probabilities are wanted.
      processed: rows whose requests need logits processors; None where none does.
      processors: entries of the slots that are opened, one a row; None likewise.
      masks: what the rows' grammars allow next; None where no row has one.
    """

    idx_mapping: Int[Array, " rows"]
    tokens: Int[Array, "rows chunk"]
    q_len: Int[Array, " rows"]
    last: Bool[Array, " rows"]
    known_next: Int[Array, " rows"]
    opens: Bool[Array, " rows"]
    entries: Slots
    loads: Int[Array, " rows"]
    saves: Int[Array, " rows"]
    following: Int[Array, "rows chunk"] | None = None
    processed: Bool[Array, " rows"] | None = None
    processors: Processors | None = None
    masks: UInt32[Array, "rows 1 words"] | None = None


class DecodeInputs(struct.PyTreeNode):
    """The rows of a step's rounds.

    Attributes:
      idx_mapping: row to slot, -1 for an empty row.
      first_page: logical number of a row's first new page.
      new_pages: physical pages that its slot is given, padded with -1.
      chance: that drafted tokens are kept; see `steps.run_round`.
      processed: rows whose requests need logits processors; None where none does.
    """

    idx_mapping: Int[Array, " rows"]
    first_page: Int[Array, " rows"]
    new_pages: Int[Array, "rows new_pages"]
    chance: Float[Array, "drafts bins"] | None = None
    processed: Bool[Array, " rows"] | None = None


def prefill_inputs(
    chunks: tuple[Chunk | None, ...], width: int, slot_pages: int, room: Room | None = None
) -> PrefillInputs:
    """The arrays of a plan's chunks.

    Args:
      chunks: one a row, None for an empty row.
      width: tokens to pad to.
      slot_pages: width of the block table.
      room: of logits processors; needed where some row's request needs any.
    """
    rows = len(chunks)
    following = np.full((rows, width), -1, np.int32)
    tokens, q_len = np.zeros((rows, width), np.int32), np.zeros(rows, np.int32)
    last, known_next = np.zeros(rows, bool), np.full(rows, -1, np.int32)
    for row, chunk in enumerate(chunks):
        if chunk is not None:
            tokens[row, : len(chunk.tokens)] = chunk.tokens
            q_len[row], last[row] = len(chunk.tokens), chunk.last
            following[row, : len(chunk.following)] = chunk.following
            known_next[row] = -1 if chunk.known_next is None else chunk.known_next
    openings = [None if chunk is None else chunk.opening for chunk in chunks]
    fields: dict[str, Any] = dict(
        idx_mapping=_mapping(chunks),
        tokens=tokens,
        q_len=q_len,
        last=last,
        known_next=known_next,
        opens=np.array([opening is not None for opening in openings]),
        entries=slot_entries(openings, slot_pages),
        loads=_indices([None if opening is None else opening.load for opening in openings]),
        saves=_indices([None if chunk is None else chunk.save for chunk in chunks]),
        following=following if any(chunk is not None and chunk.following for chunk in chunks) else None,
        processed=_processed(chunks),
        processors=None if room is None else _processor_entries(openings, room),
    )
    return PrefillInputs(**fields)


def decode_inputs(plan: Plan) -> DecodeInputs:
    """The arrays of a plan's rounds."""
    decodes = plan.decodes
    first, pages = np.zeros(len(decodes), np.int32), np.full((len(decodes), plan.table_width), -1, np.int32)
    for row, decode in enumerate(decodes):
        if decode is not None:
            first[row] = decode.first_page
            pages[row, : len(decode.new_pages)] = decode.new_pages
    fields: dict[str, Any] = dict(idx_mapping=_mapping(decodes), first_page=first, new_pages=pages, chance=plan.chance)
    fields["processed"] = _processed(decodes)
    return DecodeInputs(**fields)


def slot_entries(openings: list[Opening | None], slot_pages: int) -> Slots:
    """Entries of the slot table, one a row; those of rows that open no slot mean nothing."""
    rows = len(openings)

    def column(dtype, *shape: int, fill=0) -> Any:
        return np.full((rows, *shape), fill, dtype)

    entries = Slots(
        position=column(np.int32),
        anchor=column(np.int32),
        draft_len=column(np.int32),
        folded=column(np.int32),
        block_table=column(np.int32, slot_pages, fill=-1),
        tokens_left=column(np.int32),
        stop_tokens=column(np.int32, MAX_STOP_TOKENS, fill=-1),
        sampler=Sampler(
            temperature=column(np.float32),
            top_k=column(np.int32),
            top_p=column(np.float32, fill=1),
            min_p=column(np.float32),
            seed=column(np.uint32),
        ),
        decoding=column(bool),
        speculating=column(bool),
        draft_limit=column(np.int32),
        finished=column(bool),
        violation=column(np.int32),
    )
    for row, opening in enumerate(openings):
        if opening is None:
            continue
        request, sampler = opening.request, entries.sampler
        entries.position[row] = opening.position
        entries.draft_len[row] = opening.position if opening.speculating else 0
        entries.block_table[row, : len(opening.pages)] = opening.pages
        entries.tokens_left[row] = opening.tokens_left
        entries.stop_tokens[row, : len(request.stop_tokens)] = request.stop_tokens
        sampler.temperature[row] = device_temperature(request.sampling.temperature)
        for name in ("top_k", "top_p", "min_p", "seed"):
            getattr(sampler, name)[row] = getattr(request.sampling, name)
        entries.speculating[row] = opening.speculating
        entries.draft_limit[row] = opening.draft_limit
    return entries


def _processed(rows: tuple[Chunk | Decode | None, ...]) -> np.ndarray | None:
    if not needs_processors(rows):
        return None
    return np.array([row is not None and row.processed for row in rows])


def _processor_entries(openings: list[Opening | None], room: Room) -> Processors:
    opened = [None if each is None or not each.tokens else (each.request, each.tokens) for each in openings]
    return processor_entries(opened, room)


def _indices(indices: list[int | None]) -> np.ndarray:
    return np.array([-1 if index is None else index for index in indices], np.int32)


def _mapping(rows: tuple[Chunk | Decode | None, ...]) -> np.ndarray:
    return _indices([None if row is None else row.slot for row in rows])
