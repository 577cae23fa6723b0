"""Which device a program is traced for. Nothing else in this package asks jax for its backend."""

from typing import Any

import jax

from xsa_kernels import mesh


def platform(*arrays: Any) -> str:
    """The platform, such as "cpu", "gpu" or "tpu", of the ambient mesh, else of the mesh in the arrays' types, else jax's default.

    A program may be traced for a chip that this machine lacks, by a mesh of that chip's devices. `arrays` may be trees of arrays.
    """
    devices = (candidate.abstract_device for candidate in mesh.candidates(*arrays))
    found = next((device for device in devices if device is not None), None)
    return jax.default_backend() if found is None else found.platform


def kernel_platform(platform: str) -> str:
    """The key of `registry.AUTO`: the platform itself, or "other" for a GPU of this machine that our kernels do not fit."""
    if platform != "gpu" or jax.default_backend() != "gpu":
        return platform
    capability = str(getattr(jax.local_devices()[0], "compute_capability", ""))  # "9.0"; an AMD chip has a name here
    return "gpu" if capability[:1].isdigit() and float(capability) >= 8 else "other"
