"""Olmo 2 7B at a context of 1,048,576 tokens. Source: its config.json. It was trained at 4,096: weights of
Hugging Face want a larger --rope_theta or a --rope_scaling.

Wants 8 x h100-80gb, 240 GB of host memory a node or more, 1,048,577 tokens of text.

torchrun --nproc_per_node=8 train.py config/olmo2_7b_1m.py
"""
dataset = "text"  # yours: python data/text/prepare.py --source=... --tokenizer=... --out_dir=data/text
out_dir = "out/olmo2_7b_1m"

n_layer = 32
n_head = 32
n_embd = 4096
n_inner = 11008
block_size = 1048576
vocab_size = 100352
norm = "rmsnorm"
norm_eps = 1e-6
norms = "behind"
mlp = "swiglu"
tie_embeddings = False
rope_theta = 500000.0
qk_norm = True
qk_norm_over = "all"

tp = 2
cp = 4

max_iters = 1000
learning_rate = 3e-4
min_lr = 3e-5
warmup_iters = 50
eval_interval = 0
save_interval = 50
