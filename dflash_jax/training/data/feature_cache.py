"""Features on disk, in bfloat16: computed once, read by every epoch and every run over the same data.

The directory of one target and one list of sequences has, for each layer, a file of hidden states (of all tokens
of all sequences, one after the other) and a file with a byte per sequence, 1 where its states are there.
`target.json` is the manifest, and `sequences.npy` has the hash of each sequence. Sequences may be added at the end.
"""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
from jaxtyping import Float, UInt64

from dflash_jax.errors import ConfigError
from dflash_jax.training.data.dataset import Dataset
from dflash_jax.training.data.features import FeatureExtractor
from dflash_jax.training.manifest import difference, read_manifest, write_manifest
from dflash_jax.training.values import Dtype
from dflash_jax.writing import replace_array

# Which states a layer's file holds: transformers', where the last layer's are those after the final norm.
_STATES = "hidden_states[layer + 1]"


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
    """Features that are also stored in a directory.

    Args:
      dataset, extractor, layers: see `Features`.
      directory: of the cache; made if it is not there.
      target: fingerprint of the target.
      dtype: of the factors of the target's matrix products.
      hidden: channels of a hidden state.
      limit_gb: largest size that the directory may come to.

    Raises:
      ConfigError: the directory belongs to another target, other data or another dtype, or the features do not fit.
    """

    def __init__(
        self,
        dataset: Dataset,
        extractor: FeatureExtractor,
        layers: tuple[int, ...],
        *,
        directory: Path,
        target: str,
        dtype: Dtype,
        hidden: int,
        limit_gb: float,
    ):
        super().__init__(dataset, extractor, layers)
        ends = np.cumsum(dataset.seq_lens)
        self._starts, tokens = ends - dataset.seq_lens, int(ends[-1])
        needed = len(set(layers)) * tokens * hidden * 2 / 1e9
        if needed > limit_gb:
            raise ConfigError(
                f"features of {tokens} tokens at {len(set(layers))} layers take {needed:.1f} GB, more than "
                f"data.features_gb allows ({limit_gb:g}); raise it, listen to fewer layers, or leave data.features "
                "out to compute them again every time"
            )
        directory.mkdir(parents=True, exist_ok=True)
        _check_manifest(directory, {"target": target, "dtype": dtype, "states": _STATES}, dataset)
        self._states = {
            layer: _grow(directory / f"layer-{layer}.bfloat16", (tokens, hidden), ml_dtypes.bfloat16)
            for layer in layers
        }
        self._there = {
            layer: _grow(directory / f"layer-{layer}.done", (len(dataset.seq_lens),), np.uint8) for layer in layers
        }

    def read(self, index: int) -> Float[np.ndarray, "tokens features"]:
        """Features of one sequence, bfloat16."""
        start, length = self._starts[index], self._dataset.seq_lens[index]
        missing = tuple(layer for layer in sorted(self._states) if not self._there[layer][index])
        if missing:
            computed = self._extractor(self._dataset.sequence(index).tokens, missing)
            for layer, states in zip(missing, np.split(computed, len(missing), axis=-1), strict=True):
                _store(self._states[layer], int(start), states)
                _store(self._there[layer], index, np.ones(1))
        return np.concatenate([self._states[layer][start : start + length] for layer in self._layers], axis=-1)


def _check_manifest(directory: Path, settings: dict[str, str], dataset: Dataset) -> None:
    manifest, sequences = directory / "target.json", directory / "sequences.npy"
    way_out = "give another data.features, or remove that directory"
    if manifest.exists():
        if changed := difference(read_manifest(manifest), settings):
            raise ConfigError(f"the features in {directory} are not those of this run ({changed}); {way_out}")
        recorded = _recorded_hashes(sequences, way_out)
        if not np.array_equal(recorded, dataset.hashes[: len(recorded)]):
            raise ConfigError(
                f"the features in {directory} are of other sequences than those of data.path; sequences may be added "
                f"after the old ones, but not changed: {way_out}"
            )
        if len(recorded) == len(dataset.hashes):
            return
    elif any(directory.glob("layer-*")):
        raise ConfigError(f"the features in {directory} have no {manifest.name} to say what they are of; {way_out}")
    replace_array(sequences, dataset.hashes)
    write_manifest(manifest, settings)


def _recorded_hashes(sequences: Path, way_out: str) -> UInt64[np.ndarray, " sequences"]:
    try:
        return np.load(sequences)
    except (OSError, ValueError, EOFError) as error:
        raise ConfigError(f"{sequences} is damaged ({error}); {way_out}") from None


def _store(mapped: np.memmap, start: int, values: np.ndarray) -> None:
    """Sets `mapped[start:]` to the values."""
    assert mapped.filename is not None
    write_at(Path(mapped.filename), start * mapped.strides[0], values.astype(mapped.dtype).tobytes())


def write_at(file: Path, offset: int, content: bytes) -> None:
    """Writes into a file. On a full disk this raises OSError, where mapped memory would end the process.

    Raises:
      OSError: it cannot be written.
    """
    with file.open("r+b", buffering=0) as stream:
        stream.seek(offset)
        while content:
            content = content[stream.write(content) :]


def _grow(file: Path, shape: tuple[int, ...], dtype: np.typing.DTypeLike) -> np.memmap:
    """Maps a file, made or extended to this size with zeros. Zeros take no disk."""
    with file.open("ab") as stream:
        stream.truncate(int(np.prod(shape)) * np.dtype(dtype).itemsize)
    return np.memmap(file, dtype, "r+", shape=shape)
