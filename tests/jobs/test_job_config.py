from __future__ import annotations

import pytest

from dflash_jax.errors import ConfigError
from dflash_jax.jobs.config import load_job


def test_defaults_are_those_of_the_contract(job):
    job.configure(engine=None, sampling=None)
    config = load_job(job.config)
    assert (config.engine.max_slots, config.engine.page_size, config.engine.num_pages) == (8, 16, None)
    assert (config.engine.max_model_len, config.engine.prefill_chunk) == (512, 128)
    assert (config.engine.dtype, config.engine.strict, config.output.trace) == ("float32", False, False)
    sampling = config.defaults
    assert (sampling.temperature, sampling.max_tokens, sampling.top_p, sampling.top_k) == (0.0, 64, 1.0, 0)
    assert (sampling.min_p, sampling.seed, sampling.stop, sampling.ignore_eos) == (0.0, 0, (), False)


def test_overrides_win_over_the_file(job):
    config = load_job(
        job.config, ["sampling.temperature=0.5", "draft.k=3", "sampling.stop=[a, b]", "output.trace=true"]
    )
    assert config.defaults.temperature == 0.5
    assert config.defaults.stop == ("a", "b")
    assert config.draft is not None and config.draft.k == 3
    assert config.output.trace


def test_a_draft_can_be_taken_out_by_an_override(job):
    assert load_job(job.config, ["draft=null"]).draft is None


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("engine.max_slot=2", r"unknown key 'engine.max_slot'; the nearest known one is 'engine.max_slots'"),
        ("tarjet.path=x", r"unknown key 'tarjet'; the nearest known one is 'target'"),
        ("draft.kk=2", r"unknown key 'draft.kk'; the nearest known one is 'draft.k'"),
        ("sampling.temprature=1", r"unknown sampling key 'temprature'; the nearest known one is 'temperature'"),
        ("sampling.top_p=0", r"sampling.top_p is 0; it must be above 0 and at most 1"),
        ("engine.dtype=float16", r"'engine.dtype' is 'float16'"),
        ("engine.max_slots=0", r"'engine.max_slots' is 0"),
        ("input=null", r"'input' is None"),
    ],
)
def test_a_bad_key_or_value_is_refused_with_what_would_be_right(job, override, says):
    with pytest.raises(ConfigError, match=says) as caught:
        load_job(job.config, [override])
    assert "job.yaml" in str(caught.value) and override in str(caught.value)


@pytest.mark.parametrize("section", ["target", "input", "output"])
def test_a_missing_section_is_named(job, section):
    job.configure(**{section: None})
    with pytest.raises(ConfigError, match=f"job.yaml: '{section}' is missing"):
        load_job(job.config)


def test_a_comparison_needs_a_draft(job):
    with pytest.raises(ConfigError, match="compare_plain needs a draft"):
        load_job(job.config, ["draft=null", "report.compare_plain=true"])
