"""Measured costs of rounds, kept between processes: by device, models and whatever else a program is made for."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import logging
import time
from pathlib import Path

import jax

from dflash_jax.compile_cache import own_cache
from dflash_jax.engine.costs import Costs, costs_from_json
from dflash_jax.engine.host import HostState
from dflash_jax.engine.state import Models
from dflash_jax.kernels.dispatch import Implementation
from dflash_jax.private import private_directory, read_private
from dflash_jax.program_files import surroundings
from dflash_jax.writing import replace_file

_log = logging.getLogger(__name__)

_SECONDS = 5.0
"""Between two writings."""


class CostFiles:
    """Reads what earlier engines like this one measured, and writes what this one does, now and then.

    They are kept where compiled programs are, and if those are not kept, neither are costs: a choice that relies on
    costs of a program that would have to be compiled first is no good choice.
    """

    def __init__(self, models: Models, implementation: Implementation | None):
        """Makes files for engines of these models, as they are held, with kernels of an implementation."""
        # Held in fewer bits they are the same models, but quicker ones.
        held = tuple(
            sum(leaf.nbytes for leaf in jax.tree.leaves(part))
            for part in (models.target, models.draft, models.shortlist)
        )
        self._engine = (held, implementation)
        self._written: object = None
        self._due = 0.0

    def read(self, host: HostState) -> Costs:
        """What is known of rounds of this engine's models; nothing if there is no file, or it is damaged."""
        path = self._path(host)
        if path is not None:
            with contextlib.suppress(FileNotFoundError):
                try:
                    return costs_from_json(json.loads(read_private(path)))
                except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
                    _log.debug("%s is passed over: %s", path, error)
        return Costs()

    def write(self, host: HostState) -> None:
        """Keeps what the engine has measured, if there is anything new and the last writing is some seconds ago."""
        if host.experience is None or time.monotonic() < self._due:
            return
        costs = host.experience.costs
        if costs.samples is self._written:
            return
        self._due, self._written = time.monotonic() + _SECONDS, costs.samples
        path = self._path(host)
        if path is not None:
            with contextlib.suppress(OSError):
                replace_file(path, json.dumps(costs.as_json()), mode=0o600)

    def _path(self, host: HostState) -> Path | None:
        cache = own_cache()
        if cache is None:
            return None
        try:
            directory = private_directory(cache / "costs")
        except (OSError, RuntimeError):
            return None
        return directory / _name(host.models, host.policy.k, host.pool.page_size, *self._engine)


@functools.lru_cache(64)
def _name(*engine: object) -> str:
    facts = [*map(repr, engine), *surroundings(jax.local_devices()[0])]
    return hashlib.sha256("\0".join(facts).encode()).hexdigest()[:40] + ".json"
