from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from dflash_jax.training.config import OptimiserSection
from dflash_jax.training.optimiser import learning_rates, make_optimiser


def test_the_learning_rate_rises_and_then_falls_to_its_share():
    rates = learning_rates(OptimiserSection(steps=100, learning_rate=1.0, warmup=0.1, final=0.2))
    found = np.array([rates(step) for step in (0, 9, 10, 55, 100)])
    np.testing.assert_allclose(found, [1 / 11, 10 / 11, 1.0, 0.6, 0.2], rtol=1e-5)


def test_muon_orthogonalises_matrices_and_leaves_tables_to_adam():
    rng = np.random.default_rng(0)
    params = {"mlp": jnp.zeros((24, 8)), "codebook": jnp.zeros((24, 8)), "norm": jnp.zeros(8)}
    gradient = jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape), jnp.float32), params)
    optimiser = make_optimiser(OptimiserSection(steps=10, learning_rate=1.0, warmup=0.0, kind="muon"))
    updates, _ = optimiser.update(gradient, optimiser.init(params), params)
    drawn, found = (np.linalg.svd(np.asarray(tree["mlp"]), compute_uv=False) for tree in (gradient, updates))
    assert drawn.max() > 2 * drawn.min() and found.max() < 1.8 * found.min()
    # Adam's first step is equally large everywhere, whatever the gradient.
    for name in ("codebook", "norm"):
        size = np.abs(np.asarray(updates[name]))
        np.testing.assert_allclose(size, size.mean(), rtol=1e-3)
