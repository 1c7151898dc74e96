"""What ``embed`` and the corpus of ``eval`` read of a file of items."""

import json

import pytest

from jaxvlm.cli import common
from jaxvlm.config import DataConfig
from jaxvlm.data.errors import DataError
from jaxvlm.inference import items


@pytest.mark.parametrize("marker", ["<image_1>", "<|image_1|>", "<IMG>"])
def test_an_image_marker_of_another_format_is_refused_unless_it_is_a_text(marker, tmp_path):
    path = tmp_path / "items.jsonl"
    path.write_text(json.dumps({"text": f"{marker} a cat", "image": "a.png"}) + "\n")
    with pytest.raises(DataError, match=r"data\.literal_markers can keep it") as error:
        items.read(str(path))
    assert marker in str(error.value)
    values = common.flags.FlagValues()
    common.define_reading(values)
    values(["jaxvlm", f"--literal_markers={marker}"])
    (item,), _ = items.read(str(path), common.flagged(values, DataConfig()))
    assert item.text == f"<image>{marker} a cat"
    path.write_text(json.dumps({"text": f"{marker} a cat"}) + "\n")
    assert items.read(str(path))[0][0].text == f"{marker} a cat"
