"""Saving an engine in the middle of its work, and going on from there.

A snapshot is the pair (host state, device state): the host's as JSON, the device's by Orbax. Weights
are not in it; what they were loaded from is.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from dflash_jax.engine.pages import PagePool
from dflash_jax.engine.request import Progress, Request, SamplingParams
from dflash_jax.engine.scheduler import HostState
from dflash_jax.engine.state import EngineState
from dflash_jax.errors import CheckpointError

_STATE, _HOST = "state", "host.json"


@dataclasses.dataclass(frozen=True)
class HostSnapshot:
    """The host's part of a snapshot.

    Attributes:
      host: queue, running requests, page account. Times in it are seconds before the snapshot.
      next_id: for made-up request ids.
      setup: the engine's configuration as plain values, if it was made from one.
      shape_of: shapes of the device state's leaves, to tell early that an engine is of another kind.
    """

    host: HostState
    next_id: int
    setup: dict[str, Any] | None
    shape_of: dict[str, list[int]]


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
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(staging / _STATE, state)
    (staging / _HOST).write_text(json.dumps(_host_to_json(snapshot)), encoding="utf-8")
    old = directory.with_name(directory.name + ".old")
    shutil.rmtree(old, ignore_errors=True)
    if directory.exists():
        directory.rename(old)
    staging.rename(directory)
    shutil.rmtree(old, ignore_errors=True)


def load_host(directory: Path) -> HostSnapshot:
    """Reads the host's part.

    Raises:
      CheckpointError: there is no complete snapshot.
    """
    directory = _find(directory)
    try:
        return _host_from_json(json.loads((directory / _HOST).read_text(encoding="utf-8")))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{directory} is not a snapshot of an engine: {error}") from None


def load_state(directory: Path, like: EngineState) -> EngineState:
    """Reads the device's part into the structure of `like`."""
    with ocp.StandardCheckpointer() as checkpointer:
        abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, like)
        return checkpointer.restore(_find(directory).absolute() / _STATE, abstract)


def _find(directory: Path) -> Path:
    """The snapshot, or the one it was about to replace when it was interrupted."""
    old = directory.with_name(directory.name + ".old")
    return old if old.exists() and not directory.exists() else directory


def _host_to_json(snapshot: HostSnapshot) -> dict[str, Any]:
    host = snapshot.host
    pool = dataclasses.asdict(host.pool) | {
        "references": host.pool.references.tolist(),
        "free": host.pool.free.tolist(),
        "page_of": {key.hex(): page for key, page in host.pool.page_of.items()},
        "hash_of": {},
    }
    return {
        "host": {
            **{f.name: getattr(host, f.name) for f in dataclasses.fields(host) if f.type == "int"},
            "waiting": [dataclasses.asdict(progress) for progress in host.waiting],
            "running": [dataclasses.asdict(progress) for progress in host.running],
            "pool": pool,
        },
        "next_id": snapshot.next_id,
        "setup": snapshot.setup,
        "shape_of": snapshot.shape_of,
    }


def _host_from_json(values: dict[str, Any]) -> HostSnapshot:
    host, pool = values["host"], values["host"]["pool"]
    page_of = {bytes.fromhex(key): page for key, page in pool["page_of"].items()}
    restored = PagePool(
        **{
            **pool,
            "references": np.array(pool["references"], np.int32),
            "free": np.array(pool["free"], np.int32),
            "idle": tuple(pool["idle"]),
            "page_of": page_of,
            "hash_of": {page: key for key, page in page_of.items()},
        }
    )
    requests = {name: tuple(_progress(progress) for progress in host[name]) for name in ("waiting", "running")}
    return HostSnapshot(
        HostState(**{**host, **requests, "pool": restored}), values["next_id"], values["setup"], values["shape_of"]
    )


def _progress(values: dict[str, Any]) -> Progress:
    request = values["request"]
    sampling = SamplingParams(**request["sampling"])
    fields: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in values.items()
    }
    fields["drafted_blocks"] = tuple(tuple(block) for block in values["drafted_blocks"])
    fields["request"] = Request(
        id=request["id"],
        prompt=tuple(request["prompt"]),
        sampling=sampling,
        stop_tokens=tuple(request["stop_tokens"]),
        limit=request["limit"],
    )
    return Progress(**fields)
