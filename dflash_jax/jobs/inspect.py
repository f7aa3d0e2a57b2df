"""What a checkpoint is, and what serving it takes, from its header alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from rich.table import Table

from dflash_jax.checkpoints import Description, describe
from dflash_jax.checkpoints.tensors import check_weights
from dflash_jax.engine.config import EngineConfig
from dflash_jax.engine.device import default_weights
from dflash_jax.engine.memory import Sizes, divide, sizes_of
from dflash_jax.errors import ConfigError, visible
from dflash_jax.models.config import DraftConfig, TargetConfig, TransformerConfig, check_pair
from dflash_jax.progress import plain_console


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes that a model, or a pair, takes on the device.

    Attributes:
      weights: all parameters.
      sizes: of a page, a slot and a checkpoint.
      pool: all pages.
      slots: all slots, recurrent states included.
      checkpoints: all recurrent states kept for prefixes.
    """

    weights: int
    sizes: Sizes
    pool: int
    slots: int
    checkpoints: int

    @property
    def total(self) -> int:
        """All of it."""
        return self.weights + self.pool + self.slots + self.checkpoints


@dataclasses.dataclass(frozen=True)
class Inspection:
    """A checkpoint, or a target with its draft.

    Attributes:
      models: descriptions, the target first.
      engine: the sizes that the memory is for.
      k: tokens to draft in a round; None without a draft.
      memory: of all models together.
      weights: how each one's are held; None as `engine.dtype`.
    """

    models: tuple[Description, ...]
    engine: EngineConfig
    k: int | None
    memory: Memory
    weights: tuple[str | None, ...]


def inspect_checkpoint(
    path: str | Path,
    *,
    draft: str | Path | None = None,
    k: int | None = None,
    engine: EngineConfig | None = None,
    mask_token_id: int | None = None,
    weights: str | None = None,
    draft_weights: str | None = None,
) -> Inspection:
    """Inspects a checkpoint without loading its weights.

    Args:
      path: a target or a draft, anything `load_target` or `load_draft` takes.
      draft: a draft to go with a target.
      k: tokens to draft in a round; the trained block_size - 1 by default.
      engine: the sizes to work out memory for.
      mask_token_id: for drafts that name none.
      weights: how they are held, as of `load_target`; what the engine would choose by default.
      draft_weights: how those of the draft beside it are.

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
    first, *others = (each.config for each in found)
    if isinstance(first, TargetConfig):
        engine = divide(engine, first, next((other for other in others if isinstance(other, DraftConfig)), None))
    held = [each or default_weights() for each in (weights, draft_weights)[: len(found)]]
    for how, each in zip(held, found, strict=True):
        check_weights(how, engine.dtype, each.role)
    return Inspection(tuple(found), engine, k, _memory(found, engine, held), tuple(held))


def _memory(found: list[Description], engine: EngineConfig, held: Sequence[str | None]) -> Memory:
    sizes = sizes_of(engine, *(each.config for each in found))
    return Memory(
        weights=sum(each.weight_bytes(engine.dtype, how) for each, how in zip(found, held, strict=True)),
        sizes=sizes,
        pool=engine.pool_pages * sizes.page,
        slots=engine.max_slots * sizes.slot,
        checkpoints=engine.kept_states * sizes.checkpoint,
    )


def print_inspection(inspection: Inspection) -> None:
    """Prints an inspection on stdout."""
    console = plain_console()
    for description in inspection.models:
        console.print(visible(f"{description.role} {description.source}"), soft_wrap=True)
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
    memory, sizes, engine = inspection.memory, inspection.memory.sizes, inspection.engine
    table = Table(show_header=False)
    ways = dict.fromkeys("as the file has them" if how == "file" else how or engine.dtype for how in inspection.weights)
    table.add_row("weights", f"{human(memory.weights)}: {', the draft '.join(ways)}")
    table.add_row("a page", f"{human(sizes.page)} for {engine.page_size} tokens")
    longest = human(engine.slot_pages * sizes.page)
    table.add_row("a slot", f"{longest} in {engine.slot_pages} pages for {engine.max_model_len} tokens")
    table.add_row("", f"and {human(sizes.slot)} of its own{', with its recurrent state' if sizes.checkpoint else ''}")
    table.add_row("the pool", f"{human(memory.pool)} in {engine.pool_pages} pages")
    table.add_row("the slots", f"{human(memory.slots)} for {engine.max_slots} requests at once")
    if sizes.checkpoint:
        kept = f"{engine.kept_states} recurrent states of {human(sizes.checkpoint)} kept for prefixes"
        table.add_row("checkpoints", f"{human(memory.checkpoints)} in {kept}")
    table.add_row("together", human(memory.total))
    processors = human(engine.max_slots * sizes.processors)
    table.add_row("logits processors", f"{processors} more, once a request has penalties or forbids tokens")
    if inspection.k is not None:
        table.add_row("a round", f"drafts {inspection.k} and verifies {1 + inspection.k} tokens of each request")
    return table


def human(count: int) -> str:
    """Bytes for people."""
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count >= size:
            return f"{count / size:,.2f} {unit}"
    return f"{count} B"
