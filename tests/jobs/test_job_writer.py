from __future__ import annotations

import json
import os

import pytest

from dflash_jax.errors import ConfigError
from dflash_jax.jobs import writer
from dflash_jax.jobs.results import refusal
from dflash_jax.jobs.writer import ResultFile


def answer(item_id, text="x"):
    return {"id": item_id, "finish_reason": "stop", "text": text}


@pytest.fixture
def path(tmp_path):
    return tmp_path / "deep" / "out.jsonl"


def fill(path, *results):
    with ResultFile(path) as file:
        for result in results:
            file.write(result)
    return path.read_bytes()


def test_results_are_there_the_moment_they_are_written(path):
    with ResultFile(path) as file:
        file.write(answer("a"))
        assert json.loads(path.read_text()) == answer("a")


def test_a_reopened_file_knows_what_is_done(path):
    before = fill(path, answer("a"), answer(7))
    with ResultFile(path) as file:
        assert list(file.results()) == [answer("a"), answer(7)]
        assert file.has("a") and file.has("7") and file.has(7) and not file.has("b")
        file.write(answer("b"))
    assert path.read_bytes().startswith(before)


@pytest.mark.parametrize("torn", [b'{"id": "b", "finish_rea', b"{", b"\0\0\0\0", b'{"id": "\xe2\x82'])
def test_a_torn_last_line_is_taken_out_and_nothing_else(path, torn):
    before = fill(path, answer("a"))
    path.write_bytes(before + torn)
    with ResultFile(path) as file:
        assert {row["id"] for row in file.results() if file.has(row["id"])} == {"a"}
    assert path.read_bytes() == before


def test_a_complete_row_that_only_lacks_its_newline_is_kept(path):
    before = fill(path, answer("a"), answer("b"))
    path.write_bytes(before[:-1])
    with ResultFile(path) as file:
        assert {row["id"] for row in file.results() if file.has(row["id"])} == {"a", "b"}
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    "other", [b"hello\n", b"hello", b'{"prompt": "x"}\n', b'{"id": 1, "finish_rea\n{"id": 2}\n', b"[1]\n"]
)
def test_a_file_that_no_job_wrote_is_left_alone(path, other):
    path.parent.mkdir()
    path.write_bytes(other)
    with pytest.raises(ConfigError, match="line 1 is not a result that a job wrote"):
        ResultFile(path)
    assert path.read_bytes() == other


def test_a_second_job_is_kept_out(path):
    with ResultFile(path), pytest.raises(ConfigError, match="another job is writing"):
        ResultFile(path)
    ResultFile(path).close()


def test_a_refusal_is_written_once(path):
    again = refusal("a", 1, "no prompt", trace=False)
    fill(path, again)
    with ResultFile(path) as file:
        file.write(again)
        assert not file.has("a")
    assert path.read_bytes().count(b"\n") == 1


def test_refusals_that_no_longer_hold_are_removed_and_answers_stay(path):
    mended, stays, moved = (refusal(i, n, "no prompt", trace=False) for i, n in (("m", 1), ("s", 2), ("v", 3)))
    fill(path, mended, answer("a"), stays, moved, answer("m"))
    with ResultFile(path) as file:
        again = refusal("v", 4, "no prompt", trace=False)
        file.write(again)
        file.keep_refusals({"s", "v"})
        file.write(answer("late"))
        with pytest.raises(ConfigError, match="another job"):
            ResultFile(path)
    assert list(map(json.loads, path.read_text().splitlines())) == [
        answer("a"),
        stays,
        answer("m"),
        again,
        answer("late"),
    ]
    assert os.listdir(path.parent) == ["out.jsonl"]


def test_a_file_is_not_rewritten_when_all_refusals_hold(path):
    fill(path, refusal("s", 1, "no prompt", trace=False), answer("a"))
    before = os.stat(path).st_ino
    with ResultFile(path) as file:
        file.keep_refusals({"s"})
    assert os.stat(path).st_ino == before


def test_what_readers_may_take_for_the_end_of_a_line_is_escaped(path):
    row = answer("a", "one\u2028two\x85three\x1efour\nfive\r é \U0001f600")
    line = fill(path, row)
    assert len(line.decode().splitlines()) == 1
    assert json.loads(line) == row
    assert "é \U0001f600".encode() in line


def test_a_full_disk_is_one_sentence_and_what_was_written_stays(path, monkeypatch):
    with ResultFile(path) as file:
        file.write(answer("a"))
        real = os.write

        def full(fd, data):
            real(fd, data[:5])
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(writer.os, "write", full)
        with pytest.raises(ConfigError, match=r"cannot be written .No space left"):
            file.write(answer("b"))
        monkeypatch.undo()
    with ResultFile(path) as file:
        assert {row["id"] for row in file.results() if file.has(row["id"])} == {"a"}


def test_a_directory_in_the_files_place_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="cannot be written"):
        ResultFile(tmp_path)
