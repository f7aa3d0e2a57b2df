"""The formats of a job's input and output. A new one is a file here, and a line below."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Literal

from dflash_jax.errors import ConfigError, RequestError, quote
from dflash_jax.jobs.formats.base import Reader, Results
from dflash_jax.jobs.formats.jsonl import JsonLines, parse_line
from dflash_jax.jobs.source import Source
from dflash_jax.jobs.template import names_in

if TYPE_CHECKING:
    from dflash_jax.jobs.config import InputFile, OutputFile
    from dflash_jax.jobs.ledger import Result

InputFormat = Literal["jsonl", "openai", "table"]
OutputFormat = Literal["jsonl", "openai", "parquet"]


def open_input(settings: InputFile, key: str = "input.path", cancelled: Callable[[], bool] = lambda: False) -> Reader:
    """Opens a job's input, of the format it is in.

    Args:
      settings: of the input.
      key: the setting that names its path.
      cancelled: whether to stop reading a pipe; what came so far is then all.

    Raises:
      ConfigError: it cannot be read, or is of another format than the settings say.
    """
    if os.path.isdir(settings.path):
        if settings.format not in (None, "table"):
            raise ConfigError(
                f"input.format is {settings.format!r}, and {quote(settings.path)} ({key}) is a directory; "
                "a directory holds a table"
            )
        from dflash_jax.jobs.formats.tables import directory_files

        return _open_table(settings, key, directory_files(settings.path, key, settings.split))
    source = Source(settings.path, key, cancelled)
    try:
        if settings.format == "table" or (settings.format is None and source.begins_as_table()):
            if settings.split is not None:
                raise ConfigError(
                    f"input.split is {quote(settings.split)}, and {quote(settings.path)} ({key}) is a file"
                )
            return _open_table(settings, key, [(settings.path, source.duplicate)], source)
        if settings.format == "openai" or (settings.format is None and _is_openai(source)):
            from dflash_jax.jobs.formats.openai_input import OpenAIRequests

            return OpenAIRequests(source)
        return JsonLines(source)
    except BaseException:
        source.close()
        raise


def open_output(settings: OutputFile, reader: Reader) -> Results:
    """Opens a job's output.

    Args:
      settings: of the output.
      reader: of the input; an output whose format the settings leave open is OpenAI's if the input is.

    Raises:
      ConfigError: it cannot be written, or something else is there.
    """
    chosen = output_format(settings, reader)
    if chosen == "parquet":
        from dflash_jax.jobs.formats.parquet_output import ParquetResults

        return ParquetResults(settings.path, settings.row_group)
    if chosen == "openai":
        from dflash_jax.jobs.formats.openai_output import OpenAIResults

        return OpenAIResults(settings.path)
    from dflash_jax.jobs.writer import ResultFile

    return ResultFile(settings.path)


def output_format(settings: OutputFile, reader: Reader) -> OutputFormat:
    """The format of an output."""
    if settings.format is not None:
        return settings.format
    if settings.path.endswith(".parquet"):
        return "parquet"
    from dflash_jax.jobs.formats.openai_input import OpenAIRequests

    return "openai" if isinstance(reader, OpenAIRequests) else "jsonl"


def read_output(path: str | Path) -> Iterator[Result]:
    """The results in an output of any format; none if it is not there.

    Raises:
      ConfigError: it cannot be read.
    """
    path = Path(path)
    if path.is_dir():
        from dflash_jax.jobs.formats.parquet_output import read_parquet_results

        return read_parquet_results(path)
    from dflash_jax.jobs.formats.openai_output import errors_path, is_openai_output, read_openai_results
    from dflash_jax.jobs.writer import read_results

    if is_openai_output(path) or is_openai_output(errors_path(path)):
        return read_openai_results(path)
    return read_results(path)


def _open_table(
    settings: InputFile, key: str, files: list[tuple[str, Callable[[], BinaryIO]]], source: Source | None = None
) -> Reader:
    from dflash_jax.jobs.config import KEYS
    from dflash_jax.jobs.formats.tables import Table

    own = [name for name in KEYS if name not in settings.columns]
    if settings.template is not None:
        own = [name for name in own if name in ("id", "sampling")]
    named = (*settings.columns.values(), *(names_in(settings.template) if settings.template is not None else ()))
    return Table(files, settings.path, key, wanted=(*named, *own), needed=named, source=source)


def _is_openai(source: Source) -> bool:
    """Whether the first line is a request of OpenAI's."""
    from dflash_jax.jobs.formats.openai_input import is_batch_request

    with contextlib.suppress(RequestError):
        for _, line in source.lines():
            return is_batch_request(parse_line(line))
    return False
