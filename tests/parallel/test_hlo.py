"""Reading a compiled program: trips of loops, bytes on the wire, what is waited for, cycles and kernels."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from xsa_jax.parallel.hlo import Kernel, read

pytestmark = pytest.mark.fast

LOOP = """HloModule jit_step, num_partitions=16

%body (p: (s32[], f32[64,32])) -> (s32[], f32[64,32]) {
  %p = (s32[]{:T(128)}, f32[64,32]{1,0:T(8,128)}) parameter(0)
  %one = s32[]{:T(128)} constant(STRIDE)
  %i = s32[]{:T(128)} get-tuple-element(%p), index=0
  %x = f32[64,32]{1,0:T(8,128)} get-tuple-element(%p), index=1
  %gathered = (bf16[4,32], bf16[64,32]) all-gather-start(%x), channel_id=1, replica_groups=mesh['a'=16,'b'=1] {'a'}, METADATA
  %done = bf16[64,32]{1,0} all-gather-done(%gathered)
  %y = f32[64,32]{1,0} fusion(%x), kind=kLoop, calls=%inner, backend_config={"estimated_cycles":"100"}
  %reduced = f32[64,32]{1,0} all-reduce(%y), channel_id=2, replica_groups=[4,4]<=[16], to_apply=%sum
  %copied = s32[]{:T(128)} copy(%i)
  %next = s32[]{:T(128)} add(%copied, %one)
  ROOT %out = (s32[]{:T(128)}, f32[64,32]{1,0}) tuple(%next, %reduced)
}

%inner (q: f32[64,32]) -> f32[64,32] {
  %q = f32[64,32]{1,0} parameter(0)
  ROOT %n = f32[64,32]{1,0} negate(%q)
}

%condition (c: (s32[], f32[64,32])) -> pred[] {
  %bound = s32[]{:T(128)} constant(24)
  %c = (s32[]{:T(128)}, f32[64,32]{1,0}) parameter(0)
  %j = s32[]{:T(128)} get-tuple-element(%c), index=0
  ROOT %less = pred[]{:T(512)} compare(%j, %bound), direction=LT
}

%all-reduce-scatter.1 (r: f32[64,32]) -> f32[4,32] {
  %r = f32[64,32]{1,0} parameter(0)
  ROOT %whole = f32[64,32]{1,0} all-reduce(%r), channel_id=3, replica_groups={{0,1,2,3},{4,5,6,7}}, to_apply=%sum
}

%offloaded (o: f32[16,32]) -> f32[64,32] {
  %o = f32[16,32]{1,0} parameter(0)
  ROOT %whole.2 = f32[64,32]{1,0} all-gather(%o), channel_id=6, replica_groups=[4,4]<=[16], backend_config={"estimated_cycles":"3"}
}

ENTRY %main (a: f32[64,32]) -> f32[64,32] {
  %a = f32[64,32]{1,0} parameter(0)
  %zero = s32[] constant(0)
  %start = (s32[], f32[64,32]{1,0}) tuple(%zero, %a)
  %loop = (s32[]{:T(128)}, f32[64,32]{1,0}) while(%start), condition=%condition, body=%body
  %z = f32[64,32]{1,0} get-tuple-element(%loop), index=1
  %scattered = f32[4,32]{1,0} fusion(%z), kind=kCustom, calls=%all-reduce-scatter.1, backend_config={"estimated_cycles":"7"}
  %xsa_forward.3 = (bf16[2,4,512,128]{3,2,1,0}, f32[2,4,1,512]{3,2,1,0}) custom-call(%z), custom_call_target="tpu_custom_call"
  %begun = ((f32[64,32]{1,0}), f32[16,32]{1,0}) reduce-scatter-start(%z), channel_id=5, replica_groups=[4,4]<=[16], to_apply=%sum
  %called = ((f32[16,32]{1,0}), f32[64,32]{1,0}) call-start(%z), calls=%offloaded
  %ended = f32[64,32]{1,0} call-done(%called), calls=%offloaded
  ROOT %permuted = f32[64,32]{1,0} collective-permute(%z), channel_id=4, source_target_pairs={{0,1}}
}
"""
LOOP = LOOP.replace("METADATA", 'metadata={op_name="jit(step)/while/body/gather"}')
WHOLE = 64 * 32 * 4


@pytest.mark.parametrize(("stride", "trips"), [(1, 24), (2, 12), (5, 5)])
def test_a_program_by_hand(stride, trips):
    program = read(LOOP.replace("STRIDE", str(stride)))
    assert (program.cycles, program.cycles_in_loops) == (100 * trips + 7 + 3, 100 * trips)
    assert program.kernels == [Kernel("xsa_forward", (2, 4, 512, 128), 1)]
    found = [(c.kind, c.dtype, c.group, c.times, round(c.wire), c.in_loop, c.synchronous) for c in program.collectives]
    assert found == [
        ("all-gather", "bf16", 16, trips, trips * 64 * 32 * 2 * 15 / 16, True, False),
        ("all-reduce", "f32", 4, trips, trips * 2 * WHOLE * 3 / 4, True, True),
        ("reduce-scatter", "f32", 4, 1, WHOLE * 3 / 4, False, False),  # an all-reduce of which each device keeps its part
        ("reduce-scatter", "f32", 4, 1, WHOLE * 3 / 4, False, False),
        ("all-gather", "f32", 4, 1, WHOLE * 3 / 4, False, False),
        ("collective-permute", "f32", 16, 1, WHOLE, False, True),
    ]
    assert program.wire() == sum(c.wire for c in program.collectives)
    assert program.wire(synchronous=True, in_loop=True) == trips * 2 * WHOLE * 3 / 4
    assert program.collectives[0].source == "while/body/gather"


def test_a_loop_whose_trips_are_unknown_is_refused():
    with pytest.raises(ValueError, match="the trips of loop loop cannot be read"):
        read(LOOP.replace("STRIDE", "1").replace("compare(%j, %bound)", "compare(%j, %j)"))
    with pytest.raises(ValueError, match="the trips of loop loop cannot be read"):
        read(LOOP.replace("STRIDE", "1").replace("tuple(%next,", "tuple(%i,"))


def test_what_xla_writes_for_the_devices_here():
    """An all-gather and an all-reduce in a scan of seven steps, as XLA for CPUs writes them."""
    mesh = jax.make_mesh((8,), ("fsdp",), (AxisType.Auto,), devices=jax.devices()[:8])

    def function(w, x):
        def local(w, x):
            def body(x, _):
                return jax.lax.psum(x @ jax.lax.all_gather(w, "fsdp", axis=0, tiled=True), "fsdp"), None

            return jax.lax.scan(body, x, None, length=7)[0]

        specs = PartitionSpec("fsdp"), PartitionSpec()
        return jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=PartitionSpec(), check_vma=False)(w, x)

    w = jax.ShapeDtypeStruct((32, 32), jnp.float32, sharding=NamedSharding(mesh, PartitionSpec("fsdp")))
    x = jax.ShapeDtypeStruct((16, 32), jnp.float32, sharding=NamedSharding(mesh, PartitionSpec()))
    program = read(jax.jit(function).lower(w, x).compile().as_text() or "")
    reduced = [c for c in program.collectives if c.kind == "all-reduce"]
    assert [(c.times, c.group, c.in_loop, c.wire) for c in reduced] == [(7, 8, True, 7 * 2 * 16 * 32 * 4 * 7 / 8)]
    gathered = sum(c.wire / c.times for c in program.collectives if c.kind == "all-gather")
    assert gathered == 32 * 32 * 4 * 7 / 8
