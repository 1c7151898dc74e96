"""Batches of pairs: nothing twice in one, everything once a pass, the same wherever it is asked."""

import hypothesis
import hypothesis.extra.numpy as arrays
import numpy as np
import pytest
from hypothesis import strategies as st

from jaxvlm.data.errors import DataError
from jaxvlm.data.pairs.sampler import Sampler, fill

SETTINGS = hypothesis.settings(max_examples=60, deadline=None, derandomize=True)


def sampler(contents, batch_size, tasks=None, seed=0, **more):
    contents = np.asarray(contents, np.int64)
    tasks = np.zeros(len(contents), np.int64) if tasks is None else np.asarray(tasks, np.int64)
    more = {"task_names": [f"t{i}" for i in range(int(tasks.max()) + 1)]} | more
    names = [f"c{i}" for i in range(int(contents.max()) + 1)]
    return Sampler(contents, tasks, names, batch_size, seed, **more)


def pairs(queries, positives):
    """Contents of examples whose positives are numbered apart from their queries."""
    return np.stack([queries, np.asarray(positives) + max(queries) + 1], axis=1)


@st.composite
def corpora(draw):
    """Examples that share queries or positives, and a batch size with which they can be dealt."""
    count = draw(st.integers(1, 60))
    numbers = st.integers(0, draw(st.integers(1, 80)))
    contents = draw(arrays.arrays(np.int64, (count, 2), elements=numbers))
    often = np.unique(np.concatenate([np.unique(row) for row in contents]), return_counts=True)[1]
    most = int(often.max())
    # Half of what is just possible: at the very limit not every corpus has such batches.
    return contents, draw(st.integers(1, max(1, count // (2 * most))))


def epoch(found, number=0):
    first = number * found.steps_per_epoch
    return [found.batch(step) for step in range(first, first + found.steps_per_epoch)]


def assert_different(contents, example):
    shown = [content for row in contents[example] for content in set(row.tolist())]
    assert len(shown) == len(set(shown))


@SETTINGS
@hypothesis.given(corpora(), st.integers(0, 3))
def test_no_duplicates_and_every_example_each_epoch(corpus, seed):
    contents, batch_size = corpus
    found = sampler(contents, batch_size, seed=seed)
    assert found.steps_per_epoch == -(-len(contents) // batch_size)
    for number in (0, 1):
        seen = []
        for batch in epoch(found, number):
            assert batch.example.shape == (batch_size,) and batch.pass_ == number
            assert_different(contents, batch.example)
            seen += batch.example.tolist()
        twice = len(seen) - len(contents)
        assert set(seen) == set(range(len(contents))) and 0 <= twice < batch_size
        assert np.bincount(seen).max() <= 2


@SETTINGS
@hypothesis.given(corpora(), st.integers(0, 500))
def test_any_step_at_once(corpus, step):
    contents, batch_size = corpus
    a, b = sampler(contents, batch_size), sampler(contents, batch_size)
    for earlier in range(3):
        a.batch(earlier)
    np.testing.assert_array_equal(a.batch(step).example, b.batch(step).example)


def test_passes_and_seeds_differ():
    contents = pairs(range(64), range(64))
    orders = [sampler(contents, 8, seed=s).batch(step) for s in (0, 1) for step in (0, 8, 16)]
    assert len({tuple(batch.example) for batch in orders}) == 6
    # Partners change from pass to pass: a pair of examples meets as often as chance has it.
    found, together = sampler(contents, 8), np.zeros((64, 64))
    for step in range(8 * 200):
        example = found.batch(step).example
        together[np.ix_(example, example)] += 1
    apart = together[~np.eye(64, dtype=bool)]
    expected = 200 * 7 / 63
    assert abs(apart.mean() - expected) < 1e-9
    assert apart.std() < 1.2 * np.sqrt(expected * (1 - 7 / 63))


@pytest.mark.parametrize("classes", [8, 9, 100])
def test_as_many_of_one_positive_as_there_are_batches(classes):
    """Class names as positives, at the limit: each batch has every class at most once."""
    count, batch_size = 900, 8
    contents = pairs(range(count), np.arange(count) % classes)
    for batch in epoch(sampler(contents, batch_size)):
        assert_different(contents, batch.example)


def test_examples_that_all_hang_together():
    """A chain through every example, which no grouping takes apart: swaps do."""
    rng = np.random.default_rng(0)
    contents = pairs(rng.integers(0, 300, 900), rng.integers(0, 300, 900))
    found = sampler(contents, 64)
    for number in (0, 1):
        seen = [batch.example for batch in epoch(found, number)]
        for example in seen:
            assert_different(contents, example)
        assert set(np.concatenate(seen).tolist()) == set(range(900))


def test_tasks_are_apart_and_in_proportion():
    sizes = (1000, 250, 40)
    tasks = np.repeat(range(3), sizes)
    contents = pairs(range(sum(sizes)), range(sum(sizes)))
    plain = sampler(contents, 20, tasks)
    assert plain.steps_per_epoch == 50 + 13 + 2
    for alpha, want in ((1.0, (50, 13, 2)), (0.5, (38, 19, 8)), (0.0, (22, 22, 21))):
        found, counts = sampler(contents, 20, tasks, alpha=alpha), np.zeros(3, int)
        for batch in epoch(found):
            (task,) = set(tasks[batch.example].tolist())
            counts[task] += 1
        share = np.asarray(sizes, float) ** alpha
        exact = plain.steps_per_epoch * share / share.sum()
        assert alpha == 1 or np.abs(counts - exact).max() < 1
        assert sorted(counts) == sorted(want)
    seen = np.concatenate([batch.example for batch in epoch(plain, 1)])
    assert set(seen.tolist()) == set(range(sum(sizes)))


def test_random_allows_duplicates():
    contents = pairs(range(30), [0] * 30)
    found = sampler(contents, 8, duplicates=True)
    seen = np.concatenate([batch.example for batch in epoch(found)])
    assert set(seen.tolist()) == set(range(30)) and len(seen) == 32
    assert all(len(set(found.batch(step).example.tolist())) == 8 for step in range(40))


@pytest.mark.parametrize(
    ("contents", "batch_size", "more", "says"),
    [
        (
            pairs(range(5), range(5)),
            8,
            {},
            r"the 5 examples of task 't0' are fewer than .*=8; lower it to 5, or",
        ),
        (
            pairs(range(10), [0, 1] * 5),
            4,
            {},
            r"'c10' is a query or positive of 5 of the 10 .*lower data.batch_size to 2,",
        ),
        (
            pairs(range(99), range(99)),
            9,
            {"tasks": [0] * 90 + [1] * 9, "alpha": 9.0, "task_names": ["a", "b"]},
            r"task_alpha=9 leaves the 9 examples of task 'b' without a batch",
        ),
        (
            pairs(range(99), range(99)),
            10,
            {"tasks": [0] * 90 + [1] * 9, "task_names": ["a", "b"]},
            r"the 9 examples of task 'b' are fewer .*lower it to 9, or set data.pairs.tasks=mixed",
        ),
    ],
)
def test_what_is_not_possible_is_said(contents, batch_size, more, says):
    with pytest.raises(DataError, match=says):
        sampler(contents, batch_size, **more)


def test_what_only_a_search_could_tell_is_said_too():
    """Each content in few enough examples, but no two of the examples can share a batch."""
    found = sampler([(0, 1), (1, 2), (2, 0)], 2)
    with pytest.raises(DataError, match=r"without duplicate queries or positives in pass 0; lower"):
        found.batch(0)


def test_the_batch_size_that_is_named_works():
    with pytest.raises(DataError, match=r"may each hold it once; set data\.pairs"):
        sampler(pairs(range(30), [0] * 30), 30)  # no size but 1
    for count, often in ((10, 5), (100, 7), (31, 2), (64, 30)):
        contents = pairs(range(count), [0] * often + list(range(1, count - often + 1)))
        with pytest.raises(DataError) as error:
            sampler(contents, count)
        most = int(str(error.value).split("lower data.batch_size to ")[1].split(",")[0])
        sampler(contents, most).batch(0)
        with pytest.raises(DataError):
            sampler(contents, most + 1)


@hypothesis.given(st.data())
@SETTINGS
def test_what_occurs_twice_is_of_small_groups_first(data):
    """The first example of each group that has room, then the others: by a slow oracle."""
    count = data.draw(st.integers(1, 40))
    group = np.asarray(data.draw(st.lists(st.integers(0, 12), min_size=count, max_size=count)))
    order = np.asarray(data.draw(st.permutations(range(count))))
    batches, missing = data.draw(st.integers(1, 9)), data.draw(st.integers(0, count))
    sizes = [int((group == group[i]).sum()) for i in order]
    roomy = [int(i) for i, size in zip(order, sizes, strict=True) if size < batches]
    first = [i for n, i in enumerate(roomy) if group[i] not in [group[j] for j in roomy[:n]]]
    expected = [*first, *sorted(set(roomy) - set(first)), *order.tolist()][:missing]
    found = fill(order, np.unique(group, return_inverse=True)[1], missing, batches)
    assert found.tolist() == expected
