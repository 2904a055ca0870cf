"""GPT-2 small.

A step has 16 sequences a rank; --gradient_accumulation_steps=32 makes them 524,288 tokens, as GPT-2 had.
"""
dataset = "text"  # yours: python data/text/prepare.py --source=... --tokenizer=... --out_dir=data/text
out_dir = "out/gpt2_124m"

n_layer = 12
n_head = 12
n_embd = 768
block_size = 1024
vocab_size = 50257
bias = True
gelu = "tanh"
position = "learned"

batch_size = 16
max_iters = 20000
learning_rate = 6e-4
min_lr = 6e-5
warmup_iters = 700
eval_interval = 500
eval_iters = 50
save_interval = 500
log_interval = 10
