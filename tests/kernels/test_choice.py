"""Who decides what computes an op."""

from __future__ import annotations

import logging

import jax
import pytest

from dflash_jax.kernels import choice


class FakeDevice:
    def __init__(self, compute_capability: str):
        self.compute_capability = compute_capability
        self.device_kind = "NVIDIA of the tests"


@pytest.mark.parametrize(("capability", "chosen"), [("9.0", "pallas"), ("8.0", "xla"), ("10.0", "xla")])
def test_gpus_but_hopper_use_xla(capability, chosen, monkeypatch, caplog):
    assert choice.default() == "xla"
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax, "local_devices", lambda: [FakeDevice(capability)])
    choice.log_once.cache_clear()
    with caplog.at_level(logging.WARNING):
        assert choice.default() == chosen
    assert len(caplog.records) == (chosen == "xla")


def test_the_caller_overrides_the_platform_and_the_shape_overrides_both(caplog):
    choice.log_once.cache_clear()
    assert choice.choose("op", None, None) == "xla"
    assert choice.choose("op", "pallas", None) == "pallas"
    assert choice.choose("op", "reference", "too large") == "reference"
    with caplog.at_level(logging.WARNING):
        assert [choice.choose("op", "pallas", "too large") for _ in range(2)] == ["xla", "xla"]
    assert [record.message for record in caplog.records] == ["op falls back from pallas to xla: too large"]
