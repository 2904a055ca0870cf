"""Olmo 3 7B at a context of 1,048,576 tokens, three of four layers with a window. Source: its config.json. It
was trained at 65,536, with YaRN in the full layers: weights of Hugging Face want a --rope_scaling for more.

Wants 8 x h100-80gb, 240 GB of host memory a node or more, 1,048,577 tokens of text.

torchrun --nproc_per_node=8 train.py config/olmo3_7b_1m.py
"""
dataset = "text"  # yours: python data/text/prepare.py --source=... --tokenizer=... --out_dir=data/text
out_dir = "out/olmo3_7b_1m"

n_layer = 32
n_head = 32
n_embd = 4096
n_inner = 11008
block_size = 1048576
vocab_size = 100278
norm = "rmsnorm"
norm_eps = 1e-6
norms = "behind"
mlp = "swiglu"
tie_embeddings = False
rope_theta = 500000.0
qk_norm = True
qk_norm_over = "all"
sliding_window = 4096
layer_types = "sliding*3,full"

tp = 2
cp = 4

max_iters = 1000
learning_rate = 3e-4
min_lr = 3e-5
warmup_iters = 50
eval_interval = 0
save_interval = 50
