"""Saving an engine with requests in flight, and restoring it.

A snapshot is the pair (host state, device state): the host's as JSON, the device's by Orbax. Weights
are not in it, only the configuration that they were loaded by.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import immutables
import jax

from dflash_jax.checkpoints.digests import digest, is_whole
from dflash_jax.checkpoints.orbax_io import checkpointing
from dflash_jax.engine.checkpoints import Checkpoint, CheckpointPool
from dflash_jax.engine.containers import Log, Queue
from dflash_jax.engine.host import Counters, HostState, Policy
from dflash_jax.engine.identity import ModelIdentity, ModelsIdentity
from dflash_jax.engine.logprob_records import from_plain
from dflash_jax.engine.output import Completion, Metrics, Update
from dflash_jax.engine.pages import PagePool
from dflash_jax.engine.request import Request, SamplingParams
from dflash_jax.engine.sequence import Sequence
from dflash_jax.engine.state import EngineState
from dflash_jax.engine.width import experience_from_json, experience_to_json
from dflash_jax.errors import CheckpointError, DflashError, reason

_STATE, _HOST, _FILES = "state", "host.json", "files.json"
_VERSION = 5


@dataclasses.dataclass(frozen=True)
class HostSnapshot:
    """The host's part of a snapshot.

    Attributes:
      host: the host's half. Times in it are seconds before the snapshot.
      setup: the engine's configuration as plain values, if it was made from one.
      shape_of: shapes of the device state's leaves, so that an engine of other sizes is refused before they are read.
    """

    host: HostState
    setup: dict[str, Any] | None
    shape_of: dict[str, list[int]]

    @property
    def rows(self) -> int:
        """Rows of the device state's last batch."""
        return self.shape_of[".rows.idx_mapping"][0]

    @property
    def has_processors(self) -> bool:
        """Whether the device state has logits processors."""
        return any(name.startswith(".processors") for name in self.shape_of)


def shapes(state: EngineState) -> dict[str, list[int]]:
    """Shape of each leaf, by name."""
    leaves = jax.tree_util.tree_leaves_with_path(state)
    return {jax.tree_util.keystr(path): list(leaf.shape) for path, leaf in leaves}


def save(directory: Path, state: EngineState, snapshot: HostSnapshot) -> None:
    """Writes a snapshot; it appears under its name only when it is complete, replacing an older one."""
    directory = directory.absolute()
    staging = directory.with_name(directory.name + ".partial")
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir(parents=True)
    with checkpointing().StandardCheckpointer() as checkpointer:
        checkpointer.save(staging / _STATE, _without_empty(state))
    (staging / _HOST).write_text(json.dumps(_to_json(snapshot)), encoding="utf-8")
    files = {str(f.relative_to(staging)): digest(f) for f in sorted(staging.rglob("*")) if f.is_file()}
    (staging / _FILES).write_text(json.dumps(files), encoding="utf-8")
    old = directory.with_name(directory.name + ".old")
    if directory.exists():
        # Otherwise an interruption left the older one under this name, and it is all there is until the new one is.
        shutil.rmtree(old, ignore_errors=True)
        directory.rename(old)
    staging.rename(directory)
    shutil.rmtree(old, ignore_errors=True)


def _without_empty(state: EngineState) -> EngineState:
    """The state with None for arrays of no size, as those of no checkpoints are. Orbax writes none."""
    return jax.tree.map(lambda leaf: leaf if leaf.size else None, state)


def load_host(directory: Path) -> HostSnapshot:
    """Reads the host's part.

    Raises:
      CheckpointError: there is no complete snapshot.
    """
    directory = _find(directory)
    try:
        _check_whole(directory)
        return _from_json(json.loads((directory / _HOST).read_text(encoding="utf-8")))
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError, DflashError) as error:
        raise CheckpointError(f"{directory} is not a snapshot of an engine: {reason(error)}") from None


def check_fits(directory: Path, saved: HostSnapshot, reader: ModelsIdentity, like: EngineState) -> None:
    """Refuses a snapshot that an engine cannot continue.

    Args:
      directory: the snapshot.
      saved: its host's part.
      reader: the engine's models.
      like: a device state of the engine's sizes, with as many rows as the saved one.

    Raises:
      CheckpointError: it is of other models or of other sizes.
    """
    different = saved.host.models.difference(reader)
    if different is not None:
        raise CheckpointError(
            f"{directory} cannot be continued by this engine: {different}; restore it into an engine of those "
            "models, or give restore() the draft to continue with, and the contexts are computed again"
        )
    here = shapes(like)
    if here != saved.shape_of:
        name = next(name for name, shape in here.items() if shape != saved.shape_of.get(name))
        raise CheckpointError(
            f"{directory} is the snapshot of another engine: its state{name} is {saved.shape_of.get(name)}, this "
            f"engine's is {here[name]}"
        )


def load_state(directory: Path, like: EngineState) -> EngineState:
    """Reads the device's part into the structure of `like`.

    Raises:
      CheckpointError: it is damaged.
    """
    place = _find(directory).absolute() / _STATE
    try:
        with checkpointing().StandardCheckpointer() as checkpointer:
            abstract = jax.tree.map(checkpointing().utils.to_shape_dtype_struct, _without_empty(like))
            found = checkpointer.restore(place, abstract)
            return jax.tree.map(lambda leaf, saved: leaf if saved is None else saved, like, found)
    except MemoryError:
        raise
    except Exception as error:  # Orbax and TensorStore raise whatever their parsers do, bare exceptions among it
        raise CheckpointError(f"the engine's state in {place} is damaged: {reason(error)}") from error


def _check_whole(directory: Path) -> None:
    """Refuses a snapshot with a file that is missing or changed; TensorStore reads some of them as other numbers."""
    files = json.loads((directory / _FILES).read_text(encoding="utf-8"))
    for name, expected in files.items():
        if ".." in Path(name).parts or not is_whole(directory / name, expected):
            raise ValueError(f"its file {name} is missing, cut or changed since it was written")


def _find(directory: Path) -> Path:
    """The snapshot, or the one it was about to replace when it was interrupted."""
    old = directory.with_name(directory.name + ".old")
    return old if old.exists() and not directory.exists() else directory


def _to_json(snapshot: HostSnapshot) -> dict[str, Any]:
    host, pool = snapshot.host, snapshot.host.pool
    return {
        "version": _VERSION,
        "policy": dataclasses.asdict(host.policy),
        "models": dataclasses.asdict(host.models),
        "waiting": [_sequence_to_json(sequence) for sequence in host.waiting],
        "running": [_sequence_to_json(sequence) for sequence in host.running],
        "undelivered": [dataclasses.asdict(update) for update in host.undelivered],
        "next_id": host.next_id,
        "counters": dataclasses.asdict(host.counters),
        "experience": None if host.experience is None else experience_to_json(host.experience),
        "pool": {
            "num_pages": pool.num_pages,
            "page_size": pool.page_size,
            "free": [pool.free[at] for at in range(len(pool.free))],
            "idle": list(pool.idle),
            "page_of": {key.hex(): page for key, page in pool.page_of.items()},
            "hits": pool.hits,
            "misses": pool.misses,
            "evictions": pool.evictions,
        },
        "checkpoints": None if host.checkpoints is None else _checkpoints_to_json(host.checkpoints),
        "setup": snapshot.setup,
        "shape_of": snapshot.shape_of,
    }


def _checkpoints_to_json(pool: CheckpointPool) -> dict[str, Any]:
    return {
        "capacity": pool.capacity,
        "free": list(pool.free),
        "known": [[key.hex(), checkpoint.index, checkpoint.tokens] for key, checkpoint in pool.known.items()],
        "evictions": pool.evictions,
    }


def _checkpoints_from_json(values: dict[str, Any]) -> CheckpointPool:
    known = ((bytes.fromhex(key), Checkpoint(index, tokens)) for key, index, tokens in values["known"])
    free = Queue((index, index) for index in values["free"])
    return CheckpointPool(values["capacity"], free, Queue(known), values["evictions"])


def _from_json(values: dict[str, Any]) -> HostSnapshot:
    if values["version"] != _VERSION:
        raise ValueError(f"it is of version {values['version']}, and this package reads version {_VERSION}")
    models, pool = values["models"], values["pool"]
    waiting, running = ([_sequence_from_json(one) for one in values[name]] for name in ("waiting", "running"))
    updates = [_update_from_json(update) for update in values["undelivered"]]
    page_of = immutables.Map({bytes.fromhex(key): page for key, page in pool["page_of"].items()})
    references = Counter(page for sequence in running for page in sequence.pages)
    host = HostState(
        policy=Policy(**values["policy"]),
        models=ModelsIdentity(
            ModelIdentity(**models["target"]), None if models["draft"] is None else ModelIdentity(**models["draft"])
        ),
        pool=PagePool(
            num_pages=pool["num_pages"],
            page_size=pool["page_size"],
            free=immutables.Map(dict(enumerate(pool["free"]))),
            references=immutables.Map(references),
            page_of=page_of,
            hash_of=immutables.Map({page: key for key, page in page_of.items()}),
            idle=Queue((page, page) for page in pool["idle"]),
            hits=pool["hits"],
            misses=pool["misses"],
            evictions=pool["evictions"],
        ),
        checkpoints=None if values["checkpoints"] is None else _checkpoints_from_json(values["checkpoints"]),
        waiting=Queue((sequence.id, sequence) for sequence in waiting),
        running=Queue((sequence.id, sequence) for sequence in running),
        undelivered=Queue((update.id, update) for update in updates),
        next_id=values["next_id"],
        counters=Counters(**values["counters"]),
        experience=None if values["experience"] is None else experience_from_json(values["experience"]),
    )
    return HostSnapshot(host, values["setup"], values["shape_of"])


_LOGS = ("output", "pages", "produced_per_round", "drafted_blocks", "verified_per_round", "logprobs", "prompt_logprobs")


def _sequence_to_json(sequence: Sequence) -> dict[str, Any]:
    fields = {field.name: getattr(sequence, field.name) for field in dataclasses.fields(sequence)}
    return {
        **fields,
        **{name: list(fields[name]) for name in _LOGS},
        # Page hashes follow from the tokens.
        "hashes": [],
        "request": dataclasses.asdict(sequence.request),
    }


def _sequence_from_json(values: dict[str, Any]) -> Sequence:
    request = values["request"]
    sampling: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in request["sampling"].items()}
    logs = {name: Log(values[name]) for name in _LOGS}
    return Sequence(
        **{
            **values,
            **logs,
            "drafted_blocks": Log(tuple(block) for block in values["drafted_blocks"]),
            **{name: Log(map(from_plain, values[name])) for name in ("logprobs", "prompt_logprobs")},
            "hashes": Log(),
            "saves": tuple(values["saves"]),
            "request": Request(
                id=request["id"],
                prompt=tuple(request["prompt"]),
                sampling=SamplingParams(**sampling),
                stop_tokens=tuple(request["stop_tokens"]),
                limit=request["limit"],
                bad_words=tuple(map(tuple, request.get("bad_words", ()))),
            ),
        }
    )


def _update_from_json(values: dict[str, Any]) -> Update:
    completion = values["completion"]
    if completion is not None:
        blocks = tuple(tuple(block) for block in completion["drafted_blocks"])
        lists = ("token_ids", "produced_per_round", "verified_per_round", "others")
        metrics = Metrics(**completion["metrics"])
        others = {"drafted_blocks": blocks, "metrics": metrics, **_logprobs_from_json(completion)}
        completion = Completion(**{**completion, **{name: tuple(completion[name]) for name in lists}, **others})
    return Update(values["id"], tuple(values["token_ids"]), values["text"], completion, **_logprobs_from_json(values))


def _logprobs_from_json(values: dict[str, Any]) -> dict[str, Any]:
    """Those of an update or a completion."""
    return {
        name: None if values[name] is None else tuple(one if one is None else from_plain(one) for one in values[name])
        for name in ("logprobs", "prompt_logprobs")
    }
