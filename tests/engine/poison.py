"""NaN in every page that nobody holds: whoever reads one afterwards computes NaN."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from dflash_jax import Engine


@jax.jit
def _fill(pages, free):
    return jax.tree.map(lambda leaf: jnp.where(free[None, :, None, None, None], jnp.nan, leaf), pages)


def poison(engine: Engine) -> None:
    """Poisons the free pages of an engine; those the prefix cache still knows are left alone."""
    free = np.isin(np.arange(engine.config.pool_pages), engine.host.pool.free_pages)
    state = engine.state
    engine.state = state.replace(
        target_pages=_fill(state.target_pages, free),
        draft_pages=None if state.draft_pages is None else _fill(state.draft_pages, free),
    )


def poison_slots(engine: Engine) -> None:
    """Poisons the recurrent states of slots that nobody has: who opens one must not see them."""
    if engine.state.recurrent is None:
        return
    taken = {sequence.slot for sequence in engine.host.running if sequence.opened}
    free = np.array([slot not in taken for slot in range(engine.state.slots.position.shape[0])])

    def spoil(leaf):
        return jnp.where(free.reshape(1, -1, *[1] * (leaf.ndim - 2)), jnp.nan, leaf)

    engine.state = engine.state.replace(recurrent=jax.tree.map(spoil, engine.state.recurrent))
