"""The next round of a request, without running it: what is drafted, how it is scored, what the target says."""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

from dflash_jax.engine import Engine, EngineState, Models
from dflash_jax.engine.host import speculates
from dflash_jax.engine.steps import process_of, propose_from, proposing_head
from dflash_jax.errors import RequestError, StateError, quote
from dflash_jax.kernels.dispatch import Implementation
from dflash_jax.kernels.selector.xla import edge_scores
from dflash_jax.models.drafters import DFlash, Proposal, drafter_of, without_damage
from dflash_jax.models.lm_head import LmHead, draft_head, target_head
from dflash_jax.models.target import extend
from dflash_jax.models.weights import SelectorWeights
from dflash_jax.sampling import target_probs, verify


@dataclasses.dataclass(frozen=True)
class Lattice:
    """One round of one request.

    Attributes:
      position: of the anchor in the text.
      anchor: the last committed token.
      temperature: of the request; 0 is greedy.
      drafted: the tokens that the draft proposes, one for each position after the anchor.
      candidates: the tokens that were considered at each position, best first by their unary scores.
      unary: the LM head's scores of the candidates; None for a kind of draft that has none to show.
      edges: of DFlash 2: the score of each candidate after each candidate of the position before it; at the first
        position, where every predecessor is the anchor, all rows are equal.
      proposal: the probability q with which each candidate was proposed, given what was drafted before it.
      target: the target's probability of each candidate, after the anchor and what was drafted before it. A greedy
        request's are those at temperature 1.
      target_best: the token that the target finds most likely at each position, and after the whole block.
      target_best_probs: how likely.
      verified: how many of the drafted tokens the round verifies, from the first on.
      accepted: how many of those the target keeps.
      next_token: the target's own token after them.
      committed: what the round adds to the output: accepted tokens and the target's own, cut where the request ends.
    """

    position: int
    anchor: int
    temperature: float
    drafted: Int[np.ndarray, " drafts"]
    candidates: Int[np.ndarray, "drafts candidates"]
    unary: Float[np.ndarray, "drafts candidates"] | None
    edges: Float[np.ndarray, "drafts predecessors candidates"] | None
    proposal: Float[np.ndarray, "drafts candidates"]
    target: Float[np.ndarray, "drafts candidates"]
    target_best: Int[np.ndarray, " block"]
    target_best_probs: Float[np.ndarray, " block"]
    verified: int
    accepted: int
    next_token: int
    committed: tuple[int, ...]

    @property
    def path(self) -> Int[np.ndarray, " drafts"]:
        """Which of a position's candidates is the drafted one."""
        return np.argmax(self.candidates == self.drafted[:, None], axis=1)

    @property
    def edges_on_path(self) -> Float[np.ndarray, "drafts candidates"] | None:
        """The scores that decided: of each position's candidates after the token drafted before them."""
        if self.edges is None:
            return None
        before = np.concatenate([[0], self.path[:-1]])
        return self.edges[np.arange(len(before)), before]

    @property
    def rejected(self) -> int | None:
        """The position, counted from 0, whose drafted token the target replaces; None if it keeps all it verifies."""
        return self.accepted if self.accepted < self.verified else None


def peek(engine: Engine, request_id: str | None = None, *, candidates: int = 8) -> Lattice:
    """The next round of a request, without stepping the engine.

    Under `width="auto"` the engine decides in the step how many tokens it verifies; here all of them are.

    Args:
      engine: stays as it is.
      request_id: whose round; may be left out if only one request runs.
      candidates: how many to show at each position of a draft without a selector; a selector has its own number.

    Raises:
      RequestError: the request is not in flight, does not decode yet, is not drafted for, or has structured outputs.
    """
    host = engine.host
    if request_id is None:
        if len(host.running) != 1:
            raise RequestError(f"{len(host.running)} requests run, so peek needs the id of one: {_ids(engine)}")
        request_id = host.running.first.id
    sequence = host.find(request_id)
    if sequence is None:
        raise RequestError(f"no request {quote(request_id)} is in flight; those that are: {_ids(engine)}")
    if sequence.slot is None or not sequence.decoding:
        doing = "waits for a slot" if sequence.slot is None else "still runs its prompt"
        raise RequestError(f"request {quote(request_id)} {doing}; it has a next round once step() has run its prompt")
    if not speculates(host.policy, sequence):
        why = sequence.fallback or "the engine has no draft"
        raise RequestError(f"request {quote(request_id)} is not drafted for ({why}), so it has no lattice")
    if sequence.request.sampling.structured_outputs is not None:
        raise RequestError(
            f"request {quote(request_id)} has structured outputs; its grammar forbids tokens in the midst of a round, "
            "on the host, so that a look at the device's half does not tell what the round would do"
        )
    width = host.policy.width
    return peek_state(
        engine.models,
        _with_processors(engine.state, sequence.slot, sequence.request.is_processed),
        sequence.slot,
        drafts=host.policy.k,
        width=width if isinstance(width, int) else None,
        candidates=candidates,
    )


def _with_processors(state: EngineState, slot: int, active: bool) -> EngineState:
    """The state in which the slot's logits processors act, as the next step would have it."""
    if state.processors is None:
        return state
    return state.replace(processors=state.processors.replace(active=state.processors.active.at[slot].set(active)))


def _ids(engine: Engine) -> str:
    return quote([sequence.id for sequence in engine.host.in_flight])


def peek_state(
    models: Models,
    state: EngineState,
    slot: int,
    *,
    drafts: int | None = None,
    width: int | None = None,
    candidates: int = 8,
    implementation: Implementation | None = None,
) -> Lattice:
    """The next round of a slot: `peek` as a function of the models and the state.

    Args:
      models: target and draft.
      state: the device's half, with a slot that decodes.
      slot: which.
      drafts: k, tokens to draft; as many as the draft was trained for by default.
      width: how many of them are verified; all by default.
      candidates: see `peek`.
      implementation: of the kernels; see `kernels.dispatch`.

    Raises:
      StateError: there is no draft, or the slot does not decode.
    """
    if models.draft is None or models.draft_config is None:
        raise StateError("the models have no draft, so nothing is drafted in their next round")
    slots = state.slots
    if not 0 <= slot < len(slots.position) or not slots.decoding[slot] or slots.finished[slot]:
        raise StateError(f"slot {slot} holds no request that decodes, so it has no next round")
    drafts = models.draft_config.block_size - 1 if drafts is None else drafts
    width = drafts if width is None else min(width, drafts)
    seen = jax.device_get(
        _look(models, state, jnp.asarray([slot], jnp.int32), drafts, width, candidates, implementation)
    )
    accepted, next_token = int(seen.pop("accepted")[0]), int(seen.pop("next_token")[0])
    fields: dict[str, Any] = {name: None if value is None else value[0] for name, value in seen.items()}
    kept = (*fields["drafted"][:accepted].tolist(), next_token)
    return Lattice(
        position=int(slots.position[slot]),
        anchor=int(slots.anchor[slot]),
        temperature=float(slots.sampler.temperature[slot]),
        verified=width,
        accepted=accepted,
        next_token=next_token,
        committed=_cut(kept, int(slots.tokens_left[slot]), np.asarray(slots.stop_tokens[slot]).tolist()),
        **fields,
    )


def _cut(tokens: Sequence[int], left: int, stops: Sequence[int]) -> tuple[int, ...]:
    """The tokens up to the end of the request: its limit, or its first stop token."""
    end = next((at + 1 for at, token in enumerate(tokens) if token in stops), len(tokens))
    return tuple(tokens[: min(end, left)])


@functools.partial(jax.jit, static_argnames=("drafts", "width", "count", "implementation"))
def _look(models: Models, state: EngineState, rows, drafts, width, count, implementation) -> dict[str, Any]:
    slots, config = state.slots, models.draft_config
    assert config is not None
    sampler = jax.tree.map(lambda leaf: leaf[rows], slots.sampler)
    anchor, position = slots.anchor[rows], slots.position[rows]
    drafter, scored = _watched(drafter_of(config))
    raw = propose_from(models, state, rows, sampler, drafts, implementation, drafter)
    block, _ = without_damage(raw, models.target_config.vocab_size)
    tokens, unary, edges = _scores(
        models, proposing_head(models, state, rows, drafts), raw, scored, anchor, count, implementation
    )

    run = jnp.concatenate([anchor[:, None], block.tokens], axis=1)
    extension = extend(
        models.target,
        models.target_config,
        state.target_context(rows),
        run,
        jnp.full(rows.shape, 1 + drafts, jnp.int32),
        recurrent=state.recurrent,
        implementation=implementation,
    )
    logits = target_head(models.target).logits(extension.hidden, implementation=implementation)
    if (process := process_of(state, rows, position + 1, block.tokens)) is not None:
        logits = process(logits)
    verified = jnp.full(rows.shape, width, jnp.int32)
    verdict = verify(logits, block.tokens, verified, block.candidates, block.probs, sampler, position)
    probs = target_probs(logits, sampler)
    best = jnp.argmax(logits, axis=-1)
    same = tokens[..., :, None] == raw.candidates[..., None, :]
    return {
        "drafted": block.tokens,
        "candidates": tokens,
        "unary": unary,
        "edges": edges,
        "proposal": jnp.where(same, raw.probs[..., None, :], 0).sum(-1),
        "target": jnp.take_along_axis(probs[:, :-1], tokens, axis=-1),
        "target_best": best,
        "target_best_probs": jnp.take_along_axis(probs, best[..., None], axis=-1)[..., 0],
        "accepted": verdict.accepted,
        "next_token": verdict.next_token,
    }


def _watched(drafter: Any) -> tuple[Any, dict[str, Any]]:
    """A drafter that proposes as this one does, and what it chose among: the block's hidden states and their scores."""
    scored: dict[str, Any] = {}
    if not isinstance(drafter, DFlash):
        return drafter, scored
    watched: Any = copy.copy(drafter)
    choose = drafter.choose

    def choose_watched(params, hidden, candidates, scores, *rest, **options) -> Proposal:
        scored.update(params=params, hidden=hidden, candidates=candidates, scores=scores)
        return choose(params, hidden, candidates, scores, *rest, **options)

    watched.choose = choose_watched
    return watched, scored


def _scores(
    models: Models, shortlist: LmHead | None, raw: Proposal, scored: dict[str, Any], anchor, count: int, implementation
):
    """The candidates to show, their unary scores, and the edges between them."""
    if not scored:
        return raw.candidates, None, None
    tokens, unary, hidden = scored["candidates"], scored["scores"], scored["hidden"]
    selector = getattr(scored["params"], "selector", None)
    if isinstance(selector, SelectorWeights):
        edges = edge_scores(
            tokens,
            unary,
            hidden @ selector.hidden_projection,
            anchor,
            selector.predecessor_codebook,
            selector.successor_codebook,
        )
        return tokens, unary, edges
    assert models.draft_config is not None
    head = draft_head(models.draft_config, models.target, shortlist)
    count = min(max(count, tokens.shape[-1]), head.size)
    unary, tokens = head.best(hidden, count, implementation=implementation)
    return tokens, unary, None
