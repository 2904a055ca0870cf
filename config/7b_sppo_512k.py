"""The 7B model of the SPPO paper at 524,288 tokens in its layout: four stages, 32 subsequences of equal
FLOPs; stages compute for each other next to the bubbles (MSP). Source: SPPO 7, Table 4.

Wants 32 x a100-80gb, 22 GB of host memory a node or more, 524,289 tokens of text.

torchrun --nproc_per_node=8 --nnodes=4 --rdzv-backend=c10d --rdzv-endpoint=HOST:29500
         train.py config/7b_sppo_512k.py
"""
dataset = "text"  # yours: python data/text/prepare.py --source=... --tokenizer=... --out_dir=data/text
out_dir = "out/7b_sppo_512k"

n_layer = 32
n_head = 32
n_embd = 4096
block_size = 524288
vocab_size = 50257

tp = 8
pp = 4
msp = True
subsequences = 32
subsequence_cut = "flops"
unit_order = "subsequence"

max_iters = 1000
learning_rate = 3e-4
min_lr = 3e-5
warmup_iters = 50
eval_interval = 0
save_interval = 50
