"""Attention: each kernel against the mathematics, several versions' interfaces, which kernel is taken."""



import sys
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch

from memo.config.config import Config
from memo.errors import ConfigError
from memo.estimate import budget, search
from memo.kernels import attention as attention_module
from memo.kernels import backends
from memo.kernels.attention import (
    BACKENDS,
    Lengths,
    Unusable,
    facts_of,
    installed_kernel,
    resolve_attention,
)
from memo.kernels.backends import Facts, choose_kernel, missing, workspaces
from memo.kernels.ops import TORCH
from memo.layer.attend import attend, attend_backward
from memo.layer.cp import attention_over_ranks
from memo.layer.tiles import one_sequence
from memo.run.load_config import load_config
from memo.run.rehearsal import FakeArena, kernel_requests
from memo.system import hardware
from memo.system.axis import Axis
from tests import fakes
from tests.helpers import error

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
ALL = {"flash_attn_2": "", "flash_attn_3": "", "flash_attn_4": ""}


def exact(q, k, v, dout, causal, scale):
    """(out, lse, dq, dk, dv) by autograd. Query head h reads head h Hkv // H of keys and values."""
    q, k, v = (t.detach().float().clone().requires_grad_() for t in (q, k, v))
    H = q.shape[2]
    k_, v_ = (torch.stack([t[:, :, h * t.shape[2] // H] for h in range(H)], 2) for t in (k, v))
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k_) * scale
    if causal:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(mask, -torch.inf)
    out = torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v_)
    out.backward(dout.float())
    return out, scores.logsumexp(-1), q.grad, k.grad, v.grad


def tensors(shape, device=CPU, dtype=torch.float32, kv_heads=None):
    """q, k, v, dout."""
    g, (B, T, H, D) = torch.Generator(device).manual_seed(0), shape
    return [torch.zeros(B, T, heads, D, device=device).normal_(generator=g).to(dtype)
            for heads in (H, kv_heads or H, kv_heads or H, H)]


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("kv_heads", [6, 2, 1])
@pytest.mark.parametrize("name", list(BACKENDS))
def test_backends_agree_with_the_mathematics(name, kv_heads, causal):
    device = torch.device("cuda" if torch.cuda.is_available() and name != "cpu" else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    if why := missing(name, facts_of(device, dtype, 64, aligned=True)[0]):
        with pytest.raises(ConfigError, match=f"attention={name} is not available: {why}"):
            resolve_attention(name, device, dtype, 64)
        return
    q, k, v, dout = tensors((2, 200, 6, 64), device, dtype, kv_heads)
    limit = 1e-5 if dtype == torch.float32 else 2e-2
    out, lse = BACKENDS[name].forward(q, k, v, causal)
    want, want_lse, *gradients = exact(q, k, v, dout, causal, 0.125)
    assert lse.shape == (2, 6, 200) and lse.dtype == torch.float32
    assert error(lse, want_lse) < limit and error(out.float(), want) < limit
    ours = BACKENDS[name].backward(dout, q, k, v, out, lse, causal)
    for got, g in zip(ours, gradients, strict=True):
        assert got.shape == g.shape and error(got.float(), g) < limit


def alone(kernel, S):
    """The Attention of a kernel to a whole sequence of S tokens, on one rank."""
    return attention_over_ranks(kernel, Axis("cp"), "ring", TORCH.merge)[0].among(one_sequence(S))


# --- the packages ---

@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("version, takes_out",
                         [("2.8.3", False), ("3 of 2.8.3", True), ("3", False), ("4 beta 0", True),
                          ("4 beta 27", True)])
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
def test_each_version_of_a_package_is_called_as_it_wants(version, takes_out, deterministic, kv_heads,
                                                         monkeypatch):
    fakes.install(monkeypatch, version)
    kernel = installed_kernel(fakes.KERNEL[version[0]])
    assert kernel.takes_out == takes_out and kernel.name == fakes.KERNEL[version[0]]
    monkeypatch.setattr("memo.config.layer.GROUP_ELEMENTS", 2 * 24 * 16 * 2)  # groups of two heads of four
    packed = torch.cat(tensors((2, 24, 4, 16), kv_heads=kv_heads), 2)
    q, k, v, dout = packed.split((4, kv_heads, kv_heads, 4), 2)  # strides of a projection's columns
    want, want_lse, *gradients = exact(q, k, v, dout, True, 0.25)
    out, lse = torch.zeros(2, 24, 4, 16), torch.zeros(2, 4, 24)
    torch.use_deterministic_algorithms(deterministic)
    try:
        attend(alone(kernel, 24), q, [(k, v)], out, lse)
        assert error(out, want) < 1e-5 and error(lse, want_lse) < 1e-5
        keys = [(k.clone(), v.clone())]
        got = attend_backward(alone(kernel, 24), dout, q.clone(), keys, [], out, lse)
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(error(a, b) < 1e-5 for a, b in zip(got, gradients, strict=True))
    if not deterministic:  # half of a ring's blocks: no mask, more queries than keys
        want, want_lse, *_ = exact(q, k[:, :12], v[:, :12], dout, False, 0.25)
        out, lse = kernel.forward(q, k[:, :12], v[:, :12], False)
        assert error(out, want) < 1e-5 and error(lse, want_lse) < 1e-5
    assert (kernel.lengths is None) == (version == "4 beta 0")  # it has no backward of them on a Hopper
    if kernel.lengths:
        starts = [0, 5, 7, 24, 31, 48]  # of two sequences
        parts = [(divmod(first, 24), end - first) for first, end in pairwise(starts)]
        lengths = Lengths(torch.tensor(starts, dtype=torch.int32), 18)
        out, lse = kernel.lengths[0](q, k, v, lengths)
        got = out, lse, *kernel.lengths[1](dout, q, k, v, out, lse.contiguous(), lengths)
        for (b, first), n in parts:
            rows = slice(b, b + 1), slice(first, first + n)
            want = exact(q[rows], k[rows], v[rows], dout[rows], True, 0.25)
            for t, w in zip(got, want, strict=True):
                t = t[rows[0], :, rows[1]] if t is lse else t[rows]
                assert t.shape == w.shape and error(t, w) < 1e-5


def test_torchs_kernel_of_lengths_gives_what_its_own_gives():
    """Shapes, on the meta device."""
    q, k, v, dout = (t.to("meta") for t in tensors((2, 48, 6, 64), dtype=torch.bfloat16, kv_heads=2))
    lengths = Lengths(torch.empty(9, dtype=torch.int32, device="meta"), 30)
    forward, backward = BACKENDS["cudnn"].lengths
    results = [(out, lse, *backward_of(dout, q, k, v, out, lse, how)) for forward_of, backward_of, how in (
        (forward, backward, lengths), (BACKENDS["flash"].forward, BACKENDS["flash"].backward, True))
        for out, lse in [forward_of(q, k, v, how)]]
    assert len({tuple((t.shape, t.dtype) for t in of) for of in results}) == 1
    # 2.11 has fewer of the others
    given = torch.ops.aten._flash_attention_forward.default._schema.arguments[:10]
    assert " ".join(a.name for a in given) == (
        "query key value cum_seq_q cum_seq_k max_q max_k dropout_p is_causal return_debug_mask")


@pytest.mark.parametrize("name,deterministic,said", [
    ("flash", False, ""), ("flash", True, " (documents one by one)"), ("cudnn", False,
                                                                       " (many documents by flash)")])
def test_the_label_says_what_many_documents_go_by(name, deterministic, said, monkeypatch):
    monkeypatch.setattr(attention_module, "facts_of", lambda *args: (
        facts((9, 0), deterministic=deterministic), {}))
    plain, packed = (resolve_attention(name, CUDA, torch.bfloat16, 128, documents=documents)
                     for documents in (False, True))
    assert packed.label == plain.label + said
    assert (packed.lengths is None) == ("one by one" in said)



def test_what_cannot_be_called_is_not_there(monkeypatch, tmp_path):
    fakes.install(monkeypatch)
    for name in ALL:
        with pytest.raises(Unusable, match="^it is not installed$"):
            installed_kernel(name)
    fakes.install(monkeypatch, "2.6.3")
    with pytest.raises(Unusable, match="^it is of another version: _flash_attn_forward wants window_size$"):
        installed_kernel("flash_attn_2")
    fakes.install(monkeypatch, "2.8.3")
    monkeypatch.delattr(sys.modules["flash_attn.flash_attn_interface"], "_flash_attn_varlen_backward")
    assert installed_kernel("flash_attn_2").lengths is None  # one document a sequence needs none
    fakes.install(monkeypatch, "3")
    monkeypatch.delattr(sys.modules["flash_attn_interface"], "_flash_attn_backward")
    with pytest.raises(Unusable, match="^it has no flash_attn_interface._flash_attn_backward$"):
        installed_kernel("flash_attn_3")
    fakes.install(monkeypatch)
    for folder, text in (("flash_attn/cute", f"def _flash_attn_fwd({fakes.FORWARD['4 beta 27']}): pass\n"
                                             f"def _flash_attn_bwd({fakes.BACKWARD['4 beta 27']}): pass"),
                         ("", "import a_library_of_another_torch")):
        (tmp_path / folder).mkdir(parents=True, exist_ok=True)
        (tmp_path / folder / ("interface.py" if folder else "flash_attn_interface.py")).write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    assert installed_kernel("flash_attn_4").takes_out
    with pytest.raises(Unusable, match="^it is not installed$"):  # although there is a folder flash_attn
        installed_kernel("flash_attn_2")
    with pytest.raises(Unusable,
                       match="^it cannot be imported .No module named 'a_library_of_another_torch'.$"):
        installed_kernel("flash_attn_3")


# --- the choice ---

def facts(capability, D=128, cudnn=92400, packages=(), deterministic=False, dtype="bfloat16", aligned=True):
    return Facts("cuda", dtype, D, deterministic, capability, cudnn, {name: "" for name in packages}, aligned)


NO_PACKAGE = "flash_attn_4 is not installed; flash_attn_3 is not installed"


@pytest.mark.parametrize("given, kernel, why", [
    (facts((9, 0), packages=ALL), "flash_attn_4", ""),
    (facts((9, 0), packages=["flash_attn_3"]), "flash_attn_3", "flash_attn_4 is not installed"),
    (facts((9, 0)), "cudnn", NO_PACKAGE),
    (facts((9, 0), packages=["flash_attn_2"]), "cudnn", NO_PACKAGE),
    (facts((9, 0), cudnn=91501), "cudnn", NO_PACKAGE),
    (facts((9, 0), cudnn=91500, packages=["flash_attn_2"]), "flash_attn_2",
     f"{NO_PACKAGE}; cudnn is 9.15: 9.15 and older are wrong where the tokens are no multiple of 128"),
    (facts((9, 0), cudnn=91900, aligned=False), "flash",
     f"{NO_PACKAGE}; cudnn is 9.19: before 9.26 gradients may be NaN where a rank's or subsequence's part of "
     "block_size is no multiple of 128; flash_attn_2 is not installed"),
    (facts((9, 0), cudnn=92600, aligned=False), "cudnn", NO_PACKAGE),
    (facts((10, 0), cudnn=91900, aligned=False), "cudnn", "flash_attn_4 is not installed"),
    (facts((9, 0), cudnn=0), "flash",
     f"{NO_PACKAGE}; cudnn is not part of this torch; flash_attn_2 is not installed"),
    (facts((9, 0), deterministic=True), "flash",
     f"{NO_PACKAGE}; cudnn needs deterministic=False; flash_attn_2 is not installed"),
    (facts((9, 0), deterministic=True, packages=ALL), "flash_attn_4", ""),
    (facts((9, 0), 256, deterministic=True, packages=ALL), "flash_attn_2",
     "flash_attn_4 needs head_dim=256 to be at most 128; flash_attn_3 needs head_dim=256 to be at most 192 "
     "or deterministic=False; cudnn needs head_dim=256 to be at most 128"),
    (facts((10, 0), packages=ALL), "flash_attn_4", ""),
    (facts((10, 3), packages=["flash_attn_3", "flash_attn_2"]), "cudnn", "flash_attn_4 is not installed"),
    (facts((10, 0), deterministic=True, packages=ALL), "flash_attn_4", ""),
    (facts((8, 0), packages=ALL), "flash_attn_2", ""),
    (facts((8, 0)), "flash", "flash_attn_2 is not installed"),
    (facts((8, 9)), "flash", "flash_attn_2 is not installed"),
    (facts((12, 0)), "flash", "flash_attn_2 is not installed"),
    (facts((8, 9), 208), "math",
     "flash_attn_2 is not installed; flash has no backward for head_dim=208 on this GPU; "
     "cudnn needs head_dim=208 to be at most 128"),
    (facts((8, 0), 208), "flash", "flash_attn_2 is not installed"),
])
def test_auto_takes_the_fastest_kernel_and_says_why_not_another(given, kernel, why):
    assert choose_kernel("auto", given) == (kernel, why)


@pytest.mark.parametrize("given", [facts((7, 5)), facts((9, 0), 65), facts((9, 0), 264),
                                   facts((9, 0), dtype="float32")])
def test_without_a_kernel_it_is_the_mathematics(given):
    assert choose_kernel("auto", replace(given, packages=ALL))[0] == "math"


@pytest.mark.parametrize("name, given, why", [
    ("flash_attn_3", facts((8, 0), packages=ALL), "it needs compute capability 9.x, this GPU has 8.0"),
    ("flash_attn_3", facts((10, 0), packages=ALL), "it needs compute capability 9.x, this GPU has 10.0"),
    ("flash_attn_4", facts((12, 0), packages=ALL),
     "it needs compute capability 9.x or 10.x or 11.x, this GPU has 12.0"),
    ("flash_attn_4", facts((9, 0)), "it is not installed"),
    ("cpu", facts((9, 0)), "it runs on the CPU only"),
    ("cudnn", Facts("cpu", "float32", 64), "it needs a CUDA device"),
])
def test_a_named_kernel_that_cannot_serve_is_an_error(name, given, why):
    with pytest.raises(ConfigError, match=f"^attention={name} is not available: {why}; try attention=auto$"):
        choose_kernel(name, given)
    assert choose_kernel("cudnn", facts((9, 0), cudnn=91002)) == ("cudnn", "")  # a name beats auto


def test_what_is_found_is_what_is_resolved_and_said(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.backends.cudnn, "is_available", lambda: True)
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 92400)
    monkeypatch.setattr(attention_module, "distributions",
                        lambda name: [SimpleNamespace(version={"flash_attn_3": "3.0.0"}[name])])

    def resolved(*versions, name="auto"):
        fakes.install(monkeypatch, *versions)
        return resolve_attention(name, CUDA, torch.bfloat16, 128)
    assert resolved("3").label == "flash_attn_3 3.0.0: flash_attn_4 is not installed"
    assert resolved().label == f"cudnn 9.24: {NO_PACKAGE}"
    assert resolved().forward is BACKENDS["cudnn"].forward
    fakes.install(monkeypatch, "3")
    monkeypatch.delattr(sys.modules["flash_attn_interface"], "_flash_attn_forward")
    label = resolve_attention("auto", CUDA, torch.bfloat16, 128).label
    assert label == ("cudnn 9.24: flash_attn_4 is not installed; flash_attn_3 has no "
                     "flash_attn_interface._flash_attn_forward")
    with pytest.raises(ConfigError, match="^attention=flash_attn_2 is not available: it is not installed"):
        resolved("3", name="flash_attn_2")
    assert resolve_attention("auto", CPU, torch.float32, 64).label == "cpu"


# --- memory and speed ---

@pytest.mark.parametrize("shape, deterministic, requests", [  # of torch's kernel on 132 multiprocessors
    ((1, 16384, 32, 128), False, [2097152, 268435456]), ((1, 16384, 32, 128), True, [2097152, 1342177280]),
    ((1, 131072, 4, 128), False, [2097152, 268435456]), ((1, 131072, 4, 128), True, [2097152, 8858370048]),
    ((1, 1000, 32, 128), True, [131072, 83886080])])
def test_what_a_kernel_takes_for_itself(shape, deterministic, requests):
    for name in ("flash", "flash_attn_2"):
        assert workspaces(name, shape, shape, deterministic, 132) == requests
    B, T, H, D = shape
    for name in ("flash_attn_3", "flash_attn_4"):  # no copies
        assert sum(workspaces(name, shape, shape, deterministic, 132)) == 4 * B * H * (T + -T % 128) * (D + 2)
    one, wider = (1, 128, 1, 72), (1, 128, 1, 136)
    assert workspaces("flash_attn_3", one, one)[-1] == 4 * 128 * 96
    assert workspaces("flash", wider, wider)[-1] == 4 * 128 * 192


def test_what_a_kernel_takes_where_query_heads_share_keys():
    """Half of a ring's keys: flash makes gradients of k and v for each query head, 3 and 4 sum in fp32."""
    q, k = (2, 1000, 8, 72), (2, 500, 2, 72)
    for name in ("flash", "flash_attn_2"):
        assert workspaces(name, q, k)[2:] == 2 * [2 * 2 * 500 * 8 * 72]
    assert workspaces("flash_attn_3", q, k)[3:] == 2 * [4 * 2 * 512 * 2 * 96]
    assert workspaces("flash_attn_4", q, k)[3:] == 2 * [4 * 2 * 512 * 2 * 96]
    for name in ("flash", "flash_attn_2", *ALL):
        own = workspaces(name, q, (2, 500, 8, 72))
        assert own == workspaces(name, q, k)[:-2]
    n, most = 4 * 8 * (2 * 1024 + 128 * 17), 16  # of 2,000 rows
    assert backends.most_documents(2000) == most
    assert workspaces("flash", q, k, documents=True) == [n, n * 96] + 2 * [2 * 2 * 500 * 8 * 72]
    assert workspaces("flash_attn_4", q, k, documents=True)[:3] == [n * 96, n, n]
    assert workspaces("flash", q, k, True, 132, True) == workspaces("flash", q, k, True, 132)  # one by one
    assert workspaces("cudnn", q, k, documents=True) == workspaces("flash", q, k, documents=True)
    assert workspaces("cudnn", q, (2, 500, 8, 72)) == [4 * 2 * 1000 * 8 * 73]  # one request for all
    assert workspaces("cudnn", q, k) == [4 * 2 * 8 * (1000 * 73 + 2 * 500 * 72)]


@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("name", ["flash", "cudnn", *ALL])
def test_a_trace_has_the_requests_of_its_kernel(name, kv_heads):
    """One group of heads of four: the results, and what lives while the kernel runs."""
    shape, shared = (1, 256, 4, 64), (1, 256, kv_heads, 64)
    kernel, arena = resolve_attention(name, torch.device("meta"), torch.bfloat16, 64), FakeArena(
        lambda op, args: kernel_requests(op, args, deterministic=True, multiprocessors=9))
    q, k, v, dout, out = (torch.empty(s, dtype=torch.bfloat16, device="meta")
                          for s in (shape, shared, shared, shape, shape))
    lse = torch.empty(1, 4, 256, device="meta")
    arena.run("forward", attend, alone(kernel, q.shape[1]), q, [(k, v)], out, lse)
    arena.run("backward", kernel.backward, dout, q, k, v, out, lse, True)
    segments = arena.recorded().segments
    sizes = {label: [event[-1] for event in events if event[0] == "malloc"]
             for label, events in segments.items()}
    tensor, row = 2 * 256 * 4 * 64, 4 * 256 * 4
    wanted = workspaces(name, shape, shared, True, 9)
    own = {"flash": 193, "flash_attn_2": 193, "cudnn": 65}.get(name, 66)
    shared_sums = {"flash": 64, "flash_attn_2": 64, "cudnn": 128}.get(name, 64) * (kv_heads < 4)
    assert sum(wanted) == row * (own + shared_sums) and sizes["backward"][-len(wanted):] == wanted
    results = sizes["backward"][:-len(wanted)]
    assert results.count(tensor) >= (3 if kv_heads == 4 else 1) and results.count(tensor * kv_heads // 4) >= 2
    assert sizes["forward"].count(tensor) == (name != "flash_attn_4") and row in sizes["forward"]


@pytest.mark.parametrize("T", [2**19, 2**19 + 1])
def test_cudnn_is_handed_nothing_that_32_bits_cannot_count(T):
    """Heads of a tensor (1, T, 32, 128) in bf16; of half a million tokens up to 2^31 elements apart."""
    handed = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, op, types, args=(), kwargs=None):
            if "cudnn" in str(op):
                handed.append([t for t in args if isinstance(t, torch.Tensor) and t.dim() == 4])
            return op(*args, **(kwargs or {}))
    cudnn = resolve_attention("cudnn", torch.device("meta"), torch.bfloat16, 128)
    q, k, v, dout, out = (torch.empty(1, T, 32, 128, dtype=torch.bfloat16, device="meta") for _ in range(5))
    lse = torch.empty(1, 32, T, device="meta")
    with Watch():
        attend(alone(cudnn, q.shape[1]), q, [(k, v)], out, lse)
        attend_backward(alone(cudnn, q.shape[1]), dout, q, [(k, v)], [], out, lse)
    assert len(handed) == 64
    spans = {sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True)) for ts in handed for t in ts}
    assert max(spans) < 2**31
    assert {t.stride(2) for t in handed[0]} == {4096 if T == 2**19 else 128}  # no copies that nobody needs


def test_the_estimate_knows_the_kernel():
    cfg, h100 = load_config(["config/7b_1m.py", "--subsequences=1"]), hardware.machine("h100-80gb")

    def of(machine=h100, **keys):
        return budget.estimate(replace(cfg, **keys), machine, 8, budget.fast_arena)

    def kernel(got):
        return got.layer.units[0].unit.kernel
    assert kernel(of()) == "cudnn" == kernel(of(hardware.machine("b200")))
    assert kernel(of(hardware.machine("a800-80gb"))) == "flash" == kernel(of(deterministic=True))
    assert of(attention="flash").seconds["step"] > 1.5 * of().seconds["step"]
    kernels_s = [of(attention=name).layer.units[0].attention_kernels_s
                 for name in ("flash_attn_4", "flash_attn_3", "cudnn", "flash_attn_2", "flash")]
    assert kernels_s[0] < kernels_s[1] < kernels_s[2] < kernels_s[3] == kernels_s[4]
    slower = of(attention="flash_attn_4", deterministic=True)
    assert kernels_s[0] < slower.layer.units[0].attention_kernels_s < kernels_s[2]
    T, H = cfg.block_size // 2, 8
    flops = 2 * T * 2 * T / 2 * 2 / 2 * H * 128  # of the forward: two products, half of the scores, cp=2
    causal, full = (2 * flops / f + 5 * flops / b for f, b in ((619e12, 528e12), (622e12, 543e12)))
    assert kernels_s[2] == pytest.approx((causal + full) / 2, rel=2e-3)
    with pytest.raises(ConfigError,
                       match="^attention=flash_attn_3 is not available: it needs compute capability 9.x"):
        of(hardware.machine("a800-80gb"), attention="flash_attn_3")


def test_the_copies_of_a_deterministic_backward_are_counted_and_have_a_remedy():
    cfg = load_config(["config/7b_1m.py", "--subsequences=1", "--deterministic=true",
                       "--states=device"])
    h100 = hardware.machine("h100-80gb")
    got = budget.estimate(cfg, h100, 8, budget.fast_arena)
    plain = budget.estimate(replace(cfg, attention="flash", deterministic=False), h100, 8, budget.fast_arena)
    copies = 132 * 4 * (cfg.block_size // cfg.cp) * 128
    more = got.bytes_of("transient")[0] - plain.bytes_of("transient")[0]
    assert 0.97 * copies < more < 1.02 * copies and not got.fits and plain.fits
    assert any("--attention=flash_attn_4" in text for text, _ in search.remedies(got))
    a100 = hardware.machine("a100-80gb")
    got = budget.estimate(replace(cfg, block_size=2**19), replace(a100, memory_bytes=40 * 2**30), 8,
                          budget.fast_arena)
    assert any("--deterministic=False" in text for text, _ in search.remedies(got, most=99))


def test_config_offers_every_kernel():
    for name in (*BACKENDS, *backends.PACKAGES):
        assert Config(attention=name).attention == name
