"""The training data: its sequences, their split into training and held-out ones, and their order."""

from __future__ import annotations

import dataclasses
import hashlib
from pathlib import Path

import grain
import numpy as np
from jaxtyping import Int, UInt64

from dflash_jax.errors import ConfigError
from dflash_jax.training.config import DataSection
from dflash_jax.training.data.records import SequenceSource, TokenSequence, encode_record


@dataclasses.dataclass(frozen=True)
class Dataset:
    """Sequences cut to a maximal length, and split by their prompts.

    Attributes:
      source: every sequence.
      max_length: tokens that they are cut to.
      train, held_out: indices of the sequences to train on and to evaluate on.
      seq_lens: tokens of each sequence, after cutting.
      hashes: of each sequence, after cutting.
      token_counts: occurrences of each token in all sequences.
      fingerprint: hash of the sequences, their order and their split.
    """

    source: SequenceSource
    max_length: int
    train: Int[np.ndarray, " train"]
    held_out: Int[np.ndarray, " held_out"]
    seq_lens: Int[np.ndarray, " sequences"]
    hashes: UInt64[np.ndarray, " sequences"]
    token_counts: Int[np.ndarray, " vocab"]
    fingerprint: str

    def sequence(self, index: int) -> TokenSequence:
        """A sequence, cut."""
        whole = self.source[index]
        return TokenSequence(whole.tokens[: self.max_length], whole.prompt_len)


def is_held_out(sequence: TokenSequence, share: float) -> bool:
    """Whether a sequence is for evaluation. Its prompt alone decides, so that no prompt is trained and evaluated on."""
    prompt = sequence.tokens[: sequence.prompt_len] if sequence.prompt_len else sequence.tokens
    return _hash(prompt.astype("<i4").tobytes()) < share * 2**64


def open_dataset(
    directory: str | Path, *, vocab_size: int, max_length: int, held_out: float, min_answer: int
) -> Dataset:
    """Reads the data once, counts and splits it.

    Args:
      directory: of the shards.
      vocab_size: the target's.
      max_length: longer sequences are cut to this many tokens.
      held_out: share of the prompts that are for evaluation.
      min_answer: sequences with fewer tokens after the prompt, once cut, are left out.

    Raises:
      ConfigError: no sequences, a damaged shard, none left to train on, or tokens that the target does not have.
    """
    source = SequenceSource(directory)
    split: tuple[list[int], list[int]] = ([], [])
    seq_lens, hashes, token_counts = [], [], np.zeros(vocab_size, np.int64)
    for index in range(len(source)):
        sequence = source[index]
        tokens = sequence.tokens[:max_length]
        if len(tokens) and not 0 <= tokens.min() <= tokens.max() < vocab_size:
            raise ConfigError(
                f"sequence {index} in {directory} has tokens outside the target's vocabulary of {vocab_size}; "
                "the data was written with another tokenizer"
            )
        seq_lens.append(len(tokens))
        hashes.append(_hash(encode_record(TokenSequence(tokens, sequence.prompt_len))))
        token_counts += np.bincount(tokens, minlength=vocab_size)
        if len(tokens) - sequence.prompt_len >= min_answer:
            split[is_held_out(sequence, held_out)].append(index)
    if not split[0]:
        raise ConfigError(
            f"none of the {len(source)} sequences in {directory} can be trained on: {len(split[1])} are held out, "
            f"and the others have fewer than {min_answer} tokens after the prompt within {max_length} tokens"
        )
    train, evaluation = (np.asarray(part, np.int64) for part in split)
    digests = np.asarray(hashes, np.uint64)
    fingerprint = hashlib.sha256(digests.tobytes() + train.tobytes() + b"/" + evaluation.tobytes()).hexdigest()
    return Dataset(source, max_length, train, evaluation, np.asarray(seq_lens), digests, token_counts, fingerprint)


def open_data(section: DataSection, vocab_size: int) -> Dataset:
    """The sequences of a run; see `open_dataset`."""
    return open_dataset(
        section.path,
        vocab_size=vocab_size,
        max_length=section.max_length,
        held_out=section.held_out,
        min_answer=section.min_answer,
    )


def most_frequent(directory: str | Path, limit: int) -> tuple[list[int], float]:
    """The most frequent tokens of the sequences in a directory, and the share of all tokens that are one of them.

    Args:
      directory: of the shards.
      limit: how many at most.

    Raises:
      ConfigError: no sequences, no token in them, or a damaged shard.
    """
    source = SequenceSource(directory)
    tokens, counts = np.unique(
        np.concatenate([source[index].tokens for index in range(len(source))]), return_counts=True
    )
    if not len(tokens):
        raise ConfigError(f"the {len(source)} sequences in {directory} have no tokens; write them again")
    found = np.argsort(-counts, kind="stable")[:limit]
    return [int(token) for token in tokens[found]], float(counts[found].sum() / counts.sum())


def _hash(content: bytes) -> int:
    return int.from_bytes(hashlib.sha256(content).digest()[:8], "little")


class Order:
    """The order of training: every epoch is another shuffle, and a step's number alone decides its sequences.

    So a resumed run sees the same sequences, and a checkpoint needs no more than the step.

    Args:
      dataset: the data.
      seed: of the shuffles.
      per_step: sequences of a step.
    """

    def __init__(self, dataset: Dataset, seed: int, per_step: int):
        indices: list[int] = [int(index) for index in dataset.train]
        self._indices = grain.MapDataset.source(indices).shuffle(seed=seed).repeat()
        self._per_step = per_step

    def sequences(self, step: int) -> list[int]:
        """Indices of the sequences that a step trains on."""
        first = step * self._per_step
        return [self._indices[first + offset] for offset in range(self._per_step)]
