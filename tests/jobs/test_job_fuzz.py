"""Jobs of hostile configs and lines: one sentence, or error rows, within seconds and bounded memory.

The profile of hypothesis says how many: "ci" a few with a fixed seed, "long" and "thorough" more (tests/conftest.py).
"""

from __future__ import annotations

import copy
import json
import resource
import time
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from dflash_jax.engine import Completion, SamplingParams, Update
from dflash_jax.engine.output import Metrics
from dflash_jax.errors import DflashError, RequestError
from dflash_jax.jobs.config import load_job
from dflash_jax.jobs.console import JobConsole
from dflash_jax.jobs.generate import run_job
from tests.jobs.recall_job import ENGINE, GOLDEN

SECONDS = 20
"""Of this process, whatever else the machine does."""
BYTES = 3 << 30

METRICS = Metrics(0, 0, 0, None, None, None, None, 0, 0)


class Echo:
    """An engine that answers at once, so that only what the job makes of its input is tried."""

    class host:
        in_flight = ()

    def __init__(self, setup, clock):
        self.queue, self.config = [], setup.engine

    @property
    def has_work(self):
        return bool(self.queue)

    def tokenize(self, prompt):
        return prompt

    def add_request(self, prompt, sampling, *, request_id=None):
        request_id = f"request-{len(self.queue)}" if request_id is None else request_id
        assert isinstance(sampling, SamplingParams) and isinstance(request_id, str)
        if isinstance(prompt, str) and "raise" in prompt:
            raise {"r": RequestError, "t": TypeError}.get(prompt[0], ValueError)(prompt)
        self.queue.append(request_id)
        return request_id

    def step(self):
        ids, self.queue = self.queue, []
        return [Update(i, (1,), "x", Completion(i, 1, (1,), "x", "length", None, None, METRICS, (), ())) for i in ids]

    def warmup(self, *, requests, plain, sampling):
        assert requests >= 1 and plain >= 0

    def counters(self):
        return {}

    def snapshot(self, directory):
        directory.mkdir(exist_ok=True)


class Quiet(JobConsole):
    """Has nothing to say about an engine that is none."""

    def __init__(self):
        super().__init__(quiet=True)

    def loaded(self, engine, seconds):
        pass


# Values that have broken something somewhere, beside what hypothesis finds by itself.
NUMBERS = st.sampled_from([0, -1, 1, 2**31, 2**63, -(2**63), 10**400, 1e308, 1e-320, 1e39, 0.5, 62.5])
TEXTS = st.sampled_from(
    ["", "62", "no", "NaN", "inf", "\0", "x" * 100_000, "../..", "/dev/zero", "/dev/full", "~", "é\u2028"]
)
SCALARS = st.one_of(st.none(), st.booleans(), NUMBERS, TEXTS, st.floats(), st.integers(), st.text(max_size=20))
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=8), inner, max_size=3)),
    max_leaves=8,
)

BASE = {
    "target": {"path": str(GOLDEN / "recall-target")},
    "draft": {"path": str(GOLDEN / "recall-dflash2"), "k": 7, "shortlist": None},
    "engine": {**ENGINE, "num_pages": None, "prefill_chunk": 128, "rounds_per_step": 1, "dtype": "float32"},
    "sampling": {"max_tokens": 48, "temperature": 0.0, "stop": None, "seed": 0, "top_p": 1.0},
    "input": {"path": "in.jsonl"},
    "output": {"path": "out.jsonl", "trace": False, "checkpoint_every": None},
    "report": {"samples": 0, "compare_plain": False, "compare_requests": 8, "compare_tokens": None},
}
PLACES = [(section,) for section in BASE] + [(section, key) for section in BASE for key in BASE[section]]


@st.composite
def configs(draw):
    """A job's config with some values exchanged, left out or added, as values or as the text of a file."""
    values = copy.deepcopy(BASE)
    for place in draw(st.lists(st.sampled_from(PLACES), max_size=3)):
        section = values
        for part in place[:-1]:
            section = section.get(part) if isinstance(section, dict) else None
        if isinstance(section, dict):
            if draw(st.booleans()):
                section[place[-1]] = draw(VALUES)
            else:
                section.pop(place[-1], None)
                section[draw(st.text(max_size=12))] = draw(SCALARS)
    text = yaml.safe_dump(values)
    for _ in range(draw(st.integers(0, 2))):
        at = draw(st.integers(0, len(text)))
        noise = ["[", "{", "&a ", "*a", "!!int ", "\n", "\0", ": ", "- ", "\ud800", "<<: ", "'", "%", "0x", "é"]
        text = text[:at] + draw(st.sampled_from(noise)) + text[at:]
    return text.encode("utf-8", "surrogatepass")


RECORDS = st.fixed_dictionaries(
    {},
    optional={
        "id": VALUES,
        "prompt": st.one_of(VALUES, st.sampled_from(["raise", "r raise", "t raise", "hello"])),
        "messages": st.one_of(VALUES, st.lists(st.fixed_dictionaries({"role": VALUES, "content": VALUES}), max_size=2)),
        "prompt_token_ids": st.one_of(VALUES, st.lists(st.integers(-2, 70), max_size=4)),
        "sampling": st.one_of(
            VALUES,
            st.dictionaries(st.sampled_from([*SamplingParams.__dataclass_fields__, "x"]), VALUES, max_size=3),
        ),
        "temperature": VALUES,
        "logprobs": VALUES,
        "samplings": VALUES,
    },
)


@st.composite
def lines(draw):
    """An input line: a record, with noise in its bytes, or noise alone."""
    if draw(st.integers(0, 9)) == 0:
        raw = draw(
            st.sampled_from([b"[" * 99_999, b"\0" * 999, b"1" * 9_999, b'{"a":' * 9_999, b"\xff\xfe", b"{}", b"null"])
        )
    else:
        # JSON of any kind, also what Python writes and JSON does not have.
        raw = json.dumps(draw(RECORDS), ensure_ascii=draw(st.booleans())).encode("utf-8", "surrogatepass")
    if draw(st.integers(0, 4)) == 0:
        at = draw(st.integers(0, len(raw)))
        raw = raw[:at] + draw(st.binary(max_size=3)) + raw[at + draw(st.integers(0, 3)) :]
    return raw


@pytest.fixture(scope="module", autouse=True)
def bounded():
    """Within bounded memory: what goes beyond is a MemoryError, which no test expects."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + BYTES, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Makes the job's folder and goes there, so that what is relative stays in it."""
    with pytest.MonkeyPatch.context() as patch:

        def make():
            directory = tmp_path_factory.mktemp("job")
            patch.chdir(directory)
            (directory / "in.jsonl").write_text('{"id": 1, "prompt_token_ids": [1]}\n')
            (directory / "job.yaml").write_text(yaml.safe_dump(BASE))
            return directory

        yield make


def run():
    return run_job(load_job("job.yaml"), console=Quiet(), load=Echo)


def one_sentence(error):
    assert isinstance(error, DflashError)
    assert "\n" not in str(error) and 0 < len(str(error)) < 3000, str(error)[:3000]


@given(text=configs())
def test_a_hostile_config_is_a_job_or_one_sentence(folder, text):
    (folder() / "job.yaml").write_bytes(text)
    begin = time.process_time()
    try:
        found = run()
    except DflashError as error:
        one_sentence(error)
    else:
        assert found["status"] == "finished"
    assert time.process_time() - begin < SECONDS


@given(content=st.lists(lines(), max_size=6), ending=st.sampled_from([b"\n", b""]))
def test_hostile_lines_are_answers_or_error_rows(folder, content, ending):
    directory = folder()
    (directory / "in.jsonl").write_bytes(b"\n".join(content) + ending)
    begin = time.process_time()
    found = run()
    assert time.process_time() - begin < SECONDS
    results = [json.loads(line) for line in (directory / "out.jsonl").read_bytes().split(b"\n")[:-1]]
    assert found["status"] == "finished" and found["requests"]["total"] == len(results)
    assert len({str(result["id"]) for result in results}) == len(results)
    assert all(len(result["error"]) < 1500 and "\n" not in result["error"] for result in results if "line" in result)
    # The same again changes nothing.
    assert run()["requests"] == found["requests"]


@given(content=st.lists(lines(), max_size=4))
def test_a_hostile_output_of_an_earlier_run_is_one_sentence_or_goes_on(folder, content):
    directory = folder()
    (directory / "out.jsonl").write_bytes(b"\n".join(content))
    (directory / "out.jsonl.summary.json").write_bytes(b"\n".join(content))
    try:
        run()
    except DflashError as error:
        one_sentence(error)
