"""Checkpoints restore bit for bit on any mesh; damage is reported; a kill leaves a complete one."""

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxvlm.checkpoint.checkpointer import (
    Checkpointer,
    CheckpointError,
    StructureError,
    restore_params,
)
from jaxvlm.types import Guard, TrainState

SHAPES = {"decoder/wq": (16, 8, 4), "decoder/norm": (16,), "head": (64, 16)}
SPECS = {"decoder/wq": ("a", "b", None), "decoder/norm": ("a",), "head": (("a", "b"), None)}


def make_mesh(rows: int, columns: int) -> Mesh:
    return Mesh(np.array(jax.devices()[: rows * columns]).reshape(rows, columns), ("a", "b"))


def place(mesh: Mesh, state: TrainState) -> TrainState:
    """The state with each array in the sharding of its name."""

    def put(path, x):
        name = path[-1].key if isinstance(path[-1], jax.tree_util.DictKey) else ""
        spec = SPECS.get(name, ()) if x.ndim else ()
        return jax.device_put(x, NamedSharding(mesh, PartitionSpec(*spec)))

    return jax.tree_util.tree_map_with_path(put, state)


def make_state(mesh: Mesh, seed: int = 0) -> TrainState:
    rng = np.random.default_rng(seed)
    params = {k: jnp.asarray(rng.normal(size=s), jnp.float32) for k, s in SHAPES.items()}
    frozen = {"vision/patch": jnp.asarray(rng.normal(size=(6, 4)), jnp.bfloat16)}
    guard = Guard(jnp.int32(0), jnp.int32(0))
    opt_state = optax.adamw(1e-3).init(params)
    state = TrainState(jnp.int32(seed), params, frozen, opt_state, (), (), guard)
    return place(mesh, state)


def abstract(state: TrainState) -> TrainState:
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state
    )


def assert_same_bits(left: TrainState, right: TrainState) -> None:
    assert jax.tree.structure(left) == jax.tree.structure(right)
    for a, b in zip(jax.tree.leaves(left), jax.tree.leaves(right)):
        assert a.dtype == b.dtype
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


def open_at(folder: Path, **changes) -> Checkpointer:
    settings = {"keep": 3, "metric": "score", "mode": "max"} | changes
    return Checkpointer(folder, **settings)


def best_step(checkpointer: Checkpointer) -> int | None:
    return checkpointer._best(checkpointer.all_steps())


def written(folder: Path, steps: list[int], mesh: Mesh) -> None:
    checkpointer = open_at(folder, keep=9)
    for step in steps:
        checkpointer.save(step, make_state(mesh, step), {"position": step})
    checkpointer.close()


def test_round_trip_across_meshes(tmp_path):
    state = make_state(make_mesh(4, 2))
    checkpointer = open_at(tmp_path)
    checkpointer.save(1, state, {"data": {"epoch": 1, "seen": [1, 2]}})
    for shape in [(4, 2), (4, 1), (2, 2), (1, 1)]:
        target = abstract(make_state(make_mesh(*shape), 5))
        restored = checkpointer.restore(target)
        assert restored.step == 1
        assert restored.extra == {"data": {"epoch": 1, "seen": [1, 2]}}
        assert_same_bits(state, restored.state)
        for leaf, want in zip(jax.tree.leaves(restored.state), jax.tree.leaves(target)):
            assert leaf.sharding == want.sharding
    checkpointer.close()


def test_empty_folder_restores_nothing(tmp_path):
    checkpointer = open_at(tmp_path)
    assert checkpointer.restore(abstract(make_state(make_mesh(1, 1)))) is None
    assert not checkpointer.all_steps() and best_step(checkpointer) is None
    with pytest.raises(CheckpointError, match="has no step 7"):
        checkpointer.restore(abstract(make_state(make_mesh(1, 1))), step=7)
    checkpointer.close()


def test_donated_buffers_after_save(tmp_path):
    big = {"w": jnp.arange(2_000_000, dtype=jnp.float32)}
    bump = jax.jit(lambda tree: jax.tree.map(lambda x: x + 1, tree), donate_argnums=0)
    checkpointer = open_at(tmp_path, keep=9)
    for step in range(4):
        checkpointer.save(step, big, {})
        for _ in range(3):
            big = bump(big)
    target = {"w": jax.ShapeDtypeStruct((2_000_000,), jnp.float32, sharding=big["w"].sharding)}
    for step in range(4):
        found = checkpointer.restore(target, step=step).state["w"]
        np.testing.assert_array_equal(found, np.arange(2_000_000, dtype=np.float32) + 3 * step)
    checkpointer.close()


def largest_file(step_folder: Path) -> Path:
    """A file with array data (the folders next to this one hold copies that are not read)."""
    return max((step_folder / "state" / "d").iterdir(), key=lambda p: p.stat().st_size)


def flip_a_byte(path: Path, share: float) -> None:
    data = bytearray(path.read_bytes())
    data[int(share * (len(data) - 1))] ^= 0x10
    path.write_bytes(bytes(data))


def delete_largest(folder: Path) -> None:
    largest_file(folder).unlink()


def truncate_largest(folder: Path) -> None:
    path = largest_file(folder)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flip_data(folder: Path) -> None:
    flip_a_byte(largest_file(folder), 0.5)


def flip_record(folder: Path) -> None:
    path = folder / "record" / "metadata"
    path.write_text(path.read_text().replace('"position": 2', '"position": 3'))


def delete_record(folder: Path) -> None:
    (folder / "record" / "metadata").unlink()


def silent_change(folder: Path) -> None:
    """Writes well-formed files with other bits, which only the digests detect."""
    shutil.rmtree(folder / "state")
    shutil.copytree(folder.parent / "1" / "state", folder / "state")


def deep_record(folder: Path) -> None:
    (folder / "record" / "metadata").write_text("[" * 100_000)


def pipe_for_largest(folder: Path) -> None:
    """Who reads it waits for ever."""
    path = largest_file(folder)
    path.unlink()
    os.mkfifo(path)


def device_for_record(folder: Path) -> None:
    """Who reads it never reaches an end."""
    (folder / "record" / "metadata").unlink()
    (folder / "record" / "metadata").symlink_to("/dev/zero")


def dangling_link_for_largest(folder: Path) -> None:
    path = largest_file(folder)
    path.unlink()
    path.symlink_to("nowhere")


DAMAGE = [
    *(silent_change, delete_largest, truncate_largest, flip_data, flip_record, delete_record),
    *(deep_record, pipe_for_largest, device_for_record, dangling_link_for_largest),
]


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_reported_and_the_previous_checkpoint_is_used(tmp_path, damage):
    mesh = make_mesh(2, 2)
    written(tmp_path, [1, 2], mesh)
    damage(tmp_path / "2")
    warnings = []
    checkpointer = open_at(tmp_path, on_warning=warnings.append)
    restored = checkpointer.restore(abstract(make_state(mesh)))
    assert restored.step == 1
    assert restored.extra == {"position": 1}
    assert_same_bits(make_state(mesh, 1), restored.state)
    assert len(warnings) == 1
    assert "2 is damaged" in warnings[0]
    assert "step 1 is used instead" in warnings[0]
    # The run continues and writes its own step 2; the damaged one is renamed.
    assert checkpointer.save(2, make_state(mesh, 2), {"position": 2})
    checkpointer.wait()
    assert checkpointer.all_steps() == [1, 2]
    assert (tmp_path / "damaged-2").exists()
    assert checkpointer.restore(abstract(make_state(mesh))).step == 2
    checkpointer.close()


@pytest.mark.parametrize("count", [8, pytest.param(30, marks=pytest.mark.long)])
def test_every_flipped_byte_of_the_arrays_is_detected_or_harmless(tmp_path, count):
    mesh = make_mesh(2, 2)
    written(tmp_path, [1], mesh)
    folder = tmp_path / "1" / "state"
    files = [p for p in folder.rglob("*") if p.is_file()]
    target = abstract(make_state(mesh))
    checkpointer = open_at(tmp_path)
    rng = random.Random(0)
    for _ in range(count):
        path = rng.choice(files)
        sound = path.read_bytes()
        flip_a_byte(path, rng.random())
        try:
            assert_same_bits(make_state(mesh, 1), checkpointer.restore(target).state)
        except CheckpointError as error:
            assert "is damaged" in str(error)
        path.write_bytes(sound)
    checkpointer.close()


def test_all_damaged_lists_each(tmp_path):
    mesh = make_mesh(1, 2)
    written(tmp_path, [3, 4], mesh)
    flip_data(tmp_path / "3")
    delete_largest(tmp_path / "4")
    checkpointer = open_at(tmp_path)
    with pytest.raises(CheckpointError, match=r"(?s)/4 is damaged .*/3 is damaged"):
        checkpointer.restore(abstract(make_state(mesh)))
    checkpointer.close()


def test_another_structure_is_not_damage(tmp_path):
    mesh = make_mesh(1, 2)
    written(tmp_path, [1, 2], mesh)
    state = make_state(mesh)
    params = dict(state.params) | {f"new/{i}": state.params["head"] for i in range(7)}
    params["head"] = state.params["decoder/norm"]
    del params["decoder/wq"]
    warnings = []
    checkpointer = open_at(tmp_path, on_warning=warnings.append)
    with pytest.raises(StructureError) as error:
        checkpointer.restore(abstract(state._replace(params=params)))
    message = str(error.value)
    assert "params/new/0 is missing from the checkpoint" in message
    assert "and 4 more" in message
    assert "init_from" in message
    assert not warnings
    checkpointer.close()


def test_keeps_the_newest_and_the_best(tmp_path):
    mesh = make_mesh(2, 1)
    values = {1: 0.2, 2: 0.9, 3: 0.5, 4: float("nan"), 5: 0.6}
    checkpointer = open_at(tmp_path, keep=2)
    for step, value in values.items():
        checkpointer.save(step, make_state(mesh, step), {}, {"score": value})
    checkpointer.save(6, make_state(mesh, 6), {})
    checkpointer.wait()
    assert checkpointer.all_steps() == [2, 5, 6]
    assert (max(checkpointer.all_steps()), best_step(checkpointer)) == (6, 2)
    checkpointer.close()

    again = open_at(tmp_path, keep=1)  # a later process knows the best one from the files
    assert best_step(again) == 2
    again.save(7, make_state(mesh, 7), {}, {"score": 0.1})
    again.wait()
    assert again.all_steps() == [2, 7]
    again.close()
    assert best_step(open_at(tmp_path, mode="min")) == 7


def test_restoring_an_earlier_step_drops_the_later_ones(tmp_path):
    mesh = make_mesh(1, 1)
    written(tmp_path, [1, 2, 3], mesh)
    warnings = []
    checkpointer = open_at(tmp_path, on_warning=warnings.append)
    checkpointer.restore(abstract(make_state(mesh)), step=1)
    assert checkpointer.all_steps() == [1, 2, 3]
    assert not checkpointer.save(1, make_state(mesh, 9), {})
    checkpointer.save(2, make_state(mesh, 8), {"position": 8})
    checkpointer.wait()
    assert checkpointer.all_steps() == [1, 2]
    assert checkpointer.restore(abstract(make_state(mesh))).extra == {"position": 8}
    assert len(warnings) == 2
    checkpointer.close()


def test_restore_params_merges_frozen_params(tmp_path):
    state = make_state(make_mesh(4, 2), 1)
    checkpointer = open_at(tmp_path)
    checkpointer.save(1, state, {}, {"score": 2.0})
    checkpointer.save(2, make_state(make_mesh(4, 2), 2), {}, {"score": 1.0})
    checkpointer.close()
    target = abstract(make_state(make_mesh(2, 1)))
    wanted = {**target.params, **target.frozen}
    weights = restore_params(tmp_path, wanted, which="best", metric="score")
    assert set(weights) == set(wanted)
    for name, want in {**state.params, **state.frozen}.items():
        assert np.asarray(weights[name]).tobytes() == np.asarray(want).tobytes()
        assert weights[name].sharding == wanted[name].sharding
    latest = restore_params(tmp_path, {"head": jax.ShapeDtypeStruct((64, 16), jnp.float32)})
    assert np.asarray(latest["head"]).tobytes() != np.asarray(state.params["head"]).tobytes()
    with pytest.raises(StructureError, match="params/tail is missing"):
        restore_params(tmp_path, {"tail": jax.ShapeDtypeStruct((1,), jnp.float32)})
    with pytest.raises(CheckpointError, match="it has none"):
        restore_params(tmp_path / "nothing", wanted)


def test_extra_must_be_json(tmp_path):
    checkpointer = open_at(tmp_path)
    with pytest.raises(TypeError, match="must be JSON"):
        checkpointer.save(1, make_state(make_mesh(1, 1)), {"a": {1, 2}})
    with pytest.raises(TypeError, match="w is a ndarray"):
        checkpointer.save(1, {"w": np.zeros(3)}, {})
    with pytest.raises(ValueError, match="use max or min"):
        open_at(tmp_path, mode="best")
    checkpointer.close()


WRITER = """
import sys
import jax.numpy as jnp
from jaxvlm.checkpoint.checkpointer import Checkpointer

checkpointer = Checkpointer(sys.argv[1], keep=2, metric="score", mode="max")
step = max(checkpointer.all_steps(), default=0)
while True:
    step += 1
    state = {f"w{i}": jnp.full((50_000,), step * 100 + i, jnp.float32) for i in range(8)}
    checkpointer.save(step, state, {"step": step}, {"score": -step})
    print(step, flush=True)
"""


def test_kill_while_saving_leaves_a_complete_checkpoint(tmp_path):
    rng = random.Random(1)
    leaf = jax.ShapeDtypeStruct((50_000,), jnp.float32)
    target = {f"w{i}": leaf for i in range(8)}
    newest = 0
    for _ in range(4):
        writer = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE, text=True
        )
        for _ in range(3):  # it saves now; the third save has at least begun
            assert writer.stdout.readline()
        time.sleep(rng.random() * 0.5)
        os.kill(writer.pid, signal.SIGKILL)
        writer.communicate()
        warnings = []
        checkpointer = open_at(tmp_path, keep=2, on_warning=warnings.append)
        restored = checkpointer.restore(target)
        assert restored.step == max(checkpointer.all_steps()) > newest
        assert restored.extra == {"step": restored.step}
        for i in range(8):
            np.testing.assert_array_equal(restored.state[f"w{i}"], restored.step * 100 + i)
        assert not warnings
        newest = restored.step
        checkpointer.close()
        assert not [p for p in tmp_path.iterdir() if "tmp" in p.name]
