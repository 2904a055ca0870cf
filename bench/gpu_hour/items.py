"""The items of the GPU hour: what each asks, how long it may take, and which function answers."""

from collections import namedtuple

BF16 = 2**-7  # one unit in the last place: what a result in bf16 may be away from fp64, as tests/test_ops.py

Item = namedtuple("Item", "name question limit_s function")  # module:name, called with (notes, asked)

GROUPS = dict(A="does it run, is it right", B="bytes and rates", C="MFU beside rivals on the same card",
              D="what no rival holds")


def of(module, *rows):
    return [Item(name, question, limit_s, f"bench.gpu_hour.{module}:{function}")
            for name, question, limit_s, function in rows]


ALL = [
    *of("facts", ("A1", "what is here, and what does memo choose?", 180, "facts")),
    *of("kernels",
        ("A2", "is each kernel right, against fp64, with poisoned outputs?", 300, "kernels"),
        ("A3", "are kernels right over more than 2^31 elements?", 120, "large")),
    *of("right",
        ("A4", "are losses and gradients those of autograd in fp32?", 180, "gradients"),
        ("A5", "do all modes, and the memory plan, give the same bits?", 240, "bits"),
        ("A6", "does train.py train, save and resume?", 180, "trains")),
    *of("several", ("A7", "do layouts over NCCL give one GPU's losses?", 420, "losses")),
    *of("rates",
        ("B1", "is memory what the estimate says, region by region?", 180, "regions"),
        ("B2", "what does --calibrate measure?", 300, "calibration"),
        ("B3", "attention: how fast, by kernel, mask and length?", 240, "attention"),
        ("B4", "products, FP8, elementwise kernels, copies: how fast?", 180, "others"),
        ("B5", "the memory plan beside torch's allocator", 240, "plans")),
    *of("several", ("B6", "messages: bandwidth by size, and what hides", 420, "messages")),
    *of("steps",
        ("C1", "7B layers at 16K", 150, "at_16k"),
        ("C2", "7B layers at 64K", 180, "at_64k"),
        ("C3", "many 7B layers at 64K", 300, "deep"),
        ("C4", "7B layers at 256K", 300, "at_256k"),
        ("C5", "Llama layers beside transformers", 300, "llama"),
        ("C6", "GPT-2 124M: who waits for the host?", 120, "small"),
        ("C7", "where does a step's time go?", 150, "profile")),
    *of("steps",
        ("D1", "all of 7B at 64K, states on the host", 400, "whole_7b"),
        ("D2", "7B layers at 1M tokens in subsequences", 500, "million"),
        ("D3", "13B layers at 64K", 150, "wide"))]
ITEMS = {item.name: item for item in ALL}
