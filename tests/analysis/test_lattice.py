"""The lattice of a round is what the round then does."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from dflash_jax import RequestError, StateError
from dflash_jax.analysis import peek, peek_state
from tests.engine.test_processors import with_text
from tests.engine.test_toy_drafter import toy_models
from tests.pairs import HYBRID, PAIRS, SAMPLING, cases, engine, prompts, tensors
from tests.slow import mostly_slow


def decoding(draft, sampling=None, **options):
    """An engine whose one request "r" has run its prompt."""
    served = engine(draft, **options)
    served.add_request(prompts(draft)[2], {**SAMPLING, **(sampling or {})}, request_id="r")
    while not served.host.running or not served.host.running.first.decoding:
        served.step()
    return served


def step(served):
    """What one step brings the request "r", and the block that it drafted."""
    [update] = served.step()
    record = update.completion or served.host.find("r")
    return update, record.drafted_blocks[-1]


@pytest.mark.parametrize("draft", mostly_slow("recall-dflash2", "recall-dflash1", "recall-dflash2-swa", HYBRID))
@pytest.mark.parametrize(
    "sampling",
    [
        {},
        {"temperature": 3.0, "seed": 5, "top_p": 0.95},
        {"repetition_penalty": 1.7, "logit_bias": {"7": 4.0}, "allowed_token_ids": list(range(3, 40))},
    ],
    ids=["greedy", "sampled", "processed"],
)
def test_peek_sees_what_the_next_step_does_and_changes_nothing(draft, sampling):
    served = decoding(draft, sampling)
    for _ in range(4):
        before = served.host, served.state
        seen = peek(served, "r")
        assert (served.host, served.state) == before
        update, block = step(served)
        assert tuple(seen.drafted) == block
        assert seen.committed == update.token_ids
        assert seen.committed[: seen.accepted] == block[: seen.accepted]


@pytest.mark.parametrize("draft", PAIRS)
def test_a_lattice_has_candidates_scores_and_the_target_s_opinion_of_them(draft):
    seen = peek(decoding(draft))
    k, count = seen.candidates.shape
    assert k == 7 and count == 8
    assert (seen.candidates[np.arange(k), seen.path] == seen.drafted).all()
    assert (np.diff(seen.unary, axis=1) <= 0).all()
    assert (seen.target >= 0).all() and (seen.target.sum(1) <= 1 + 1e-5).all()
    assert (seen.target_best_probs[:-1] >= seen.target.max(1) - 1e-6).all()
    assert seen.accepted == int(np.cumprod(seen.drafted == seen.target_best[:-1]).sum())
    assert seen.next_token == seen.target_best[seen.accepted]
    assert seen.rejected == (None if seen.accepted == k else seen.accepted)
    if draft == "recall-dflash1":
        assert seen.edges is None and (seen.path == 0).all(), "DFlash proposes the best of each position"
    else:
        assert seen.edges.shape == (k, count, count)
        assert (np.argmax(seen.edges_on_path, axis=1) == seen.path).all(), "the path is the best edge after each token"
        assert np.ptp(seen.edges[0], axis=0).max() == 0, "the first position's predecessor is the anchor"


@pytest.mark.parametrize("draft", ["recall-dflash2", "recall-dflash2-swa"])
def test_the_scores_of_a_lattice_are_the_reference_s(draft):
    served = engine(draft)
    served.add_request(cases(draft)[0]["prompt"], SAMPLING)
    served.step()
    seen, golden = peek(served), tensors(draft)
    assert (seen.candidates == golden["0.round0.candidates"]).all()
    np.testing.assert_allclose(seen.edges[1:], golden["0.round0.edge_scores"][1:], atol=2e-4)


def test_the_probabilities_of_a_lattice_are_those_that_the_token_is_drawn_by():
    greedy, sampled = peek(decoding("recall-dflash2")), peek(decoding("recall-dflash2", {"temperature": 2.0}))
    assert (greedy.proposal.sum(1) == 1).all() and (greedy.proposal.max(1) == 1).all()
    np.testing.assert_allclose(sampled.proposal.sum(1), 1, rtol=1e-5)
    assert sampled.proposal.max() < 1
    scores = sampled.edges_on_path[0] / 2.0
    np.testing.assert_allclose(sampled.proposal[0], np.exp(scores) / np.exp(scores).sum(), rtol=1e-4)


def test_a_lattice_is_a_function_of_the_models_and_the_state():
    served = decoding("recall-dflash2")
    seen = peek_state(served.models, served.state, served.slot_of("r"))
    same = peek(served, "r")
    assert jax.tree.all(jax.tree.map(np.array_equal, vars(seen), vars(same)))
    assert len(peek_state(served.models, served.state, served.slot_of("r"), drafts=3).drafted) == 3


def test_a_lattice_is_cut_where_the_request_ends_and_where_its_width_does():
    served = decoding("recall-dflash2", {"max_tokens": 3})
    assert len(peek(served).committed) == 2 == len(step(served)[0].token_ids)
    narrow = decoding("recall-dflash2", width=2)
    seen = peek(narrow)
    assert seen.verified == 2 and seen.accepted <= 2 and len(seen.drafted) == 7
    assert seen.committed == step(narrow)[0].token_ids
    stop = peek(decoding("recall-dflash2")).committed[1]
    stopped = decoding("recall-dflash2", {"stop_token_ids": [stop]})
    assert peek(stopped).committed[-1] == stop and len(peek(stopped).committed) == 2


def test_a_draft_of_another_kind_shows_what_it_proposes():
    from dflash_jax import Engine, EngineConfig
    from tests.pairs import SIZES

    served = Engine(toy_models(), EngineConfig(**SIZES), k=3)
    served.add_request(prompts("recall-dflash2")[0], SAMPLING, request_id="r")
    served.step()
    seen = peek(served)
    assert seen.unary is None and seen.edges is None and seen.candidates.shape == (3, 4)
    assert tuple(seen.drafted) == step(served)[1]


def test_peek_says_why_a_request_has_no_next_round():
    served = engine("recall-dflash2", slots=1)
    with pytest.raises(RequestError, match="0 requests run"):
        peek(served)
    served.add_request(prompts("recall-dflash2")[0], SAMPLING, request_id="a")
    served.add_request(prompts("recall-dflash2")[1], SAMPLING, request_id="b")
    with pytest.raises(RequestError, match="'a' waits for a slot"):
        peek(served, "a")
    with pytest.raises(RequestError, match=r"no request 'c' is in flight; those that are: \['a', 'b'\]"):
        peek(served, "c")
    served.step()
    peek(served, "a")
    plain = decoding("recall-dflash2", {"speculation": False})
    with pytest.raises(RequestError, match=r"not drafted for .the request asked for no speculation"):
        peek(plain)
    with pytest.raises(StateError, match="slot 3 holds no request that decodes"):
        peek_state(served.models, served.state, 3)
    with pytest.raises(StateError, match="the models have no draft"):
        peek_state(served.models.replace(draft=None, draft_config=None), served.state, 0)


def test_a_round_that_a_grammar_shapes_is_not_told():
    pytest.importorskip("llguidance")
    served = with_text("recall-dflash2")
    sampling = {"max_tokens": 20, "stop_token_ids": [63], "structured_outputs": {"regex": "[A-Z]{4,9}-[0-9]{2}"}}
    served.add_request(prompts("recall-dflash2")[0], sampling, request_id="r")
    served.step()
    with pytest.raises(RequestError, match="request 'r' has structured outputs; its grammar forbids tokens"):
        peek(served)
