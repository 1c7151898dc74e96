"""Data of whole runs, which runs.py makes."""

import pytest
from runs import write_data


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_data(tmp_path_factory.mktemp("data"))
