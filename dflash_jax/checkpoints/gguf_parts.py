"""GGUF models that are split into several files, `NAME-00001-of-00003.gguf` and so on."""

from __future__ import annotations

import re
from pathlib import Path

from dflash_jax.checkpoints.gguf_header import Header, read_header
from dflash_jax.errors import CheckpointError, quote

_PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")


def part_names(name: str) -> tuple[str, ...]:
    """The names of all parts, in order, of the model that a file of this name is a part of; itself if it is whole."""
    match = _PART.fullmatch(name)
    if match is None:
        return (name,)
    stem, count = match[1], int(match[3])
    return tuple(f"{stem}-{number:05d}-of-{count:05d}.gguf" for number in range(1, count + 1))


def read_parts(file: Path) -> dict[Path, Header]:
    """The header of each file of a GGUF model, in order; the first has the model's metadata.

    Args:
      file: the only file, or any part.

    Raises:
      CheckpointError: a part is missing, damaged, or another model's.
    """
    # A part may say that there are no others, as the only one of a set of one.
    if not file.is_file():
        return {file: read_header(file)}
    names = part_names(file.name)
    if file.name not in names:
        raise CheckpointError(f"{file} is named as a part that its own name rules out; parts count from 00001")
    own = read_header(file)
    said = own.metadata.get("split.count") or 1
    if said != len(names):
        raise CheckpointError(
            f"{file} is one of {quote(said)} parts by its metadata (split.count), and of {len(names)} by its name; "
            "the parts of a model must be named NAME-00001-of-00003.gguf and so on"
        )
    parts = [file.with_name(name) for name in names]
    missing = [part.name for part in parts if not part.is_file()]
    if missing:
        shown = ", ".join(missing[:3]) + (f" and {len(missing) - 3} more" if len(missing) > 3 else "")
        raise CheckpointError(f"{file} is one of {len(parts)} parts, of which {shown} is missing from {file.parent}")
    headers = {part: own if part == file else read_header(part) for part in parts}
    if len(parts) > 1:
        _check(headers)
    return headers


def _check(headers: dict[Path, Header]) -> None:
    """Refuses parts that are not all of one model."""
    where: dict[str, Path] = {}
    first = next(iter(headers))
    for index, (part, header) in enumerate(headers.items()):
        for key, expected in (("split.no", index), ("split.count", len(headers))):
            if header.metadata.get(key) != expected:
                found = quote(header.metadata.get(key))
                raise CheckpointError(
                    f"{key} in {part} is {found}, but by its name it must be {expected}; the parts must be of one model"
                )
        kind = header.metadata.get("general.architecture", headers[first].metadata.get("general.architecture"))
        if kind != headers[first].metadata.get("general.architecture"):
            raise CheckpointError(f"{part} is of another architecture than {first.name}, so not of the same model")
        for tensor in header.tensors:
            if tensor.name in where:
                raise CheckpointError(
                    f"tensor {quote(tensor.name)} is both in {where[tensor.name]} and in {part}; "
                    "the parts must be of one model"
                )
            where[tensor.name] = part
    total = headers[first].metadata.get("split.tensors.count")
    if total is not None and total != len(where):
        raise CheckpointError(
            f"the parts of {first} hold {len(where)} tensors together, but split.tensors.count says {quote(total)}; "
            "the parts must be of one model"
        )
