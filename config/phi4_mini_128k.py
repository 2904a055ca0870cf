"""Phi-4-mini at its own context of 131,072 tokens. Source: its config.json. Of the 128 elements of a head 96
rotate, with LongRoPE: its long factors, as the context is above 4,096 tokens.

Wants 1 x h100-80gb, 30 GB of host memory a node or more, 131,073 tokens of text.

python train.py config/phi4_mini_128k.py
"""
dataset = "text"  # yours: python data/text/prepare.py --source=... --tokenizer=... --out_dir=data/text
out_dir = "out/phi4_mini_128k"

n_layer = 32
n_head = 24
n_kv_head = 8
n_embd = 3072
n_inner = 8192
block_size = 131072
vocab_size = 200064
norm = "rmsnorm"
norm_eps = 1e-5
mlp = "swiglu"
tie_embeddings = True
rope_theta = 10000.0
partial_rotary_factor = 0.75
rope_scaling = (
    '{"rope_type": "longrope", "factor": 32.0, "original_max_position_embeddings": 4096, "long_factor": '
    '[1, 1.118320672, 1.250641126, 1.398617824, 1.564103225, 1.74916897, 1.956131817, 2.187582649, '
    '2.446418898, 2.735880826, 3.059592084, 3.421605075, 3.826451687, 4.279200023, 4.785517845, 5.351743533, '
    '5.984965424, 6.693110555, 7.485043894, 8.370679318, 9.36110372, 10.4687158, 11.70738129, 13.09260651, '
    '14.64173252, 16.37415215, 18.31155283, 20.47818807, 22.90118105, 25.61086418, 28.64115884, 32.03, 32.1, '
    '32.13, 32.23, 32.6, 32.61, 32.64, 32.66, 32.7, 32.71, 32.93, 32.97, 33.28, 33.49, 33.5, 44.16, 47.77], '
    '"short_factor": [1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, '
    '1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1]}')

max_iters = 1000
learning_rate = 3e-4
min_lr = 3e-5
warmup_iters = 50
eval_interval = 0
save_interval = 50
