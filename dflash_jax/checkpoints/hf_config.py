"""`config.json` to model configs and back: which family it is of, and what every family's has."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from dflash_jax.checkpoints.table import Config
from dflash_jax.errors import ConfigError, quote
from dflash_jax.families import FAMILIES, drafts, targets_by_architecture
from dflash_jax.families.rope import with_scaling
from dflash_jax.models.config import DraftConfig, TargetConfig
from dflash_jax.schema import Names, Schema, TokenIds, check

_log = logging.getLogger(__name__)

Fields = Mapping[str, Any]


class _Named(Schema):
    architectures: Names | None = None
    text_config: dict[str, Any] | None = None


class _Generation(Schema):
    """The fields of `generation_config.json` that are used."""

    eos_token_id: TokenIds = ()


def architecture(fields: Fields, source: str) -> str:
    """The model's architecture, one this package knows. Raises ConfigError for any other."""
    known = [*targets_by_architecture(), *drafts.ARCHITECTURES]
    named = check(_Named, fields, source).architectures or []
    for name in named:
        if name in known:
            return name
    found = f"architecture {', '.join(quote(name) for name in named[:4])}" if named else "no 'architectures'"
    raise ConfigError(f"{source} has {found}, but it must name one of {', '.join(known)}")


def is_draft(fields: Fields, source: str) -> bool:
    """Whether the model is a draft, not a target. Raises ConfigError if it is neither."""
    return architecture(fields, source) in drafts.ARCHITECTURES


def target_config(
    fields: Fields,
    generation: Fields | None = None,
    source: str = "config.json",
    *,
    rope_scaling: Fields | None = None,
) -> TargetConfig:
    """A target's config.

    Args:
      fields: contents of `config.json`.
      generation: contents of `generation_config.json`, if there is one; its end tokens come first.
      source: where the fields are from, for messages.
      rope_scaling: the user's, in place of the config's.

    Raises:
      ConfigError: a draft's or unknown architecture, or a field that is missing, out of range or not supported.
    """
    name, families = architecture(fields, source), targets_by_architecture()
    if name not in families:
        raise ConfigError(f"{source} is of a draft ({name}), but a target must be one of {', '.join(families)}")
    first = check(_Generation, generation or {}, f"the generation_config.json beside {source}").eos_token_id
    text = _of_text(fields, source)
    if rope_scaling is not None:
        text = with_scaling(text, rope_scaling)
    with _naming(source):
        config = families[name].read(text, source)
    ids = tuple(dict.fromkeys((*first, *config.eos_token_ids)))
    return _in_vocabulary(dataclasses.replace(config, eos_token_ids=ids), source)


def names_end_tokens(fields: Fields, generation: Fields | None, source: str) -> bool:
    """Whether a target's `config.json` or `generation_config.json` says which tokens end a text."""
    either = (_of_text(fields, source), generation or {})
    return any(check(_Generation, found, source).eos_token_id for found in either)


def draft_config(
    fields: Fields,
    mask_token_id: int | None = None,
    source: str = "config.json",
    *,
    rope_scaling: Fields | None = None,
) -> DraftConfig:
    """A draft's config.

    Args:
      fields: contents of `config.json`; options in its `dflash_config` win over the top level.
      mask_token_id: the user's, in place of the config's.
      source: where the fields are from, for messages.
      rope_scaling: the user's, in place of the config's.

    Raises:
      ConfigError: a target's or unknown architecture, or a field that is missing, out of range or not supported.
    """
    name = architecture(fields, source)
    if name not in drafts.ARCHITECTURES:
        known = ", ".join(drafts.ARCHITECTURES)
        raise ConfigError(f"{source} is of a target ({name}), but a draft must be one of {known}")
    if rope_scaling is not None:
        fields = with_scaling(fields, rope_scaling)
    with _naming(source):
        return drafts.read(fields, drafts.ARCHITECTURES[name], mask_token_id, source)


def config_fields(config: Config, dtype: str = "float32") -> dict[str, Any]:
    """Contents of `config.json` for a model.

    Args:
      config: the model; reading the fields back gives an equal one.
      dtype: what the weights beside it are stored as.

    Raises:
      ConfigError: layers that differ in ways the format cannot say.
    """
    if isinstance(config, DraftConfig):
        return {**drafts.write(config), "dtype": dtype}
    family = FAMILIES[config.family]
    return {"architectures": [family.architectures[0]], **family.write(config), "dtype": dtype}


def _of_text(fields: Fields, source: str) -> Fields:
    """The fields of the text model: a checkpoint that sees or hears too has them in `text_config`."""
    nested = check(_Named, fields, source).text_config or {}
    return {**fields, **{name: value for name, value in nested.items() if value is not None or name not in fields}}


def _in_vocabulary(config: TargetConfig, source: str) -> TargetConfig:
    """The config without end tokens, or a BOS, that no text can have."""
    known = range(config.vocab_size)
    strange = [token for token in config.eos_token_ids if token not in known]
    if strange:
        _log.warning(
            "%s names end tokens %s outside the vocabulary of %d tokens; they are ignored",
            source,
            quote(strange),
            config.vocab_size,
        )
    ends = tuple(token for token in config.eos_token_ids if token in known)
    bos = config.bos_token_id if config.bos_token_id in known else None
    return dataclasses.replace(config, eos_token_ids=ends, bos_token_id=bos)


@contextmanager
def _naming(source: str) -> Iterator[None]:
    """Says which file it is in errors about sizes that contradict each other."""
    try:
        yield
    except ConfigError as error:
        if source in str(error):
            raise
        raise ConfigError(f"{source}: {error}") from None
