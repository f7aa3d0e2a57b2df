"""Conversations as chat templates write them."""

from __future__ import annotations

import json
import logging

import pytest
import yaml

from dflash_jax import Engine, EngineConfig
from dflash_jax.checkpoints import Tokenizer
from dflash_jax.checkpoints.tokenizer import load_tokenizer
from dflash_jax.engine.config import TargetSource
from dflash_jax.errors import CheckpointError, ConfigError, RequestError
from dflash_jax.text.chat import ChatTemplate, read_chat
from tests.pairs import SIZES, models
from tests.text.vocabularies import byte_level

CHATML = (
    "{% if tools %}[{{ tools | tojson }}]{% endif %}"
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}"
    "{% for call in m.tool_calls %}{% for name, value in call.function.arguments.items() %}({{ name }}={{ value }})"
    "{% endfor %}{% endfor %}</s>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% if not enable_thinking|default(true) %}<no>{% endif %}{% endif %}"
)
USER = {"role": "user", "content": "hi"}
ASSISTANT = {"role": "assistant", "content": "well, "}


def tokenizer(template=CHATML) -> Tokenizer:
    return Tokenizer(byte_level(template))


def call(arguments) -> dict:
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": arguments}}],
    }


# What a prompt may say.


def test_tools_reach_the_template():
    assert tokenizer().chat_text([USER], tools=[{"name": "é"}]).startswith('[[{"name": "é"}]]<user>hi')
    assert tokenizer().chat_text([USER], tools=[]) == tokenizer().chat_text([USER])


def test_template_kwargs_of_the_prompt_win_over_those_of_the_config():
    speaks = tokenizer().with_chat_template(None, {"enable_thinking": False})
    assert tokenizer().chat_text([USER]).endswith("<assistant>")
    assert speaks.chat_text([USER]).endswith("<assistant><no>")
    assert speaks.chat_text([USER], chat_template_kwargs={"enable_thinking": True}).endswith("<assistant>")


@pytest.mark.parametrize("arguments", ['{"city": "Köln", "n": 2}', {"city": "Köln", "n": 2}], ids=["text", "mapping"])
def test_tool_call_arguments_given_as_json_text_are_parsed(arguments):
    assert "(city=Köln)(n=2)" in tokenizer().chat_text([USER, call(arguments), {"role": "tool", "content": "7"}])


def test_tool_calls_without_arguments_have_none():
    assert "<assistant></s>" in tokenizer().chat_text([USER, call(""), USER])


@pytest.mark.parametrize(
    "arguments", ["not json", "[1]", "1", '{"a": ' * 10_000], ids=["text", "list", "number", "deep"]
)
def test_tool_call_arguments_that_are_no_json_object_are_the_templates_to_take(arguments):
    with pytest.raises(RequestError, match="chat template rejects the messages"):
        tokenizer().chat_text([USER, call(arguments), USER])
    as_text = "{% for m in messages %}{% for c in m.tool_calls %}{{ c.function.arguments }}{% endfor %}{% endfor %}"
    assert tokenizer(as_text).chat_text([USER, call(arguments), USER]) == arguments


def test_nulls_in_messages_are_as_good_as_absent():
    template = "{% for m in messages %}{{ m.content is defined }}{% endfor %}"
    assert tokenizer(template).chat_text([{**call("{}"), "content": None}]) == "False"


PARTS = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]


def test_text_in_parts_is_one_text_for_templates_that_take_no_parts():
    assert tokenizer().chat_text([{"role": "user", "content": PARTS}]) == "<user>a\nb</s><assistant>"
    assert tokenizer().chat_text([{"role": "assistant", "content": PARTS}]) == "<assistant>a\nb"


@pytest.mark.parametrize("content", ["m.content", "m['content']"])
def test_templates_that_take_parts_get_them(content):
    template = "{% for m in messages %}{% for part in " + content + " %}<{{ part.text }}>{% endfor %}{% endfor %}"
    assert tokenizer(template).chat_text([{"role": "user", "content": PARTS}]) == "<a><b>"


def test_parts_that_are_no_text_are_refused():
    image = {"type": "image_url", "image_url": {"url": "x"}}
    with pytest.raises(RequestError, match="a part of type 'image_url'; the models this package runs take text only"):
        tokenizer().chat_text([{"role": "user", "content": [*PARTS, image]}])


# Going on with the last message.


def test_a_last_message_of_the_assistant_is_continued():
    assert tokenizer().chat_text([USER, ASSISTANT]) == "<user>hi</s><assistant>well, "


def test_a_last_message_of_the_assistant_may_be_answered_instead():
    text = tokenizer().chat_text([USER, ASSISTANT], continue_final_message=False)
    assert text == "<user>hi</s><assistant>well, </s><assistant>"


def test_a_users_message_is_continued_when_that_is_asked_for():
    assert tokenizer().chat_text([USER], continue_final_message=True) == "<user>hi"


def test_an_assistant_that_called_a_tool_is_not_continued():
    assert tokenizer().chat_text([USER, call("{}")]).endswith("</s><assistant>")


def test_the_last_of_several_parts_of_a_message_is_continued():
    template = "{% for m in messages %}{% for p in m.content %}<{{ p.text }}>{% endfor %}{% endfor %}"
    assert tokenizer(template).chat_text([{"role": "assistant", "content": PARTS}]) == "<a><b"


@pytest.mark.parametrize(
    ("template", "message", "reason"),
    [
        ("{{ messages[-1].content | upper }}", ASSISTANT, "does not write its text as it is"),
        ("{{ messages[-1].role }}", ASSISTANT, "does not write its text as it is"),
        (CHATML, {"role": "assistant", "content": 5}, "has no text in its content"),
        (CHATML, {"role": "assistant", "content": [5]}, "has no text in its content"),
    ],
)
def test_a_message_that_cannot_be_continued_is_refused(template, message, reason):
    with pytest.raises(RequestError, match=reason):
        tokenizer(template).chat_text([USER, message], continue_final_message=True)


def test_continued_text_keeps_the_space_at_its_end_where_the_template_trims():
    template = "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}</s>{% endfor %}"
    assert tokenizer(template).chat_text([USER, ASSISTANT]).endswith("<assistant>well, ")


# Which template.

NAMED = {"plain": "P{{ messages[0].content }}", "tool_use": "T{{ messages[0].content }}"}


def test_named_templates_without_a_default_say_what_to_do():
    with pytest.raises(
        RequestError, match=r"chat templates plain, tool_use and none .*; name one with target.chat_template"
    ):
        tokenizer(NAMED).chat_text([USER])
    assert not tokenizer(NAMED).has_chat_template


def test_a_template_is_chosen_by_its_name():
    assert tokenizer(NAMED).with_chat_template("plain").chat_text([USER]) == "Phi"
    assert tokenizer(NAMED).with_chat_template("plain").has_chat_template


def test_the_template_for_tools_is_used_when_there_are_some():
    with_default = {**NAMED, "default": "D"}
    assert tokenizer(with_default).chat_text([USER], tools=[{}]) == "Thi"
    assert tokenizer(with_default).chat_text([USER]) == "D"


def test_a_template_may_be_given_as_text_or_as_a_file(tmp_path):
    file = tmp_path / "mine.jinja"
    file.write_text("F{{ messages[0].content }}")
    for mute in (tokenizer(None), tokenizer(NAMED)):
        assert mute.with_chat_template(str(file)).chat_text([USER]) == "Fhi"
        assert mute.with_chat_template("I{{ messages[0].content }}").chat_text([USER]) == "Ihi"


@pytest.mark.parametrize("template", ["nosuch", "a\0b", "x" * 5000, "."])
def test_a_template_that_is_nowhere_is_refused_by_name(template):
    with pytest.raises(
        ConfigError, match=r"target.chat_template .* must be one of plain, tool_use, the path"
    ) as refused:
        tokenizer(NAMED).with_chat_template(template)
    assert len(str(refused.value)) < 400


def test_named_templates_of_a_directory(tmp_path):
    byte_level(NAMED).save_pretrained(tmp_path)
    loaded = load_tokenizer(tmp_path)
    assert loaded is not None
    assert loaded.with_chat_template("plain").chat_text([USER]) == "Phi"


def test_the_config_names_the_template_and_its_variables():
    values = yaml.safe_load("{path: there, chat_template: plain, chat_template_kwargs: {enable_thinking: false}}")
    source = TargetSource.model_validate(values)
    configured = source.configure_tokenizer(tokenizer(NAMED))
    assert configured is not None and configured.chat_text([USER]) == "Phi"
    own = tokenizer()
    assert TargetSource(path="there").configure_tokenizer(own) is own
    with pytest.raises(ConfigError, match="need a tokenizer, and 'there' has none"):
        source.configure_tokenizer(None)
    with pytest.raises(ConfigError, match=r"target.chat_template_kwargs has 'messages'"):
        TargetSource(path="there", chat_template_kwargs={"messages": []}).configure_tokenizer(own)


@pytest.mark.parametrize("template", [5, ["a"], {"default": None}, {"default": {"a": 1}}, True])
def test_a_checkpoints_template_that_is_no_text_is_refused(template):
    with pytest.raises(CheckpointError, match="it must be a text, or a mapping of names to texts"):
        ChatTemplate(template, {})


# Prompts that are no conversations.


@pytest.mark.parametrize(
    ("prompt", "reason"),
    [
        ({}, "without messages"),
        ({"messages": None}, "without messages"),
        ({"messages": []}, "messages is .*; it must be a list of {role"),
        ({"messages": "hi"}, "messages is 'hi'; it must be a list of {role"),
        ({"messages": ["hi"]}, "it must be a list of {role"),
        ({"messages": [{"content": "hi"}]}, "it must be a list of {role"),
        ({"messages": [{"role": "user"}]}, "it must be a list of {role"),
        ({"messages": [{"role": "user", "content": None}]}, "it must be a list of {role"),
        ({"messages": [USER], "tool": []}, "the prompt has the key 'tool'; it may have messages, tools"),
        ({"messages": [USER], "tools": "f"}, "tools is 'f'; it must be a list of tools"),
        ({"messages": [USER], "chat_template_kwargs": [1]}, "chat_template_kwargs is .*; it must be a mapping"),
        ({"messages": [USER], "chat_template_kwargs": {1: 2}}, "it must be a mapping"),
        ({"messages": [USER], "chat_template_kwargs": {"messages": []}}, "chat_template_kwargs has 'messages'"),
        ({"messages": [USER], "continue_final_message": "yes"}, "it must be true or false"),
        (USER, "the prompt is a single message"),
    ],
)
def test_a_mapping_that_is_no_conversation_is_refused(prompt, reason):
    with pytest.raises(RequestError, match=reason):
        read_chat(prompt)


def test_what_is_null_in_a_mapping_is_as_good_as_absent():
    absent = {"tools": None, "chat_template_kwargs": None, "continue_final_message": None}
    assert read_chat({"messages": [USER], **absent}) == read_chat([USER])


def test_what_is_no_json_is_refused():
    for value in ({1, 2}, object()):
        with pytest.raises(RequestError, match="must be JSON values"):
            tokenizer().chat_text([{"role": "user", "content": value}])
    deep: list = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(RequestError, match="must be JSON values"):
        tokenizer().chat_text([USER], tools=deep)


def test_the_engine_takes_a_mapping_as_a_prompt():
    engine = Engine(models(None), EngineConfig(**SIZES), tokenizer=tokenizer())
    own = engine.tokenizer
    assert own is not None
    prompt = {"messages": [USER, ASSISTANT], "tools": [{"name": "f"}], "continue_final_message": True}
    text = '[[{"name": "f"}]]<user>hi</s><assistant>well, '
    assert engine.tokenize(prompt) == tuple(own._backend.encode(text, add_special_tokens=False))
    assert engine.tokenize([USER, ASSISTANT]) == engine.tokenize({"messages": [USER, ASSISTANT]})
    with pytest.raises(RequestError, match="a mapping of 'no keys'; it must have one of"):
        engine.tokenize({})


# A BOS that is there already.


def with_bos() -> Tokenizer:
    from tokenizers.processors import TemplateProcessing

    backend = byte_level()
    backend.backend_tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 256)])
    return Tokenizer(backend)


def test_a_text_that_begins_with_bos_gets_no_other_and_a_note_says_so(caplog):
    own = with_bos()
    plain = own.encode("hi")
    assert plain[0] == 256 and len(plain) == 3
    with caplog.at_level(logging.WARNING):
        assert own.encode("<s>hi") == plain
        assert own.encode("<s>hi") == plain
    assert [record.getMessage() for record in caplog.records] == [
        "a prompt begins with '<s>', which the tokenizer adds to every text; it is kept once"
    ]
    assert own.encode("<s><s>hi") == [256, *plain]
    assert own.encode("") == [256]


def test_a_tokenizer_that_adds_no_bos_leaves_those_of_the_text():
    own = tokenizer()
    assert own.encode("<s><s>hi")[:2] == [256, 256]
    assert own.encode("hi") == own.encode("<s>hi")[1:]


# Tokens by name.


def test_the_end_of_a_text_is_known_if_the_vocabulary_has_it():
    assert tokenizer().eos_token_id == 257
    nameless, strange = byte_level(), byte_level()
    nameless.eos_token = None
    assert Tokenizer(nameless).eos_token_id is None
    strange._special_tokens_map["eos_token"] = "<nowhere>"
    assert Tokenizer(strange).eos_token_id is None


def test_a_special_token_is_known_by_its_whole_name_only():
    own = tokenizer()
    assert own.special_id("<|im_end|>") == 258
    assert [own.special_id(text) for text in ("", "a", "<|im_end|", "<|im_end|> ", "naïve →", "<s></s>")] == [None] * 6


def test_half_a_surrogate_pair_is_refused():
    for prompt in ("a\ud800", "\udfff"):
        with pytest.raises(RequestError, match="half of a surrogate pair"):
            tokenizer().encode(prompt)
        with pytest.raises(RequestError, match="half of a surrogate pair"):
            tokenizer().apply_chat([{"role": "user", "content": prompt}])
    assert json.loads('"\\ud83d\\ude00"') == "😀"


def test_a_tokenizer_that_panics_is_about_its_prompt_alone(monkeypatch):
    own = tokenizer()

    def encode(text, **_):
        if text == "stop":
            raise KeyboardInterrupt
        raise type("PanicException", (BaseException,), {})("index out of bounds: the len is 3\nbut the index is 4")

    monkeypatch.setattr(own._backend, "encode", encode)
    with pytest.raises(RequestError, match=r"cannot encode the prompt \(index out of bounds: the len is 3\)"):
        own.encode("a")
    with pytest.raises(KeyboardInterrupt):
        own.encode("stop")
