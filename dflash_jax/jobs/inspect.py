"""What a checkpoint is, and what serving it takes, from its header alone."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from dflash_jax.checkpoints import Description, describe
from dflash_jax.engine.config import EngineConfig
from dflash_jax.engine.state import Models, init_pages, init_state
from dflash_jax.errors import ConfigError
from dflash_jax.models.config import DraftConfig, TargetConfig, TransformerConfig, check_pair
from dflash_jax.models.weights import TargetParams


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes that a model, or a pair, takes on the device.

    Attributes:
      weights: all its parameters.
      page: one page of it.
      slot_pages: the pages of one request of full length.
      slot_state: a slot's entries beside its pages, the same for all models.
      pool: all pages.
    """

    weights: int
    page: int
    slot_pages: int
    slot_state: int
    pool: int

    @property
    def total(self) -> int:
        """Weights and pages."""
        return self.weights + self.pool

    def __add__(self, other: Memory) -> Memory:
        return Memory(
            self.weights + other.weights,
            self.page + other.page,
            self.slot_pages + other.slot_pages,
            self.slot_state,
            self.pool + other.pool,
        )


@dataclasses.dataclass(frozen=True)
class Inspection:
    """A checkpoint, or a target with its draft.

    Attributes:
      models: descriptions with their memory, the target first.
      engine: the sizes that the memory is for.
      k: tokens to draft in a round; None without a draft.
    """

    models: tuple[tuple[Description, Memory], ...]
    engine: EngineConfig
    k: int | None

    @property
    def memory(self) -> Memory:
        """Of all models together."""
        first, *rest = (memory for _, memory in self.models)
        return sum(rest, start=first)


def inspect_checkpoint(
    path: str | Path,
    *,
    draft: str | Path | None = None,
    k: int | None = None,
    engine: EngineConfig | None = None,
    mask_token_id: int | None = None,
) -> Inspection:
    """Inspects a checkpoint without loading its weights.

    Args:
      path: a target or a draft, anything `load_target` or `load_draft` takes.
      draft: a draft to go with a target.
      k: tokens to draft in a round; the trained block_size - 1 by default.
      engine: the sizes to work out memory for.
      mask_token_id: for drafts that name none.

    Raises:
      CheckpointError, ConfigError: as loading it would.
    """
    engine = engine or EngineConfig()
    found = [describe(path, mask_token_id if draft is None else None)]
    if draft is not None:
        found.append(describe(draft, mask_token_id))
        target, drafter = found[0].config, found[1].config
        if not isinstance(target, TargetConfig):
            raise ConfigError(f"{path} is a draft; give the target first and the draft with --draft")
        if not isinstance(drafter, DraftConfig):
            raise ConfigError(f"{draft} is a target ({found[1].architecture}), not a draft")
        check_pair(target, drafter)
    last = found[-1].config
    if isinstance(last, DraftConfig):
        k = last.block_size - 1 if k is None else k
        if k < 1:
            raise ConfigError(f"k is {k}; it must be 1 or more")
    elif k is not None:
        raise ConfigError(f"k is {k}, but there is no draft to propose tokens")
    models = tuple((each, _memory(each, engine)) for each in found)
    return Inspection(models, engine, k)


def _memory(description: Description, engine: EngineConfig) -> Memory:
    dtype = jnp.dtype(engine.dtype)
    page = _bytes(jax.eval_shape(lambda: init_pages(description.config, 1, engine.page_size, dtype)))
    return Memory(
        weights=description.parameters * dtype.itemsize,
        page=page,
        slot_pages=engine.slot_pages * page,
        slot_state=_slot_state(description.config, engine),
        pool=engine.pool_pages * page,
    )


def _slot_state(config: TransformerConfig, engine: EngineConfig) -> int:
    def slots() -> Any:
        # Only the sizes matter, and no slot entry depends on the models.
        nothing = jnp.zeros((1, 1), engine.dtype)
        models = Models(TargetParams(embedding=nothing, layers=(), norm=nothing[0]), _as_target(config))
        return init_state(
            models, rows=1, slots=1, num_pages=1, page_size=engine.page_size, max_model_len=engine.max_model_len
        ).slots

    return _bytes(jax.eval_shape(slots))


def _as_target(config: TransformerConfig) -> TargetConfig:
    shared = {field.name: getattr(config, field.name) for field in dataclasses.fields(TransformerConfig)}
    return config if isinstance(config, TargetConfig) else TargetConfig(**shared)


def _bytes(tree: Any) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def print_inspection(inspection: Inspection) -> None:
    """Prints an inspection on stdout."""
    console = Console(highlight=False)
    for description, _ in inspection.models:
        console.print(escape(f"{description.role} {description.source}"), soft_wrap=True)
        console.print(_model_table(description, inspection.k))
    console.print("memory" if len(inspection.models) == 1 else "memory, target and draft together")
    console.print(_memory_table(inspection))


def _model_table(description: Description, k: int | None) -> Table:
    config = description.config
    table = Table(show_header=False)
    dtypes = ", ".join(f"{count} {dtype}" for dtype, count in description.dtypes.items())
    table.add_row("architecture", description.architecture)
    table.add_row("stored as", f"{description.format}, {human(description.bytes_on_disk)} ({dtypes} tensors)")
    table.add_row("parameters", f"{description.parameters:,}")
    table.add_row("layers", _layers(config))
    table.add_row("hidden / MLP size", f"{config.hidden_size} / {config.intermediate_size}")
    table.add_row("heads", f"{config.num_heads} of {config.head_dim}, {config.num_kv_heads} KV heads")
    table.add_row("vocabulary", f"{config.vocab_size:,}")
    table.add_row("RoPE", f"{config.rope.kind}, theta {config.rope.theta:g}")
    if isinstance(config, TargetConfig):
        table.add_row("longest context", f"{config.max_position:,} tokens")
        table.add_row("ends at tokens", ", ".join(map(str, config.eos_token_ids)) or "none")
    elif isinstance(config, DraftConfig):
        for name, value in _draft_options(config, k):
            table.add_row(name, value)
    return table


def _draft_options(config: DraftConfig, k: int | None) -> list[tuple[str, str]]:
    conv, selector, cap = config.conv, config.selector, config.final_logit_softcap
    return [
        ("DFlash version", str(config.version)),
        ("block", f"{config.block_size} tokens trained, {k} drafted in a round"),
        ("mask token", str(config.mask_token_id)),
        ("conditioned on layers", ", ".join(map(str, config.target_layer_ids))),
        ("made for", f"a target of {config.num_target_layers} layers" if config.num_target_layers else "not said"),
        ("convolution", f"{conv.taps} taps, groups of {conv.group_size}" if conv else "none"),
        ("selector", f"rank {selector.rank}, top {selector.top_k}" if selector else "none"),
        ("embedding scale", f"{config.input_embedding_scale:g}"),
        ("output multiplier", f"{config.output_multiplier:g}"),
        ("logit softcap", f"{cap:g}" if cap is not None else "none"),
    ]


def _layers(config: TransformerConfig) -> str:
    kinds: dict[str, int] = {}
    for layer in config.layers:
        kind = "full" if layer.window is None else f"window {layer.window}"
        if isinstance(config, DraftConfig):
            kind += ", causal" if layer.causal else ", not causal"
        if layer.moe is not None:
            kind += f", {layer.moe.experts_per_token} of {layer.moe.num_experts} experts"
        kinds[kind] = kinds.get(kind, 0) + 1
    return "; ".join(f"{count} {kind}" for kind, count in kinds.items())


def _memory_table(inspection: Inspection) -> Table:
    memory, engine = inspection.memory, inspection.engine
    table = Table(show_header=False)
    table.add_row("weights", f"{human(memory.weights)} in {engine.dtype}")
    table.add_row("a page", f"{human(memory.page)} for {engine.page_size} tokens")
    table.add_row(
        "a slot", f"{human(memory.slot_pages)} in {engine.slot_pages} pages for {engine.max_model_len} tokens"
    )
    table.add_row("", f"and {human(memory.slot_state)} of its own")
    table.add_row("the pool", f"{human(memory.pool)} in {engine.pool_pages} pages for {engine.max_slots} slots")
    table.add_row("together", human(memory.total + engine.max_slots * memory.slot_state))
    if inspection.k is not None:
        table.add_row("a round", f"drafts {inspection.k} and verifies {1 + inspection.k} tokens of each request")
    return table


def human(count: int) -> str:
    """Bytes for people."""
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count >= size:
            return f"{count / size:,.2f} {unit}"
    return f"{count} B"
