"""The host's time per step and per request does not grow with the queue, a context or an output."""

from __future__ import annotations

import pytest

from benchmarks.host_time import add_seconds, step_seconds
from dflash_jax.engine.pages import lookup, page_hash
from tests.pairs import engine, prompts


def ratio(measure, *, attempts: int = 5) -> float:
    """The least of several, since other processes only ever make a time longer."""
    return min(measure() for _ in range(attempts))


def test_queueing_a_request_costs_the_same_however_many_wait():
    few, many = (ratio(lambda n=n: add_seconds(n), attempts=3) for n in (500, 8_000))
    assert many < 5 * few, f"{1e6 * few:.0f} us with 500 queued, {1e6 * many:.0f} us with 8,000"


@pytest.mark.parametrize("grown", [{"queued": 4_000}, {"context": 16_384}, {"outputs": 4_096}])
def test_a_step_costs_the_same_however_much_is_queued_cached_or_produced(grown):
    sizes = {"queued": 0, "running": 8, "context": 512, "outputs": 0, "steps": 30}
    small, large = (ratio(lambda of=of: step_seconds(**of), attempts=2) for of in (sizes, {**sizes, **grown}))
    assert large < 3 * small, f"{1e3 * small:.2f} ms against {1e3 * large:.2f} ms"


def test_a_context_is_hashed_once(monkeypatch):
    """At admission, at every full page it grows by, and again after a preemption: each page only once."""
    hashed = []

    def counted(parent, tokens):
        hashed.append(tokens)
        return page_hash(parent, tokens)

    monkeypatch.setattr("dflash_jax.engine.sequence.page_hash", counted)
    served = engine("recall-dflash2", pages=9)
    served.generate(prompts("recall-dflash2")[:4], {"max_tokens": 40, "ignore_eos": True})
    assert served.host.counters.preemptions > 0
    pages = sum((len(prompt) + 39) // 16 for prompt in prompts("recall-dflash2")[:4])
    assert 0 < len(hashed) <= pages


def test_a_request_without_pages_is_looked_up_again_only_when_pages_were_freed_or_cached(monkeypatch):
    """The first look-up takes as long as its prompt has pages, and a step must not."""
    looked = []

    def counted(pool, hashes):
        looked.append(len(hashes))
        return lookup(pool, hashes)

    monkeypatch.setattr("dflash_jax.engine.admit.lookup", counted)
    served, (first, second) = engine("recall-dflash2", pages=11), prompts("recall-dflash2")[:2]
    for name, prompt in (("runs", first), ("runs too", second)):
        served.add_request(prompt, {"max_tokens": 60, "ignore_eos": True}, request_id=name)
    served.step(), served.step()
    served.add_request(prompts("recall-dflash2")[4], {"max_tokens": 8, "ignore_eos": True}, request_id="waits")
    looked.clear()
    for _ in range(6):
        served.step()
    assert served.host.waiting.get("waits") is not None and len(served.host.running) == 2
    assert len(looked) == 1
    served.abort("runs too")
    served.step()
    assert len(looked) == 2 and served.slot_of("waits") is not None


def test_a_request_without_pages_is_admitted_as_soon_as_another_has_cached_enough_of_its_prompt():
    prompt = prompts("recall-dflash2")[4]
    served = engine("recall-dflash2", pages=11, prefill_chunk=16)
    served.add_request(prompt, {"max_tokens": 4, "ignore_eos": True}, request_id="first")
    served.step()
    # Equal pages, but another end: for the very same prompt it would wait in any case.
    almost = [*prompt[:-1], (prompt[-1] + 1) % 56]
    served.add_request(almost, {"max_tokens": 4, "ignore_eos": True}, request_id="same")
    served.step()
    assert served.slot_of("same") is None and served.host.refusal is not None
    while served.slot_of("same") is None:
        assert not served.host.running.first.decoding, "it waits for pages that it could share"
        served.step()
    assert served.host.running.last.cached_tokens >= 32
