"""RoPE scaling added to a config whose `max_position_embeddings` stayed small, in its file or in the user's."""

import dataclasses
import json
import shutil

import pytest

from dflash_jax.checkpoints import load_draft, load_target, save_target
from dflash_jax.checkpoints.hf_config import config_fields, target_config
from dflash_jax.engine import Engine
from dflash_jax.engine.config import EngineSetup
from dflash_jax.errors import ConfigError
from dflash_jax.jobs.config import JobConfig
from dflash_jax.models.config import RopeConfig
from dflash_jax.settings import parse
from tests.checkpoints.test_gguf import BASE, write_gguf
from tests.checkpoints.test_hf_config import target_fields


def limit(scaling, known=1000):
    return target_config(target_fields(max_position_embeddings=known, rope_scaling=scaling)).max_position


def test_the_limit_of_a_stretched_config_is_the_stretched_one():
    assert limit(None) == 1000
    assert limit({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 800}) == 3200
    assert limit({"rope_type": "yarn", "factor": 4.0}) == 4000
    assert limit({"type": "linear", "factor": 2.5}) == 2500
    llama3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 500}
    assert limit({"rope_type": "llama3", "factor": 2.0, **llama3}) == 1000


def test_a_config_that_was_stretched_already_keeps_its_limit():
    assert limit({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 250}) == 1000
    assert limit({"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 250}) == 1000


def test_a_stretched_context_fits_positions():
    assert limit({"type": "linear", "factor": 1e6}, known=2**31 - 1) == 2**31 - 1


@pytest.mark.parametrize("factor", [2.0, 3.3, 8.0, 1.0001])
@pytest.mark.parametrize("known", [1000, 1001, 40960, 0])
def test_a_stretched_config_survives_json(factor, known):
    fields = target_fields(max_position_embeddings=known, rope_scaling={"rope_type": "linear", "factor": factor})
    config = target_config(fields)
    assert target_config(json.loads(json.dumps(config_fields(config)))) == config


SCALING = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}


def test_the_users_scaling_stands_in_place_of_the_configs(golden):
    plain = load_target(golden / "recall-target").config
    stretched = load_target(golden / "recall-target", rope_scaling=SCALING).config
    assert plain.rope == RopeConfig(theta=10_000.0)
    assert (stretched.rope.kind, stretched.rope.factor, stretched.rope.theta) == ("yarn", 4.0, 10_000.0)
    assert (plain.max_position, stretched.max_position) == (4096, 16384)
    llama = load_target(golden / "tiny-llama-rope3-tied", rope_scaling={"rope_type": "default"}).config
    assert llama.rope == RopeConfig(theta=load_target(golden / "tiny-llama-rope3-tied").config.rope.theta)


def test_the_users_original_context_wins_over_one_beside_the_settings():
    fields = target_fields(original_max_position_embeddings=77, rope_theta=5e5)
    rope = target_config(fields, rope_scaling=SCALING).rope
    assert (rope.original_max_position, rope.theta) == (4096, 5e5)
    assert target_config(fields, rope_scaling={**SCALING, "rope_theta": 1e6}).rope.theta == 1e6


def test_the_users_scaling_is_of_gguf_files_too(models, tmp_path):
    file = write_gguf(tmp_path / "m.gguf", BASE, models.params(BASE))
    config = load_target(file, rope_scaling={"rope_type": "linear", "factor": 2.0}).config
    assert (config.rope, config.max_position) == (RopeConfig(BASE.rope.theta, "linear", 2.0), 1024)


def test_a_stretched_target_is_saved_as_it_is_run(golden, tmp_path):
    loaded = load_target(golden / "recall-target", rope_scaling=SCALING)
    assert load_target(save_target(tmp_path / "long", loaded.config, loaded.params)).config == loaded.config


def test_the_engine_is_as_long_as_its_scaling_says(golden):
    setup = {"target": {"path": str(golden / "recall-target")}, "engine": {"max_model_len": 16384, "num_pages": 8}}
    with pytest.raises(ConfigError, match="at most 4096 tokens"):
        Engine.from_config(setup)
    draft = {"path": str(golden / "recall-dflash2"), "rope_scaling": SCALING}
    engine = Engine.from_config({**setup, "target": {**setup["target"], "rope_scaling": SCALING}, "draft": draft})
    assert engine.models.target_config.rope == engine.models.draft_config.rope
    assert engine.models.draft_config == load_draft(draft["path"], rope_scaling=SCALING).config


@pytest.mark.parametrize(
    ("scaling", "message"),
    [
        ({"factor": 4.0}, "'target.rope_scaling.rope_type' is missing"),
        ({"rope_type": "dynamic"}, "rope_type"),
        ({"rope_type": "yarn", "factor": 0}, "factor"),
        ({"rope_type": "yarn", "faktor": 4.0}, "target.rope_scaling.factor"),
    ],
)
def test_scaling_in_a_config_is_checked(scaling, message):
    with pytest.raises(ConfigError, match=message):
        parse(EngineSetup, {"target": {"path": "x", "rope_scaling": scaling}}, "job.yaml")


def test_answers_of_another_scaling_do_not_belong_in_one_file():
    values = {"target": {"path": "t"}, "input": {"path": "i"}, "output": {"path": "o"}}
    plain = parse(JobConfig, values, "job.yaml")
    stretched = plain.model_copy(update={"target": plain.target.model_copy(update={"rope_scaling": None})})
    assert plain.identity() == stretched.identity()
    other = parse(JobConfig, {**values, "target": {"path": "t", "rope_scaling": SCALING}}, "job.yaml")
    assert plain.identity() != other.identity()


def test_a_config_file_that_was_stretched_by_hand_is_served(golden, tmp_path):
    directory = shutil.copytree(golden / "recall-target", tmp_path / "t")
    fields = json.loads((directory / "config.json").read_text())
    fields["rope_parameters"] |= {**SCALING, "factor": 2.0}
    (directory / "config.json").write_text(json.dumps(fields))
    Engine.from_config({"target": {"path": str(directory)}, "engine": {"max_model_len": 8192, "num_pages": 8}})
    assert dataclasses.replace(load_target(directory).config, max_position=0).rope.factor == 2.0
