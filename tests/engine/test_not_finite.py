"""Numbers that are not finite: in the target they end the request by name, in the draft they cost acceptance."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from dflash_jax import Engine
from tests.pairs import PAIRS, SAMPLING, alone, assert_is_golden, cases, engine, models, prompts, record

PAIR = "recall-dflash2"
DAMAGED = 33
"""A token that no golden prompt but case 0's holds."""


def with_target(change, pair: str = PAIR) -> Engine:
    of = models(pair)
    return Engine(of.replace(target=change(of.target)), engine(pair).config)


def damaged_embedding(token: int):
    def change(target):
        assert target.lm_head is not None, "the head was to be another matrix"
        return target.replace(embedding=target.embedding.at[token, 5].set(jnp.nan))

    return change


def test_a_prompt_with_a_damaged_embedding_ends_with_an_error_that_says_so():
    served = with_target(damaged_embedding(DAMAGED))
    bad, good = [60, 4, DAMAGED, 7], prompts(PAIR)[1]
    assert DAMAGED not in (*good, *cases(PAIR)[1]["greedy_tokens"])
    completions = served.generate([bad, good], SAMPLING)
    assert completions[0].finish_reason == "error" and completions[0].token_ids == ()
    assert completions[0].error.startswith("finite_logits is violated: the target's logits are finite numbers")
    assert_is_golden(completions[1], cases(PAIR)[1])
    assert served.host.pool.available == served.config.pool_pages


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.8, "seed": 3}])
@pytest.mark.parametrize("speculation", [True, False])
def test_an_answer_that_reaches_a_damaged_token_keeps_what_came_before(sampling, speculation):
    """With and without drafting the tokens before the damage are the same."""
    sampling = {**SAMPLING, **sampling}
    clean = alone(PAIR, tuple(prompts(PAIR)[1]), tuple(sampling.items()))
    token = clean.token_ids[9]
    served = with_target(damaged_embedding(token))
    before = clean.token_ids.index(token) + 1
    if token in prompts(PAIR)[1]:
        before = 0
    completion = served.generate([prompts(PAIR)[1]], {**sampling, "speculation": speculation})[0]
    assert completion.finish_reason == "error" and "finite_logits" in completion.error
    assert completion.token_ids == clean.token_ids[:before]


def test_a_head_with_a_damaged_row_is_noticed():
    def change(target):
        head = target.lm_head
        return target.replace(lm_head=head.replace(value=head.value.at[3, 9].set(jnp.inf)))

    served = with_target(change)
    completion = served.generate([prompts(PAIR)[1]], SAMPLING)[0]
    assert completion.finish_reason == "error" and "finite_logits" in completion.error


@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.0, "seed": 5}])
@pytest.mark.parametrize("pair", [PAIR, "recall-dflash1"])
@pytest.mark.parametrize("where", ["norm", "everything"])
def test_a_damaged_draft_costs_acceptance_and_nothing_else(pair, where, sampling):
    of = models(pair)
    if where == "norm":
        draft = of.draft.replace(norm=of.draft.norm.at[0].set(jnp.nan))
    else:
        draft = jax.tree.map(lambda leaf: jnp.full_like(leaf, jnp.nan), of.draft)
    served = Engine(of.replace(draft=draft), engine(pair).config)
    completion = served.generate([prompts(pair)[1]], {**SAMPLING, **sampling})[0]
    if not sampling:
        assert list(completion.token_ids) == cases(pair)[1]["greedy_tokens"]
    assert completion.finish_reason == "length" and completion.error is None
    assert completion.metrics.damaged_drafts == completion.metrics.drafted_request_steps > 10
    assert served.counters()["damaged_drafts"] == completion.metrics.damaged_drafts
    assert completion.fallback is None
    assert all(0 <= token < 64 for block in completion.drafted_blocks for token in block)


def test_a_healthy_draft_counts_no_damage():
    completion = alone(PAIR, tuple(prompts(PAIR)[1]))
    assert completion.metrics.damaged_drafts == 0
    assert record(completion)[0]


def test_a_rejected_token_with_a_damaged_embedding_changes_nothing_before_it():
    """The draft proposes a damaged token that the target does not choose."""
    cases_of_all = [(pair, tuple(prompt)) for pair in PAIRS for prompt in prompts(pair)]
    for pair, prompt in cases_of_all:
        clean = alone(pair, prompt)
        said = {*prompt, *clean.token_ids}
        if never_said := {token for block in clean.drafted_blocks for token in block} - said:
            break
    else:
        pytest.fail("a draft was to propose something that is never said")
    served = with_target(damaged_embedding(min(never_said)), pair)
    assert served.generate([prompt], SAMPLING)[0].token_ids == clean.token_ids
