"""Conversations as input lines: what a line says for the chat template, and templates that fail on one."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders
from tokenizers import models as tokenizer_models
from transformers import PreTrainedTokenizerFast

from dflash_jax import Engine, EngineConfig
from dflash_jax.checkpoints import Tokenizer
from dflash_jax.engine.request import SamplingParams
from dflash_jax.jobs.reader import BadLine, Item, read_items
from tests.pairs import SIZES, models

# Writes only characters of a vocabulary of 64. Fails where a tool call's arguments are no mapping, and on a user who
# says so.
TEMPLATE = (
    "{% for m in messages %}{% if m.content == 'type' %}{{ m.content + 1 }}{% endif %}"
    "{% if m.content == 'loop' %}{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    "{% endif %}"
    "{% for c in m.tool_calls %}{% for k in c.function.arguments.items() %}{{ k[0] }}{% endfor %}{% endfor %}"
    "{{ m.content }}{% endfor %}{% if tools %}T{% endif %}"
    "{% if add_generation_prompt %}{{ mode | default('G') }}{% endif %}"
)
USER = {"role": "user", "content": "hi"}


def loaded(*_, **__) -> Engine:
    vocab = {chr(0x40 + token): token for token in range(64)}
    backend = Backend(tokenizer_models.BPE(vocab=vocab, merges=[]))
    backend.decoder = decoders.Fuse()
    tokenizer = Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend, chat_template=TEMPLATE))
    return Engine(models(None), EngineConfig(**SIZES), tokenizer=tokenizer)


def call(arguments) -> dict:
    return {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}


def test_whatever_a_template_raises_is_that_lines_error_row_and_the_rest_runs(job):
    job.prompts(
        {"id": "before", "messages": [USER]},
        {"id": "type", "messages": [{"role": "user", "content": "type"}]},
        {"id": "attribute", "messages": [USER, call("no json"), USER]},
        {"id": "loop", "messages": [{"role": "user", "content": "loop"}]},
        {"id": "text arguments", "messages": [USER, call('{"k": 1}'), USER]},
        {"id": "after", "messages": [USER]},
    )
    found = job.run("draft=null", "sampling.max_tokens=2", load=loaded)
    assert (found["status"], found["requests"]["error"]) == ("finished", 3)
    assert "TypeError" in job.row("type")["error"]
    assert "has no attribute 'items'" in job.row("attribute")["error"]
    assert "takes more than 2 seconds" in job.row("loop")["error"]
    assert job.row("text arguments")["prompt_tokens"] == len("hikhiG")
    assert job.row("after")["token_ids"] == job.row("before")["token_ids"]


def read(tmp_path, line: str) -> Item | BadLine:
    file = tmp_path / "lines.jsonl"
    file.write_text(line)
    return next(read_items(file, SamplingParams()))


@pytest.mark.parametrize(
    ("more", "text"),
    [
        ("", "hiG"),
        (', "tools": [{}]', "hiTG"),
        (', "tools": null, "continue_final_message": null', "hiG"),
        (', "chat_template_kwargs": {"mode": "M"}', "hiM"),
        (', "continue_final_message": true', "hi"),
    ],
)
def test_what_a_line_says_for_the_chat_template_reaches_it(tmp_path, more, text):
    item = read(tmp_path, '{"messages": [{"role": "user", "content": "hi"}]' + more + "}")
    assert isinstance(item, Item)
    engine = loaded()
    assert engine.tokenizer is not None
    assert engine.tokenizer.decode(engine.tokenize(item.prompt)) == text


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ('{"prompt": "hi", "tools": [{}]}', "tools goes with messages, and the line has prompt"),
        ('{"prompt_token_ids": [1], "continue_final_message": true}', "continue_final_message goes with messages"),
        ('{"messages": [{"role": "user", "content": "hi"}], "tools": "f"}', "tools is 'f'; it must be a list of tools"),
        ('{"messages": [{"role": "user", "content": "hi"}], "chat_template_kwarg": {}}', "chat_template_kwargs"),
    ],
)
def test_a_line_that_says_it_wrongly_is_refused(tmp_path, line, reason):
    item = read(tmp_path, line)
    assert isinstance(item, BadLine) and reason in item.error
