"""A round's time in a small and in a large page pool, side by side: it must not depend on the pool.

python benchmarks/pool_size.py [--pages 1000,16000]
"""

from __future__ import annotations

import argparse
import statistics
import time

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
    sizes = [int(pages) for pages in options.pages.split(",")]
    engines = [engine_with(pages, options.target, options.draft, options.requests) for pages in sizes]
    times: list[list[float]] = [[] for _ in engines]
    for _ in range(options.rounds):
        for engine, seen in zip(engines, times, strict=True):
            begin = time.perf_counter()
            engine.step()
            seen.append(time.perf_counter() - begin)
    medians = [statistics.median(seen) for seen in times]
    print(f"{'pages':>8} {'round ms':>9} {'ratio':>6}")
    for pages, median in zip(sizes, medians, strict=True):
        print(f"{pages:>8} {1e3 * median:>9.2f} {median / medians[0]:>6.3f}")


if __name__ == "__main__":
    main()
