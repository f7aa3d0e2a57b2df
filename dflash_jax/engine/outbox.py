"""What has been produced and not yet handed out, as tokens and as text."""

from __future__ import annotations

import dataclasses

from dflash_jax.checkpoints import Tokenizer
from dflash_jax.engine.request import Completion, FinishReason, Progress, Request, Update, metrics_of
from dflash_jax.engine.text import TextStream


class Outbox:
    """Updates waiting to be taken, and the text streams of the requests in flight."""

    def __init__(self, tokenizer: Tokenizer | None):
        self._tokenizer = tokenizer
        self._streams: dict[str, TextStream] = {}
        self._updates: dict[str, Update] = {}

    def open(self, request: Request, emitted: tuple[int, ...] = ()) -> None:
        """Begins a request's text, with the tokens it already has."""
        if self._tokenizer is not None:
            stream = self._streams[request.id] = TextStream(self._tokenizer, request)
            stream.push(emitted)
            stream.take_text()

    def push(self, request_id: str, tokens: tuple[int, ...]) -> tuple[tuple[int, ...], bool]:
        """Takes new tokens up to a stop string; returns those taken, and whether there was one."""
        stream = self._streams.get(request_id)
        if stream is None:
            self._deliver(Update(request_id, tokens, None))
            return tokens, False
        taken, stopped = stream.push(tokens)
        self._deliver(Update(request_id, taken, stream.take_text()))
        return taken, stopped

    def close(
        self, progress: Progress, reason: FinishReason, error: str | None = None, *, deliver: bool = True
    ) -> Completion:
        """Ends a request's text and says what came of it, also in the next updates if `deliver`."""
        stream, rest, text = self._streams.pop(progress.request.id, None), None, None
        if stream is not None:
            rest = stream.finish()
            text = stream.text
        completion = Completion(
            id=progress.request.id,
            prompt_tokens=len(progress.request.prompt),
            token_ids=progress.emitted,
            text=text,
            finish_reason=reason,
            error=error,
            fallback=progress.fallback,
            metrics=metrics_of(progress),
            produced_per_round=progress.produced_per_round,
            drafted_blocks=progress.drafted_blocks,
        )
        if deliver:
            self._deliver(Update(completion.id, (), rest, completion))
        return completion

    def take(self) -> tuple[Update, ...]:
        """All updates since the last call, one per request."""
        updates, self._updates = self._updates, {}
        return tuple(updates.values())

    def _deliver(self, update: Update) -> None:
        before = self._updates.get(update.id)
        if before is not None:
            text = None if before.text is None else before.text + (update.text or "")
            update = dataclasses.replace(update, token_ids=before.token_ids + update.token_ids, text=text)
        self._updates[update.id] = update
