"""Writes the records of the trained pairs: what the engine drafts for each request alone, at temperature 0.

python -m tests.recall_trained_record [PAIR ...]
"""

from __future__ import annotations

import json
import sys

import numpy as np

from dflash_jax.training.pretraining.recall_rule import CONTENT, PERIOD, follow_rule, rule_permutation
from tests.pairs import ALL_TRAINED, SAMPLING, engine, trained_files

# As of the golden pairs. With 48 tokens the last goes further than the pair was trained for.
PROMPT_TOKENS = (13, 24, 40, 61, 90)


def main() -> None:
    beginnings = np.random.default_rng(2**20).integers(0, CONTENT, (len(PROMPT_TOKENS), PERIOD))
    texts = follow_rule(beginnings, max(PROMPT_TOKENS), rule_permutation(0))
    for pair in sys.argv[1:] or ALL_TRAINED:
        found = []
        for text, length in zip(texts.tolist(), PROMPT_TOKENS, strict=True):
            served = engine(pair, prefix_cache=False)
            completion = served.generate([text[:length]], SAMPLING)[0]
            found.append(
                {
                    "prompt": text[:length],
                    "greedy_tokens": list(completion.token_ids),
                    "produced_per_round": list(completion.produced_per_round),
                    "drafted_blocks": [list(block) for block in completion.drafted_blocks],
                }
            )
        (trained_files(pair) / "cases.json").write_text(json.dumps({"cases": found}) + "\n")


if __name__ == "__main__":
    main()
