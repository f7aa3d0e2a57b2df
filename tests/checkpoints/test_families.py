import dataclasses
import json
import subprocess
import sys

import numpy as np
import pytest
from safetensors.numpy import save_file
from transformers import CONFIG_MAPPING

from dflash_jax.checkpoints import describe, load_target, save_target
from dflash_jax.checkpoints.hf_config import config_fields, target_config
from dflash_jax.checkpoints.table import param_at, table
from dflash_jax.engine import Engine, EngineConfig, SamplingParams
from dflash_jax.engine.state import Models
from dflash_jax.errors import ConfigError
from dflash_jax.families import FAMILIES
from dflash_jax.models.config import LayerConfig, MoeConfig, TargetConfig
from dflash_jax.models.weights import MoeWeights
from tests.checkpoints import toy_family
from tests.checkpoints.test_gguf import write_gguf


@pytest.fixture(autouse=True)
def _toy(monkeypatch):
    monkeypatch.setitem(FAMILIES, "toy", toy_family.FAMILY)


@pytest.fixture
def toy(models):
    moe = MoeConfig(3, 2, 6, True)
    layers = (LayerConfig(), LayerConfig(moe=moe), LayerConfig(), LayerConfig(moe=moe))
    return dataclasses.replace(models.targets["qwen3"], family="toy", attention_bias=False, layers=layers)


@pytest.fixture
def published(models, toy, tmp_path):
    """The directory of a toy as its makers would have published it: nested, with parts that see, experts stacked."""
    params, tensors = models.params(toy), {}
    for leaf in table(toy):
        array = np.asarray(param_at(params, leaf.path))
        array = np.swapaxes(array, -1, -2) if leaf.transposed else array
        tensors[leaf.name.replace(".{expert}", "").replace("model.", "model.language_model.")] = array
    for name in [name for name in tensors if name.endswith("experts.gate_proj.weight")]:
        stem = name.removesuffix("gate_proj.weight")
        both = [tensors.pop(name), tensors.pop(f"{stem}up_proj.weight")]
        tensors[f"{stem}gate_up_proj"] = np.concatenate(both, axis=1)
        tensors[f"{stem}down_proj"] = tensors.pop(f"{stem}down_proj.weight")
    tensors["model.visual.patch_embed.weight"] = tensors["mtp.fc.weight"] = np.ones((2, 2), np.float32)
    directory = tmp_path / "toy"
    directory.mkdir()
    save_file({name: np.ascontiguousarray(array) for name, array in tensors.items()}, directory / "model.safetensors")
    text = {**config_fields(toy), "architectures": ["ToyTextModel"], "eos_token_id": None}
    whole = {"architectures": ["ToyForConditionalGeneration"], "eos_token_id": list(toy.eos_token_ids)}
    fields = {**whole, "text_config": text, "vision_config": {"depth": 2}}
    (directory / "config.json").write_text(json.dumps(fields))
    return directory


def test_a_family_of_one_file_is_loaded_described_and_saved(models, toy, published, tmp_path, caplog):
    loaded = load_target(published)
    assert "the vision tower and the head that predicts several tokens left out" in caplog.text
    assert loaded.config == toy
    models.assert_same(loaded.params, models.params(toy))
    assert (describe(published).config, describe(published).architecture) == (toy, "ToyForConditionalGeneration")
    again = load_target(save_target(tmp_path / "saved", loaded.config, loaded.params))
    assert again.config == toy
    models.assert_same(again.params, loaded.params)


def test_a_family_of_one_file_is_read_from_gguf(models, toy, tmp_path):
    config = dataclasses.replace(toy, rms_norm_eps=float(np.float32(1e-5)), eos_token_ids=())
    loaded = load_target(write_gguf(tmp_path / "toy.gguf", config, models.params(config)))
    assert loaded.config == config
    models.assert_same(loaded.params, models.params(config))


def test_a_family_of_one_file_is_run(published):
    loaded = load_target(published)
    assert isinstance(loaded.params.layers[1].mlp, MoeWeights)
    greedy = SamplingParams(max_tokens=6, ignore_eos=True)
    answers = []
    for config in (loaded.config, dataclasses.replace(loaded.config, family="qwen3_moe")):
        engine = Engine(Models(loaded.params, config), EngineConfig(max_model_len=32, page_size=4))
        (answer,) = engine.generate([[1, 2, 3]], greedy)
        answers.append(answer.token_ids)
    assert len(answers[0]) == 6
    assert answers[0] == answers[1]


def test_fields_of_a_family_of_one_file_are_checked(toy, published):
    file = published / "config.json"
    fields = json.loads(file.read_text())
    fields["text_config"]["num_toys"] = 10**9
    file.write_text(json.dumps(fields))
    with pytest.raises(ConfigError, match=r"num_toys in .*config\.json is 1000000000, but it must be 1048576 or less"):
        load_target(published)


def test_every_family_says_the_table_and_config_of_its_own(models):
    for name, config in models.targets.items():
        family = FAMILIES[name]
        assert isinstance(config, TargetConfig)
        written = config_fields(config)
        assert written["architectures"] == [family.architectures[0]]
        assert family.read(written, "config.json") == config
        assert len({leaf.path for leaf in table(config)}) == len(table(config))


@pytest.mark.parametrize("name", [name for name in FAMILIES if name != "toy"])
def test_what_a_config_leaves_out_is_what_transformers_takes(name):
    kind = CONFIG_MAPPING[name]()
    fields = json.loads(getattr(kind, "text_config", kind).to_json_string(use_diff=False))
    fields["architectures"] = [FAMILIES[name].architectures[0]]
    sizes = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
    given = {field: fields[field] for field in ("architectures", *sizes) if field in fields}
    assert target_config(given) == target_config(fields)


def test_families_know_nothing_of_checkpoints():
    code = "import sys, dflash_jax.families; print([m for m in sys.modules if m.startswith('dflash_jax.checkpoints')])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
