"""Conversations, and the text that a model's chat template makes of them."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeGuard

from dflash_jax.errors import CheckpointError, ConfigError, RequestError, quote
from dflash_jax.text.render import render

CHAT_KEYS = ("messages", "tools", "chat_template_kwargs", "continue_final_message")
"""What a prompt that is a mapping may have; `messages` it must have."""

_RESERVED = ("messages", "tools", "add_generation_prompt")


@dataclasses.dataclass(frozen=True)
class Chat:
    """A conversation, and how its template is to write it.

    Attributes:
      messages: each a mapping with `role` and `content`, and what else the template knows.
      tools: what the model may call, as the template knows it: JSON schemas, as a rule.
      template_kwargs: further variables of the template, such as `enable_thinking`.
      continue_final_message: whether the answer continues the last message instead of being a new one;
        by default if the last message is text of the assistant.

    Raises:
      RequestError: a field is not of its kind.
    """

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Any] | None = None
    template_kwargs: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    continue_final_message: bool | None = None

    def __post_init__(self) -> None:
        wanted = "a list of {role: string, content: ...}, at least one; with tool_calls a message needs no content"
        _require("messages", self.messages, _is_list_of_messages(self.messages), wanted)
        _require("tools", self.tools, self.tools is None or _is_list(self.tools), "a list of tools")
        kwargs = self.template_kwargs
        named = isinstance(kwargs, Mapping) and all(isinstance(name, str) for name in kwargs)
        _require("chat_template_kwargs", kwargs, named, "a mapping such as {enable_thinking: false}")
        for name in _RESERVED:
            if name in kwargs:
                raise RequestError(f"chat_template_kwargs has {name!r}, which the template gets from the prompt itself")
        goes_on = self.continue_final_message
        _require("continue_final_message", goes_on, goes_on is None or isinstance(goes_on, bool), "true or false")

    @property
    def continues(self) -> bool:
        """Whether the answer continues the last message."""
        if self.continue_final_message is not None:
            return self.continue_final_message
        last = self.messages[-1]
        return last.get("role") == "assistant" and last.get("content") is not None and not last.get("tool_calls")


def read_chat(prompt: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> Chat:
    """The conversation that a prompt is: a list of messages, or a mapping with `CHAT_KEYS`; null is as good as absent.

    Raises:
      RequestError: the mapping has no messages, a key is unknown, or a value is not of its kind.
    """
    if not isinstance(prompt, Mapping):
        return Chat(prompt)
    if "role" in prompt:
        raise RequestError("the prompt is a single message; it must be a list of messages, also if there is only one")
    for key in prompt:
        if key not in CHAT_KEYS:
            raise RequestError(f"the prompt has the key {quote(key)}; it may have {', '.join(CHAT_KEYS)}")
    given = {key: value for key, value in prompt.items() if value is not None}
    if "messages" not in given:
        raise RequestError("the prompt is a mapping without messages; it must have them")
    kwargs = given.pop("chat_template_kwargs", {})
    return Chat(template_kwargs=kwargs, **given)


class ChatTemplate:
    """The chat template of a model, or several that have names.

    Attributes:
      templates: Jinja, by name; one without a name is called "default".
      special_tokens: variables that every rendering gets, such as `bos_token`.
      kwargs: further ones, unless a conversation has its own.

    Raises:
      CheckpointError: a template is no text.
    """

    def __init__(
        self,
        templates: str | Mapping[str, str] | None,
        special_tokens: Mapping[str, str],
        kwargs: Mapping[str, Any] | None = None,
    ):
        if templates is None or isinstance(templates, str):
            templates = {} if templates is None else {"default": templates}
        named = isinstance(templates, Mapping) and all(
            isinstance(part, str) for one in templates.items() for part in one
        )
        if not named:
            raise CheckpointError(
                f"the model's chat template is {quote(templates)}; it must be a text, or a mapping of names to texts"
            )
        self.templates = dict(templates)
        self.special_tokens = dict(special_tokens)
        self.kwargs = dict(kwargs or {})

    @property
    def usable(self) -> bool:
        """Whether a conversation without tools has a template."""
        return "default" in self.templates

    def override(self, template: str | None, kwargs: Mapping[str, Any]) -> ChatTemplate:
        """The same model's with another template or other variables.

        Args:
          template: the name of one of the model's, a Jinja text, or the path of a file of one.
          kwargs: variables on top of those there are.

        Raises:
          ConfigError: there is no such template, or a variable is not the user's to set.
        """
        templates: str | Mapping[str, str] = self.templates
        if template is not None:
            templates = self.templates.get(template) or _read_template(template, self.templates)
        for name in _RESERVED:
            if name in kwargs:
                raise ConfigError(f"target.chat_template_kwargs has {name!r}, which each prompt says itself")
        return ChatTemplate(templates, self.special_tokens, {**self.kwargs, **kwargs})

    def render(self, chat: Chat) -> str:
        """The text of a conversation up to where the model continues.

        Raises:
          RequestError: there is no template for it, or the template rejects it.
        """
        template = self._template_for(chat)
        takes_parts = _LOOP_OVER_PARTS.search(template) is not None
        messages = [_normalized(message, takes_parts) for message in chat.messages]
        goes_on = chat.continues
        if goes_on:
            messages[-1] = _marked(messages[-1])
        rendered = render(
            template,
            {
                **self.special_tokens,
                "documents": None,
                **self.kwargs,
                **chat.template_kwargs,
                "messages": messages,
                "tools": chat.tools,
                "add_generation_prompt": not goes_on,
            },
        )
        if not goes_on:
            return rendered
        at = rendered.rfind(_MARK)
        if at < 0:
            raise RequestError(
                "the last message cannot be continued: the model's chat template does not write its text as it is"
            )
        return rendered[:at]

    def _template_for(self, chat: Chat) -> str:
        if not self.templates:
            raise RequestError(
                "messages need a chat template, and the model's tokenizer has none; give the prompt as text, or name a "
                "template with target.chat_template"
            )
        if chat.tools is not None and "tool_use" in self.templates:
            return self.templates["tool_use"]
        if not self.usable:
            raise RequestError(
                f"the model has the chat templates {', '.join(sorted(self.templates))} and none of them is its "
                "default; name one with target.chat_template"
            )
        return self.templates["default"]


# Two noncharacters of Unicode, which no text has.
_MARK = "\ufdd0continue\ufdd1"


def _marked(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message with a mark at the end of its text."""
    content = message.get("content")
    if isinstance(content, str):
        return {**message, "content": content + _MARK}
    parts = list(content) if _is_list(content) else []
    for index in reversed(range(len(parts))):
        text = parts[index].get("text") if isinstance(parts[index], Mapping) else None
        if isinstance(text, str):
            parts[index] = {**parts[index], "text": text + _MARK}
            return {**message, "content": parts}
    raise RequestError("the last message has no text in its content that could be continued")


# A template that takes a message's parts one by one; others would write a list as Python does, or nothing.
_LOOP_OVER_PARTS = re.compile(r"\bfor\s+\w+\s+in\s+[\w.\[\]'\"]*content\b")


def _normalized(message: Mapping[str, Any], takes_parts: bool) -> dict[str, Any]:
    """A message as templates expect it: without nulls, with text as one, and arguments of tool calls as mappings.

    On OpenAI's wire an absent value is null, a text may come in parts, and the arguments of a call are the text of a
    JSON object. Text that is no such object stays as it is: a model wrote it, and some templates take it.
    """
    message = {key: value for key, value in message.items() if value is not None}
    parts = message.get("content")
    if _is_list(parts):
        for part in parts:
            if isinstance(part, Mapping) and part.get("type", "text") != "text":
                raise RequestError(
                    f"a message has a part of type {quote(part['type'])}; the models this package runs take text only"
                )
        texts = [part.get("text") if isinstance(part, Mapping) else None for part in parts]
        if not takes_parts and all(isinstance(text, str) for text in texts):
            message["content"] = "\n".join(str(text) for text in texts)
    calls = message.get("tool_calls")
    if _is_list(calls):
        message["tool_calls"] = [_with_arguments(call) for call in calls]
    return message


def _with_arguments(call: Any) -> Any:
    if not isinstance(call, Mapping):
        return call
    if isinstance(call.get("function"), Mapping):
        return {**call, "function": _with_arguments(call["function"])}
    arguments = call.get("arguments")
    if not isinstance(arguments, str):
        return call
    try:
        parsed = json.loads(arguments) if arguments.strip() else {}
    except (ValueError, RecursionError):
        return call
    return {**call, "arguments": parsed} if isinstance(parsed, dict) else call


def _read_template(template: str, known: Mapping[str, str]) -> str:
    if "{{" in template or "{%" in template:
        return template
    try:
        return Path(template).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        names = f"one of {', '.join(sorted(known))}, " if known else ""
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text or no path"
        raise ConfigError(
            f"target.chat_template {quote(template)} cannot be read ({reason}); it must be {names}"
            "the path of a Jinja file, or a template itself"
        ) from None


def _is_list(value: object) -> TypeGuard[Sequence[Any]]:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)


def _is_list_of_messages(value: object) -> bool:
    return _is_list(value) and len(value) > 0 and all(map(_is_message, value))


def _is_message(value: object) -> bool:
    if not isinstance(value, Mapping) or not isinstance(value.get("role"), str):
        return False
    return value.get("content") is not None or bool(value.get("tool_calls"))


def _require(name: str, value: object, holds: bool, wanted: str) -> None:
    if not holds:
        raise RequestError(f"{name} is {quote(value)}; it must be {wanted}")
