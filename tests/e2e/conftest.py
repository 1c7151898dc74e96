"""Fixtures of whole runs; the functions are in runs.py, which tests import too."""

import pytest
from runs import write_captions, write_data


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    return write_data(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="session")
def captions(tmp_path_factory):
    folder = tmp_path_factory.mktemp("captions")
    write_data(folder)
    return write_captions(folder)
