"""A2 and A3: each kernel against fp64 on fresh random inputs. Outputs are filled with NaN before, and so is
the memory that a kernel will get for itself."""

import torch

from bench.gpu_hour.items import BF16
from bench.gpu_hour.notes import Skip, device, free_memory
from memo.kernels import fp8, matmul
from memo.kernels.attention import BACKENDS, facts_of
from memo.kernels.backends import RIGHT_CUDNN, missing, order
from memo.kernels.ops import lacking, resolve_ops, rotations
from memo.system.axis import Axis

EPS, SUMS = 1e-5, 1e-4  # what gradients of norms, sums over all rows in fp32, may be away
FP8_SUMS = 1e-3  # of FP8 products in fp32: Hopper adds up with fewer bits
WIDTHS = (4096, 5120, 8192, 12288)
GRADIENT = 2 * BF16  # attention's: two factors of it are rounded to bf16


def random(*sizes, dtype=torch.bfloat16):
    return torch.randn(sizes, dtype=dtype, device=device())


def empty(*sizes, dtype=torch.bfloat16):
    """Poisoned."""
    return torch.full(sizes, torch.nan, dtype=dtype, device=device())


def poison(nbytes=2**28):
    """Fills memory that torch's allocator gives away next."""
    for n in (nbytes, 2**20, 2**19):
        torch.full((n // 4,), torch.nan, device=device())


def doubles(*tensors):
    return [t if t is None else t.double().requires_grad_() for t in tensors]


# --- the fused kernels: {field of memo.kernels.ops.Ops: who checks it} ---

def norm(notes, ops, N, C, dtype, mean, bias, residual):
    what = (f"{'layer' if mean else 'rms'} norm N={N} C={C} {str(dtype)[6:]}" + " bias" * bias
            + " residual" * residual)
    limit = BF16 if dtype == torch.bfloat16 else 1e-6
    x, dy, rest = (random(N, C, dtype=dtype) for _ in range(3))
    x += 0.5  # a mean that is not zero
    w, b = 1 + random(C, dtype=dtype) / 4, random(C, dtype=dtype) if bias else None
    out, into = empty(N, C, dtype=dtype), empty(N, C, dtype=dtype)
    m, rstd = (empty(N, dtype=torch.float32) if mean else None), empty(N, dtype=torch.float32)
    ops.norm_forward(x, w, b, out, m, rstd, EPS)
    x_, w_, b_ = doubles(x, w, b)
    if mean:
        want = torch.nn.functional.layer_norm(x_, (C,), w_, b_, EPS)
    else:
        want = x_ * (x_.square().mean(1, keepdim=True) + EPS).rsqrt() * w_
    want.backward(dy.double())
    notes.error(f"{what} forward", out, want.detach(), limit)
    dw, db = torch.ones(C, device=device()), torch.ones(C, device=device()) if bias else None
    poison()
    ops.norm_backward(rest if residual else None, dy, x, m, rstd, w, b, dw, db, into)
    notes.error(f"{what} backward", into, x_.grad + (rest.double() if residual else 0), limit)
    notes.error(f"{what} gradient of w", dw - 1, w_.grad, SUMS)
    if bias:
        notes.error(f"{what} gradient of b", db - 1, b_.grad, SUMS)


def norms(notes, ops):
    many = 65536 if torch.cuda.get_device_properties(device()).total_memory > 40e9 else 16384
    shapes = [(N, C) for C in WIDTHS for N in (1, 257)] + [(many, 4096), (4096, 12288)]
    for N, C in shapes:
        for mean, bias, residual in ((True, False, True), (True, True, False), (False, False, True)):
            with notes.trying(f"norm N={N} C={C} mean={mean}"):
                norm(notes, ops, N, C, torch.bfloat16, mean, bias, residual)
    for N, C in ((257, 4096), (257, 12288)):
        for mean in (True, False):
            with notes.trying(f"norm N={N} C={C} mean={mean} fp32"):
                norm(notes, ops, N, C, torch.float32, mean, mean, True)


def rotary(notes, ops):
    for dtype, limit in ((torch.float32, 1e-6), (torch.bfloat16, BF16)):
        for n, tp, heads, D in ((1, 1, 32, 128), (257, 2, 40, 128), (4096, 1, 96, 64)):
            x = random(n, tp, heads * D, dtype=dtype)
            turn = rotations(torch.arange(10**6, 10**6 + n * tp, device=device()), D, 1e4).view(n, tp, D // 2)
            pairs = torch.view_as_complex(x.double().view(n, tp, heads, D // 2, 2))
            for back in (False, True):
                there = (turn.conj() if back else turn).to(torch.complex128)
                want = torch.view_as_real(pairs * there[:, :, None]).reshape(x.shape)
                ops.rotary(got := x.clone(), turn, back)
                notes.error(f"rotary n={n} tp={tp} heads={heads} D={D} back={back} {str(dtype)[6:]}", got,
                            want, limit)


def merge(notes, ops):
    for T, H in ((1, 32), (257, 40), (8192, 8)):
        out, out_ = random(1, T, H, 128, dtype=torch.float32), random(1, T, H, 128)
        lse, lse_ = (8 * random(1, H, T, dtype=torch.float32) for _ in range(2))
        both = torch.logaddexp(lse.double(), lse_.double())
        mine, theirs = ((part.double() - both).exp().transpose(1, 2)[..., None] for part in (lse, lse_))
        want = out.double() * mine + out_.double() * theirs
        ops.merge(out, lse, out_, lse_)
        notes.error(f"merge T={T} H={H}", out, want, 1e-6)
        notes.error(f"merge T={T} H={H} lse", lse, both, 1e-6)


def swiglu(notes, ops):
    for dtype, limit in ((torch.float32, 1e-6), (torch.bfloat16, 2 * BF16)):
        for shape in ((1, 1, 11008), (257, 2, 13824)):
            gate, up, dy = (3 * random(*shape, dtype=dtype) for _ in range(3))
            gate_, up_ = doubles(gate, up)
            want = gate_ * gate_.sigmoid() * up_
            want.backward(dy.double())
            what, out = f"swiglu {shape} {str(dtype)[6:]}", empty(*shape, dtype=dtype)
            ops.swiglu_forward(gate, up, out)
            notes.error(f"{what} forward", out, want.detach(), limit)
            ops.swiglu_backward(dy.clone(), gate, up)
            notes.error(f"{what} gradient of gate", gate, gate_.grad, limit)
            notes.error(f"{what} gradient of up", up, up_.grad, limit)


def cross_entropy(notes, ops):
    for dtype, limit in ((torch.float32, 1e-6), (torch.bfloat16, BF16)):
        for rows, V in ((1, 128), (257, 50304), (1024, 151936)):
            logits, target = 4 * random(rows, V, dtype=dtype), torch.randint(V, (rows,), device=device())
            want, = doubles(logits)
            log_p = want.log_softmax(1).gather(1, target[:, None])[:, 0]
            log_p.sum().neg().backward()
            what = f"cross entropy of {rows} x {V} {str(dtype)[6:]}"
            got, dlogits = ops.cross_entropy(Axis("tp"), logits, target, gradient=True)
            notes.error(what, got, log_p.detach(), 1e-6)
            notes.error(f"{what} gradient", dlogits, want.grad, limit)


CHECKS = dict(norm_forward=norms, norm_backward=norms, rotary=rotary, merge=merge, swiglu_forward=swiglu,
              swiglu_backward=swiglu, cross_entropy=cross_entropy)


# --- attention ---

def attentions(asked):
    """{name: Attention} of the kernels that can be called here."""
    known, found = facts_of(device(), torch.bfloat16, 128, True)
    names = order(known) if asked.attention == "auto" else (asked.attention,)
    return {name: found.get(name) or BACKENDS[name] for name in names
            if name != "math" and not missing(name, known)}


def plain_attention(q, k, v, dout, causal, scale):
    """(out, lse, dq, dk, dv) of one sequence in fp64, under autograd, head by head."""
    q_, k_, v_ = doubles(q, k, v)
    outs, lses, sharing = [], [], q.shape[2] // k.shape[2]
    for h in range(q.shape[2]):
        scores = q_[0, :, h] @ k_[0, :, h // sharing].t() * scale
        if causal:
            scores = scores.masked_fill(torch.ones_like(scores).triu(1).bool(), -torch.inf)
        outs.append(scores.softmax(-1) @ v_[0, :, h // sharing])
        lses.append(scores.logsumexp(-1).detach())
    out = torch.stack(outs, 1)[None]
    out.backward(dout.double())
    return out.detach(), torch.stack(lses)[None], q_.grad, k_.grad, v_.grad


def compare(notes, what, attention, tensors, causal, judged=True, gradient=GRADIENT):
    q, k, v, dout = tensors
    scale, limits = q.shape[-1]**-0.5, (BF16, SUMS, *3 * [gradient])
    out, lse, *wanted = plain_attention(q, k, v, dout, causal, scale)
    poison()
    got, got_lse = attention.forward(q, k, v, causal)
    poison()
    grads = attention.backward(dout, q, k, v, got, got_lse.contiguous(), causal)
    for name, a, b, limit in zip(("out", "lse", "dq", "dk", "dv"), (got, got_lse, *grads),
                                 (out, lse, *wanted), limits, strict=True):
        if judged:
            notes.error(f"{what} {name}", a, b, limit)
        else:
            notes.line(f"{what} {name}: known to fail, and passed over by memo",
                       (a.double() - b).norm().item() / b.norm().item(), limit, "away")


def strided(T, low=False):
    """q, k, v, dout of 8 and 2 heads that are cut out of 32 and 8. `low`: all scores of a row near -120."""
    q, k, v, dout = (random(1, T, heads, 128) for heads in (32, 8, 8, 32))
    if low:  # -128 3.5^2 over the root of 128, and noise
        q += 3.5
        k -= 3.5
    return q[:, :, 8:16], k[:, :, 2:4], v[:, :, 2:4], dout[:, :, 8:16]


def attention(notes, asked):
    cudnn = torch.backends.cudnn.version() or 0
    old = cudnn < RIGHT_CUDNN and torch.cuda.get_device_capability(device())[0] == 9
    for name, kernel in attentions(asked).items():
        for T in (2048, 1000, 192):
            for causal in (True, False):
                with notes.trying(f"attention {name} T={T} causal={causal}"):
                    compare(notes, f"attention {name} T={T} causal={causal}", kernel, strided(T), causal)
        with notes.trying(f"attention {name} 1000 queries, 192 keys"):
            q, *_, dout = strided(1000)
            _, k, v, _ = strided(192)
            compare(notes, f"attention {name} 1000 queries, 192 keys", kernel, (q, k, v, dout), False)
        for T in (192, 2048 + 64):
            what = f"attention {name} T={T}, lse below -88.7"
            with notes.trying(what):
                compare(notes, what, kernel, strided(T, low=True), False, not (name == "cudnn" and old),
                        2 * GRADIENT)  # keys have a mean of 3.5, which the rounding of each score moves


# --- products ---

def products(notes, kind, linear):
    """y, dx and dw of a linear with a Matmul, against fp64 of what its operands hold."""
    dy, x, w = random(1, 4096, 5120), random(1, 4096, 4096), random(5120, 4096) / 64
    y, dx, dw = empty(1, 4096, 5120), empty(1, 4096, 4096), torch.ones(5120, 4096, device=device())
    taken, g = linear.rows(x), linear.gradients(dy)
    linear.forward(taken, w, y)
    linear.input_gradient(g, w, dx)
    linear.weight_gradient(dw, g, taken)
    x_, w_, dy_ = x, w, dy
    if kind == "fp8":
        matrix = fp8.weights(w)
        x_, w_ = taken.q.double() * taken.scale[..., None], matrix.q.double() * matrix.scale
        dy_ = fp8.rounded(dy, g.scale[..., None], fp8.E5M2).double() * g.scale[..., None]
    notes.error(f"{kind} product y", y, x_.double() @ w_.double().t(), BF16)
    notes.error(f"{kind} product dx", dx, dy_.double() @ w_.double(), BF16)
    notes.error(f"{kind} product dw in fp32", dw - 1, dy_[0].double().t() @ x_[0].double(),
                FP8_SUMS if kind == "fp8" else 1e-5)


def kernels(notes, asked):
    torch.manual_seed(0)
    ops, why = resolve_ops("auto", device())
    absent = lacking("triton", device())
    if absent:
        notes.skip("fused kernels", absent)
    elif why:
        notes.line("fused kernels", why, ok=False)
    for check in dict.fromkeys(CHECKS.values()) if not absent else ():
        with notes.trying(check.__name__):
            check(notes, ops)
        free_memory()
    attention(notes, asked)
    for name, linear in matmul.MATMULS.items():
        with notes.trying(f"{name} products"):
            if name == "fp8" and (why := fp8.failing(device())):
                raise Skip(f"no FP8 products: {why}")
            products(notes, name, linear)


# --- A3: more elements than 32 bits count ---

ROWS = 4096  # that are compared, at each end


def far(notes, name, kernel, whole):
    """One query head and one key head of 32, T * 4096 elements from first to last row, against copies."""
    picked = [whole[:, :, h:h + 1] for h in (31, 7, 23, 15)]  # q, k, v, dout
    copies = [t.contiguous() for t in picked]
    results = []
    for q, k, v, dout in (picked, copies):
        poison()
        out, lse = kernel.forward(q, k, v, True)
        grads = kernel.backward(dout, q, k, v, out, lse.contiguous(), True)
        results.append((out, *grads))
        del out, lse, grads
    for what, got, want in zip(("out", "dq", "dk", "dv"), *results, strict=True):
        for rows in (slice(0, ROWS), slice(-ROWS, None)):
            notes.error(f"attention {name}, {whole.shape[1]:,} tokens 4096 apart: {what}, "
                        f"{'first' if rows.start == 0 else 'last'} rows", got[:, rows],
                        want[:, rows].double(), BF16)


def large(notes, asked):
    """A3. Errors: Skip where the device is too small."""
    free, _ = torch.cuda.mem_get_info(device())
    T = min(asked.longest, 2**20 if free > 30e9 else 2**19 + ROWS)
    if free < 2 * T * 4096 * 2 + 2**32:
        raise Skip(f"{free / 2**30:.3g} GiB are free, too few for two tensors of 2^31 elements")
    torch.manual_seed(0)
    whole = torch.empty(1, T, 32, 128, dtype=torch.bfloat16, device=device()).normal_()
    for name, kernel in attentions(asked).items():
        with notes.trying(f"attention {name}"):
            far(notes, name, kernel, whole)
    ops, _ = resolve_ops("auto", device())
    rows = whole.view(T, 4096)[:min(T, 2**19 + ROWS)]
    turn = rotations(torch.arange(len(rows), device=device()), 128, 1e4)
    ends, rstd = [slice(0, ROWS), slice(len(rows) - ROWS, len(rows))], empty(len(rows), dtype=torch.float32)
    calls = dict(
        norm=lambda x, r: ops.norm_forward(x, random(4096), None, x, None, rstd[r], EPS),
        rotary=lambda x, r: ops.rotary(x[:, None], turn[r][:, None], False),
        swiglu=lambda x, r: ops.swiglu_forward(x, x, x))
    for name, call in calls.items():
        with notes.trying(name):
            torch.manual_seed(1)
            small = [rows[r].clone() for r in ends]
            for x, r in zip(small, ends, strict=True):
                torch.manual_seed(1)
                call(x, r)
            torch.manual_seed(1)
            call(rows, slice(0, len(rows)))
            for x, r, end in zip(small, ends, ("first", "last"), strict=True):
                notes.error(f"{name} over {rows.numel():,} elements, {end} rows", rows[r], x.double(), BF16)
