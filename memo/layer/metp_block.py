"""A layer by METP, forward and backward written out by hand: the same mathematics as model.py,
where the rank has rows of its own alone and the matrices come by (memo/layer/metp.py).

    s         the skeletal activations: x, attn_out, lse, mid, and what norms behind take. The backward makes
              what lies between them again
    n, p      the rank's rows, and the ranks that share the parameters, and the tokens
    q, k, v   of one group of heads at a time: (n, Q/groups) and (n, KV/groups)

With several subsequences k and v lie in the layer's pieces, `s.pieces`: the first group that reads some heads
of keys makes these, and the last one completes their gradients; for these two alone their matrices come.

Source: METP (FITEE 2400602), algorithms 1 to 6.
"""

from collections.abc import Callable, Sequence
from functools import partial

import torch

from memo.config.config import Config
from memo.config.layer import head_groups, layer_of, makes_queries_early
from memo.kernels.attention import Gradients
from memo.kernels.matmul import Operand, matmul_of
from memo.kernels.ops import Ops
from memo.layer import metp
from memo.layer.activations import EVERY_ROW, NO_ROWS, Activations, Pieces, Weights
from memo.layer.attend import Attention, LayerAttention, Ring, of_heads, start_keys
from memo.layer.metp import Heads, Matrices, row_pieces
from memo.layer.mlp import mlp_of
from memo.layer.norms import Norms, Statistics
from memo.parallel.mesh import Mesh
from memo.parallel.tp import bias_backward
from memo.parallel.visits import Ahead, Coming, Visits
from memo.system.axis import Hop, T

Group = tuple[Heads, Matrices]  # a group of heads, its matrices
WithKeys = tuple[*Group, Pieces, Coming | None]  # and [(k, v)] where they lie in no pieces; other ranks' keys


class MetpBlock:
    """Computes a layer, as block.Block does: each rank of `hops` has a part of each matrix, and rows."""

    def __init__(self, cfg: Config, w: Weights, dw: Weights, attention: tuple[Attention, Attention], ops: Ops,
                 mesh: Mesh) -> None:
        self.w, self.dw, self.tp, self.hops = w, dw, mesh.weights, mesh.hops
        self.norms = Norms(cfg, ops, w, dw)
        self.attention = LayerAttention(cfg, w, dw, attention, ops, mesh)
        self.matmul, self.mlp = matmul_of(cfg.matmul, ops.name), mlp_of(cfg, ops)
        layer = layer_of(cfg)
        self.projected = layer.projected
        self.groups = metp.groups_of_heads(layer.heads, layer.kv_heads, head_groups(cfg))
        self.early = makes_queries_early(cfg)
        # keys leave first; the last product of a group that waits for a message is that of the queries
        self.projections = [name for name in ("k_w", "k_b", "v_w", "v_b", "q_w", "q_b")
                            if name in layer.parameters]
        self.mlp_names = [name for name in self.mlp.split_names if name in layer.parameters]

    # --- forward ---

    def forward(self, s: Activations, out: torch.Tensor) -> torch.Tensor:
        own = self.own_parts(*self.projections, "proj_w", *self.mlp_names)
        visits = self.visits(own)  # the first matrices of the MLP come while attention computes
        # the norm's output lies in `out`, free until the MLP
        self.attention_half(s, own, out, EVERY_ROW)
        self.add_projected(s, EVERY_ROW)
        return self.mlp_half(s, own, out, visits)

    def recompute(self, s: Activations, rows: dict[str, slice]) -> None:
        r = rows.get(self.projected, NO_ROWS)
        if len(s.attn_out[rows.get("attn_out", NO_ROWS)]):
            own = self.own_parts(*(self.names_of("q") if s.pieces else self.projections), "proj_w")
            self.attention_half(s, own, torch.empty_like(s.x), r, again=True)
        elif len(s.x[r]):
            projection = self.projection(s, self.own_parts("proj_w"), r)
            projection.start(self.tp.size)
            for _ in range(self.tp.size):
                projection.add()
        self.add_projected(s, rows.get("mid", NO_ROWS))
        r = rows.get("mlp_out", NO_ROWS)
        if len(s.x[r]):
            own = self.own_parts(*self.mlp_names)
            self.mlp_product(s, own, None, s.mlp_out, self.visits(own), r)

    def sweep(self, s: Activations, x: torch.Tensor) -> None:
        names = self.names_of("kv")
        coming = self.broadcasts(self.own_parts(*names), names, lambda group: group.first)
        normed = self.matmul.rows(self.normed("ln1", x, self.norms.statistics(x), EVERY_ROW)[None])
        for heads, matrices in coming:
            self.fill_piece(s, normed, heads, matrices)
            del matrices  # before the next group's take memory

    def attention_half(self, s: Activations, own: dict[str, Operand], memory: torch.Tensor, r: slice,
                       again: bool = False) -> None:
        """Makes attn_out and lse from x, and rows r of its projection. `own`: see own_parts(); `memory`
        (n, C): for the norm's output; `again`: the unit's own piece has been made. Source: METP, algorithms 3
        and 4."""
        names = self.names_of("q") if again and s.pieces else self.projections
        projection = self.projection(s, own, r)

        def behind(heads: Heads) -> None:  # a piece of the projection's matrix for each part of attn_out
            projection.start(self.begins_part(heads) + (heads is self.groups[-1]))
        coming = self.broadcasts(own, names, lambda group: group.first or not s.pieces, behind)
        normed = self.matmul.rows(
            self.normed("ln1", s.x, self.norms.statistics(s.x), EVERY_ROW, memory)[None])
        ahead = self.groups_ahead(coming, s, normed)

        def meanwhile(done: int, left: int) -> None:
            if left <= 2:
                ahead.prepare()
        for heads, matrices, kv, others in ahead:
            [q] = self.made("q", s, normed, matrices)
            if self.begins_part(heads):
                projection.add()  # the part before
            out, lse = self.of_heads(s.attn_out, s.lse, heads)
            if s.pieces:
                self.fill_piece(s, normed, heads, matrices)
            del matrices  # before the next group's take memory
            self.attention.forward(s, q, kv, out, lse, heads.kv,
                                   (others, meanwhile) if others else None)
            del q, kv, others
        projection.add()

    def groups_ahead(self, coming: Ahead[Group], s: Activations, normed: Operand) -> Ahead[WithKeys]:
        """Iterates over the groups of heads with their keys, where these lie in no pieces. A group
        prepared before its turn has its keys on their way beside the group before."""
        def send_keys(item: Group) -> WithKeys:
            heads, matrices = item
            if s.pieces:
                return heads, matrices, [], None
            k, v = self.made("kv", s, normed, matrices)
            return heads, matrices, [(k, v)], start_keys(
                self.attention.over(s), heads.q.stop - heads.q.start, k, v)
        return Ahead(map(send_keys, coming))

    def made(self, names: str, s: Activations, normed: Operand, matrices: Matrices) -> list[torch.Tensor]:
        """Makes those of q, k, v of a group of heads, (B, T, heads, D), that `names` has, from (1, n, C)."""
        new = [self.one_made(name, s, normed, matrices,
                             s.x.new_empty(len(s.x), len(matrices[f"{name}_w"]))) for name in names]
        return self.attention.heads(*new, like=s.lse)

    def one_made(self, name: str, s: Activations, normed: Operand, matrices: Matrices,
                 out: torch.Tensor) -> torch.Tensor:
        """Writes q, k or v of a group of heads over `out` (n, heads * D), from (1, n, C)."""
        for r in row_pieces(len(out)):
            self.matmul.forward(normed[:, r], matrices[f"{name}_w"], out[r][None], matrices.get(f"{name}_b"))
        if name != "v":
            self.attention.rotate(out[:, None], s)
        return out

    def fill_piece(self, s: Activations, normed: Operand, heads: Heads, matrices: Matrices) -> None:
        """Writes the group's heads of the unit's own piece, where their matrices have come."""
        if "k_w" not in matrices:
            return
        if self.attention.keys_apart(s):
            k, v = self.made("kv", s, normed, matrices)
            self.attention.put_keys(s, k, v, heads.kv)
        else:
            [own] = of_heads(s.pieces[-1:], heads.kv)
            for name, place in zip("kv", own, strict=True):
                self.one_made(name, s, normed, matrices, out=place.flatten(2).flatten(0, 1))

    def projection(self, s: Activations, own: dict[str, Operand], r: slice) -> metp.Projection:
        """Starts the projection: rows r of mid, from x and attn_out, or of what is normed before mid. Part by
        part of the ranks' heads, not group by group as in the paper: there would be more sums."""
        x, a, out = None if self.norms.behind else s.x[r], s.attn_out[r], s.tensors[self.projected][r]
        return metp.Projection(self.matmul, self.tp, own["proj_w"], self.w.proj_b, x, a, out)

    def add_projected(self, s: Activations, r: slice) -> None:
        """Makes rows r of mid, where the projection has not."""
        if self.norms.behind:
            self.norms.add("post1", s.proj_out[r], s.x[r], out=s.mid[r])

    def mlp_half(self, s: Activations, own: dict[str, Operand], out: torch.Tensor,
                 visits: Visits) -> torch.Tensor:
        """Writes `out` (n, C), the next layer's x, from mid."""
        if not self.norms.behind:
            return self.mlp_product(s, own, s.mid, out, visits, EVERY_ROW)
        self.mlp_product(s, own, None, s.mlp_out, visits, EVERY_ROW)
        return self.norms.add("post2", s.mlp_out, s.mid, out)

    def mlp_product(self, s: Activations, own: dict[str, Operand], residual: torch.Tensor | None,
                    out: torch.Tensor, visits: Visits, r: slice) -> torch.Tensor:
        """Writes rows r of `out` (n, C), residual + the MLP of mid."""
        mid, out = s.mid[r], out[r]
        normed = partial(self.normed, "ln2", mid, self.norms.statistics(mid))
        metp.mlp_forward(self.matmul, self.mlp, self.mlp_parts(own), visits, normed, residual, out)
        _, bias = self.mlp.last_linear(own)
        return out if bias is None else out.add_(bias)

    # --- backward ---

    def backward(self, dy: torch.Tensor, s: Activations) -> torch.Tensor:
        own = self.own_parts(*self.projections, "proj_w", *self.mlp_names)
        visits = self.visits(own)
        coming = self.broadcasts(own, [*self.projections, "proj_w"], lambda group: group.last or not s.pieces)
        dx = torch.empty_like(dy)  # of a norm's output, whose parts are added one after the other
        home = self.mlp_half_backward(visits, own, dy, s, dx)
        del own  # of the MLP
        return self.attention_half_backward(coming, home, dy, s, dx)

    def mlp_half_backward(self, visits: Visits, own: dict[str, Operand], dy: torch.Tensor, s: Activations,
                          dx: torch.Tensor) -> Hop | None:
        """Writes the gradient of mid over dy. `dx` (n, C): memory. The Works: see metp_mlp_backward."""
        of, dout = self.norms.statistics(s.mid), dy
        if self.norms.behind:
            dout = self.norms.add_backward("post2", dy, s.mlp_out)
        bias_backward(dout, self.mlp.last_linear(self.dw)[1])
        normed = partial(self.normed, "ln2", s.mid, of)
        home = metp.mlp_backward(self.matmul, self.mlp, self.mlp_parts(own), visits, normed, dout,
                                 self.mlp_parts(self.dw), dx)
        self.norms.backward("ln2", dy, dx, s.mid, of, out=dy)
        return home

    def attention_half_backward(self, coming: Ahead[Group], mlp_home: Hop | None, dy: torch.Tensor,
                                s: Activations, dx: torch.Tensor) -> torch.Tensor:
        """Writes the gradient of x over s.x from dy, that of mid = x + attention(ln1 x). `dx` (n, C): memory.
        `mlp_home`: the MLP's last gradients, on their way meanwhile. Source: METP, algorithms 5 and 6."""
        of, dout = self.norms.statistics(s.x), dy
        if self.norms.behind:
            dout = self.norms.add_backward("post1", dy, s.proj_out)
        matmul, taken = self.matmul, self.matmul.gradients(dout[None])
        # nothing needs mid any more
        normed = matmul.rows(self.normed("ln1", s.x, of, EVERY_ROW, s.mid)[None])
        bias_backward(dout, self.dw.proj_b)
        home = metp.Reductions(self.tp, self.dw, self.attention.head_dim)
        keys = self.groups_ahead(coming, s, normed)
        ahead = Ahead(map(partial(self.with_queries, taken, s, normed), keys))

        def meanwhile(done: int, left: int) -> None:
            if done == 1:  # beside the first gradients of keys, which otherwise have one block alone
                self.send_projection_gradient(heads, taken, s, home)
            if left > 1:
                return
            if self.early:  # gradients of keys have the own block alone to hide behind: more is done there,
                ahead.prepare()  # so that the ring does not rest until the next group's block has gradients
            keys.prepare()
        for heads, matrices, kv, others, q, dout in ahead:
            if others is None:  # there is no ring to do it in
                self.send_projection_gradient(heads, taken, s, home)
            gradients = self.attend_group_backward(s, normed, heads, matrices, dout, q, kv,
                                                   (others, meanwhile) if others else None)
            del dout, q, kv, others
            parts = [g.reshape(len(dy), -1) for g in gradients]  # of q alone where those of k and v are not
            names = "qkv"[:len(parts)]                           # complete
            self.send_qkv_gradients(heads, dict(zip(names, parts, strict=True)), s, normed, home)
            # q, k and v at once: each sum rounds dx in the run's dtype
            dqkv, qkv_w = matmul.as_one(parts, [matrices[f"{name}_w"] for name in names])
            del gradients, parts
            for r in row_pieces(len(dy)):
                matmul.input_gradient(matmul.gradients(dqkv[r][None]), qkv_w, dx[r][None],
                                      add=heads.q.start > 0)
            del dqkv, qkv_w, matrices
            home.finish(before=heads)  # the group before's, beside this one
        self.norms.backward("ln1", dy, dx, s.x, of, out=s.x)
        home.finish()  # the last group's
        if mlp_home is not None:
            torch._foreach_add_([*self.mlp_parts(self.dw).values()], mlp_home.wait())
        return s.x

    def with_queries(self, dy: Operand, s: Activations, normed: Operand,
                     item: WithKeys) -> tuple[*WithKeys, torch.Tensor, torch.Tensor]:
        """Adds q and the gradient of attention's output to a group of groups_ahead(). dy (1, n, C)."""
        heads, matrices, kv, others = item
        if others is not None:
            others.prepare(3)  # no block of keys is in use until the ring begins: there may be one more
        [q] = self.made("q", s, normed, matrices)
        dout = torch.empty_like(q)
        flat = dout.view(1, len(s.x), -1)
        for r in row_pieces(len(s.x)):
            self.matmul.input_gradient(dy[:, r], matrices["proj_w"], flat[:, r])
        return heads, matrices, kv, others, q, dout

    def send_projection_gradient(self, heads: Heads, dy: Operand, s: Activations,
                                 home: metp.Reductions) -> None:
        """Sends off a group of heads' gradient of the projection's matrix."""
        D, places = self.attention.head_dim, home.places(heads, ["proj_w"])
        columns = s.attn_out[:, heads.q.start * D:heads.q.stop * D]
        for r in row_pieces(len(s.x)):
            self.matmul.weight_gradient(places["proj_w"], dy[:, r], self.matmul.rows(columns[r][None]))
        home.start(heads, places, "proj_w")

    def send_qkv_gradients(self, heads: Heads, parts: dict[str, torch.Tensor], s: Activations,
                           normed: Operand, home: metp.Reductions) -> None:
        """Turns the gradients of q, k, v of a group, `parts`, back; sends off those of their matrices."""
        places = home.places(heads, self.names_of("".join(parts)))
        for name, g in parts.items():
            if name != "v":
                self.attention.rotate(g[:, None], s, back=True)
            bias_backward(g, places.get(f"{name}_b"))
            for r in row_pieces(len(g)):
                gradient = self.matmul.gradients(g[r][None])
                self.matmul.weight_gradient(places[f"{name}_w"], gradient, normed[:, r])
                del gradient  # before the next piece's
            home.start(heads, places, f"{name}_w", f"{name}_b")

    def attend_group_backward(self, s: Activations, normed: Operand, heads: Heads, matrices: Matrices,
                              dout: torch.Tensor, q: torch.Tensor, kv: Pieces,
                              ring: Ring | None) -> Gradients:
        """Computes dq, dk, dv of a group of heads; `kv` of one subsequence. With several dq alone where
        another group is to add to the gradients of the same heads of keys."""
        out, lse = self.of_heads(s.attn_out, s.lse, heads)
        gradients = self.attention.backward(s, dout, q, kv, out, lse, heads.kv, ring)
        if not s.pieces or "k_w" not in matrices:
            return gradients
        [sums] = of_heads(s.sums[-1:], heads.kv)
        k, v = (torch.empty(t.shape, dtype=q.dtype, device=q.device) for t in sums)
        if self.attention.keys_apart(s):  # the norm's backward wants k as it was before
            [k] = self.made("k", s, normed, matrices)
        return [*gradients, *self.attention.key_gradients(s, k, v, heads.kv)]

    # --- what both need ---

    def own_parts(self, *names: str) -> dict[str, Operand]:
        """Finds {name: the rank's part of a parameter}: of all, the matrices among `names` as they travel."""
        matrices = [name for name in names if name.endswith("_w")]
        taken = self.matmul.matrices(self.tp, [self.w[name] for name in matrices])
        return self.w | dict(zip(matrices, taken, strict=True))

    def visits(self, own: dict[str, Operand]) -> Visits:
        return Visits(self.hops, *map(self.matmul.carried, self.mlp_parts(own).values()))

    def mlp_parts(self, of: dict[str, T]) -> dict[str, T]:
        return {name: of[name] for name in self.mlp_names}

    def broadcasts(self, own: dict[str, Operand], names: Sequence[str], keys_at: Callable[[Heads], bool],
                   behind: Callable[[Heads], None] = lambda group: None) -> Ahead[Group]:
        """Iterates over the groups of heads with their matrices `names`, in the same order on all ranks;
        the next group's are on their way meanwhile, the first one's from now on. Those of keys and values
        come with the groups of keys_at(group) alone. behind(group) is called when a group's are posted."""
        def start(group: Heads) -> Group:
            wanted = {name: own[name] for name in names if name[0] not in "kv" or keys_at(group)}
            matrices = metp.start_broadcasts(self.matmul, self.tp, wanted, group, self.attention.head_dim)
            behind(group)
            return group, matrices
        return Ahead(map(start, self.groups), ahead=1)

    def begins_part(self, heads: Heads) -> bool:
        """Says whether the heads before the group are those of whole ranks of `tp`."""
        return heads.q.start > 0 and heads.q.start * self.tp.size % self.groups[-1].q.stop == 0

    def names_of(self, which: str) -> list[str]:
        return [name for name in self.projections if name[0] in which]

    def of_heads(self, attn_out: torch.Tensor, lse: torch.Tensor,
                 heads: Heads) -> tuple[torch.Tensor, torch.Tensor]:
        """Views (attn_out (B, T, heads, D), lse (B, heads, T)) of a group."""
        return *(x[:, :, heads.q] for x in self.attention.heads(attn_out, like=lse)), lse[:, heads.q]

    def normed(self, name: str, x: torch.Tensor, of: Statistics, r: slice,
               out: torch.Tensor | None = None) -> torch.Tensor:
        """Computes rows r of the norm of x (n, C), and `of` its statistics; without such a norm they are x.
        `out`: where to, by default new."""
        if f"{name}_w" not in self.w:
            return x[r]
        out = torch.empty_like(x[r]) if out is None else out
        self.norms.forward(name, x[r], out, [t[r] for t in of])
        return out
