"""A round's time at one context length in block tables of different length, side by side.

The cost must follow the context there is, not the longest there could be.

    python benchmarks/context_table.py [--context 4096] [--tables 4608,16384]
"""

from __future__ import annotations

import argparse
import dataclasses

from side_by_side import print_rounds

from dflash_jax import Engine, EngineConfig
from dflash_jax.checkpoints import load_draft, load_target
from dflash_jax.engine import Models


def engine_at(context: int, table: int, target: str, draft: str, requests: int) -> Engine:
    config = EngineConfig(
        max_slots=requests,
        max_model_len=table,
        num_pages=requests * (context // 16 + 40),
        prefill_chunk=512,
        prefix_cache=False,
    )
    loaded, drafter = load_target(target), load_draft(draft)
    # Tables may be longer than what the model was made for: only the cost matters here.
    unlimited = dataclasses.replace(loaded.config, max_position=0)
    engine = Engine(Models(loaded.params, unlimited, drafter.params, drafter.config), config)
    for index in range(requests):
        prompt = [60] + [(index + 3 * i) % 56 for i in range(context - 1)]
        engine.add_request(prompt, {"max_tokens": 500, "ignore_eos": True})
    while engine.host.waiting or not all(p.decoding for p in engine.host.running):
        engine.step()
    engine.step()
    return engine


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", default="tests/golden/recall-target")
    parser.add_argument("--draft", default="tests/golden/recall-dflash2")
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--tables", default="4608,16384")
    parser.add_argument("--requests", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=30)
    options = parser.parse_args()
    tables = map(int, options.tables.split(","))
    engines = {
        table: engine_at(options.context, table, options.target, options.draft, options.requests) for table in tables
    }
    print_rounds("table", engines, options.rounds)


if __name__ == "__main__":
    main()
