"""What a draft guesses from its own context and from others: the training forward on recorded rounds."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

from dflash_jax.analysis.rounds import Rounds
from dflash_jax.engine import Models
from dflash_jax.kernels.compact import is_compact, widened
from dflash_jax.models.config import DraftConfig, TargetConfig
from dflash_jax.models.matrix import map_matrices
from dflash_jax.models.weights import DraftParams, TargetParams
from dflash_jax.training.data.batch import Batch
from dflash_jax.training.data.features import run_sequences
from dflash_jax.training.objective.anchors import Anchors
from dflash_jax.training.objective.losses import default_gamma, draft_loss
from dflash_jax.training.objective.metrics import metric_means
from dflash_jax.training.objective.sampled_softmax import whole_vocabulary
from dflash_jax.training.objective.shared_weights import SharedWeights, shared_weights

_PAD = 64
"""Lengths are padded to a multiple of this, so that few programs are compiled."""


@dataclasses.dataclass(frozen=True)
class Places:
    """Rounds to guess at: one anchor each, followed by a whole block of tokens that are known.

    Attributes:
      tokens: the text that each is in, padded.
      lengths: of the texts.
      anchors: position of each anchor.
      text: which text each is in.
      kept: drafted tokens that the engine kept in the round.
    """

    tokens: Int[np.ndarray, "places length"]
    lengths: Int[np.ndarray, " places"]
    anchors: Int[np.ndarray, " places"]
    text: Int[np.ndarray, " places"]
    kept: Int[np.ndarray, " places"]

    def __len__(self) -> int:
        return len(self.anchors)


def choose_places(
    texts: Sequence[Sequence[int]], prompts: Sequence[int], rounds: Rounds, drafts: int, most: int = 32
) -> Places:
    """Rounds of a record at which a draft can be tried, spread evenly over it.

    Args:
      texts: prompt and output of each request.
      prompts: tokens of each prompt.
      rounds: of the requests.
      drafts: tokens of a whole block after its anchor.
      most: places, at most.
    """
    # The anchor is the last token before the round's.
    anchors = np.array(prompts, int)[rounds.request] + rounds.start - 1
    lengths = np.array([len(text) for text in texts], int)
    fitting = np.flatnonzero((anchors + drafts < lengths[rounds.request]) & (rounds.verified >= drafts) & ~rounds.cut)
    chosen = (
        fitting[np.unique(np.linspace(0, len(fitting) - 1, min(most, len(fitting))).astype(int))]
        if len(fitting)
        else fitting
    )
    width = -(-max(map(len, texts), default=1) // _PAD) * _PAD
    padded = np.zeros((len(texts), width), np.int32)
    for row, text in enumerate(texts):
        padded[row, : len(text)] = text
    of = rounds.request[chosen]
    return Places(padded[of], lengths[of], anchors[chosen], of, rounds.kept[chosen])


class Controls:
    """A draft tried at the same places with other contexts, layers, masks and configs.

    Args:
      models: target and draft, as an engine has them.
      places: where.
      layers: all target layers whose states may be wanted.
    """

    def __init__(self, models: Models, places: Places, layers: Sequence[int]):
        assert models.draft_config is not None and isinstance(models.draft, DraftParams)
        self.config, self.places = models.draft_config, places
        self._layers = tuple(sorted(set(layers)))
        laid_out = map_matrices(lambda matrix: matrix.laid_out("in_out"), models.draft)
        self._params = jax.tree.map(lambda leaf: jnp.asarray(widened(leaf), jnp.float32), laid_out, is_leaf=is_compact)
        shared = shared_weights(models.target, "float32")
        self._shared = SharedWeights(shared.embedding.astype(jnp.float32), shared.head)
        self._states = self._run_target(models.target, models.target_config)

    def _run_target(self, params: TargetParams, config: TargetConfig) -> Float[np.ndarray, "places length features"]:
        texts, first = np.unique(self.places.text, return_index=True)
        states = {
            int(text): np.asarray(
                _features(params, config, jnp.asarray(self.places.tokens[at : at + 1]), self._layers)[0]
            )
            for text, at in zip(texts, first, strict=True)
        }
        return np.stack([states[int(text)] for text in self.places.text]).astype(np.float32)

    def features(self, layers: Sequence[int] | None = None) -> Float[np.ndarray, "places length features"]:
        """The target's states after some layers, the draft's own by default."""
        size = self.config.hidden_size
        ids = self.config.target_layer_ids if layers is None else layers
        parts = [self._layers.index(layer) * size for layer in ids]
        return np.concatenate([self._states[..., part : part + size] for part in parts], axis=-1)

    def zeroed(self) -> Float[np.ndarray, "places length features"]:
        """No context: zeros in the place of every feature."""
        return np.zeros_like(self.features())

    def shuffled(self, seed: int = 0) -> Float[np.ndarray, "places length features"]:
        """The right context in another order: the features before each anchor exchange places."""
        rng, features = np.random.default_rng(seed), self.features().copy()
        for row, anchor in enumerate(self.places.anchors):
            features[row, :anchor] = features[row, rng.permutation(anchor)]
        return features

    def others(self) -> Float[np.ndarray, "places length features"] | None:
        """Somebody else's context, of the same length; None if all places are in one text, or no other is as long."""
        features = self.features()
        swapped = features.copy()
        for row, anchor in enumerate(self.places.anchors):
            other = np.flatnonzero((self.places.text != self.places.text[row]) & (self.places.lengths >= anchor))
            if not len(other):
                return None
            swapped[row, :anchor] = features[other[row % len(other)], :anchor]
        return swapped

    def acceptance(
        self,
        features: Float[np.ndarray, "places length features"] | None = None,
        *,
        mask_token_id: int | None = None,
        config: DraftConfig | None = None,
    ) -> float:
        """Mean acceptance length over the places, as training counts it: 1 + the tokens before the first wrong one.

        Args:
          features: the context; the right one by default.
          mask_token_id: in place of the draft's.
          config: in place of the draft's.
        """
        shared = self._shared
        if mask_token_id is not None:
            # As another embedding of the same mask: another id in the config would have to be compiled.
            embedding = shared.embedding.at[self.config.mask_token_id].set(shared.embedding[mask_token_id])
            shared = SharedWeights(embedding, shared.head)
        batch = Batch(
            tokens=jnp.asarray(self.places.tokens),
            prompt_lens=jnp.asarray(self.places.anchors, jnp.int32),
            seq_lens=jnp.asarray(self.places.lengths, jnp.int32),
            features=jnp.asarray(self.features() if features is None else features),
        )
        anchors = Anchors(jnp.asarray(self.places.anchors[:, None], jnp.int32), jnp.ones((len(self.places), 1), bool))
        found = metric_means(_evaluate(self._params, config or self.config, shared, batch, anchors))["acceptance"]
        assert isinstance(found, float)
        return found


@functools.partial(jax.jit, static_argnums=(1, 3))
def _features(params, config, tokens, layers):
    return run_sequences(params, config, tokens, layers).features


@functools.partial(jax.jit, static_argnums=1)
def _evaluate(params, config, shared, batch, anchors):
    gamma = default_gamma(config.block_size)
    subset = whole_vocabulary(config.vocab_size)
    return draft_loss(params, config, shared, batch, anchors, subset, gamma=gamma, selector_weight=1.0)[1]
