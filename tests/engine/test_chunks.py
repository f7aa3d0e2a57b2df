"""Which pieces of prompts run in one step, and how wide they are padded."""

from __future__ import annotations

import pytest

from dflash_jax.engine.pages import empty_pool
from dflash_jax.engine.request import Progress, Request, SamplingParams
from dflash_jax.engine.scheduler import HostState, chunks


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
    chosen, padded = chunks(HostState((), running, empty_pool(4, 16), 8), budget=128)
    assert [len(chunk.tokens) for chunk in chosen] == pieces
    assert padded == width
    assert [chunk.last for chunk in chosen] == [len(chunk.tokens) == prompts[chunk.slot] for chunk in chosen]


@pytest.mark.parametrize("budget", [1, 5, 127, 128, 130])
def test_there_are_three_widths_at_most(budget):
    """Each is a program to compile."""
    widths = set()
    for length in range(1, budget + 1):
        request = Request("one", tuple(range(length)), SamplingParams(), (), 8)
        host = HostState((), (Progress(request, 0.0, slot=0),), empty_pool(4, 16), 8)
        [chunk], width = chunks(host, budget=budget)
        assert len(chunk.tokens) <= width <= budget
        widths.add(width)
    assert len(widths) <= 3
