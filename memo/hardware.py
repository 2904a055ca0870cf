"""What is known of the GPUs: dense bf16 peak FLOPs per second, with where the figure stands."""

import re

PEAK_FLOPS_PER_S = {  # a pattern for the whole name that CUDA reports: peak
    # NVIDIA A100 datasheet: 312 TFLOPS BF16, dense. The A800 has the same cores (MEMO section 5.1: 312 TFLOPS).
    r"(NVIDIA )?A(100|800)[- ]?(SXM4|PCIE|PCIe|SXM)?[- ]?(40|80)GB( PCIe)?": 312e12,
    # NVIDIA H100 datasheet: SXM 1,979 and PCIe 1,513 TFLOPS BF16 with sparsity, which doubles the dense figure.
    r"NVIDIA H100 80GB HBM3": 989.4e12,
    r"NVIDIA H100 PCIe": 756e12,
    # NVIDIA H200 datasheet: SXM 1,979 TFLOPS BF16 with sparsity.
    r"NVIDIA H200": 989.4e12,
    # NVIDIA HGX B200 datasheet: 36 PFLOPS BF16 with sparsity for eight GPUs.
    r"NVIDIA B200": 2250e12,
    # NVIDIA L40S datasheet: 362.05 TFLOPS BF16, dense.
    r"NVIDIA L40S": 362.05e12,
    # NVIDIA Ada architecture whitepaper, appendix A: RTX 4090, 165.2 TFLOPS BF16 with fp32 accumulation, dense.
    r"NVIDIA GeForce RTX 4090": 165.2e12,
}


def peak_flops_per_s(device_name):
    """Dense bf16 FLOPs per second of the GPU with this name; None where that is not known."""
    return next((peak for pattern, peak in PEAK_FLOPS_PER_S.items() if re.fullmatch(pattern, device_name)), None)
