"""C: whole steps of memo beside rivals, in turns, on the same card; D: what no rival holds."""

import torch

from bench.gpu_hour.notes import device, fitting, named, shape, tensor_bytes
from bench.gpu_hour.right import train_here
from bench.gpu_hour.runs import Ours, beside

TORCH = ("torch checkpoint", "torch save_on_cpu")


def at_16k(notes, asked):
    beside(notes, shape(asked, n_layer=4, block_size=2**14),
           ("memo", "memo recompute", "memo without plan", "torch", *TORCH))


def at_64k(notes, asked):
    beside(notes, shape(asked, n_layer=4, block_size=2**16), ("memo", "memo recompute", *TORCH))


def deep(notes, asked):
    beside(notes, shape(asked, n_layer=16, block_size=2**16), ("memo", *TORCH))


def at_256k(notes, asked):
    beside(notes, shape(asked, n_layer=4, block_size=2**18), ("memo", *TORCH), steps=1, again=False)


def llama(notes, asked):
    for S in (2**14, 2**16):
        cfg = shape(asked, n_layer=4, block_size=S, norm="rmsnorm", mlp="swiglu", vocab_size=32000)
        theirs = ("transformers checkpoint", "transformers save_on_cpu", "torch checkpoint")
        beside(notes, cfg, ("memo", *theirs), again=False)


def small(notes, asked):
    for S in (4096, 16384, 65536):
        cfg = shape(asked, n_layer=12, n_embd=768, n_head=12, block_size=S)
        beside(notes, cfg, ("memo", "torch checkpoint"), steps=5, again=False)


def profile(notes, asked):
    """C7: one step under torch.profiler: its kernels by their seconds, and a trace."""
    cfg = fitting(shape(asked, n_layer=4, block_size=2**16)).decided
    tokens, targets = torch.randint(0, cfg.vocab_size, (2, 1, cfg.block_size), device=device())
    run = Ours(cfg, tokens, targets)
    run.step()
    torch.cuda.synchronize()
    from torch.profiler import ProfilerActivity
    with torch.profiler.profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
        run.step()
        torch.cuda.synchronize()
    with notes.trying("trace"):
        path = asked.out / "trace.json.gz"
        seen.export_chrome_trace(str(path))
        notes.line("trace", path.name)
    kernels = [(one.key, one.count, getattr(one, "self_device_time_total", 0) / 1e6)
               for one in seen.key_averages()]
    kernels = sorted((one for one in kernels if one[2] > 0), key=lambda one: -one[2])
    if kernels:
        notes.line(f"{named(cfg)}: kernels of a step", sum(seconds for *_, seconds in kernels), unit="s")
    else:
        notes.skip("kernels of a step", "the profiler saw none (may users read the GPU's counters?)")
    notes.table("kernels of a step", ("kernel", "calls", "seconds"),
                [(name[:90], n, f"{seconds:.4f}") for name, n, seconds in kernels[:20]])
    run.figures(asked.out / "C7.png")
    run.close()


# --- D ---

def long_run(notes, asked, got, steps):
    """train.py beside its estimate."""
    cfg, steps = got.decided, steps if got.seconds.get("step", 0) < 60 else 1
    rows, plan = train_here(notes, asked, cfg, max_iters=steps)
    last, name = rows[-1], f"{named(cfg)} N={cfg.n_subsequences} states={cfg.states}"
    notes.line(f"{name}: step", last["step_s"], got.seconds.get("step"), "s", case="memo", shape=name,
               expected_mfu=got.mfu, mfu=last.get("mfu"), tokens_per_s=last["tgs"], loss=last["loss"])
    notes.line(f"{name}: MFU", last.get("mfu"), got.mfu)
    notes.line(f"{name}: alpha", plan.get("alpha"), got.alpha)
    notes.line(f"{name}: stall", last.get("stall_s"), 0, "s")
    notes.line(f"{name}: device memory", last.get("device_peak_bytes"), tensor_bytes(got), "bytes")
    notes.line(f"{name}: host memory swapped to", last.get("host_bytes"), got.host_bytes, "bytes")


def whole_7b(notes, asked):
    cfg = shape(asked, n_layer=32, block_size=2**16, states="host")
    ways = [dict(block_size=min(S, asked.longest), activation=activation)  # all layers, at whatever length
            for S in (2**16, 2**15, 2**14) for activation in ("memo", "recompute")]
    long_run(notes, asked, fitting(cfg, ways), 3)


def million(notes, asked):
    cfg = shape(asked, n_layer=2, block_size=2**20, subsequences=16, subsequence_cut="equal",
                unit_order="layer", states="auto")
    ways = [dict(subsequences=n, subsequence_cut=cut) for n in (16, 32, 64) for cut in ("equal", "flops")]
    long_run(notes, asked, fitting(cfg, ways), 2)


def wide(notes, asked):
    C = max(128, asked.n_embd * 5 // 4 // 128 * 128)
    long_run(notes, asked, fitting(shape(asked, n_embd=C, n_layer=4, block_size=2**16)), 3)
