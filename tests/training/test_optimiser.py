from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest

from dflash_jax.models.matrix import Matrix
from dflash_jax.training.config import OptimiserSection
from dflash_jax.training.optimiser import learning_rates, make_optimiser


def test_the_learning_rate_rises_and_then_falls_to_its_share():
    rates = learning_rates(OptimiserSection(steps=100, learning_rate=1.0, warmup=0.1, final=0.2))
    found = np.array([rates(step) for step in (0, 9, 10, 55, 100)])
    np.testing.assert_allclose(found, [1 / 11, 10 / 11, 1.0, 0.6, 0.2], rtol=1e-5)


def drawn_gradients(seed: int, params):
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape), jnp.float32), params)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_muon_orthogonalises_matrices_and_leaves_tables_to_adam(dtype):
    params = {"mlp": Matrix(jnp.zeros((24, 8))), "codebook": jnp.zeros((24, 8)), "norm": jnp.zeros(8)}
    gradient = drawn_gradients(0, params)
    optimiser = make_optimiser(OptimiserSection(steps=10, learning_rate=1.0, warmup=0.0, kind="muon"), dtype)
    updates, _ = optimiser.update(gradient, optimiser.init(params), params)
    drawn, found = (np.linalg.svd(np.asarray(tree["mlp"].value), compute_uv=False) for tree in (gradient, updates))
    assert drawn.max() > 2 * drawn.min() and found.max() < 1.8 * found.min()
    # Adam's first step is equally large everywhere, whatever the gradient.
    for name in ("codebook", "norm"):
        size = np.abs(np.asarray(updates[name]))
        np.testing.assert_allclose(size, size.mean(), rtol=1e-3)


@pytest.mark.parametrize("kind", ["wide", "tall"])
def test_the_first_step_of_muon_is_that_of_optax(kind):
    """Later ones differ: optax.contrib.muon corrects its momentum for its start, as the authors' own does not."""
    params = {"wide": jnp.ones((8, 24)), "tall": jnp.ones((24, 8))}[kind]
    params = {"codebook": jnp.ones((24, 8)), "mlp": params}
    section = OptimiserSection(steps=10, learning_rate=0.1, warmup=0.0, weight_decay=0.1, kind="muon", clip=1e9)
    dimensions = {"mlp": optax.contrib.MuonDimensionNumbers(), "codebook": None}
    theirs = optax.contrib.muon(
        learning_rates(section),
        weight_decay=0.1,
        muon_weight_dimension_numbers=dimensions,
        consistent_rms=0.2,
        adam_b1=section.beta1,
        adam_b2=section.beta2,
    )
    ours = make_optimiser(section)
    moved = []
    for optimiser, start in ((ours, {**params, "mlp": Matrix(params["mlp"])}), (theirs, params)):
        updates, _ = optimiser.update(drawn_gradients(1, start), optimiser.init(start), start)
        moved.append(jax.tree.leaves(optax.apply_updates(start, updates)))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), *moved)
