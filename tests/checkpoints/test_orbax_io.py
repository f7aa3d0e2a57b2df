import jax
import jax.numpy as jnp
import pytest

from dflash_jax.checkpoints import describe, load_draft, load_target, restore_params, save_params
from dflash_jax.errors import CheckpointError


@pytest.mark.parametrize("name", ["llama", "qwen3_moe", "qwen3_5", "qwen3_5_moe", "qwen3_next", "dflash1", "dflash2"])
def test_params_come_back_bit_for_bit(models, tmp_path, name):
    config = {**models.targets, **models.drafts}[name]
    params = models.params(config)
    params = params.replace(norm=params.norm.astype(jnp.bfloat16))
    save_params(tmp_path / "p", config, params)
    found_config, found = restore_params(tmp_path / "p")
    assert found_config == config
    models.assert_same(found, params)


def test_saved_params_load_like_any_checkpoint(models, tmp_path):
    draft, target = models.drafts["dflash2"], models.targets["qwen3"]
    save_params(tmp_path / "d", draft, models.params(draft))
    save_params(tmp_path / "t", target, models.params(target))
    models.assert_same(load_draft(tmp_path / "d").params, models.params(draft))
    half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), models.params(target))
    models.assert_same(load_target(tmp_path / "t", "bfloat16").params, half)
    assert describe(tmp_path / "d").format == "orbax"


def test_existing_checkpoint_is_not_overwritten(models, tmp_path):
    draft = models.drafts["dflash1"]
    save_params(tmp_path / "d", draft, models.params(draft))
    with pytest.raises(CheckpointError, match="already exists"):
        save_params(tmp_path / "d", draft, models.params(draft))


def test_other_directories_are_refused(models, golden, tmp_path):
    with pytest.raises(CheckpointError, match="not a checkpoint of save_params"):
        restore_params(golden / "recall-target")
    draft = models.drafts["dflash1"]
    save_params(tmp_path / "d", draft, models.params(draft))
    for file in (tmp_path / "d" / "params").rglob("*"):
        if file.is_file():
            file.unlink()
    with pytest.raises(CheckpointError, match="missing, cut or changed"):
        restore_params(tmp_path / "d")
