"""Gemma 3 12B's text part at a context of 1,048,576 tokens, five of six layers with a window. Source: its
config.json. It was trained at 131,072: weights of Hugging Face want a larger factor in --rope_scaling.

Wants 8 x h100-80gb, 370 GB of host memory a node or more, 1,048,577 tokens of text.

torchrun --nproc_per_node=8 train.py config/gemma3_12b_1m.py
"""
dataset = "text"  # yours: python data/text/prepare.py --source=... --tokenizer=... --out_dir=data/text
out_dir = "out/gemma3_12b_1m"

n_layer = 48
n_head = 16
n_kv_head = 8
head_dim = 256
n_embd = 3840
n_inner = 15360
block_size = 1048576
vocab_size = 262208
norm = "rmsnorm"
norm_eps = 1e-6
norms = "both"
mlp = "geglu"
tie_embeddings = True
rope_theta = 1000000.0
rope_local_theta = 10000.0
rope_scaling = '{"rope_type": "linear", "factor": 8.0}'
qk_norm = True
query_scalar = 256
scale_embeddings = True
sliding_window = 1024
layer_types = "sliding*5,full"

tp = 2
cp = 4

max_iters = 1000
learning_rate = 3e-4
min_lr = 3e-5
warmup_iters = 50
eval_interval = 0
save_interval = 50
