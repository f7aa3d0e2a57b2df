"""Which implementation computes an op: the caller's, else the platform's, where it can compute the operands."""

from __future__ import annotations

import functools
import importlib
import logging
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

import jax

Implementation = Literal["reference", "xla", "native", "mosaic_gpu"]
"""The definition; plain XLA operations; C++ for CPUs; a Mosaic GPU kernel for Hopper."""

_MODULES: Mapping[str, Mapping[Implementation, str]] = {
    "block_attention": {
        "reference": "block_attention.reference",
        "xla": "block_attention.xla",
        "native": "block_attention.native",
        "mosaic_gpu": "block_attention.mosaic_gpu",
    },
    "best_tokens": {
        "reference": "lm_head.xla",
        "xla": "lm_head.xla",
        "native": "lm_head.native",
        "mosaic_gpu": "lm_head.mosaic_gpu",
    },
    "fold_block": {
        "reference": "gated_delta.reference",
        "xla": "gated_delta.xla",
        "native": "gated_delta.native",
        "mosaic_gpu": "gated_delta.mosaic_gpu",
    },
    "gated_delta": {"reference": "gated_delta.reference", "xla": "gated_delta.chunks"},
    "gated_delta_block": {
        "reference": "gated_delta.reference",
        "xla": "gated_delta.xla",
        "native": "gated_delta.native",
        "mosaic_gpu": "gated_delta.mosaic_gpu",
    },
    "gated_delta_prefill": {
        "reference": "gated_delta.reference",
        "xla": "gated_delta.chunks",
        "native": "gated_delta.native",
        "mosaic_gpu": "gated_delta.mosaic_gpu_chunks",
    },
    "matmul": {"reference": "matmul.xla", "xla": "matmul.xla", "native": "matmul.native"},
    "mix_experts": {"reference": "experts.xla", "xla": "experts.xla", "native": "experts.native"},
    "select_path": {"reference": "selector.xla", "xla": "selector.xla", "mosaic_gpu": "selector.mosaic_gpu"},
    "write_tokens": {"reference": "pages.xla", "xla": "pages.xla", "native": "pages.native"},
}
"""The module of each implementation of each op, below `dflash_jax.kernels`.

A module has a function of the op's name. One that does not compute everything also has `unsupported`, and one that is
not always faster than "xla" has `slower`. Both are given what `choose` is given and return a reason, or None.
"""

_log = logging.getLogger(__name__)


class Chosen(NamedTuple):
    """An implementation of an op."""

    name: Implementation
    compute: Callable[..., Any]


def choose(op: str, implementation: Implementation | None, *operands: Any) -> Chosen:
    """The implementation that computes an op.

    Args:
      op: its name.
      implementation: what the caller asks for; None for the platform's fastest. An op without it is computed by "xla",
        and so are operands that it does not support: the log then says why, once per reason.
      operands: what `unsupported` and `slower` of the op's implementations look at.
    """
    modules, wanted = _MODULES[op], implementation or default()
    if wanted in modules:
        module = _load(modules[wanted])
        reason = module.unsupported(*operands) if hasattr(module, "unsupported") else None
        if reason is None:
            if implementation is not None or not hasattr(module, "slower") or module.slower(*operands) is None:
                return Chosen(wanted, getattr(module, op))
        # The default on CPUs passes over operands of other sizes in silence; `native.available` warns if there is no
        # native code at all.
        elif implementation is not None or wanted != "native":
            log_once(f"{op} falls back from {wanted} to xla: {reason}")
    return Chosen("xla", getattr(_load(modules["xla"]), op))


def default() -> Implementation:
    """The fastest for the default backend, which is what a computation runs on unless it is told otherwise."""
    backend = jax.default_backend()
    if backend == "cpu":
        return "native"
    if backend != "gpu":
        return "xla"
    device = jax.local_devices()[0]
    capability = getattr(device, "compute_capability", "unknown")
    if capability == "9.0":
        return "mosaic_gpu"
    log_once(
        f"kernels use xla: those of mosaic_gpu are for compute capability 9.0 (Hopper), "
        f"and {device.device_kind} has {capability}"
    )
    return "xla"


@functools.cache
def register_custom_calls(implementation: Implementation) -> None:
    """Makes XLA know the functions that compiled kernels of an implementation call, as tracing them does."""
    if implementation == "native":
        # What calls them is imported when it is traced.
        _load("native").available()
    elif implementation == "mosaic_gpu":
        for modules in _MODULES.values():
            if implementation in modules:
                _load(modules[implementation])


def _load(module: str) -> Any:
    """Imports an implementation when it is first chosen: a CPU has no use for kernels of GPUs."""
    return importlib.import_module(f"dflash_jax.kernels.{module}")


@functools.cache
def log_once(sentence: str) -> None:
    """Warns, unless the same was said before."""
    _log.warning(sentence)
