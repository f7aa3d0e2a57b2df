"""Who decides what computes an op."""

from __future__ import annotations

import logging
import subprocess
import sys
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

from dflash_jax.kernels import dispatch, native
from dflash_jax.kernels.matmul import matmul
from dflash_jax.kernels.pages import write_tokens


class FakeDevice:
    def __init__(self, compute_capability: str):
        self.compute_capability = compute_capability
        self.device_kind = "NVIDIA of the tests"


@pytest.mark.parametrize(("capability", "chosen"), [("9.0", "mosaic_gpu"), ("8.0", "xla"), ("10.0", "xla")])
def test_gpus_but_hopper_use_xla(capability, chosen, monkeypatch, caplog):
    assert dispatch.default() == "native"
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax, "local_devices", lambda: [FakeDevice(capability)])
    dispatch.log_once.cache_clear()
    with caplog.at_level(logging.WARNING):
        assert dispatch.default() == chosen
    assert len(caplog.records) == (chosen == "xla")


@pytest.fixture
def op(monkeypatch):
    """An op whose operands are what its implementations say of them."""

    modules = {
        "plain": SimpleNamespace(op="plain", few="plain"),
        "native": SimpleNamespace(
            op="native", unsupported=lambda says: says.get("unsupported"), slower=lambda says: says.get("slower")
        ),
        "gpu": SimpleNamespace(op="gpu", unsupported=lambda says: says.get("unsupported")),
    }
    monkeypatch.setattr(dispatch, "_load", modules.__getitem__)
    table = {"reference": "plain", "xla": "plain", "native": "native", "mosaic_gpu": "gpu"}
    monkeypatch.setattr(dispatch, "_MODULES", {"op": table, "few": {"reference": "plain", "xla": "plain"}})
    dispatch.log_once.cache_clear()

    def names(*wanted, op="op", **says):
        return [dispatch.choose(op, name, says).name for name in wanted]

    return names


def test_the_caller_overrides_the_platform_and_the_operands_override_both(op, caplog):
    with caplog.at_level(logging.WARNING):
        everything = (None, "reference", "xla", "native", "mosaic_gpu")
        assert op(*everything) == ["native", "reference", "xla", "native", "mosaic_gpu"]
        assert op(*everything, op="few") == ["xla", "reference", "xla", "xla", "xla"]
        assert op(None, "native", slower="by far") == ["xla", "native"]
        assert op(None, "reference", unsupported="too large") == ["xla", "reference"]
        assert not caplog.records
        assert op("mosaic_gpu", "mosaic_gpu", unsupported="too large") == ["xla", "xla"]
        assert op("native", unsupported="too small") == ["xla"]
    assert [record.message for record in caplog.records] == [
        "op falls back from mosaic_gpu to xla: too large",
        "op falls back from native to xla: too small",
    ]


def test_a_gpu_that_cannot_says_so_unasked(op, monkeypatch, caplog):
    monkeypatch.setattr(dispatch, "default", lambda: "mosaic_gpu")
    with caplog.at_level(logging.WARNING):
        assert op(None, unsupported="too large") == ["xla"]
    assert "op falls back from mosaic_gpu to xla: too large" in caplog.text


@pytest.mark.parametrize("op", dispatch._MODULES)
def test_every_implementation_that_the_table_names_is_there(op):
    for module in dispatch._MODULES[op].values():
        assert callable(getattr(dispatch._load(module), op))


@pytest.mark.usefixtures("native_code")
@pytest.mark.parametrize("implementation", [None, "reference", "xla", "native"])
def test_the_implementation_governs_the_page_write_and_the_matmul(implementation):
    pool, values = jnp.zeros((1, 2, 4, 1, 2), jnp.bfloat16), jnp.zeros((1, 1, 1, 1, 2))
    place, x, matrix = jnp.zeros((1, 1), jnp.int32), jnp.zeros((3, 8)), jnp.zeros((4, 8))

    def run(pool, values, place, x, matrix):
        written = write_tokens(pool, values, place, place, implementation=implementation)
        return written, matmul(x, matrix, layout="out_in", implementation=implementation)

    program = str(jax.make_jaxpr(run)(pool, values, place, x, matrix))
    assert ("dflash_write" in program) == ("dflash_multiply" in program) == (implementation in (None, "native"))


def test_no_gpu_kernel_is_imported_on_a_cpu():
    program = """
import sys
from tests.pairs import SAMPLING, engine, prompts
engine("recall-dflash2").generate(prompts("recall-dflash2")[:1], {**SAMPLING, "max_tokens": 4})
print([name for name in sys.modules if "mosaic" in name and name.startswith("dflash_jax")])
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=600, check=False)
    assert done.stdout.strip() == "[]", done.stderr[-2000:]


def test_there_is_no_native_code_where_there_is_no_compiler(monkeypatch, caplog):
    monkeypatch.setattr(native, "available", lambda: False)
    dispatch.log_once.cache_clear()
    matrix = jnp.zeros((4, 8))
    with caplog.at_level(logging.WARNING):
        assert dispatch.choose("matmul", None, jnp.zeros((3, 8)), matrix, "out_in", False).name == "xla"
        assert not caplog.records
        assert dispatch.choose("matmul", "native", jnp.zeros((3, 8)), matrix, "out_in", False).name == "xla"
    assert "matmul falls back from native to xla: there is no native code here" in caplog.text
