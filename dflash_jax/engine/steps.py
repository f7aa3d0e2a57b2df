"""The transitions of the device's state: prefill a chunk, and run rounds.

Steps act on the rows of the state they are given: extend the target by some tokens of each row, decide
the next token, commit. Forward passes only read the pages; what is committed is written by one scatter
at the end. Rejected tokens are never written anywhere, so nothing drafted can reach a page that
somebody else shares.
"""

from __future__ import annotations

import chex
import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int, UInt32

from dflash_jax.engine import logprobs as scores
from dflash_jax.engine.invariants import violations
from dflash_jax.engine.processors import UNKNOWN, Process, processing, record_tokens
from dflash_jax.engine.prospects import bins_of, hand_out, survival
from dflash_jax.engine.state import EngineState, Models, Slots
from dflash_jax.engine.verification import undecided, verify_hidden
from dflash_jax.kernels.dispatch import Implementation
from dflash_jax.kernels.packing import Packing, pack, packing_of
from dflash_jax.models.drafters import Drafter, Proposal, drafter_of, without_damage
from dflash_jax.models.lm_head import LmHead, target_head
from dflash_jax.models.recurrent import commit
from dflash_jax.models.target import Extension, extend
from dflash_jax.sampling import Logprobs, Sampler
from dflash_jax.sampling.masks import unpack_mask


class Report(struct.PyTreeNode):
    """What a step did, row by row, for the host; the rounds of a step are stacked on a leading axis.

    Attributes:
      tokens: newly committed tokens, the first `produced` of them real.
      produced: how many; 0 for rows that did nothing.
      drafts: the drafted block.
      num_drafts: how many tokens were drafted: all of the block, or 0.
      num_verified: how many of them were verified, from the first on.
      bins: how sure the draft was of each drafted token, as `prospects.bins_of` says.
      damaged_draft: the draft's scores were not finite; its tokens may be anything.
      position: the slot's position after the step.
      finished: the request has produced its last token.
      stopped: it did so by a stop token.
      violation: the `Violation` found, because of which the row did nothing.
      logprobs: of `tokens`, where they were asked for.
      prompt_logprobs: of the tokens that follow those of a chunk, where they were asked for.
    """

    tokens: Int[Array, "*rounds rows block"]
    produced: Int[Array, "*rounds rows"]
    drafts: Int[Array, "*rounds rows drafts"]
    num_drafts: Int[Array, "*rounds rows"]
    num_verified: Int[Array, "*rounds rows"]
    bins: Int[Array, "*rounds rows drafts"]
    damaged_draft: Bool[Array, "*rounds rows"]
    position: Int[Array, "*rounds rows"]
    finished: Bool[Array, "*rounds rows"]
    stopped: Bool[Array, "*rounds rows"]
    violation: Int[Array, "*rounds rows"]
    logprobs: Logprobs | None = None
    prompt_logprobs: Logprobs | None = None


def prefill(
    models: Models,
    state: EngineState,
    tokens: Int[Array, "rows chunk"],
    q_len: Int[Array, " rows"],
    last: Bool[Array, " rows"],
    known_next: Int[Array, " rows"],
    following: Int[Array, "rows chunk"] | None = None,
    *,
    logprobs: int | None = None,
    prompt_logprobs: int | None = None,
    masks: UInt32[Array, "rows 1 words"] | None = None,
    implementation: Implementation | None = None,
) -> tuple[EngineState, Report]:
    """Runs the next chunk of each row's prompt.

    Args:
      models: target and draft.
      state: the engine's state, with the prefilling rows as its rows.
      tokens: the chunks.
      q_len: real tokens in each chunk; 0 for a row that does nothing.
      last: the chunk ends the prompt: its last token's logits decide the anchor, and the slot decodes.
      known_next: the anchor of a request that resumes, which is committed already; -1 to sample it.
      following: the token after each of the chunks', where `prompt_logprobs` are wanted.
      logprobs: report the anchor's log-probability and those of so many of the most likely tokens; None reports none.
      prompt_logprobs: the same of the tokens in `following`.
      masks: the tokens that each row may sample; all by default.
      implementation: of the kernels; see `kernels.dispatch`.
    """
    idx_mapping, slots = state.rows.idx_mapping, state.slots
    slot = jnp.maximum(idx_mapping, 0)
    live = (idx_mapping >= 0) & (q_len > 0) & ~slots.decoding[slot] & (slots.violation[slot] == 0)
    drafting = live & slots.speculating[slot]
    violation = violations(state, jnp.where(live, idx_mapping, -1), drafting, q_len)
    live &= violation == 0
    sampler = _sampler_of(slots, slot, live)

    rows = jnp.where(live, idx_mapping, -1)
    extension = _extend(models, state, rows, tokens, jnp.where(live, q_len, 0), implementation, prefill=True)
    final = jnp.take_along_axis(extension.hidden, jnp.maximum(q_len - 1, 0)[:, None, None], axis=1)
    none = _no_proposal(idx_mapping.shape[0])
    logits = scores.written_logits(models, final, logprobs, implementation)
    length = slots.position[slot] + q_len
    verdict = verify_hidden(
        models,
        final,
        none,
        jnp.zeros_like(q_len),
        sampler,
        length - 1,
        implementation,
        process=process_of(state, slot, length, none.tokens, masks),
        written=logits,
    )
    ends = live & last
    sampled = ends & (known_next < 0)
    violation = jnp.where(sampled & (violation == 0), undecided(verdict), violation)
    live, ends, sampled = (rows & (violation == 0) for rows in (live, ends, sampled))
    anchor = jnp.where(known_next < 0, verdict.next_token, known_next)
    produced, stopped = _cut(slots, slot, anchor[:, None], sampled.astype(jnp.int32))
    finished = sampled & (stopped | (slots.tokens_left[slot] - produced <= 0))
    # The last layer's attention reads the pages that are written here. Its keys and values are there before it,
    # so without a token to wait for, XLA could write first, and would copy all pages to be able to.
    committed = jnp.where(live & (verdict.next_token >= 0), q_len, 0)
    rows = jnp.where(live, idx_mapping, -1)
    state = _commit(models, state, extension, rows, drafting & live, committed, implementation)
    state = _update(state, jnp.where(ends, idx_mapping, -1), anchor=anchor, decoding=ends, finished=finished)
    state = _update(state, jnp.where(sampled, idx_mapping, -1), tokens_left=slots.tokens_left[slot] - produced)
    state = _update(state, jnp.where(violation > 0, idx_mapping, -1), violation=violation)
    state = _record(state, jnp.where(sampled, idx_mapping, -1), length, anchor[:, None], produced)
    return state, Report(
        tokens=anchor[:, None],
        produced=produced,
        drafts=none.tokens,
        num_drafts=jnp.zeros_like(q_len),
        num_verified=jnp.zeros_like(q_len),
        bins=none.tokens,
        damaged_draft=jnp.zeros_like(live),
        position=state.slots.position[slot],
        finished=finished,
        stopped=stopped,
        violation=violation,
        logprobs=scores.block_logprobs(logits, anchor[:, None], logprobs),
        prompt_logprobs=scores.prompt_logprobs(models, extension.hidden, following, prompt_logprobs, implementation),
    )


def run_round(
    models: Models,
    state: EngineState,
    chance: Float[Array, "drafts bins"] | None = None,
    *,
    drafts: int,
    width: int | None = None,
    tokens: int | None = None,
    logprobs: int | None = None,
    block: Proposal | None = None,
    masks: UInt32[Array, "rows positions words"] | None = None,
    implementation: Implementation | None = None,
) -> tuple[EngineState, Report]:
    """Propose, verify, accept, commit, for every decoding slot among the rows.

    Args:
      models: target and draft.
      state: the engine's state; rows whose slots still prefill do nothing.
      chance: that a drafted token is kept if those before it are, by position and bin; see `prospects`. Needed
        where `tokens` is given.
      drafts: k, tokens to draft; 0 decodes plainly. Slots that do not speculate, or whose context has
        passed their draft_limit, decode plainly in any case.
      width: how many of a block's drafted tokens are verified, at most; all by default.
      tokens: how many tokens the target runs, anchors included: at least as many as rows. The drafted ones among them
        are those that are most likely to be kept. None runs rows x (1 + width).
      logprobs: report each token's log-probability and those of so many of the most likely tokens; None reports none.
      block: what `propose` returned, or what became of it; by default it is proposed here.
      masks: the tokens that may be sampled after the anchor and after each drafted token; all by default.
      implementation: of the kernels; see `kernels.dispatch`.
    """
    idx_mapping, slots = state.rows.idx_mapping, state.slots
    live, speculating, violation = _who(state, drafts)
    slot = jnp.maximum(idx_mapping, 0)
    drafting = speculating & (drafts > 0)
    width = drafts if width is None else min(width, drafts)
    sampler = _sampler_of(slots, slot, live)
    position, anchor = slots.position[slot], slots.anchor[slot]

    with jax.named_scope("propose"):
        if block is None:
            block = propose_from(models, state, jnp.where(drafting, idx_mapping, -1), sampler, drafts, implementation)
        block, damaged = without_damage(block, models.target_config.vocab_size)
        bins = bins_of(jnp.zeros(block.tokens.shape) if block.margin is None else block.margin)
    with jax.named_scope("verify"):
        proposal = block.first(width)
        run = jnp.concatenate([anchor[:, None], proposal.tokens], axis=1)
        num_verified, packing = jnp.where(drafting, width, 0), None
        if tokens is not None and tokens < run.size:
            assert chance is not None, "which tokens are verified depends on the chance that they are kept"
            likely = survival(bins, chance)[:, :width]
            num_verified = hand_out(likely, drafting, tokens - live.sum())
            packing = packing_of(jnp.where(live, 1 + num_verified, 0), 1 + width, tokens)
        q_len = jnp.where(live, 1 + num_verified, 0)
        extension = _extend(
            models, state, jnp.where(live, idx_mapping, -1), run, q_len, implementation, packing=packing
        )
    with jax.named_scope("accept"):
        logits = scores.written_logits(models, extension.hidden, logprobs, implementation)
        verdict = verify_hidden(
            models,
            extension.hidden,
            proposal,
            num_verified,
            sampler,
            position,
            implementation,
            packing=packing,
            written=logits,
            process=process_of(state, slot, position + 1, proposal.tokens, masks),
        )
        violation = jnp.where(live, undecided(verdict), violation)
        live, speculating = live & (violation == 0), speculating & (violation == 0)
        offsets = jnp.arange(1 + width)
        accepted, next_token = verdict.accepted[:, None], verdict.next_token[:, None]
        drafted = jnp.pad(proposal.tokens, ((0, 0), (0, 1)))
        kept = jnp.where(offsets < accepted, drafted, jnp.where(offsets == accepted, next_token, 0))
        produced, stopped = _cut(slots, slot, kept, jnp.where(live, 1 + verdict.accepted, 0))
    with jax.named_scope("commit"):
        left = slots.tokens_left[slot] - produced
        finished = live & (stopped | (left <= 0))
        rows = jnp.where(live, idx_mapping, -1)
        state = _commit(models, state, extension, rows, speculating, produced, implementation, packing=packing)
        state = _update(
            state,
            rows,
            anchor=jnp.take_along_axis(kept, jnp.maximum(produced - 1, 0)[:, None], axis=1)[:, 0],
            tokens_left=left,
            finished=finished,
            # A slot that does not keep up its context must not draft again.
            speculating=speculating,
        )
        state = _update(state, jnp.where(violation > 0, idx_mapping, -1), violation=violation)
        state = _record(state, rows, position + 1, kept, produced)
    return state, Report(
        tokens=kept,
        produced=produced,
        drafts=block.tokens,
        num_drafts=jnp.where(live & drafting, drafts, 0),
        num_verified=jnp.where(live, num_verified, 0),
        bins=bins,
        damaged_draft=live & drafting & damaged,
        position=state.slots.position[slot],
        finished=finished,
        stopped=stopped,
        violation=violation,
        logprobs=scores.block_logprobs(logits, kept, logprobs, packing=packing),
    )


def propose(
    models: Models, state: EngineState, *, drafts: int, implementation: Implementation | None = None
) -> Proposal:
    """What a round would draft, for every slot among the rows that drafts; see `run_round`."""
    live, speculating, _ = _who(state, drafts)
    idx_mapping = state.rows.idx_mapping
    sampler = _sampler_of(state.slots, jnp.maximum(idx_mapping, 0), live)
    rows = jnp.where(speculating & (drafts > 0), idx_mapping, -1)
    return propose_from(models, state, rows, sampler, drafts, implementation)


def _who(state: EngineState, drafts: int) -> tuple[Bool[Array, " rows"], Bool[Array, " rows"], Int[Array, " rows"]]:
    """The rows that a round acts on, those of them that speculate, and what keeps others from it."""
    idx_mapping, slots = state.rows.idx_mapping, state.slots
    slot = jnp.maximum(idx_mapping, 0)
    live = (idx_mapping >= 0) & slots.decoding[slot] & ~slots.finished[slot] & (slots.violation[slot] == 0)
    # Who speculates keeps up the context it drafts from, in rounds without a draft as well.
    speculating = live & slots.speculating[slot] & (slots.position[slot] <= slots.draft_limit[slot])
    most = jnp.minimum(jnp.where(speculating, 1 + drafts, 1), slots.tokens_left[slot])
    violation = violations(state, jnp.where(live, idx_mapping, -1), speculating, most)
    live &= violation == 0
    speculating &= live
    return live, speculating, violation


def run_rounds(
    models: Models,
    state: EngineState,
    chance: Float[Array, "drafts bins"] | None = None,
    *,
    drafts: int,
    rounds: int,
    width: int | None = None,
    tokens: int | None = None,
    logprobs: int | None = None,
    implementation: Implementation | None = None,
) -> tuple[EngineState, Report]:
    """Up to `rounds` rounds without the host, ending early when a request finishes or fails.

    Reports of rounds that were not run have `produced` 0 everywhere.
    """

    def one(state):
        return run_round(
            models,
            state,
            chance,
            drafts=drafts,
            width=width,
            tokens=tokens,
            logprobs=logprobs,
            implementation=implementation,
        )

    _, shapes = jax.eval_shape(one, state)
    reports = jax.tree.map(lambda leaf: jnp.zeros((rounds, *leaf.shape), leaf.dtype), shapes)

    def unchanged(carry):
        _, reports, done = carry
        return (done < rounds) & ~jnp.any(reports.finished | (reports.violation > 0))

    def advance(carry):
        state, reports, done = carry
        state, report = one(state)
        return state, jax.tree.map(lambda all_, leaf: all_.at[done].set(leaf), reports, report), done + 1

    if rounds == 1:
        state, report = one(state)
        return state, jax.tree.map(lambda leaf: leaf[None], report)
    state, reports, _ = jax.lax.while_loop(unchanged, advance, (state, reports, jnp.zeros((), jnp.int32)))
    return state, reports


def _sampler_of(slots: Slots, slot: Int[Array, " rows"], live: Bool[Array, " rows"]) -> Sampler:
    """Each row's sampler; rows that do nothing are greedy, so that they ask for no work."""
    sampler = jax.tree.map(lambda leaf: leaf[slot], slots.sampler)
    return sampler.replace(temperature=jnp.where(live, sampler.temperature, 0))


def _no_proposal(rows: int) -> Proposal:
    nothing = jnp.zeros((rows, 0), jnp.int32)
    return Proposal(nothing, nothing[..., None], jnp.zeros((rows, 0, 1), jnp.float32))


def propose_from(
    models: Models,
    state: EngineState,
    idx_mapping: Int[Array, " rows"],
    sampler: Sampler,
    drafts: int,
    implementation: Implementation | None,
    drafter: Drafter | None = None,
) -> Proposal:
    """What is drafted for the rows' slots, by the models' kind of draft or by another."""
    if drafts == 0:
        return _no_proposal(idx_mapping.shape[0])
    assert models.draft is not None and models.draft_config is not None
    context = state.draft_context(idx_mapping)
    slot = jnp.maximum(idx_mapping, 0)
    return (drafter or drafter_of(models.draft_config)).propose(
        models.draft,
        models.draft_config,
        models.target,
        context,
        state.slots.anchor[slot],
        drafts,
        sampler,
        shortlist=proposing_head(models, state, slot, drafts),
        implementation=implementation,
    )


def proposing_head(models: Models, state: EngineState, slot: Int[Array, " rows"], drafts: int) -> LmHead | None:
    """The head that the slots' drafts propose from, if it is not the target's own.

    What logits processors forbid is not proposed, and the rest is proposed by scores like those that will be verified.
    """
    unknown = jnp.full((slot.shape[0], drafts), UNKNOWN, jnp.int32)
    process = process_of(state, slot, state.slots.position[slot] + 1, unknown)
    if process is None:
        return models.shortlist
    vocab_size = models.target_config.vocab_size

    def listed(logits, tokens):
        if tokens is None:
            return process(logits)
        whole = jnp.full((*logits.shape[:-1], vocab_size), -jnp.inf, jnp.float32)
        return process(whole.at[..., tokens].set(logits))[..., tokens]

    head = target_head(models.target) if models.shortlist is None else models.shortlist
    return head.replace(process=listed)


def process_of(state: EngineState, slot, length, drafts, masks=None) -> Process | None:
    """What the rows' logits processors and masks do to logits after `length` tokens and the drafted ones, if anything.

    Nothing is done where there are none of them: the target's best token is then enough.
    """
    process = None
    if state.processors is not None:
        process = processing(state.processors, slot, length, drafts, state.slots.stop_tokens[slot])
    if masks is None:
        return process

    def masked(logits):
        logits = logits.astype(jnp.float32) if process is None else process(logits)
        return jnp.where(unpack_mask(masks, logits.shape[-1]), logits, -jnp.inf)

    return masked


def _record(state: EngineState, idx_mapping, start, tokens, count) -> EngineState:
    """The state whose logits processors know the first `count` of each row's tokens."""
    if state.processors is None:
        return state
    return state.replace(processors=record_tokens(state.processors, idx_mapping, start, tokens, count))


def _extend(
    models: Models,
    state: EngineState,
    idx_mapping,
    tokens,
    q_len,
    implementation,
    *,
    prefill: bool = False,
    packing: Packing | None = None,
) -> Extension:
    return extend(
        models.target,
        models.target_config,
        state.target_context(idx_mapping),
        tokens,
        q_len,
        recurrent=state.recurrent,
        prefill=prefill,
        packing=packing,
        feature_layers=models.feature_layers,
        implementation=implementation,
    )


def _cut(
    slots: Slots, slot: Int[Array, " rows"], tokens: Int[Array, "rows block"], count: Int[Array, " rows"]
) -> tuple[Int[Array, " rows"], Bool[Array, " rows"]]:
    """How many of the first `count` tokens are produced before the request ends, and whether a stop token ends it."""
    count = jnp.minimum(count, slots.tokens_left[slot])
    stops = jnp.any(tokens[:, :, None] == slots.stop_tokens[slot][:, None, :], axis=-1)
    stops &= jnp.arange(tokens.shape[1]) < count[:, None]
    stopped = jnp.any(stops, axis=1)
    return jnp.where(stopped, jnp.argmax(stops, axis=1) + 1, count), stopped


def _commit(
    models: Models,
    state: EngineState,
    extension: Extension,
    idx_mapping: Int[Array, " rows"],
    speculating: Bool[Array, " rows"],
    count: Int[Array, " rows"],
    implementation: Implementation | None,
    *,
    packing: Packing | None = None,
) -> EngineState:
    """Appends the first `count` of each row's tokens to its target context and, where `speculating`, draft context.

    A hybrid target's recurrent states take in the same tokens and no others.
    """
    slot = jnp.maximum(idx_mapping, 0)
    position, draft_len = state.slots.position[slot], state.slots.draft_len[slot]
    target_context = state.target_context(idx_mapping)
    target_pages = target_context.write(extension.entries, count, packing=packing, implementation=implementation)
    draft_pages = state.draft_pages
    if models.draft is not None and models.draft_config is not None:
        width = extension.features.shape[1] if packing is None else packing.place.shape[1]
        positions = pack(position[:, None] + jnp.arange(width), packing)
        drafter = drafter_of(models.draft_config)
        entries = drafter.context_entries(models.draft, models.draft_config, extension.features, positions)
        draft_context = state.draft_context(jnp.where(speculating, idx_mapping, -1))
        draft_pages = draft_context.write(entries, count, packing=packing, implementation=implementation)
    recurrent, folded = state.recurrent, state.slots.folded[slot]
    if recurrent is not None:
        assert extension.changes is not None
        recurrent = commit(recurrent, extension.changes, idx_mapping, count, implementation=implementation)
        folded += count
    after = _update(
        state.replace(target_pages=target_pages, draft_pages=draft_pages, recurrent=recurrent),
        idx_mapping,
        position=position + count,
        folded=folded,
        draft_len=jnp.where(speculating, draft_len + count, draft_len),
    )
    chex.assert_trees_all_equal_shapes_and_dtypes(state, after)
    return after


def _update(state: EngineState, idx_mapping: Int[Array, " rows"], **fields: Array) -> EngineState:
    """Writes per-row values to the slots of the rows; -1 rows are left out."""
    num_slots = state.slots.position.shape[0]
    # One past the end: a scatter in "drop" mode leaves such rows out.
    slot = jnp.where(idx_mapping >= 0, idx_mapping, num_slots)
    changed = {name: getattr(state.slots, name).at[slot].set(value, mode="drop") for name, value in fields.items()}
    return state.replace(slots=state.slots.replace(**changed))
