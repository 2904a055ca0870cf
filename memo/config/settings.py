"""The keys of a configuration, and what follows from them alone. Config (memo/config/config.py) has them."""

import math
import re
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from itertools import chain, cycle, islice
from typing import NamedTuple

from memo.config.keys import key

FP8_MULTIPLE = 16  # of the widths and rows of matrices in FP8 products, for the kernels of a GPU

# Bounds that several keys share. They are generous: a value beyond them is a typing error, or fails later
steps_key = partial(key, most=10**12, why="at a millisecond each these take 31 years")
rate_key = partial(key, least=0.0, most=100.0, why="AdamW moves every weight by about as much in a step")
width_key = partial(key, least=1, most=2**20, why="a single layer of that width has 13e12 parameters")


MOST_LAYERS = 2000
LAYER_TYPES = re.compile(r"((?:sliding|full)(?:-nope)?)(?:\*([1-9][0-9]{0,3}))?")


@lru_cache(64)  # a search makes thousands of configs
def layer_names(layer_types: str) -> tuple[str, ...]:
    """Reads the kinds of layers in layer_types: sliding or full, -nope without positions. Errors:
    ValueError."""
    items = [LAYER_TYPES.fullmatch(item) for item in layer_types.split(",")]
    if not all(items):
        raise ValueError
    return tuple(chain.from_iterable([item[1]] * int(item[2] or 1) for item in items if item))


def slides(name: str) -> bool:
    """Says whether a kind of layers of layer_types has a window."""
    return name.startswith("sliding")


class Rope(NamedTuple):
    """Says how positions are rotated in: frequencies of base `theta`, changed by `scaling`, JSON."""

    theta: float
    scaling: str = ""


class Kind(NamedTuple):
    """Says what attention of a layer sees: of each token `window` tokens, itself the last, or with 0 all
    before it; positions rotated in by `rope`, or none."""

    window: int
    rope: Rope | None


@dataclass(frozen=True)
class Settings:
    """Holds the keys, each with its default, bounds and help."""

    n_layer: int = key(4, "L, transformer layers", least=1, most=MOST_LAYERS,
                       section="model: these belong to a checkpoint and cannot change under it",
                       why="the deepest models known have 1,000, and each layer is planned by itself")
    n_head: int = width_key(4, "H, attention heads")
    n_embd: int = width_key(256, "C, hidden size")
    block_size: int = key(4096, "S, tokens in a sequence", least=1, most=2**31,
                          why="rows are counted in 32 bits")
    vocab_size: int = key(0, "V, vocabulary; 0 takes the dataset's", least=0, most=2**32,
                          why="a dataset's tokens have at most 32 bits")
    n_kv_head: int = width_key(0, "Hkv, heads of keys and values; 0 means n_head", least=0)
    head_dim: int = width_key(0, "D, elements of a head; 0 means n_embd/n_head", least=0)
    n_inner: int = width_key(0, "F, width of the MLP; 0 means 4*n_embd, if gated 8/3*n_embd rounded up "
                             "to a multiple of 256", least=0)
    norm: str = key("layernorm", "norm before each half of a layer and before the head",
                    choices=("layernorm", "rmsnorm"))
    norm_eps: float = key(1e-5, "added to the mean square before its root is taken", least=0.0, most=1.0,
                          why="it would drown the values")
    mlp: str = key("gelu", "fc2 gelu(fc1 x), or gated, down (silu(gate x) * up x), for geglu with the tanh "
                   "form of gelu in silu's place", choices=("gelu", "swiglu", "geglu"))
    bias: bool = key(False, "biases in the linears and norms")
    qkv_bias: bool = key(False, "biases of q, k and v")
    norms: str = key("before", "where norms are: before attention and MLP, behind what they give (x + "
                     "norm(attention(x)), as in Olmo 2), or both (Gemma 3)",
                     choices=("before", "behind", "both"))
    qk_norm: bool = key(False, "an RMSNorm of q and k before positions are rotated in")
    qk_norm_over: str = key("head", "what it is over: each head, or as in Olmo 2 all heads together",
                            choices=("head", "all"))
    query_scalar: int = width_key(0, "what attention divides products of queries and keys by the root of; 0 "
                                  "means D", least=0)
    scale_embeddings: bool = key(False, "embeddings times the root of n_embd, in front of the first layer")
    tie_embeddings: bool = key(True, "the head's matrix is the embedding's")
    gelu: str = key("exact", "form of the GELU; GPT-2 has tanh", choices=("exact", "tanh"))
    position: str = key("rope", "rotary, or learned as in GPT-2", choices=("rope", "learned"))
    rope_theta: float = key(10000.0, "base of the rotary frequencies", least=1.0, most=1e30,
                            why="the frequencies are its inverse powers, which float32 must hold")
    rope_scaling: str = key("", "beyond the length that a model was trained at: JSON as in a config.json of "
                            "Hugging Face, with rope_type llama3, yarn, longrope or linear", most=10**4)
    partial_rotary_factor: float = key(1.0, "part of the elements of a head that rotate, the first of them",
                                       least=0.0, most=1.0, why="it has no more")
    sliding_window: int = key(0, "W, tokens that a token of a sliding layer sees, itself the last; 0: all",
                              least=0, most=2**31, why="rows are counted in 32 bits")
    layer_types: str = key("", "kinds of layers, over and over, as in sliding*5,full; with -nope they rotate "
                           "no positions in; by default all slide where there is a sliding_window")
    rope_local_theta: float = key(0.0, "rope_theta of sliding layers, which then take no rope_scaling; 0: as "
                                  "the others", least=0.0, most=1e30,
                                  why="the frequencies are its inverse powers, which float32 must hold")

    dataset: str = key("stdlib", "a folder's name under data/, or a path: train.bin, val.bin, meta.json",
                       section="data", least=1)
    check_data: bool = key(False, "compare all of the data with what was prepared, not stretches alone")
    allow_other_data: bool = key(False, "resume a checkpoint that was trained with other data")
    documents: bool = key(False, "a token sees its own document alone, where positions begin at 0; else a "
                          "sequence is a window of the dataset, whatever is in it")
    pack: str = key("best_fit", "with documents=true, how these become sequences: whole, each where it fits "
                    "best, or windows in order", choices=("best_fit", "in_order"))
    batch_size: int = key(1, "B, sequences in a forward pass", least=1, most=10**6,
                          why="they are read one by one")
    gradient_accumulation_steps: int = key("auto", "forward and backward passes in a step, over all ranks; "
                                           "auto takes one for each dp rank", least=1, most=10**6,
                                           why="at a millisecond each a step takes 17 minutes")

    tp: int = key(1, "ranks that share each layer: tensor and sequence parallelism, inside a node",
                  section="ranks: dp is what is left of torchrun's WORLD_SIZE", least=1, most=1024,
                  why="no node has as many GPUs")
    tensor_parallel: str = key("megatron", "what travels between the ranks of tp: tokens, or as in METP "
                               "the matrices of a layer, while tokens stay",
                               choices=("megatron", "metp"))
    head_groups: int = key("auto", "for tensor_parallel=metp, groups of heads whose q, k and v exist one "
                           "after the other", least=1, most=2**20, why="no model has as many heads")
    cp: int = key(1, "ranks that share each sequence: context parallelism", least=1, most=2**20,
                  why="no cluster has as many GPUs")
    context_parallel: str = key("ring", "what travels between the ranks of cp: keys and values in a ring, "
                                "or all-to-all, tokens for heads", choices=("ring", "ulysses"))
    pp: int = key(1, "stages, each of which has some of the layers: pipeline parallelism, fed with "
                  "subsequences; auto takes as many as are fastest", least=1, most=2000,
                  why="no model has as many layers", auto=True)
    msp: bool = key(False, "stages that have nothing of their own to compute, before their first subsequence "
                    "and behind their last, compute part of those of other stages, where that is faster")

    activation: str = key("memo", "what becomes of a layer's activations until its backward: kept on the "
                          "device, recomputed from its input, swapped to the host, or swapped as far as "
                          "that hides and fits", section="activations",
                          choices=("keep", "recompute", "swap", "memo"))
    alpha: float = key("auto", "for activation=memo, the part of what may be recomputed that is swapped "
                       "instead, 0 to 1, or auto", least=0.0, most=1.0, why="1 is all of it")
    alpha_mode: str = key("per_tensor", "what auto finds: one alpha and two buffers as in the paper, or a "
                          "fraction for each tensor and as many buffers as fit",
                          choices=("paper", "per_tensor"))
    subsequences: int = key("auto", "N, parts that each sequence is cut into: a layer is computed, swapped "
                            "and recomputed for one after the other; auto takes the fastest that fits",
                            least=1, most=2**16,
                            why="each layer has as many steps, and each is planned by itself")
    subsequence_cut: str = key("auto", "what several subsequences have equally much of: tokens, or a "
                               "layer's FLOPs, so that the early ones are longer",
                               choices=("auto", "equal", "flops"))
    unit_order: str = key("auto", "with several subsequences the forward goes over all of them in a layer "
                          "before the next layer, or over all layers of a subsequence first",
                          choices=("auto", "layer", "subsequence"))
    host_memory_gb: float = key("auto", "1e9 bytes of this host's memory to take; auto takes what is free",
                                least=0.0, most=9e9, why="bytes are counted in 63 bits")
    pin_memory: bool = key(True, "page-lock that memory, for a GPU")
    memory_plan: str = key("bilevel", "temporary tensors get addresses planned before training; off leaves "
                           "them to torch", choices=("bilevel", "off"))
    memory_plan_check: bool = key(False, "on every request, check that no two live tensors overlap; slow")
    solver: str = key("auto", "the memory plan's solver",
                      choices=("auto", "greedy", "mip", "cpsat", "gurobi"))

    max_iters: int = steps_key(1000, "steps in the whole run", section="optimizer", least=1)
    learning_rate: float = rate_key(1e-3, "highest learning rate")
    min_lr: float = rate_key(1e-4, "learning rate at the end of the decay")
    warmup_iters: int = steps_key(20, "steps of linear warmup; lowered where a shorter decay is given after "
                                  "it", least=0)
    lr_decay_iters: int = steps_key(0, "step at which the cosine reaches min_lr; 0 means max_iters", least=0)
    weight_decay: float = key(0.1, "decoupled weight decay, on matrices only", least=0.0, most=1000.0,
                              why="a step multiplies matrices by 1 - learning_rate*weight_decay")
    beta1: float = key(0.9, "AdamW's first moment", least=0.0, below=1.0, why="a moment of 1 never changes")
    beta2: float = key(0.95, "AdamW's second moment", least=0.0, below=1.0, why="a moment of 1 never changes")
    grad_clip: float = key(1.0, "largest global gradient norm; 0 does not clip", least=0.0, most=1e38,
                           why="float32 holds no larger norm; 0 does not clip")
    optimizer_device: str = key("auto", "cpu keeps master weights and moments in host memory; auto on the "
                                "device", choices=("auto", "cpu"))
    states: str = key("auto", "where a layer's parameters and gradients are while nothing is computed with "
                      "it: on the device; sharded over the ranks that have the same ones; on the host, with "
                      "the optimizer's states; auto leaves the device only where that is too small",
                      choices=("auto", "device", "sharded", "host"))

    out_dir: str = key("out", "where checkpoints, metrics and pictures go", section="the run", least=1)
    init_from: str = key("scratch", "scratch | resume | hf:<folder of a Hugging Face model>")
    eval_interval: int = steps_key(100, "steps between evaluations; 0 never evaluates", least=0)
    eval_iters: int = steps_key(8, "batches in an evaluation", least=1)
    log_interval: int = steps_key(1, "steps between lines of metrics.jsonl", least=1)
    save_interval: int = steps_key(100, "steps between checkpoints; 0 saves at the end only", least=0)
    keep_checkpoints: int = key(2, "newest checkpoints to keep, in case one is damaged; one more until a "
                                "finite step has followed the newest", least=1, most=10**6,
                                why="the folder of all is listed at each save")
    stall_timeout: float = key("auto", "seconds without progress on any rank, after which the run says "
                               "which rank the others wait for, and ends; auto: those of ten steps, at least "
                               "600; 0: it waits for ever", least=0.0, most=1e9, why="it is 31 years")
    wandb_log: bool = key(False, "also log to Weights & Biases")
    wandb_project: str = key("memo", "its project")
    wandb_run_name: str = key("", "its run name; empty lets it choose")
    device: str = key("auto", "auto takes CUDA where there is one", choices=("auto", "cpu", "cuda"))
    dtype: str = key("auto", "auto is bfloat16 on CUDA, float32 on the CPU",
                     choices=("auto", "float32", "bfloat16"))
    attention: str = key("auto", "attention kernels",
                         choices=("auto", "flash_attn_4", "flash_attn_3", "flash_attn_2", "cudnn", "flash",
                                  "cpu", "math"))
    ops: str = key("auto", "kernels of norms and rotary positions; te: also FP8 gradients of weights",
                   choices=("auto", "torch", "triton", "te"))
    matmul: str = key("bf16", "matrix products of the layers: in the run's dtype, or in FP8 with scales of "
                      "now, e4m3 forward and e5m2 for gradients", choices=("bf16", "fp8"))
    deterministic: bool = key(False, "the same bits from run to run on a GPU too")
    seed: int = key(1337, "seed of the initial weights and of the order of the data", least=0, below=2**63,
                    why="seeds have 63 bits")

    @property
    def metp(self) -> bool:
        """Says whether matrices travel between the ranks of tp, not tokens."""
        return self.tensor_parallel == "metp"

    @property
    def token_ranks(self) -> int:
        """Counts the ranks that share a sequence in attention."""
        return self.cp * self.tp if self.metp else self.cp

    @property
    def kv_heads(self) -> int:
        """Counts Hkv, the heads of keys and values."""
        return self.n_kv_head or self.n_head

    @property
    def held_kv_heads(self) -> int:
        """Counts the heads of keys and values that all ranks of tp hold: more ranks than heads hold copies of
        them, but METP's hold parts."""
        return self.kv_heads if self.metp else max(self.kv_heads, self.tp)

    @property
    def head_width(self) -> int:
        """Counts D, the elements of a head."""
        return self.head_dim or self.n_embd // self.n_head

    @property
    def query_factor(self) -> float:
        """Finds what multiplies queries, and keys, for query_scalar: kernels divide by the root of D."""
        return math.sqrt(math.sqrt(self.head_width / (self.query_scalar or self.head_width)))

    @property
    def rotary_width(self) -> int:
        """Counts the elements of a head that rotate."""
        return int(self.head_width * self.partial_rotary_factor)

    @property
    def window(self) -> int:
        """Finds the window of sliding layers; 0 where it hides nothing."""
        return self.sliding_window if self.sliding_window < self.block_size else 0

    @cached_property
    def kinds(self) -> tuple[Kind, ...]:
        """Lists the Kind of each layer."""
        every = Rope(self.rope_theta, self.rope_scaling) if self.position == "rope" else None
        local = Rope(self.rope_local_theta) if self.rope_local_theta else every

        def kind(name: str) -> Kind:
            return Kind(self.window * slides(name), None if "-" in name else local if slides(name) else every)
        return tuple(map(kind, self.types))

    @cached_property
    def types(self) -> tuple[str, ...]:
        """Lists for each layer what layer_types say of it."""
        names = layer_names(self.layer_types or ("sliding" if self.sliding_window else "full"))
        return tuple(islice(cycle(names), self.n_layer))

    @cached_property
    def windows(self) -> tuple[int, float]:
        """Finds the window of sliding layers, and which part of all layers has it, from 0 to 1."""
        return self.window, sum(kind.window > 0 for kind in self.kinds) / self.n_layer

    @property
    def inner_width(self) -> int:
        """Counts F, the width of the MLP, given or implied by the hidden size."""
        C = self.n_embd
        return self.n_inner or (4 * C if self.mlp == "gelu" else -(-8 * C // (3 * 256)) * 256)

    @property
    def zigzag(self) -> bool:
        """Says whether a rank holds two chunks of a sequence, an early and a late one."""
        return (self.cp > 1 and self.context_parallel == "ring") or (self.metp and self.tp > 1)

    @property
    def layout_multiple(self) -> int:
        """Counts the tokens that ranks can share out: as many for each, and for each of its chunks."""
        return (2 if self.zigzag else 1) * self.cp * self.tp

    @property
    def block_multiple(self) -> int:
        """Finds what block_size and each subsequence must be a multiple of: see config.block_rule()."""
        return FP8_MULTIPLE * self.cp * self.tp if self.matmul == "fp8" else self.layout_multiple

    @property
    def padded_vocab_size(self) -> int:
        """Pads to a multiple of 128 rows: they keep matrix products aligned and divide among ranks."""
        return -(-self.vocab_size // 128) * 128

    @property
    def finds_alpha(self) -> bool:
        """Says whether the alpha program chooses; otherwise alpha is given, or the mode has none."""
        return self.activation == "memo" and self.alpha == "auto"

    @property
    def n_subsequences(self) -> int:
        """Counts N; one where nobody has decided."""
        return 1 if self.subsequences == "auto" else self.subsequences

    def micro_batches(self, dp: int) -> int:
        """Counts a step's micro batches, over all ranks; `dp` of them get others each."""
        return dp if self.gradient_accumulation_steps == "auto" else self.gradient_accumulation_steps

    @property
    def undecided(self) -> bool:
        """Says whether choose.choose() is to find stages, subsequences or the states' place, for training."""
        return "auto" in (self.pp, self.subsequences, self.states) or (
            self.subsequences > 1 and "auto" in (self.subsequence_cut, self.unit_order))

    @property
    def decay_iters(self) -> int:
        return self.lr_decay_iters or self.max_iters
