"""Runs whose files are damaged, gone, another's or in use, and runs that go wrong: said by name, and nothing lost."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax.checkpoints import load_draft, save_draft
from dflash_jax.errors import CheckpointError, ConfigError, TrainingError
from dflash_jax.settings import parse
from dflash_jax.training import TrainConfig, build_features, export_draft, train
from dflash_jax.training.data.feature_cache import write_at
from dflash_jax.training.manifest import write_manifest
from dflash_jax.training.run import loop as loop_module
from dflash_jax.training.run.log import MetricsLog, read_metrics
from dflash_jax.writing import sole_writer
from tests.training.recall import config, leaves


@pytest.fixture(scope="module")
def finished(recall_data, tmp_path_factory):
    directory = tmp_path_factory.mktemp("finished")
    train(config(directory, recall_data))
    return directory


@pytest.fixture
def run(finished, tmp_path):
    """A copy of a finished run."""
    shutil.copytree(finished, tmp_path / "copy")
    return tmp_path / "copy"


def test_a_draft_is_exported_with_the_config_it_was_trained_with(run, recall_data, tmp_path):
    with pytest.raises(ConfigError, match=r"draft.block_size was 4 and is 3"):
        export_draft(config(run, recall_data, draft__block_size=3), tmp_path / "draft")
    assert export_draft(config(run, recall_data), tmp_path / "draft") == 6


def test_the_draft_that_a_run_started_from_must_stay_what_it_was(run, recall_data, tmp_path):
    draft = tmp_path / "start"
    shutil.copytree(run / "run" / "draft", draft)
    start = config(tmp_path, recall_data, draft={"path": str(draft)}, optimiser__steps=2)
    train(start)
    changed = load_draft(draft)
    shutil.rmtree(draft)
    save_draft(draft, changed.config, changed.params.replace(norm=changed.params.norm + 1), "float32")
    for refused in (lambda: train(start), lambda: export_draft(start, tmp_path / "exported")):
        with pytest.raises(ConfigError, match="draft fingerprint changed"):
            refused()


def test_keeping_features_is_a_change_and_moving_them_is_none(run, recall_data, tmp_path):
    with pytest.raises(ConfigError, match="features in bfloat16 was True and is False"):
        train(config(run, recall_data, data__features=None))
    assert train(config(run, recall_data, data__features=tmp_path / "elsewhere")).finished


def test_features_of_another_dtype_are_refused(recall_data, tmp_path):
    build_features(config(tmp_path, recall_data, dtype="bfloat16"))
    with pytest.raises(ConfigError, match="dtype was 'bfloat16' and is 'float32'"):
        build_features(config(tmp_path, recall_data))


def test_features_without_a_record_are_refused(recall_data, tmp_path):
    build_features(config(tmp_path, recall_data))
    (tmp_path / "features" / "target.json").unlink()
    with pytest.raises(ConfigError, match=r"no target.json to say what they are of"):
        build_features(config(tmp_path, recall_data))


def test_a_record_made_before_a_setting_existed_goes_on(run, recall_data):
    record = run / "run" / "run.json"
    fields = json.loads(record.read_text())
    for name in ("loss.soft", "features in bfloat16"):
        del fields[name]
    record.write_text(json.dumps(fields))
    with pytest.raises(ConfigError, match=r"loss.soft was 0.0 and is 0.5"):
        train(config(run, recall_data, loss__soft=0.5))
    assert train(config(run, recall_data)).finished
    assert json.loads(record.read_text())["loss.soft"] == 0.0


def test_checkpoints_without_a_record_are_refused(run, recall_data):
    (run / "run" / "run.json").unlink()
    for call in (lambda: train(config(run, recall_data)), lambda: export_draft(config(run, recall_data), run / "d")):
        with pytest.raises(ConfigError, match=r"no run.json to say what they are of"):
            call()


@pytest.mark.parametrize(
    "content",
    ["", "{", "[]", "\xff", "[" * 100_000, '"' + "x" * 5_000_000 + '"', "1" * 5_000, '{"seed": ' + "1" * 4_000 + "}"],
    ids=["empty", "cut", "a list", "not UTF-8", "deep", "long", "a long number", "a long seed"],
)
def test_a_damaged_record_is_named(run, recall_data, content):
    (run / "run" / "run.json").write_bytes(content.encode("latin1"))
    with pytest.raises(ConfigError, match=r"run\.json (is damaged|holds)|changed: ") as caught:
        train(config(run, recall_data))
    assert len(str(caught.value)) < 1000


def test_an_equal_record_is_left_alone(tmp_path):
    write_manifest(tmp_path / "a.json", {"a": 1})
    os.utime(tmp_path / "a.json", (0, 0))
    write_manifest(tmp_path / "a.json", {"a": 1})
    assert (tmp_path / "a.json").stat().st_mtime == 0
    write_manifest(tmp_path / "a.json", {"a": 2})
    assert json.loads((tmp_path / "a.json").read_text()) == {"a": 2}


def test_a_draft_that_was_left_behind_is_not_taken_for_the_result(run, recall_data):
    shutil.rmtree(run / "run" / "checkpoints")
    with pytest.raises(ConfigError, match="holds the draft of a run whose checkpoints are gone"):
        train(config(run, recall_data))
    assert read_metrics(run / "run" / "metrics.jsonl", "held_out")


@pytest.mark.parametrize("damage", ["gone", "cut", "of another draft", "not finite", "another dtype"])
def test_a_missing_or_damaged_scale_is_named(run, recall_data, tmp_path, damage):
    scale = run / "run" / "feature_scale.npy"
    content = scale.read_bytes()
    whole = np.load(scale)
    match damage:
        case "gone":
            scale.unlink()
        case "cut":
            scale.write_bytes(content[:40])
        case "of another draft":
            np.save(scale, whole[:128])
        case "not finite":
            np.save(scale, np.where(np.arange(len(whole)) == 3, np.nan, whole))
        case "another dtype":
            np.save(scale, whole.astype(str))
    for call in (
        lambda: train(config(run, recall_data)),
        lambda: export_draft(config(run, recall_data), tmp_path / "d"),
    ):
        with pytest.raises(CheckpointError, match=r"feature_scale.npy cannot be read"):
            call()


def test_a_damaged_checkpoint_leads_to_the_one_before(run, recall_data):
    newest = run / "run" / "checkpoints" / "6"
    for path in newest.rglob("*"):
        if path.is_file():
            path.write_bytes(path.read_bytes()[:10])
    with pytest.raises(CheckpointError, match=r"remove \S*checkpoints/6 to continue from step 4") as refusal:
        train(config(run, recall_data))
    assert len(str(refusal.value).splitlines()) == 1 and len(str(refusal.value)) < 700
    shutil.rmtree(newest)
    assert train(config(run, recall_data)).finished


def test_lines_that_are_no_metrics_are_left_out(tmp_path):
    good = json.dumps({"step": 1, "kind": "train"}).encode()
    (tmp_path / "m.jsonl").write_bytes(b"\n".join([b"12", b'{"kind": "train"}', b"\xff", good, b'{"step": 2, "ki']))
    assert read_metrics(tmp_path / "m.jsonl") == [{"step": 1, "kind": "train"}]


def test_two_runs_at_one_output_are_refused(run, recall_data):
    with (
        sole_writer(run / "run" / ".lock", "x"),
        pytest.raises(ConfigError, match="another process is writing the run"),
    ):
        train(config(run, recall_data))


def test_an_evaluation_that_was_cut_short_is_made_up(finished, recall_data, tmp_path, monkeypatch):
    asked = {"evaluation__engine_every": 6, "evaluation__engine_prompts": 1, "evaluation__engine_tokens": 4}

    def cut_short(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(loop_module, "engine_acceptance", cut_short)
        with pytest.raises(KeyboardInterrupt):
            train(config(tmp_path, recall_data, **asked))
    resumed = train(config(tmp_path, recall_data, **asked))
    lines = [(line["step"], line["kind"]) for line in read_metrics(tmp_path / "run" / "metrics.jsonl")]
    assert lines[-3:] == [(6, "train"), (6, "held_out"), (6, "engine")]
    for found, expected in zip(
        leaves(resumed.params), leaves(load_draft(finished / "run" / "draft").params), strict=True
    ):
        np.testing.assert_array_equal(found, expected)


def test_a_run_that_goes_wrong_stops_and_keeps_what_was_good(recall_data, tmp_path):
    huge = {"optimiser__learning_rate": 1e30, "optimiser__warmup": 0.0, "optimiser__steps": 50}
    with pytest.raises(TrainingError, match="no finite number any more after step"):
        train(config(tmp_path, recall_data, **huge))
    assert not (tmp_path / "run" / "draft").exists()
    assert not any((tmp_path / "run" / "checkpoints").iterdir())


def test_weights_that_are_no_numbers_are_not_saved(recall_data, tmp_path, monkeypatch):
    make = loop_module.make_train_step

    def poisoned(*arguments):
        step = make(*arguments)

        def at(state, *rest):
            state, metrics = step(state, *rest)
            return state.replace(params=state.params.replace(norm=state.params.norm * jnp.nan)), metrics

        return at

    monkeypatch.setattr(loop_module, "make_train_step", poisoned)
    with pytest.raises(TrainingError, match=r"a weight is no finite number .* after step 1; no checkpoint was written"):
        train(config(tmp_path, recall_data, optimiser__steps=1))


def test_a_full_disk_is_an_error_and_not_the_end_of_the_process():
    with pytest.raises(OSError, match="No space left"):
        write_at(Path("/dev/full"), 0, b"abc")


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"seed": -1}, "seed"),
        ({"seed": 2**32}, "seed"),
        ({"output": ""}, "it must name a file or directory"),
        ({"draft": {"target_layer_ids": []}}, "draft.target_layer_ids"),
        ({"init": {"second_tap": float("nan")}}, "init.second_tap"),
        ({"optimiser": {"steps": 10**30}}, "optimiser.steps"),
        ({"optimiser": {"steps": 1, "learning_rate": float("inf")}}, "optimiser.learning_rate"),
        ({"optimiser": {"steps": 1, "beta2": 1}}, "optimiser.beta2"),
        ({"data": {"path": "x", "max_length": 10**9}}, "data.max_length"),
    ],
)
def test_values_that_cannot_work_are_refused_as_they_are_read(section, message):
    fields = {"target": "t", "output": "o", "draft": {}, "data": {"path": "d"}, "optimiser": {"steps": 1}}
    with pytest.raises(ConfigError, match=message):
        parse(TrainConfig, fields | section, "run.yaml")


def test_a_target_is_written_as_in_other_configs_or_plainly():
    fields = {"output": "o", "draft": {}, "data": {"path": "d"}, "optimiser": {"steps": 1}}
    plain, mapping = (parse(TrainConfig, {**fields, "target": t}, "run.yaml") for t in ("t", {"path": "t"}))
    assert plain == mapping
    with pytest.raises(ConfigError, match="'target'"):
        parse(TrainConfig, {**fields, "target": {"path": "t", "k": 1}}, "run.yaml")


def test_a_home_directory_is_meant_by_its_sign():
    fields = {"target": "t", "output": "~/o", "draft": {}, "data": {"path": "d"}, "optimiser": {"steps": 1}}
    assert parse(TrainConfig, fields, "run.yaml").output.is_absolute()


def test_metrics_on_a_full_disk_end_in_a_sentence_that_names_them(tmp_path):
    file = tmp_path / "metrics.jsonl"
    command = (
        "import pathlib, resource, signal; from dflash_jax.training.run.log import MetricsLog; "
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN); "
        f"log = MetricsLog(pathlib.Path({str(file)!r}), 0); log.write(1, 'train', {{}}); "
        "resource.setrlimit(resource.RLIMIT_FSIZE, (40, 40)); log.write(2, 'train', {'loss': 1.0})"
    )
    done = subprocess.run([sys.executable, "-c", command], capture_output=True, text=True)
    assert "TrainingError: the metrics " in done.stderr.splitlines()[-1]
    assert f"{file} cannot be written (File too large); the same command continues" in done.stderr.splitlines()[-1]
    MetricsLog(file, 2).write(2, "train", {"loss": 2.0})
    assert [line["step"] for line in read_metrics(file)] == [1, 2]
