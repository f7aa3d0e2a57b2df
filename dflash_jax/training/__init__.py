"""Training of drafts.

`config.py` says what a run is, `values.py` which values it takes. The parts, each a folder: `corpora` (text that the
target writes), `data` (sequences and features), `drafts` (fresh weights), `objective` (the loss), `pretraining` (a
target from nothing) and `run` (steps, checkpoints, metrics).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dflash_jax.lazy import lazy_exports

if TYPE_CHECKING:
    from dflash_jax.training.config import TrainConfig
    from dflash_jax.training.data.records import TokenSequence, append_shards, shard_paths, write_shard
    from dflash_jax.training.drafts.average import average_drafts
    from dflash_jax.training.pretraining.inputs import make_inputs
    from dflash_jax.training.run.callbacks import Callback
    from dflash_jax.training.run.export import export_draft
    from dflash_jax.training.run.loop import Trained, run_training, train
    from dflash_jax.training.run.plots import plot_metrics
    from dflash_jax.training.run.setup import build_features

__all__ = [
    "Callback",
    "TokenSequence",
    "TrainConfig",
    "Trained",
    "append_shards",
    "average_drafts",
    "build_features",
    "export_draft",
    "make_inputs",
    "plot_metrics",
    "run_training",
    "shard_paths",
    "train",
    "write_shard",
]

__getattr__, __dir__ = lazy_exports(
    __name__,
    {
        "config": ["TrainConfig"],
        "data.records": ["TokenSequence", "append_shards", "shard_paths", "write_shard"],
        "drafts.average": ["average_drafts"],
        "pretraining.inputs": ["make_inputs"],
        "run.callbacks": ["Callback"],
        "run.export": ["export_draft"],
        "run.loop": ["Trained", "run_training", "train"],
        "run.plots": ["plot_metrics"],
        "run.setup": ["build_features"],
    },
)
