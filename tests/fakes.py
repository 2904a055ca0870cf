"""The flash-attn packages' functions with the signatures of their versions, computed by the mathematics on
the CPU. Each is strict: what memo does not hand in must have the value that switches it off."""

import inspect
import sys
from itertools import pairwise
from types import ModuleType

import torch

from memo.kernels.attention import INTERFACES, math_backward, math_forward

FORWARD = {
    "2.6.3": "q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, return_softmax",
    "2.8.3": """q, k, v, dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap,
        alibi_slopes, return_softmax""",
    "3 of 2.8.3": """q, k, v, k_new, v_new, qv, out, cu_seqlens_q, cu_seqlens_k, cu_seqlens_k_new, seqused_q,
        seqused_k, max_seqlen_q, max_seqlen_k, page_table, kv_batch_idx, leftpad_k, rotary_cos, rotary_sin,
        seqlens_rotary, q_descale, k_descale, v_descale, softmax_scale, causal, window_size=(-1, -1),
        attention_chunk=0, softcap=0.0, rotary_interleaved=True, scheduler_metadata=None, num_splits=1,
        pack_gqa=None, sm_margin=0""",
    "3": """q, k, v, k_new=None, v_new=None, qv=None, out_=None, cu_seqlens_q=None, cu_seqlens_k=None,
        cu_seqlens_k_new=None, seqused_q=None, seqused_k=None, max_seqlen_q=None, max_seqlen_k=None,
        page_table=None, kv_batch_idx=None, leftpad_k=None, rotary_cos=None, rotary_sin=None,
        seqlens_rotary=None, q_descale=None, k_descale=None, v_descale=None, softmax_scale=None, causal=False,
        window_size_left=-1, window_size_right=-1, attention_chunk=0, softcap=0.0, rotary_interleaved=True,
        scheduler_metadata=None, num_splits=1, pack_gqa=None, sm_margin=0""",
    "4 beta 0": """q, k, v, cu_seqlens_q=None, cu_seqlens_k=None, seqused_q=None, seqused_k=None,
        max_seqlen_q=None, max_seqlen_k=None, page_table=None, softmax_scale=None, causal=False, softcap=None,
        window_size_left=None, window_size_right=None, learnable_sink=None, m_block_size=128,
        n_block_size=128, num_threads=384, num_splits=1, pack_gqa=None, _arch=None, score_mod=None,
        mask_mod=None, block_sparse_tensors=None, return_lse=False, out=None, lse=None, aux_tensors=None""",
    "4 beta 27": """q, k, v, qv=None, cu_seqlens_q=None, cu_seqlens_k=None, seqused_q=None, seqused_k=None,
        max_seqlen_q=None, max_seqlen_k=None, min_seqlen_k=None, page_table=None, softmax_scale=None,
        causal=False, softcap=None, window_size_left=None, window_size_right=None, learnable_sink=None,
        tile_mn=None, mma_pv_is_rs=None, intra_wg_overlap=None, num_threads=384, num_splits=1, pack_gqa=None,
        _arch=None, score_mod=None, mask_mod=None, block_sparse_tensors=None, return_lse=False, out=None,
        lse=None, aux_tensors=None, aux_scalars=None, q_descale=None, k_descale=None, v_descale=None,
        gather_kv_indices=None, scheduler_metadata=None, seqlen_k_per_split=None,
        disable_scheduler_metadata=False""",
}
BWD4 = """q, k, v, out, dout, lse, softmax_scale=None, causal=False, softcap=0.0, window_size_left=None,
    window_size_right=None, m_block_size=64, n_block_size=128, num_threads=256, pack_gqa=False,
    num_stages_Q=2, num_stages_dO=2, SdP_swapAB=False, dKV_swapAB=False, dQ_swapAB=False, AtomLayoutMSdP=2,
    AtomLayoutNdKV=2, AtomLayoutMdQ=2, V_in_regs=False, cu_seqlens_q=None, cu_seqlens_k=None, seqused_q=None,
    seqused_k=None, max_seqlen_q=None, max_seqlen_k=None, deterministic=False, dq=None, dk=None, dv=None,
    score_mod=None, score_mod_bwd=None, mask_mod=None, aux_tensors=None, """
BACKWARD = {
    "2.6.3": """dout, q, k, v, out, softmax_lse, dq, dk, dv, dropout_p, softmax_scale, causal, window_size,
        softcap, alibi_slopes, deterministic, rng_state=None""",
    "2.8.3": """dout, q, k, v, out, softmax_lse, dq, dk, dv, dropout_p, softmax_scale, causal,
        window_size_left, window_size_right, softcap, alibi_slopes, deterministic, rng_state=None""",
    "3 of 2.8.3": """dout, q, k, v, out, softmax_lse, cu_seqlens_q, cu_seqlens_k, sequed_q, sequed_k,
        max_seqlen_q, max_seqlen_k, dq, dk, dv, softmax_scale, causal, window_size=(-1, -1), softcap=0.0,
        deterministic=False, sm_margin=0""",
    "3": """dout, q, k, v, out, softmax_lse, cu_seqlens_q=None, cu_seqlens_k=None, sequed_q=None,
        sequed_k=None, max_seqlen_q=None, max_seqlen_k=None, dq=None, dk=None, dv=None, softmax_scale=None,
        is_causal=False, window_size_left=-1, window_size_right=-1, softcap=0.0, deterministic=False,
        sm_margin=0""",
    "4 beta 0": BWD4 + "block_sparse_tensors=None",
    "4 beta 27": BWD4 + "aux_scalars=None, block_sparse_tensors=None, dlse=None, learnable_sink=None",
}
VARLEN = "cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, "
# {version: (forward, backward) of lengths}, where they are functions of their own
LENGTHS = {"2.8.3": ("q, k, v, " + VARLEN + """dropout_p, softmax_scale, causal, window_size_left=-1,
    window_size_right=-1, softcap=0.0, alibi_slopes=None, return_softmax=False, block_table=None,
    leftpad_k=None, seqused_k=None, zero_tensors=False""", "dout, q, k, v, out, softmax_lse, dq, dk, dv, "
    + VARLEN + """dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap,
    alibi_slopes, deterministic, rng_state=None, zero_tensors=False""")}
KERNEL = {"2": "flash_attn_2", "3": "flash_attn_3", "4": "flash_attn_4"}
TENSORS = ("dout", "q", "k", "v", "out", "softmax_lse", "dq", "dk", "dv")
OURS = {*TENSORS, "lse", "softmax_scale", "causal", "is_causal", "deterministic", "return_lse", "out_"}
FIXED = dict(dropout_p=0.0, window_size_left=(-1, None), window_size_right=(-1, None), softcap=(0.0, None),
             return_softmax=False, window_size=((-1, -1),))


def check(given):
    """What is not handed in by memo must have the value that switches it off."""
    for name, value in given.items():
        if name in FIXED:
            wanted = FIXED[name] if isinstance(FIXED[name], tuple) else (FIXED[name],)
            assert value in wanted, (name, value)
        elif name.startswith(("alibi", "k_new", "v_new", "qv", "cu_seqlens_k_new", "seqused", "sequed",
                              "page", "block_table", "kv_", "leftpad", "rotary_c", "rotary_s", "seqlens",
                              "q_de", "k_de", "v_de")):
            assert value is None, name
        elif name.startswith(("cu_", "max_")):
            assert (value is None) == (given["q"].dim() == 4), name


def in_documents(kernel, a, causal, tensors, lse=()):
    """Calls a kernel of the mathematics; with lengths, where a tensor is (rows, H, D) and lse (H, rows), for
    each document."""
    if a["q"].dim() == 4:
        return kernel(*tensors, *lse, causal)
    starts = a["cu_seqlens_q"]
    assert causal and starts is a["cu_seqlens_k"] and starts.dtype is torch.int32
    assert max(starts.diff()) <= a["max_seqlen_q"] == a["max_seqlen_k"]
    results = [[t[0] for t in kernel(*(t[None, first:end] for t in tensors),
                                     *(t[None, :, first:end] for t in lse), causal)]
               for first, end in pairwise(starts.tolist())]
    return [torch.cat(parts, 1 if parts[0].dim() == 2 else 0) for parts in zip(*results, strict=True)]


def function(name, signature, body):
    scope = dict(body=body)
    exec(f"def {name}({signature}):\n    return body(dict(locals()))", scope)
    return scope[name]


def forward(version):
    def body(a):
        check(a)
        assert a["softmax_scale"] == a["q"].shape[-1]**-0.5
        out, lse = in_documents(math_forward, a, a["causal"], (a["q"], a["k"], a["v"]))
        if a.get("out") is not None:
            out = a["out"].copy_(out)
        assert a.get("out_") is None
        if version.startswith("4"):
            assert a["return_lse"]
            return (out, lse) if version == "4 beta 0" else (out, lse, None, None)
        return out, lse, torch.zeros(0), torch.zeros(0)
    return body


def backward(version):
    def body(a):
        check(a)
        causal = a["is_causal"] if "is_causal" in a else a["causal"]
        lse = a["lse"] if "lse" in a else a["softmax_lse"]
        assert a["softmax_scale"] == a["q"].shape[-1]**-0.5
        gradients = in_documents(math_backward, a, causal,
                                 [a[n] for n in ("dout", "q", "k", "v", "out")], [lse])
        assert lse.is_contiguous() and a["deterministic"] is torch.are_deterministic_algorithms_enabled()
        for name, g in zip(("dq", "dk", "dv"), gradients, strict=True):
            a[name].copy_(g)
        if version in ("2.8.3", "3"):
            return torch.zeros_like(lse)
        return a["dq"], a["dk"], a["dv"], None
    return body


def custom_op(name, f, mutates, results):
    """`f` as torch.library.custom_op has it: it hides the signature, and no result may be an argument."""
    kinds = dict(causal="bool", is_causal="bool", deterministic="bool", return_softmax="bool",
                 rotary_interleaved="bool", zero_tensors="bool",
                 dropout_p="float", softmax_scale="float?", softcap="float",
                 alibi_slopes="Tensor?", pack_gqa="bool?", max_seqlen_q="int?", max_seqlen_k="int?",
                 window_size_left="int", window_size_right="int", attention_chunk="int", num_splits="int",
                 sm_margin="int")
    parts = []
    for n, p in inspect.signature(f).parameters.items():
        kind = kinds.get(n, "Tensor" if n in TENSORS else "Tensor?")
        default = "" if p.default is p.empty else f"={p.default}"
        if n in mutates:
            kind = f"Tensor({'abc'[mutates.index(n)]}!)" + "?" * bool(default)
        parts.append(f"{kind} {n}{default}")
    schema = f"({', '.join(parts)}) -> {results}"
    return torch.library.custom_op(name, f, mutates_args=mutates, schema=schema, device_types="cpu")


def package(version):
    """(kernel, {module name: module}) of one version."""
    kernel = KERNEL[version[0]]
    names, calls = INTERFACES[kernel][2:], {}
    for signatures, pair in (((FORWARD[version], BACKWARD[version]), names[:2]),
                             (LENGTHS.get(version), names[2:])):
        if signatures is None:
            continue
        f, b = (function(name, signature, make(version)) for name, signature, make in
                zip(pair, signatures, (forward, backward), strict=True))
        if version in ("2.8.3", "3"):
            space = f"fake_{version.replace('.', '_')}_{len(OPS)}"
            OPS.append(space)
            f = custom_op(f"{space}::f", f, (), "(Tensor, Tensor, Tensor, Tensor)")
            b = custom_op(f"{space}::b", b, ("dq", "dk", "dv"), "Tensor")
        calls |= dict(zip(pair, (f, b), strict=True))
    name = INTERFACES[kernel][1]
    parts, modules = name.split("."), {}
    for i in range(len(parts)):
        modules[".".join(parts[:i + 1])] = ModuleType(".".join(parts[:i + 1]))
    vars(modules[name]).update(calls)
    for parent in list(modules)[:-1]:
        modules[parent].__path__ = []
    return kernel, modules


OPS = []


def install(monkeypatch, *versions):
    """Puts these versions where they are imported from, and nothing else of that kind."""
    for known in [m for m in sys.modules if m.split(".")[0] in ("flash_attn", "flash_attn_interface")]:
        monkeypatch.delitem(sys.modules, known)
    for version in versions:
        for name, module in package(version)[1].items():
            monkeypatch.setitem(sys.modules, name, module)
