"""Prompts made of what a row has: `Summarise: {text}`."""

from __future__ import annotations

import json
import string
from collections.abc import Mapping
from typing import Any

from dflash_jax.errors import ConfigError, RequestError, quote

Template = str | list[dict[str, str]]
"""Text with names of columns in braces, or messages whose contents are such texts."""


def check_template(template: Template) -> Template:
    """The template, if it is one.

    Raises:
      ConfigError: a brace has no partner, what is in braces is no name, or a message is none.
    """
    texts = [template] if isinstance(template, str) else []
    if not isinstance(template, str):
        for message in template:
            if not isinstance(message, dict) or set(message) != {"role", "content"}:
                raise ConfigError(f"input.template has the message {quote(message)}; each must have role and content")
            texts.append(message["content"])
    if not texts:
        raise ConfigError("input.template is empty; it must be text such as 'Summarise: {text}', or messages")
    if not names_in(template):
        raise ConfigError(
            f"input.template is {quote(template)}, which names no column; it must have one in braces, as in "
            "'Summarise: {text}'"
        )
    return template


def names_in(template: Template) -> tuple[str, ...]:
    """The columns that a template names.

    Raises:
      ConfigError: it is no template.
    """
    texts = [template] if isinstance(template, str) else [message["content"] for message in template]
    return tuple(dict.fromkeys(name for text in texts for _, name in _pieces(text) if name is not None))


def fill(template: Template, record: Mapping[str, Any]) -> dict[str, Any]:
    """The prompt that a row makes, under `prompt` or `messages`.

    Raises:
      RequestError: the row lacks a column, or has null in it.
    """
    if isinstance(template, str):
        return {"prompt": _fill(template, record)}
    return {"messages": [{**message, "content": _fill(message["content"], record)} for message in template]}


def _fill(text: str, record: Mapping[str, Any]) -> str:
    return "".join(piece + ("" if name is None else _text(record, name)) for piece, name in _pieces(text))


def _text(record: Mapping[str, Any], name: str) -> str:
    value = record.get(name)
    if value is None:
        what = "is null" if name in record else "is not there"
        raise RequestError(f"input.template names {quote(name)}, which {what}")
    if isinstance(value, str):
        return value
    return json.dumps(value, ensure_ascii=False) if isinstance(value, list | dict | bool) else str(value)


def _pieces(text: str) -> list[tuple[str, str | None]]:
    """Text, and the name after it, if there is one. Doubled braces are braces."""
    try:
        pieces = list(string.Formatter().parse(text))
    except ValueError as error:
        raise ConfigError(f"input.template is {quote(text)}: {error}; write {{{{ and }}}} for braces") from None
    for _, name, form, conversion in pieces:
        if name is not None and (not name or form or conversion):
            written = name + (f"!{conversion}" if conversion else "") + (f":{form}" if form else "")
            raise ConfigError(
                f"input.template has {{{written}}}; there must be the name of a column in the braces, and nothing else"
            )
    return [(piece, name) for piece, name, _, _ in pieces]
