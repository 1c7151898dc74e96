"""Fixtures of whole runs; the functions are in runs.py, which tests import too."""

import pytest
from runs import write_data


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    return write_data(tmp_path_factory.mktemp("data"))
