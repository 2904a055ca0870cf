"""Texts, the scripts that prepare them, and a small GPT-2: what tests of data and of models share."""

import importlib.util
import json

import torch
from transformers import GPT2Config, GPT2LMHeadModel

from tests.helpers import ROOT

V, S, C, L = 300, 31, 64, 3
TEXTS = [f"document {i}\n" + f"line {i * i} of é漢 text\n\tindented 'words' {i}\n\n" * (i % 7 + 1)
         for i in range(45)]


def script(name):
    spec = importlib.util.spec_from_file_location(f"prepare_{name}", ROOT / "data" / name / "prepare.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


text, stdlib = script("text"), script("stdlib")
def rows(texts):
    return "".join(json.dumps(dict(text=t)) + "\n" for t in texts).encode()


def save(tokenizer, path):
    tokenizer.save(str(path))
    return path


def gpt2(activation="gelu_new", vocab_size=V):
    """A GPT-2 with random weights in which no bias is zero and no gain is one."""
    torch.manual_seed(5)
    net = GPT2LMHeadModel(GPT2Config(
        vocab_size=vocab_size, n_positions=S, n_embd=C, n_layer=L, n_head=2, activation_function=activation,
        attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0, bos_token_id=0, eos_token_id=0,
        attn_implementation="eager"))
    for p in net.parameters():
        p.data += torch.randn_like(p) * 0.1 if p.dim() == 1 else 0.0
    return net.eval()
