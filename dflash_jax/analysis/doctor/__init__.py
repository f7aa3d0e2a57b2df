"""Why acceptance is low."""

from __future__ import annotations

from dflash_jax.analysis.doctor.diagnose import diagnose
from dflash_jax.analysis.doctor.findings import Diagnosis, Finding
from dflash_jax.analysis.doctor.told import Told, read_told

__all__ = ["Diagnosis", "Finding", "Told", "diagnose", "read_told"]
