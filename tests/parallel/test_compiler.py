"""The compiler's options by device, and what the user has set stays."""

import pytest

from xsa_jax.parallel.compiler import compiler_options

pytestmark = pytest.mark.fast


def test_options_by_device(monkeypatch):
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    assert compiler_options("cpu") == {}
    assert compiler_options("cpu", deterministic=True) == {}
    assert compiler_options("TPU v5 lite").keys() == {"xla_jf_spmd_threshold_for_windowed_einsum_mib"}
    gathers = compiler_options("TPU v6 lite")
    assert gathers["xla_tpu_enable_async_collective_fusion_fuse_all_gather"] == "true"
    assert compiler_options("TPU v5") == gathers | {"xla_tpu_megacore_fusion_allow_ags": "false"}
    assert compiler_options("TPU v4").keys() == {"xla_jf_spmd_threshold_for_windowed_einsum_mib"}
    assert compiler_options("NVIDIA H100 80GB HBM3").keys() == {"xla_gpu_enable_latency_hiding_scheduler"}
    assert compiler_options("NVIDIA H200", deterministic=True)["xla_gpu_deterministic_ops"] is True


@pytest.mark.parametrize("variable", ["XLA_FLAGS", "LIBTPU_INIT_ARGS"])
def test_a_flag_of_the_user_is_not_overruled(monkeypatch, variable):
    monkeypatch.setenv(variable, "--a=1 --xla_tpu_overlap_compute_collective_tc=false")
    left = compiler_options("TPU v6 lite")
    assert "xla_tpu_overlap_compute_collective_tc" not in left
    assert "xla_enable_async_all_gather" in left
