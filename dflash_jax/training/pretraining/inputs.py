"""Inputs that a run makes first: sequences of a rule, and a pretrained target."""

from __future__ import annotations

import json
from pathlib import Path

from dflash_jax.checkpoints import save_target
from dflash_jax.checkpoints.staging import new_directory
from dflash_jax.errors import ConfigError
from dflash_jax.progress import Bar
from dflash_jax.signals import Stop
from dflash_jax.training.config import PretrainSection, RuleSection, TrainConfig
from dflash_jax.training.data.dataset import open_data
from dflash_jax.training.data.records import append_shards
from dflash_jax.training.drafts.start import check_mask_token, fresh_config
from dflash_jax.training.manifest import difference, flatten, read_manifest, write_manifest
from dflash_jax.training.pretraining.recall_rule import rule_sequences
from dflash_jax.training.pretraining.target import fresh_target_config, pretrain

_RULE = "rule.json"
_PRETRAIN = "pretrain.json"


def make_inputs(config: TrainConfig, stop: Stop | None = None) -> None:
    """Makes the sequences (`data.rule`) and the target (`pretrain`) of a run, unless they are there.

    Each appears whole or not at all, with a manifest.

    Args:
      config: the run.
      stop: ends it early when it becomes true.

    Raises:
      ConfigError: something else is in their place, or the config cannot work.
      Stopped: `stop` became true.
    """
    if config.data.rule is not None:
        _make_sequences(config.data.path, config.data.rule)
    if config.pretrain is not None:
        _make_target(config, config.pretrain, stop)


def pretrain_settings(config: TrainConfig, data_fingerprint: str) -> dict[str, object]:
    """Everything that the target of a run with `pretrain` depends on."""
    assert config.pretrain is not None
    fields = {"pretrain": config.pretrain.model_dump(mode="json"), "seed": config.seed}
    return {**flatten(fields), "data fingerprint": data_fingerprint}


def _make_sequences(directory: Path, section: RuleSection) -> None:
    settings = flatten({"data": {"rule": section.model_dump(mode="json")}})
    if directory.exists():
        _check(directory, _RULE, settings, "data.path", "data.rule")
        return
    with new_directory(directory) as scratch, Bar("making sequences", 0) as bar:
        bar.doing(f"making {section.sequences} sequences in {directory}")
        append_shards(scratch, rule_sequences(section))
        write_manifest(scratch / _RULE, settings)


def _make_target(config: TrainConfig, section: PretrainSection, stop: Stop | None) -> None:
    directory = Path(config.target)
    if config.target.startswith("wheel:") or directory.suffix == ".gguf":
        raise ConfigError(
            f"pretrain is given, but target {config.target!r} is no directory that a new target could be written to; "
            "give one, or leave pretrain out"
        )
    shape = fresh_target_config(section.shape)
    dataset = open_data(config.data, shape.vocab_size)
    if config.draft.path is None:
        # Errors about the draft come before the target is trained, not after.
        check_mask_token(fresh_config(config.draft, shape).mask_token_id, shape, dataset)
    settings = pretrain_settings(config, dataset.fingerprint)
    if directory.exists():
        _check(directory, _PRETRAIN, settings, "target", "pretrain")
        return
    trained = pretrain(section, dataset, config.seed, stop)
    with new_directory(directory) as scratch:
        save_target(scratch, trained.config, trained.params, "bfloat16")
        write_manifest(scratch / _PRETRAIN, settings)
        figures = {"loss": trained.loss, "accuracy": trained.accuracy}
        (scratch / "figures.json").write_text(json.dumps(figures) + "\n")


def _check(directory: Path, name: str, settings: dict[str, object], where: str, section: str) -> None:
    file = directory / name
    if not file.is_file():
        raise ConfigError(
            f"{where} {directory} is there already and was not made by {section}; leave {section} out to use it, "
            f"or give another {where}"
        )
    if changed := difference(read_manifest(file), settings):
        raise ConfigError(
            f"{where} {directory} was made from other settings ({changed}); "
            f"give another {where}, or remove that directory"
        )
