"""The kinds of drafts: a file for each, and the one protocol by which an engine drafts with any of them."""

from __future__ import annotations

from dflash_jax.models.drafters.dflash import DFlash
from dflash_jax.models.drafters.dflash2 import DFlash2
from dflash_jax.models.drafters.protocol import Drafter, Proposal, drafter_of, register

register("dflash", DFlash())
register("dflash2", DFlash2())

__all__ = ["DFlash", "DFlash2", "Drafter", "Proposal", "drafter_of", "register"]
