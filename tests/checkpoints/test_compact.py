"""Weights that are held as a checkpoint stores them are those that it would be widened to, everywhere they are used."""

from __future__ import annotations

import dataclasses
import json

import gguf
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from dflash_jax.checkpoints import load_target, restore_params, save_params, save_target
from dflash_jax.checkpoints.table import param_at, table
from dflash_jax.engine.identity import identify
from dflash_jax.engine.state import Models
from dflash_jax.errors import CheckpointError, ConfigError
from dflash_jax.kernels.compact import Compact, rounded
from dflash_jax.models.lm_head import make_shortlist
from dflash_jax.models.matrix import Matrix
from dflash_jax.training.data.features import fingerprint
from tests.checkpoints.test_gguf import LLAMA, Kind, write_gguf
from tests.checkpoints.test_quantised import compressed, fp8_blocks, fp8_scaled, quantise, saved

WIDE = dataclasses.replace(LLAMA, hidden_size=64, intermediate_size=96, attention_bias=True)


def compact_leaves(params):
    nodes = jax.tree.leaves(params, is_leaf=lambda node: isinstance(node, Compact))
    return [node for node in nodes if isinstance(node, Compact)]


def assert_same_values(found, expected, config):
    for leaf in table(config):
        np.testing.assert_array_equal(param_at(found, leaf.path), param_at(expected, leaf.path), err_msg=leaf.path)


@pytest.mark.parametrize(
    "kind",
    [Kind.F16, Kind.BF16, Kind.Q8_0, Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1],
    ids=lambda kind: kind.name,
)
def test_a_gguf_file_is_held_as_it_is(models, tmp_path, kind):
    file = write_gguf(tmp_path / "m.gguf", WIDE, models.params(WIDE), kind)
    held, widened = load_target(file, weights="file").params, load_target(file).params
    assert_same_values(held, widened, WIDE)
    assert isinstance(held.embedding, Compact) and held.embedding.format == kind.name
    assert all(
        isinstance(part.weight.value, Compact)
        for layer in held.layers
        for part in (layer.attention.q_proj, layer.attention.o_proj, layer.mlp.down_proj)
    )
    block, size = gguf.GGML_QUANT_SIZES[kind]
    for matrix in compact_leaves(held):
        assert matrix.nbytes == matrix.size // block * size
    assert compact_leaves(widened) == []


@pytest.mark.parametrize("kind", [Kind.Q4_K, Kind.Q5_K, Kind.Q6_K])
def test_k_quants_are_held_as_they_are(models, tmp_path, kind):
    config = dataclasses.replace(LLAMA, hidden_size=256)
    size, name = gguf.GGML_QUANT_SIZES[kind][1], "token_embd.weight"
    data = np.random.default_rng(1).integers(0, 256, (config.vocab_size, size), np.uint8)
    for at in (208,) if kind == Kind.Q6_K else (0, 2):
        data[:, at : at + 2] = np.array([0.01], np.float16).view(np.uint8)
    file = write_gguf(tmp_path / "m.gguf", config, models.params(config), extra=[(name, data, kind)], skip=[name])
    held = load_target(file, weights="file").params
    assert held.embedding.format == kind.name
    assert_same_values(held, load_target(file).params, config)


def int8_rows(base, weight):
    scales = (np.abs(weight).max(1, keepdims=True) / 127).astype(np.float32)
    values = np.round(weight / scales).astype(np.int8)
    return {f"{base}.weight": values, f"{base}.weight_scale": scales}, values.astype(np.float32) * scales


@pytest.mark.parametrize(
    ("settings", "change", "are_compact"),
    [
        ({"quant_method": "fp8"}, fp8_scaled("tensor", "weight_scale_inv"), True),
        ({"quant_method": "fp8"}, fp8_scaled("one"), True),
        (compressed("channel"), fp8_scaled("row"), True),
        (compressed("channel", kind="int", format="int-quantized"), int8_rows, True),
        ({"quant_method": "fp8", "weight_block_size": [5, 1000]}, fp8_blocks(5, 1000, ml_dtypes.bfloat16), True),
        ({"quant_method": "fp8", "weight_block_size": [5, 16]}, fp8_blocks(5, 16), True),
        ({"quant_method": "fp8", "weight_block_size": [5, 6]}, fp8_blocks(5, 6), False),
    ],
    ids=["tensor", "one", "row", "int8", "rows of blocks", "blocks", "blocks that vectors do not fit"],
)
def test_eight_bits_of_hugging_face_are_held_as_they_are(models, tmp_path, settings, change, are_compact):
    directory = saved(models, tmp_path / "m")
    expected = quantise(directory, settings, change)
    held, widened = load_target(directory, weights="file"), load_target(directory)
    assert_same_values(held.params, widened.params, held.config)
    assert len(compact_leaves(held.params)) == (len(expected) if are_compact else 0)


def stored_as(directory, dtype):
    """Rewrites a saved model's tensors in a dtype."""
    file = directory / "model.safetensors"
    save_file({name: array.astype(dtype) for name, array in load_file(file).items()}, file)
    return directory


@pytest.mark.parametrize(("dtype", "format"), [(ml_dtypes.bfloat16, "BF16"), (np.float16, "F16")])
def test_floats_of_16_bits_are_held_as_they_are(models, tmp_path, dtype, format):
    directory = stored_as(saved(models, tmp_path / "m"), dtype)
    held, widened = load_target(directory, weights="file"), load_target(directory)
    assert_same_values(held.params, widened.params, held.config)
    assert {matrix.format for matrix in compact_leaves(held.params)} == {format}
    # They are what bfloat16 activations are multiplied by anyway.
    assert bool(compact_leaves(load_target(directory, "bfloat16", weights="file").params)) == (format == "F16")


def test_weights_of_bfloat16_serve_activations_of_float32(models, tmp_path):
    held = load_target(saved(models, tmp_path / "m"), weights="bfloat16")
    short = load_target(tmp_path / "m", "bfloat16").params
    assert held.params.embedding.dtype == jnp.float32 and held.params.norm.dtype == jnp.float32
    for leaf in table(held.config):
        if leaf.may_be_compact:
            expected = np.asarray(param_at(short, leaf.path), np.float32)
            np.testing.assert_array_equal(param_at(held.params, leaf.path), expected)
    saved_params = save_params(tmp_path / "orbax", held.config, load_target(tmp_path / "m").params)
    again = load_target(saved_params, weights="bfloat16")
    assert_same_values(again.params, held.params, held.config)


def assert_rounded(found, exact, config):
    """Each weight of a matrix is within half a step of its group of 32, all else the same."""
    for leaf in table(config):
        array, expected = (np.asarray(param_at(params, leaf.path)) for params in (found, exact))
        if leaf.may_be_compact:
            array, expected = (each if leaf.looked_up else each.T for each in (array, expected))
            largest = [np.abs(part).max(1) for part in np.split(expected, range(32, expected.shape[1], 32), axis=1)]
            steps = np.repeat(np.stack(largest, 1) / 127, 32, axis=1)[:, : expected.shape[1]]
            assert (np.abs(array - expected) <= steps * 0.5001).all(), leaf.path
            assert (array != expected).any(), leaf.path
        else:
            np.testing.assert_array_equal(array, expected, err_msg=leaf.path)


@pytest.mark.parametrize("kept_as", ["hugging face", "orbax"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_are_rounded_to_8_bits_where_that_is_asked_for(models, tmp_path, kept_as, dtype):
    directory = saved(models, tmp_path / "m")
    exact = load_target(directory)
    if kept_as == "orbax":
        directory = save_params(tmp_path / "orbax", exact.config, exact.params)
    found = load_target(directory, dtype, weights="int8")
    assert all(leaf.codes.dtype == jnp.int8 and leaf.dtype == dtype for leaf in compact_leaves(found.params))
    assert len(compact_leaves(found.params)) == sum(leaf.may_be_compact for leaf in table(exact.config))
    if dtype == "float32":
        assert_rounded(found.params, exact.params, exact.config)


def test_what_is_stored_in_few_bits_is_not_rounded_again(models, tmp_path):
    file = write_gguf(tmp_path / "m.gguf", WIDE, models.params(WIDE), Kind.Q4_1)
    assert_same_values(load_target(file, weights="int8").params, load_target(file).params, WIDE)


def test_groups_of_zeros_and_of_the_smallest_numbers_are_rounded_to_zeros():
    matrix = np.zeros((2, 40), np.float32)
    matrix[1, :3] = 1e-45, -1e-42, 3e-39
    matrix[1, 32:] = -2.5
    found = np.asarray(rounded(matrix).astype(jnp.float32))
    np.testing.assert_allclose(found, np.where(np.abs(matrix) > 1, matrix, 0), rtol=1e-6)


def test_weights_of_float32_need_activations_of_float32(models, tmp_path):
    directory = saved(models, tmp_path / "m")
    with pytest.raises(ConfigError, match="weights of float32 need activations of float32"):
        load_target(directory, "bfloat16", weights="float32")
    with pytest.raises(ConfigError, match=r"target.weights is 'int4'; it must be one of 'file', 'float32', 'bfloat16'"):
        load_target(directory, weights="int4")


def test_they_are_saved_widened(models, tmp_path):
    file = write_gguf(tmp_path / "m.gguf", WIDE, models.params(WIDE), Kind.Q4_1)
    held, widened = load_target(file, weights="file"), load_target(file)
    save_target(tmp_path / "hf", held.config, held.params)
    assert_same_values(load_target(tmp_path / "hf").params, widened.params, WIDE)
    _, restored = restore_params(save_params(tmp_path / "orbax", held.config, held.params))
    assert_same_values(restored, widened.params, WIDE)


def test_a_model_is_the_same_however_its_weights_are_held(models, tmp_path):
    file = write_gguf(tmp_path / "m.gguf", WIDE, models.params(WIDE), Kind.Q4_1)
    held, widened = (load_target(file, weights=weights).params for weights in ("file", None))
    assert identify(Models(held, WIDE)) == identify(Models(widened, WIDE))
    assert fingerprint(held, WIDE) == fingerprint(widened, WIDE)
    other = held.replace(embedding=held.embedding.replace(codes=held.embedding.codes.at[3, 7].add(1)))
    assert identify(Models(other, WIDE)) != identify(Models(widened, WIDE))


def test_a_shortlist_of_the_head_is_kept_as_the_head_is(models, tmp_path):
    file = write_gguf(tmp_path / "m.gguf", WIDE, models.params(WIDE), Kind.Q8_0)
    held, widened = (load_target(file, weights=weights).params for weights in ("file", None))
    short = make_shortlist(held, [5, 1, 9]).weight
    assert isinstance(short, Matrix) and short.is_compact
    np.testing.assert_array_equal(short.out_in, make_shortlist(widened, [5, 1, 9]).weight.out_in)


@pytest.mark.parametrize("bits", [0x7C00, 0x7E00])
def test_scales_that_are_not_finite_are_refused_with_the_tensors_name(models, tmp_path, bits):
    name, size = "token_embd.weight", gguf.GGML_QUANT_SIZES[Kind.Q4_1][1]
    data = np.zeros((WIDE.vocab_size, 2 * size), np.uint8)
    data[4, size : size + 2] = np.array([bits], np.uint16).view(np.uint8)
    file = write_gguf(tmp_path / "m.gguf", WIDE, models.params(WIDE), extra=[(name, data, Kind.Q4_1)], skip=[name])
    with pytest.raises(CheckpointError, match=r"'token_embd.weight' in .* at \[4, 32\], which is not finite"):
        load_target(file, weights="file")


def test_codes_that_are_no_numbers_are_refused_with_the_tensors_name(models, tmp_path):
    directory = saved(models, tmp_path / "m")

    def change(base, weight):
        parts, meant = fp8_scaled("row")(base, weight)
        if base.endswith("down_proj"):
            parts[f"{base}.weight"] = parts[f"{base}.weight"].copy()
            parts[f"{base}.weight"][1, 2] = np.nan
        return parts, meant

    quantise(directory, compressed("channel"), change)
    assert json.loads((directory / "config.json").read_text())["quantization_config"]
    with pytest.raises(CheckpointError, match=r"down_proj.weight' in .* at \[1, 2\], which is not finite"):
        load_target(directory, weights="file")
