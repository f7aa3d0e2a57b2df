"""Mappings that live on the disk."""

from __future__ import annotations

import pytest

from dflash_jax.jobs.disk_map import DiskMap


def test_it_is_a_mapping():
    found = DiskMap()
    found["a"], found["b"], found["\ud800\0"] = 1, None, {"x": [1]}
    found["a"] = 2
    assert len(found) == 3 and set(found) == {"a", "b", "\ud800\0"} and found["a"] == 2 and "b" in found
    assert found["\ud800\0"] == {"x": [1]} and found.get("c") is None and 7 not in found
    del found["a"]
    with pytest.raises(KeyError):
        del found["a"]
    with pytest.raises(KeyError):
        found["a"]
    assert len(found) == 2
    found.clear()
    assert not found and list(found) == []
