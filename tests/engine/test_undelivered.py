"""What nobody has taken yet is state: no update or completion is lost, whatever happens in between."""

from __future__ import annotations

import pytest

from dflash_jax import Engine
from tests.engine.test_snapshots import finish
from tests.pairs import SAMPLING, assert_is_golden, cases, engine, prompts, step_in_order

PAIR = "recall-dflash2"


def with_a_completion_undelivered() -> Engine:
    """Request 0 is done and its completion not taken; request 1 runs."""
    served = engine(PAIR)
    served.add_request(prompts(PAIR)[0], {**SAMPLING, "max_tokens": 3}, request_id="0")
    served.add_request(prompts(PAIR)[1], SAMPLING, request_id="1")
    while "0" in served.host.running or "0" in served.host.waiting:
        step_in_order(served, range)
    return served


@pytest.mark.parametrize("way", ["the engine itself", "fork", "snapshot"])
def test_a_finished_request_is_delivered_by_whoever_goes_on(way, tmp_path):
    served = with_a_completion_undelivered()
    if way == "fork":
        served = served.fork()
    elif way == "snapshot":
        served.snapshot(tmp_path / "snapshot")
        served = Engine.restore(tmp_path / "snapshot", engine(PAIR))
    done = finish(served)
    assert list(done["0"].token_ids) == cases(PAIR)[0]["greedy_tokens"][:3]
    assert done["0"].finish_reason == "length"
    assert_is_golden(done["1"], cases(PAIR)[1])


def test_a_fork_after_a_step_that_raised_delivers_what_had_finished(monkeypatch):
    served = with_a_completion_undelivered()

    def broken(*_, **__):
        raise MemoryError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr("dflash_jax.engine.run._decode_program", lambda donate: broken)
        with pytest.raises(MemoryError):
            served.step()
    for one in (served.fork(), served):
        assert set(finish(one)) == {"0", "1"}


def test_generate_leaves_the_updates_of_other_requests_to_be_delivered():
    served = engine(PAIR)
    served.add_request(prompts(PAIR)[1], SAMPLING, request_id="mine")
    [other] = served.generate([prompts(PAIR)[2]], SAMPLING)
    assert_is_golden(other, cases(PAIR)[2])
    assert served.has_work
    tokens, completions = (), []
    while served.has_work:
        for update in served.step():
            assert update.id == "mine"
            tokens += update.token_ids
            completions += [update.completion] if update.completion else []
    [completion] = completions
    assert tokens == completion.token_ids
    assert_is_golden(completion, cases(PAIR)[1])


def test_undelivered_updates_are_delivered_once():
    served = with_a_completion_undelivered()
    first = {update.id for update in served.step()}
    assert "0" in first
    assert all(update.id != "0" for _ in range(30) for update in served.step())
    assert not served.has_work
