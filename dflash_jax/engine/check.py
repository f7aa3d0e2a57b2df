"""One check of everything that must hold between steps, for tests of one's own."""

from __future__ import annotations

from collections.abc import Iterable

import chex
import jax
import numpy as np

from dflash_jax.engine.checkpoints import check_checkpoints
from dflash_jax.engine.host import HostState, speculates
from dflash_jax.engine.identity import identify
from dflash_jax.engine.logprob_records import TokenLogprob
from dflash_jax.engine.pages import check_pages_conserved, pages_for
from dflash_jax.engine.sequence import Sequence
from dflash_jax.engine.state import EngineState, Models, init_state
from dflash_jax.errors import InvariantError


def check_state(models: Models, host: HostState, device: EngineState) -> None:
    """Asserts every invariant of an engine's two halves, as chex's assertions do.

    Steps check what they are about to rely on; this looks at everything, reads the slots back from the
    device, and reads every weight once to tell whether these models wrote the contexts.

    Args:
      models: target and draft that the halves belong to.
      host: the host's half.
      device: the device's half.

    Raises:
      InvariantError: the message begins with the name of an invariant that does not hold: `context_writers`,
        `state_structure`, `one_row_axis`, `slot_exclusive`, `pages_conserved`, `pages_exclusive`,
        `block_table_covers`, `position_monotone`, `context_continuity`, `recurrent_continuity`,
        `checkpoints_conserved`, `checkpoint_length`, `logprobs_complete`, `processor_history` or `slot_entry`.
    """
    different = host.models.difference(identify(models))
    _require(different is None, "context_writers", different or "")
    _check_structure(models, host, device)
    slots = jax.device_get(device.slots)
    mapping = np.asarray(device.rows.idx_mapping)
    live = mapping[mapping >= 0]
    _require(len(set(live)) == len(live), "slot_exclusive", f"idx_mapping {mapping.tolist()} has a slot in two rows")
    held = [sequence.slot for sequence in host.running]
    _require(len(set(held)) == len(held), "slot_exclusive", f"running requests have the slots {held}")
    check_pages_conserved(host.pool, (sequence.pages for sequence in host.running))
    _check_checkpoints(host, device)
    _check_logprobs(host)
    size = host.pool.page_size
    for sequence in host.running:
        name, slot = f"request {sequence.id!r}", sequence.slot
        _require(slot is not None and 0 <= slot < len(slots.position), "slot_exclusive", f"{name} has slot {slot}")
        covered = len(sequence.pages) >= pages_for(sequence.position, size)
        _require(
            covered, "block_table_covers", f"{name} has {len(sequence.pages)} pages for {sequence.position} tokens"
        )
        for page in sequence.pages[sequence.position // size :]:
            shared = host.pool.references[page]
            _require(shared == 1, "pages_exclusive", f"{name} will write page {page}, which {shared} requests hold")
        if not sequence.opened:
            continue
        position, draft_len = int(slots.position[slot]), int(slots.draft_len[slot])
        _require(
            position == sequence.position,
            "position_monotone",
            f"{name} is at position {sequence.position}, its slot {slot} at {position}",
        )
        # Pages that a plan gave are in the table only once the plan is run.
        known = [page for page in slots.block_table[slot].tolist() if page >= 0]
        _require(
            known == list(sequence.pages[: len(known)]) and len(known) >= pages_for(position, size),
            "block_table_covers",
            f"{name} holds pages {list(sequence.pages)}, its slot {slot} has {known}",
        )
        if sequence.request.is_processed:
            _check_history(sequence, device)
        folded = position if device.recurrent is None else int(slots.folded[slot])
        _require(
            folded == position,
            "recurrent_continuity",
            f"{name} is at position {position}, its recurrent state has taken in {folded} tokens",
        )
        if speculates(host.policy, sequence) and slots.speculating[slot]:
            _require(
                draft_len == position,
                "context_continuity",
                f"{name} is at position {position}, its draft's context holds {draft_len} tokens",
            )
        _require(
            bool(slots.decoding[slot]) == sequence.decoding,
            "slot_entry",
            f"{name} is {'' if sequence.decoding else 'not '}decoding, its slot {slot} says otherwise",
        )
        if sequence.decoding:
            anchor, left = int(slots.anchor[slot]), int(slots.tokens_left[slot])
            _require(
                (anchor, left) == (sequence.output[-1], sequence.request.limit - len(sequence.output)),
                "slot_entry",
                f"{name} has last token {sequence.output[-1]} and {sequence.request.limit - len(sequence.output)} "
                f"tokens left, its slot {slot} {anchor} and {left}",
            )


def _check_logprobs(host: HostState) -> None:
    for sequence in host.in_flight:
        asked, prompt = sequence.request.sampling, sequence.request.prompt
        output = () if asked.logprobs is None else tuple(sequence.output)
        _check_records(sequence, "output", sequence.logprobs, output, len(output))
        # Those found before a preemption may be more.
        run = 0 if asked.prompt_logprobs is None else min(sequence.position, len(prompt) - 1)
        _check_records(sequence, "prompt", sequence.prompt_logprobs, prompt[1:], run)


def _check_records(
    sequence: Sequence, part: str, records: Iterable[TokenLogprob], tokens: tuple[int, ...], least: int
) -> None:
    known = tuple(record.token_id for record in records)
    _require(
        len(known) >= least and known == tokens[: len(known)],
        "logprobs_complete",
        f"request {sequence.id!r} has {len(known)} log-probabilities of its {part}, not those of its {least} tokens",
    )


def _check_history(sequence: Sequence, device: EngineState) -> None:
    """The tokens that logits processors look at are the request's."""
    name = f"request {sequence.id!r} in slot {sequence.slot}"
    _require(device.processors is not None, "processor_history", f"{name} needs logits processors, and there are none")
    assert device.processors is not None
    tokens = sequence.tokens(0, len(sequence.request.prompt) + len(sequence.output))
    known = np.asarray(device.processors.history[sequence.slot])[: len(tokens)].tolist()
    _require(known == list(tokens), "processor_history", f"{name} has tokens {tokens}, its logits processors {known}")
    known_len = int(device.processors.prompt_len[sequence.slot])
    _require(
        known_len == len(sequence.request.prompt),
        "processor_history",
        f"{name} has a prompt of {len(sequence.request.prompt)} tokens, its logits processors one of {known_len}",
    )


def _check_checkpoints(host: HostState, device: EngineState) -> None:
    if host.checkpoints is None or device.checkpoints is None:
        held = host.checkpoints is not None, device.checkpoints is not None
        _require(held[0] == held[1], "state_structure", f"checkpoints of host and device are there: {held}")
        return
    check_checkpoints(host.checkpoints)
    lengths = np.asarray(device.checkpoints.lengths)
    for key, checkpoint in host.checkpoints.known.items():
        _require(
            lengths[checkpoint.index] == checkpoint.tokens and checkpoint.tokens % host.pool.page_size == 0,
            "checkpoint_length",
            f"checkpoint {checkpoint.index} of page {key.hex()[:8]} is of {checkpoint.tokens} tokens, on the device "
            f"of {lengths[checkpoint.index]}",
        )


def _check_structure(models: Models, host: HostState, device: EngineState) -> None:
    num_slots, slot_pages = device.slots.block_table.shape
    num_pages, size = device.target_pages.k.shape[1:3]
    _require(
        num_pages >= host.pool.num_pages and size == host.pool.page_size,
        "state_structure",
        f"the host counts {host.pool.num_pages} pages of {host.pool.page_size} tokens, "
        f"the device has {num_pages} of {size}",
    )

    def like(rows: int) -> EngineState:
        return jax.eval_shape(
            lambda: init_state(
                models,
                rows=rows,
                slots=num_slots,
                num_pages=num_pages,
                page_size=size,
                max_model_len=slot_pages * size,
                checkpoints=0 if device.checkpoints is None else device.checkpoints.lengths.shape[0],
                processors=device.processors is not None,
            )
        )

    try:
        chex.assert_trees_all_equal_shapes_and_dtypes(like(device.rows.idx_mapping.shape[0]), device)
    except AssertionError as error:
        raise InvariantError(f"state_structure: {error}") from None


def _require(holds: bool, name: str, what: str) -> None:
    if not holds:
        raise InvariantError(f"{name}: {what}")
