"""A training run, from its config to its exported draft."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from contextlib import closing, nullcontext
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dflash_jax.checkpoints import save_draft
from dflash_jax.errors import TrainingError
from dflash_jax.models.config import DraftConfig
from dflash_jax.models.weights import DraftParams
from dflash_jax.progress import Bar
from dflash_jax.signals import Stop, stop_on_signals
from dflash_jax.training.config import TrainConfig
from dflash_jax.training.data.dataset import Order
from dflash_jax.training.objective.metrics import DraftMetrics, metric_means
from dflash_jax.training.optimiser import make_optimiser
from dflash_jax.training.pretraining.inputs import make_inputs
from dflash_jax.training.run.callbacks import Callback, Callbacks
from dflash_jax.training.run.engine_acceptance import engine_acceptance
from dflash_jax.training.run.log import MetricsLog, read_metrics
from dflash_jax.training.run.plots import plot_metrics
from dflash_jax.training.run.setup import Run, prepare
from dflash_jax.training.run.state import TrainState
from dflash_jax.training.run.step import make_eval_step, make_train_step
from dflash_jax.training.run.store import RunStore
from dflash_jax.training.run.tensorboard import TensorBoard
from dflash_jax.writing import sole_writer


@dataclasses.dataclass(frozen=True)
class Trained:
    """The result of a run.

    Attributes:
      step: steps taken.
      finished: False if it was asked to stop before its last step; it can be resumed.
      draft_config, params: the draft, for raw features.
    """

    step: int
    finished: bool
    draft_config: DraftConfig
    params: DraftParams


def train(config: TrainConfig, stop: Stop | None = None, callbacks: Sequence[Callback] = ()) -> Trained:
    """Trains a draft, from the newest checkpoint in the output directory if there is one.

    Sequences and a target that the config describes are made first (`make_inputs`).

    SIGINT and SIGTERM end it after the current step, with a checkpoint.

    Args:
      config: the run.
      stop: ends it in the signals' place.
      callbacks: hear of the run, beside those that the config asks for.

    Raises:
      ConfigError: a config that cannot work, or not the one that the run was started with.
      CheckpointError: a target, draft or checkpoint that cannot be read.
      TrainingError: the loss or a weight is not finite any more.
      Stopped: it was asked to end before the first step.
    """
    told = Callbacks([*callbacks, *([TensorBoard()] if config.tensorboard else [])])
    config.output.mkdir(parents=True, exist_ok=True)
    with (
        sole_writer(config.output / ".lock", f"the run in {config.output}"),
        stop_on_signals() if stop is None else nullcontext(stop) as stop,
    ):
        make_inputs(config, stop)
        with closing(RunStore(config.output, config.checkpoint)) as store:
            with Bar("preparing the run", 0) as bar:
                run = prepare(config, store, bar.doing)
            stop.check(" before the first step of this run; the same command begins it")
            trained = None
            try:
                trained = _loop(run, store, stop, told)
            finally:
                told.end(trained)
            return trained


def _loop(run: Run, store: RunStore, stop: Stop, callbacks: Callbacks) -> Trained:
    config, section = run.config, run.config.optimiser
    train_step = make_train_step(
        run.draft_config, config.dtype, config.loss, section, make_optimiser(section, config.dtype)
    )
    order = Order(run.dataset, config.seed, section.sequences)
    state = run.start if store.latest_step() is None else store.restore(run.start)
    step = int(state.step)
    callbacks.begin(config, store.directory, step)
    log = MetricsLog(store.metrics, step, callbacks)
    with Bar("training", section.steps, step) as bar:
        evaluate = _evaluator(run, log, bar)
        window, window_start = None, time.perf_counter()
        batch = run.batch(order.sequences(step))
        while step < section.steps and not stop and not log.over:
            state, metrics = train_step(state, batch, run.shared, run.plan, run.scale)
            step += 1
            if step < section.steps:
                # While the device computes.
                batch = run.batch(order.sequences(step))
            window = metrics if window is None else jax.tree.map(jnp.add, window, metrics)
            _check_finite("the loss", metrics, step, store)
            if step % config.log_every == 0 or step == section.steps:
                figures = _train_figures(window, time.perf_counter() - window_start)
                log.write(step, "train", figures)
                window, window_start = None, time.perf_counter()
                bar.at(
                    step,
                    f"loss {figures['loss']:.3f}, acceptance {figures['acceptance']:.2f}, "
                    f"{figures['anchors_per_second']:.0f} anchors/s",
                )
            bar.at(step)
            # The checkpoint comes after the evaluation, so that a resumed run has the evaluation in its metrics.
            paused = time.perf_counter()
            evaluate(step, state, last=step == section.steps)
            window_start += time.perf_counter() - paused
            if step % config.checkpoint.every == 0:
                _save(store, state, callbacks)
        _save(store, state, callbacks)
    log.close()
    plot_metrics(store.metrics, store.directory)
    params = run.export(state.params)
    finished = step >= section.steps
    if finished:
        _export_once(store.directory / "draft", run.draft_config, params)
    return Trained(step, finished, run.draft_config, params)


def _save(store: RunStore, state: TrainState, callbacks: Callbacks) -> None:
    _check_finite("a weight", state.params, int(state.step), store)
    if store.save(state):
        callbacks.saved(int(state.step), state)


def _check_finite(what: str, values: Any, step: int, store: RunStore) -> None:
    """Raises TrainingError if a number is not finite."""
    if all(np.isfinite(leaf).all() for leaf in jax.device_get(jax.tree.leaves(values))):
        return
    saved = store.latest_step()
    before = "no checkpoint was written" if saved is None else f"the checkpoint of step {saved} stays"
    raise TrainingError(
        f"{what} is no finite number any more after step {step}; {before}; "
        "a smaller optimiser.learning_rate or a longer optimiser.warmup helps most often"
    )


def _train_figures(metrics: DraftMetrics, seconds: float) -> dict:
    anchors = float(metrics.positions[0])
    return {
        **metric_means(metrics),
        "anchors": round(anchors),
        "anchors_per_second": round(anchors / seconds, 1),
        "seconds": round(seconds, 3),
        "unix_time": round(time.time(), 1),
    }


def _evaluator(run: Run, log: MetricsLog, bar: Bar):
    """A function that evaluates a state at the steps with an evaluation."""
    section = run.config.evaluation
    evaluate = make_eval_step(run.draft_config, run.config.dtype, run.config.loss, section.anchors)
    chosen = [int(index) for index in run.dataset.held_out[: section.sequences]]
    whole = [run.dataset.sequence(index) for index in chosen[: section.engine_prompts]]
    if not chosen:
        bar.note(
            f"nothing is evaluated: none of the {len(run.dataset.train)} sequences is held out at data.held_out "
            f"{run.config.data.held_out}"
        )
    prompts = [sequence.tokens[: max(1, sequence.prompt_len)].tolist() for sequence in whole]

    def at(step: int, state: TrainState, *, last: bool) -> None:
        if chosen and (last or step % section.every == 0):
            bar.doing("evaluating")
            metrics = None
            for number, index in enumerate(chosen):
                one = evaluate(state.params, run.batch([index]), run.shared, run.scale, jnp.asarray(number))
                metrics = one if metrics is None else jax.tree.map(jnp.add, metrics, one)
            assert metrics is not None
            log.write(step, "held_out", metric_means(metrics))
        every = section.engine_every
        if prompts and every and (last or step % every == 0):
            bar.doing("decoding")
            params = run.export(state.params)
            found = engine_acceptance(run.target, run.draft_config, params, prompts, section.engine_tokens)
            log.write(step, "engine", found)

    return at


def _export_once(directory: Path, config: DraftConfig, params: DraftParams) -> None:
    if not directory.exists():
        save_draft(directory, config, params)


def run_training(config: TrainConfig, stop: Stop) -> None:
    """`train` for the command line: says how it ended.

    Raises:
      Stopped: `stop` became true before the last step.
    """
    trained = train(config, stop)
    if trained.finished:
        last = {line["kind"]: line for line in read_metrics(config.output / "metrics.jsonl")}
        if "held_out" in last:
            print(f"mean acceptance length, teacher forced: {last['held_out']['acceptance']:.2f}")
        if "engine" in last and last["engine"]["mean_acceptance_length"] is not None:
            print(f"mean acceptance length, decoding: {last['engine']['mean_acceptance_length']:.2f}")
        print(f"finished at step {trained.step}; the draft is in {config.output / 'draft'}")
    else:
        stop.check(f" at step {trained.step} of {config.optimiser.steps}; the same command continues from there")
