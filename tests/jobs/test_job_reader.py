from __future__ import annotations

import json
import re

import pytest

from dflash_jax.engine.request import SamplingParams
from dflash_jax.errors import ConfigError
from dflash_jax.jobs import source
from dflash_jax.jobs.formats.jsonl import JsonLines
from dflash_jax.jobs.reader import BadLine, Item, read_items
from dflash_jax.jobs.source import Source

DEFAULTS = SamplingParams(max_tokens=7)


@pytest.fixture
def read(tmp_path):
    def read(content):
        path = tmp_path / "in.jsonl"
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        items = list(read_items(path, DEFAULTS))
        with Source(path) as source:
            lines = JsonLines(source)
            assert lines.count() == len(items) == lines.count()
        return items

    return read


def test_the_three_kinds_of_prompt(read):
    chat = [{"role": "user", "content": "hi"}]
    text, messages, ids = read(
        f'{{"id": "a", "prompt": "hi"}}\n{{"id": 2, "messages": {json.dumps(chat)}}}\n'
        '{"id": "c", "prompt_token_ids": [1, 2], "sampling": {"temperature": 0.5, "speculation": false}}\n'
    )
    assert text == Item(1, "a", "hi", DEFAULTS)
    assert messages == Item(2, 2, chat, DEFAULTS)
    assert ids == Item(3, "c", [1, 2], SamplingParams(max_tokens=7, temperature=0.5, speculation=False))


def test_line_numbers_count_blank_lines_which_are_passed_over(read):
    assert [item.line for item in read('\n  \r\n{"id": "a", "prompt": "x"}\r\n\t\n{"id": "b", "prompt": "y"}')] == [
        3,
        5,
    ]


def test_an_empty_file_has_no_items(read):
    assert read("") == []
    assert read(b"\xef\xbb\xbf") == []


def test_a_byte_order_mark_is_passed_over(read):
    (item,) = read(b'\xef\xbb\xbf{"id": "a", "prompt": "x"}\n')
    assert isinstance(item, Item) and item.id == "a"


def test_a_line_without_an_id_is_called_after_its_number(read):
    assert [item.id for item in read('{"prompt": "x"}\n{"id": null, "prompt": "y"}\n')] == ["line-1", "line-2"]


def test_a_made_id_gives_way_to_a_given_one(read):
    given, made = read('{"id": "line-2", "prompt": "x"}\n{"prompt": "y"}\n')
    assert isinstance(made, Item) and made.id != given.id == "line-2"


def test_a_second_use_of_an_id_is_refused_under_an_id_of_its_own(read):
    first, second = read('{"id": 7, "prompt": "x"}\n{"id": "7", "prompt": "y"}\n')
    assert first == Item(1, 7, "x", DEFAULTS)
    assert second == BadLine(2, "line-2", "the id '7' is already that of line 1; ids must be unique")


def test_null_means_not_given(read):
    (item,) = read('{"id": "a", "prompt": null, "prompt_token_ids": [1], "messages": null, "sampling": null}')
    assert item == Item(1, "a", [1], DEFAULTS)


def test_other_keys_are_the_users_business(read):
    (item,) = read('{"id": "a", "prompt": "x", "category": "math", "prompt_id": 3}')
    assert item == Item(1, "a", "x", DEFAULTS)


BAD = [
    ("not json", "not JSON"),
    ('{"prompt": "x"', "not JSON"),
    ('{"prompt": "x", "sampling": {"temperature": NaN}}', "NaN is not a JSON value"),
    ('{"prompt": "x", "sampling": {"temperature": 1e999}}', "temperature is inf"),
    ("[1, 2]", "must be an object"),
    ('"prompt"', "must be an object"),
    ("{}", "has no prompt"),
    ('{"prompt": "x", "prompt_token_ids": [1]}', "has prompt and prompt_token_ids"),
    ('{"prompt": "x", "messages": [{"role": "user", "content": "x"}]}', "has prompt and messages"),
    ('{"prompt": ""}', "prompt is empty"),
    ('{"messages": []}', "messages is empty"),
    ('{"prompt_token_ids": []}', "prompt_token_ids is empty"),
    ('{"prompt": 5}', "must be a string"),
    ('{"prompt_token_ids": "12"}', "must be a list of integers"),
    ('{"prompt_token_ids": [1, true]}', "must be a list of integers"),
    ('{"prompt_token_ids": [1, 2.0]}', "must be a list of integers"),
    ('{"messages": [{"role": "user"}]}', "must be a list of {role"),
    ('{"messages": ["hi"]}', "must be a list of {role"),
    ('{"prompt": "x", "sampling": {"temprature": 1}}', "unknown sampling key 'temprature'.*'temperature'"),
    ('{"prompt": "x", "sampling": {"top_p": 2}}', "sampling.top_p is 2"),
    ('{"prompt": "x", "sampling": {"max_tokens": "9"}}', "sampling.max_tokens is '9'"),
    ('{"prompt": "x", "sampling": [1]}', "sampling is \\[1\\]"),
    ('{"prompt": "x", "samplings": {}}', "unknown key 'samplings'; the nearest known one is 'sampling'"),
    ('{"id": [1], "prompt": "x"}', "id is \\[1\\]; it must be a string or an integer"),
    ('{"id": true, "prompt": "x"}', "id is true"),
    ('{"id": "", "prompt": "x"}', 'id is ""'),
    ('{"prompt": "\\ud800"}', "half of a surrogate pair"),
    (b'{"prompt": "\xff"}', "not UTF-8"),
    (b"\0\0\0", "not JSON"),
    ("[" * 100_000, "not JSON"),
    ('{"prompt": ' + "1" * 5000 + "}", "not JSON"),
]


@pytest.mark.parametrize(("line", "says"), BAD, ids=[says for _, says in BAD])
def test_a_bad_line_is_refused_and_the_rest_is_read(read, line, says):
    raw = line if isinstance(line, bytes) else line.encode()
    first, bad, last = read(b'{"id": "a", "prompt": "x"}\n' + raw + b'\n{"id": "b", "prompt": "y"}\n')
    assert isinstance(first, Item) and isinstance(last, Item)
    assert isinstance(bad, BadLine) and (bad.line, bad.id) == (2, "line-2")
    assert re.search(says, bad.error), bad.error


def test_a_bad_line_keeps_its_id_where_it_can_be_read(read):
    (bad,) = read('{"id": "a"}')
    assert (bad.line, bad.id) == (1, "a")


def test_a_giant_line_is_refused_and_the_rest_is_read(read, monkeypatch):
    monkeypatch.setattr(source, "MAX_LINE", 64)
    long = json.dumps({"id": "b", "prompt": "x" * 200})
    short = json.dumps({"id": "a", "prompt": "x"})
    items = read(f"{short}\n{long}\n{short.replace('a', 'c', 1)}\n{long}")
    assert [type(item) for item in items] == [Item, BadLine, Item, BadLine]
    assert [item.line for item in items] == [1, 2, 3, 4]
    assert "longer than" in items[1].error


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"there is no input file .*input\.path"):
        Source(tmp_path / "absent.jsonl")
    with pytest.raises(ConfigError, match="cannot be read"):
        Source(tmp_path)
