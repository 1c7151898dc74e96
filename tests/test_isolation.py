"""What holds tests apart from the machine that they run on."""

import json
import os
import pathlib
import shutil
import socket
import subprocess
import sys
import time

import isolation
import pytest
import scheduling
from surroundings import VARIABLES

TESTS = pathlib.Path(__file__).parent


def test_no_variable_of_a_user_or_a_scheduler_is_left():
    code = "import isolation, json, os; isolation.isolate(); print(json.dumps(dict(os.environ)))"
    env = {k: v for k, v in os.environ.items() if k != "JAXVLM_TEST_FOLDER"} | VARIABLES
    env["XLA_FLAGS"] = "--xla_cpu_max_isa=AVX2 --xla_cpu_enable_fast_math=true"
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, cwd=TESTS, capture_output=True, text=True, check=True
    )
    left = json.loads(done.stdout)
    assert not [name for name, value in VARIABLES.items() if left.get(name) == value]
    assert "max_isa=AVX2" in left["XLA_FLAGS"] and "fast_math" not in left["XLA_FLAGS"]
    assert "jaxvlm-tests-" in left["HOME"]


@pytest.mark.parametrize("name", ["scancel", "gcloud", "wandb"])
def test_the_machines_commands_are_hidden(name):
    assert shutil.which(name).startswith(os.environ["JAXVLM_TEST_FOLDER"])


def test_no_test_connects_to_another_machine():
    with socket.socket() as one, pytest.raises(RuntimeError, match="a test connects to"):
        one.connect(("192.0.2.1", 80))


def test_a_killed_childs_children_end_with_their_test():
    before = isolation.children()
    shell = subprocess.Popen(["bash", "-c", "sleep 300 & echo $!; wait"], stdout=subprocess.PIPE)
    grandchild = int(shell.stdout.readline())
    shell.kill()
    shell.wait()
    deadline = time.monotonic() + 10
    while grandchild not in isolation.children() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert grandchild in isolation.end_children(before)
    assert not pathlib.Path(f"/proc/{grandchild}").exists()
    shell.stdout.close()


def test_a_files_tests_share_a_process(tmp_path):
    """Nothing else fails where they do not: fixtures are set up, and programs compiled, again."""
    test = "import os, pytest\n@pytest.mark.parametrize('i', range(6))\ndef test_it(i):\n"
    test += "    with open(__file__ + '.ran', 'a') as file: file.write(f'{os.getpid()} ')\n"
    for name in "abcd":
        (tmp_path / f"test_{name}.py").write_text(test)
    words = [sys.executable, "-m", "pytest", "-c", os.devnull, "-p", "scheduling", "-n", "2"]
    words += ["--dist", "loadscope", "--rootdir", tmp_path, tmp_path]
    env = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    env["PYTHONPATH"] = str(TESTS)
    subprocess.run(words, env=env, cwd=tmp_path, capture_output=True, check=True, timeout=300)
    ran = [(tmp_path / f"test_{name}.py.ran").read_text().split() for name in "abcd"]
    assert [len(set(pids)) for pids in ran] == [1] * 4 and [len(pids) for pids in ran] == [6] * 4
    assert len({pid for pids in ran for pid in pids}) == 2, "one process had all the work"


def test_a_long_files_tests_are_split_by_what_they_share():
    file = next(iter(scheduling.SPLIT))
    assert (TESTS.parent / file).is_file()
    one, two = (f"{file}::test_it[{kind}-one-True]" for kind in ("llava", "dual"))
    assert scheduling.group(one) != scheduling.group(two)
    assert scheduling.group(one) == scheduling.group(f"{file}::test_it[llava-two-False]")
