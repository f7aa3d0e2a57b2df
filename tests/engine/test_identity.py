"""A state knows which target and draft wrote its contexts, and never meets others unnoticed."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from dflash_jax import CheckpointError, ConfigError, Engine
from dflash_jax.checkpoints import load_draft
from dflash_jax.engine import identity
from dflash_jax.engine.check import check_state
from dflash_jax.engine.identity import identify
from tests.engine.test_snapshots import finish
from tests.pairs import GOLDEN, SAMPLING, SIZES, assert_is_golden, cases, engine, models, prompts, record

PAIR, OTHER = "recall-dflash2", "recall-dflash1"


def midway(pair: str = PAIR, **sizes) -> Engine:
    served = engine(pair, **sizes)
    for index in range(3):
        served.add_request(prompts(PAIR)[index], SAMPLING, request_id=str(index))
    for _ in range(4):
        served.step()
    assert all(len(sequence.drafted_blocks) > 1 for sequence in served.host.running)
    return served


def blocks_from_here(served: Engine) -> dict:
    """What each request drafts after what it has drafted already."""
    so_far = {sequence.id: len(sequence.drafted_blocks) for sequence in served.host.in_flight}
    done = finish(served)
    return {request_id: done[request_id].drafted_blocks[count:] for request_id, count in so_far.items()}


def blocks_of_a_fresh_engine(pair: str | None, served: Engine, k: int | None = None) -> dict:
    """What an engine drafts that gets each request's tokens so far as its prompt, the last one as its first token."""
    fresh, blocks = engine(pair, prefix_cache=False, k=k), {}
    for sequence in served.host.in_flight:
        tokens = sequence.tokens(0, sequence.to_run)
        sampling = {**SAMPLING, "max_tokens": 48 - len(sequence.output) + 1}
        completion = fresh.generate([tokens], sampling)[0]
        assert completion.token_ids[0] == sequence.output[-1]
        blocks[sequence.id] = completion.drafted_blocks
    return blocks


def test_a_snapshot_of_another_drafter_of_the_same_shapes_is_refused_by_name(tmp_path):
    midway().snapshot(tmp_path / "snapshot")
    other = engine(OTHER)
    with pytest.raises(
        CheckpointError, match=r"written by a DFlash 2 draft of 2 layers .* and the draft here is a DFlash"
    ):
        Engine.restore(tmp_path / "snapshot", other)
    assert not other.has_work, "the engine was to stay as it was"
    with pytest.raises(CheckpointError, match="the draft here is none"):
        Engine.restore(tmp_path / "snapshot", engine(None))


def test_a_snapshot_of_the_same_config_with_other_weights_is_refused(tmp_path):
    midway().snapshot(tmp_path / "snapshot")
    draft = models(PAIR).draft
    changed = models(PAIR).replace(draft=draft.replace(norm=draft.norm.at[3].add(1e-3)))
    with pytest.raises(CheckpointError, match="cannot be continued by this engine"):
        Engine.restore(tmp_path / "snapshot", Engine(changed, engine(PAIR).config))


def test_the_models_under_a_state_cannot_be_exchanged():
    with pytest.raises(AttributeError):
        midway().fork().models = models(OTHER)


@pytest.mark.parametrize("other", [OTHER, None])
def test_a_fork_with_another_draft_drafts_what_a_fresh_engine_would(other):
    served = midway()
    twin = served.fork(draft=None if other is None else GOLDEN / other)
    wanted = blocks_of_a_fresh_engine(other, served)
    assert blocks_from_here(twin) == wanted
    for index, completion in finish(served).items():
        assert_is_golden(completion, cases(PAIR)[int(index)])


def test_a_fork_with_another_k_keeps_its_contexts():
    served = midway()
    twin = served.fork(k=3)
    assert twin.k == 3 and served.k == 7
    wanted = blocks_of_a_fresh_engine(PAIR, served, k=3)
    assert [sequence.position for sequence in twin.host.running] == [s.position for s in served.host.running]
    assert blocks_from_here(twin) == wanted
    with pytest.raises(ConfigError, match=r"draft\.k is 0; it must be 1 or more"):
        served.fork(k=0)


def test_a_plain_engine_forks_into_a_drafting_one():
    served = engine(None)
    served.add_request(prompts(PAIR)[1], SAMPLING, request_id="1")
    for _ in range(6):
        served.step()
    twin = served.fork(draft=load_draft(GOLDEN / PAIR), k=5)
    completion = finish(twin)["1"]
    assert list(completion.token_ids) == cases(PAIR)[1]["greedy_tokens"]
    assert completion.metrics.drafts_accepted > 10 and completion.fallback is None


def test_restore_with_a_draft_makes_the_contexts_anew(tmp_path):
    served = midway()
    served.snapshot(tmp_path / "snapshot")
    wanted = blocks_of_a_fresh_engine(OTHER, served)
    restored = Engine.restore(tmp_path / "snapshot", engine(PAIR), draft=GOLDEN / OTHER)
    assert blocks_from_here(restored) == wanted


def test_restore_with_a_draft_needs_no_engine_if_the_snapshot_was_configured(tmp_path):
    target, draft = ({"path": str(GOLDEN / name)} for name in ("recall-target", OTHER))
    config = {"target": target, "draft": draft, "engine": SIZES}
    served = Engine.from_config(config)
    served.add_request(prompts(PAIR)[1], SAMPLING, request_id="1")
    served.step(), served.step()
    served.snapshot(tmp_path / "snapshot")
    completion = finish(Engine.restore(tmp_path / "snapshot", draft=GOLDEN / PAIR))["1"]
    assert list(completion.token_ids) == cases(PAIR)[1]["greedy_tokens"]
    assert record(completion)[2][-1] == record(engine(PAIR).generate([prompts(PAIR)[1]], SAMPLING)[0])[2][-1]


def test_another_target_is_refused_even_with_a_draft(tmp_path):
    midway().snapshot(tmp_path / "snapshot")
    target = models(PAIR).target
    changed = models(PAIR).replace(target=target.replace(norm=target.norm * 1.5))
    with pytest.raises(CheckpointError, match="only the draft may be another"):
        Engine.restore(tmp_path / "snapshot", Engine(changed, engine(PAIR).config), draft=GOLDEN / OTHER)


def test_an_identity_is_of_content_not_of_layout():
    of = models(PAIR)
    assert identify(engine(PAIR).models) == identify(of)
    copied = jax.tree.map(lambda leaf: jnp.array(leaf), of)
    assert identify(copied) == identify(of)


@pytest.mark.parametrize("change", ["swap two rows", "one bit", "dtype", "config"])
def test_an_identity_notices_every_change(change):
    of = models(PAIR)
    fc = of.draft.fc.value
    values = {
        "swap two rows": fc.at[jnp.array([0, 1])].set(fc[jnp.array([1, 0])]),
        "one bit": fc.at[5, 7].set(jnp.nextafter(fc[5, 7], jnp.inf)),
        "dtype": fc.astype(jnp.bfloat16),
    }
    if change in values:
        changed = of.replace(draft=of.draft.replace(fc=of.draft.fc.replace(value=values[change])))
    else:
        changed = of.replace(draft_config=dataclasses.replace(of.draft_config, mask_token_id=3))
    assert identify(changed).draft != identify(of).draft
    assert identify(changed).target == identify(of).target


def test_check_state_refuses_a_state_of_other_models():
    served = midway()
    check_state(served.models, served.host, served.state)
    with pytest.raises(AssertionError, match="context_writers: its contexts were written by a DFlash 2"):
        check_state(models(OTHER), served.host, served.state)


def test_a_fork_with_another_draft_reads_only_the_drafts_weights(monkeypatch):
    served = midway()
    identified = []

    def counted(params, config):
        identified.append(config)
        return identify_one(params, config)

    identify_one = identity._identify
    monkeypatch.setattr(identity, "_identify", counted)
    draft = load_draft(GOLDEN / OTHER, "float32")
    forked = served.fork(draft=draft)
    assert identified == [draft.config]
    assert forked.host.models == identify(forked.models)
