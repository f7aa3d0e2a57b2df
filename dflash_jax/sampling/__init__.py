"""Target distributions, acceptance and residual; knows nothing of the engine."""

from dflash_jax.sampling.distribution import Sampler, device_temperature, sample, target_probs
from dflash_jax.sampling.keys import Purpose, gumbel, uniform
from dflash_jax.sampling.logprobs import Logprobs, logprobs_of
from dflash_jax.sampling.verify import Verdict, verify, verify_greedy

__all__ = [
    "Logprobs",
    "Purpose",
    "Sampler",
    "Verdict",
    "device_temperature",
    "gumbel",
    "logprobs_of",
    "sample",
    "target_probs",
    "uniform",
    "verify",
    "verify_greedy",
]
