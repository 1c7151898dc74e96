"""Division of conversations among simulated sites: sizes, labels, and what is refused."""

import collections

import numpy as np
import pytest

from jaxvlm.config import ConfigError
from jaxvlm.data.sources.conversation_formats import Record, Turn
from jaxvlm.sites.partition import partition


def records(answers):
    """One image with one question for each answer."""
    turns = [(Turn("user", "what?", False), Turn("assistant", a, True)) for a in answers]
    return [Record(str(i), turn, (f"{i}.png",)) for i, turn in enumerate(turns)]


def labels_of(parts, answers):
    return [collections.Counter(answers[i] for i in part) for part in parts]


UNIQUE = [f"answer {i}" for i in range(60)]
MOSTLY_UNIQUE = [f"answer {min(i, 44)}" for i in range(60)]
FEW = [("red", "green", "blue")[i % 7 % 3] for i in range(60)]


@pytest.mark.parametrize("answers", [UNIQUE, MOSTLY_UNIQUE, FEW], ids=["unique", "mostly", "few"])
@pytest.mark.parametrize("sites", [2, 3, 7])
def test_alike_is_alike_in_total_and_by_label(answers, sites):
    parts = partition(records(answers), sites, np.inf, 0)
    assert sorted(i for part in parts for i in part) == list(range(60))
    sizes = [len(part) for part in parts]
    assert max(sizes) - min(sizes) <= 1
    counts = labels_of(parts, answers)
    for label in set(answers):
        own = [count[label] for count in counts]
        assert max(own) - min(own) <= 1, label


def test_the_seed_says_which_records_are_where():
    first, again, other = (partition(records(FEW), 3, np.inf, seed) for seed in (0, 0, 1))
    assert first == again != other


@pytest.mark.parametrize("answers", [UNIQUE, FEW], ids=["unique", "few"])
def test_totals_follow_the_drawn_shares(answers):
    """The shares are drawn once more here: one draw a label, and one order of its images."""
    sites, alpha, seed = 2, 0.5, 3
    parts = partition(records(answers), sites, alpha, seed)
    draws, expected = np.random.Generator(np.random.PCG64(seed)), np.zeros(sites)
    for label in sorted(set(answers)):
        expected += draws.dirichlet(np.full(sites, alpha)) * answers.count(label)
        draws.permutation(answers.count(label))
    # Of two sites, one is owed what the other has too much: never more than a half.
    assert np.abs([len(part) for part in parts] - expected).max() <= 0.5 + 1e-9


def test_small_alpha_leaves_each_label_at_one_site():
    counts = labels_of(partition(records(FEW), 2, 1e-4, 1), FEW)
    assert all(sum(label in count for count in counts) == 1 for label in set(FEW))


def test_questions_about_one_image_stay_together():
    asked = records(FEW)
    more = [record._replace(id=f"{record.id} again") for record in asked]
    for part in partition([*asked, *more], 3, np.inf, 0):
        assert sorted(i + 60 for i in part if i < 60) == [i for i in part if i >= 60]


def test_a_site_without_data_is_told_what_helps():
    with pytest.raises(ConfigError, match=r"leaves site \d of 3 .*raise --alpha.*--config.seed"):
        partition(records(["a"] * 60), 3, 1e-3, 0)
    with pytest.raises(ConfigError, match=r"has 2 different images .* 3 sites; lower --config.fed"):
        partition(records(["a", "b"]), 3, np.inf, 0)
