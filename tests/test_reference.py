"""The reference: its attention against the formula, its positions, its documents, and all of it against
transformers."""

import json

import pytest
import torch

from memo.config.layout import Layout
from memo.config.rope import parse_scaling, scaled
from memo.huggingface.huggingface import FAMILIES, family_of, model_keys
from memo.huggingface.weights import HfWeights, alike, weights_of
from memo.verify.reference import Reference, attend, rotary_frequencies
from testing.gradients import worst_gradient
from tests.helpers import CPU, GEMMA, LLAMA, OLMO, perturbed_weights, random_batch

SHAPE = dict(n_layer=2, n_head=4, n_embd=64, vocab_size=211, block_size=129)
FAMILIES_HERE = [dict(position="learned", bias=True, gelu="tanh"), LLAMA,
                 LLAMA | dict(qk_norm=True, qkv_bias=True, tie_embeddings=True), OLMO, GEMMA]
LISTS = dict(short_factor=[1 + j / 9 for j in range(32)], long_factor=[2.5 + j for j in range(32)])
SCALINGS = [dict(rope_type="linear", factor=4.0),
            dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
                 original_max_position_embeddings=64),
            *(dict(rope_type="longrope", factor=4.0, original_max_position_embeddings=length) | LISTS
             for length in (128, 129)),
           *(dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=64) | more
              for more in ({}, dict(truncate=False, beta_fast=16), dict(attention_factor=1.3),
                           dict(mscale=1.0, mscale_all_dim=0.7)))]


def loss_and_gradients(cfg, weights, *batch):
    """(the mean loss of a batch, {memo's name: its gradient}), in fp64."""
    model = Reference(cfg).load(weights)
    loss = model(*batch)
    loss.backward()
    return loss.item(), model.gradients()


def in_documents(lengths, T):
    """(2, T): the number of each token's document, of these lengths in the first sequence, one in the
    second."""
    return torch.stack((torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths)), torch.ones(T)))


@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (6, 1)])
@pytest.mark.parametrize("lengths", [None, [5, 1, 1, 30]])
def test_attention_is_the_formula(heads, lengths):
    (H, Hkv), T, D = heads, 37, 8
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, h, T, D, dtype=torch.float64, requires_grad=True) for h in (H, Hkv, Hkv))
    of, sees = in_documents(lengths, T) if lengths else None, torch.ones(2, T, T).tril()
    if lengths:
        sees *= of[:, None] == of[:, :, None]
    dout = torch.randn_like(q)
    got = torch.autograd.grad((out := attend(q, k, v, of)), (q, k, v), dout)
    k_, v_ = (t.repeat_interleave(H // Hkv, 1) for t in (k, v))
    weights = torch.exp(q @ k_.mT / D**0.5) * sees[:, None]
    formula = weights / weights.sum(-1, keepdim=True) @ v_
    assert (out - formula).abs().max() < 1e-13
    for one, other in zip(got, torch.autograd.grad(formula, (q, k, v), dout), strict=True):
        assert (one - other).abs().max() < 1e-12


@pytest.mark.parametrize("keys", FAMILIES_HERE, ids=["gpt", "llama", "qwen", "olmo", "gemma"])
def test_documents_together_are_each_alone(keys):
    cfg, lengths = Layout(**SHAPE, **keys), [1, 100, 28]
    weights, (tokens, targets) = [*perturbed_weights(cfg, CPU)], random_batch(cfg, 1, 129, CPU)
    targets, alone = targets.masked_fill(targets % 4 == 0, -1), Reference(cfg).load(weights)
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    loss, gradients = loss_and_gradients(cfg, weights, tokens, targets, positions)
    total, learned = 0.0, (targets >= 0).sum()
    for part, wanted in zip(tokens.split(lengths, 1), targets.split(lengths, 1), strict=True):
        part_loss = alone.loss_sum(alone.hidden(part)[0], wanted[0]) / learned
        part_loss.backward()
        total += part_loss.item()
    assert abs(loss - total) < 1e-12 and worst_gradient(alone, gradients)[0] < 1e-11
    assert {name: g.shape for name, g in gradients.items()} == {name: w.shape for name, w in weights}
    assert not gradients["wte"][cfg.vocab_size:].any() and gradients["wte"].dtype == torch.float64


def test_weights_that_are_not_the_models_are_refused():
    cfg = Layout(**SHAPE)
    weights = dict(perturbed_weights(cfg, CPU))
    with pytest.raises(ValueError, match="there is no h.1.q_w"):
        Reference(cfg).load((n, w) for n, w in weights.items() if n != "h.1.q_w")
    with pytest.raises(ValueError, match="head_w is not a parameter"):
        Reference(cfg).load([("head_w", weights["wte"])])


@pytest.mark.parametrize("part", [1.0, 0.5])
@pytest.mark.parametrize("scaling", [{}, *SCALINGS], ids=str)
def test_frequencies_are_those_of_memo(scaling, part):
    cfg = Layout(**SHAPE, head_dim=int(64 / part), partial_rotary_factor=part, rope_theta=5e5,
                 rope_scaling=json.dumps(scaling) if scaling else "")
    found, factor = rotary_frequencies(cfg, cfg.kinds[0].rope)
    multipliers, want = scaled(64, 5e5, parse_scaling(cfg.rope_scaling), 129)
    plain = torch.tensor([5e5 ** (-2 * j / 64) for j in range(32)], dtype=torch.float64)
    assert torch.allclose(found, plain * torch.tensor(multipliers, dtype=torch.float64), rtol=1e-12, atol=0)
    assert abs(factor - want) < 1e-12 and (not scaling or not torch.allclose(found, plain))


LENGTH = dict(max_position_embeddings=64, rope_parameters=dict(
    rope_type="yarn", rope_theta=1e4, factor=4.0, original_max_position_embeddings=16))
ALIKE = dict(vocab_size=300, hidden_size=48, intermediate_size=80, num_hidden_layers=2, num_attention_heads=4)
NETS = {"GPT2Config": dict(vocab_size=300, n_positions=64, n_embd=48, n_layer=2, n_head=4),
        "LlamaConfig": ALIKE | LENGTH | dict(num_key_value_heads=2, head_dim=20),
        "Qwen2Config": ALIKE | dict(num_key_value_heads=4, tie_word_embeddings=True),
        "Qwen3Config": ALIKE | LENGTH | dict(num_key_value_heads=1, head_dim=16),
        **{f"Phi3Config of {length}": ALIKE | dict(
            num_key_value_heads=2, pad_token_id=None, max_position_embeddings=256,
            original_max_position_embeddings=length, rope_parameters=dict(
                rope_type="longrope", rope_theta=1e4, partial_rotary_factor=0.7, long_factor=[1.5, 3, 4, 7],
                short_factor=[1, 1.1, 1.2, 1.3])) for length in (63, 64)}}


@pytest.mark.parametrize("name", NETS)
def test_loss_and_gradients_are_those_of_transformers(name, tmp_path):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    net = transformers.AutoModelForCausalLM.from_config(getattr(transformers, name.split()[0])(**NETS[name]),
                                                        attn_implementation="eager").eval()
    for p in net.parameters():
        p.data += 0.1 * torch.randn_like(p)
    net.save_pretrained(tmp_path)
    cfg = Layout(**model_keys(tmp_path) | dict(block_size=64))
    tokens = torch.randint(300, (2, 65))
    loss, gradients = loss_and_gradients(cfg, HfWeights(tmp_path, cfg), tokens[:, :-1], tokens[:, 1:])
    net.double()
    logits = net(tokens[:, :-1]).logits.double()
    want = -logits.log_softmax(-1).gather(2, tokens[:, 1:, None]).mean()
    want.backward()
    assert abs(loss - want.item()) < 1e-6  # transformers rotates and norms in fp32
    theirs, kind = dict(net.named_parameters()), family_of(cfg, tmp_path)
    for w in weights_of(cfg, kind):
        g = theirs[w.there if w.there in theirs else FAMILIES[kind].prefix + w.there].grad
        n = min(len(gradients[w.name]), w.shape[-1 if w.transposed else 0])
        part = g[:, w.first:w.first + n] if w.transposed else g[w.first:w.first + n]
        for ours, same in alike(w, gradients[w.name][:n], part):
            assert (ours - same).norm() <= 1e-5 * g.norm(), w.name
