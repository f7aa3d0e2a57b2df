"""What an engine takes on the device, and how one figure of memory is divided among pages, states and checkpoints.

Keys and values grow with a request's length, recurrent states with the number of requests. Two fixed pools would
leave one empty while the other is full, so `engine.memory` is one budget for both.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from dflash_jax.engine.config import EngineConfig
from dflash_jax.engine.state import EngineState, Models, init_pages, init_state
from dflash_jax.errors import ConfigError
from dflash_jax.models.config import DraftConfig, TargetConfig, TransformerConfig
from dflash_jax.models.recurrent import init_recurrent
from dflash_jax.models.weights import TargetParams

_CHECKPOINT_SHARE = 0.25
"""Of what is left for prefixes, the part that checkpoints may take; pages take the rest."""


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Bytes on the device.

    Attributes:
      page: a page of the target and, if there is one, of the draft.
      slot: a slot's entry, its recurrent state included.
      checkpoint: a recurrent state kept for a prefix, with its length; 0 for a target without such states.
      processors: what logits processors keep for a slot; taken for all slots once a request needs any.
    """

    page: int
    slot: int
    checkpoint: int
    processors: int


def sizes_of(engine: EngineConfig, *configs: TransformerConfig) -> Sizes:
    """The sizes for a model, or for a target and its draft."""
    dtype = jnp.dtype(engine.dtype)
    page = sum(bytes_of(lambda of=of: init_pages(of, 1, engine.page_size, dtype)) for of in configs)
    target = configs[0]

    def state() -> EngineState:
        # Only the sizes matter, and no slot's entry depends on the weights.
        nothing = jnp.zeros((1, 1), dtype)
        models = Models(TargetParams(embedding=nothing, layers=(), norm=nothing[0]), _as_target(target))
        return init_state(
            models,
            rows=1,
            slots=1,
            num_pages=1,
            page_size=engine.page_size,
            max_model_len=engine.max_model_len,
            processors=True,
        )

    def slots() -> Any:
        return state().slots, state().recurrent

    checkpoint = bytes_of(lambda: init_recurrent(_as_target(target), 1, dtype))
    return Sizes(page, bytes_of(slots), checkpoint + 4 if checkpoint else 0, bytes_of(lambda: state().processors))


def divide(engine: EngineConfig, target: TargetConfig, draft: DraftConfig | None) -> EngineConfig:
    """The config with `num_pages` and `checkpoints` set so that all states together take `memory`, if that is given.

    Slots come first, then the pages of one request of full length; of the rest, checkpoints take a quarter, two a
    slot at most, and pages all else.

    Raises:
      ConfigError: it does not suffice, or the pages are given as well.
    """
    if engine.memory is None:
        return engine
    if engine.num_pages is not None:
        raise ConfigError(
            f"engine.memory and engine.num_pages ({engine.num_pages}) are both given; memory decides on the pages, so "
            "leave one of them out"
        )
    sizes = sizes_of(engine, target, *([] if draft is None else [draft]))
    fixed = engine.max_slots * sizes.slot + engine.slot_pages * sizes.page
    left = engine.memory - fixed
    if left < 0:
        raise ConfigError(
            f"engine.memory is {engine.memory} bytes, but {engine.max_slots} slots and the pages of one request of "
            f"engine.max_model_len {engine.max_model_len} take {fixed}"
        )
    checkpoints = 0
    if sizes.checkpoint and engine.prefix_cache:
        wanted = 2 * engine.max_slots if engine.checkpoints is None else engine.checkpoints
        checkpoints = min(wanted, int(_CHECKPOINT_SHARE * left) // sizes.checkpoint)
    pages = engine.slot_pages + (left - checkpoints * sizes.checkpoint) // sizes.page
    return engine.model_copy(update={"memory": None, "num_pages": pages, "checkpoints": checkpoints})


def _as_target(config: TransformerConfig) -> TargetConfig:
    shared = {field.name: getattr(config, field.name) for field in dataclasses.fields(TransformerConfig)}
    return config if isinstance(config, TargetConfig) else TargetConfig(**shared)


def bytes_of(make: Callable[..., Any]) -> int:
    """Bytes of the arrays that a function makes, from their shapes alone."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(jax.eval_shape(make)))
