"""GPT-3's shape (arXiv 2005.14165, table 2.1) at METP's context of 524,288 tokens (FITEE 2400602), with
rotary positions and without biases.

Wants 64 x a800-80gb, 470 GB of host memory a node or more, 524,289 tokens of text.

torchrun --nproc_per_node=8 --nnodes=8 --rdzv-backend=c10d --rdzv-endpoint=HOST:29500
         train.py config/gpt_175b.py
"""
dataset = "text"  # yours: python data/text/prepare.py --source=... --tokenizer=... --out_dir=data/text
out_dir = "out/gpt_175b"

n_layer = 96
n_head = 96
n_embd = 12288
block_size = 524288
vocab_size = 50257

tp = 8
cp = 8
optimizer_device = "cpu"  # parameters and gradients of a rank alone take 131 GB

max_iters = 1000
learning_rate = 3e-4
min_lr = 3e-5
warmup_iters = 50
eval_interval = 0
save_interval = 50
