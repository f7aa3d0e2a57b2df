"""A job's lines with parameters that change logits, and with structured output."""

from __future__ import annotations

import json

import pytest

from dflash_jax import Engine
from dflash_jax.engine import EngineConfig
from tests.byte_tokenizer import byte_tokenizer
from tests.jobs.recall_job import ENGINE, prompt
from tests.pairs import models

END = 63


def with_text(setup, clock):
    """The job's engine, with a tokenizer that its models lack."""
    return Engine(models("recall-dflash2"), EngineConfig(**ENGINE), tokenizer=byte_tokenizer(), clock=clock)


def test_lines_change_their_logits_in_their_own_way_and_a_rerun_knows_the_job_again(job):
    job.configure(sampling={"max_tokens": 12, "logit_bias": {5: 100}})
    job.prompts(
        prompt(0, "as configured"),
        prompt(0, "own", sampling={"logit_bias": {"7": 100, "5": -100}}),
        prompt(0, "allowed", sampling={"logit_bias": {}, "allowed_token_ids": [3, 9]}),
        prompt(0, "bad", sampling={"logit_bias": {"7": 1000}}),
        prompt(0, "outside", sampling={"allowed_token_ids": [99]}),
    )
    job.run()
    assert set(job.row("as configured")["token_ids"]) == {5}
    assert set(job.row("own")["token_ids"]) == {7}
    assert set(job.row("allowed")["token_ids"]) <= {3, 9}
    assert "sampling.logit_bias has '7': 1000; it must be" in job.row("bad")["error"]
    assert "token 99, which is outside the vocabulary" in job.row("outside")["error"]
    before = job.rows()
    job.run()
    assert job.rows() == before


def test_a_lines_structured_output_is_followed_and_a_bad_one_is_that_lines_error(job):
    pytest.importorskip("llguidance")
    job.configure(sampling={"max_tokens": 40, "stop_token_ids": [END]})
    schema = {"type": "array", "items": {"enum": ["RED", "BLUE"]}, "minItems": 1, "maxItems": 3}
    schema["x-guidance"] = {"item_separator": ","}
    job.prompts(
        prompt(0, "json", sampling={"structured_outputs": {"json": schema}}),
        prompt(1, "choice", sampling={"structured_outputs": {"choice": ["RED", "BLUE"]}}),
        prompt(2, "schema", sampling={"structured_outputs": {"json": {"type": "nonsense"}}}),
        prompt(2, "regex", sampling={"structured_outputs": {"regex": "(a"}}),
        prompt(3, "kind", sampling={"structured_outputs": {"yaml": "x"}}),
        prompt(3, "free"),
    )
    job.run(load=with_text)

    def text_of(item_id):
        row = job.row(item_id)
        assert row["finish_reason"] == "stop"
        return byte_tokenizer().decode(row["token_ids"][:-1])

    assert set(json.loads(text_of("json"))) <= {"RED", "BLUE"}
    assert text_of("choice") in ("RED", "BLUE")
    assert job.row("free")["finish_reason"] in ("length", "stop")
    for item_id, why in {"schema": "Invalid type", "regex": "cannot be used", "kind": "it must be one of"}.items():
        error = job.row(item_id)["error"]
        assert "sampling.structured_outputs " in error and why in error and "\n" not in error
