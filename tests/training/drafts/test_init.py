"""Fresh drafts start as plain DFlash, and scaling features changes nothing but the optimiser's view."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from dflash_jax.errors import ConfigError
from dflash_jax.training.config import DraftSection, InitSection
from dflash_jax.training.drafts.feature_scale import feature_scale, scale_features, unscale_features
from dflash_jax.training.drafts.init import fresh_params
from dflash_jax.training.drafts.start import fresh_config
from dflash_jax.training.objective.forward import block_hidden
from dflash_jax.training.objective.losses import selector_scores
from dflash_jax.training.run.state import initial_state
from tests.training.recall import MASK, target

SECTION = DraftSection(num_layers=2, block_size=4, mask_token_id=MASK, target_layer_ids=(0, 2), selector_rank=8)


DEFAULT = InitSection()


def fresh(init: InitSection = DEFAULT, section: DraftSection = SECTION):
    loaded = target()
    config = fresh_config(section, loaded.config)
    return config, fresh_params(jax.random.key(0), config, init, loaded.params, loaded.config)


def hidden(config, params, features):
    anchors = jnp.array([[5, 9]], jnp.int32)
    return block_hidden(params, config, target().params.embedding, features, anchors, jnp.array([[1, 2]], jnp.int32))


@pytest.mark.parametrize("layers", ["random", "target"])
def test_a_fresh_dflash2_draft_computes_what_the_plain_one_does(layers):
    config, params = fresh(InitSection(layers=layers))
    features = jax.random.normal(jax.random.key(1), (1, 16, 256))
    plain = params.replace(
        layers=tuple(layer.replace(attention_conv=None, mlp_conv=None) for layer in params.layers), selector=None
    )
    plain_config = dataclasses.replace(config, conv=None, selector=None)
    np.testing.assert_allclose(
        hidden(config, params, features), hidden(plain_config, plain, features), rtol=1e-5, atol=1e-5
    )
    states = jax.random.normal(jax.random.key(2), (3, 128))
    head = target().params.embedding
    candidates = jnp.array([[1, 2], [3, 4], [5, 6]], jnp.int32)
    scores = selector_scores(params.selector, config, head, states, jnp.array([7, 8, 9], jnp.int32), candidates)
    np.testing.assert_allclose(scores, jnp.einsum("nh,nkh->nk", states, head[candidates]), rtol=1e-5)


def test_layers_are_the_targets_last_ones():
    _, params = fresh(InitSection(layers="target"))
    for layer, source in zip(params.layers, target().params.layers[-2:], strict=True):
        np.testing.assert_array_equal(layer.attention.v_proj.weight.value, source.attention.v_proj.weight.value)
        np.testing.assert_array_equal(layer.mlp.down_proj.weight.value, source.mlp.down_proj.weight.value)
    np.testing.assert_array_equal(params.norm, target().params.norm)


def test_a_narrower_mlp_keeps_the_strongest_neurons():
    _, params = fresh(InitSection(layers="target"), SECTION.model_copy(update={"intermediate_size": 32}))
    source = target().params.layers[-1].mlp
    strength = np.linalg.norm(source.up_proj.weight.value, axis=0) * np.linalg.norm(
        source.down_proj.weight.value, axis=1
    )
    kept = np.sort(np.argsort(-strength)[:32])
    np.testing.assert_array_equal(params.layers[-1].mlp.gate_proj.weight.value, source.gate_proj.weight.value[:, kept])


def test_the_second_tap_lets_the_first_mask_see_the_anchor():
    config, params = fresh(InitSection(second_tap=0.5))
    assert np.all(params.layers[0].attention_conv.base_kernel[0, 1] == 0.5)
    assert np.all(params.layers[0].attention_conv.base_kernel[1, 1] == 0)
    assert config.conv.taps == 2


def test_scaled_features_give_every_channel_unit_size_whatever_first_tokens_do():
    sample = np.random.default_rng(0).normal(size=(400, 3)).astype(np.float32) * [1.0, 50.0, 1000.0]
    sample[0] = 1e6
    np.testing.assert_allclose(feature_scale([sample]), [1.0, 50.0, 1000.0], rtol=0.2)


def test_a_draft_of_scaled_features_is_the_same_as_one_of_raw_features():
    config, params = fresh()
    scale = jnp.exp(jax.random.normal(jax.random.key(4), (256,)))
    features = jax.random.normal(jax.random.key(1), (1, 16, 256)) * scale
    raw = unscale_features(params, scale)
    np.testing.assert_allclose(
        hidden(config, raw, features), hidden(config, params, features / scale), rtol=1e-4, atol=1e-4
    )
    np.testing.assert_allclose(scale_features(raw, scale).fc.value, params.fc.value, rtol=1e-6)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mask_token_id": None}, "mask_token_id is missing"),
        ({"windows": (8,)}, "1 entries for 2 layers"),
        ({"target_layer_ids": (0, 4)}, "name layers the target does not have"),
        ({"conv_group_size": 7}, "does not divide hidden_size"),
    ],
)
def test_shapes_that_cannot_work_are_refused(change, message):
    with pytest.raises(ConfigError, match=message):
        fresh(section=SECTION.model_copy(update=change))


def test_every_step_draws_from_a_key_of_its_own():
    _, params = fresh()
    state = initial_state(params, optax.identity(), jax.random.key(3))
    keys = [jax.random.key_data(state.replace(step=jnp.asarray(step)).step_key()).tolist() for step in (0, 1, 2)]
    assert len({tuple(key) for key in keys}) == 3
