"""SmolLM3 3B at a context of 1,048,576 tokens. Source: its config.json. Every fourth layer rotates no
positions in. It was trained at 65,536: weights of Hugging Face want a larger --rope_theta.

Wants 8 x h100-80gb, 125 GB of host memory a node or more, 1,048,577 tokens of text.

torchrun --nproc_per_node=8 train.py config/smollm3_3b_1m.py
"""
dataset = "text"  # yours: python data/text/prepare.py --source=... --tokenizer=... --out_dir=data/text
out_dir = "out/smollm3_3b_1m"

n_layer = 36
n_head = 16
n_kv_head = 4
n_embd = 2048
n_inner = 11008
block_size = 1048576
vocab_size = 128256
norm = "rmsnorm"
norm_eps = 1e-06
mlp = "swiglu"
tie_embeddings = True
rope_theta = 5000000.0
layer_types = "full*3,full-nope"

tp = 2
cp = 4

max_iters = 1000
learning_rate = 3e-4
min_lr = 3e-5
warmup_iters = 50
eval_interval = 0
save_interval = 50
