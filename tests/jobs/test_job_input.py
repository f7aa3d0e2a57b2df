"""What a job reads its lines from, and what lines may carry."""

from __future__ import annotations

import gzip
import json
import os
import re
import subprocess
import sys
import threading
import time

import pytest
from backports import zstd

from dflash_jax import progress
from dflash_jax.engine.request import SamplingParams
from dflash_jax.errors import ConfigError
from dflash_jax.jobs import source as sources
from dflash_jax.jobs.console import JobConsole
from dflash_jax.jobs.reader import BadLine, Item, read_items
from dflash_jax.jobs.source import Source
from tests.jobs.recall_job import CASES, prompt

DEFAULTS = SamplingParams(max_tokens=7)
LINES = b"".join(json.dumps({"id": n, "prompt": "x" * n}).encode() + b"\n" for n in range(1, 400))


def ids(path):
    return [item.id for item in read_items(path, DEFAULTS)]


# As the command `zstd` does; without a checksum only what is cut can be told.
CHECKED = {zstd.CompressionParameter.checksum_flag: 1}
PACKED = {
    "in.jsonl.gz": gzip.compress(LINES),
    "in.jsonl.zst": zstd.compress(LINES, options=CHECKED),
    "two pieces.gz": gzip.compress(LINES[:1000]) + gzip.compress(LINES[1000:]),
    "two pieces.zst": zstd.compress(LINES[:1000]) + zstd.compress(LINES[1000:]),
    "named otherwise.jsonl": zstd.compress(LINES),
}


@pytest.mark.parametrize("name", PACKED)
def test_packed_input_is_read_whatever_it_is_called(tmp_path, name):
    (tmp_path / name).write_bytes(PACKED[name])
    assert ids(tmp_path / name) == list(range(1, 400))


@pytest.mark.parametrize("name", ["in.jsonl.gz", "in.jsonl.zst"])
@pytest.mark.parametrize(
    "damage", [lambda whole: whole[:-9], lambda whole: whole[:40], lambda whole: whole[:99] + b"?" * 9 + whole[108:]]
)
def test_packed_input_that_is_cut_or_damaged_is_refused_before_anything_runs(tmp_path, name, damage):
    (tmp_path / name).write_bytes(damage(PACKED[name]))
    with (
        pytest.raises(ConfigError, match=r"cannot be read \((after line \d+|from its first line on): ") as caught,
        Source(tmp_path / name) as source,
    ):
        list(source.lines())
    assert "\n" not in str(caught.value)


def test_a_line_without_an_end_is_given_up(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "MAX_LINE", 1 << 10)
    monkeypatch.setattr(sources, "MAX_SKIPPED", 1 << 16)
    (tmp_path / "in.gz").write_bytes(gzip.compress(b"{}\n" + b"\0" * (1 << 20)))
    with pytest.raises(ConfigError, match="line 2 has no end within"), Source(tmp_path / "in.gz") as source:
        list(source.lines())


def test_blank_lines_without_an_end_are_given_up(tmp_path):
    """Four megabytes unfold to a billion of them."""
    file = tmp_path / "in.jsonl.gz"
    with gzip.open(file, "wb", 1) as packed:
        for _ in range(1000):
            packed.write(b"\n" * 1_000_000)
    with Source(file) as source, pytest.raises(ConfigError, match=r"up to line \d+ there is nothing but blank lines"):
        list(source.lines())
    few = tmp_path / "few.jsonl"
    few.write_bytes((b"\n" * 500_000 + b"{}\n") * 3)
    with Source(few) as source:
        assert len(list(source.lines())) == 3


def test_a_log_says_that_input_is_waited_for(job, monkeypatch, capfd):
    monkeypatch.setattr(progress, "LINE_SECONDS", 0.0)
    job.configure(input={"path": str(job.directory / "pipe")})
    os.mkfifo(job.directory / "pipe")

    def write():
        with (job.directory / "pipe").open("w") as pipe:
            time.sleep(2.5)
            pipe.write(json.dumps(prompt(0)) + "\n")

    writer = threading.Thread(target=write)
    writer.start()
    job.run("sampling.max_tokens=2", console=JobConsole())
    writer.join()
    assert f"\nreading {job.directory}/pipe; waiting for the next line, " in capfd.readouterr().err


def test_a_job_reads_a_pipe(job):
    os.mkfifo(job.directory / "pipe")
    lines = (job.directory / "in.jsonl").read_bytes()
    writer = threading.Thread(target=(job.directory / "pipe").write_bytes, args=(lines,))
    writer.start()
    found = job.run(f"input.path={job.directory / 'pipe'}")
    writer.join()
    assert found["requests"]["total"] == len(CASES)
    assert all(job.row(f"case-{n}")["token_ids"] == case["greedy_tokens"] for n, case in enumerate(CASES))


@pytest.mark.parametrize("name", ["/dev/stdin", "-"])
def test_a_job_reads_the_standard_input(job, name):
    lines = (job.directory / "in.jsonl").read_bytes()
    command = [sys.executable, "-m", "dflash_jax", "generate", str(job.config), "--set", f"input.path={name}"]
    done = subprocess.run([*command, "--quiet"], input=lines, capture_output=True)
    assert done.returncode == 0, done.stderr
    assert len(job.rows()) == len(CASES)


def test_a_job_reads_its_config_from_the_standard_input(job):
    command = [sys.executable, "-m", "dflash_jax", "generate", "-", "--quiet", "--set", "sampling.max_tokens=3"]
    done = subprocess.run(command, input=job.config.read_bytes(), capture_output=True)
    assert done.returncode == 0, done.stderr
    assert [len(row["token_ids"]) for row in job.rows()] == [3] * len(CASES)
    done = subprocess.run([*command, "--set", "input.path=-"], input=job.config.read_bytes(), capture_output=True)
    assert done.returncode == 2 and b"are both the standard input" in done.stderr


@pytest.mark.parametrize("device", ["/dev/zero", "/dev/full"])
def test_a_device_is_no_input(job, device):
    with pytest.raises(ConfigError, match=r"\(input\.path\) cannot be read \(it is a device"):
        job.run(f"input.path={device}")
    assert not job.output.exists()


# Lines.


def read_one(tmp_path, **fields):
    (tmp_path / "in.jsonl").write_text(json.dumps({"id": "a", "prompt": "x", **fields}) + "\n")
    [item] = read_items(tmp_path / "in.jsonl", DEFAULTS)
    return item


@pytest.mark.parametrize(
    ("name", "value"),
    [("max_tokens", 9), ("temperature", 0.5), ("stop", ["x"]), ("seed", 0), ("top_p", 1.0), ("logit_bias", {"5": 1})],
)
def test_a_sampling_parameter_beside_the_prompt_is_told_its_place(tmp_path, name, value):
    item = read_one(tmp_path, **{name: value})
    assert isinstance(item, BadLine) and item.id == "a"
    assert item.error == f'{name} is beside the prompt; it belongs into "sampling": {json.dumps({name: value})}'


@pytest.mark.parametrize("name", ["best_of", "top_logprobs", "response_format", "guided_json"])
def test_a_sampling_parameter_that_there_is_not_is_refused(tmp_path, name):
    item = read_one(tmp_path, **{name: 1})
    assert isinstance(item, BadLine) and f"{name} is no sampling parameter here" in item.error
    assert "temperature, max_tokens, top_p" in item.error


@pytest.mark.parametrize("name", ["stop", "max_tokens", "n", "logprobs"])
def test_null_is_the_default_wherever_it_is(tmp_path, name):
    assert read_one(tmp_path, **{name: None}) == Item(1, "a", "x", DEFAULTS)


def test_null_among_the_sampling_parameters_is_the_jobs_own(tmp_path):
    assert read_one(tmp_path, sampling={"stop": None, "max_tokens": None, "top_k": 3}) == Item(
        1, "a", "x", SamplingParams(max_tokens=7, top_k=3)
    )


@pytest.mark.parametrize("name", SamplingParams.__dataclass_fields__)
@pytest.mark.parametrize(
    "value", [10**400, -(10**400), 1e308, -1e308, "9" * 5_000_000, [[]], {"a": 1}, True], ids=range(8)
)
def test_no_value_of_a_sampling_parameter_is_more_than_that_lines_error(tmp_path, name, value):
    item = read_one(tmp_path, sampling={name: value})
    assert isinstance(item, Item) or ("sampling" in item.error and len(item.error) < 500)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"id": "i" * 5_000_000}, "it may have 1,000 characters"),
        ({"id": 10**4000}, "it may have 1,000 characters"),
        ({"prompt": ["x"] * 1_000_000}, "prompt is "),
        ({"prompt_token_ids": ["x" * 5_000_000], "prompt": None}, "prompt_token_ids is "),
        ({"messages": [{"role": "user" * 1_000_000}], "prompt": None}, "messages is "),
        ({"sampling": "x" * 5_000_000}, "sampling is "),
        ({"sampling": {"x" * 5_000_000: 1}}, "unknown sampling key"),
    ],
    ids=range(7),
)
def test_a_value_of_megabytes_is_cut_where_a_line_is_refused(tmp_path, fields, says):
    item = read_one(tmp_path, **fields)
    assert isinstance(item, BadLine) and says in item.error and len(item.error) < 500
    assert len(str(item.id)) <= 1000


def test_a_line_of_many_and_of_long_keys_is_read_within_seconds(tmp_path):
    item = read_one(tmp_path, **{f"samplinh{n}": 1 for n in range(300_000)}, **{"promptt" * 100_000: 1})
    assert isinstance(item, Item | BadLine)


def test_whatever_a_prompt_makes_the_tokenizer_raise_is_that_lines_error(job):
    from dflash_jax.engine import Engine

    class Raising(Engine):
        def tokenize(self, prompt):
            if len(prompt) == 3:
                raise AttributeError("'str' object has no attribute 'items'\nand more")
            return super().tokenize(prompt)

    job.prompts(prompt(0), {"id": "raises", "prompt_token_ids": [1, 2, 3]}, prompt(1))
    found = job.run(load=Raising.from_config)
    assert job.row("raises")["line"] == 2
    assert re.search("the prompt cannot be used .AttributeError: 'str' object", job.row("raises")["error"])
    assert found["status"] == "finished" and found["requests"]["error"] == 1
    assert job.row("case-1")["token_ids"] == CASES[1]["greedy_tokens"]
