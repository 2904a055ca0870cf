"""A GPT whose forward and backward are written out by hand: what lives where, and when, can be read here, in
memo/layer/block.py, which has one layer, and in memo/layer/edges.py, which has embedding and head.

    B, T, N   sequences, the T = S/cp tokens of each that this rank holds, and their rows N = B*T: row b*T + t
              is the t-th token of sequence b
    n, tp     the N/tp rows that are the rank's own, and the ranks that share a layer; (n, tp, width) is all N
              rows, in order
    C, H, D   hidden size, heads, head dimension
    x, y      the input of a layer and its output, which is the next layer's input: (n, C)
    dy, dx    gradients of the loss; parameter gradients accumulate in fp32
"""

import math
from collections.abc import Iterator
from dataclasses import replace

import torch

from memo.config.layout import Layout
from memo.config.rope import parse_scaling, scaled
from memo.kernels.attention import resolve_attention
from memo.kernels.backends import aligned
from memo.kernels.matmul import check_products
from memo.kernels.ops import resolve_ops, rotations
from memo.layer.activations import Weights
from memo.layer.block import Block
from memo.layer.cp import attention_over_ranks
from memo.layer.edges import Edges, Tables
from memo.layer.metp_block import MetpBlock
from memo.memory.flat import model_parameters
from memo.memory.parameters import Parameters
from memo.memory.views import bucket_views, views
from memo.states.protocols import LayerBlock


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


class GPT:
    """Computes a stage's part of a GPT over `parameters`, and their gradients where there are any.

    `cfg.vocab_size` must be known. `edges`: embedding and head. `blocks`: the layers, all alike. `ops`:
    token-wise operations, `why_ops`: why these. `attention`: of a whole sequence, `prefix`: over what lies
    before.
    """

    def __init__(self, cfg: Layout, parameters: Parameters) -> None:
        p, mesh = parameters, parameters.mesh
        self.cfg, self.mesh, self.layout, self.buckets = cfg, mesh, p.layout, p.buckets
        kernel = resolve_attention(cfg.attention, p.device, p.dtype, cfg.head_width, aligned(cfg))
        self.ops, self.why_ops = resolve_ops(cfg.ops, p.device)
        check_products(cfg.matmul, p.device)
        # METP's keys and values are those of one group of heads: a second hop takes little memory
        self.attention, self.prefix = attention_over_ranks(kernel, mesh.tokens, cfg.context_parallel,
                                                           self.ops.merge, ahead=1 + cfg.metp)
        weights, gradients = (self.tables(parts) if parts else Tables() for parts in (
            p.bucket_params, p.bucket_grads if p.grads.numel() else []))
        self.edges = Edges(cfg, weights, gradients, self.ops, mesh.weights)
        self.blocks = [*map(self.block, p.bucket_params[1:-1], p.bucket_grads[1:-1])]

    def tables(self, parts: list[torch.Tensor]) -> Tables:
        """Views the parts of embedding and head in the flat tensors of the buckets."""
        named = bucket_views(self.layout, self.buckets, parts)
        return Tables(**{name: t for name, t in named.items() if "." not in name})

    def block(self, weights: torch.Tensor, gradients: torch.Tensor) -> LayerBlock:
        """Makes the block of a layer's flat parameters, which adds to their gradients, if there are any."""
        (start, _), first = self.buckets[1], f"h.{self.cfg.layers[0]}."  # all layers are alike
        layout = {name.removeprefix(first): replace(p, offset=p.offset - start)
                  for name, p in self.layout.items() if name.startswith(first)}
        w, dw = (Weights(**views(layout, flat)) if flat.numel() else Weights()
                 for flat in (weights, gradients))
        kind = MetpBlock if self.cfg.metp else Block
        return kind(self.cfg, w, dw, (self.attention, self.prefix), self.ops, self.mesh)

    @property
    def key_shape(self) -> tuple[int, int]:
        """Finds (tokens for each own row, heads of each token) of keys and values over a prefix."""
        ranks, heads = self.prefix.ranks, self.blocks[0].attention.kv_heads
        # the ranks share the heads out, each at least one
        return (1 if self.cfg.metp else self.mesh.weights.size) * ranks, heads // math.gcd(heads, ranks)

    def rotations_of(self, positions: torch.Tensor) -> torch.Tensor | None:
        """Computes (n, tp or 1, D/2), rows as q's and k's, from (N,); None where positions are learned."""
        cfg, tp = self.cfg, self.mesh.weights
        if cfg.position == "learned":
            return None
        mine = positions[tp.rank::tp.size] if cfg.metp else positions
        turn = rotations(mine, cfg.head_width, cfg.rope_theta,
                         *scaled(cfg.head_width, cfg.rope_theta, parse_scaling(cfg.rope_scaling)))
        return turn.unflatten(0, (len(positions) // tp.size, -1))
