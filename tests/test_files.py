"""Files that are whole or not there, and one writer at a time."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import threading
import time

import pytest

from dflash_jax import files
from dflash_jax.errors import ConfigError
from dflash_jax.files import (
    exposure,
    open_stream,
    private_directory,
    read_private,
    replace_file,
    replacing,
    sole_writer,
)


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


def test_a_private_directory_and_all_that_is_made_on_the_way_are_for_their_owner_only(tmp_path):
    made = private_directory(tmp_path / "a" / "b")
    assert made == tmp_path.resolve() / "a" / "b" == private_directory(made)
    assert [stat.S_IMODE(place.stat().st_mode) for place in (made, made.parent)] == [0o700, 0o700]


@pytest.mark.parametrize("mode", [0o1777, 0o770, 0o702])
def test_a_directory_that_others_may_write_is_refused(tmp_path, mode):
    directory = tmp_path / "shared"
    directory.mkdir()
    directory.chmod(mode)
    with pytest.raises(PermissionError, match=f"others may write to {directory} .mode {mode:o}"):
        private_directory(directory)
    below = directory / "below"
    if mode == 0o1777:
        assert private_directory(below) == below, "a sticky directory keeps others from exchanging what is in it"
    else:
        with pytest.raises(PermissionError, match=f"others may write to {directory}"):
            private_directory(below)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give files away")
@pytest.mark.parametrize("given_away", ["shared", "shared/below"])
def test_a_directory_of_another_user_is_refused(tmp_path, given_away):
    (tmp_path / "shared" / "below").mkdir(parents=True)
    os.chown(tmp_path / given_away, 12345, 12345)
    with pytest.raises(PermissionError, match=f"{tmp_path / given_away} belongs to another user .uid 12345"):
        private_directory(tmp_path / "shared" / "below")


def test_a_link_counts_for_what_it_leads_to(tmp_path):
    (tmp_path / "open").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(tmp_path / "open")
    assert private_directory(tmp_path / "link") == tmp_path.resolve() / "open"
    (tmp_path / "open").chmod(0o777)
    with pytest.raises(PermissionError):
        private_directory(tmp_path / "link")


def test_only_plain_files_of_this_user_alone_are_read(tmp_path):
    file = tmp_path / "a"
    replace_file(file, "content", mode=0o600)
    assert read_private(file) == b"content" and exposure(file.resolve()) is None
    (tmp_path / "link").symlink_to(file)
    os.mkfifo(tmp_path / "pipe", 0o600)
    for other in ("link", "pipe"):
        with pytest.raises(OSError):
            read_private(tmp_path / other)
    file.chmod(0o620)
    with pytest.raises(PermissionError, match="is not a file that only this user may write"):
        read_private(file)
    if os.getuid() == 0:
        file.chmod(0o600)
        os.chown(file, 12345, 12345)
        with pytest.raises(PermissionError):
            read_private(file)


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


@pytest.mark.parametrize("device", ["/dev/zero", "/dev/full", "/dev/urandom"])
def test_a_device_that_never_ends_is_not_opened(device):
    with pytest.raises(OSError, match="it is a device"):
        open_stream(device)


def test_the_empty_device_is_an_empty_file():
    with open_stream(os.devnull) as file:
        assert file.read() == b""


def test_a_directory_is_no_stream(tmp_path):
    with pytest.raises(IsADirectoryError):
        open_stream(tmp_path)


@pytest.fixture
def pipe(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    return tmp_path / "pipe"


def test_a_pipe_that_nobody_writes_to_is_given_up(pipe, monkeypatch):
    monkeypatch.setattr(files, "PIPE_SECONDS", 0.2)
    begin = time.monotonic()
    with pytest.raises(OSError, match="nobody wrote to for"):
        open_stream(pipe)
    assert time.monotonic() - begin < 5


def test_a_slow_pipe_is_read_to_its_end_and_can_be_read_again(pipe, monkeypatch):
    monkeypatch.setattr(files, "PIPE_SECONDS", 1.0)

    def write():
        time.sleep(0.3)
        with pipe.open("wb") as file:
            for _ in range(3):
                file.write(b"x" * 100_000)
                file.flush()
                # Longer than it would be waited for somebody to open it.
                time.sleep(0.6)

    writer = threading.Thread(target=write)
    writer.start()
    with open_stream(pipe) as file:
        assert len(file.read()) == 300_000
        file.seek(0)
        assert len(file.read()) == 300_000
    writer.join()


def test_reading_a_pipe_ends_when_it_is_asked_to(pipe):
    end = pipe.open("r+b", buffering=0)
    end.write(b"some")
    asked = iter([False, False, True])
    with open_stream(pipe, lambda: next(asked, True)) as file:
        assert file.read() == b"some"
    end.close()


def test_the_standard_input_is_read_whatever_it_is(tmp_path):
    code = "from dflash_jax.files import open_stream; print(len(open_stream('-').read()))"
    (tmp_path / "file").write_bytes(b"x" * 77)
    with (tmp_path / "file").open() as file:
        done = subprocess.run([sys.executable, "-c", code], stdin=file, capture_output=True, text=True)
    assert done.stdout == "77\n", done.stderr
    done = subprocess.run([sys.executable, "-c", code], input=b"x" * 200_000, capture_output=True)
    assert done.stdout == b"200000\n", done.stderr
