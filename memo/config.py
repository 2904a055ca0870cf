"""The configuration: one frozen dataclass, all rules checked before a device is touched."""

import math
from dataclasses import dataclass, field, fields, replace
from typing import Any

from memo.errors import ConfigError
from memo.formulas import parameters
from memo.keys import check_value, key
from memo.layer import FP8_MULTIPLE, head_groups, possible_groups
from memo.msp import Shares
from memo.rope import parse_scaling
from memo.stages import stage_layers

# Bounds that several keys share. They are generous: a value beyond them is a typing error, or fails later
STEPS: dict[str, Any] = dict(most=10**12, why="at a millisecond each these take 31 years")
RATE: dict[str, Any] = dict(least=0.0, most=100.0, why="AdamW moves every weight by about as much in a step")
LAYER_WIDTH: dict[str, Any] = dict(least=1, most=2**20,
                                   why="a single layer of that width has 13e12 parameters")
MOST_TOGETHER = {  # keys within their bounds may be too much together
    "batch_size*block_size/cp": (2**31, "rows of a rank are counted in 32 bits"),
    "gradient_accumulation_steps*batch_size*block_size":
        (2**40, "the ids of a step's tokens alone take 16 TiB"),
    "parameters": (10**14, "their states take 1.6e15 bytes; lower n_layer, n_embd, vocab_size or block_size")}


@dataclass(frozen=True)
class Config:
    n_layer: int = key(4, "L, transformer layers",
                       section="model: these belong to a checkpoint and cannot change under it", least=1,
                       most=2000,
                       why="the deepest models known have 1,000, and each layer is planned by itself")
    n_head: int = key(4, "H, attention heads", **LAYER_WIDTH)
    n_embd: int = key(256, "C, hidden size", **LAYER_WIDTH)
    block_size: int = key(4096, "S, tokens in a sequence", least=1, most=2**31,
                          why="rows are counted in 32 bits")
    vocab_size: int = key(0, "V, vocabulary; 0 takes the dataset's", least=0, most=2**32,
                          why="a dataset's tokens have at most 32 bits")
    n_kv_head: int = key(0, "Hkv, heads of keys and values; 0 means n_head", **LAYER_WIDTH | dict(least=0))
    head_dim: int = key(0, "D, elements of a head; 0 means n_embd/n_head", **LAYER_WIDTH | dict(least=0))
    n_inner: int = key(0, "F, width of the MLP; 0 means 4*n_embd, for swiglu 8/3*n_embd rounded up to a "
                       "multiple of 256", **LAYER_WIDTH | dict(least=0))
    norm: str = key("layernorm", "norm before each half of a layer and before the head",
                    choices=("layernorm", "rmsnorm"))
    norm_eps: float = key(1e-5, "added to the mean square before its root is taken", least=0.0, most=1.0,
                          why="it would drown the values")
    mlp: str = key("gelu", "fc2 gelu(fc1 x), or down (silu(gate x) * up x)", choices=("gelu", "swiglu"))
    bias: bool = key(False, "biases in the linears and norms")
    qkv_bias: bool = key(False, "biases of q, k and v")
    qk_norm: bool = key(False, "an RMSNorm of each head's q and k before positions are rotated in")
    tie_embeddings: bool = key(True, "the head's matrix is the embedding's")
    gelu: str = key("exact", "form of the GELU; GPT-2 has tanh", choices=("exact", "tanh"))
    position: str = key("rope", "rotary, or learned as in GPT-2", choices=("rope", "learned"))
    rope_theta: float = key(10000.0, "base of the rotary frequencies", least=1.0, most=1e30,
                            why="the frequencies are its inverse powers, which float32 must hold")
    rope_scaling: str = key("", "beyond the length that a model was trained at: JSON as in a config.json of "
                            "Hugging Face, with rope_type llama3, yarn or linear")

    dataset: str = key("stdlib", "a folder's name under data/, or a path: train.bin, val.bin, meta.json",
                       section="data", least=1)
    batch_size: int = key(1, "B, sequences in a forward pass", least=1, most=10**6,
                          why="they are read one by one")
    gradient_accumulation_steps: int = key(1, "forward and backward passes in a step", least=1, most=10**6,
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
    alpha: float = key("auto", "for activation=memo, the part of the tokens whose activations are swapped, "
                       "0 to 1, or auto", least=0.0, most=1.0, why="1 is all tokens")
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
    solver: str = key("auto", "the memory plan's solver", choices=("auto", "greedy", "mip", "cpsat"))

    max_iters: int = key(1000, "steps in the whole run", section="optimizer", least=1, **STEPS)
    learning_rate: float = key(1e-3, "highest learning rate", **RATE)
    min_lr: float = key(1e-4, "learning rate at the end of the decay", **RATE)
    warmup_iters: int = key(20, "steps of linear warmup; lowered where a shorter decay is given after it",
                            least=0, **STEPS)
    lr_decay_iters: int = key(0, "step at which the cosine reaches min_lr; 0 means max_iters", least=0,
                              **STEPS)
    weight_decay: float = key(0.1, "decoupled weight decay, on matrices only", least=0.0, most=1000.0,
                              why="a step multiplies matrices by 1 - learning_rate*weight_decay")
    beta1: float = key(0.9, "AdamW's first moment", least=0.0, below=1.0, why="a moment of 1 never changes")
    beta2: float = key(0.95, "AdamW's second moment", least=0.0, below=1.0, why="a moment of 1 never changes")
    grad_clip: float = key(1.0, "largest global gradient norm; 0 does not clip", least=0.0, most=1e38,
                           why="float32 holds no larger norm; 0 does not clip")
    optimizer_device: str = key("auto",
                                "cpu keeps master weights and moments in host memory; auto on the device",
                                choices=("auto", "cpu"))

    states: str = key("auto", "where a layer's parameters and gradients are while nothing is computed with "
                      "it: on the device; sharded over the ranks that have the same ones; on the host, with "
                      "the optimizer's states; auto leaves the device only where that is too small",
                      choices=("auto", "device", "sharded", "host"))

    out_dir: str = key("out", "where checkpoints, metrics and pictures go", section="the run", least=1)
    init_from: str = key("scratch", "scratch | resume | hf:<folder of a Hugging Face model>")
    eval_interval: int = key(100, "steps between evaluations; 0 never evaluates", least=0, **STEPS)
    eval_iters: int = key(8, "batches in an evaluation", least=1, **STEPS)
    log_interval: int = key(1, "steps between lines of metrics.jsonl", least=1, **STEPS)
    save_interval: int = key(100, "steps between checkpoints; 0 saves at the end only", least=0, **STEPS)
    keep_checkpoints: int = key(2, "newest checkpoints to keep: where the newest is damaged, the one before "
                                "serves", least=1, most=10**6,
                                why="the folder of all is listed after each save")
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

    # of pp, that of a rank, and what stages compute for each other: no keys
    stage: int = field(default=0)
    shares: Shares = field(default=())

    def __post_init__(self) -> None:
        for name, f in KEYS.items():
            check_value(f, getattr(self, name))
        self.check_heads()
        if self.bias and (self.norm, self.mlp) != ("layernorm", "gelu"):
            raise ConfigError(f"bias=True goes with norm=layernorm and mlp=gelu only, not norm={self.norm} "
                              f"and mlp={self.mlp}; leave it out, or give qkv_bias=True")
        if self.gelu != "exact" and self.mlp != "gelu":
            raise ConfigError(f"gelu={self.gelu} goes with mlp=gelu only; leave one of them out")
        scaling = parse_scaling(self.rope_scaling)
        if scaling.get("rope_type") == "yarn" and self.rope_theta == 1:
            raise ConfigError("rope_theta=1.0 must be above 1 for rope_type=yarn (all pairs turn equally "
                              "fast); raise it, or give rope_type linear")
        if scaling and self.position != "rope":
            raise ConfigError(f"rope_scaling goes with position=rope only, not position={self.position}; "
                              "leave one of them out")
        self.check_sizes()
        self.check_layout()
        if self.min_lr > self.learning_rate:
            raise ConfigError(f"min_lr={self.min_lr} must be <= learning_rate={self.learning_rate}; lower "
                              "min_lr")
        if self.decay_iters < self.warmup_iters:
            name = "lr_decay_iters" if self.lr_decay_iters else "max_iters"
            raise ConfigError(f"warmup_iters={self.warmup_iters} must be <= {name}={self.decay_iters}; lower "
                              f"warmup_iters, or raise {name}")
        if self.alpha != "auto" and self.activation != "memo":
            raise ConfigError(f"alpha={self.alpha} goes with activation=memo only, not "
                              f"activation={self.activation}; leave one of them out")
        self.check_states()
        if self.memory_plan == "off" and (self.memory_plan_check or self.solver != "auto"):
            name = "memory_plan_check" if self.memory_plan_check else "solver"
            raise ConfigError(f"{name}={getattr(self, name)} goes with memory_plan=bilevel only; leave one "
                              "of them out")
        if self.init_from not in ("scratch", "resume") and not self.init_from.startswith("hf:"):
            raise ConfigError(f"init_from={self.init_from!r} must be scratch, resume or hf:<folder>")

    def check_heads(self) -> None:
        """Heads share the hidden size, or have a width of their own; query heads share those of keys."""
        C, H, Hkv = self.n_embd, self.n_head, self.kv_heads
        if not self.head_dim and H > C:
            raise ConfigError(f"n_head={H} must be at most n_embd={C} (each head has columns of its own); "
                              "lower n_head")
        if not self.head_dim and C % H:
            nearest = next(h for k in range(C) for h in (H - k, H + k) if h > 0 and C % h == 0)
            raise ConfigError(f"n_embd={C} % n_head={H} != 0 (heads share the hidden size equally); try "
                              f"n_head={nearest}, or give head_dim")
        if H % Hkv:
            nearest = next(h for k in range(H) for h in (Hkv - k, Hkv + k) if h > 0 and H % h == 0)
            raise ConfigError(f"n_head={H} % n_kv_head={Hkv} != 0 (each head of keys and values serves "
                              f"equally many of queries); try n_kv_head={nearest}")
        if self.position == "rope" and self.head_width % 2:
            name = "head_dim" if self.head_dim else "n_embd/n_head"
            raise ConfigError(f"{name}={self.head_width} must be even for position=rope (it rotates pairs); "
                              f"try another {'head_dim' if self.head_dim else 'n_head'} or position=learned")

    def check_sizes(self) -> None:
        """What nothing could hold is refused here, before anything of that size is planned."""
        B, S = self.batch_size, self.block_size
        found = (B * S // self.cp, self.gradient_accumulation_steps * B * S,
                 parameters(self) + (S * self.n_embd if self.position == "learned" else 0))
        for (what, (most, why)), value in zip(MOST_TOGETHER.items(), found, strict=True):
            if value > most:
                raise ConfigError(f"{what}={value} must be at most {most} ({why})")

    def check_layout(self) -> None:
        """tp and cp must divide what they share out."""
        H, S, tp, cp = self.n_head, self.block_size, self.tp, self.cp
        if H % tp:
            raise ConfigError(f"n_head={H} % tp={tp} != 0 (the heads are shared out); try "
                              f"tp={math.gcd(H, tp)}")
        if self.metp:
            self.check_metp()
        elif self.head_groups != "auto":
            raise ConfigError(f"head_groups={self.head_groups} goes with tensor_parallel=metp only; leave it "
                              "out")
        elif self.kv_heads % tp:
            raise ConfigError(f"n_kv_head={self.kv_heads} % tp={tp} != 0 (the heads of keys and values are "
                              f"shared out); try tp={math.gcd(H, self.kv_heads, tp)} with more cp"
                              + ", or tensor_parallel=metp" * self.may_be_metp)
        if self.inner_width % tp:
            raise ConfigError(f"n_inner={self.inner_width} % tp={tp} != 0 (the MLP's columns are shared "
                              f"out); try tp={math.gcd(H, self.inner_width, tp)}")
        if self.context_parallel == "ulysses" and H // tp % cp:
            raise ConfigError(f"n_head/tp={H // tp} % cp={cp} != 0 (context_parallel=ulysses shares out a tp "
                              f"rank's heads again); try cp={math.gcd(H // tp, cp)} or context_parallel=ring")
        if S % self.block_multiple:
            rule, why = self.block_rule
            most = max(1, S // self.block_multiple) * self.block_multiple
            raise ConfigError(f"block_size={S} % ({rule})={self.block_multiple} != 0 ({why}); try "
                              f"block_size={most}")
        if self.n_subsequences > (most := S // self.block_multiple):
            rule, _ = self.block_rule
            raise ConfigError(f"subsequences={self.subsequences} must be at most {most} (each gets at least "
                              f"({rule})={self.block_multiple} of block_size={S} tokens); try "
                              f"subsequences={most}")
        self.check_stages()
        if self.matmul == "fp8":
            self.check_fp8()
        if self.vocab_size and self.padded_vocab_size % tp:
            raise ConfigError(f"V={self.padded_vocab_size} % tp={tp} != 0 (vocab_size={self.vocab_size}, "
                              "padded to a multiple of 128, is shared out); try "
                              f"tp={math.gcd(self.padded_vocab_size, tp)}")

    def check_fp8(self) -> None:
        """A GPU's FP8 products take widths that are multiples of 16; of rows see block_rule."""
        D, tp = self.head_width, self.tp
        by, parts = ("head_groups", head_groups(self)) if self.metp else ("tp", tp)
        widths = {"n_embd": self.n_embd, "n_embd/tp": self.n_embd / (tp if self.metp else 1),
                  "n_inner/tp": self.inner_width / tp, f"n_head*head_dim/{by}": self.n_head * D / parts,
                  f"n_kv_head*head_dim/{by}": self.kv_heads * D / min(parts, self.kv_heads)}
        for name, width in widths.items():
            if width % FP8_MULTIPLE:
                raise ConfigError(f"{name}={width:g} % {FP8_MULTIPLE} != 0 (matmul=fp8: a GPU's FP8 products "
                                  "take such widths only); try --matmul=bf16")

    def check_stages(self) -> None:
        """Each stage has a layer, and goes over its layers subsequence by subsequence."""
        if self.pp == "auto":
            return
        if self.pp > self.n_layer:
            raise ConfigError(f"pp={self.pp} must be at most n_layer={self.n_layer} (each stage has whole "
                              f"layers); try pp={self.n_layer}")
        if self.pp > 1 and self.subsequences != 1 and self.unit_order == "layer":
            raise ConfigError(f"pp={self.pp} goes with unit_order=subsequence only, not layer (a stage hands "
                              "on what all its layers are done with); try "
                              "--unit_order=subsequence")
        if self.msp:
            self.check_msp()

    def check_msp(self) -> None:
        rule = "stages that have nothing to compute help others"
        if self.pp == 1:
            raise ConfigError(f"msp=True goes with pp > 1 only, not pp=1 ({rule}); try --pp=2, or leave "
                              "it out")
        if self.subsequences != "auto" and self.subsequences < self.pp:
            raise ConfigError(f"msp=True needs at least pp={self.pp} subsequences, not {self.subsequences} "
                              f"({rule}, each only before or only behind its own); try "
                              f"--subsequences={self.pp}")

    def check_states(self) -> None:
        """Layers that come take turns in two places: each comes once in a pass."""
        if not self.layers_come:
            return
        if self.pp != 1:
            raise ConfigError(f"states={self.states} goes with pp=1 only, not pp={self.pp} (a stage needs "
                              "all its layers for each subsequence, so they stay); try --pp=1 with more tp "
                              "or cp, or --states=device")
        if self.unit_order == "subsequence" and self.subsequences != 1:
            raise ConfigError(f"states={self.states} goes with unit_order=layer only, not subsequence (all "
                              "layers would come for each subsequence); try --unit_order=layer")
        if self.states == "sharded" and self.optimizer_device == "cpu":
            raise ConfigError("states=sharded goes with optimizer_device=auto only, not cpu (shards stay on "
                              "the device, beside the optimizer's); try --states=host")

    def check_metp(self) -> None:
        """Groups of heads must have equally many, of one tp rank, that share heads of keys evenly."""
        H, Hkv, tp, G = self.n_head, self.kv_heads, self.tp, self.head_groups
        if self.context_parallel == "ulysses" and self.cp * tp > 1:
            raise ConfigError("tensor_parallel=metp goes with context_parallel=ring only, not ulysses (its "
                              "keys and values go round all ranks that share a sequence); try "
                              "context_parallel=ring")
        if Hkv % tp and tp % Hkv:
            fits = max(n for n in possible_groups(H, Hkv) if n < tp)
            raise ConfigError(f"n_kv_head={Hkv} and tp={tp}: one must divide the other for "
                              "tensor_parallel=metp (a rank has whole heads of keys and values, or an equal "
                              f"part of one); try tp={fits} with more cp")
        if Hkv * self.head_width % tp:
            raise ConfigError(f"n_kv_head*head_dim={Hkv * self.head_width} % tp={tp} != 0 (the columns of "
                              "keys and values are shared out); try "
                              f"tp={math.gcd(H, Hkv * self.head_width, tp)}")
        if G == "auto":
            return
        possible = possible_groups(H, Hkv, tp)
        if G not in possible:
            nearest = min(possible, key=lambda n: abs(n - G))
            raise ConfigError(f"head_groups={G} must be a multiple of tp={tp} that divides n_head={H}, and "
                              f"divide n_kv_head={Hkv} or be a multiple of it (each group has equally many "
                              f"heads of one rank); try head_groups={nearest}, or auto")

    @property
    def may_be_metp(self) -> bool:
        """Whether tensor_parallel=metp would do with more tp ranks than heads of keys."""
        return (self.tp % self.kv_heads == 0 and self.kv_heads * self.head_width % self.tp == 0
                and self.context_parallel == "ring")

    @property
    def metp(self) -> bool:
        """Whether matrices travel between the ranks of tp, not tokens."""
        return self.tensor_parallel == "metp"

    @property
    def token_ranks(self) -> int:
        """Ranks that share a sequence in attention."""
        return self.cp * self.tp if self.metp else self.cp

    @property
    def layers(self) -> range:
        """The layers of this rank's stage, as numbers in the whole model."""
        return stage_layers(self, self.stage)

    @property
    def has_embedding(self) -> bool:
        """Whether this rank's stage is the first, which has the embedding."""
        return self.stage == 0

    @property
    def has_head(self) -> bool:
        """Whether this rank's stage is the last, which has the final norm and the head."""
        return self.stage == self.pp - 1

    @property
    def stage_kind(self) -> tuple[bool, bool, int]:
        """(whether it has the embedding, whether the head, how many layers): stages of one kind are alike."""
        return self.has_embedding, self.has_head, len(self.layers)

    @property
    def ties_stages(self) -> bool:
        """Whether the first stage and the last one hold the same matrix, the embedding's and the head's."""
        return self.pp > 1 and self.tie_embeddings

    @property
    def whole(self) -> "Config":
        """The same model in one stage."""
        return replace(self, pp=1, msp=False, stage=0, shares=())

    @property
    def kv_heads(self) -> int:
        """Hkv, heads of keys and values."""
        return self.n_kv_head or self.n_head

    @property
    def head_width(self) -> int:
        """D, elements of a head."""
        return self.head_dim or self.n_embd // self.n_head

    @property
    def inner_width(self) -> int:
        """F, width of the MLP."""
        if self.n_inner or self.mlp == "gelu":
            return self.n_inner or 4 * self.n_embd
        return -(-8 * self.n_embd // (3 * 256)) * 256

    @property
    def zigzag(self) -> bool:
        """Whether a rank holds two chunks of a sequence, an early and a late one."""
        return (self.cp > 1 and self.context_parallel == "ring") or (self.metp and self.tp > 1)

    @property
    def layout_multiple(self) -> int:
        """Tokens that the ranks can share out: as many for each, and for each of its chunks."""
        return (2 if self.zigzag else 1) * self.cp * self.tp

    @property
    def block_rule(self) -> tuple[str, str]:
        """What block_size, and each subsequence, must be a multiple of, in words, and why."""
        if self.matmul == "fp8":
            return f"{FP8_MULTIPLE}*cp*tp", f"matmul=fp8: a rank's rows come in multiples of {FP8_MULTIPLE}"
        if self.zigzag:
            return "2*cp*tp", "zigzag gives each rank two chunks"
        return "cp*tp", "the tokens are shared out"

    @property
    def block_multiple(self) -> int:
        """The same as a number."""
        return FP8_MULTIPLE * self.cp * self.tp if self.matmul == "fp8" else self.layout_multiple

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the embedding: a multiple of 128 keeps matrix products aligned and divides among ranks."""
        return -(-self.vocab_size // 128) * 128

    @property
    def finds_alpha(self) -> bool:
        """Whether the alpha program chooses; otherwise alpha is given, or the mode has none."""
        return self.activation == "memo" and self.alpha == "auto"

    @property
    def n_subsequences(self) -> int:
        """N; one where nobody has decided."""
        return 1 if self.subsequences == "auto" else self.subsequences

    @property
    def by_layer(self) -> bool:
        """Whether units run layer by layer, as they do in one stage where nobody has decided."""
        return self.n_subsequences == 1 or (self.unit_order != "subsequence" and self.pp == 1)

    @property
    def layers_come(self) -> bool:
        """Whether a layer's parameters come to the device for each pass, and its gradients leave."""
        return self.states in ("sharded", "host")

    @property
    def edges_come(self) -> bool:
        """Whether embedding and head do so too: not where both have one matrix, which both ends need. Beside
        a single layer they stay (memo/swap/layer_states.py: coming)."""
        return self.layers_come and not self.tie_embeddings

    @property
    def optimizer_on_host(self) -> bool:
        """Whether master weights, moments and steps are the host's."""
        return self.optimizer_device == "cpu" or self.states == "host"

    @property
    def undecided(self) -> bool:
        """Whether stages, subsequences or the states' place are left to choose.choose(), for a training step.
        All else takes what is undecided as it is: there is one subsequence, or equal ones go layer by layer;
        states are on the device."""
        return "auto" in (self.pp, self.subsequences, self.states) or (
            self.subsequences > 1 and "auto" in (self.subsequence_cut, self.unit_order))

    @property
    def decay_iters(self) -> int:
        return self.lr_decay_iters or self.max_iters


# that the weights of a checkpoint depend on
MODEL_KEYS = ("n_layer", "n_head", "n_embd", "block_size", "vocab_size", "n_kv_head", "head_dim", "n_inner",
              "norm", "norm_eps", "mlp", "bias", "qkv_bias", "qk_norm", "tie_embeddings", "gelu", "position",
              "rope_theta", "rope_scaling")
# that choose.choose() replaces by numbers and places, and on what of a run's layout these depend
SUBSEQUENCE_KEYS = ("subsequences", "subsequence_cut", "unit_order")
CHOSEN_KEYS = (*SUBSEQUENCE_KEYS, "pp", "states")
LAYOUT_KEYS = ("block_size", "batch_size", "tp", "tensor_parallel", "cp", "context_parallel", "pp")
POSITION_KEYS = ("block_size", "rope_theta", "rope_scaling")  # may change where positions are rotary
KEYS: dict[str, Any] = {f.name: f for f in fields(Config) if f.metadata}


def as_keys(cfg: Config) -> dict[str, Any]:
    """{key: value}."""
    return {name: getattr(cfg, name) for name in KEYS}
