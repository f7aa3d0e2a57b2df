"""The engine's whole device state: one immutable pytree.

Everything that outlives a step is filed under a request's slot. A row is only where a request sits in
this step's dense batch, and `rows.idx_mapping` is the one leaf with a row axis: moving requests
between rows cannot touch, lose or exchange anybody's context.
"""

from __future__ import annotations

from typing import Any, NoReturn

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Int, PyTree

from dflash_jax.engine import display
from dflash_jax.engine.processors import Processors, Room, empty_processors
from dflash_jax.engine.request import MAX_STOP_TOKENS
from dflash_jax.errors import StateError
from dflash_jax.kernels.context import Context, KeyValues
from dflash_jax.models.config import DraftConfig, TargetConfig, TransformerConfig
from dflash_jax.models.lm_head import LmHead
from dflash_jax.models.recurrent import Recurrent, init_recurrent
from dflash_jax.models.weights import TargetParams
from dflash_jax.sampling import Sampler


class Models(struct.PyTreeNode):
    """The weights a step runs, with their configs as static structure.

    Attributes:
      target, target_config: the target.
      draft, draft_config: the draft, `DraftParams` or the weights of another kind; None decodes plainly.
      shortlist: the part of the LM head that the draft proposes from; None for all of it.
    """

    target: TargetParams
    target_config: TargetConfig = struct.field(pytree_node=False)
    draft: PyTree | None = None
    draft_config: DraftConfig | None = struct.field(pytree_node=False, default=None)
    shortlist: LmHead | None = None

    @property
    def feature_layers(self) -> tuple[int, ...]:
        """Target layers whose outputs the draft is conditioned on."""
        return () if self.draft_config is None else self.draft_config.target_layer_ids

    def __repr__(self) -> str:
        return f"Models({display.models_text(self)})"


class Rows(struct.PyTreeNode):
    """This step's dense batch: which slot each row holds, -1 for an empty row."""

    idx_mapping: Int[Array, " rows"]


class Slots(struct.PyTreeNode):
    """Requests, one entry each for their whole life.

    Attributes:
      position: tokens in the target's pages. Once decoding it is also the absolute position of the
        anchor, which is committed but has not been run.
      anchor: last committed token.
      draft_len: tokens in the draft's pages; equal to position whenever the slot drafts.
      folded: tokens in the recurrent state; equal to position in a hybrid target, and 0 in others.
      block_table: physical page of each logical page, for target and draft alike; -1 where none.
      tokens_left: tokens the request may still produce.
      stop_tokens: token ids that finish it, padded with -1.
      sampler: how it samples.
      decoding: its prompt is done and its anchor is set.
      speculating: it drafts.
      draft_limit: context tokens past which it no longer drafts.
      finished: it has produced its last token.
      violation: 0, or the `Violation` that stopped it.
    """

    position: Int[Array, " slots"]
    anchor: Int[Array, " slots"]
    draft_len: Int[Array, " slots"]
    folded: Int[Array, " slots"]
    block_table: Int[Array, "slots slot_pages"]
    tokens_left: Int[Array, " slots"]
    stop_tokens: Int[Array, "slots stop_tokens"]
    sampler: Sampler
    decoding: Bool[Array, " slots"]
    speculating: Bool[Array, " slots"]
    draft_limit: Int[Array, " slots"]
    finished: Bool[Array, " slots"]
    violation: Int[Array, " slots"]


class Checkpoints(struct.PyTreeNode):
    """Recurrent states kept for prefixes.

    Attributes:
      states: of all checkpoints, in the place of slots.
      lengths: tokens that were folded into each.
    """

    states: Recurrent
    lengths: Int[Array, " checkpoints"]


class EngineState(struct.PyTreeNode):
    """Everything on the device.

    Attributes:
      rows: row -> slot.
      slots: per-request state.
      target_pages: keys and values of the target, [layers, pages, page_size, kv_heads, head_dim].
      draft_pages: of the draft's context; physical page n holds the same tokens as the target's.
      recurrent: the slots' recurrent states, of a hybrid target.
      checkpoints: states kept at the ends of pages, of a hybrid target.
      processors: what the requests' logits processors keep, once there was a request with any.
    """

    rows: Rows
    slots: Slots
    target_pages: KeyValues
    draft_pages: KeyValues | None
    recurrent: Recurrent | None = None
    checkpoints: Checkpoints | None = None
    processors: Processors | None = None

    def __repr__(self) -> str:
        return display.state_text(self)

    def _repr_html_(self) -> str:
        return display.state_html(self)

    def target_context(self, idx_mapping: Int[Array, " rows"]) -> Context:
        """What the target may attend to, for the given rows."""
        return Context(self.target_pages, self.slots.block_table, idx_mapping, self.slots.position)

    def draft_context(self, idx_mapping: Int[Array, " rows"]) -> Context:
        """What the draft may attend to, for the given rows."""
        assert self.draft_pages is not None
        return Context(self.draft_pages, self.slots.block_table, idx_mapping, self.slots.draft_len)


class _Donated:
    """In the place of an array whose memory a later step has used."""

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise StateError(
            "this state's memory was used again by a later step; to keep old states, make the engine with "
            "engine.donate false (EngineConfig(donate=False))"
        )

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__") and name not in ("__array__", "__jax_array__"):
            # Python and libraries ask for many such names only to see whether they are there.
            raise AttributeError(name)
        self._refuse()

    # Looked up on the class, so `__getattr__` does not see them.
    __getitem__ = __iter__ = __len__ = __int__ = __index__ = __float__ = __bool__ = __array__ = _refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __mod__ = __neg__ = _refuse
    __lt__ = __le__ = __gt__ = __ge__ = __and__ = __or__ = __invert__ = __matmul__ = _refuse

    def __repr__(self) -> str:
        return "<used again by a later step>"


def mark_donated(state: EngineState) -> None:
    """Makes a state whose memory was used again raise `StateError` when it is read."""
    donated = _Donated()
    nodes: list[struct.PyTreeNode] = [state]
    for node in nodes:
        held = vars(node)
        nodes += [value for value in held.values() if isinstance(value, struct.PyTreeNode)]
        held.update({name: donated for name, value in held.items() if isinstance(value, jax.Array)})


def is_donated(state: EngineState) -> bool:
    """Whether a state's memory was used again."""
    return any(isinstance(leaf, _Donated) or leaf.is_deleted() for leaf in jax.tree.leaves(state))


def init_pages(config: TransformerConfig, num_pages: int, page_size: int, dtype: jnp.dtype) -> KeyValues:
    """An empty page pool of one model."""
    shape = (len(config.attention_layers), num_pages, page_size, config.num_kv_heads, config.head_dim)
    return KeyValues(k=jnp.zeros(shape, dtype), v=jnp.zeros(shape, dtype))


def init_state(
    models: Models,
    *,
    rows: int,
    slots: int,
    num_pages: int,
    page_size: int,
    max_model_len: int,
    checkpoints: int = 0,
    processors: bool = False,
) -> EngineState:
    """A state with no requests in it.

    Args:
      models: whose pages to make, in the dtype of the target's embedding.
      rows: length of idx_mapping.
      slots: requests that can be in flight.
      num_pages, page_size: the page pool, shared by target and draft.
      max_model_len: longest prompt and output of a request together, in tokens.
      checkpoints: states that can be kept at the ends of pages; only for hybrid targets.
      processors: make room for logits processors.
    """

    # Every leaf gets a buffer of its own: the state is donated, and a buffer can be donated only once.
    def full(value, dtype, *shape):
        return jnp.full((slots, *shape), value, dtype)

    dtype = models.target.embedding.dtype
    draft_pages = None
    if models.draft_config is not None:
        draft_pages = init_pages(models.draft_config, num_pages, page_size, dtype)
    return EngineState(
        rows=Rows(jnp.full((rows,), -1, jnp.int32)),
        slots=Slots(
            position=full(0, jnp.int32),
            anchor=full(0, jnp.int32),
            draft_len=full(0, jnp.int32),
            folded=full(0, jnp.int32),
            block_table=full(-1, jnp.int32, -(-max_model_len // page_size)),
            tokens_left=full(0, jnp.int32),
            stop_tokens=full(-1, jnp.int32, MAX_STOP_TOKENS),
            sampler=Sampler(
                temperature=full(0, jnp.float32),
                top_k=full(0, jnp.int32),
                top_p=full(1, jnp.float32),
                min_p=full(0, jnp.float32),
                seed=full(0, jnp.uint32),
            ),
            decoding=full(False, bool),
            speculating=full(False, bool),
            draft_limit=full(0, jnp.int32),
            finished=full(False, bool),
            violation=full(0, jnp.int32),
        ),
        target_pages=init_pages(models.target_config, num_pages, page_size, dtype),
        draft_pages=draft_pages,
        recurrent=init_recurrent(models.target_config, slots, dtype),
        checkpoints=_init_checkpoints(models.target_config, checkpoints, dtype),
        processors=_init_processors(
            slots, Room(-(-max_model_len // page_size) * page_size, models.target_config.vocab_size)
        )
        if processors
        else None,
    )


def room_of(models: Models, state: EngineState) -> Room:
    """What the sizes of logits processors follow from."""
    return Room(state.slots.block_table.shape[1] * state.target_pages.k.shape[2], models.target_config.vocab_size)


def with_processors(models: Models, state: EngineState) -> EngineState:
    """The state with room for logits processors, if it has none yet."""
    if state.processors is not None:
        return state
    return state.replace(processors=_init_processors(state.slots.position.shape[0], room_of(models, state)))


def _init_processors(slots: int, room: Room) -> Processors:
    # Arrays of their own: the state is donated, and a buffer can be donated only once.
    return jax.tree.map(jnp.array, empty_processors(slots, room))


def _init_checkpoints(config: TargetConfig, count: int, dtype: jnp.dtype) -> Checkpoints | None:
    states = init_recurrent(config, count, dtype)
    return None if states is None else Checkpoints(states, jnp.zeros((count,), jnp.int32))
