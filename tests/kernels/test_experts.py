"""The experts of a sparse MLP: every implementation against float64, and native code's promises."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax.kernels import native
from dflash_jax.kernels.experts import mix_experts

EXPERTS = 6


def operands(tokens: int, chosen: int, hidden: int, inner: int, dtype=jnp.float32):
    draw = np.random.default_rng(tokens + hidden)

    def matrices(*shape):
        return jnp.asarray(draw.standard_normal(shape) / shape[1] ** 0.5, dtype)

    experts = np.stack([draw.choice(EXPERTS, chosen, replace=False) for _ in range(tokens)])
    weights = matrices(EXPERTS, hidden, inner), matrices(EXPERTS, hidden, inner), matrices(EXPERTS, inner, hidden)
    shares = jnp.asarray(draw.uniform(0.1, 1, (tokens, chosen)), jnp.float32)
    return jnp.asarray(draw.standard_normal((tokens, hidden)), dtype), jnp.asarray(experts), shares, *weights


def exact(x, experts, shares, gate, up, down):
    x, shares, gate, up, down = (np.asarray(array, np.float64) for array in (x, shares, gate, up, down))
    out = np.zeros(x.shape)
    for token, row in enumerate(np.asarray(experts)):
        for share, expert in zip(shares[token], row, strict=True):
            opened = x[token] @ gate[expert]
            out[token] += share * ((opened / (1 + np.exp(-opened)) * (x[token] @ up[expert])) @ down[expert])
    return out


@pytest.mark.parametrize("implementation", ["xla", "native"])
@pytest.mark.parametrize("sizes", [(1, 1, 8, 16), (5, 2, 13, 40), (40, 3, 300, 7), (3, 6, 16, 300)])
@pytest.mark.parametrize(("dtype", "atol"), [(jnp.float32, 1e-5), (jnp.bfloat16, 5e-2)])
def test_each_token_gets_what_its_experts_make_of_it(implementation, sizes, dtype, atol):
    of = operands(*sizes, dtype)
    found = jax.jit(mix_experts, static_argnames="implementation")(*of, implementation=implementation)
    assert found.dtype == jnp.float32
    np.testing.assert_allclose(np.asarray(found, np.float64), exact(*of), atol=atol, rtol=0)


@pytest.mark.parametrize("implementation", ["xla", "native"])
def test_many_tokens_get_what_their_experts_make_of_them(implementation):
    of = operands(1100, 2, 8, 8)
    np.testing.assert_allclose(mix_experts(*of, implementation=implementation), exact(*of), atol=1e-4, rtol=0)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_tokens_experts_give_the_same_bits_alone_and_in_company(dtype):
    """Of few tokens and of many, in company that takes the same experts and others."""
    x, experts, shares, *weights = operands(40, 2, 72, 40, dtype)
    together = mix_experts(x, experts, shares, *weights, implementation="native")
    for tokens in (slice(0, 1), slice(17, 18), slice(3, 8), slice(10, 39)):
        alone = mix_experts(x[tokens], experts[tokens], shares[tokens], *weights, implementation="native")
        np.testing.assert_array_equal(alone, together[tokens])


def test_experts_that_nobody_takes_are_not_read():
    x, experts, shares, *weights = operands(4, 2, 16, 24)
    experts = experts % 3
    spoiled = [array.at[3:].set(jnp.nan) for array in weights]
    found = mix_experts(x, experts, shares, *spoiled, implementation="native")
    np.testing.assert_array_equal(found, mix_experts(x, experts, shares, *weights, implementation="native"))


def test_an_expert_that_does_not_exist_is_refused():
    if not native.available():
        pytest.skip("no native code here")
    x, experts, shares, *weights = operands(2, 1, 8, 8)
    with pytest.raises(Exception, match="there is no expert of that number"):
        jax.block_until_ready(mix_experts(x, experts + EXPERTS, shares, *weights, implementation="native"))
