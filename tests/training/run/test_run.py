"""Whole runs: they learn, resume bit for bit, stop cleanly, and refuse what cannot work."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from dflash_jax.checkpoints import load_draft
from dflash_jax.errors import CheckpointError, ConfigError
from dflash_jax.training import build_features, export_draft, train
from dflash_jax.training.run.log import read_metrics
from tests.training.recall import config, leaves, write_data

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def uninterrupted(recall_data, tmp_path_factory):
    directory = tmp_path_factory.mktemp("uninterrupted")
    return directory, train(config(directory, recall_data))


def test_a_run_leaves_metrics_plots_and_a_draft_that_loads(uninterrupted):
    directory, trained = uninterrupted
    assert trained.finished and trained.step == 6
    lines = read_metrics(directory / "run" / "metrics.jsonl")
    assert [line["step"] for line in lines if line["kind"] == "train"] == [2, 4, 6]
    assert [line["step"] for line in lines if line["kind"] == "held_out"] == [3, 6]
    train_line = next(line for line in lines if line["kind"] == "train")
    assert len(train_line["accuracy"]) == len(train_line["recall"]) == len(train_line["selector_accuracy"]) == 3
    assert train_line["anchors"] == 2 * 2 * 8
    assert train_line["anchors_per_second"] > 0
    for name in ("loss", "accuracy", "acceptance"):
        assert (directory / "run" / f"{name}.png").stat().st_size > 1000
    loaded = load_draft(directory / "run" / "draft")
    assert loaded.config == trained.draft_config
    for found, expected in zip(leaves(loaded.params), leaves(trained.params), strict=True):
        np.testing.assert_allclose(found, expected, rtol=2**-7, atol=1e-6)


START = """
import sys
from tests.training.recall import config
from dflash_jax.training import train
from pathlib import Path
c = config(Path(sys.argv[1]), Path(sys.argv[2]), optimiser__steps=int(sys.argv[3]))
print("finished" if train(c).finished else "stopped")
"""


def start_run(directory, data, steps=6):
    environment = {**os.environ, "DFLASH_JAX_TYPECHECK": "0"}
    arguments = [sys.executable, "-c", START, str(directory), str(data), str(steps)]
    return subprocess.Popen(arguments, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)


def wait_for(path: Path, process: subprocess.Popen) -> None:
    while not path.exists():
        assert process.poll() is None, "the run ended before its first checkpoint"
        time.sleep(0.005)


def test_a_killed_run_ends_with_the_weights_of_an_uninterrupted_one(uninterrupted, recall_data, tmp_path):
    process = start_run(tmp_path, recall_data)
    wait_for(tmp_path / "run" / "checkpoints" / "2", process)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not (tmp_path / "run" / "draft").exists()
    resumed = train(config(tmp_path, recall_data))
    for found, expected in zip(leaves(resumed.params), leaves(uninterrupted[1].params), strict=True):
        np.testing.assert_array_equal(found, expected)
    lines, expected_lines = (read_metrics(d / "run" / "metrics.jsonl") for d in (tmp_path, uninterrupted[0]))
    assert [(x["step"], x["kind"]) for x in lines] == [(x["step"], x["kind"]) for x in expected_lines]


def test_sigterm_checkpoints_the_step_it_is_at(recall_data, tmp_path):
    process = start_run(tmp_path, recall_data, steps=100_000)
    wait_for(tmp_path / "run" / "checkpoints" / "2", process)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 0
    assert output.strip().endswith("stopped")
    newest = max(int(path.name) for path in (tmp_path / "run" / "checkpoints").iterdir() if path.name.isdigit())
    logged = read_metrics(tmp_path / "run" / "metrics.jsonl", "train")[-1]["step"]
    assert newest - logged < 2


ONE_STEP = {"steps": 1, "sequences": 2, "anchors": 8, "clip": 1e-9, "learning_rate": 1.0, "warmup": 0.0}


def test_parts_of_a_step_add_up_to_the_step(recall_data, tmp_path):
    # Clipping so hard that Adam's epsilon rules makes the update proportional to the gradient.
    runs = [
        train(config(tmp_path / str(parts), recall_data, optimiser={**ONE_STEP, "accumulate": parts}))
        for parts in (1, 2)
    ]
    for whole, parted in zip(*(leaves(run.params) for run in runs), strict=True):
        np.testing.assert_allclose(whole, parted, rtol=1e-4, atol=1e-5)
    whole, parted = (read_metrics(tmp_path / str(parts) / "run" / "metrics.jsonl", "train")[0] for parts in (1, 2))
    assert whole["loss"] == pytest.approx(parted["loss"], rel=1e-5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"optimiser__learning_rate": 1e-3}, "optimiser.learning_rate was 0.0006 and is 0.001"),
        ({"seed": 1}, "seed was 0 and is 1"),
    ],
)
def test_resuming_with_a_changed_config_is_refused(uninterrupted, recall_data, changes, message):
    with pytest.raises(ConfigError, match=message):
        train(config(uninterrupted[0], recall_data, **changes))


def test_resuming_with_other_data_is_refused(uninterrupted, tmp_path):
    other = write_data(tmp_path / "other", seed=2)
    with pytest.raises(ConfigError, match="data fingerprint"):
        train(config(uninterrupted[0], other))


def test_what_no_weight_depends_on_may_change(uninterrupted, recall_data):
    again = train(config(uninterrupted[0], recall_data, checkpoint__every=3, evaluation__every=1, log_every=1))
    assert again.finished and again.step == 6


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"draft__mask_token_id": 62}, "mask_token_id 62 is a stop token"),
        ({"draft__mask_token_id": 60}, "mask_token_id 60 occurs 64 times in the data"),
        ({"optimiser__accumulate": 3}, "does not divide optimiser.sequences 2"),
        ({"optimiser__anchors": 65}, "more than data.max_length 64"),
        ({"draft__path": "somewhere"}, "draft.block_size must not be"),
        ({"draft__block_size": 65}, "blocks of 65 tokens are longer than data.max_length 64"),
        ({"loss__frequent": 2, "loss__drawn": 1}, "runs over 3 tokens .* fewer than the 4 candidates"),
        ({"init__layers": "target", "draft__num_layers": 9, "draft__target_layer_ids": (0,)}, "the draft has 9 layers"),
        ({"evaluation__engine_every": 2, "evaluation__engine_tokens": 10**6}, "evaluation.engine_tokens 1000000"),
    ],
)
def test_configs_that_cannot_work_are_refused(recall_data, tmp_path, changes, message):
    with pytest.raises(ConfigError, match=message):
        train(config(tmp_path, recall_data, **changes))


def test_a_draft_goes_on_from_a_checkpoint(uninterrupted, recall_data, tmp_path):
    directory, trained = uninterrupted
    draft = {"path": str(directory / "run" / "draft")}
    further = train(config(tmp_path, recall_data, draft=draft, optimiser__steps=1, optimiser__learning_rate=1e-9))
    assert further.draft_config == trained.draft_config
    for found, expected in zip(leaves(further.params), leaves(trained.params), strict=True):
        np.testing.assert_allclose(found, expected, rtol=2**-7, atol=1e-6)


def test_the_newest_checkpoint_of_a_run_can_be_exported(uninterrupted, recall_data, tmp_path):
    directory, trained = uninterrupted
    assert export_draft(config(directory, recall_data), tmp_path / "draft", "float32") == 6
    for found, expected in zip(leaves(load_draft(tmp_path / "draft").params), leaves(trained.params), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-6)
    with pytest.raises(CheckpointError, match="train first"):
        export_draft(config(tmp_path, recall_data), tmp_path / "other")


def test_the_engine_is_asked_at_the_steps_that_are_configured(recall_data, tmp_path):
    steps = {"optimiser__steps": 3, "evaluation__engine_every": 2}
    answers = {"evaluation__engine_prompts": 2, "evaluation__engine_tokens": 6}
    trained = train(config(tmp_path, recall_data, **steps, **answers))
    lines = read_metrics(tmp_path / "run" / "metrics.jsonl", "engine")
    assert [line["step"] for line in lines] == [2, 3]
    assert all(1 <= line["mean_acceptance_length"] <= trained.draft_config.block_size for line in lines)


def test_features_can_be_built_ahead(recall_data, tmp_path):
    progress = []
    build_features(config(tmp_path, recall_data), lambda done, total: progress.append((done, total)))
    assert progress[-1] == (64, 64)
    done = np.fromfile(tmp_path / "features" / "layer-1.done", np.uint8)
    assert done.tolist() == [1] * 64


def test_metrics_after_the_resumed_step_are_dropped(tmp_path):
    from dflash_jax.training.run.log import MetricsLog

    file = tmp_path / "metrics.jsonl"
    file.write_text("".join(json.dumps({"step": s, "kind": "train"}) + "\n" for s in (2, 4, 6)) + '{"step": 8, "ki')
    log = MetricsLog(file, 4)
    log.write(6, "train", {"loss": 1.0})
    log.close()
    assert [line["step"] for line in read_metrics(file)] == [2, 4, 6]


def test_a_drafter_learns_the_recall_rule(tmp_path):
    data = write_data(tmp_path / "data", count=256, length=64)
    trained = train(
        config(
            tmp_path,
            data,
            draft__num_layers=2,
            draft__target_layer_ids=(0, 1, 2),
            optimiser={"steps": 100, "sequences": 8, "anchors": 32, "learning_rate": 2e-3},
            checkpoint__every=1000,
            evaluation={"every": 1000, "sequences": 16, "anchors": 16},
        )
    )
    figures = read_metrics(tmp_path / "run" / "metrics.jsonl", "held_out")[-1]
    assert trained.finished
    assert figures["acceptance"] > 2.0, figures
