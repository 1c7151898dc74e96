"""The table of attention backends in the docs is the one that the code makes."""

import pathlib

from benchmarks import attention_table

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "attention.md"


def test_the_table_is_what_is_chosen():
    assert attention_table.table() in PAGE.read_text(encoding="utf-8")
