"""The 7B model of the MEMO paper at 2,097,152 tokens by METP: the tp ranks share the tokens, weights travel.

Wants 8 x a800-80gb, 420 GB of host memory a node or more, 2,097,153 tokens of text.

torchrun --nproc_per_node=8 train.py config/7b_metp_2m.py
"""
dataset = "text"  # yours: python data/text/prepare.py --source=... --tokenizer=... --out_dir=data/text
out_dir = "out/7b_metp_2m"

n_layer = 32
n_head = 32
n_embd = 4096
block_size = 2097152
vocab_size = 50257

tp = 8
tensor_parallel = "metp"

max_iters = 1000
learning_rate = 3e-4
min_lr = 3e-5
warmup_iters = 50
eval_interval = 0
save_interval = 50
