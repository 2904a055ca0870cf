"""Which attention kernels there are, in which order `auto` takes them, and how much memory each takes for
itself: functions of what a machine has, without torch, so that a run and its estimate choose alike.

Sources: torch's aten/src/ATen/native/transformers/cuda/sdp_utils.cpp and flash_attn/flash_api.cpp; of
flash-attention csrc/flash_attn/flash_api.cpp (2), hopper/flash_api.cpp (3), flash_attn/cute/interface.py (4).
All take fewer heads of keys and values than of queries, so do torch's cudnn/MHA.cpp and on the CPU its
FlashAttentionKernel.cpp from 2.9 on."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from math import ceil

from memo.config.config import Config
from memo.errors import ConfigError
from memo.system.hardware import LEAST_FP8, Machine

PACKAGES = ("flash_attn_4", "flash_attn_3", "flash_attn_2")  # kernels that torch does not bring along
# up to here cuDNN is wrong where the tokens are no multiple of 128 (pytorch issue 169849); torch avoids it
WRONG_CUDNN = 91500
# from here on it is right where all queries meet keys whose number is 64 mod 128: before, on Hopper, their
# gradient is NaN in rows of very low scores (cudnn-frontend issue 628)
RIGHT_CUDNN = 92600
# elements from a tensor's first to its last: whether cuDNN counts more in 64 bits everywhere is not known
FAR = 2**31
BAND_ROWS = 256  # queries of a call within a band, on the CPU: for each it computes what it hides too
TE_WORKSPACE_BYTES = 2**25  # of an FP8 product of transformer-engine's: what it takes itself from Hopper on
MAJORS = {"flash_attn_4": (9, 10, 11), "flash_attn_3": (9,)}  # compute capabilities; the others run from 8 on


@dataclass(frozen=True)
class Facts:
    """Holds what decides on an attention kernel."""

    device: str  # cuda or cpu
    dtype: str
    head_dim: int
    deterministic: bool = False
    capability: tuple[int, int] = (0, 0)  # of the GPU
    cudnn: int = 0  # its version, 92400 for 9.24.0; 0: none
    packages: dict[str, str] = field(default_factory=dict)  # {of PACKAGES: why it cannot be called, or ""}
    aligned: bool = True  # are all keys that come as a block of their own, without a mask, multiples of 128?


def aligned(cfg: Config) -> bool:
    """Says whether all blocks of keys of other ranks and earlier subsequences are multiples of 128."""
    return cfg.block_size % (128 * cfg.layout_multiple) == 0


def cudnn_version(n: int) -> str:
    """Writes 92400 as 9.24, 91501 as 9.15.1."""
    return f"{n // 10000}.{n // 100 % 100}" + f".{n % 100}" * (n % 100 > 0)


def order(facts: Facts) -> tuple[str, ...]:
    """Lists the kernels that `auto` chooses from, the fastest first. Source: docs/kernels.md; torch."""
    if facts.device == "cpu":
        return ("cpu", "math")
    newest: tuple[str, ...] = {9: ("flash_attn_4", "flash_attn_3", "cudnn"),
                               10: ("flash_attn_4", "cudnn")}.get(facts.capability[0], ())
    return (*newest, "flash_attn_2", "flash", *(() if newest else ("cudnn",)), "math")


def by_bands(name: str) -> str:
    """Names the kernel that takes what a sliding window cuts where `name` is the choice: torch has no window
    of cuDNN's."""
    return "flash" if name == "cudnn" else name


def windows_words(name: str, window: bool) -> str:
    """Says which other kernel takes windows, where a model has any."""
    return f" (windows by {by_bands(name)})" * (window and by_bands(name) != name)


def by_lengths(name: str, deterministic: bool) -> str:
    """Names the kernel that takes the lengths of many documents where `name` is the choice; "": none does.
    torch has none of cuDNN's; flash-attn 2, deterministic, takes most memory where documents are few."""
    known = dict(cudnn="flash", flash_attn_3=name, flash_attn_4=name)
    return (known if deterministic else known | dict(flash=name, flash_attn_2=name)).get(name, "")


def most_documents(rows: int) -> int:
    """Bounds the documents of a call by lengths. For each a backward takes memory of up to 128 rows more, so
    at most twice as much where rows are not few; 1,024, for a grid has an end and counters grow by both."""
    return max(16, min(rows // 128, 1024))


def check_matmul(cfg: Config, capability: tuple[int, int], itemsize: int) -> None:
    """Checks that a GPU of this compute capability, (0, 0): a CPU, has cfg.matmul. Errors: ConfigError."""
    if cfg.matmul != "fp8" or capability == (0, 0):
        return
    if capability < LEAST_FP8:
        raise ConfigError("matmul=fp8 needs a GPU of compute capability 8.9 or above (Ada, Hopper, "
                          f"Blackwell), not {capability[0]}.{capability[1]}; try --matmul=bf16")
    if itemsize != 2:
        raise ConfigError("matmul=fp8 goes with dtype=bfloat16 only on a GPU, not float32 (its FP8 products "
                          "give no other); try --dtype=bfloat16")
    if capability == LEAST_FP8 and cfg.tp > 1 and not cfg.metp:
        raise ConfigError(f"matmul=fp8 with tp={cfg.tp} needs a GPU of compute capability 9.0 or above, not "
                          "8.9 (its FP8 products take no matrix whose rows lie apart, as those of one rank's "
                          "columns do); try --tensor_parallel=metp or --matmul=bf16")


def missing(name: str, facts: Facts) -> str:
    """Says why kernel `name` cannot serve, as "it needs ..."; empty where it can."""
    D, capability = facts.head_dim, facts.capability
    if name == "math":
        return ""
    if name == "cpu":
        return "" if facts.device == "cpu" else "it runs on the CPU only"
    if facts.device != "cuda":
        return "it needs a CUDA device"
    if facts.dtype != "bfloat16":
        return "it needs dtype=bfloat16"
    if D % 8 or D > 256:
        return f"it needs head_dim={D} to be a multiple of 8 up to 256"
    if capability < (8, 0):
        return f"it needs compute capability 8.0, this GPU has {capability[0]}.{capability[1]}"
    if name in MAJORS and capability[0] not in MAJORS[name]:
        wanted = " or ".join(f"{major}.x" for major in MAJORS[name])
        return f"it needs compute capability {wanted}, this GPU has {capability[0]}.{capability[1]}"
    if name in ("cudnn", "flash_attn_4") and D > 128:
        return f"it needs head_dim={D} to be at most 128"
    if facts.deterministic and name == "cudnn":
        return "it needs deterministic=False"
    if facts.deterministic and name == "flash_attn_3" and D > 192:
        return f"it needs head_dim={D} to be at most 192 or deterministic=False"
    if name == "flash" and 192 < D <= 224 and (capability[0] == 12 or (8, 6) <= capability <= (8, 9)):
        return f"it has no backward for head_dim={D} on this GPU"
    if name == "cudnn" and not facts.cudnn:
        return "it is not part of this torch"
    return facts.packages.get(name, "it is not installed") if name in PACKAGES else ""


def passed_over(name: str, facts: Facts) -> str:
    """Says why `auto` does not take kernel `name`; empty where it may."""
    version, why = cudnn_version(facts.cudnn), missing(name, facts)
    if why or name != "cudnn":
        return why
    if facts.cudnn <= WRONG_CUDNN:
        last = cudnn_version(WRONG_CUDNN)
        return f"it is {version}: {last} and older are wrong where the tokens are no multiple of 128"
    if facts.capability[0] == 9 and not facts.aligned and facts.cudnn < RIGHT_CUDNN:
        return (f"it is {version}: before {cudnn_version(RIGHT_CUDNN)} gradients may be NaN where a rank's "
                "or subsequence's part of block_size is no multiple of 128")
    return ""


def first_that_serves(key: str, name: str, whys: Mapping[str, str]) -> tuple[str, list[str]]:
    """Finds (the first of {kernel: why it cannot serve} that can, those before it). Errors: ConfigError."""
    if name != "auto" and whys[name]:
        raise ConfigError(f"{key}={name} is not available: {whys[name]}; try {key}=auto")
    before = [*takewhile(whys.get, whys)]
    return [*whys][len(before)], before  # torch's own serve always


def choose_kernel(name: str, facts: Facts) -> tuple[str, str]:
    """Finds (the kernel called `name`, for "auto" the first that can serve; why not those before it)."""
    whys = ({kernel: passed_over(kernel, facts) for kernel in order(facts)} if name == "auto"
            else {name: missing(name, facts)})
    name, before = first_that_serves("attention", name, whys)
    return name, "; ".join(f"{kernel} {whys[kernel].removeprefix('it ')}" for kernel in before)


def kernel_of(cfg: Config, machine: Machine) -> str:
    """Finds the kernel that a run would take on a Machine; a named one is installed. Errors: ConfigError."""
    device = "cpu" if machine.cpu else "cuda"
    dtype = {"auto": "float32" if machine.cpu else "bfloat16"}.get(cfg.dtype, cfg.dtype)
    facts = Facts(device, dtype, cfg.head_width, cfg.deterministic, machine.capability,
                  cudnn=WRONG_CUDNN + 1,  # as of requirements.txt: below RIGHT_CUDNN
                  packages={cfg.attention: ""}, aligned=aligned(cfg))
    return choose_kernel(cfg.attention, facts)[0]


def workspaces(name: str, q: Sequence[int], k: Sequence[int], deterministic: bool = False,
               multiprocessors: int = 0, documents: bool = False) -> list[int]:
    """Lists the bytes of each request of kernel `name` for itself in a backward in bf16 on q (B, T, H, D)
    and k, in its order: all alive at once. docs/kernels.md says what they are; where deterministic, flash
    and flash_attn_2 have the queries' gradient for each multiprocessor. With `documents` it is called by
    lengths too, of most_documents(): then the larger of both. Counters are left out."""
    def up(n: int, multiple: int) -> int:
        return ceil(n / multiple) * multiple
    (B, T, H, D), (_, keys, Hkv, _) = q, k
    lengths = by_lengths(name, deterministic) if documents else ""
    if lengths not in ("", name):
        both = [workspaces(taken, q, k, deterministic, multiprocessors, taken == lengths)
                for taken in (name, lengths)]
        return max(both, key=sum)
    apart = 128 * (most_documents(B * T) + 1) if lengths else 0  # rows that lie between documents
    rows = 4 * H * (B * up(T, 128) + apart)  # an fp32 number for each
    shared = 2 * (Hkv < H)  # gradients of k and of v
    summed = 4 * Hkv * (B * up(keys, 128) + apart)
    if name == "flash_attn_3":
        width = next(width for width in (64, 96, 128, 192, 256) if width >= D)
        return [rows, rows, rows * width] + shared * [summed * width]
    if name == "flash_attn_4":
        return [rows * up(D, 32), rows, rows] + shared * [summed * up(D, 32)]
    if name == "cudnn":
        return [4 * B * H * (T * (D + 1) + shared * keys * D)]
    if name not in ("flash", "flash_attn_2"):
        return []
    copies = ceil(multiprocessors / (B * H)) if deterministic else 1
    return [rows, rows * copies * up(D, 32 if D <= 128 else 64)] + shared * [2 * B * keys * H * D]
