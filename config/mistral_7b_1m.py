"""Mistral 7B v0.1 at a context of 1,048,576 tokens. Source: its config.json. Every layer sees 4,096 tokens
back, so that 32 of them reach 131,041. It was trained at 32,768.

Wants 8 x h100-80gb, 240 GB of host memory a node or more, 1,048,577 tokens of text.

torchrun --nproc_per_node=8 train.py config/mistral_7b_1m.py
"""
dataset = "text"  # yours: python data/text/prepare.py --source=... --tokenizer=... --out_dir=data/text
out_dir = "out/mistral_7b_1m"

n_layer = 32
n_head = 32
n_kv_head = 8
n_embd = 4096
n_inner = 14336
block_size = 1048576
vocab_size = 32000
norm = "rmsnorm"
norm_eps = 1e-5
mlp = "swiglu"
tie_embeddings = False
rope_theta = 10000.0
sliding_window = 4096

tp = 2
cp = 4

max_iters = 1000
learning_rate = 3e-4
min_lr = 3e-5
warmup_iters = 50
eval_interval = 0
save_interval = 50
