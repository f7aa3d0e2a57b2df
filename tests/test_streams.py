"""Pipes, devices and the standard input as files to read."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time

import pytest

from dflash_jax import streams
from dflash_jax.streams import open_stream


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
    monkeypatch.setattr(streams, "PIPE_SECONDS", 0.2)
    begin = time.monotonic()
    with pytest.raises(OSError, match="nobody wrote to for"):
        open_stream(pipe)
    assert time.monotonic() - begin < 5


def test_a_slow_pipe_is_read_to_its_end_and_can_be_read_again(pipe, monkeypatch):
    monkeypatch.setattr(streams, "PIPE_SECONDS", 1.0)

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
    code = "from dflash_jax.streams import open_stream; print(len(open_stream('-').read()))"
    (tmp_path / "file").write_bytes(b"x" * 77)
    with (tmp_path / "file").open() as file:
        done = subprocess.run([sys.executable, "-c", code], stdin=file, capture_output=True, text=True)
    assert done.stdout == "77\n", done.stderr
    done = subprocess.run([sys.executable, "-c", code], input=b"x" * 200_000, capture_output=True)
    assert done.stdout == b"200000\n", done.stderr
