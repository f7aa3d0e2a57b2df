"""Each invariant, broken on purpose in one request: it fails by name, and nobody else notices."""

from __future__ import annotations

import dataclasses

import pytest

from dflash_jax import Engine, InvariantError
from dflash_jax.engine.containers import Log
from dflash_jax.engine.pages import release, share
from tests.pairs import SAMPLING, engine, prompts, record, step_in_order

PAIR = "recall-dflash2"


def set_slot(served: Engine, slot: int, **fields) -> None:
    slots = served.state.slots
    changed = {name: getattr(slots, name).at[slot].set(value) for name, value in fields.items()}
    served.state = served.state.replace(slots=slots.replace(**changed))


def lose_context(served: Engine, slot: int) -> None:
    set_slot(served, slot, draft_len=3)


def lose_a_page(served: Engine, slot: int) -> None:
    set_slot(served, slot, block_table=served.state.slots.block_table[slot].at[0].set(-1))


def point_outside_the_pool(served: Engine, slot: int) -> None:
    set_slot(served, slot, block_table=served.state.slots.block_table[slot].at[0].set(10_000))


def stand_still(served: Engine, slot: int) -> None:
    set_slot(served, slot, tokens_left=0)


BREAKS = {
    "context_continuity": lose_context,
    "block_table_covers": lose_a_page,
    "position_monotone": stand_still,
}


def decode_two(strict: bool) -> Engine:
    served = engine(PAIR, strict=strict)
    for index in (1, 2):
        served.add_request(prompts(PAIR)[index], SAMPLING, request_id=str(index))
    while sum(p.decoding for p in served.host.running) < 2:
        served.step()
    served.step()
    return served


def slot_of(served: Engine, request_id: str) -> int:
    return served.slot_of(request_id)


def finish(served: Engine) -> dict:
    done = {}
    while served.has_work:
        for update in served.step():
            done.update({update.id: update.completion} if update.completion else {})
    return done


@pytest.mark.parametrize("name", BREAKS)
def test_the_violating_request_fails_by_name_and_its_neighbour_is_bit_identical(name):
    untouched = finish(decode_two(strict=False))
    served = decode_two(strict=False)
    BREAKS[name](served, slot_of(served, "1"))
    done = finish(served)
    assert done["1"].finish_reason == "error"
    assert done["1"].error.startswith(f"{name} is violated")
    assert "'1'" in done["1"].error
    assert record(done["2"]) == record(untouched["2"])
    assert served.host.pool.available == served.config.pool_pages, "the failed request kept pages"


@pytest.mark.parametrize("name", BREAKS)
def test_strict_engines_raise_the_name(name):
    served = decode_two(strict=True)
    BREAKS[name](served, slot_of(served, "1"))
    with pytest.raises(InvariantError, match=f"{name} is violated.*request '1'"):
        served.step()


def test_a_page_outside_the_pool_is_not_covered():
    served = decode_two(strict=True)
    point_outside_the_pool(served, slot_of(served, "1"))
    with pytest.raises(InvariantError, match="block_table_covers"):
        served.step()


def test_a_slot_in_two_rows_is_not_exclusive():
    served = decode_two(strict=False)
    step_in_order(served, lambda count: [0] * count)
    updates = {update.id: update for update in served.step()}
    assert updates["1"].completion.error.startswith("slot_exclusive is violated")


def test_a_position_the_host_does_not_expect_is_noticed():
    served = decode_two(strict=True)
    slot = slot_of(served, "1")
    position = int(served.state.slots.position[slot])
    set_slot(served, slot, position=position - 1, draft_len=position - 1)
    with pytest.raises(InvariantError, match="position_monotone"):
        served.step()


def test_a_page_lost_from_the_account_is_noticed_in_the_next_step():
    served = decode_two(strict=False)
    pool = served.host.pool
    served.host = dataclasses.replace(
        served.host, pool=dataclasses.replace(pool, free=pool.free.delete(len(pool.free) - 1))
    )
    with pytest.raises(InvariantError, match="pages_conserved"):
        served.step()


def test_a_page_of_two_writers_is_noticed_before_it_is_written():
    served = decode_two(strict=False)
    one, other = served.host.running
    stolen = dataclasses.replace(other, pages=Log((*other.pages[:-1], one.pages[-1])))
    pool = release(share(served.host.pool, one.pages[-1:]), other.pages[-1:])
    served.host = dataclasses.replace(served.host, pool=pool, running=served.host.running.replace(other.id, stolen))
    with pytest.raises(InvariantError, match=f"pages_exclusive: request '1' is about to write page {one.pages[-1]}"):
        served.step()
