"""What a process on a CPU imports to serve a model: no kernel of a GPU, nothing that it has no use for."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]

SERVE = """
import sys
from dflash_jax import Engine
golden = "tests/golden/"
served = Engine.from_config({
    "target": {"path": golden + "recall-target"}, "draft": {"path": golden + "recall-dflash2"},
    "engine": {"max_slots": 1, "max_model_len": 64},
})
served.generate([[60, 26, 48]], {"max_tokens": 4})
needless = ("jax.experimental.pallas", "jax.experimental.mosaic", "orbax", "transformers", "torch", "optax")
ours = [name for name in sys.modules if "mosaic" in name and name.startswith("dflash_jax")]
print(ours + [name for name in sys.modules if name.startswith((*needless, "matplotlib"))])
"""


def test_a_cpu_serves_without_kernels_of_gpus_and_without_what_reads_other_checkpoints():
    done = subprocess.run(
        [sys.executable, "-c", SERVE],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "DFLASH_JAX_TYPECHECK": "0"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-1000:]
    assert done.stdout.strip() == "[]"
