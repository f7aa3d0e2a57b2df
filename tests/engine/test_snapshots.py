"""An engine saved in the middle of generation goes on as if nothing had happened."""

from __future__ import annotations

import json
import shutil

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest

from dflash_jax import CheckpointError, Engine
from dflash_jax.checkpoints.digests import digest
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


def test_a_damaged_snapshot_is_refused_and_the_engine_is_left_as_it_was(tmp_path):
    served, whole = midway(), tmp_path / "whole"
    served.snapshot(whole)
    host, state = served.host, served.state
    for number, file in enumerate(sorted(file for file in whole.rglob("*") if file.is_file())):
        content = file.read_bytes()
        middle = len(content) // 2
        flipped = content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :] if content else b"x"
        for damaged in (content[:middle] or None, flipped, None):
            place = tmp_path / f"damaged-{number}"
            shutil.copytree(whole, place)
            name = place / file.relative_to(whole)
            name.unlink() if damaged is None else name.write_bytes(damaged)
            with pytest.raises(CheckpointError) as refused:
                Engine.restore(place, served)
            assert "\n" not in str(refused.value) and len(str(refused.value)) < 600
            assert served.host is host and served.state is state
            shutil.rmtree(place)


def test_a_state_that_cannot_be_read_is_refused(tmp_path, monkeypatch):
    # What orbax raises for arrays that TensorStore cannot read.
    served = midway()
    served.snapshot(tmp_path / "snapshot")

    def restore(*_):
        raise Exception("Encountered error while reading array index:\nof many lines")

    monkeypatch.setattr(ocp.StandardCheckpointer, "restore", restore)
    with pytest.raises(CheckpointError, match=r"is damaged: Encountered error while reading array index:$"):
        Engine.restore(tmp_path / "snapshot", served)


@pytest.mark.parametrize(
    "content",
    ['{"version": 3, "models": [], "pool": {}}', "[" * 100_000, '{"version": 2}', "null", '"\\ud800"'],
)
def test_a_host_part_of_any_other_kind_is_refused(tmp_path, content):
    served = midway()
    served.snapshot(tmp_path / "snapshot")
    host, files = tmp_path / "snapshot" / "host.json", tmp_path / "snapshot" / "files.json"
    host.write_text(content)
    files.write_text(json.dumps({**json.loads(files.read_text()), "host.json": digest(host)}))
    with pytest.raises(CheckpointError, match="is not a snapshot of an engine"):
        Engine.restore(tmp_path / "snapshot", served)


def test_the_older_snapshot_stays_until_the_new_one_is_there(tmp_path, monkeypatch):
    # An interruption between the two renames left only the older one, under its other name.
    served = midway()
    served.snapshot(tmp_path / "snapshot")
    (tmp_path / "snapshot").rename(tmp_path / "snapshot.old")
    removed = []
    monkeypatch.setattr(
        shutil, "rmtree", lambda path, **_: removed.append((path.name, (tmp_path / "snapshot").exists()))
    )
    served.snapshot(tmp_path / "snapshot")
    assert ("snapshot.old", False) not in removed and ("snapshot.old", True) in removed


def test_a_restored_engine_drafts_as_far_as_its_own_max_context(tmp_path):
    """Both ways: slots of the snapshot have another limit, and so do requests that wait."""
    limit, lengths = 40, [len(prompt) for prompt in prompts(PAIR)]
    assert min(lengths) < limit < max(lengths)
    for wrote, reads in ((None, limit), (limit, None)):
        served = engine(PAIR, slots=1, max_context=wrote)
        for index, prompt in enumerate(prompts(PAIR)):
            served.add_request(prompt, SAMPLING, request_id=str(index))
        served.step(), served.step()
        served.snapshot(tmp_path / f"to-{reads}")
        restored = Engine.restore(tmp_path / f"to-{reads}", engine(PAIR, slots=1, max_context=reads))
        running = {sequence.id for sequence in restored.host.running}
        for request_id, completion in finish(restored).items():
            assert list(completion.token_ids) == cases(PAIR)[int(request_id)]["greedy_tokens"]
            if reads is not None:
                assert f"past draft.max_context {limit}" in completion.fallback
            elif request_id not in running or lengths[int(request_id)] <= limit:
                assert completion.fallback is None
                assert_is_golden(completion, cases(PAIR)[int(request_id)])
