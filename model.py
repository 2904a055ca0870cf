"""A GPT whose forward and backward are written out by hand: what lives where, and when, can be read here.

    B, T, N   sequences, the T = S/cp tokens of each that this rank holds, and their rows N = B*T: row b*T + t is the t-th
              token of sequence b
    n, tp     the N/tp rows that are the rank's own, and the ranks that share a layer; (n, tp, width) is all N rows, in order
    C, H, D   hidden size, heads, head dimension C/H
    V         vocabulary, padded in memory to a multiple of 128 (the padding never gets a probability)
    s         the skeletal activations of one layer: named views of one buffer, see memo/layer.py
    dy, dx    gradients of the loss; parameter gradients accumulate in fp32

Every piece is a pair x_forward / x_backward. Pieces write where they are told (`out`), and the backward
writes over skeletal tensors that nobody reads any more, so that a layer needs hardly any memory besides its
skeletal buffer; what is token-wise goes piece by piece of rows (memo/parallel/tp.py), attention group by
group of heads (memo/attention.py). With one rank tp = cp = 1, and gather and scatter_sum
(memo/parallel/tp.py) are views. Source: the layer of MEMO section 3.1 (pre-norm GPT).
"""

import math
from functools import partial
from itertools import pairwise
from types import SimpleNamespace

import torch

from memo.attention import attend, attend_backward, resolve_attention
from memo.flat import bucket_views, gradient_places, gradient_slots, local_layout, views
from memo.layer import head_rows, layer_of, model_parameters
from memo.ops import gelu_backward, gelu_forward, resolve_ops, rotations
from memo.parallel.cp import attention_over_ranks, local_token_ranges
from memo.parallel.mesh import ALONE
from memo.parallel.tp import (
    accumulate_product,
    bias_backward,
    chunks,
    column_linear_backward,
    column_linear_forward,
    embedding_backward,
    embedding_forward,
    in_turns,
    local,
    own_ids,
    row_linear_backward,
    row_linear_forward,
    softmax,
)
from memo.planner.allocator import NoArena
from memo.swap.buffers import Swap
from memo.swap.placement import Placement

TINY = torch.finfo(torch.float32).tiny  # the loss of one token ends at -log of this, 87
EVERY_ROW, NO_ROWS = slice(None), slice(0)


def stretches(n, rows):
    """[(first, end, names)]: of n rows those that some of {name: slice} have, each with the names of all that
    have them."""
    bounds = {name: r.indices(n)[:2] for name, r in rows.items()}
    edges = sorted({edge for bound in bounds.values() for edge in bound})
    held = [(first, end, [name for name, (start, stop) in bounds.items() if start <= first and end <= stop])
            for first, end in pairwise(edges)]
    return [stretch for stretch in held if stretch[2]]


# --- one layer ---

class Block:
    """x -> mid = x + attention(ln1 x) -> mid + mlp(ln2 mid): two halves, cut at `mid`. `w` and `dw`: this
    rank's parameters and their gradients, by name; `tp`: the Axis of the ranks that have the others.

    `rows`: {skeletal tensor: the slice of its rows to compute}. Whatever is token-wise can be computed for
    any range of rows and gives the same bits as the whole, which is what recomputing a part of a layer rests
    on.
    """

    def __init__(self, cfg, w, dw, attention, ops, tp):
        self.w, self.dw, self.attention, self.ops, self.tp = w, dw, attention, ops, tp
        self.gelu = "tanh" if cfg.gelu == "tanh" else "none"  # torch's names
        self.scale = (cfg.n_embd // cfg.n_head) ** -0.5
        names = [t.name for t in layer_of(cfg).skeletal]
        self.every_row, self.no_rows = dict.fromkeys(names, EVERY_ROW), dict.fromkeys(names, NO_ROWS)

    # --- forward ---

    def forward(self, s, turn, out):
        """`s.x` -> `out` (n, C), the next layer's x; fills the rest of `s`. `turn`: rotations, or None."""
        self.recompute(s, turn, self.every_row)  # for the first time
        return self.output(s, out)

    def recompute(self, s, turn, rows):
        """`rows` of the skeletal tensors from x; none of a tensor that `rows` does not name. All of it goes
        token by token, but for attention, which is run whole if any row of attn_out is wanted, and left alone
        otherwise. Source: MEMO 4.1."""
        rows = self.no_rows | rows
        self.queries_keys_values(s, turn, rows)
        if len(s.attn_out[rows["attn_out"]]):
            *qkv, out = self.heads(s.q, s.k, s.v, s.attn_out, like=s.lse)
            attend(self.attention, *qkv, True, self.scale, out, s.lse)
        self.projection(s, rows)
        self.mlp(s, rows)

    def extend(self, s, turn, rows, attention, out):
        """The forward of one sequence's `rows` alone, whose queries see the keys and values of the rows
        before, which are in `s` already: what generating text does. `attention`: an Attention that takes
        fewer queries than keys."""
        tensors = dict.fromkeys(self.every_row, rows)
        self.queries_keys_values(s, turn, tensors)
        H = s.lse.shape[1]
        q, k, v = (t.view(1, len(t), H, -1) for t in (s.q[rows], s.k[:rows.stop], s.v[:rows.stop]))
        s.attn_out[rows].view(q.shape).copy_(attention.forward(q, k, v, rows.start == 0, self.scale)[0])
        self.projection(s, tensors)
        self.mlp(s, tensors)
        self.output(s, out, rows)

    def queries_keys_values(self, s, turn, rows):
        """ln1_out, q, k, v from x."""
        w, r = self.w, rows["ln1_out"]
        self.ops.layernorm_forward(s.x[r], w.ln1_w, w.ln1_b, s.ln1_out[r], s.ln1_mean[r], s.ln1_rstd[r])
        linears = dict(zip("qkv", zip((s.q, s.k, s.v), *self.qkv(w), strict=True), strict=True))
        for first, end, names in stretches(len(s.x), {name: rows[name] for name in "qkv"}):
            def project(r, names=names):
                x = self.tp.start_gather(s.ln1_out[r])
                yield
                x = x.wait()
                for y, w_, b in (linears[name] for name in names):
                    column_linear_forward(x, w_, b, out=y[r])
            in_turns(self.tp, s.x.device, first, end, project)
        for name in "qk" if turn is not None else "":
            self.ops.rotary(getattr(s, name)[rows[name]], turn[rows[name]], back=False)

    def projection(self, s, rows):
        """mid from x and attn_out: the end of the attention half."""
        w, r = self.w, rows["mid"]
        row_linear_forward(self.tp, s.x[r], s.attn_out[r], w.proj_w, w.proj_b, out=s.mid[r])

    def mlp(self, s, rows):
        """ln2_out, fc1_out, gelu_out from mid: the MLP half but for its output."""
        w, r = self.w, rows["ln2_out"]
        self.ops.layernorm_forward(s.mid[r], w.ln2_w, w.ln2_b, s.ln2_out[r], s.ln2_mean[r], s.ln2_rstd[r])

        def widen(r):
            x = self.tp.start_gather(s.ln2_out[r])
            yield
            column_linear_forward(x.wait(), w.fc1_w, w.fc1_b, out=s.fc1_out[r])
        first, end, _ = rows["fc1_out"].indices(len(s.x))
        in_turns(self.tp, s.x.device, first, end, widen)
        r = rows["gelu_out"]
        gelu_forward(s.fc1_out[r], self.gelu, out=s.gelu_out[r])

    def output(self, s, out, r=EVERY_ROW):
        """Rows r of `out` (n, C), the next layer's x, from mid and gelu_out."""
        return row_linear_forward(self.tp, s.mid[r], s.gelu_out[r], self.w.fc2_w, self.w.fc2_b, out=out[r])

    # --- backward ---

    def backward(self, dy, s, turn):
        """Writes dx over s.x, adds to the parameters' gradients, and uses up dy (n, C) and the rest of
        `s`."""
        dout = s.ln2_out.view(s.attn_out.shape)  # piece by piece it takes the place of ln2's output
        in_turns(self.tp, dy.device, 0, len(dy), partial(self.after_attention_backward, dy, s, dout))
        dqkv = attend_backward(self.attention, *self.heads(dout, s.q, s.k, s.v, s.attn_out, like=s.lse), s.lse, True,
                               self.scale)
        dqkv = [g.reshape(s.q.shape) for g in dqkv]
        for g in dqkv[:2] if turn is not None else ():
            self.ops.rotary(g, turn, back=True)
        in_turns(self.tp, dy.device, 0, len(dy), partial(self.queries_keys_values_backward, dy, s, dqkv))
        return s.x

    # Generators, which yield where a message is on its way, as tp.in_turns wants: the other piece computes
    # meanwhile.

    def after_attention_backward(self, dy, s, dout, r):
        """Rows r: the MLP half, then the projection, since nothing between them needs other rows."""
        yield from self.mlp_backward(dy, s, r)
        yield from self.projection_backward(dy, s, dout, r)

    def mlp_backward(self, dy, s, r):
        """out = mid + gelu(ln2(mid) fc1) fc2. Rows r: writes the gradient of mid over dy."""
        w, dw, tp, dy = self.w, self.dw, self.tp, dy[r]
        message = tp.start_gather(dy)
        yield
        bias_backward(dy, dw.fc2_b)
        d = row_linear_backward(message.wait(), s.gelu_out[r], w.fc2_w, dw.fc2_w, out=s.gelu_out[r])
        message = tp.start_gather(s.ln2_out[r])
        d = gelu_backward(d, s.fc1_out[r], self.gelu, out=d)
        yield
        message = column_linear_backward(tp, [d], message.wait(), [w.fc1_w], [dw.fc1_w], [dw.fc1_b])
        yield
        self.ops.layernorm_backward(dy, message.wait(), s.mid[r], s.ln2_mean[r], s.ln2_rstd[r], w.ln2_w, w.ln2_b,
                                    dw.ln2_w, dw.ln2_b, out=dy)

    def projection_backward(self, dy, s, dout, r):
        """mid = x + attn_out proj. Rows r: writes the gradient of attn_out into `dout`; that of x on this way
        is dy itself."""
        w, dw, dy = self.w, self.dw, dy[r]
        message = self.tp.start_gather(dy)
        yield
        bias_backward(dy, dw.proj_b)
        row_linear_backward(message.wait(), s.attn_out[r], w.proj_w, dw.proj_w, out=dout[r])

    def queries_keys_values_backward(self, dy, s, dqkv, r):
        """Rows r: writes the gradients of x, on its ways through mid (dy) and through q, k, v = ln1(x) qkv,
        over x."""
        w, dw, tp = self.w, self.dw, self.tp
        message = tp.start_gather(s.ln1_out[r])
        yield
        message = column_linear_backward(tp, [g[r] for g in dqkv], message.wait(), self.qkv(w)[0], *self.qkv(dw))
        yield
        self.ops.layernorm_backward(dy[r], message.wait(), s.x[r], s.ln1_mean[r], s.ln1_rstd[r], w.ln1_w, w.ln1_b,
                                    dw.ln1_w, dw.ln1_b, out=s.x[r])

    @staticmethod
    def qkv(w):
        """The matrices of q, k and v, and their biases."""
        return [w.q_w, w.k_w, w.v_w], [w.q_b, w.k_b, w.v_b]

    @staticmethod
    def heads(*rows, like):
        """(n, tp, C/tp) -> (B, T, H/tp, D), as views; `like` is the (B, H/tp, T) logsumexp."""
        B, H, T = like.shape
        return [x.view(B, T, H, -1) for x in rows]


# --- the model ---

def initial_weights(cfg, seed, device):
    """Yields (name, fp32 tensor), whole. GPT-2's: normal 0.02, projections into the residual stream over
    sqrt(2L)."""
    generator = torch.Generator(device).manual_seed(seed)
    std = {"normal": 0.02, "residual": 0.02 / math.sqrt(2 * cfg.n_layer)}
    for name, p in model_parameters(cfg).items():
        w = torch.zeros(p.shape, device=device)
        if p.init in std:
            w.normal_(0.0, std[p.init], generator=generator)
        elif p.init == "ones":
            w.fill_(1.0)
        if name == "wte":
            w[cfg.vocab_size:] = 0.0
        yield name, w


class GPT:
    """This rank's parameters and their gradients (fp32), each in one flat buffer, and the pass over both.

    `cfg.vocab_size` must be known. Without `grads` the model can only be evaluated. `buckets`: [(start, end)]
    in the parameters of the embeddings, of each layer, of the final norm; each can be shared out equally
    among mesh.data. `bucket_grads`: the gradients of each, flat; layers may take turns in one place
    (memo/flat.py: gradient_slots).
    """

    def __init__(self, cfg, device, dtype, grads=True, mesh=ALONE):
        device = torch.device(device)
        self.cfg, self.device, self.dtype, self.mesh = cfg, device, dtype, mesh
        attention = resolve_attention(cfg.attention, device, dtype, cfg.n_embd // cfg.n_head)
        self.ops, self.why_ops = resolve_ops(cfg.ops, device)
        self.attention = attention_over_ranks(attention, mesh.cp, cfg.context_parallel, self.ops.merge)
        self.layout, self.buckets = local_layout(cfg, mesh.tp.size, mesh.data.size)
        micro_batches = cfg.gradient_accumulation_steps // mesh.dp.size
        begins, numel = gradient_places(self.buckets, gradient_slots(cfg, micro_batches))
        self.params = torch.zeros(self.buckets[-1][1], dtype=dtype, device=device)
        self.grads = torch.zeros(numel if grads else 0, dtype=torch.float32, device=device)
        self.bucket_grads = [self.grads[at:at + end - start]
                             for at, (start, end) in zip(begins, self.buckets, strict=True)]
        weights = views(self.layout, self.params)
        gradients = bucket_views(self.layout, self.buckets, self.bucket_grads) if grads else {}
        self.w, self.dw = (SimpleNamespace(**self.named(tensors, "", ("wpe", "lnf_b"))) for tensors in (weights, gradients))
        self.blocks = []
        for i in range(cfg.n_layer):
            w, dw = (SimpleNamespace(**self.named(tensors, f"h.{i}.", layer_of(cfg).absent))
                     for tensors in (weights, gradients))
            self.blocks.append(Block(cfg, w, dw, self.attention, self.ops, mesh.tp))
        self.shape = self.swap = None
        self.arriving = {}  # {bucket: what brings its parameters}, for the next forward to wait for
        self.arena = NoArena()  # where the transient tensors live: memo/planner/allocator.py

    @staticmethod
    def named(tensors, prefix, absent):
        """Those of {name: tensor} by the names behind `prefix`; the `absent`, which not every model has, are
        None."""
        depth = prefix.count(".")
        return dict.fromkeys(absent) | {name.removeprefix(prefix): t for name, t in tensors.items()
                         if name.startswith(prefix) and name.count(".") == depth}

    def load(self, named_tensors):
        """Copies this rank's parts of (name, whole tensor) pairs into the parameters."""
        mine = views(self.layout, self.params)
        for name, tensor in named_tensors:
            mine[name].copy_(local(tensor, self.layout[name].whole.split_dim, self.mesh.tp))

    def reserve(self, B, T, placement=None, **kw):
        """Takes the memory for the activations of a batch of (B, T), placed as `placement` says: without one,
        every layer keeps its own on the device. `kw`: see Swap."""
        cfg, tp, cp = self.cfg, self.mesh.tp, self.mesh.cp
        self.close()  # free the old before taking the new
        self.swap = Swap(placement or Placement(cfg.n_layer, cfg.n_layer, B * T // tp.size), layer_of(cfg), B, T,
                         self.dtype, self.device, tp.size, **kw)
        self.shape = (B, T)
        ranges = local_token_ranges(T * cp.size, cp, cfg.context_parallel)
        self.positions = torch.cat([torch.arange(*r, device=self.device) for r in ranges]).repeat(B)
        self.turn = None
        if cfg.position == "rope":
            self.turn = rotations(self.positions, cfg.n_embd // cfg.n_head, cfg.rope_theta).unflatten(0, (-1, tp.size))

    def close(self):
        """Gives the activations' memory back, on device and host, when the copies and messages under way are
        done."""
        for bucket in list(self.arriving):
            self.arrive(bucket)
        if self.swap is not None:
            self.swap.close()
        self.shape = self.swap = None

    def forward(self, tokens, targets, scale=None):
        """Mean loss of (B, T) tokens. With `scale`, backward() may follow: it gives the gradients of scale *
        loss."""
        if self.shape != tokens.shape:
            self.reserve(*tokens.shape)
        self.tokens, self.targets, self.scale = tokens.reshape(-1), targets.reshape(-1), scale
        self.loss = torch.zeros((), device=self.device)
        self.follow(("embedding", "forward", "head") if scale is None else ("embedding", "forward", "offload", "head"))
        return self.loss

    def backward(self, done=lambda bucket: None):
        """Adds the gradients of the last forward to `grads`; returns the gradient of the first layer's own
        input (n, C). done(bucket) is called when those of a bucket are complete."""
        done(len(self.blocks) + 1)
        self.follow(("recompute", "backward", "prefetch", "embedding backward"), done)
        return self.swap.x[0]

    def follow(self, kinds, done=lambda bucket: None):
        """Executes the steps of the schedule that are of these kinds: the host launches them in their order,
        and the waits between streams are theirs. done(bucket): see backward()."""
        (B, T), complete = self.shape, []
        for step in self.swap.steps:
            if step.kind not in kinds:
                continue
            if step.stream != "compute":
                self.swap.launch(step)
                continue
            while complete:  # only now, so that copies start before messages
                done(complete.pop())
            bucket = self.bucket_of(step)
            self.arrive(bucket)
            label, *work = self.work_of(step)
            self.swap.launch(step, label, self.arena.run, f"{B}x{T}/{label}", *work)
            if step.kind in ("backward", "embedding backward") and step.unit[1] == 0:  # the last subsequence to come back
                complete.append(bucket)
        while complete:
            done(complete.pop())

    def bucket_of(self, step):
        """The bucket of parameters that a step uses: 0 the embeddings', 1 to L the layers', L + 1 the final
        norm's."""
        layer, _ = step.unit
        return {"embedding": 0, "embedding backward": 0, "head": len(self.blocks) + 1}.get(step.kind, layer + 1)

    def work_of(self, step):
        """(label, function, arguments...) of a step of the compute stream; it is a segment of the memory
        plan."""
        i, _ = step.unit
        s, x, y, block = self.swap.layers[i], self.swap.x[i], self.swap.x[i + 1], self.blocks[i]
        match step.kind:
            case "embedding":
                return "embedding", self.embed, self.tokens, self.positions, x
            case "forward":
                return f"forward {i}", block.forward, s, self.turn, y
            case "head":
                label = "evaluation head" if self.scale is None else "head"
                return label, self.head, y, self.targets, self.scale, self.loss
            case "recompute":
                return f"recompute {i}", block.recompute, s, self.turn, self.swap.missing[i]
            case "backward":
                return f"backward {i}", block.backward, y, s, self.turn
            case "embedding backward":
                return "embedding backward", self.embed_backward, self.tokens, x
        raise ValueError(f"{step.kind} is no step that computes")

    def arrive(self, bucket):
        """Holds the compute stream until the optimizer's work on a bucket's parameters has come from all
        ranks."""
        if works := self.arriving.pop(bucket, None):
            works.wait()

    def embed(self, tokens, positions, out):  # (N,), (N,) -> (n, C)
        tp = self.mesh.tp
        embedding_forward(tp, tokens.view(-1, tp.size), self.w.wte, out)
        if self.w.wpe is not None:
            for out_, positions_ in chunks(out, positions[tp.rank::tp.size]):
                out_ += self.w.wpe[positions_]
        return out

    def embed_backward(self, tokens, dx):  # (N,), (n, C)
        tp = self.mesh.tp
        embedding_backward(tp, tokens.view(-1, tp.size), dx, self.dw.wte)
        if self.dw.wpe is not None:
            for dx_, positions in chunks(dx, self.positions[tp.rank::tp.size]):
                self.dw.wpe.index_add_(0, positions, dx_.float())

    def logits(self, x):
        """(n, C) -> the final norm of all tp ranks' rows (tp * n, C), own mean (n,) and rstd (n,), logits (tp
        * n, V/tp)."""
        h = torch.empty_like(x)
        mean, rstd = torch.empty(2, len(x), dtype=torch.float32, device=x.device)
        self.ops.layernorm_forward(x, self.w.lnf_w, self.w.lnf_b, h, mean, rstd)
        h = self.mesh.tp.gather(h).flatten(0, 1)
        logits = h @ self.w.wte.t()
        padding = max(0, self.cfg.vocab_size - self.mesh.tp.rank * logits.shape[1])
        logits[:, padding:] = torch.finfo(logits.dtype).min  # not -inf: a rank may have nothing else
        return h, mean, rstd, logits

    def head(self, x, targets, scale, loss):
        """Final norm, logits, mean loss added to `loss`, and with `scale` the gradient of scale * loss over x
        (n, C).

        Token chunk by token chunk: more than head_rows() rows of logits never exist, forward or backward.
        """
        tp = self.mesh.tp.size
        rows = self.own_head_rows
        for x_, target in zip(x.split(rows), targets.view(-1, tp).split(rows), strict=True):
            loss += self.head_chunk(x_, target.t().reshape(-1), scale, len(targets))

    @property
    def own_head_rows(self):
        """A rank's own rows in a chunk of the head."""
        return max(1, head_rows(len(self.w.wte), self.device.type == "cpu") // self.mesh.tp.size)

    def head_chunk(self, x, target, scale, N):
        """The part of a chunk's rows of all tp ranks in the mean loss of N, from own rows x (n, C) and
        targets (tp * n,)."""
        w, dw, tp = self.w, self.dw, self.mesh.tp
        h, mean, rstd, logits = self.logits(x)
        p = softmax(tp, logits)
        own, mine = own_ids(tp, target[:, None], p.shape[1])
        p_own = p.gather(1, own)
        p_target = tp.sum(p_own * mine)
        if scale is not None:
            dlogits = p.scatter_(1, own, p_own - mine.float()).to(logits.dtype)  # times N / scale
            accumulate_product(dw.wte, dlogits.t(), h.mul_(scale / N))
            dh = tp.scatter_sum((dlogits @ w.wte).unflatten(0, (tp.size, -1))).mul_(scale / N)
            self.ops.layernorm_backward(None, dh, x, mean, rstd, w.lnf_w, w.lnf_b, dw.lnf_w, dw.lnf_b, out=x)
        return p_target.clamp_min(TINY).log().sum() / -N
