"""A GPT whose forward and backward are written out by hand: what lives where, and when, can be read here.

    B, T, N   sequences, tokens in each, and their rows N = B*T: row b*T + t is token t of sequence b
    C, H, D   hidden size, heads, head dimension C/H
    V         vocabulary, padded in memory to a multiple of 128 (the padding never gets a probability)
    s         the skeletal activations of one layer: named views of one buffer, see memo/activations.py
    dy, dx    gradients of the loss; parameter gradients accumulate in fp32

Every piece is a pair x_forward / x_backward. Pieces write where they are told (`out`), and the backward writes over
skeletal tensors that nobody reads any more, so that a layer needs hardly any memory besides its skeletal buffer.
Source: the layer of MEMO section 3.1 (pre-norm GPT).
"""

import math
from types import SimpleNamespace

import torch

from memo.activations import TABLE, Placement
from memo.allocator import NoArena
from memo.attention import resolve_attention
from memo.flat import flat_layout, numel, views
from memo.swap import Swap

aten = torch.ops.aten
LAYERNORM_EPS = 1e-5
HEAD_ROWS = 1024  # tokens whose logits exist at once
TINY = torch.finfo(torch.float32).tiny  # the loss of one token ends at -log of this, 87
CHUNK_ROWS = 2**16  # of what is done row by row: bounds its temporaries, and its indices stay below 2^31
EVERY_ROW = {t.name: slice(None) for t in TABLE}


def chunks(*tensors):
    """The tensors, cut into the same ranges of rows."""
    return zip(*(t.split(CHUNK_ROWS) for t in tensors), strict=True)


# --- linear: y = x w^T + b ---

def linear_forward(x, w, b, out):  # (N, I), (O, I), (O,) or None -> (N, O)
    return torch.mm(x, w.t(), out=out) if b is None else torch.addmm(b, x, w.t(), out=out)


def residual_linear_forward(residual, x, w, b, out):  # residual + x w^T + b
    torch.addmm(residual, x, w.t(), out=out)
    return out if b is None else out.add_(b)


def linear_backward(dy, x, w, dw, db, out, beta=0):  # dx = dy w, onto beta * out; `out` may be x itself
    accumulate_product(dw, dy.t(), x)
    if db is not None:
        db += dy.sum(0, dtype=torch.float32)
    return torch.addmm(out, dy, w, beta=beta, out=out)


def accumulate_product(dw, a, b):
    """dw += a b, where dw is fp32 whatever a and b are."""
    if a.dtype == dw.dtype:
        dw.addmm_(a, b)
    elif not a.is_cpu:
        aten.addmm.dtype_out(dw, a, b, torch.float32, out=dw)
    else:
        dw += a @ b


# --- layer norm: y = (x - mean) rstd w + b ---

def layernorm_operands(*tensors):
    """On the CPU in fp32: torch's bf16 kernel there sums the gradients of w and b in bf16 (5% off at 3,000 rows)."""
    return [t if t is None or not t.is_cpu else t.float() for t in tensors]


def layernorm_forward(x, w, b, out, mean, rstd):  # (N, C), (C,), (C,) -> (N, C), (N,), (N,)
    for x_, out_, mean_, rstd_ in chunks(x, out, mean, rstd):
        x_, w, b = layernorm_operands(x_, w, b)
        y, m, r = torch.native_layer_norm(x_, x_.shape[-1:], w, b, LAYERNORM_EPS)
        out_.copy_(y)
        mean_.copy_(m.view(-1))
        rstd_.copy_(r.view(-1))


def layernorm_backward(dy, x, mean, rstd, w, b, dw, db):  # -> dx (N, C)
    dy, x, w, b = layernorm_operands(dy, x, w, b)
    dx, dw_, db_ = aten.native_layer_norm_backward(dy, x, x.shape[-1:], mean[:, None], rstd[:, None], w, b,
                                                   [True, True, b is not None])
    dw += dw_
    if b is not None:
        db += db_
    return dx


def residual_layernorm_backward(residual, dy, x, mean, rstd, *parameters, out):  # residual + dx; `out` may be any of them
    for residual_, out_, *operands in chunks(residual, out, dy, x, mean, rstd):
        torch.add(residual_, layernorm_backward(*operands, *parameters), out=out_)
    return out


# --- GELU: y = x P(Z <= x), or its tanh approximation ---

def gelu_forward(x, form, out):
    return aten.gelu.out(x, approximate=form, out=out)


def gelu_backward(dy, x, form, out):  # `out` may be dy itself
    return aten.gelu_backward.grad_input(dy, x, approximate=form, grad_input=out)


# --- rotary positions: a head's pairs, read as complex numbers, are turned by e^(i t theta_j) ---

def rotations(positions, D, theta):
    """(N,) int64 -> e^(i t theta^(-2j/D)) as (N, D/2) complex64, angles in fp64: exact at millions of tokens."""
    frequencies = theta ** (torch.arange(0, D, 2, dtype=torch.float64, device=positions.device) / -D)
    table = torch.empty(len(positions), D // 2, dtype=torch.complex64, device=positions.device)
    for rows, t in zip(table.split(2**16), positions.split(2**16), strict=True):
        angles = t[:, None] * frequencies
        rows.copy_(torch.polar(torch.ones_like(angles), angles))
    return table


def rotary_forward(x, turn):  # (N, C) in place, (N, D/2)
    for x_, turn_ in chunks(x, turn):
        pairs = x_.view(len(x_), x.shape[1] // (2 * turn.shape[1]), turn.shape[1], 2)
        turned = torch.view_as_complex(pairs.float()).mul_(turn_[:, None])  # fp32's float() is the tensor itself
        if x.dtype != torch.float32:
            pairs.copy_(torch.view_as_real(turned))
    return x


def rotary_backward(dx, turn):
    return rotary_forward(dx, turn.conj())


# --- one layer ---

class Block:
    """x -> x + attention(ln1 x) -> + mlp(ln2 .). `w` and `dw`: its parameters and their gradients, by name.

    `rows`: {skeletal tensor: the slice of its rows to compute}.
    """

    def __init__(self, cfg, w, dw, attention):
        self.w, self.dw, self.attention = w, dw, attention
        self.gelu = "tanh" if cfg.gelu == "tanh" else "none"  # torch's names
        self.scale = (cfg.n_embd // cfg.n_head) ** -0.5

    def forward(self, s, turn, out):
        """`s.x` -> `out` (N, C), the next layer's x; fills the rest of `s`. `turn`: rotations, or None."""
        self.recompute(s, turn, EVERY_ROW)  # for the first time
        return residual_linear_forward(s.mid, s.gelu_out, self.w.fc2_w, self.w.fc2_b, out=out)

    def recompute(self, s, turn, rows):
        """`rows` of the skeletal tensors from x: token by token, but for attention, which is run whole if any of
        attn_out is wanted and left alone, as it is there, if none is. Source: MEMO 4.1."""
        self.before_attention(s, turn, rows)
        if len(s.attn_out[rows["attn_out"]]):
            attn_out, lse = self.attention.forward(*self.heads(s.q, s.k, s.v, like=s.lse), True, self.scale)
            s.attn_out.view(attn_out.shape).copy_(attn_out)
            s.lse.copy_(lse)
        self.after_attention(s, rows)

    def before_attention(self, s, turn, rows):
        """ln1_out, q, k, v from x."""
        w, r = self.w, rows["ln1_out"]
        layernorm_forward(s.x[r], w.ln1_w, w.ln1_b, s.ln1_out[r], s.ln1_mean[r], s.ln1_rstd[r])
        for name, w_, b in zip("qkv", *self.thirds(w), strict=True):
            r = rows[name]
            y = linear_forward(s.ln1_out[r], w_, b, out=getattr(s, name)[r])
            if turn is not None and name != "v":
                rotary_forward(y, turn[r])

    def after_attention(self, s, rows):
        """mid, ln2_out, fc1_out, gelu_out from x and attn_out."""
        w = self.w
        r = rows["mid"]
        residual_linear_forward(s.x[r], s.attn_out[r], w.proj_w, w.proj_b, out=s.mid[r])
        r = rows["ln2_out"]
        layernorm_forward(s.mid[r], w.ln2_w, w.ln2_b, s.ln2_out[r], s.ln2_mean[r], s.ln2_rstd[r])
        r = rows["fc1_out"]
        linear_forward(s.ln2_out[r], w.fc1_w, w.fc1_b, out=s.fc1_out[r])
        r = rows["gelu_out"]
        gelu_forward(s.fc1_out[r], self.gelu, out=s.gelu_out[r])

    def backward(self, dy, s, turn):
        """Writes dx over s.x, adds to the parameters' gradients, and uses up dy (N, C) and the rest of `s`."""
        w, dw = self.w, self.dw
        # mlp: y = mid + gelu(ln2(mid) fc1) fc2
        d = linear_backward(dy, s.gelu_out, w.fc2_w, dw.fc2_w, dw.fc2_b, out=s.gelu_out)
        d = gelu_backward(d, s.fc1_out, self.gelu, out=d)
        d = linear_backward(d, s.ln2_out, w.fc1_w, dw.fc1_w, dw.fc1_b, out=s.ln2_out)
        residual_layernorm_backward(dy, d, s.mid, s.ln2_mean, s.ln2_rstd, w.ln2_w, w.ln2_b, dw.ln2_w, dw.ln2_b, out=dy)
        # attention: mid = x + attention(ln1(x) qkv) proj
        d = linear_backward(dy, s.attn_out, w.proj_w, dw.proj_w, dw.proj_b, out=s.ln2_out)
        dq, dk, dv = self.attention.backward(*self.heads(d, s.q, s.k, s.v, s.attn_out, like=s.lse), s.lse, True,
                                             self.scale)
        dq, dk, dv = (g.reshape(s.x.shape) for g in (dq, dk, dv))
        if turn is not None:
            rotary_backward(dq, turn)
            rotary_backward(dk, turn)
        for i, (g, w_, dw_, db) in enumerate(zip((dq, dk, dv), self.thirds(w)[0], *self.thirds(dw), strict=True)):
            d = linear_backward(g, s.ln1_out, w_, dw_, db, out=s.q, beta=min(i, 1))
        return residual_layernorm_backward(dy, d, s.x, s.ln1_mean, s.ln1_rstd, w.ln1_w, w.ln1_b, dw.ln1_w, dw.ln1_b, out=s.x)

    @staticmethod
    def thirds(w):
        """The q, k and v parts of the qkv matrix (3C, C) and of its bias."""
        return w.qkv_w.chunk(3), (None,) * 3 if w.qkv_b is None else w.qkv_b.chunk(3)

    @staticmethod
    def heads(*rows, like):
        """(N, C) -> (B, T, H, D), as views; `like` is the (B, H, T) logsumexp."""
        B, H, T = like.shape
        return [x.view(B, T, H, -1) for x in rows]


# --- the model ---

def parameter_shapes(cfg):
    """{name: shape}: embeddings, then layer by layer its matrices and its vectors, then the final norm."""
    C, V = cfg.n_embd, cfg.padded_vocab_size
    shapes = {"wte": (V, C)}
    if cfg.position == "learned":
        shapes["wpe"] = (cfg.block_size, C)
    for i in range(cfg.n_layer):
        layer = {"qkv_w": (3 * C, C), "proj_w": (C, C), "fc1_w": (4 * C, C), "fc2_w": (C, 4 * C)}
        layer |= {"ln1_w": (C,), "ln2_w": (C,)}
        if cfg.bias:
            layer |= {"qkv_b": (3 * C,), "proj_b": (C,), "fc1_b": (4 * C,), "fc2_b": (C,), "ln1_b": (C,), "ln2_b": (C,)}
        shapes |= {f"h.{i}.{name}": shape for name, shape in layer.items()}
    return shapes | {"lnf_w": (C,)} | ({"lnf_b": (C,)} if cfg.bias else {})


def initial_weights(cfg, seed, device):
    """Yields (name, fp32 tensor). GPT-2's: normal 0.02, projections into the residual stream over sqrt(2L)."""
    generator = torch.Generator(device).manual_seed(seed)
    for name, shape in parameter_shapes(cfg).items():
        w = torch.zeros(shape, device=device)
        if len(shape) == 2:
            into_residual = name.endswith(("proj_w", "fc2_w"))
            w.normal_(0.0, 0.02 / math.sqrt(2 * cfg.n_layer) if into_residual else 0.02, generator=generator)
        elif name.endswith("_w"):
            w.fill_(1.0)
        if name == "wte":
            w[cfg.vocab_size:] = 0.0
        yield name, w


class GPT:
    """Parameters in one flat buffer, gradients in one flat fp32 buffer, and the pass over both.

    `cfg.vocab_size` must be known. Without `grads` the model can only be evaluated.
    """

    def __init__(self, cfg, device, dtype, grads=True):
        device = torch.device(device)
        self.cfg, self.device, self.dtype = cfg, device, dtype
        self.attention = resolve_attention(cfg.attention, device, dtype, cfg.n_embd // cfg.n_head)
        self.layout = flat_layout(parameter_shapes(cfg))
        self.params = torch.zeros(numel(self.layout), dtype=dtype, device=device)
        self.grads = torch.zeros(numel(self.layout) if grads else 0, dtype=torch.float32, device=device)
        self.w = SimpleNamespace(**self.named(self.params, ""))
        self.dw = SimpleNamespace(**self.named(self.grads, "")) if grads else None
        self.blocks = [Block(cfg, SimpleNamespace(**self.named(self.params, f"h.{i}.")),
                             SimpleNamespace(**self.named(self.grads, f"h.{i}.")) if grads else None, self.attention)
                       for i in range(cfg.n_layer)]
        self.shape = self.swap = None
        self.arena = NoArena()  # where the transient tensors live: memo/allocator.py

    def named(self, flat, prefix):
        """Views of `flat` by the names behind `prefix`; biases that the model lacks are None."""
        absent = dict.fromkeys(("qkv_b", "proj_b", "fc1_b", "fc2_b", "ln1_b", "ln2_b") if prefix else ("wpe", "lnf_b"))
        depth = prefix.count(".")
        return absent | {n.removeprefix(prefix): v for n, v in views(self.layout, flat).items()
                         if n.startswith(prefix) and n.count(".") == depth}

    def load(self, named_tensors):
        """Copies (name, tensor) pairs into the parameters."""
        mine = views(self.layout, self.params)
        for name, tensor in named_tensors:
            mine[name].copy_(tensor)

    def reserve(self, B, T, placement=None, **kw):
        """Takes the memory for the activations of a batch of (B, T), placed as `placement` says: without one, every layer
        keeps its own on the device. `kw`: see Swap."""
        cfg = self.cfg
        self.close()  # free the old before taking the new
        self.swap = Swap(placement or Placement(cfg.n_layer, cfg.n_layer, B * T), B, T, cfg.n_embd, cfg.n_head,
                         self.dtype, self.device, **kw)
        self.shape = (B, T)
        self.positions = torch.arange(T, device=self.device).repeat(B)
        self.turn = None
        if cfg.position == "rope":
            self.turn = rotations(self.positions, cfg.n_embd // cfg.n_head, cfg.rope_theta)

    def close(self):
        """Gives the activations' memory back, on device and host, when the copies under way are done."""
        if self.swap is not None:
            self.swap.close()
        self.shape = self.swap = None

    def forward(self, tokens, targets, scale=None):
        """Mean loss of (B, T) tokens. With `scale`, backward() may follow: it gives the gradients of scale * loss."""
        if self.shape != tokens.shape:
            self.reserve(*tokens.shape)
        self.tokens, swap = tokens.reshape(-1), self.swap
        loss = torch.zeros((), device=self.device)
        self.launch("embedding", self.embed, self.tokens, self.positions, swap.x[0])
        for i, block in enumerate(self.blocks):
            swap.before_forward(i)
            self.launch(f"forward {i}", block.forward, swap.layers[i], self.turn, swap.x[i + 1])
            if scale is not None:
                swap.after_forward(i)
        head = "head" if scale is not None else "evaluation head"
        self.launch(head, self.head, swap.x[-1], targets.reshape(-1), scale, loss)
        return loss

    def backward(self):
        """Adds the gradients of the last forward to `grads`; returns the gradient of the first layer's input (N, C)."""
        swap = self.swap
        for i, block in reversed(list(enumerate(self.blocks))):
            swap.before_backward(i)
            if swap.missing[i]:
                self.launch(f"recompute {i}", block.recompute, swap.layers[i], self.turn, swap.missing[i])
            self.launch(f"backward {i}", block.backward, swap.x[i + 1], swap.layers[i], self.turn)
            swap.after_backward(i)
        self.launch("embedding backward", self.embed_backward, self.tokens, swap.x[0])
        return swap.x[0]

    def launch(self, label, work, *args):
        """Queues work(*args) on the compute stream, as a segment of the memory plan."""
        B, T = self.shape
        self.swap.streams.compute.launch(label, self.arena.run, f"{B}x{T}/{label}", work, *args)

    def embed_backward(self, tokens, dx):  # (N,), (N, C)
        for dx_, tokens_, positions in chunks(dx, tokens, self.positions):
            dx_ = dx_.float()
            self.dw.wte.index_add_(0, tokens_, dx_)
            if self.dw.wpe is not None:
                self.dw.wpe.index_add_(0, positions, dx_)

    def embed(self, tokens, positions, out):  # (N,), (N,) -> (N, C)
        torch.index_select(self.w.wte, 0, tokens, out=out)
        if self.w.wpe is not None:
            for out_, positions_ in chunks(out, positions):
                out_ += self.w.wpe[positions_]
        return out

    def logits(self, x):
        """(n, C) -> final norm's output (n, C), its mean (n,) and rstd (n,), logits (n, V padded)."""
        h = torch.empty_like(x)
        mean, rstd = torch.empty(2, len(x), dtype=torch.float32, device=x.device)
        layernorm_forward(x, self.w.lnf_w, self.w.lnf_b, h, mean, rstd)
        logits = h @ self.w.wte.t()
        logits[:, self.cfg.vocab_size:] = -torch.inf
        return h, mean, rstd, logits

    def head(self, x, targets, scale, loss):
        """Final norm, logits, mean loss added to `loss`, and with `scale` the gradient of scale * loss over x (N, C).

        Token chunk by token chunk: more than HEAD_ROWS rows of logits never exist, forward or backward.
        """
        for x_, target in zip(x.split(HEAD_ROWS), targets.split(HEAD_ROWS), strict=True):
            loss += self.head_chunk(x_, target, scale, len(x))

    def head_chunk(self, x, target, scale, N):
        """The part of a chunk's n rows in the mean loss of N; see head."""
        w, dw = self.w, self.dw
        h, mean, rstd, logits = self.logits(x)
        p = torch.softmax(logits, 1, dtype=torch.float32)
        p_target = p.gather(1, target[:, None])
        if scale is not None:
            dlogits = p.scatter_(1, target[:, None], p_target - 1).to(logits.dtype)  # times N / scale
            accumulate_product(dw.wte, dlogits.t(), h.mul_(scale / N))
            dh = (dlogits @ w.wte).mul_(scale / N)
            x.copy_(layernorm_backward(dh, x, mean, rstd, w.lnf_w, w.lnf_b, dw.lnf_w, dw.lnf_b))
        return p_target.clamp_min(TINY).log().sum() / -N
