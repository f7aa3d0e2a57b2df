"""An engine saved in the middle of generation goes on as if nothing had happened."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from dflash_jax import CheckpointError, Engine
from tests.pairs import GOLDEN, SAMPLING, SIZES, assert_is_golden, cases, engine, prompts, record

PAIR = "recall-dflash2"


def midway() -> Engine:
    """Three requests run, two wait, the first has condensed the batch once."""
    served = engine(PAIR, slots=3)
    for index, prompt in enumerate(prompts(PAIR)):
        served.add_request(prompt, SAMPLING, request_id=str(index))
    for _ in range(5):
        served.step()
    return served


def finish(served: Engine) -> dict:
    done = {}
    while served.has_work:
        for update in served.step():
            done.update({update.id: update.completion} if update.completion else {})
    return done


def test_a_restored_engine_goes_on_to_the_same_tokens_and_blocks(tmp_path):
    served = midway()
    served.snapshot(tmp_path / "snapshot")
    before = {sequence.id for sequence in served.host.in_flight}
    restored = finish(Engine.restore(tmp_path / "snapshot", engine(PAIR)))
    assert set(restored) == before
    for request_id, completion in restored.items():
        assert_is_golden(completion, cases(PAIR)[int(request_id)])
    # And the one that was saved was not disturbed.
    assert {i: record(c) for i, c in finish(served).items()} == {i: record(c) for i, c in restored.items()}


def test_a_snapshot_of_a_configured_engine_finds_its_models_again(tmp_path):
    config = {"target": {"path": str(GOLDEN / "recall-target")}, "draft": {"path": str(GOLDEN / PAIR)}, "engine": SIZES}
    served = Engine.from_config(config)
    served.add_request(prompts(PAIR)[1], SAMPLING, request_id="1")
    served.step(), served.step()
    served.snapshot(tmp_path / "snapshot")
    assert_is_golden(finish(Engine.restore(tmp_path / "snapshot"))["1"], cases(PAIR)[1])


def test_a_newer_snapshot_replaces_the_older(tmp_path):
    served = midway()
    served.snapshot(tmp_path / "snapshot")
    first = finish(served.fork())
    served.step()
    served.snapshot(tmp_path / "snapshot")
    restored = Engine.restore(tmp_path / "snapshot", engine(PAIR))
    assert [p.output for p in restored.host.running] == [p.output for p in served.host.running]
    assert {i: record(c) for i, c in finish(restored).items()}.items() <= {
        i: record(c) for i, c in first.items()
    }.items()


def test_the_prefix_cache_survives_a_snapshot(tmp_path):
    served = engine(PAIR)
    served.generate([prompts(PAIR)[4]], SAMPLING)
    served.snapshot(tmp_path / "snapshot")
    restored = Engine.restore(tmp_path / "snapshot", engine(PAIR))
    completion = restored.generate([prompts(PAIR)[4]], SAMPLING)[0]
    assert completion.metrics.cached_tokens > 0
    assert_is_golden(completion, cases(PAIR)[4])


def test_an_engine_of_other_sizes_is_refused(tmp_path):
    midway().snapshot(tmp_path / "snapshot")
    with pytest.raises(CheckpointError, match="snapshot of another engine: its state"):
        Engine.restore(tmp_path / "snapshot", engine(PAIR, num_pages=7))


@pytest.mark.parametrize("name", ["nothing here", "torn"])
def test_what_is_no_snapshot_is_refused(tmp_path, name):
    (tmp_path / "torn").mkdir()
    with pytest.raises(CheckpointError, match="is not a snapshot of an engine"):
        Engine.restore(tmp_path / name, engine(PAIR))


def test_forks_go_their_own_ways():
    served = midway()
    twin = served.fork()
    aborted = served.host.running.first.id
    served.abort(aborted)
    served.add_request([60, 5, 9], SAMPLING, request_id="new")
    own, twins = finish(served), finish(twin)
    assert aborted not in own and aborted in twins and "new" not in twins
    for request_id, completion in twins.items():
        assert_is_golden(completion, cases(PAIR)[int(request_id)])
        if request_id in own:
            assert record(own[request_id]) == record(completion)


def test_old_states_stay_readable_without_donation():
    served = engine(PAIR, donate=False)
    served.add_request(prompts(PAIR)[1], SAMPLING)
    states = []
    while served.has_work:
        served.step()
        states.append(served.state)
    positions = [int(state.slots.position[0]) for state in states]
    assert positions == sorted(positions) and len(set(positions)) > 3
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(states[0].target_pages))
