"""The body of the Pallas kernel: what one CTA computes. `mosaic_gpu.py` launches it."""

from __future__ import annotations

import dataclasses

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from dflash_jax.kernels import mosaic

ROWS = 64
"""Rows of hidden states that one warpgroup's matrix instruction takes."""

DEPTH = 64
"""Elements of hidden states and head that are multiplied per step."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """Static shape of one launch.

    Attributes:
      depth: the hidden size.
      kept: columns of a row's list of best tokens: top_k, rounded up.
      subtiles, groups: a CTA has subtiles * ROWS rows, and there are as many such groups of rows.
      tokens, tiles: tokens of a tile, and tiles of the vocabulary.
      share, shares: tiles of a CTA, and CTAs that cover the vocabulary.
      stages: steps in flight.
      terms: bfloat16 numbers that one input number is the sum of: 1, or 3 for float32.
    """

    vocab: int
    depth: int
    tied: bool
    top_k: int
    kept: int
    multiplier: float
    softcap: float | None
    subtiles: int
    groups: int
    tokens: int
    tiles: int
    share: int
    shares: int
    stages: int
    terms: int

    @property
    def steps(self) -> int:
        """Steps of a tile."""
        return self.depth // DEPTH


def kernel(x, head, values_out, ids_out, *, plan: Plan, x_smem, head_smem, loaded, term=None) -> None:
    """One group of rows and one share of the vocabulary.

    Args:
      x: [terms * rows, depth]: hidden states.
      head: [vocab, depth] if tied, else [depth, vocab].
      values_out, ids_out: [shares, rows, kept]: the share's best logits and their tokens, best first.
      plan: the launch.
      x_smem, ...: shared memory and barriers, see `mosaic_gpu._launch`; term holds one bfloat16 term of a
        float32 head.
    """
    share, group = lax.axis_index("share"), lax.axis_index("group")
    rows = plan.subtiles * ROWS
    first_tile = share * plan.share
    tiles = jnp.minimum(plan.tiles - first_tile, plan.share)

    def start_of(tile):
        # The last tile reaches back over the one before, for no copy may reach past the end.
        return jnp.minimum((first_tile + tile) * plan.tokens, plan.vocab - plan.tokens)

    def load(step):
        """Starts copying a step of a tile to its stage; nothing if there are not that many."""
        stage = lax.rem(step, plan.stages)

        @pl.when(step < tiles * plan.steps)
        def _():
            depth = pl.ds(lax.rem(step, plan.steps) * DEPTH, DEPTH)
            tokens = pl.ds(start_of(lax.div(step, plan.steps)), plan.tokens)
            for index in range(plan.terms):
                source = x.at[pl.ds((index * plan.groups + group) * rows, rows), depth]
                plgpu.copy_gmem_to_smem(source, x_smem.at[stage, index], loaded.at[stage])
            source = head.at[tokens, depth] if plan.tied else head.at[depth, tokens]
            plgpu.copy_gmem_to_smem(source, head_smem.at[stage], loaded.at[stage])

    def product(tile) -> tuple[Array, ...]:
        """The tile's logits, per subtile."""

        def step(index, multiply):
            number = tile * plan.steps + index
            stage = lax.rem(number, plan.stages)
            plgpu.barrier_wait(loaded.at[stage])
            for part in range(plan.terms):
                operand = head_smem.at[stage]
                if plan.terms > 1:
                    plgpu.wgmma_wait(0)
                    term[...] = mosaic.terms(mosaic.with_layout(operand[...], plgpu.Layout.WGMMA), part + 1)[part]
                    plgpu.commit_smem()
                    operand = term
                # Products of two small terms are below float32's last digit.
                for other in range(plan.terms - part):
                    for subtile in range(plan.subtiles):
                        mine = x_smem.at[stage, other, pl.ds(subtile * ROWS, ROWS)]
                        multiply(subtile, mine, operand, transposed=plan.tied)
            # All but this step's products are done: the stage of the step before is free.
            plgpu.wgmma_wait(plan.subtiles)
            pl.when(number > 0)(lambda: load(number - 1 + plan.stages))

        return mosaic.products(plan.steps, step, [(ROWS, plan.tokens)] * plan.subtiles)

    def visit(tile, lists):
        begin = start_of(tile)
        token = begin + _columns(plan.tokens)
        fresh = token >= (first_tile + tile) * plan.tokens
        merged = []
        for logits, best in zip(product(tile), lists, strict=True):
            logits = jnp.where(fresh, _scaled(logits, plan), -jnp.inf)
            merged.append(merge(logits, token, *best))
        return tuple(merged)

    for step in range(plan.stages):
        load(jnp.int32(step))
    # Columns that are not to be used can never be the least.
    column = _columns(plan.kept)
    nothing = jnp.where(column < plan.top_k, -jnp.inf, jnp.inf), column + plan.vocab
    lists = lax.fori_loop(0, tiles, visit, (nothing,) * plan.subtiles)
    for subtile, (values, ids) in enumerate(lists):
        values, ids = _in_order(jnp.where(column < plan.top_k, values, -jnp.inf), ids, plan)
        out = pl.ds(group * rows + subtile * ROWS, ROWS)
        values_out[share, out] = values
        ids_out[share, out] = ids


def merge(
    logits: Float[Array, "rows tokens"],
    token: Int[Array, "rows tokens"],
    values: Float[Array, "rows kept"],
    ids: Int[Array, "rows kept"],
) -> tuple[Float[Array, "rows kept"], Int[Array, "rows kept"]]:
    """Takes into each row's list what is better than the least of it, the best of a row at a time.

    Tiles come in the order of their tokens, and of equal logits of a tile the lowest token comes first.
    So whatever equals the least of the list has lost against it, and of several least the highest token goes.
    """

    def bounds(logits, values):
        top, least = logits.max(axis=1), values.min(axis=1)
        return top, least, jnp.where(top > least, 1, 0).max(axis=0)

    def take(carry):
        logits, values, ids, top, least, _ = carry
        chosen = jnp.where(logits == _across(top, logits), token, _NO_TOKEN).min(axis=1)
        lowest = values == _across(least, values)
        highest_id = jnp.where(lowest, ids, -1).max(axis=1)
        replaced = lowest & (ids == _across(highest_id, ids)) & (_across(top, values) > values)
        values = jnp.where(replaced, _across(top, values), values)
        ids = jnp.where(replaced, _across(chosen, ids), ids)
        logits = jnp.where(token == _across(chosen, logits), -jnp.inf, logits)
        return logits, values, ids, *bounds(logits, values)

    carry = (logits, values, ids, *bounds(logits, values))
    _, values, ids, *_ = lax.while_loop(lambda carry: carry[-1] > 0, take, carry)
    return values, ids


_NO_TOKEN = 2**31 - 1


def _in_order(values: Float[Array, "rows kept"], ids: Int[Array, "rows kept"], plan: Plan):
    """The list sorted: largest first, and of equal ones the lowest token."""
    column = _columns(plan.kept)

    def pick(place, carry):
        values, sorted_values, sorted_ids = carry
        top = _across(values.max(axis=1), values)
        first = _across(jnp.where(values == top, ids, _NO_TOKEN).min(axis=1), ids)
        sorted_values = jnp.where(column == place, top, sorted_values)
        sorted_ids = jnp.where(column == place, first, sorted_ids)
        return jnp.where(ids == first, -jnp.inf, values), sorted_values, sorted_ids

    return lax.fori_loop(0, plan.top_k, pick, (values, values, ids))[1:]


def _scaled(logits: Float[Array, "rows tokens"], plan: Plan) -> Float[Array, "rows tokens"]:
    if plan.multiplier != 1:
        logits = logits * plan.multiplier
    return logits if plan.softcap is None else plan.softcap * jnp.tanh(logits / plan.softcap)


def _columns(count: int) -> Int[Array, "rows columns"]:
    return mosaic.with_layout(lax.broadcasted_iota(jnp.int32, (ROWS, count), 1), plgpu.Layout.WGMMA)


def _across(x: Array, like: Array) -> Array:
    return lax.broadcast_in_dim(x, like.shape, (0,))
