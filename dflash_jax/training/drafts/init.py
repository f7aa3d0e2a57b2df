"""The weights that fresh drafts start from."""

from __future__ import annotations

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Key, PyTree

from dflash_jax.errors import ConfigError
from dflash_jax.models.config import (
    DraftConfig,
    GatedDeltaConfig,
    LayerConfig,
    TargetConfig,
    TransformerConfig,
)
from dflash_jax.models.matrix import Matrix, map_matrices
from dflash_jax.models.weights import (
    AttentionWeights,
    ConvWeights,
    DraftParams,
    GatedDeltaWeights,
    LayerWeights,
    Linear,
    MlpWeights,
    SelectorWeights,
    TargetParams,
)
from dflash_jax.training.config import InitSection

# In float32 with an optimiser's state, these take some hundred GB.
_MAX_WEIGHTS = 2**34


def fresh_params(
    key: Key[Array, ""], config: DraftConfig, section: InitSection, target: TargetParams, target_config: TargetConfig
) -> DraftParams:
    """Weights of a fresh draft, float32, for features of unit variance.

    Whatever the section says, a DFlash 2 draft starts with convolutions that do not depend on their input
    and a selector that leaves the unary scores alone.

    Raises:
      ConfigError: layers of the target are asked for that the draft cannot take.
    """
    keys = jax.random.split(key, config.num_layers + 2)
    hidden = config.hidden_size
    copied = section.layers == "target"
    if copied:
        if config.num_layers > len(target.layers):
            raise ConfigError(
                f"init.layers is 'target', but the draft has {config.num_layers} layers and the target "
                f"{len(target.layers)}; give it no more, or set init.layers to 'random'"
            )
        sources = target.layers[-config.num_layers :]
        layers = [_copied_layer(source, config, target_config) for source in sources]
    else:
        layers = [random_layer(key, config, section.scale) for key in keys[2:]]
    convolutions = _fresh_conv(config, section.second_tap)
    return DraftParams(
        fc=_fresh_fc(keys[0], config, section),
        hidden_norm=jnp.asarray(sources[0].input_norm, jnp.float32) if copied else jnp.ones(hidden),
        layers=tuple(layer.replace(attention_conv=convolutions, mlp_conv=convolutions) for layer in layers),
        norm=jnp.asarray(target.norm, jnp.float32) if copied else jnp.full(hidden, section.norm),
        selector=_fresh_selector(keys[1], config),
    )


def check_num_weights(what: str, make: Callable[[], PyTree]) -> None:
    """Raises ConfigError if fresh weights are more than can be trained; it does not compute them.

    Args:
      what: the name of the model in the error.
      make: makes the weights.
    """
    weights = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(jax.eval_shape(make)))
    if weights > _MAX_WEIGHTS:
        raise ConfigError(
            f"{what} has {weights:,} weights; {_MAX_WEIGHTS:,} can be trained at most, so make it smaller"
        )


def _random_matrix(key: Key[Array, ""], inputs: int, outputs: int, scale: float) -> Matrix:
    return Matrix(jax.random.normal(key, (inputs, outputs)) * (scale / inputs**0.5))


def _fresh_fc(key: Key[Array, ""], config: DraftConfig, section: InitSection) -> Matrix:
    hidden, layers = config.hidden_size, len(config.target_layer_ids)
    if section.fc == "last":
        return Matrix(jnp.eye(layers * hidden, hidden, k=-(layers - 1) * hidden))
    return _random_matrix(key, layers * hidden, hidden, section.scale)


def _fresh_conv(config: DraftConfig, second_tap: float) -> ConvWeights | None:
    if config.conv is None:
        return None
    taps, hidden = config.conv.taps, config.hidden_size
    base = jnp.zeros((2, taps, hidden)).at[:, 0].set(1.0)
    if taps > 1:
        base = base.at[0, 1].set(second_tap)
    return ConvWeights(base, Matrix(jnp.zeros((hidden, 2 * taps * (hidden // config.conv.group_size)))))


def _fresh_selector(key: Key[Array, ""], config: DraftConfig) -> SelectorWeights | None:
    if config.selector is None:
        return None
    codes, projection = jax.random.split(key)
    shape = (config.vocab_size, config.selector.rank)
    return SelectorWeights(
        predecessor_codebook=jax.random.normal(codes, shape),
        successor_codebook=jnp.zeros(shape),
        hidden_projection=_random_matrix(projection, config.hidden_size, config.selector.rank, 1.0),
    )


def random_layer(
    key: Key[Array, ""], config: TransformerConfig, scale: float, kind: LayerConfig | None = None
) -> LayerWeights:
    """A fresh layer with norms per head: matrices of standard deviation scale / sqrt(inputs), float32.

    Args:
      key: for what is drawn.
      config: of the model.
      scale: of its matrices.
      kind: what the layer is; attention and a dense MLP if none is given.
    """
    keys = jax.random.split(key, 7)
    hidden, inner = config.hidden_size, config.intermediate_size
    queries, cached = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim

    def drawn(index: int, inputs: int, outputs: int) -> Linear:
        return Linear(_random_matrix(keys[index], inputs, outputs, scale))

    mixer: AttentionWeights | GatedDeltaWeights
    if kind is not None and kind.gated_delta is not None:
        mixer = _random_delta(keys[:4], kind.gated_delta, hidden, scale)
    else:
        mixer = AttentionWeights(
            q_proj=drawn(0, hidden, 2 * queries if config.attention_gate else queries),
            k_proj=drawn(1, hidden, cached),
            v_proj=drawn(2, hidden, cached),
            o_proj=drawn(3, queries, hidden),
            q_norm=fresh_norm(config, config.head_dim),
            k_norm=fresh_norm(config, config.head_dim),
        )
    return LayerWeights(
        input_norm=fresh_norm(config, hidden),
        attention=mixer,
        post_attention_norm=fresh_norm(config, hidden),
        mlp=MlpWeights(drawn(4, hidden, inner), drawn(5, hidden, inner), drawn(6, inner, hidden)),
    )


def fresh_norm(config: TransformerConfig, channels: int) -> Float[Array, " channels"]:
    """The weights of a norm that scales nothing."""
    return jnp.zeros(channels) if config.zero_centred_norms else jnp.ones(channels)


_MOST_DECAY = 16.0


def _random_delta(keys: Key[Array, " keys"], delta: GatedDeltaConfig, hidden: int, scale: float) -> GatedDeltaWeights:
    """A fresh Gated DeltaNet; decays and their bias as transformers draws them, the convolution as torch does."""
    qkv, rest, conv, decay = keys
    z, b, a, out = jax.random.split(rest, 4)
    heads, bound = delta.num_value_heads, delta.conv_width**-0.5
    return GatedDeltaWeights(
        in_proj_qkv=_random_matrix(qkv, hidden, delta.channels, scale),
        in_proj_z=_random_matrix(z, hidden, delta.values, scale),
        in_proj_b=_random_matrix(b, hidden, heads, scale),
        in_proj_a=_random_matrix(a, hidden, heads, scale),
        conv=jax.random.uniform(conv, (delta.channels, delta.conv_width), minval=-bound, maxval=bound),
        a_log=jnp.log(jax.random.uniform(decay, (heads,), minval=0.01, maxval=_MOST_DECAY)),
        dt_bias=jnp.ones(heads),
        norm=jnp.ones(delta.value_dim),
        out_proj=_random_matrix(out, delta.values, hidden, scale),
    )


def _copied_layer(source: LayerWeights, config: DraftConfig, target: TargetConfig) -> LayerWeights:
    """A layer of the target as a layer of the draft, without biases."""
    if target.gated_delta_layers or target.attention_gate:
        raise ConfigError(
            "init.layers is 'target', but the target has Gated DeltaNet layers or a gate on its attention, which a "
            "draft does not have; set it to 'random'"
        )
    if not isinstance(source.mlp, MlpWeights):
        raise ConfigError(
            "init.layers is 'target', but the target's last layers are mixtures of experts, which a draft does not "
            "have; set it to 'random'"
        )
    if config.intermediate_size > target.intermediate_size:
        raise ConfigError(
            f"init.layers is 'target', but draft.intermediate_size {config.intermediate_size} is more than the "
            f"target's {target.intermediate_size}; make it smaller, or set init.layers to 'random'"
        )
    source = map_matrices(lambda matrix: matrix.laid_out("in_out"), source)
    source = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), source)
    dense, attention = source.mlp, source.attention
    assert isinstance(dense, MlpWeights)
    assert isinstance(attention, AttentionWeights)
    gate, up, down = (part.weight.in_out for part in (dense.gate_proj, dense.up_proj, dense.down_proj))
    strength = jnp.linalg.norm(up, axis=0) * jnp.linalg.norm(down, axis=1)
    kept = jnp.sort(jnp.argsort(-strength)[: config.intermediate_size])
    q_norm, k_norm = (
        norm if norm is not None else _typical_norm(source.input_norm, projection.weight.in_out, config.head_dim)
        for norm, projection in ((attention.q_norm, attention.q_proj), (attention.k_norm, attention.k_proj))
    )
    return LayerWeights(
        input_norm=source.input_norm,
        attention=AttentionWeights(
            q_proj=Linear(attention.q_proj.weight),
            k_proj=Linear(attention.k_proj.weight),
            v_proj=Linear(attention.v_proj.weight),
            o_proj=Linear(attention.o_proj.weight),
            q_norm=q_norm,
            k_norm=k_norm,
        ),
        post_attention_norm=source.post_attention_norm,
        mlp=MlpWeights(
            Linear(Matrix(gate[:, kept])),
            Linear(Matrix(up[:, kept])),
            Linear(Matrix(down[kept])),
        ),
    )


def _typical_norm(
    input_norm: Float[Array, " hidden"], projection: Float[Array, "hidden outputs"], head_dim: int
) -> Float[Array, " head_dim"]:
    """A draft normalises each head's queries and keys; this gives them back the size they have in the target."""
    size = jnp.sqrt(jnp.mean(jnp.sum(jnp.square(input_norm[:, None] * projection), axis=0)))
    return jnp.full(head_dim, size)
