"""Collectives in HLO text, in every syntax of replica groups."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxvlm.config import MeshConfig
from jaxvlm.parallel.mesh import make_mesh
from jaxvlm.planner.compiled import overlap, topology
from jaxvlm.planner.compiled.collectives import Collective, read, total

MESH = {"data": 2, "fsdp": 4}
HLO = """HloModule step, is_scheduled=true

%add (x: f32[], y: f32[]) -> f32[] {{
  ROOT %sum = f32[] add(%x, %y)
}}

%body (carry: (s32[], f32[8,16], /*index=2*/bf16[64])) -> (s32[], f32[8,16]) {{
  %carry = (s32[], f32[8,16]{{1,0}}) parameter(0)
  %x = f32[8,16]{{1,0:T(8,128)}} get-tuple-element(%carry), index=1
  %whole = f32[32,16]{{1,0:T(8,128)}} all-gather(%x), channel_id=1, {gather}, dimensions={{0}}
  ROOT %out = (s32[], f32[8,16]{{1,0}}) tuple(%i, %x)
}}

%condition (carry: (s32[], f32[8,16])) -> pred[] {{
  %bound = s32[]{{:T(128)}} constant(5)
  ROOT %lt = pred[] compare(%i, %bound), direction=LT
}}

%all-reduce-scatter (param: f32[64]) -> f32[16] {{
  %param = f32[64]{{0}} parameter(0)
  %all-reduce.1 = f32[64]{{0}} all-reduce(%param), channel_id=3, {gather}, to_apply=%add
  ROOT %own = f32[16]{{0}} dynamic-slice(%all-reduce.1, %at), dynamic_slice_sizes={{16}}
}}

ENTRY %main (p: f32[8,16]) -> f32[8,16] {{
  %loop = (s32[], f32[8,16]{{1,0}}) while(%start), condition=%condition, body=%body{trips}
  %a = bf16[100]{{0}} parameter(1)
  %b = f32[10]{{0}} parameter(2)
  %sum.1 = (bf16[100]{{0}}, f32[10]{{0}}) all-reduce(%a, %b), {reduce}, to_apply=%add
  %fused = f32[16]{{0}} fusion(%c), kind=kCustom, calls=%all-reduce-scatter
  %q = s8[40]{{0}} parameter(3)
  %sent = s8[40]{{0}} collective-permute(%q), source_target_pairs={{{{0,1}},{{1,2}},{{3,0}}}}
  %r = f32[8]{{0}} parameter(4)
  %begun = (f32[8]{{0}}, f32[32]{{0}}) all-gather-start(%r), {gather}, dimensions={{0}}
  ROOT %ended = f32[32]{{0}} all-gather-done(%begun)
}}
"""
LISTED = {
    "gather": "replica_groups={{0,1,2,3},{4,5,6,7}}",
    "reduce": "replica_groups={{0,4},{1,5},{2,6},{3,7}}",
    "trips": "",
}
IOTA = {
    "gather": "replica_groups=[2,4]<=[8]",
    "reduce": "replica_groups=[4,2]<=[2,4]T(1,0)",
    "trips": ', backend_config={"known_trip_count":{"n":"5"}}',
}
NAMED = {
    "gather": "replica_groups=mesh['a'=2,'b'=4] {'b'}",
    "reduce": "replica_groups=mesh['a'=4,'b'=1,'c'=2], device_ids=([2,4]T(1,0)) {'c'}",
    "trips": "",
}
PARTS = {
    "gather": "replica_groups=mesh['a'=8] {'a':(2)4}",
    "reduce": "replica_groups=mesh['a'=8] {'a':(1)2}",
    "trips": "",
}


@pytest.mark.parametrize("written", [LISTED, IOTA, NAMED, PARTS])
def test_every_syntax_of_replica_groups_is_read(written):
    found = read(HLO.format(**written), MESH)
    assert set(found) == {
        Collective("all-gather", ("fsdp",), "f32", 6, 5 * 3 * 8 * 16 * 4 + 3 * 8 * 4),
        Collective("all-reduce", ("data",), "bf16", 1, 200),
        Collective("all-reduce", ("data",), "f32", 1, 40),
        Collective("reduce-scatter", ("fsdp",), "f32", 1, 3 * 64),
        Collective("collective-permute", ("fsdp",), "s8", 1, 40),
    }
    assert total(found, "data") == 240 and total(found, kind="reduce-scatter") == 192
    assert total(found) == sum(c.wire_bytes for c in found)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("reduce-scatter", 3 * 16 * 16 * 4),
        ("all-reduce", 2 * 3 * 16 * 16 * 4),
        ("collective-permute", 64 * 16 * 4),
        ("all-gather", 3 * 64 * 16 * 4),
        ("all-to-all", 3 * 16 * 16 * 4),
    ],
)
def test_bytes_of_a_real_program(kind, expected):
    """Each device holds f32[64, 16]; groups of four."""
    mesh = make_mesh(MeshConfig(data=2, fsdp=4))
    ring = [(i, (i + 1) % 4) for i in range(4)]
    run = {
        "reduce-scatter": lambda x: jax.lax.psum_scatter(x, "fsdp", tiled=True),
        "all-reduce": lambda x: jax.lax.psum(x, "fsdp"),
        "collective-permute": lambda x: jax.lax.ppermute(x, "fsdp", ring),
        "all-gather": lambda x: jax.lax.all_gather(x, "fsdp", tiled=True),
        "all-to-all": lambda x: jax.lax.all_to_all(x, "fsdp", 0, 0, tiled=True),
    }[kind]
    spec = P(("data", "fsdp"))
    program = jax.jit(jax.shard_map(run, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False))
    text = program.lower(jax.ShapeDtypeStruct((8 * 64, 16), "float32")).compile().as_text()
    (found,) = read(text, dict(mesh.shape))
    assert found == Collective(kind, ("fsdp",), "f32", 1, expected)


def test_a_collective_in_several_fusions_is_counted_once():
    """As in a program of libtpu: one all-gather is in three fusions, with one chain_id."""
    piece = (
        "%piece.{0} (p.{0}: f32[8,16]) -> f32[32,16] {{\n"
        "  %p.{0} = f32[8,16]{{1,0}} parameter(0)\n"
        "  ROOT %g.{0} = f32[32,16]{{1,0}} all-gather(%p.{0}), channel_id=9, "
        'replica_groups=[2,4]<=[8], dimensions={{0}}, frontend_attributes={{chain_id="{1}"}}\n'
        "}}\n\n"
    )
    call = "  %f.{0} = f32[32,16]{{1,0}} fusion(%carry), kind=kCustom, calls=%piece.{0}\n"
    numbers = [(0, 4), (1, 4), (2, 4), (3, 5)]  # the last is another one, of the same channel
    text = HLO.format(**IOTA)
    before, body = text.split("%body (", 1)
    head, rest = body.split("\n", 1)
    pieces = "".join(piece.format(*n) for n in numbers)
    calls = "".join(call.format(*n) for n in numbers)
    found = read(f"{before}{pieces}%body ({head}\n{calls}{rest}", MESH)
    one = 5 * 3 * 8 * 16 * 4
    gathers = [c for c in found if c.kind == "all-gather"]
    assert gathers == [Collective("all-gather", ("fsdp",), "f32", 16, 3 * one + 3 * 8 * 4)]


SENT = """ENTRY %main (p: f32[128]) -> f32[256] {{
  %begin = token[] after-all()
  %p = f32[128]{{0:T(128)}} parameter(0)
  %send = (f32[128]{{0:T(128)}}, u32[], token[]) send(%p, %begin), channel_id=2, \
is_host_transfer=true, frontend_attributes={{_xla_host_transfer_rendezvous="x_0",\
_xla_megascale_target={target},_xla_megascale_transfer_type="{kind}"}}
  %recv = (f32[256]{{0:T(128)}}, u32[], token[]) recv(%begin), channel_id=1, \
is_host_transfer=true, frontend_attributes={{_xla_host_transfer_rendezvous="x_0",\
_xla_megascale_target={target},_xla_megascale_transfer_type="{kind}"}}
  %done = token[] send-done(%send), channel_id=2, is_host_transfer=true
  %got = (f32[256]{{0:T(128)}}, token[]) recv-done(%recv), channel_id=1, is_host_transfer=true
  ROOT %out = f32[256]{{0:T(128)}} get-tuple-element(%got), index=0
}}
"""
"""How libtpu writes what is sent between four slices of two devices."""
ALL = '"{1,2,3,4}x{0:1}"'
DATA = "{{100000,200000},{100001,200001},{300000,400000},{300001,400001}}"
ISLAND = "{{100000,300000},{100001,300001},{200000,400000},{200001,400001}}"
PAIRS = "{{100000->200000},{200000->100000},{300001->400001},{400001->300001}}"


@pytest.mark.parametrize(
    ("kind", "target", "says", "axes", "size"),
    [
        ("ALL_REDUCE", ALL, "all-reduce", ("island", "data"), 512 * 2 * 3 // 4),
        ("ALL_REDUCE", DATA, "all-reduce", ("data",), 512),
        ("ALL_GATHER", ISLAND, "all-gather", ("island",), 512),
        ("REDUCE_SCATTER", DATA, "reduce-scatter", ("data",), 256),
        ("ALL_TO_ALL", ISLAND, "all-to-all", ("island",), 256),
        ("ONE_TO_ONE", PAIRS, "collective-permute", ("data",), 512),
    ],
)
def test_what_is_sent_between_slices_is_read(kind, target, says, axes, size):
    text = SENT.format(kind=kind, target=target)
    found = read(text, {"island": 2, "data": 2, "fsdp": 2})
    assert found == [Collective(says, axes, "f32", 1, size)]
    assert overlap.pairs(text) == overlap.Pairs(1, 0, 0, {says: 1})


@pytest.mark.aot
# JAX caches what it compiles for devices that are not here, and can't read it again.
@pytest.mark.filterwarnings("ignore:Error reading persistent compilation cache entry:UserWarning")
@pytest.mark.parametrize("axes", [("island", "data"), ("island",), ("data",)])
def test_libtpu_sends_between_slices_what_is_read(axes):
    sizes = MeshConfig(island=2, data=2, fsdp=4)
    mesh = make_mesh(sizes, topology.devices("v5e:2x2", 4))
    shape, before = (2, 2, 4, 4096), ("island", "data", "fsdp")
    after = P(*(None if axis in axes else axis for axis in before))
    x = jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, P(*before)))
    run = jax.jit(lambda x: x, out_shardings=NamedSharding(mesh, after))
    found = read(run.lower(x).compile().as_text(), dict(mesh.shape))
    others = 2 ** len(axes) - 1
    assert {(c.kind, c.dtype) for c in found} == {("all-gather", "f32")}
    assert {axis for c in found for axis in c.axes} == set(axes)
    assert sum(c.wire_bytes for c in found) == others * 4096 * 4


@pytest.mark.parametrize(
    ("kind", "target", "why"),
    [
        ("BROADCAST", ALL, "unknown kind"),
        ("ALL_REDUCE", "{{100000,200000},{300000,400000}}", "some of the slices"),
        ("ALL_REDUCE", "x", "unknown syntax"),
    ],
)
def test_what_is_sent_between_slices_in_other_forms_is_refused(kind, target, why):
    with pytest.raises(ValueError, match=why):
        read(SENT.format(kind=kind, target=target), {"island": 2, "data": 2, "fsdp": 2})


def test_unknown_groups_are_refused():
    text = HLO.format(**LISTED | {"reduce": "replica_groups=@some_mesh"})
    with pytest.raises(ValueError, match="unknown syntax"):
        read(text, MESH)


def test_trip_counts_of_loops_with_larger_steps():
    """As libtpu writes a matmul with its all-gather: u32, unrolled twice."""
    body = (
        "%ring (c: (f32[8,16], /*index=5*/u32[])) -> (f32[8,16], u32[]) {\n"
        "  %two = u32[]{:T(128)} constant(2)\n"
        "  %c = (f32[8,16]{1,0}, u32[]) parameter(0)\n"
        "  %i = u32[]{:T(128)} get-tuple-element(%c), index=1\n"
        "  %y = f32[8,16]{1,0} get-tuple-element(%c), index=0\n"
        "  %z = f32[8,16]{1,0} collective-permute(%y), source_target_pairs={{0,1},{1,0}}\n"
        "  %j = u32[]{:T(128)} add(%i, %two)\n"
        "  ROOT %t = (f32[8,16]{1,0}, u32[]) tuple(%z, %j)\n}\n\n"
        "%until (c: (f32[8,16], u32[])) -> pred[] {\n"
        "  %c = (f32[8,16]{1,0}, /*index=5*/u32[]) parameter(0)\n"
        "  %four = u32[]{:T(128)} constant(4)\n"
        "  %at = u32[]{:T(128)} get-tuple-element(%c), index=1\n"
        "  ROOT %lt = pred[] compare(%at, %four), direction=LT\n}\n\n"
    )
    call = "  %r = (f32[8,16]{1,0}, u32[]) while(%s), condition=%until, body=%ring\n"
    before, rest = HLO.format(**IOTA).split("ENTRY %main", 1)
    head, rest = rest.split("\n", 1)
    found = read(f"{before}{body}ENTRY %main{head}\n{call}{rest}", MESH)
    assert Collective("collective-permute", ("fsdp",), "f32", 2, 2 * 8 * 16 * 4) in found
    unknown = body.replace("add(%i, %two)", "multiply(%i, %two)")
    with pytest.raises(ValueError, match="no known trip count"):
        read(f"{before}{unknown}ENTRY %main{head}\n{call}{rest}", MESH)


def test_a_loop_without_a_known_trip_count_is_refused():
    text = HLO.format(**LISTED).replace("direction=LT", "direction=NE")
    with pytest.raises(ValueError, match="loop: a loop with collectives and no known trip count"):
        read(text, MESH)


def test_branches_are_counted_or_left_out():
    """A real program: one branch sends, and so does what follows both."""
    mesh = make_mesh(MeshConfig(8), jax.devices())

    def local(x):
        x = jax.lax.cond(x[0] > 0, lambda x: jax.lax.psum(x, "data") / 8, lambda x: x * 2, x)
        return jax.lax.psum(jnp.sum(x), "data")

    run = jax.shard_map(local, mesh=mesh, in_specs=P("data"), out_specs=P(), check_vma=False)
    text = jax.jit(run).lower(jnp.ones(8 * 64)).compile().as_text()
    whole, without = (total(read(text, dict(mesh.shape), branches)) for branches in (True, False))
    assert (whole, without) == ((64 + 1) * 7, 7)  # 4 bytes a number, of eight devices: 7 by a ring
