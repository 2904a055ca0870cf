"""Qwen3 8B at a context of 1,048,576 tokens. Source: its config.json. It was trained at 40,960: weights of
Hugging Face want a larger --rope_theta or a --rope_scaling.

Wants 8 x h100-80gb, 280 GB of host memory a node or more, 1,048,577 tokens of text.

torchrun --nproc_per_node=8 train.py config/qwen3_8b_1m.py
"""
dataset = "text"  # yours: python data/text/prepare.py --source=... --tokenizer=... --out_dir=data/text
out_dir = "out/qwen3_8b_1m"

n_layer = 36
n_head = 32
n_kv_head = 8
head_dim = 128
n_embd = 4096
n_inner = 12288
block_size = 1048576
vocab_size = 151936
norm = "rmsnorm"
norm_eps = 1e-6
mlp = "swiglu"
tie_embeddings = False
rope_theta = 1000000.0
qk_norm = True

tp = 2
cp = 4

max_iters = 1000
learning_rate = 3e-4
min_lr = 3e-5
warmup_iters = 50
eval_interval = 0
save_interval = 50
