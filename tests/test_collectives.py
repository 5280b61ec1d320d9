"""What is counted in compiled programs: of this machine's compiler, and in the forms that the TPU's writes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from nca_jax.collectives import Collective, collectives
from nca_jax.sharding import make_mesh


def program(devices_per_slice: int = 8, rounds: int = 5) -> list[Collective]:
    """x @ w over a contraction that 4 devices share, `rounds` times; each sum is 16 x 32 float32."""
    mesh = make_mesh({"replica": 2, "data": 1, "fsdp": 1, "tensor": 4})
    split = NamedSharding(mesh, PartitionSpec(None, "tensor"))

    def run(x, w):
        def one(total, _):
            product = jax.lax.with_sharding_constraint(
                jnp.tanh(x + total[:, :1]) @ w, NamedSharding(mesh, PartitionSpec())
            )
            return product, None

        return jax.lax.scan(one, jnp.zeros((16, 32)), None, length=rounds)[0]

    x = jax.ShapeDtypeStruct((16, 64), jnp.float32, sharding=split)
    w = jax.ShapeDtypeStruct((64, 32), jnp.float32, sharding=NamedSharding(mesh, PartitionSpec("tensor", None)))
    return collectives(jax.jit(run).lower(x, w).compile().as_text(), devices_per_slice)


def test_a_sum_in_a_loop_counts_once_a_round():
    # Of a ring of 4 each device receives 2 x 3/4 of the result.
    assert program() == [Collective("all-reduce", False, 5, 5 * 16 * 32 * 4 * 1.5)]
    assert program(rounds=7) == [Collective("all-reduce", False, 7, 7 * 16 * 32 * 4 * 1.5)]


def test_groups_that_span_slices_are_told_apart():
    assert [c.between_slices for c in program(devices_per_slice=4)] == [False]
    assert [c.between_slices for c in program(devices_per_slice=2)] == [True]


HLO = """\
HloModule jit_step

%start (param: bf16[1,256]) -> (bf16[1,256], bf16[1,4096]) {{
  %all-gather.1 = bf16[1,4096]{{1,0:T(8,128)}} all-gather(%param), channel_id=7, replica_groups={groups}
  ROOT %custom-call = (bf16[1,256], bf16[1,4096]) custom-call(%all-gather.1), custom_call_target="AsyncCollectiveStart"
}}

%done (param: bf16[1,256]) -> bf16[1,4096] {{
  ROOT %all-gather.2 = bf16[1,4096]{{1,0:T(8,128)}} all-gather(%param), channel_id=7, replica_groups={groups}
}}

%condition (state: (s32[], bf16[1,256])) -> pred[] {{
  %constant.1 = s32[]{{:T(128)}} constant(36)
  %counter = s32[]{{:T(128)}} get-tuple-element(%state), index=0
  ROOT %lt = pred[]{{:T(512)}} compare(%counter, %constant.1), direction=LT
}}

%open_condition (state: (s32[], bf16[1,256])) -> pred[] {{
  %constant.2 = s32[]{{:T(128)}} constant(512)
  %counter.2 = s32[]{{:T(128)}} get-tuple-element(%state), index=0
  %lt.2 = pred[]{{:T(512)}} compare(%counter.2, %constant.2), direction=LT
  %left = pred[] get-tuple-element(%state), index=1
  %ne = pred[] compare(%left, %lt.2), direction=NE
  ROOT %and = pred[] and(%lt.2, %ne)
}}

%body (state: (s32[], bf16[1,256])) -> (s32[], bf16[1,256]) {{
  %fusion.1 = (bf16[1,256], bf16[1,4096]) fusion(%x), kind=kCustom, calls=%start
  %fusion.2 = bf16[1,4096] fusion(%x), kind=kCustom, calls=%done
  %permute = (f32[8], f32[8], u32[], u32[]) collective-permute-start(%y), source_target_pairs={{{{0,1}},{{1,0}}}}
  %permuted = f32[8] collective-permute-done(%permute)
}}

ENTRY %main (x: bf16[1,256]) -> bf16[1,256] {{
  %while.1 = (s32[], bf16[1,256]) while(%tuple), condition=%{condition}, body=%body
  ROOT %rs = f32[4] reduce-scatter(%z), channel_id=11, replica_groups=[2,8]<=[8,2]T(1,0), dimensions={{0}}
}}
"""


@pytest.mark.parametrize(
    "groups",
    [
        "{{0,1,2,3,4,5,6,7,8,9,10,11,12,13,14,15}}",
        "[1,16]<=[16]",
        "mesh['axis_0'=16,'axis_1'=1] {'axis_0'}",
        "mesh['axis_0'=2,'axis_1'=8], device_ids=([8,2]T(1,0)) {'axis_0','axis_1'}",
    ],
)
def test_pieces_of_one_asynchronous_collective_count_once(groups):
    found = {c.kind: c for c in collectives(HLO.format(groups=groups, condition="condition"), 16)}
    assert found["all-gather"] == Collective("all-gather", False, 36, 36 * 4096 * 2 * 15 / 16)
    assert found["collective-permute"] == Collective("collective-permute", False, 36, 36 * 8 * 4)
    # 2 groups of 8: each device receives 7 parts of the size of its result.
    assert found["reduce-scatter"] == Collective("reduce-scatter", False, 1, 4 * 4 * 7)


def test_a_loop_with_an_open_end_runs_as_often_as_is_said():
    text = HLO.format(groups="[1,16]<=[16]", condition="open_condition")
    assert [c.count for c in collectives(text, 16, open_loops=100) if c.kind == "all-gather"] == [100]


def test_loops_with_an_open_end_that_follow_each_other_share_the_rounds():
    loop = "  %while.1 = (s32[], bf16[1,256]) while(%tuple), condition=%open_condition, body=%body\n"
    text = HLO.format(groups="[1,16]<=[16]", condition="open_condition")
    twice = text.replace(loop, loop + loop.replace("while.1", "while.2").replace("%body", "%later"))
    assert twice != text
    later = (
        "\n%later (state: (s32[])) -> (s32[]) {\n  %p = f32[8] collective-permute(%y), source_target_pairs={{0,1}}\n}\n"
    )
    found = {c.kind: c.count for c in collectives(twice.replace("\nENTRY", later + "\nENTRY"), 16, open_loops=100)}
    assert found == {"all-gather": 50, "collective-permute": 50 + 50, "reduce-scatter": 1}


@pytest.mark.parametrize(
    ("groups", "crossing"),
    [
        ("[2,8]<=[16]", False),
        ("[8,2]<=[2,8]T(1,0)", True),
        ("mesh['a'=2,'b'=8] {'b'}", False),
        ("mesh['a'=2,'b'=8] {'a'}", True),
        ("mesh['a'=2,'b'=8], device_ids=([8,2]T(1,0)) {'b'}", True),
        ("{{0,8},{1,9},{2,10},{3,11},{4,12},{5,13},{6,14},{7,15}}", True),
    ],
)
def test_groups_in_every_notation(groups, crossing):
    (gathered,) = (
        c for c in collectives(HLO.format(groups=groups, condition="condition"), 8) if c.kind == "all-gather"
    )
    assert gathered.between_slices == crossing


def test_devices_of_a_mesh_notation_are_in_the_order_it_says():
    # Devices 0, 2, ..., 14 are a row of [8, 2] transposed: groups along it have 8 members, which two slices share.
    text = HLO.format(groups="mesh['a'=2,'b'=8], device_ids=([8,2]T(1,0)) {'b'}", condition="condition")
    (gathered,) = (c for c in collectives(text, 16) if c.kind == "all-gather")
    assert gathered.nbytes == pytest.approx(36 * 4096 * 2 * 7 / 8)
    assert np.isfinite(gathered.nbytes)
