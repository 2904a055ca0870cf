"""memo's Triton kernels go through Triton's compiler and ptxas for every GPU that memo knows.
Their numbers: tests/test_ops.py."""

import re
import subprocess
from pathlib import Path

import pytest

pytest.importorskip("triton")
TENSORS = dict.fromkeys("residual dy x w b gate up out_".split(), "*bf16") | dict.fromkeys(
    "mean rstd sums means factor turn lse lse_ of_target".split(), "*fp32") | dict(
    logits="*bf16", target="*i64", eps="fp32")  # all else: i32
KERNELS = {
    "LayerNorm forward": ("norm_forward", dict(out="*bf16"), dict(HAS_MEAN=True, HAS_B=True, BLOCK=4096)),
    "LayerNorm forward of long rows": ("norm_forward", dict(out="*bf16"),
                                       dict(HAS_MEAN=True, HAS_B=True, BLOCK=16384)),
    "LayerNorm backward": ("norm_backward", dict(out="*bf16"),
                           dict(HAS_RESIDUAL=True, HAS_MEAN=True, HAS_B=True, WHOLE=True, BLOCK=8192)),
    "LayerNorm backward of long rows": ("norm_backward", dict(out="*bf16"),
                                        dict(HAS_RESIDUAL=True, HAS_MEAN=True, HAS_B=True, WHOLE=False,
                                             BLOCK=8192)),
    "means of long rows": ("norm_means", dict(), dict(HAS_MEAN=True, BLOCK=8192)),
    "RMSNorm forward": ("norm_forward", dict(out="*bf16"), dict(HAS_MEAN=False, HAS_B=False, BLOCK=8192)),
    "RMSNorm backward": ("norm_backward", dict(out="*bf16"),
                         dict(HAS_RESIDUAL=True, HAS_MEAN=False, HAS_B=False, WHOLE=True,
                              BLOCK=8192)),
    "RMSNorm backward of heads": ("norm_backward", dict(out="*bf16"),
                                  dict(HAS_RESIDUAL=False, HAS_MEAN=False, HAS_B=False, WHOLE=True,
                                       BLOCK=128)),
    "rotary": ("rotary", dict(), dict(BACK=True, BLOCK=4096)),
    "merge": ("merge", dict(out="*fp32"), dict(ROWS=32, BLOCK=128)),
    "SwiGLU forward": ("swiglu_forward", dict(out="*bf16"), dict(GELU=False, BLOCK=4096)),
    "log of the sum of exponentials": ("logsumexp", dict(), dict(BLOCK=4096)),
    "gradient of logits": ("logits_backward", dict(), dict(BLOCK=4096)),
    "FP8 gradients, scaled, rounded, turned": ("turn", dict(out="*u8"), dict(SCALED=True, BLOCK=64)),
    "FP8 inputs, turned": ("turn", dict(x="*u8", out="*u8"), dict(SCALED=False, BLOCK=64)),
    "SwiGLU backward": ("swiglu_backward", dict(), dict(GELU=True, BLOCK=4096)),
}


@pytest.mark.parametrize("capability", [80, 86, 89, 90, 100, 103, 120])
@pytest.mark.parametrize("name", KERNELS)
def test_it_compiles_without_spilling(name, capability, tmp_path):
    import triton
    import triton.backends.nvidia as nvidia
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from memo.kernels import fused
    function, types, constants = KERNELS[name]
    if name.startswith("FP8") and capability < 89:
        pytest.skip("there are no FP8 products")
    kernel = getattr(fused, f"{function}_kernel")
    signature = {n: "constexpr" if n in constants else (TENSORS | types).get(n, "i32")
                 for n in kernel.arg_names}
    # as a launch with lengths and strides of whole 16 elements specialises it
    whole = {(i,): [["tt.divisibility", 16]] for i, kind in enumerate(signature.values())
             if kind == "i32" or kind.startswith("*")}
    source = ASTSource(fn=kernel, signature=signature, attrs=whole,
                       constexprs={(kernel.arg_names.index(n),): value for n, value in constants.items()})
    warps = 4 if function == "turn" else fused.warps(constants["BLOCK"] * constants.get("ROWS", 1))
    made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=dict(num_warps=warps))
    assert len(made.asm["cubin"]) > 1000 and made.metadata.shared <= 48 * 1024
    # ptxas decides what does not fit the registers, so PTX does not show it
    (tmp_path / "kernel.cubin").write_bytes(made.asm["cubin"])
    tool = Path(nvidia.__file__).parent / "bin" / "cuobjdump"
    used = subprocess.run([tool, "--dump-resource-usage", tmp_path / "kernel.cubin"], check=True, text=True,
                          capture_output=True).stdout
    assert re.findall(r"STACK:(\d+)", used) == ["0"], used


def test_what_a_launch_may_ask_for_is_asked_for_at_long_contexts():
    """grid.y and grid.z end at 65,535; null CUDA refuses more, as a GPU does."""
    import torch

    from memo.kernels import fused
    from tests.nullcuda.watch import NULL
    T, before = 2**22, NULL.counts()
    out, lse = torch.empty(1, T, 1, 8, device="cuda"), torch.empty(1, 1, T, device="cuda")
    fused.launch_merge(out, lse, out, lse)
    fused.launch_rotary(out.view(T, 8), torch.empty(T, 4, dtype=torch.complex64, device="cuda"), True)
    fused.launch_norm_forward(out.view(T, 8), lse[0, 0, :8], None, out.view(T, 8), lse[0, 0], lse[0, 0],
                                1e-5)
    fused.launch_swiglu_backward(out, out, out)
    after = NULL.counts()
    assert after["launches"] >= before["launches"] + 4 and after["bad launches"] == before["bad launches"]
