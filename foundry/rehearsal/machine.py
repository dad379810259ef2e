"""Specifications of GPUs and their links, from the manufacturer's data sheets."""

from dataclasses import dataclass

from foundry.core.errors import ConfigError, Violation, as_text, nearest


@dataclass(frozen=True)
class Gpu:
    """Specification of a GPU model.

    Attributes:
        name: name returned by `torch.cuda.get_device_name`.
        memory_bytes: total memory returned by `torch.cuda.mem_get_info`.
        capability: compute capability returned by `torch.cuda.get_device_capability`.
        memory_bandwidth: bytes per second of the GPU's memory.
        link_bandwidth: bytes per second in one direction to the GPUs of its node (NVLink, or PCIe).
        network_bandwidth: bytes per second in one direction to another node, with one network card per GPU.
    """

    name: str
    memory_bytes: int
    capability: tuple[int, int]
    memory_bandwidth: float
    link_bandwidth: float
    network_bandwidth: float


_GIB = 2**30

GPUS = {
    "a100": Gpu("NVIDIA A100-SXM4-80GB", int(79.1 * _GIB), (8, 0), 2.04e12, 300e9, 25e9),
    "h100": Gpu("NVIDIA H100 80GB HBM3", int(79.1 * _GIB), (9, 0), 3.35e12, 450e9, 50e9),
    "h200": Gpu("NVIDIA H200", int(139.8 * _GIB), (9, 0), 4.8e12, 450e9, 50e9),
    "b200": Gpu("NVIDIA B200", int(178.4 * _GIB), (10, 0), 8.0e12, 900e9, 50e9),
    "l4": Gpu("NVIDIA L4", int(22.0 * _GIB), (8, 9), 0.3e12, 32e9, 12.5e9),
    "l40s": Gpu("NVIDIA L40S", int(44.4 * _GIB), (8, 9), 0.864e12, 32e9, 25e9),
}
"""GPUs of common servers, from NVIDIA's data sheets. Networks: 100 Gbit/s for L4, 200 for A100 and L40S, else 400."""


def find_gpu(name: str, key: str) -> Gpu:
    """Return the specification of a GPU by its short name.

    Args:
        name: short name, such as h100.
        key: setting that contains the name, for the message.

    Raises:
        ConfigError: if the name is unknown.
    """
    gpu = GPUS.get(name.lower())
    if gpu is None:
        hint = nearest(name.lower(), GPUS)
        raise ConfigError(Violation(key, f"is {as_text(name)} but must be one of {', '.join(GPUS)}{hint}"))
    return gpu
