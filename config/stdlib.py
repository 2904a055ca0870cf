"""The default run: a small GPT learns Python from the standard library's sources, with a context of 4,096 tokens.

About three minutes on two CPU cores; uses the GPU where there is one.
"""
dataset = "stdlib"
out_dir = "out/stdlib"

n_layer = 4
n_head = 2
n_embd = 128
block_size = 4096

max_iters = 200
learning_rate = 4e-3
min_lr = 4e-4
warmup_iters = 10
eval_interval = 50
eval_iters = 4
save_interval = 50
