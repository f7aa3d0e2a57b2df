"""The file of a draft's shortlist: a JSON array of token ids."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from dflash_jax.checkpoints.json_file import read_json
from dflash_jax.errors import CheckpointError, quote
from dflash_jax.writing import replace_file


def write_shortlist(path: str | Path, tokens: Iterable[int]) -> None:
    """Writes token ids, ascending."""
    replace_file(Path(path), json.dumps(sorted(tokens)) + "\n")


def read_shortlist(path: str | Path, vocab_size: int, at_least: int) -> tuple[int, ...]:
    """Reads the token ids of a shortlist.

    Args:
      path: the file.
      vocab_size: of the target.
      at_least: tokens that it must have; the draft's candidates per position.

    Raises:
      CheckpointError: no such file, or not a list of that many distinct ids of the vocabulary.
    """
    try:
        tokens = read_json(Path(path))
    except CheckpointError as error:
        raise CheckpointError(f"draft.shortlist must be a JSON array of token ids, but {error}") from None
    if not isinstance(tokens, list) or not all(type(token) is int for token in tokens):
        raise CheckpointError(f"draft.shortlist {path} is not an array of token ids")
    strange = [token for token in tokens if not 0 <= token < vocab_size]
    if strange:
        raise CheckpointError(
            f"draft.shortlist {path} has token {quote(strange[0])}, "
            f"outside the target's vocabulary of {vocab_size} tokens"
        )
    if len(set(tokens)) < at_least:
        raise CheckpointError(
            f"draft.shortlist {path} has {len(set(tokens))} distinct tokens, but the draft proposes from "
            f"{at_least} candidates at each position"
        )
    return tuple(tokens)
