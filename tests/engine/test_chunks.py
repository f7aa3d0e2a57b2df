"""Which pieces of prompts run in one step, and how wide they are padded."""

from __future__ import annotations

import pytest

from dflash_jax.engine.pages import empty_pool
from dflash_jax.engine.request import Progress, Request, SamplingParams
from dflash_jax.engine.scheduler import HostState, chunks

BUDGET = 128


@pytest.mark.parametrize(
    ("prompts", "pieces", "width"),
    [
        ([20], [20], 32),
        ([40], [40], 64),
        ([64], [64], 64),
        ([65], [65], 128),
        ([300], [128], 128),
        ([20, 30, 10, 32, 5], [20, 30, 10, 32], 32),
        ([40, 64, 10], [40, 64], 64),
        ([40, 65], [40], 64),
        ([20, 40], [20], 32),
        ([300, 10], [128], 128),
    ],
)
def test_pieces_fit_the_budget_with_their_padding(prompts, pieces, width):
    sampling = SamplingParams()
    running = tuple(
        Progress(Request(str(slot), tuple(range(length)), sampling, (), 8), 0.0, slot=slot)
        for slot, length in enumerate(prompts)
    )
    chosen, padded = chunks(HostState((), running, empty_pool(4, 16), 8), budget=BUDGET)
    assert [len(chunk.tokens) for chunk in chosen] == pieces
    assert padded == width
    assert [chunk.last for chunk in chosen] == [len(chunk.tokens) == prompts[chunk.slot] for chunk in chosen]
