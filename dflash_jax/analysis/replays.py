"""Going on from a state with something changed: another k, another drafter, other sampling, a token that was not."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dflash_jax.engine import Completion, Engine, EngineState, SamplingParams
from dflash_jax.engine.admission import make_request
from dflash_jax.engine.config import VerifyWidth
from dflash_jax.engine.containers import Log
from dflash_jax.engine.forks import Draft
from dflash_jax.engine.host import HostState, fallback_of, preempt
from dflash_jax.engine.sequence import Sequence
from dflash_jax.engine.state import is_donated
from dflash_jax.errors import RequestError, StateError, quote

_SAME: Any = object()

State = tuple[HostState, EngineState]
"""A held state: `(engine.host, engine.state)` of some moment."""


def replay(
    engine: Engine | None = None,
    *,
    at: State | str | Path | None = None,
    k: int | None = None,
    width: VerifyWidth | None = _SAME,
    draft: Draft | None = _SAME,
    request_id: str | None = None,
    sampling: SamplingParams | Mapping[str, Any] | None = None,
    force: tuple[int, int] | int | None = None,
) -> Engine:
    """An engine that goes on from a state, with what is given changed. Nothing else notices.

    A request with other sampling or a forced token runs its tokens again, so that both contexts are those of the new
    text. Where a token is forced, its record of rounds and drafts begins anew, and has no log-probabilities.

    Args:
      engine: goes on from here, or gives its models for `at`; may be left out for a snapshot that names its models.
      at: a held state, or the directory of a snapshot; the engine's own state by default.
      k, width, draft: of the speculation; see `Engine.fork`.
      request_id: whose sampling or token; all requests' sampling, or the only request's token, by default.
      sampling: parameters of the answer from here on, or the ones that differ from the request's.
      force: a token that the output has in place of the next one; or (index, token), which puts the token there and
        drops what the output has from there on.

    Raises:
      StateError: the held state's memory was used by a later step.
      RequestError: no such request is in flight, or the forced token cannot be in its output.
      ConfigError, CheckpointError: the snapshot or the draft cannot be used.
    """
    twin = _at(engine, at)
    drafting: dict[str, Any] = {} if width is _SAME else {"width": width}
    if draft is not _SAME:
        drafting["draft"] = draft
    if k is not None or drafting:
        twin = twin.fork(k=k, **drafting)
    if sampling is not None or force is not None:
        # Each goes to the head of the queue, so the first comes last.
        for name in reversed(_chosen(twin, request_id, only_one=force is not None)):
            twin.host = _change(twin, name, sampling, force)
    return twin


def finish(engine: Engine) -> dict[str, Completion]:
    """Steps an engine until nothing is left to do; the completions, by request id."""
    done: dict[str, Completion] = {}
    while engine.has_work:
        done |= {update.id: update.completion for update in engine.step() if update.completion is not None}
    return done


def _at(engine: Engine | None, at: State | str | Path | None) -> Engine:
    """An engine of its own in the state to begin with."""
    if isinstance(at, str | Path):
        return Engine.restore(at, None if engine is None else engine.fork())
    if engine is None:
        raise StateError("replay was given no engine; only a snapshot that names its models can do without one")
    if at is None:
        return engine.fork()
    host, state = at
    if is_donated(state):
        raise StateError(
            "the held state's memory was used again by a later step; make the engine with engine.donate false "
            "(EngineConfig(donate=False)), or hold engine.fork() instead"
        )
    holder = engine.fork()
    holder.host, holder.state = host, state
    # A fork of a fork has memory of its own, and may use it up.
    return holder.fork()


def _chosen(engine: Engine, request_id: str | None, *, only_one: bool) -> list[str]:
    names = [sequence.id for sequence in engine.host.in_flight]
    if request_id is not None:
        if request_id not in names:
            raise RequestError(f"no request {quote(request_id)} is in flight; those that are: {quote(names)}")
        return [request_id]
    if only_one and len(names) != 1:
        raise RequestError(f"a token is forced on one request, and {len(names)} are in flight: {quote(names)}")
    return names


def _change(
    engine: Engine,
    name: str,
    sampling: SamplingParams | Mapping[str, Any] | None,
    force: tuple[int, int] | int | None,
) -> HostState:
    """The host's half with a request changed, which waits to have its contexts computed again."""
    host = engine.host
    sequence = host.find(name)
    assert sequence is not None
    changed = sequence
    if sampling is not None:
        changed = _with_sampling(engine, changed, sampling)
    if force is not None:
        changed = _with_token(engine, changed, force)
    if len(changed.output) >= changed.request.limit:
        raise RequestError(
            f"request {quote(name)} has {len(changed.output)} tokens of output and may have {changed.request.limit}, "
            "so it cannot go on; give it a larger max_tokens, or force an earlier token"
        )
    if name in host.running:
        host = preempt(host, name)
        host = dataclasses.replace(host, counters=host.counters.plus(preemptions=-1))
    waiting = host.waiting.get(name)
    assert waiting is not None
    same = {
        field: getattr(changed, field)
        for field in (
            "request",
            "output",
            "fallback",
            "produced_per_round",
            "drafted_blocks",
            "verified_per_round",
            "preemptions",
            "hashes",
            "logprobs",
        )
    }
    return dataclasses.replace(host, waiting=host.waiting.replace(name, dataclasses.replace(waiting, **same)))


def _with_sampling(engine: Engine, sequence: Sequence, sampling: SamplingParams | Mapping[str, Any]) -> Sequence:
    if not isinstance(sampling, SamplingParams):
        sampling = sequence.request.sampling.override(sampling)
    request = make_request(
        sequence.id,
        sequence.request.prompt,
        sampling,
        target=engine.models.target_config,
        max_model_len=engine.config.max_model_len,
        pool=engine.host.pool,
        tokenizer=engine.tokenizer,
    )
    return dataclasses.replace(sequence, request=request, fallback=fallback_of(engine.host.policy, request))


def _with_token(engine: Engine, sequence: Sequence, force: tuple[int, int] | int) -> Sequence:
    index, token = (len(sequence.output), force) if isinstance(force, int) else force
    if not 0 <= index <= len(sequence.output):
        raise RequestError(
            f"a token is forced at index {index} of the output of request {quote(sequence.id)}, which has "
            f"{len(sequence.output)} tokens; the index must be one of these, or the next"
        )
    vocabulary = engine.models.target_config.vocab_size
    if not 0 <= token < vocabulary:
        raise RequestError(f"the forced token {token} is outside the vocabulary of {vocabulary} tokens")
    return dataclasses.replace(
        sequence,
        output=Log((*sequence.output[:index], token)),
        produced_per_round=Log(),
        drafted_blocks=Log(),
        verified_per_round=Log(),
        # A token that nobody sampled has no log-probability, and a record has one for each token.
        request=dataclasses.replace(
            sequence.request, sampling=dataclasses.replace(sequence.request.sampling, logprobs=None)
        ),
        logprobs=Log(),
        # The hashes are those of pages whose tokens may have changed.
        hashes=Log(),
    )
