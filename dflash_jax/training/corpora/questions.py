"""Files of prompts, of starters and of instructions."""

from __future__ import annotations

import os

from dflash_jax.engine.prompts import Prompt
from dflash_jax.engine.request import SamplingParams
from dflash_jax.errors import ConfigError
from dflash_jax.jobs.reader import BadLine, read_items
from dflash_jax.streams import open_file

_LARGEST = 1 << 28
"""Bytes of starters or instructions."""


def read_prompts(path: str) -> list[Prompt]:
    """The prompts of a JSONL file, which is like a job's input; text is what the user says.

    Raises:
      ConfigError: the file cannot be read, has no prompt, or a line is none.
    """
    # Unlike the methods of Path, these are False for names that are too long, too.
    if os.path.exists(path) and not (os.path.isfile(path) or os.path.isdir(path)):
        # The corpus records what its prompts were, so that they are read twice.
        raise ConfigError(f"prompts {path} cannot be read (it is a device or a pipe, not a file)")
    prompts: list[Prompt] = []
    for item in read_items(path, SamplingParams(), "prompts"):
        if isinstance(item, BadLine):
            raise ConfigError(f"prompts {path} line {item.line} cannot be answered: {item.error}")
        prompts.append([{"role": "user", "content": item.prompt}] if isinstance(item.prompt, str) else item.prompt)
    if not prompts:
        raise ConfigError(f"prompts {path} has no prompt in it; write one in each line")
    return prompts


def read_lines(path: str, key: str) -> list[str]:
    """The lines of a text file.

    Args:
      path: the file.
      key: the setting that names it.

    Raises:
      ConfigError: the file cannot be read, or has no line.
    """
    try:
        with open_file(path) as file:
            data = file.read(_LARGEST + 1)
        if len(data) > _LARGEST:
            raise ConfigError(f"{key} {path} has more than {_LARGEST >> 20} MiB; write fewer lines")
        text = data.decode("utf-8-sig")
    except OSError as error:
        raise ConfigError(f"{key} {path} cannot be read ({error.strerror}); it must be a text file") from None
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise ConfigError(f"{key} {path} line {line} is not UTF-8 text") from None
    if not text:
        raise ConfigError(f"{key} {path} is empty; write one in each line")
    # Some characters inside a line pass for ends of lines elsewhere.
    return text.removesuffix("\n").replace("\r\n", "\n").split("\n")
