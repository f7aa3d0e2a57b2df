"""The LM head: logits, or only the best tokens."""

from dflash_jax.kernels.lm_head.api import best_tokens, writes_logits
from dflash_jax.kernels.lm_head.logits import head_logits, scale_logits

__all__ = ["best_tokens", "head_logits", "scale_logits", "writes_logits"]
