"""Many requests at once, and another precision."""

from __future__ import annotations

from tests.pairs import SAMPLING, alone, engine, prompts, record

PAIR = "recall-dflash2"


def test_thirty_two_at_once_with_k_8_are_as_alone():
    """Situation 12, in the memory that 32 plain requests need plus the draft's own pages."""
    sizes = {"max_slots": 32, "max_model_len": 64, "prefill_chunk": 1024}
    served = engine(PAIR, k=8, **sizes)
    queue = [tuple(prompts(PAIR)[3][i : i + 12 + i % 9]) for i in range(32)]
    completions = served.generate(queue, {**SAMPLING, "max_tokens": 20})
    assert served.host.counters.preemptions == 0
    assert served.config.pool_pages == 32 * 64 // 16
    for completion, prompt in zip(completions, queue, strict=True):
        assert completion.finish_reason == "length"
        assert all(len(block) == 8 for block in completion.drafted_blocks)
        plain = alone(PAIR, prompt, (("max_tokens", 20),))
        assert completion.token_ids == plain.token_ids
    # A block of 8 drafts is another block than one of 7, so rounds are compared with k = 8 alone.
    solo = engine(PAIR, k=8, **sizes)
    for index in (0, 7, 31):
        assert record(solo.generate([queue[index]], {**SAMPLING, "max_tokens": 20})[0]) == record(completions[index])


def test_bfloat16_speculates_like_it_decodes():
    """Weights and pages in bfloat16: the pair is sure enough of itself that rounding changes no token."""
    served = engine_in_bfloat16()
    completion = served.generate([prompts(PAIR)[1]], SAMPLING)[0]
    assert completion.token_ids == alone(PAIR, tuple(prompts(PAIR)[1])).token_ids
    assert completion.metrics.mean_acceptance_length > 4


def engine_in_bfloat16():
    from dflash_jax import Engine
    from tests.pairs import GOLDEN, SIZES

    sizes = {**SIZES, "dtype": "bfloat16"}
    config = {"target": {"path": str(GOLDEN / "recall-target")}, "draft": {"path": str(GOLDEN / PAIR)}, "engine": sizes}
    served = Engine.from_config(config)
    assert {leaf.dtype.name for leaf in (served.state.target_pages.k, served.state.draft_pages.v)} == {"bfloat16"}
    return served
