"""GPUs, the nodes they come in, and the speeds that a rank gets on them: plain data, each figure with its
source, and the figures that `python -m memo.profiler --calibrate` measured on the machine at hand. Every
figure can be overridden on memo.estimate's command line. Bandwidths: of one GPU and one direction."""

import difflib
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from pathlib import Path

from memo.config.keys import Value, kind_of
from memo.errors import ConfigError, reason
from memo.system.files import Json, JsonObject, cache_place, kept_json

GIB = 2**30


@dataclass(frozen=True)
class GPU:
    """Peak: dense bf16. `memory_bytes`: what CUDA reports in all. `node`: the one it usually comes in."""

    pattern: str  # of the whole name that CUDA reports
    peak_flops_per_s: float
    memory_bytes: int
    memory_bytes_per_s: float
    multiprocessors: int
    node: str
    architecture: str


@dataclass(frozen=True)
class Node:
    """PCIe: what each GPU gets while all of the node copy at once. Network: to other nodes."""

    gpus_per_node: int
    host_memory_bytes: int
    nvlink_bytes_per_s: float
    pcie_bytes_per_s: float
    network_bytes_per_s: float
    host_bytes_per_s: float  # of the host's own memory, all cores


# total memory: torch's own "total capacity", or the datasheet's; the rest: NVIDIA's datasheets and
# whitepapers, which give the Hopper and Blackwell peaks with sparsity, twice the dense figure
GPUS = {
    # A100 datasheet: 312 TFLOPS BF16, 2,039 GB/s
    "a100-80gb": GPU(r"(NVIDIA )?A100[- ]?(SXM4|PCIE|PCIe|SXM)?[- ]?(40|80)GB( PCIe)?", 312e12,
                     int(79.1 * GIB), 2.039e12, 108, "dgx-a100", "ampere"),
    # MEMO 5.1: the same cores, 80 GB
    "a800-80gb": GPU(r"(NVIDIA )?A800[- ]?(SXM4|PCIE|PCIe|SXM)?[- ]?(40|80)GB( PCIe)?", 312e12,
                     80 * 10**9, 2.039e12, 108, "memo-a800", "ampere"),
    # H100 datasheet: SXM 1,979, NVL 1,671 and PCIe 1,513 TFLOPS BF16 with sparsity; 3.35, 3.9 and 2 TB/s
    "h100-80gb": GPU(r"NVIDIA H100 80GB HBM3", 989.4e12, int(79.1 * GIB), 3.35e12, 132, "dgx-h100", "hopper"),
    "h100-nvl": GPU(r"NVIDIA H100 NVL", 835.5e12, int(93.0 * GIB), 3.9e12, 132, "pcie-server", "hopper"),
    "h100-pcie": GPU(r"NVIDIA H100 PCIe", 756e12, int(79.1 * GIB), 2.0e12, 114, "pcie-server", "hopper"),
    # the H100's cores with less NVLink
    "h800-80gb": GPU(r"NVIDIA H800( 80GB HBM3)?", 989.4e12, int(79.1 * GIB), 3.35e12, 132, "hgx-h800",
                     "hopper"),
    "h800-pcie": GPU(r"NVIDIA H800 PCIe", 756e12, int(79.1 * GIB), 2.0e12, 114, "pcie-server", "hopper"),
    # H200 datasheet: SXM 1,979 and NVL 1,671 TFLOPS BF16 with sparsity, both 4.8 TB/s
    "h200-141gb": GPU(r"NVIDIA H200", 989.4e12, int(139.7 * GIB), 4.8e12, 132, "dgx-h100", "hopper"),
    "h200-nvl": GPU(r"NVIDIA H200 NVL", 835.5e12, int(139.7 * GIB), 4.8e12, 132, "pcie-server", "hopper"),
    # GH200 datasheet: 1,979 TFLOPS BF16 with sparsity; 96 GB at 4 or 144 GB at 4.9 TB/s. 480GB: the host's
    "gh200-96gb": GPU(r"NVIDIA GH200 480GB", 989.4e12, int(94.5 * GIB), 4.0e12, 132, "gh200", "hopper"),
    "gh200-144gb": GPU(r"NVIDIA GH200 144G HBM3e", 989.4e12, 144 * 10**9, 4.9e12, 132, "gh200", "hopper"),
    # HGX B200 datasheet: 36 PFLOPS BF16 with sparsity and 62 TB/s for eight GPUs
    "b200": GPU(r"NVIDIA B200", 2250e12, int(178.3 * GIB), 7.7e12, 148, "dgx-b200", "blackwell"),
    # HGX B300 datasheet: 36 PFLOPS BF16 with sparsity, 2.1 TB and 64 TB/s for eight GPUs
    "b300": GPU(r"NVIDIA B300( SXM6 AC)?", 2250e12, 2100 * 10**9 // 8, 8.0e12, 160, "dgx-b300", "blackwell"),
    # L40S datasheet: 362.05 TFLOPS BF16, 864 GB/s
    "l40s": GPU(r"NVIDIA L40S", 362.05e12, int(44.4 * GIB), 864e9, 142, "pcie-server", "ada"),
    # Ada architecture whitepaper, appendix A: 165.2 TFLOPS BF16 with fp32 accumulation, 1,008 GB/s
    "rtx4090": GPU(r"NVIDIA GeForce RTX 4090", 165.2e12, int(23.6 * GIB), 1.008e12, 128, "workstation",
                   "ada"),
}
LEAST_FP8 = (8, 9)  # the compute capability from which there are FP8 products
# compute capabilities
ARCHITECTURES = {"ampere": (8, 0), "ada": (8, 9), "hopper": (9, 0), "blackwell": (10, 0)}

# PCIe while all GPUs copy at once: MEMO's node gets 10.5e9 of its nominal 32e9 (set to the best alphas of its
# Table 5: research/papers/memo_fit.py). In the others pairs of GPUs share a switch's x16 uplink: half of what
# one link carries, 25e9 (gen 4) or 50e9
NODES = {
    # MEMO 5.1: 2 TB, NVLink 400 GB/s both ways together, InfiniBand 200 GB/s a node
    "memo-a800": Node(8, 2 * 10**12, 200e9, 10.5e9, 25e9, 300e9),
    # DGX A100 user guide: 2 TB (of the 640 GB model), NVLink 600 GB/s, eight ports of 200 Gb/s
    "dgx-a100": Node(8, 2 * 10**12, 300e9, 12.5e9, 25e9, 300e9),
    # DGX H100 and H200 user guide: 2 TB, NVLink 900 GB/s, eight ports of 400 Gb/s
    "dgx-h100": Node(8, 2 * 10**12, 450e9, 25e9, 50e9, 400e9),
    # the same but for NVLink, 400 GB/s
    "hgx-h800": Node(8, 2 * 10**12, 200e9, 25e9, 50e9, 400e9),
    # GH200 datasheet: 480 GB of host memory at up to 384 GB/s behind NVLink-C2C, 450 GB/s; its port: assumed
    "gh200": Node(1, 480 * 10**9, 50e9, 300e9, 50e9, 300e9),
    # DGX B200 datasheet: 2 TB (to 4 TB), NVLink 1,800 GB/s, eight ports of 400 Gb/s
    "dgx-b200": Node(8, 2 * 10**12, 900e9, 25e9, 50e9, 500e9),
    # DGX B300 datasheet: 2 TB (to 4 TB), NVLink 1,800 GB/s, eight ports of 800 Gb/s; the host's PCIe as there
    "dgx-b300": Node(8, 2 * 10**12, 900e9, 25e9, 100e9, 500e9),
    # no NVLink: what a GPU sends another goes over PCIe too
    "pcie-server": Node(8, 10**12, 12.5e9, 12.5e9, 12.5e9, 300e9),
    "workstation": Node(1, 128 * 10**9, 12.5e9, 25e9, 1e9, 60e9),
}

# FP8's dense peak over bf16's: twice on all that have it. Datasheets, with sparsity where the bf16 figures
# are: H100 SXM 3,958, NVL 3,341, PCIe 3,026; H200 3,958 and 3,341; GH200 3,958; HGX B200 and B300 72 PFLOPS
# for eight; L40S 733 dense; RTX 4090 330.3 dense with fp32 accumulation (Ada whitepaper, appendix A)
FP8_OVER_BF16 = 2

# set by hand: memory, what NCCL gets of NVLink and of InfiniBand with large messages, and how much of the tp
# ranks' messages beside products (memo/parallel/tp.py) hides: NCCL's kernels take their multiprocessors
REST = {"memory": 0.8, "link": 0.8, "network": 0.9, "hidden": 0.75}
# fitted to the 7B rows of MEMO's Table 3 from 64K on and of its Table 4 (A800): research/papers/memo_fit.py
AMPERE = {"matmul": 0.744, "attention forward": 0.663, "attention backward": 0.603}
# of attention kernels in bf16, head dimension 128, 64 query heads on 8 of keys, causal and without mask
# ("full"), at 4K, 8K, 16K and 32K keys. Source: NVIDIA's cudnn-frontend, benchmark/: on an H200 (an H100's
# multiprocessors and clocks) the lower of cuDNN 9.19.1 with one sequence (sdpa_benchmark_training/results/
# h200_919_only_cudnn/llama3.1_20260227_034703.csv) and of 9.27 with two, and FlashAttention-4 with two
# (attention_training/results/llama3.1/h200/llama3.1_20260928_130009.csv); on a GB200 cuDNN 9.27 and
# FlashAttention-4 with two (there, gb200/llama3.1_20260928_115301.csv)
KEYS_OF_TFLOPS = 4096, 8192, 16384, 32768
HOPPER_TFLOPS = {
    "cudnn forward": (591, 644, 633, 619), "cudnn backward": (474, 526, 539, 528),
    "cudnn full forward": (671, 691, 640, 622), "cudnn full backward": (560, 562, 549, 543),
    "flash_attn_4 forward": (619, 675, 702, 638), "flash_attn_4 backward": (558, 629, 606, 610),
    "flash_attn_4 full forward": (734, 756, 686, 679), "flash_attn_4 full backward": (636, 656, 621, 618),
    "flash_attn_4 deterministic backward": (478, 555, 557, 564),
    "flash_attn_4 full deterministic backward": (593, 608, 613, 613)}
BLACKWELL_TFLOPS = {
    "cudnn forward": (1319, 1559, 1609, 1593), "cudnn backward": (1102, 1297, 1287, 1221),
    "cudnn full forward": (1560, 1702, 1662, 1558), "cudnn full backward": (1301, 1383, 1322, 1231),
    "flash_attn_4 forward": (1334, 1576, 1658, 1611), "flash_attn_4 backward": (1033, 1280, 1278, 1235),
    "flash_attn_4 full forward": (1522, 1695, 1636, 1510),
    "flash_attn_4 full backward": (1289, 1359, 1332, 1257),
    "flash_attn_4 deterministic backward": (892, 1208, 1253, 1249),
    "flash_attn_4 full deterministic backward": (1194, 1381, 1393, 1238)}


Point = tuple[float, float]  # size, and what there is at it
Part = float | list[Point]  # of a peak, of all sizes or of each


def of_peak(tflops: float, kernels: Mapping[str, Sequence[float]]) -> dict[str, list[Point]]:
    """Makes {operation: [(keys, its part of a peak of `tflops`)]}."""
    return {op: [(keys, rate / tflops) for keys, rate in zip(KEYS_OF_TFLOPS, rates, strict=True)]
            for op, rates in kernels.items()}


# what a rank gets: of the GPU's peak (FLOPs are those of the kernels: the causal half of the scores, two
# products forward and five backward), of its memory bandwidth, of a link. "attention": of kernels not named
EFFICIENCY: dict[str, dict[str, Part]] = {
    # the system that was fitted to is one whose messages do not hide
    "ampere": {**AMPERE, **REST, "hidden": 0.0},
    # FlashAttention-3 (arXiv 2407.08608), figures 5 and 6, H100 SXM, head dimension 128, 16K, forward causal
    # and backward: FlashAttention-2 335 and 322 TFLOPS, FlashAttention-3 616 and 561. cuBLAS: assumed
    "hopper": {"matmul": 0.70, "attention forward": 0.339, "attention backward": 0.325,
               "flash_attn_3 forward": 0.623, "flash_attn_3 backward": 0.567,
               **of_peak(989.4, HOPPER_TFLOPS), **REST},
    # FlashAttention-2 on a B200, head dimension 128: forward 331 at 16K (tritonbench pull request 171),
    # backward 334 (flash-attention issue 1589, head dimension 64). cuBLAS: taken as on Hopper. The rest is of
    # a GB200, whose datasheet has 2,500 TFLOPS: the same parts are taken of a B200's and B300's peak
    "blackwell": {"matmul": 0.70, "attention forward": 0.147, "attention backward": 0.148,
                  **of_peak(2500, BLACKWELL_TFLOPS), **REST},
    # not measured nor published for these kernels: taken as on Ampere
    "ada": {**AMPERE, **REST},
}

# device memory that torch does not see. NCCL: a communicator takes from 0.3 to 1.6 GB with its channels,
# all-to-all between eight GPUs 3.3 GB (NVIDIA/nccl issues 864 and 1685); CUDA's context: with its libraries
COMMUNICATOR_BYTES = 400 * 10**6
CONTEXT_BYTES = 700 * 10**6
LAUNCH_S = 5e-6  # of a GPU's kernel, at least: assumed; the speeds above are those of large ones


class Speeds:
    """Holds how fast one rank works: {operation: [(size, FLOPs or bytes per second)]}, "memory" for those not
    listed; roofline.py says what `size` is. `overhead_s`: of one kernel. `itemsize`: of their dtype."""

    def __init__(self, table: Mapping[str, Sequence[Point]], overhead_s: float = 0.0,
                 itemsize: int = 2) -> None:
        self.table = {op: sorted((size, rate) for size, rate in points) for op, points in table.items()}
        self.overhead_s, self.itemsize = overhead_s, itemsize

    def rate(self, op: str, size: float = 1) -> float:
        """Looks up the amount of a second: log-linear between known sizes, constant beyond them."""
        points = self.table.get(op) or self.table["memory"]
        for (a, slow), (b, fast) in pairwise(points):
            if size < b:
                part = max(0.0, math.log(size / a) / math.log(b / a))
                return float(slow ** (1 - part) * fast**part)
        return points[-1][1]

    def seconds(self, op: str, amount: float, size: float = 1) -> float:
        return amount / self.rate(op, size) + self.overhead_s


@dataclass(frozen=True)
class Machine:
    """Says what a run is estimated for. None are `peak_flops_per_s` that are not known, `speeds` that nobody
    measured or published, `memory_bytes` where the device is the host, a CPU. `threads`: of a rank there.
    `capability`, as (9, 0), and `multiprocessors`: of a GPU. `measured`: by --calibrate, the speeds."""

    name: str
    node: Node
    memory_bytes: int | None
    peak_flops_per_s: float | None
    speeds: Speeds | None
    threads: int = 1
    capability: tuple[int, int] = (0, 0)
    multiprocessors: int = 0
    measured: bool = False

    @property
    def cpu(self) -> bool:
        return self.memory_bytes is None

    @property
    def of_its_type(self) -> "Machine":
        """Puts known speeds of its type, or none, in place of measured ones, which must not change bits."""
        if not self.measured:
            return self
        if (short := gpu_named(self.name)) is None:
            return replace(self, speeds=None, measured=False)
        like = machine(short)
        node = replace(like.node, gpus_per_node=self.node.gpus_per_node,
                       host_memory_bytes=self.node.host_memory_bytes)
        return replace(self, speeds=like.speeds, node=node, measured=False)

    def seconds(self, op: str, amount: float, size: float = 1) -> float:
        """Counts the seconds of an operation on a rank: see Speeds."""
        assert self.speeds is not None  # seconds are asked for only where they are known
        return self.speeds.seconds(op, amount, size)

    def message_s(self, op: str, nbytes: float, span: int, stride: int = 1) -> float:
        """Counts the seconds of a message, `op` of MESSAGES, to the others of a group: each stride-th of
        `span` ranks that follow each other. Over the network all but exchange and shift go through the ports
        of all the group's GPUs of a node. One shorter than all that were measured takes as long as these."""
        assert self.speeds is not None  # seconds are asked for only where they are known
        if nbytes and op in self.speeds.table:
            nbytes = max(nbytes, self.speeds.table[op][0][0])
            return nbytes / self.speeds.rate(op, nbytes)
        node = self.node
        inside = self.speeds.rate("link") * node.nvlink_bytes_per_s
        if span <= node.gpus_per_node:
            return nbytes / inside
        ports = 1 if op in ("exchange", "shift") else max(1, node.gpus_per_node // stride)
        return nbytes / min(inside, self.speeds.rate("network") * node.network_bytes_per_s * ports)


def nearest(kind: str, name: str, known: Iterable[str]) -> ConfigError:
    near = difflib.get_close_matches(name.lower(), known, n=3, cutoff=0.3) or list(known)
    return ConfigError(f"--{kind}={name}: unknown {kind}; the nearest known: {', '.join(near)}")


def machine(gpu: str, node: str | None = None, ranks: int = 1, **figures: Value) -> Machine:
    """Makes the Machine of a GPU's short name and a node's, or "here": what was measured on this one with so
    many ranks, with `figures` of GPU or node in place of the known ones. Errors: ConfigError."""
    if "device_memory_bytes" in figures:
        figures["memory_bytes"] = figures.pop("device_memory_bytes")
    if node and node not in NODES:
        raise nearest("node", node, NODES)
    own = {k: v for k, v in figures.items() if k in known_figures(Node)}
    if gpu == "here":
        measured = calibration(ranks)
        allowed, speeds = {"gpus_per_node", "host_memory_bytes", "pcie_bytes_per_s"}, measured["speeds"]
        if measured["memory_bytes"] is not None:
            allowed |= {"memory_bytes", "peak_flops_per_s"}
            speeds["hidden"] = [(1, REST["hidden"])]  # which is not measured
        if unused := sorted(set(figures) - allowed):
            raise ConfigError(f"--{unused[0]}={figures[unused[0]]}: --gpu=here has this from what was "
                              "measured; leave it out, or give a --gpu by name")
        n = replace(NODES[node] if node else Node(**measured["node"]), **own)
        found = measured | figures
        return Machine(measured["device"], n, found["memory_bytes"], found["peak_flops_per_s"],
                       Speeds(speeds, measured["overhead_s"], measured["itemsize"]), measured["threads"],
                       tuple(measured["capability"]), measured["multiprocessors"], measured=True)
    if gpu not in GPUS:
        raise nearest("gpu", gpu, GPUS)
    g = replace(GPUS[gpu], **{k: v for k, v in figures.items() if k in known_figures(GPU)})
    n, peaks = replace(NODES[node or g.node], **own), {"memory": g.memory_bytes_per_s}
    peaks |= dict.fromkeys(("link", "network", "hidden"), 1.0)  # parts of the node's figures, of 1
    parts = EFFICIENCY[g.architecture]
    table = {op: [(size, p * peaks.get(op, g.peak_flops_per_s))  # one part stands for all sizes
                  for size, p in (part if isinstance(part, list) else [(1, part)])]
             for op, part in parts.items()}
    if ARCHITECTURES[g.architecture] >= LEAST_FP8:  # as large a part of the peak as in bf16: not measured
        table[FP8_PRODUCTS] = [(size, FP8_OVER_BF16 * rate) for size, rate in table["matmul"]]
    speeds = Speeds(table, LAUNCH_S)
    return Machine(gpu, n, int(g.memory_bytes), g.peak_flops_per_s, speeds,
                   capability=ARCHITECTURES[g.architecture], multiprocessors=g.multiprocessors)


def known_figures(kind: type) -> set[str]:
    """Lists the names of a GPU's or a Node's figures."""
    return {f.name for f in fields(kind) if f.type is not str}


CALIBRATION_FORMAT = 5  # another one where what is measured or its meaning changes
MESSAGES = {"gather", "scatter", "exchange", "shift", "broadcast", "reduce"}
# that --calibrate measures
BOTH_WAYS = ("attention", "attention full", "norm", "rms norm", "gelu", "swiglu")
OPERATIONS = {f"{op} {way}" for op in BOTH_WAYS for way in ("forward", "backward")} | {
    "matmul", "rotary", "merge", "cross entropy", "copy", "adamw", "memory", "link", "network"}
FP8_PRODUCTS = "matmul fp8"  # measured where the machine has them


def calibration_path(ranks: int) -> Path:
    """Finds where the calibration of so many ranks is kept. Errors: ConfigError where nothing can be."""
    folder, why = cache_place()
    if folder is None:
        raise ConfigError(f"a calibration cannot be kept: {why}")
    return folder / f"calibration-{ranks}.json"


def calibration(ranks: int) -> JsonObject:
    """Reads what --calibrate measured here with so many ranks. Errors: ConfigError where it did not."""
    start = f"torchrun --nproc_per_node={ranks}" if ranks > 1 else "python"
    remedy = f"try {start} -m memo.profiler --calibrate, or --gpu= one of {', '.join(GPUS)}"
    if not (path := calibration_path(ranks)).exists():
        raise ConfigError(f"--gpu=here: nothing was measured on this machine with ranks={ranks}; {remedy}")
    try:
        measured = kept_json(path.parent, path.name)
    except (OSError, ValueError) as e:
        raise ConfigError(f"{path} cannot be read ({reason(e)}); {remedy}") from None
    if wrong := next((name for name, right in rules(measured, ranks) if not right), None):
        raise ConfigError(f"{path}: {wrong} is not what --calibrate writes; {remedy}")
    return measured


def number(value: Json, least: float = 1, most: float = 1e24,
           kinds: tuple[type, ...] = (int, float)) -> bool:
    """Says whether a file's value is a sane number: of bytes or FLOPs, or of those in a second."""
    return type(value) in kinds and least <= value <= most


def rules(measured: JsonObject, ranks: int) -> Iterator[tuple[str, bool]]:
    """Lists (name, whether its value can be believed) of all that a calibration holds."""
    yield "format", measured.get("format") == CALIBRATION_FORMAT
    for name, least, most in (("ranks", ranks, ranks), ("threads", 1, 2**16), ("itemsize", 2, 4),
                              ("multiprocessors", 0, 2**16)):
        yield name, number(measured.get(name), least, most, (int,))
    yield "device", isinstance(measured.get("device"), str)
    yield "overhead_s", number(measured.get("overhead_s"), 0, 60)
    for name in ("memory_bytes", "peak_flops_per_s"):
        yield name, name in measured and (measured[name] is None or number(measured[name]))
    capability = measured.get("capability")
    yield "capability", isinstance(capability, list) and [type(n) for n in capability] == [int, int]
    node: Json = measured.get("node")
    speeds: Json = measured.get("speeds")
    wanted = {f.name: kind_of(f) for f in fields(Node)}
    yield "node", isinstance(node, dict) and node.keys() == wanted.keys()
    yield from ((name, number(node[name], kinds=(int, kind))) for name, kind in wanted.items())
    operations = OPERATIONS | (MESSAGES if ranks > 1 else set())
    yield "speeds", isinstance(speeds, dict) and operations <= speeds.keys() <= {
        FP8_PRODUCTS, *operations}
    for op, points in speeds.items():
        pairs = isinstance(points, list) and points != [] and all(isinstance(p, list) and len(p) == 2
                                                            for p in points)
        sizes = [size for size, _ in points] if pairs else []
        yield op, pairs and all(number(n) for pair in points for n in pair) and sizes == sorted(set(sizes))


def gpu_named(device_name: str) -> str | None:
    """Finds the short name of the GPU that CUDA calls `device_name`; None where it is not known."""
    return next((name for name, g in GPUS.items() if re.fullmatch(g.pattern, device_name)), None)


def peak_flops_per_s(device_name: str) -> float | None:
    """Looks up the dense bf16 FLOPs per second of the GPU with this name; None where they are not known."""
    name = gpu_named(device_name)
    return GPUS[name].peak_flops_per_s if name else None
