"""Eight CPU devices and a persistent compilation cache, set before JAX starts."""

import gc
import os
import pathlib
import sys

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))  # tests share builders.py

import bars  # no JAX in any
import deadline
import isolation
import on_demand
import shown
from scheduling import pytest_xdist_make_scheduler  # noqa: F401 (a hook, which pytest finds by its name)

isolation.isolate()
# A collective holds a thread of XLA's pool until all devices are there. With a thread a device, the
# default, devices can wait for each other in different ones for ever: one run in a hundred did.
os.environ.setdefault("NPROC", "32")
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
# Whole collections look at the millions of objects that imports made: 7 % of the tests' time.
gc.set_threshold(20_000, 20, 100)


def pytest_addoption(parser):
    parser.addoption(
        "--update-golden", action="store_true", help="Write golden files instead of comparing."
    )
    parser.addoption(
        "--families",
        choices=("write", "check"),
        help="Write docs/families.md's table from the tests that pass, or compare with it.",
    )
    parser.addoption(
        "--parity", help="Write the errors of settings drawn at random to this JSON file."
    )
    parser.addoption(
        "--bars",
        help="Plant a fault of ten bars in each comparison of floats, which has to fail; add the "
        "shares of the bars that were used to this JSON file.",
    )

    parser.addoption(
        "--minutes",
        type=float,
        help="Start no test after so many minutes; those left out are named.",
    )


def pytest_configure(config):
    if config.getoption("--bars"):
        bars.watch()
    if (minutes := config.getoption("--minutes")) is not None:
        deadline.set_in(minutes)


@pytest.hookimpl(tryfirst=True)  # before fixtures are made
def pytest_runtest_setup(item):
    deadline.keep()


def pytest_terminal_summary(terminalreporter):
    left_out = deadline.left_out(terminalreporter.stats.get("skipped", []))
    if left_out:
        terminalreporter.write_sep("=", f"{len(left_out)} tests left out: --minutes was over")
        terminalreporter.write_line("\n".join(left_out))


@pytest.hookimpl(tryfirst=True)  # before pytest chooses by marks
def pytest_collection_modifyitems(items):
    on_demand.mark(items)
    if deadline.is_set():
        deadline.shuffle(items)


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_call(item):
    yield
    if found := bars.taken():
        item.user_properties.append(("bars", found))


@pytest.fixture(scope="module", autouse=True)
def no_child_is_left():
    """A file's tests end the processes that they start."""
    before = isolation.children()
    yield
    left = isolation.end_children(before)
    assert not left, f"tests left processes behind: {left}"


_room = [3e9]
"""Bytes that a process may have in use before it forgets its compiled programs."""


@pytest.fixture(scope="module", autouse=True)
def memory_is_given_back():
    """A process that holds much forgets its compiled programs.

    Two of them shall fit a machine of 16 GB. And each program takes four of the 65,530 mappings
    that Linux allows a process: then LLVM aborts, "Unable to allocate section memory".
    """
    yield
    if isolation.resident_bytes() > _room[0] or isolation.mappings() > 20_000:
        if "jax" in sys.modules:
            sys.modules["jax"].clear_caches()
            gc.collect()
        # What the allocator keeps is used again: not each file's end is one of forgetting.
        _room[0] = max(_room[0], isolation.resident_bytes() + 1e9)


@pytest.fixture
def shows(record_property):
    """``shows(family, *features)``: cells of docs/families.md that hold if this test passes."""

    def say(family, *features):
        for feature in features:
            record_property("shows", shown.key(family, feature))

    return say


@pytest.fixture
def parity(record_property):
    """``parity(family, seed, logits, most, gradient)``: a line of ``--parity=FILE``.

    Errors against torch: of logits, relative in L2 and the largest; of the worst gradient leaf.
    """

    def say(family, seed, logits, most, gradient):
        record_property("parity", (family, seed, logits, most, gradient))

    yield say
    sys.modules["jax"].clear_caches()  # a process can map only so many pieces of memory


_SHOWN, _FAILED, _PARITY, _BARS = set(), set(), [], []


def pytest_runtest_logreport(report):
    """Also called where tests run in other processes: reports come here."""
    cells = {value for name, value in report.user_properties if name == "shows"}
    if report.when == "call" and report.passed:
        _PARITY.extend(value for name, value in report.user_properties if name == "parity")
        for name, value in report.user_properties:
            _BARS.extend(value if name == "bars" else ())
        cases = [value for name, value in report.user_properties if name == "matrix"]
        file = os.environ.get("JAXVLM_WHOLE_MATRIX")
        if cases and file and "PYTEST_XDIST_WORKER" not in os.environ:
            shown.write_matrix(pathlib.Path(file), cases)  # at once: it is hours of work
    if report.failed:
        _FAILED.update(cells)
    elif report.when == "call" and report.passed:
        _SHOWN.update(cells)


def pytest_sessionfinish(session):
    if hasattr(session.config, "workerinput"):
        return
    isolation.end_children({})
    if lines := isolation.called():
        print("\nTests called the machine's own commands:", *lines, sep="\n  ")
        session.exitstatus = 1
    if file := session.config.getoption("--parity"):
        shown.write_parity(pathlib.Path(file), _PARITY)
    file = session.config.getoption("--bars")
    if file and (passed := bars.write(pathlib.Path(file), _BARS)):
        print("\nComparisons that hold with a fault of ten bars:", *passed, sep="\n  ")
        session.exitstatus = 1
    if how := session.config.getoption("--families"):
        problem = shown.settle(how, _SHOWN, _FAILED)
        if problem:
            print(f"\n{problem}")
            session.exitstatus = 1
