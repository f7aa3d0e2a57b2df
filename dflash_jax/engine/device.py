"""What the engine runs on the device, compiled: one function per transition, one program per shape."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Array

from dflash_jax.engine import rows as row_ops
from dflash_jax.engine.request import Progress
from dflash_jax.engine.scheduler import Chunk
from dflash_jax.engine.state import MAX_STOP_TOKENS, Models, Rows, Slots
from dflash_jax.engine.steps import prefill, run_rounds
from dflash_jax.kernels import native
from dflash_jax.kernels.choice import Implementation
from dflash_jax.kernels.product import RowMatrix
from dflash_jax.models.weights import is_matrix
from dflash_jax.sampling import Sampler, device_temperature


@functools.cache
def prefill_program(*, donate: bool) -> Callable:
    """`prefill`, compiled; with `donate` its state's memory is used again."""
    return jax.jit(prefill, static_argnames=("implementation",), donate_argnames=("state",) if donate else ())


@functools.cache
def decode_program(*, donate: bool) -> Callable:
    """`run_rounds`, compiled; with `donate` its state's memory is used again."""
    return jax.jit(
        run_rounds,
        static_argnames=("drafts", "rounds", "implementation"),
        donate_argnames=("state",) if donate else (),
    )


def arranged(models: Models, implementation: Implementation | None) -> Models:
    """The models as the device is fastest with them.

    On CPUs that is with a row of each matrix per output, for the native product, which takes copies of them all but a
    tied LM head. Nothing changes where it is not available, where an `implementation` is asked for, and for what
    lies so already.
    """
    if implementation is not None or not native.available():
        return models

    def arrange(path: tuple, leaf: Array | RowMatrix) -> Array | RowMatrix:
        if isinstance(leaf, RowMatrix) or not (is_matrix(path, leaf) and native.computes(leaf.dtype)):
            return leaf
        return RowMatrix(leaf.T)

    target = models.target
    if target.lm_head is None and native.computes(target.embedding.dtype):
        models = models.replace(target=target.replace(lm_head=RowMatrix(target.embedding)))
    leaves, form = jax.tree_util.tree_flatten_with_path(models, is_leaf=lambda leaf: isinstance(leaf, RowMatrix))
    new = [arrange(path, leaf) for path, leaf in leaves]
    unchanged = all(after is before for after, (_, before) in zip(new, leaves, strict=True))
    return models if unchanged else jax.tree.unflatten(form, new)


condense = jax.jit(row_ops.condense)
split = jax.jit(row_ops.split)
part = jax.jit(row_ops.part, static_argnames=("size",))
resize = jax.jit(row_ops.resize, static_argnames=("size",))
assign = jax.jit(row_ops.assign)
vacate = jax.jit(row_ops.vacate)


@jax.jit
def open_slot(slots: Slots, slot: row_ops.Index, entry: Slots) -> Slots:
    """The slots with one of them overwritten, every field, by `entry`: nothing of its last owner is left."""
    return jax.tree.map(lambda all_, one: all_.at[slot].set(one), slots, entry)


def slot_entry(progress: Progress, slot_pages: int, draft_limit: int, speculating: bool) -> Slots:
    """One request's entry in the slot table, as it is admitted."""
    sampling, request = progress.request.sampling, progress.request
    table = np.full(slot_pages, -1, np.int32)
    table[: len(progress.pages)] = progress.pages
    stops = np.full(MAX_STOP_TOKENS, -1, np.int32)
    stops[: len(request.stop_tokens)] = request.stop_tokens
    sampler: dict[str, Any] = dict(
        temperature=np.float32(device_temperature(sampling.temperature)),
        top_k=np.int32(sampling.top_k),
        top_p=np.float32(sampling.top_p),
        min_p=np.float32(sampling.min_p),
        seed=np.uint32(sampling.seed),
    )
    fields: dict[str, Any] = dict(
        position=np.int32(progress.computed),
        anchor=np.int32(0),
        draft_len=np.int32(progress.computed if speculating else 0),
        block_table=table,
        tokens_left=np.int32(request.limit - len(progress.emitted)),
        stop_tokens=stops,
        sampler=Sampler(**sampler),
        decoding=np.bool_(False),
        speculating=np.bool_(speculating),
        draft_limit=np.int32(draft_limit),
        finished=np.bool_(False),
        violation=np.int32(0),
    )
    return Slots(**fields)


class PrefillBatch(NamedTuple):
    """Chunks laid out by row, as `prefill` takes them."""

    tokens: np.ndarray
    lengths: np.ndarray
    last: np.ndarray
    known_next: np.ndarray


def prefill_batch(mapping: np.ndarray, chunks: tuple[Chunk, ...], width: int) -> PrefillBatch:
    """Each chunk in the row its slot sits in; the other rows do nothing."""
    rows = len(mapping)
    batch = PrefillBatch(
        np.zeros((rows, width), np.int32), np.zeros(rows, np.int32), np.zeros(rows, bool), np.full(rows, -1, np.int32)
    )
    row_of = {int(slot): row for row, slot in enumerate(mapping)}
    for chunk in chunks:
        row = row_of[chunk.slot]
        batch.tokens[row, : len(chunk.tokens)] = chunk.tokens
        batch.lengths[row], batch.last[row] = len(chunk.tokens), chunk.last
        batch.known_next[row] = -1 if chunk.known_next is None else chunk.known_next
    return batch


def arrange(rows: Rows, decodes: list[int], prefills: list[int], max_slots: int) -> Rows:
    """Decoding slots first, then the slots that prefill now, then the rest; unchanged if they lie so already."""
    mapping = [int(slot) for slot in np.asarray(rows.idx_mapping)]
    rank = [3 if slot < 0 else 0 if slot in decodes else 1 if slot in prefills else 2 for slot in mapping]
    if rank == sorted(rank):
        return rows
    for first in (decodes + prefills, decodes):
        rows = split(rows, np.isin(np.arange(max_slots), first))
    return rows
