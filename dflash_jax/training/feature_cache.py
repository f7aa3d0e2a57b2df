"""Features on disk, in bfloat16: computed once, read by every epoch and every run over the same data.

A directory holds, for one target and one list of sequences, a file of hidden states per layer (all tokens of
all sequences, one after the other), a byte per sequence that says whether its states are there, and
`sequences.npy` with the hash of each. More sequences may follow later; those there must stay.
"""

from __future__ import annotations

import json
from pathlib import Path

import ml_dtypes
import numpy as np
from jaxtyping import Float

from dflash_jax.errors import ConfigError
from dflash_jax.training.dataset import Dataset
from dflash_jax.training.features import FeatureExtractor


class Features:
    """The features of a dataset's sequences, computed when they are first asked for.

    Args:
      dataset: the sequences.
      extractor: computes what is not there.
      layers: target layers, in the draft's order.
    """

    def __init__(self, dataset: Dataset, extractor: FeatureExtractor, layers: tuple[int, ...]):
        self._dataset, self._extractor, self._layers = dataset, extractor, layers

    def read(self, index: int) -> Float[np.ndarray, "tokens features"]:
        """Features of one sequence."""
        return self._extractor(self._dataset.sequence(index).tokens, self._layers)


class CachedFeatures(Features):
    """The same, kept in a directory.

    Args:
      dataset, extractor, layers: see `Features`.
      directory: of the cache; made if it is not there.
      target: fingerprint of the target.
      hidden: channels of a hidden state.
      limit_gb: largest size that the directory may come to.

    Raises:
      ConfigError: the directory belongs to another target or other data, or the features do not fit.
    """

    def __init__(
        self,
        dataset: Dataset,
        extractor: FeatureExtractor,
        layers: tuple[int, ...],
        *,
        directory: Path,
        target: str,
        hidden: int,
        limit_gb: float,
    ):
        super().__init__(dataset, extractor, layers)
        ends = np.cumsum(dataset.lengths)
        self._starts, tokens = ends - dataset.lengths, int(ends[-1])
        needed = len(set(layers)) * tokens * hidden * 2 / 1e9
        if needed > limit_gb:
            raise ConfigError(
                f"features of {tokens} tokens at {len(set(layers))} layers take {needed:.1f} GB, more than "
                f"data.features_gb allows ({limit_gb:g}); raise it, listen to fewer layers, or leave data.features "
                "out to compute them again every time"
            )
        directory.mkdir(parents=True, exist_ok=True)
        _check_owner(directory, target, dataset)
        self._states = {
            layer: _grow(directory / f"layer-{layer}.bfloat16", (tokens, hidden), ml_dtypes.bfloat16)
            for layer in layers
        }
        self._there = {
            layer: _grow(directory / f"layer-{layer}.done", (len(dataset.lengths),), np.uint8) for layer in layers
        }

    def read(self, index: int) -> Float[np.ndarray, "tokens features"]:
        """Features of one sequence, bfloat16."""
        start, length = self._starts[index], self._dataset.lengths[index]
        missing = tuple(layer for layer in sorted(self._states) if not self._there[layer][index])
        if missing:
            computed = self._extractor(self._dataset.sequence(index).tokens, missing)
            for layer, states in zip(missing, np.split(computed, len(missing), axis=-1), strict=True):
                self._states[layer][start : start + length] = states
                self._there[layer][index] = 1
        return np.concatenate([self._states[layer][start : start + length] for layer in self._layers], axis=-1)


def _check_owner(directory: Path, target: str, dataset: Dataset) -> None:
    owner, sequences = directory / "target.json", directory / "sequences.npy"
    if owner.exists():
        found = json.loads(owner.read_text())["target"]
        if found != target:
            raise ConfigError(
                f"the features in {directory} are of another target (fingerprint {found}, this one's is {target}); "
                "give another data.features, or remove that directory"
            )
        known = np.load(sequences)
        if not np.array_equal(known, dataset.hashes[: len(known)]):
            raise ConfigError(
                f"the features in {directory} are of other sequences than those of data.path; sequences may be added "
                "after the old ones, but not changed: give another data.features, or remove that directory"
            )
    np.save(sequences, dataset.hashes)
    owner.write_text(json.dumps({"target": target}) + "\n")


def _grow(file: Path, shape: tuple[int, ...], dtype: np.typing.DTypeLike) -> np.memmap:
    """A file of zeros, or what an earlier, shorter one holds followed by zeros. Zeros take no disk."""
    with file.open("ab") as stream:
        stream.truncate(int(np.prod(shape)) * np.dtype(dtype).itemsize)
    return np.memmap(file, dtype, "r+", shape=shape)
