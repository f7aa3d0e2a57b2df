"""Which requests of a restored engine the job still wants."""

from __future__ import annotations

from dflash_jax.engine import Engine, SamplingParams, samples_of
from dflash_jax.jobs.reader import Item


class Resumption:
    """The requests that a restored engine has in flight, until the input's lines claim them."""

    def __init__(self, engine: Engine):
        """Looks through an engine; one with no requests in it has nothing to claim."""
        self._engine = engine
        self._open = {p.request.id: p.request for p in engine.host.in_flight}

    @property
    def unclaimed(self) -> tuple[str, ...]:
        """Ids of the requests that no line has claimed so far."""
        return tuple(self._open)

    def claim(self, item: Item) -> list[tuple[str, SamplingParams]]:
        """The samples of an input line that the engine is not answering already, by their ids.

        A request that asks something else than the line does now is aborted. A sample that had finished when the
        snapshot was taken, and whose line had not, is asked for again: it is the same again.

        Raises:
          RequestError: the line's prompt cannot be tokenized.
        """
        samples = samples_of(str(item.id), item.sampling)
        if not any(name in self._open for name, _ in samples):
            return samples
        missing, prompt = [], self._engine.tokenize(item.prompt)
        for name, sampling in samples:
            request = self._open.get(name)
            if request is not None and (prompt, sampling) == (request.prompt, request.sampling):
                del self._open[name]
                continue
            if request is not None:
                self._drop(name)
            missing.append((name, sampling))
        return missing

    def drop_unclaimed(self) -> None:
        """Aborts the requests that no line claims: their answers are written already, or the input has changed."""
        for request_id in self.unclaimed:
            self._drop(request_id)

    def _drop(self, request_id: str) -> None:
        del self._open[request_id]
        self._engine.abort(request_id)
