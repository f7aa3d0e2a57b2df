"""Files that are whole or not there, and one writer at a time."""

from __future__ import annotations

import os

import pytest

from dflash_jax.errors import ConfigError
from dflash_jax.writing import replace_file, replacing, sole_writer


def test_a_file_keeps_its_content_until_it_has_the_new_one(tmp_path, monkeypatch):
    file = tmp_path / "a"
    replace_file(file, "old")

    def died(*_):
        assert file.read_text() == "old"
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", died)
        with pytest.raises(KeyboardInterrupt):
            replace_file(file, b"new")
    assert file.read_text() == "old"
    replace_file(file, b"new")
    assert file.read_text() == "new"
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_a_second_writer_is_refused_until_the_first_has_gone(tmp_path):
    def write() -> str:
        with sole_writer(tmp_path / "lock", "the run"):
            return "written"

    again = pytest.raises(ConfigError, match="another process is writing the run")
    with sole_writer(tmp_path / "lock", "the run"), again:
        write()
    assert write() == "written"


def test_a_block_that_fails_leaves_the_old_file_and_nothing_else(tmp_path):
    file = tmp_path / ("n" * 250)
    file.write_text("old")
    with pytest.raises(ValueError), replacing(file) as scratch:
        scratch.write_text("half of it")
        raise ValueError
    assert file.read_text() == "old" and list(tmp_path.iterdir()) == [file]
    with replacing(file) as scratch:
        scratch.write_text("new")
    assert file.read_text() == "new" and list(tmp_path.iterdir()) == [file]
