"""Files of prompts and starters: what is read, and how a bad line is named."""

from __future__ import annotations

import os

import pytest

from dflash_jax.errors import ConfigError
from dflash_jax.training.corpora.questions import read_lines, read_prompts


def one_sentence(caught):
    return "\n" not in str(caught.value) and not str(caught.value).endswith(".")


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b'{"prompt": "a"}\n{"prompt": "b', "line 2 .*not JSON"),
        (b'{"prompt": "a"}\n{"prompt": "\xff"}\n', "line 2 .*not UTF-8"),
        (b'\n{"text": "a"}\n', "line 2 .*no prompt"),
        (b'{"prompt": 3}\n', "line 1 .*must be a string"),
        (b'{"messages": "hello"}\n', "line 1 .*must be a list"),
        (b"[1]\n", "line 1 .*must be an object"),
        (b"", "has no prompt in it"),
        (b"\n \n", "has no prompt in it"),
        (None, r"\(prompts\) has no .parquet, .arrow, .feather files"),
    ],
)
def test_prompts_that_cannot_be_answered_are_named(tmp_path, content, says):
    path = tmp_path / "prompts.jsonl"
    path.mkdir() if content is None else path.write_bytes(content)
    with pytest.raises(ConfigError, match=rf"prompts\.jsonl.* {says}") as caught:
        read_prompts(str(path))
    assert one_sentence(caught)
    with pytest.raises(ConfigError, match=r"there is no input file .*absent.* \(prompts\)"):
        read_prompts(str(tmp_path / "absent"))


def test_prompts_are_lines_that_end_where_lines_end(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "a\u2028b"}\n\n{"messages": [{"role": "user", "content": "c\x85d"}]}', encoding="utf-8")
    assert read_prompts(str(path)) == [
        [{"role": "user", "content": "a\u2028b"}],
        [{"role": "user", "content": "c\x85d"}],
    ]


@pytest.mark.parametrize(
    ("content", "lines"),
    [
        ("Why\n\nHow\n", ["Why", "", "How"]),
        ("Why\r\nHow", ["Why", "How"]),
        ("\n", [""]),
        ("a\u2028b\x85c\n", ["a\u2028b\x85c"]),
        ("\ufeffWhy\n", ["Why"]),
    ],
)
def test_a_line_of_starters_may_be_empty(tmp_path, content, lines):
    (tmp_path / "starters.txt").write_bytes(content.encode())
    assert read_lines(str(tmp_path / "starters.txt"), "starters") == lines


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "is empty"),
        (b"a\nb\n\xff\n", "line 3 is not UTF-8"),
        (None, r"cannot be read \(Is a directory"),
        ("/dev/zero", r"cannot be read \(it is a device"),
        ("pipe", r"cannot be read \(it is a device or a pipe"),
    ],
)
def test_starters_that_cannot_be_read_are_named(tmp_path, content, says):
    path = tmp_path / "starters.txt"
    if isinstance(content, str):
        os.mkfifo(path) if content == "pipe" else path.symlink_to(content)
    else:
        path.mkdir() if content is None else path.write_bytes(content)
    with pytest.raises(ConfigError, match=rf"starters .*starters\.txt {says}") as caught:
        read_lines(str(path), "starters")
    assert one_sentence(caught)


@pytest.mark.parametrize("made", ["pipe", "/dev/zero"])
def test_prompts_that_can_be_read_but_once_or_never_end_are_refused(tmp_path, made):
    path = tmp_path / "prompts.jsonl"
    os.mkfifo(path) if made == "pipe" else path.symlink_to(made)
    with pytest.raises(ConfigError, match=r"prompts .* cannot be read \(it is a device or a pipe, not a file\)"):
        read_prompts(str(path))
