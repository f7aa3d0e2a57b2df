"""A report reaches the host as one array, and with log-probabilities as that array and theirs."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax.engine.readback import receive, send
from dflash_jax.engine.steps import Report
from dflash_jax.sampling import Logprobs


@pytest.mark.parametrize("rounds", [(), (4,)])
@pytest.mark.parametrize("drafts", [0, 1, 7])
@pytest.mark.parametrize("top", [None, 0, 5])
def test_a_report_comes_back_as_it_was(rounds, drafts, top):
    draw = np.random.default_rng(0)
    shape = (*rounds, 3)

    def numbers(*width: int) -> np.ndarray:
        return draw.integers(0, 1 << 30, (*shape, *width), np.int32)

    report = Report(
        tokens=numbers(1 + drafts // 2),
        produced=numbers(),
        drafts=numbers(drafts),
        num_drafts=numbers(),
        num_verified=numbers(),
        bins=numbers(drafts),
        damaged_draft=draw.random(shape) > 0.5,
        position=numbers(),
        finished=draw.random(shape) > 0.5,
        stopped=draw.random(shape) > 0.5,
        violation=numbers(),
    )
    if top is not None:
        found = numbers(1), numbers(1), numbers(1, top), numbers(1, top)
        logprob, rank, names, values = found
        report = report.replace(logprobs=Logprobs(logprob.astype(np.float32), rank, names, values.astype(np.float32)))
    sent = jax.tree.map(jnp.asarray, send(report))
    assert len(jax.tree.leaves(sent)) == (1 if top is None else 5)
    back = receive(sent, drafts)
    assert jax.tree.structure(back) == jax.tree.structure(report)
    for (path, came), was in zip(jax.tree.leaves_with_path(back), jax.tree.leaves(report), strict=True):
        name = jax.tree_util.keystr(path)
        assert came.dtype == was.dtype, name
        np.testing.assert_array_equal(came, was, name)
