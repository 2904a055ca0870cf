"""Swapping, seen on a laptop: eight layers whose activations the host may hold only in part.

About three minutes on two CPU cores. The memory that activations may take is bounded so that alpha comes to
about a half: of each swapped layer half the rows are copied to the host and back, the other half is
recomputed. timeline.png shows a step.
"""
dataset = "stdlib"
out_dir = "out/swap_demo"

n_layer = 8
n_head = 4
n_embd = 128
block_size = 2048
batch_size = 2

host_memory_gb = 0.112

max_iters = 160
learning_rate = 2e-3
min_lr = 1e-4
warmup_iters = 10
eval_interval = 40
eval_iters = 4
save_interval = 50
