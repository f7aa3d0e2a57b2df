import dataclasses
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from dflash_jax.checkpoints import describe, load_draft, load_target, save_draft, save_target
from dflash_jax.errors import CheckpointError, ConfigError


def rewrite(directory, change):
    file = directory / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})


@pytest.mark.parametrize("shard_bytes", [10**9, 2000], ids=["one-file", "sharded"])
@pytest.mark.parametrize("name", ["qwen3", "llama", "qwen3_moe", "qwen3_5", "qwen3_5_moe", "qwen3_next"])
def test_target_comes_back_as_it_was_saved(models, tmp_path, name, shard_bytes):
    config, params = models.targets[name], models.params(models.targets[name])
    save_target(tmp_path / "t", config, params, "float32", max_shard_bytes=shard_bytes)
    shards = list((tmp_path / "t").glob("*.safetensors"))
    assert (len(shards) > 2) == (shard_bytes == 2000)
    loaded = load_target(tmp_path / "t")
    assert loaded.config == config
    assert loaded.tokenizer is None
    models.assert_same(loaded.params, params)


@pytest.mark.parametrize("name", ["dflash1", "dflash2"])
def test_draft_comes_back_as_it_was_saved(models, tmp_path, name):
    config, params = models.drafts[name], models.params(models.drafts[name])
    save_draft(tmp_path / "d", config, params, "float32")
    loaded = load_draft(tmp_path / "d")
    assert loaded.config == config
    models.assert_same(loaded.params, params)


@pytest.mark.parametrize("name", ["recall-dflash1", "recall-dflash2", "recall-dflash2-swa"])
def test_exported_draft_has_the_tensors_of_the_published_one(golden, tmp_path, name):
    loaded = load_draft(golden / name)
    save_draft(tmp_path / "d", loaded.config, loaded.params, "float32")
    exported = load_file(tmp_path / "d" / "model.safetensors")
    published = load_file(golden / name / "model.safetensors")
    # The reference's `from_pretrained` adds ".weight" to codebooks, so they must come without.
    published = {key.replace("codebook.weight", "codebook"): value for key, value in published.items()}
    assert exported.keys() == published.keys()
    for key, value in published.items():
        np.testing.assert_array_equal(exported[key], value, err_msg=key)


def test_bfloat16_is_stored_and_read_without_torch(models, tmp_path):
    config, params = models.targets["qwen3"], models.params(models.targets["qwen3"])
    save_target(tmp_path / "t", config, params, "bfloat16")
    assert describe(tmp_path / "t").dtypes.keys() == {"BF16"}
    models.assert_same(
        load_target(tmp_path / "t", "bfloat16").params, jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
    )
    assert load_target(tmp_path / "t").params.norm.dtype == jnp.float32


def test_linear_weights_are_transposed(models, tmp_path):
    config, params = models.targets["qwen3"], models.params(models.targets["qwen3"])
    save_target(tmp_path / "t", config, params)
    stored = load_file(tmp_path / "t" / "model.safetensors")["model.layers.1.mlp.down_proj.weight"]
    assert stored.shape == (config.hidden_size, config.intermediate_size)
    np.testing.assert_array_equal(stored.T, params.layers[1].mlp.down_proj.weight.value)


def test_draft_with_a_prefix_and_codebook_weights_loads_the_same(models, tmp_path):
    config, params = models.drafts["dflash2"], models.params(models.drafts["dflash2"])
    save_draft(tmp_path / "d", config, params)

    def rename(tensors):
        for key in list(tensors):
            tensors[f"model.{key}" + (".weight" if key.endswith("codebook") else "")] = tensors.pop(key)

    rewrite(tmp_path / "d", rename)
    models.assert_same(load_draft(tmp_path / "d").params, params)


def test_fused_experts_load_the_same(models, tmp_path):
    config, params = models.targets["qwen3_moe"], models.params(models.targets["qwen3_moe"])
    save_target(tmp_path / "t", config, params)

    def fuse(tensors):
        prefix = "model.layers.0.mlp.experts"

        def take(part):
            return np.stack([tensors.pop(f"{prefix}.{expert}.{part}.weight") for expert in range(3)])

        tensors[f"{prefix}.gate_up_proj"] = np.concatenate([take("gate_proj"), take("up_proj")], axis=1)
        tensors[f"{prefix}.down_proj"] = take("down_proj")

    rewrite(tmp_path / "t", fuse)
    models.assert_same(load_target(tmp_path / "t").params, params)


def test_harmless_extras_are_ignored(models, tmp_path):
    config, params = models.targets["llama"], models.params(models.targets["llama"])
    save_target(tmp_path / "t", config, params)

    def add(tensors):
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(4, np.float32)

    rewrite(tmp_path / "t", add)
    loaded = load_target(tmp_path / "t").params
    models.assert_same(loaded, params)
    assert loaded.lm_head is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda t: t.pop("layers.1.mlp.up_proj.weight"),
            r"'layers.1.mlp.up_proj.weight' of shape \[20, 16\] is missing",
        ),
        (
            lambda t: t.update({"layers.2.oops": np.ones(3, np.float32)}),
            r"'layers.2.oops' of shape \[3\] in .*model.safetensors is no part",
        ),
        (
            lambda t: t.update({"fc.weight": np.ones((16, 31), np.float32)}),
            r"'fc.weight' in .*model.safetensors has shape \[16, 31\].*\[16, 32\]",
        ),
        (lambda t: t.update({"norm.weight": np.ones(16, np.int8)}), "'norm.weight' in .* is of dtype I8"),
    ],
    ids=["missing", "unexpected", "misshapen", "not-float"],
)
def test_wrong_tensor_is_named(models, tmp_path, change, message):
    save_draft(tmp_path / "d", models.drafts["dflash2"], models.params(models.drafts["dflash2"]))
    rewrite(tmp_path / "d", change)
    with pytest.raises(CheckpointError, match=message):
        load_draft(tmp_path / "d")


def test_directory_without_weights_or_config_says_what_is_missing(models, golden, tmp_path):
    with pytest.raises(CheckpointError, match=r"config\.json is missing"):
        load_target(tmp_path)
    shutil.copy(golden / "recall-target" / "config.json", tmp_path)
    with pytest.raises(CheckpointError, match=r"neither model\.safetensors nor model\.safetensors\.index\.json"):
        load_target(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"garbage")
    with pytest.raises(CheckpointError, match="cannot be read as safetensors"):
        load_target(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match="not valid JSON"):
        load_target(tmp_path)


def test_broken_shards_are_named(models, tmp_path):
    config, params = models.targets["qwen3"], models.params(models.targets["qwen3"])
    save_target(tmp_path / "t", config, params, max_shard_bytes=4000)
    index = tmp_path / "t" / "model.safetensors.index.json"
    fields = json.loads(index.read_text())
    first = fields["weight_map"]["model.embed_tokens.weight"]
    fields["weight_map"]["model.ghost"] = first
    index.write_text(json.dumps(fields))
    with pytest.raises(CheckpointError, match=r"'model.ghost' is missing from"):
        load_target(tmp_path / "t")
    (tmp_path / "t" / first).unlink()
    with pytest.raises(CheckpointError, match=f"names the shard '{first}'"):
        load_target(tmp_path / "t")
    index.write_text("{}")
    with pytest.raises(CheckpointError, match="not a safetensors index"):
        load_target(tmp_path / "t")


def test_unknown_dtype_is_refused(golden):
    with pytest.raises(ConfigError, match="'float16'"):
        load_target(golden / "recall-target", "float16")


def test_nothing_is_overwritten_or_left_half_written(models, tmp_path):
    config, params = models.drafts["dflash1"], models.params(models.drafts["dflash1"])
    save_draft(tmp_path / "d", config, params)
    with pytest.raises(CheckpointError, match="already exists"):
        save_draft(tmp_path / "d", config, params)
    with pytest.raises(CheckpointError, match=r"mlp\.gate_proj\.weight is of shape \[16, 20\]"):
        save_draft(tmp_path / "e", dataclasses.replace(config, intermediate_size=21), params)
    assert [path.name for path in tmp_path.iterdir()] == ["d"]


def test_description_counts_what_is_there(golden):
    found = describe(golden / "recall-dflash2-swa")
    tensors = load_file(golden / "recall-dflash2-swa" / "model.safetensors")
    assert found.parameters == sum(tensor.size for tensor in tensors.values())
    assert found.bytes_on_disk == sum(file.stat().st_size for file in (golden / "recall-dflash2-swa").iterdir())
    assert (found.architecture, found.role, found.format) == ("DFlash2DraftModel", "draft", "safetensors")
    assert found.dtypes == {"F32": len(tensors)}
    assert found.config.layers[0].window == 24
    assert describe(golden / "recall-target").role == "target"
