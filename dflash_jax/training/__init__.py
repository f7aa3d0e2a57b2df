"""Training drafts: features, anchors, losses, the step and the loop."""

from dflash_jax.training.average import average_drafts
from dflash_jax.training.config import TrainConfig
from dflash_jax.training.export import export_draft
from dflash_jax.training.inputs import make_inputs
from dflash_jax.training.loop import Trained, run_training, train
from dflash_jax.training.plots import plot_metrics
from dflash_jax.training.records import TokenSequence, append_shards, shard_paths, write_shard
from dflash_jax.training.setup import build_features

__all__ = [
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
