from __future__ import annotations

import pytest

from tests.training import recall


@pytest.fixture(scope="session")
def recall_data(tmp_path_factory):
    return recall.write_data(tmp_path_factory.mktemp("recall") / "sequences")
