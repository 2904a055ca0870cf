"""Llama 2 70B at a context of 1,048,576 tokens, the LLaMA-70B of METP (FITEE 2400602). Source: its
config.json.

Wants 64 x h100-80gb, 140 GB of host memory a node or more, 1,048,577 tokens of text.

torchrun --nproc_per_node=8 --nnodes=8 --rdzv-backend=c10d --rdzv-endpoint=HOST:29500
         train.py config/llama2_70b_1m.py
"""
dataset = "text"  # yours: python data/text/prepare.py --source=... --tokenizer=... --out_dir=data/text
out_dir = "out/llama2_70b_1m"

n_layer = 80
n_head = 64
n_kv_head = 8
n_embd = 8192
n_inner = 28672
block_size = 1048576
vocab_size = 32000
norm = "rmsnorm"
norm_eps = 1e-5
mlp = "swiglu"
tie_embeddings = False
rope_theta = 10000.0

tp = 8
cp = 8

max_iters = 1000
learning_rate = 3e-4
min_lr = 3e-5
warmup_iters = 50
eval_interval = 0
save_interval = 50
