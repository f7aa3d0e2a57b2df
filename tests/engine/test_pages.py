"""The account of pages: conserved whatever happens, and a prefix outlives what follows it."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_jax import InvariantError
from dflash_jax.engine import pages as ops

SIZE = 4


def run_prompt(pool: ops.PagePool, tokens: list[int]) -> tuple[ops.PagePool, tuple[int, ...]]:
    """As the scheduler does for a prompt that is then known."""
    hashes = ops.page_hashes(tokens, SIZE)
    known = ops.lookup(pool, hashes)
    pool, fresh = ops.allocate(ops.share(pool, known), -(-len(tokens) // SIZE) - len(known))
    held = known + fresh
    return ops.publish(pool, held[: len(hashes)], hashes), held


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 20), st.integers(0, 2)), max_size=40))
def test_pages_are_conserved_whatever_is_admitted_and_released(events):
    pool, held = ops.empty_pool(16, SIZE), []
    for arrive, length, family in events:
        tokens = [family] * length
        if arrive and pool.available >= -(-length // SIZE):
            pool, pages = run_prompt(pool, tokens)
            held.append(pages)
        elif not arrive and held:
            pool = ops.release(pool, held.pop(length % len(held)))
        ops.check_pages_conserved(pool, held)
        assert pool.available == pool.num_pages - len({page for pages in held for page in pages})


def test_a_page_lost_from_the_account_is_noticed():
    pool, pages = ops.allocate(ops.empty_pool(4, SIZE), 2)
    with pytest.raises(InvariantError, match="pages_conserved: "):
        ops.check_pages_conserved(dataclasses.replace(pool, free=pool.free.delete(1)), [pages])


def test_a_page_freed_while_it_is_held_is_noticed():
    pool, pages = ops.allocate(ops.empty_pool(4, SIZE), 2)
    with pytest.raises(InvariantError, match="pages_conserved: "):
        ops.check_pages_conserved(ops.release(pool, pages), [pages])


def test_equal_beginnings_share_pages_and_different_ones_do_not():
    pool, first = run_prompt(ops.empty_pool(16, SIZE), [1, 2, 3, 4, 5, 6, 7, 8, 9])
    pool, second = run_prompt(pool, [1, 2, 3, 4, 5, 6, 7, 0, 9])
    assert first[0] == second[0]
    assert not set(first[1:]) & set(second[1:])


def test_the_same_page_after_another_beginning_is_another_page():
    assert ops.page_hashes([1, 1, 1, 1, 7, 7, 7, 7], SIZE)[1] != ops.page_hashes([2, 2, 2, 2, 7, 7, 7, 7], SIZE)[1]


def test_room_is_made_from_the_end_of_the_least_recently_used_prefix():
    pool, old = run_prompt(ops.empty_pool(4, SIZE), list(range(8)))
    pool = ops.release(pool, old)
    pool, new = run_prompt(pool, list(range(100, 108)))
    pool = ops.release(pool, new)
    pool, taken = ops.allocate(pool, 1)
    assert taken == (old[1],)
    assert pool.evictions == 1
    assert ops.lookup(pool, ops.page_hashes(list(range(8)), SIZE)) == (old[0],)
    assert ops.lookup(pool, ops.page_hashes(list(range(100, 108)), SIZE)) == new


def test_what_a_page_held_cannot_be_found_once_it_is_evicted():
    pool, old = run_prompt(ops.empty_pool(2, SIZE), list(range(8)))
    pool = ops.release(pool, old)
    pool, _ = ops.allocate(pool, 2)
    assert ops.lookup(pool, ops.page_hashes(list(range(8)), SIZE)) == ()
