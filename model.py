"""A layer of a GPT, forward and backward written out by hand: x -> mid = x + attention(ln1 x) -> mid +
mlp(ln2 mid), where ln is LayerNorm or RMSNorm, and the MLP that of GPT-2 or of Llama (memo/layer/mlp.py).
Attention is causal. Below it the GPT, which holds the layers. The loop over them is training_step() in
memo/plain.py, or for all modes and ranks Model in memo/states/passes.py.

    B, T, N   sequences, the T = S/cp tokens of each that this rank holds, and their rows N = B*T: row b*T + t
              is the t-th token of sequence b
    n, tp     tp ranks (processes, a GPU each) share each layer, and each has n = N/tp rows of its own: row i
              belongs to rank i % tp (not a chunk, as in Megatron), so (n, tp, width) is all N rows in order
    C, H, D   hidden size, heads, head dimension
    Q, KV, F  widths of q, of k and v, of the MLP: H*D, Hkv*D, n_inner
    s         the skeletal activations of a layer: named views of its place in each tensor's memory, its
              buffer; see memo/config/layer.py
    x, y      the input of a layer and its output, which is the next layer's input: (n, C)
    dy, dx    gradients of the loss; parameter gradients accumulate in fp32
    unit      a layer at one subsequence. A sequence may be cut into several, computed one after the other.
              Then `s.pieces` has (k, v) of subsequences 0 to the unit's own, which is the last; queries see
              all of them. Without a cut it is empty: k and v are skeletal tensors like q

The backward writes over skeletal tensors that nobody reads any more: a layer needs hardly any memory besides
its buffer. What is token-wise goes piece by piece of rows (memo/parallel/tp.py), attention group by group of
heads (memo/layer/attend.py). Source: the layer of MEMO 3.1 (pre-norm GPT).
"""

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import chain

import torch
from torch.nn.functional import scaled_dot_product_attention

from memo.config.config import Config
from memo.config.layer import KEYS_VALUES, layer_of
from memo.config.layout import Layout
from memo.config.rope import parse_scaling, scaled
from memo.config.settings import Rope
from memo.kernels.attention import resolve_attention
from memo.kernels.backends import aligned
from memo.kernels.matmul import Linear, Operand, check_products, matmul_of
from memo.kernels.ops import Ops, resolve_ops, rotations
from memo.kernels.rows import stretches
from memo.layer.activations import EVERY_ROW, NO_ROWS, Activations, Pieces, Weights
from memo.layer.attend import Attention, LayerAttention
from memo.layer.cp import attention_over_ranks
from memo.layer.edges import Edges
from memo.layer.metp_block import MetpBlock
from memo.layer.mlp import mlp_of
from memo.layer.norms import Norms, kept_statistics
from memo.memory.flat import model_parameters
from memo.memory.parameters import Parameters, bucket_views
from memo.parallel.mesh import Mesh
from memo.parallel.tp import bias_backward, column_backward, in_turns, row_backward, row_forward


class Block:
    """Computes a layer in two halves, cut at `mid`. `w`, `dw`: this rank's parameters and gradients, by name.

    `rows`: {skeletal tensor: the slice of its rows to compute}. What is token-wise gives the same bits for
    any range of rows as for all of them: recomputing a part of a layer rests on that.
    """

    def __init__(self, cfg: Config, w: Weights, dw: Weights, attention: tuple[Attention, Attention], ops: Ops,
                 mesh: Mesh) -> None:
        self.w, self.dw, self.tp, self.norms = w, dw, mesh.weights, Norms(cfg, ops, w, dw)
        self.attention = LayerAttention(cfg, w, dw, attention, ops, mesh)
        self.matmul, self.mlp = matmul_of(cfg.matmul, ops.name), mlp_of(cfg, ops)
        layer, names = layer_of(cfg), [t.name for t in layer_of(cfg).skeletal]
        (self.input_of_qkv, self.input_of_mlp), self.projected = layer.inputs, layer.projected
        self.of_mlp = [t.name for t in layer.skeletal[names.index("mid") + 1:] if t.width]
        self.every_row, self.no_rows = dict.fromkeys(names, EVERY_ROW), dict.fromkeys(names, NO_ROWS)

    # --- forward ---

    def forward(self, s: Activations, out: torch.Tensor) -> torch.Tensor:
        """Computes `out` (n, C), the next layer's x, from `s.x`; fills the rest of `s`."""
        s = self.with_keys(s)
        self.recompute(s, self.every_row)  # for the first time
        return self.output(s, out)

    def recompute(self, s: Activations, rows: dict[str, slice]) -> None:
        """Makes `rows` of the skeletal tensors from x and attn_out, none of a tensor that it does not name:
        token by token, but for attention, which runs whole if any row of it is wanted. Source: MEMO 4.1."""
        # in the forward's order: rows that are not made here came from the host, or never left
        rows = self.no_rows | rows
        self.queries_keys_values(s, rows)
        if len(s.attn_out[rows["attn_out"]]):
            q, out = self.attention.heads(s.q, s.attn_out, like=s.lse)  # (B, T, H/tp, D)
            keys = [] if s.pieces else self.keys_of(s)  # pieces hold the unit's own too
            self.attention.forward(s, q, keys, out, s.lse)
        self.projection(s, rows)
        self.mlp_but_output(s, rows)

    def extend(self, s: Activations, keys: torch.Tensor, values: torch.Tensor, out: torch.Tensor) -> None:
        """Computes the forward of one sequence's last token alone, as text is generated. Its query sees
        all `keys` and `values` (1, T, Hkv, D), as pieces hold them; the last ones are its own, and written
        here."""
        self.queries_keys_values(s, self.every_row)
        q, k, v = self.attention.heads(s.q, s.k, s.v, like=s.lse)
        if self.attention.qk_norms:
            norms = self.attention.norms(s)
            q, k = norms.forward("q", q)[0], norms.forward("k", k)[0]
        keys[:, -1:], values[:, -1:] = k, v
        # the query heads that share keys stand as queries: not every kernel takes fewer heads of keys
        q = q.view(1, keys.shape[2], -1, self.attention.head_dim)
        attn_out = scaled_dot_product_attention(q, keys.transpose(1, 2), values.transpose(1, 2))
        s.attn_out.copy_(attn_out.reshape(s.attn_out.shape))
        self.projection(s, self.every_row)
        self.mlp_but_output(s, self.every_row)
        self.output(s, out)

    def queries_keys_values(self, s: Activations, rows: dict[str, slice]) -> None:
        """Makes ln1_out, q, k, v from x. Where q and k have norms, these and rotations come later."""
        self.norm_forward("ln1", s.x, s, rows)
        self.columns(s, self.qkv(self.w), self.input_of_qkv, rows)
        for name in "qk":
            if rows[name] != NO_ROWS:
                self.attention.rotate(s.tensors[name][rows[name]], s, rows[name])
        if s.pieces and rows["k"] != NO_ROWS and self.attention.keys_apart(s):
            self.attention.put_keys(s, *self.keys_of(s)[0])

    def with_keys(self, s: Activations) -> Activations:
        """Gives a unit that has pieces its `k` and `v`, (n, tp, KV/tp): views of its own piece, where that
        holds them as the layer makes them, else new memory."""
        if not s.pieces:
            return s
        k, v = s.pieces[-1]
        shape = len(s.x), self.tp.size, self.attention.kv_heads * self.attention.head_dim
        if self.attention.keys_apart(s):
            k, v = (s.x.new_empty(shape) for _ in range(2))
        return replace(s, tensors=s.tensors | dict(k=k.view(shape), v=v.view(shape)))

    def keys_of(self, s: Activations) -> Pieces:
        """Views the layer's own k and v, (B, T, Hkv/tp, D), as one piece."""
        k, v = self.attention.heads(s.k, s.v, like=s.lse)
        return [(k, v)]

    def sweep(self, s: Activations, x: torch.Tensor) -> None:
        """Makes the unit's own piece again, from its input x (n, C)."""
        normed = {name: torch.empty_like(t) for name, t in s.tensors.items() if name.startswith("ln1_")}
        rows = self.no_rows | dict.fromkeys((*normed, *KEYS_VALUES), EVERY_ROW)
        self.queries_keys_values(self.with_keys(replace(s, tensors=s.tensors | normed | {"x": x})), rows)

    def operand(self, s: Activations, name: str, r: slice) -> Operand:
        """Finds rows r of the skeletal tensor `name` as matrix products take it: in FP8 with its scales."""
        scale = s.tensors.get(f"{name}_scale")
        return self.matmul.kept(s.tensors[name][r], scale if scale is None else scale[r])

    def columns(self, s: Activations, linears: dict[str, Linear], x: str, rows: dict[str, slice]) -> None:
        """Makes rows[name] of each skeletal tensor of {name: (matrix, bias)} from the one called x (n, C)."""
        # they may lack different rows: rows that several lack are gathered once for all of them
        for first, end, names in stretches(len(s.x), {name: rows[name] for name in linears}):
            def project(r: slice, names: list[str] = names) -> Iterator[None]:
                message = self.matmul.start_gather(self.tp, self.operand(s, x, r))
                yield  # the message travels, the other piece computes
                gathered = message.wait()  # (tp, n, C): the rows of all tp ranks
                for name in names:
                    w, b = linears[name]
                    out = s.tensors[name][r]  # (n, tp, width/tp)
                    self.matmul.forward(gathered, w, out.transpose(0, 1), b)
            in_turns(self.tp, s.x.device, first, end, project)

    def norm_forward(self, name: str, x: torch.Tensor, s: Activations, rows: dict[str, slice]) -> None:
        """Writes those rows of ln1_out or ln2_out, if there is such a norm."""
        if (r := rows.get(f"{name}_out")) is None:
            return
        for piece, out in self.matmul.pieces(self.operand(s, f"{name}_out", r), like=x[r]):
            self.norms.forward(name, x[r][piece], out, [t[r][piece] for t in kept_statistics(s, name)])

    def norm_backward(self, name: str, residual: torch.Tensor, dy: torch.Tensor, x: torch.Tensor,
                      s: Activations, r: slice, out: torch.Tensor) -> None:
        """Writes residual + the gradient of x over `out`; rows r of x."""
        self.norms.backward(name, residual, dy, x[r], [t[r] for t in kept_statistics(s, name)], out)

    def projection(self, s: Activations, rows: dict[str, slice]) -> None:
        """Makes mid, the end of the attention half, from x and attn_out."""
        w, r, residual = self.w, rows["mid"], None if self.norms.behind else s.x
        row_forward(self.matmul, self.tp, residual, s.attn_out.__getitem__, w.proj_w, w.proj_b,
                    s.tensors[self.projected], rows[self.projected])  # (n, C)
        if self.norms.behind:
            self.norms.add("post1", s.proj_out[r], s.x[r], out=s.mid[r])

    def mlp_but_output(self, s: Activations, rows: dict[str, slice]) -> None:
        """Makes ln2_out and what the MLP keeps from mid: the MLP half but for its output."""
        self.norm_forward("ln2", s.mid, s, rows)
        self.columns(s, self.mlp.linears(self.w), self.input_of_mlp, rows)  # (n, tp, F/tp)
        if self.mlp.product:
            r = rows[self.mlp.product]
            hidden = [h[r] for h in self.mlp.hidden(s)]
            for piece, out in self.matmul.pieces(self.operand(s, self.mlp.product, r), like=hidden[0]):
                self.mlp.activate([h[piece] for h in hidden], out)
        if self.norms.behind:
            self.last_product(s, None, s.mlp_out, rows["mlp_out"])

    def output(self, s: Activations, out: torch.Tensor) -> torch.Tensor:
        """Writes `out` (n, C), the next layer's x, from mid and what the MLP keeps."""
        if self.norms.behind:
            return self.norms.add("post2", s.mlp_out, s.mid, out)
        return self.last_product(s, s.mid, out, EVERY_ROW)

    def last_product(self, s: Activations, residual: torch.Tensor | None, out: torch.Tensor,
                     r: slice) -> torch.Tensor:
        """Writes rows r of `out` (n, C), residual + the MLP's last product."""
        w, b = self.mlp.last_linear(self.w)
        return row_forward(self.matmul, self.tp, residual, partial(self.last_operand, s), w, b, out, r)

    def last_operand(self, s: Activations, r: slice) -> Operand:
        """Finds rows r of what goes into the MLP's last product, (n, tp, F/tp): kept, or made again."""
        if self.mlp.product:
            return self.operand(s, self.mlp.product, r)
        return self.mlp.activated([h[r] for h in self.mlp.hidden(s)])

    # --- backward ---

    def backward(self, dy: torch.Tensor, s: Activations) -> torch.Tensor:
        """Writes dx over s.x, adds to the parameters' gradients, uses up dy (n, C) and the rest of `s`."""
        s, dout = self.with_keys(s), self.place_of_dout(s)
        # the MLP half and the projection go piece by piece: between them nothing needs other rows
        in_turns(self.tp, dy.device, 0, len(dy),
                 lambda r: chain(self.mlp_backward(dy, s, r), self.projection_backward(dy, s, dout, r)))
        # attention needs all rows: every piece has to be done
        attention = self.attention
        dout_, q, out = attention.heads(dout, s.q, s.attn_out, like=s.lse)
        gradients = attention.backward(s, dout_, q, self.keys_of(s), out, s.lse)
        if s.pieces:
            if attention.qk_norms:  # the norm's backward wants k as it was before
                self.columns(s, {"k": (self.w.k_w, self.w.k_b)}, self.input_of_qkv, {"k": EVERY_ROW})
            gradients = [*gradients, *attention.key_gradients(s, *self.keys_of(s)[0])]
        # (n, tp, Q/tp or KV/tp)
        dqkv = [g.reshape(s.tensors[name].shape) for g, name in zip(gradients, "qkv", strict=True)]
        del gradients
        for g in dqkv[:2]:
            attention.rotate(g, s, back=True)
        in_turns(self.tp, dy.device, 0, len(dy), partial(self.queries_keys_values_backward, dy, s, dqkv))
        return s.x

    def place_of_dout(self, s: Activations) -> torch.Tensor:
        """Finds memory for the gradient of attn_out, (n, tp, Q/tp): a tensor that the MLP half uses up. It is
        written piece by piece, in ascending order, while later pieces of that tensor are still read. Its rows
        are no longer than that tensor's, so a piece lies only over pieces that are used up."""
        for used_up in (s.tensors[name] for name in (self.of_mlp[0], *self.of_mlp[::-1])):
            if used_up.nbytes >= s.attn_out.nbytes:
                memory = used_up.view(-1).view(s.attn_out.dtype)
                return memory[:s.attn_out.numel()].view(s.attn_out.shape)
        return torch.empty_like(s.attn_out)

    # Generators for tp.in_turns: each yields where a message is on its way, while another piece computes.

    def mlp_backward(self, dy: torch.Tensor, s: Activations, r: slice) -> Iterator[None]:
        """Writes rows r of the gradient of mid over dy, where out = mid + mlp(ln2(mid))."""
        tp, dy, hidden = self.tp, dy[r], [h[r] for h in self.mlp.hidden(s)]
        (w, _), (dw, db) = (self.mlp.last_linear(of) for of in (self.w, self.dw))
        dout = self.norms.add_backward("post2", dy, s.mlp_out[r]) if self.norms.behind else dy
        message = tp.start_gather(dout)  # every rank has columns of the last matrix, and needs all rows
        product = self.last_operand(s, r)
        yield
        bias_backward(dout, db)  # own rows only: the tp ranks' sums are added up in the optimizer
        d = row_backward(self.matmul, message.wait(), product, w, dw)
        message = self.matmul.start_gather(tp, self.operand(s, self.input_of_mlp, r))  # beside the next line
        self.mlp.activate_backward(d, hidden)  # gradients take the place of `hidden`
        del product, d
        yield
        linears, gradients = (self.mlp.linears(of).values() for of in (self.w, self.dw))
        message = column_backward(self.matmul, tp, hidden, message.wait(), linears, gradients)
        yield
        # the residual's gradient, dy, is added inside
        self.norm_backward("ln2", dy, message.wait(), s.mid, s, r, out=dy)

    def projection_backward(self, dy: torch.Tensor, s: Activations, dout: torch.Tensor,
                            r: slice) -> Iterator[None]:
        """Writes rows r of the gradient of attn_out into `dout`, where mid = x + attn_out proj."""
        w, dw, dy = self.w, self.dw, dy[r]
        dy = self.norms.add_backward("post1", dy, s.proj_out[r]) if self.norms.behind else dy
        message = self.tp.start_gather(dy)
        yield
        bias_backward(dy, dw.proj_b)
        row_backward(self.matmul, message.wait(), s.attn_out[r], w.proj_w, dw.proj_w, out=dout[r])

    def queries_keys_values_backward(self, dy: torch.Tensor, s: Activations, dqkv: list[torch.Tensor],
                                     r: slice) -> Iterator[None]:
        """Writes rows r of the gradient of x, by way of mid (dy) and of q, k, v, over x."""
        message = self.matmul.start_gather(self.tp, self.operand(s, self.input_of_qkv, r))
        yield
        dys, linears, gradients = [g[r] for g in dqkv], self.qkv(self.w).values(), self.qkv(self.dw).values()
        # one sum of three
        message = column_backward(self.matmul, self.tp, dys, message.wait(), linears, gradients)
        yield
        self.norm_backward("ln1", dy[r], message.wait(), s.x, s, r, out=s.x[r])

    @staticmethod
    def qkv(w: Weights) -> dict[str, Linear]:
        """Finds {q, k, v: (matrix, bias or None)}; or their gradients."""
        return {"q": (w.q_w, w.q_b), "k": (w.k_w, w.k_b), "v": (w.v_w, w.v_b)}


class GPT:
    """Holds a stage's layers over `parameters`, and their gradients where there are any.

    `cfg.vocab_size` must be known. `edges`: embedding and head. `blocks`: the layers; what their kinds differ
    in is a unit's. `ops`: token-wise operations, `why_ops`: why these. `attention`: of a whole sequence,
    `prefix`: of a subsequence, which sees those before it too. Buckets: the embeddings, each layer, the head.
    """

    def __init__(self, cfg: Layout, parameters: Parameters) -> None:
        p, mesh = parameters, parameters.mesh
        self.cfg, self.mesh, self.layout, self.buckets = cfg, mesh, p.layout, p.buckets
        kernel = resolve_attention(cfg.attention, p.device, p.dtype, cfg.head_width, aligned(cfg),
                                   cfg.documents, cfg.window > 0)
        self.ops, self.why_ops = resolve_ops(cfg.ops, p.device)
        check_products(cfg.matmul, p.device)
        # `ahead`: blocks on their way round the ring. METP (memo/layer/metp_block.py) sends keys and values
        # of one group of heads at a time, so that a second block takes little memory
        self.attention, self.prefix = attention_over_ranks(kernel, mesh.tokens, cfg.context_parallel,
                                                           self.ops.merge, ahead=1 + cfg.metp)
        weights, gradients = (Weights(bucket_views(p.layout, p.buckets, parts) if flat.numel() else {})
                              for flat, parts in ((p.params, p.bucket_params), (p.grads, p.bucket_grads)))
        self.edges = Edges(cfg, weights, gradients, self.ops, mesh.weights)
        self.blocks = [*map(self.block, p.bucket_params[1:-1], p.bucket_grads[1:-1])]

    def block(self, weights: torch.Tensor, gradients: torch.Tensor) -> Block | MetpBlock:
        """Makes the block of a layer's flat parameters, which adds to their gradients, if there are any."""
        # all layers are alike: as the first one, which is bucket 1
        layout = {name.split(".")[-1]: p for name, p in self.layout.items() if p.bucket == 1}
        w, dw = (Weights(bucket_views(layout, self.buckets, [flat, flat]) if flat.numel() else {})
                 for flat in (weights, gradients))
        kind = MetpBlock if self.cfg.metp else Block
        return kind(self.cfg, w, dw, (self.attention, self.prefix), self.ops, self.mesh)

    @property
    def key_shape(self) -> tuple[int, int]:
        """Finds (tokens for each own row, heads of each token) in a rank's pieces of keys and values: tokens
        of all tp ranks, with METP of this one; Ulysses has those of all its ranks, with few heads each."""
        ranks, heads = self.prefix.ranks, self.blocks[0].attention.kv_heads
        # the ranks share the heads out, each at least one
        return (1 if self.cfg.metp else self.mesh.weights.size) * ranks, heads // math.gcd(heads, ranks)

    def rotations_of(self, positions: torch.Tensor, rope: Rope | None) -> torch.Tensor | None:
        """Computes (n, tp or 1, D/2), rows as q's and k's, from (N,); None where none is rotated in."""
        cfg, tp = self.cfg, self.mesh.weights
        if rope is None:
            return None
        mine = positions[tp.rank::tp.size] if cfg.metp else positions
        scaling = parse_scaling(rope.scaling)
        multipliers, factor = scaled(cfg.rotary_width, rope.theta, scaling, cfg.block_size)
        turn = rotations(mine, cfg.head_width, rope.theta, multipliers, factor * cfg.query_factor,
                         cfg.pin_memory)
        return turn.unflatten(0, (len(positions) // tp.size, -1))


def initial_weights(cfg: Layout, seed: int, device: torch.device) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields (name, fp32 tensor), whole, of a stage's parameters. GPT-2's: normal 0.02, projections into
    the residual stream over sqrt(2L)."""
    held = model_parameters(cfg)
    generator = torch.Generator(device).manual_seed(seed)
    std = {"normal": 0.02, "residual": 0.02 / math.sqrt(2 * cfg.n_layer)}
    for name, p in model_parameters(Layout.whole(cfg)).items():
        w = torch.zeros(p.shape, device=device)
        if p.init in std:
            w.normal_(0.0, std[p.init], generator=generator)
        elif p.init == "ones":
            w.fill_(1.0)
        # all of them, whole, on every rank alike, and cut later: the numbers do not depend on the layout
        if name in ("wte", "head_w"):
            w[cfg.vocab_size:] = 0.0  # the padding, which nobody looks up
        if name in held:
            yield name, w
