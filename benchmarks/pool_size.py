"""A round's time in a small and in a large page pool, side by side: it must not depend on the pool.

python benchmarks/pool_size.py [--pages 1000,16000]
"""

from __future__ import annotations

import argparse

from side_by_side import print_rounds

from dflash_jax import Engine


def engine_with(pages: int, target: str, draft: str, requests: int) -> Engine:
    sizes = {"max_slots": requests, "max_model_len": 512, "num_pages": pages, "prefix_cache": False}
    engine = Engine.from_config({"target": {"path": target}, "draft": {"path": draft}, "engine": sizes})
    for index in range(requests):
        engine.add_request([60] + [(index + 3 * i) % 56 for i in range(60)], {"max_tokens": 400, "ignore_eos": True})
    while not all(p.decoding for p in engine.host.running) or engine.host.waiting:
        engine.step()
    engine.step()
    return engine


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", default="tests/golden/recall-target")
    parser.add_argument("--draft", default="tests/golden/recall-dflash2")
    parser.add_argument("--pages", default="1000,16000")
    parser.add_argument("--requests", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=40)
    options = parser.parse_args()
    sizes = map(int, options.pages.split(","))
    engines = {pages: engine_with(pages, options.target, options.draft, options.requests) for pages in sizes}
    print_rounds("pages", engines, options.rounds)


if __name__ == "__main__":
    main()
