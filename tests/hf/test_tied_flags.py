"""A flag that config.json has at two levels means what it means to transformers."""

from __future__ import annotations

import itertools

import pytest

from jaxvlm.config import ConfigError
from jaxvlm.hf.families import FAMILIES

torch = pytest.importorskip("torch", reason="the oracle; Python 3.11 only")
transformers = pytest.importorskip("transformers", reason="the oracle")

import qwen  # noqa: E402  # after the oracle is known to be there
import vlm_cases  # noqa: E402

CASES = {name: (kind, vlm_cases.fields_of(name)) for name, (kind, _) in vlm_cases.CASES.items()}
CASES |= {name: qwen.CASES[name] for name in qwen.PLAIN}
GIVEN = (True, False, None)  # None: the field is left out


@pytest.mark.parametrize("name", CASES)
def test_tied_embeddings_are_transformers(name):
    kind, fields = CASES[name]
    config_class = getattr(transformers, kind + "Config")
    family = FAMILIES[config_class.model_type]
    for top, text in itertools.product(GIVEN, GIVEN):
        given = {"model_type": config_class.model_type} | fields
        given["text_config"] = dict(fields["text_config"])
        if config_class.model_type.startswith("qwen"):
            given["text_config"]["model_type"] = f"{config_class.model_type}_text"
        for group, value in ((given, top), (given["text_config"], text)):
            group.pop("tie_word_embeddings", None)
            group |= {} if value is None else {"tie_word_embeddings": value}
        theirs = config_class.from_dict(given)
        try:
            tied = family.config_from_hf(given).decoder.tied_embeddings
        except ConfigError as error:  # a family that is always tied
            assert "tie_word_embeddings" in str(error) and top is False
            continue
        assert tied == theirs.tie_word_embeddings, (top, text)
