"""What log-probabilities cost: rounds of requests that ask for them over rounds of requests that do not.

    python benchmarks/logprobs.py [--target PATH --draft PATH] [--slots 4] [--rounds 40]

Engines with no, 0, 5 and 20 of the most likely tokens run rounds in alternation; each one's median is told as a ratio
to the first. A second table has two engines of which nobody asks, one of which has served such requests before: its
ratio to the first must stay 1.
"""

from __future__ import annotations

import argparse

from benchmarks.side_by_side import print_rounds
from dflash_jax import Engine

GOLDEN = "tests/golden"
ASKED = (-1, 0, 5, 20)
"""Most likely tokens; -1 asks for no log-probabilities."""


def engine(options: argparse.Namespace, asked: int, *, served: bool = False) -> Engine:
    """An engine whose requests are in the middle of their answers."""
    length = 64 + 8 * (options.rounds + 8)
    sizes = {"max_slots": options.slots, "max_model_len": length, "dtype": options.dtype, "prefix_cache": False}
    made = Engine.from_config(
        {"target": {"path": options.target}, "draft": {"path": options.draft, "width": None}, "engine": sizes}
    )
    prompts = [[60, 25, 23, token] for token in range(options.slots)]
    if served:
        made.generate(prompts, max_tokens=16, ignore_eos=True, logprobs=5)
    for prompt in prompts:
        made.add_request(
            prompt, max_tokens=length - 8, ignore_eos=True, temperature=1.0, logprobs=None if asked < 0 else asked
        )
    for _ in range(4):
        made.step()
    return made


def main() -> None:
    """Prints both tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default=f"{GOLDEN}/recall-target")
    parser.add_argument("--draft", default=f"{GOLDEN}/recall-dflash2")
    parser.add_argument("--slots", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--dtype", default="float32")
    options = parser.parse_args()
    print_rounds("top", {asked: engine(options, asked) for asked in ASKED}, options.rounds)
    print_rounds("before", {number: engine(options, -1, served=number == 5) for number in (-1, 5)}, options.rounds)


if __name__ == "__main__":
    main()
