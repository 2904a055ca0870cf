"""The default run: a small GPT learns Python from the standard library's sources, at a context of 4,096.

About three minutes on two CPU cores; uses the GPU where there is one.
"""
dataset = "stdlib"
out_dir = "out/stdlib"

n_layer = 2
n_head = 2
n_embd = 192
block_size = 4096

max_iters = 450
learning_rate = 2e-3
min_lr = 1e-4
warmup_iters = 10
eval_interval = 50
eval_iters = 4
save_interval = 100
