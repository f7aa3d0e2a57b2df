"""The LM head: logits, or only the best tokens."""

from dflash_jax.kernels.lm_head.api import best_tokens, writes_logits
from dflash_jax.kernels.lm_head.logits import head_logits, scale_logits
from dflash_jax.kernels.lm_head.xla import best_of

__all__ = ["best_of", "best_tokens", "head_logits", "scale_logits", "writes_logits"]
