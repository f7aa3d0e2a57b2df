"""The recall rule, the target trained on it, and small training runs over them."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dflash_jax.checkpoints import load_target
from dflash_jax.models.target import lm_head
from dflash_jax.training import TokenSequence, TrainConfig, write_shard
from dflash_jax.training.data.features import run_sequences
from dflash_jax.training.pretraining.recall_rule import BOS, CONTENT, PERIOD, follow_rule
from tests.pairs import GOLDEN

MASK = 63


@functools.cache
def target():
    return load_target(GOLDEN / "recall-target")


@functools.cache
def permutation() -> np.ndarray:
    """The rule's permutation, as the target has learnt it."""
    rng = np.random.default_rng(5)
    tokens = np.zeros((512, PERIOD + 1), np.int32)
    tokens[:, 0], tokens[:, 1:] = BOS, rng.integers(0, CONTENT, (512, PERIOD))
    # After a multiple of 3 comes the permutation of the token ten places back.
    tokens[:, -1] = 3 * rng.integers(0, 18, 512)
    run = run_sequences(target().params, target().config, jnp.asarray(tokens))
    following = np.asarray(jnp.argmax(lm_head(target().params, run.hidden[:, -1]), -1))
    table = np.arange(CONTENT)
    for first in range(CONTENT):
        seen = following[tokens[:, 1] == first]
        table[first] = np.bincount(seen).argmax() if len(seen) else first
    return table


def sequences(count: int, length: int, seed: int = 0) -> list[TokenSequence]:
    beginnings = np.random.default_rng(seed).integers(0, CONTENT, (count, PERIOD))
    return [TokenSequence(row, PERIOD + 1) for row in follow_rule(beginnings, length, permutation())]


def write_data(directory: Path, count: int = 64, length: int = 64, seed: int = 0) -> Path:
    made = sequences(count, length, seed)
    write_shard(directory, 0, made[: count // 2])
    write_shard(directory, 1, made[count // 2 :])
    return directory


def config(directory: Path, data: Path, **changes: Any) -> TrainConfig:
    fields: dict[str, Any] = {
        "target": str(GOLDEN / "recall-target"),
        "output": directory / "run",
        "log_every": 2,
        "draft": {
            "num_layers": 1,
            "block_size": 4,
            "mask_token_id": MASK,
            "target_layer_ids": (1, 2),
            "selector_rank": 8,
            "selector_top_k": 4,
        },
        "data": {"path": data, "max_length": 64, "held_out": 0.1, "features": directory / "features"},
        "optimiser": {"steps": 6, "sequences": 2, "anchors": 8},
        "checkpoint": {"every": 2},
        "evaluation": {"every": 3, "sequences": 2, "anchors": 8},
    }
    for name, value in changes.items():
        section, _, field = name.partition("__")
        if field:
            fields[section] = {**fields.get(section, {}), field: value}
        else:
            fields[section] = value
    return TrainConfig(**fields)


def leaves(tree) -> list[np.ndarray]:
    return [np.asarray(leaf) for leaf in jax.tree.leaves(tree)]
