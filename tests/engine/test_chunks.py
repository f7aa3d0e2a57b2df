"""Which pieces of prompts run in one step, and how wide they are padded."""

from __future__ import annotations

import pytest

from dflash_jax.engine.containers import Queue
from dflash_jax.engine.host import HostState, Policy
from dflash_jax.engine.identity import ModelIdentity, ModelsIdentity
from dflash_jax.engine.pages import empty_pool
from dflash_jax.engine.plan import take_chunks
from dflash_jax.engine.request import Request, SamplingParams
from dflash_jax.engine.sequence import Sequence


def prefilling(lengths: list[int], budget: int) -> HostState:
    """A host whose running requests have prompts of the given lengths, none of them run."""
    requests = [
        Request(str(slot), tuple(range(length)), SamplingParams(), (), 8) for slot, length in enumerate(lengths)
    ]
    running = Queue((request.id, Sequence(request, 0.0, slot=int(request.id))) for request in requests)
    nobody = ModelsIdentity(ModelIdentity("a target", ""))
    return HostState(Policy(max_slots=8, prefill_chunk=budget), nobody, empty_pool(4, 16), running=running)


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
    _, chosen, padded = take_chunks(prefilling(prompts, 128))
    assert [len(chunk.tokens) for chunk in chosen] == pieces
    assert padded == width
    assert [chunk.last for chunk in chosen] == [len(chunk.tokens) == prompts[chunk.slot] for chunk in chosen]


@pytest.mark.parametrize("budget", [1, 5, 127, 128, 130])
def test_there_are_three_widths_at_most(budget):
    """Each is a program to compile."""
    widths = set()
    for length in range(1, budget + 1):
        _, [chunk], width = take_chunks(prefilling([length], budget))
        assert len(chunk.tokens) <= width <= budget
        widths.add(width)
    assert len(widths) <= 3
