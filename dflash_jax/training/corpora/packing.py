"""Corpora as shards for training."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from dflash_jax.checkpoints.staging import new_directory
from dflash_jax.errors import ConfigError
from dflash_jax.training.corpora.conversations import read_conversations
from dflash_jax.training.data.records import TokenSequence, append_shards, shard_paths


def pack_corpus(paths: Sequence[str | Path], directory: str | Path, per_shard: int = 1000) -> tuple[int, int]:
    """Writes the conversations of corpora as shards for training, leaving out repeated ones.

    The directory appears whole or not at all.

    Args:
      paths: the corpus files.
      directory: of the shards; it must not be there, or be empty.
      per_shard: conversations in a shard.

    Returns:
      Conversations and tokens written.

    Raises:
      ConfigError: a corpus cannot be read, there is no answer in any of them, or something is in the directory.
    """
    directory = Path(directory)
    if shard_paths(directory):
        raise ConfigError(f"{directory} holds shards already; give data pack a directory of its own")
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise ConfigError(f"{directory} is there and is no empty directory; give data pack a directory of its own")
    seen: set[tuple[int, ...]] = set()
    kept = []
    in_order = (sorted(read_conversations(path), key=lambda conversation: conversation.index) for path in paths)
    for conversation in itertools.chain.from_iterable(in_order):
        # Two answers to one message are two texts; only the whole conversation can be a repetition.
        if conversation.tokens not in seen and len(conversation.tokens) > conversation.prompt_len:
            seen.add(conversation.tokens)
            kept.append(TokenSequence(np.array(conversation.tokens, np.int32), conversation.prompt_len))
    if not kept:
        raise ConfigError(
            f"there is nothing to pack: no conversation with an answer in {', '.join(map(str, paths))}; "
            "`dflash-jax data generate` writes them"
        )
    with new_directory(directory) as scratch:
        append_shards(scratch, kept, per_shard)
    return len(kept), sum(len(sequence.tokens) for sequence in kept)
