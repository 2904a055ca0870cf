"""The 65B model of the MEMO paper at a context of 1,048,576 tokens. Source: MEMO 5.1, Table 2.

Wants 64 x a800-80gb, 170 GB of host memory a node or more, 1,048,577 tokens of text.

torchrun --nproc_per_node=8 --nnodes=8 --rdzv-backend=c10d --rdzv-endpoint=HOST:29500
         train.py config/65b_1m.py
"""
dataset = "text"  # yours: python data/text/prepare.py --source=... --tokenizer=... --out_dir=data/text
out_dir = "out/65b_1m"

n_layer = 80
n_head = 64
n_embd = 8192
block_size = 1048576
vocab_size = 50257

tp = 8
cp = 8

alpha_mode = "paper"  # two rounding buffers and one alpha; per_tensor is a little faster

max_iters = 1000
learning_rate = 3e-4
min_lr = 3e-5
warmup_iters = 50
eval_interval = 0
save_interval = 50
