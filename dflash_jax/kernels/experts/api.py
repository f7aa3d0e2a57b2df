"""The experts of a sparse MLP as one op, and the choice of what computes them."""

from __future__ import annotations

from jaxtyping import Array, Float, Int

from dflash_jax.kernels.dispatch import Implementation, choose


def mix_experts(
    x: Float[Array, "tokens hidden"],
    experts: Int[Array, "tokens chosen"],
    shares: Float[Array, "tokens chosen"],
    gate_proj: Float[Array, "experts hidden expert_hidden"],
    up_proj: Float[Array, "experts hidden expert_hidden"],
    down_proj: Float[Array, "experts expert_hidden hidden"],
    *,
    implementation: Implementation | None = None,
) -> Float[Array, "tokens hidden"]:
    """The weighted sum of what each token's experts make of it: down_proj of silu(gate_proj of x) times up_proj of x.

    Args:
      x: the tokens.
      experts: which each token takes, none twice.
      shares: the weight of each in the token's sum, in float32.
      gate_proj, up_proj, down_proj: of all experts.
      implementation: overrides what the platform decides; see `kernels.dispatch`. Native code has no derivative.

    Returns:
      The sums, in float32.
    """
    compute = choose("mix_experts", implementation, x, gate_proj).compute
    return compute(x, experts, shares, gate_proj, up_proj, down_proj)
