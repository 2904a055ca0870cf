"""The configuration: its keys are frozen, and every mistake is one line that names value, rule and remedy."""

import ast
import json
import os
import re
from math import prod
from pathlib import Path

import pytest
import torch

from memo.config.config import KEYS, MODEL_KEYS, Config
from memo.config.formulas import flops_per_sample, parameters
from memo.config.keys import check_value
from memo.config.layout import Layout
from memo.errors import ConfigError
from memo.memory.flat import model_parameters
from memo.run.load_config import keys_help, load_config
from memo.states.passes import Model
from model import GPT
from testing.paper import PAPER
from tests.helpers import ROOT, save_header


def test_the_set_of_keys_is_frozen():
    assert list(KEYS) == """
        n_layer n_head n_embd block_size vocab_size n_kv_head head_dim n_inner norm norm_eps mlp bias
        qkv_bias norms qk_norm qk_norm_over query_scalar scale_embeddings tie_embeddings gelu position
        rope_theta rope_scaling partial_rotary_factor sliding_window layer_types rope_local_theta
        dataset check_data allow_other_data documents pack batch_size gradient_accumulation_steps
        tp tensor_parallel head_groups cp context_parallel pp msp activation alpha alpha_mode
        subsequences subsequence_cut unit_order host_memory_gb pin_memory memory_plan memory_plan_check solver
        max_iters learning_rate min_lr warmup_iters lr_decay_iters weight_decay beta1 beta2 grad_clip
        optimizer_device states
        out_dir init_from eval_interval eval_iters log_interval save_interval keep_checkpoints stall_timeout
        wandb_log wandb_project wandb_run_name device dtype attention ops matmul
        deterministic seed""".split()


def test_the_command_line_overrides_the_file_and_the_file_the_defaults(tmp_path):
    file = tmp_path / "c.py"
    file.write_text('"""A comment."""\nn_layer = 2\nblock_size = 4 * 1024\nlearning_rate = 1\n')
    cfg = load_config([str(file), "--n_layer=3", "--bias=true", "--wandb_run_name=a=b"])
    assert (cfg.n_layer, cfg.block_size, cfg.learning_rate, cfg.bias) == (3, 4096, 1.0, True)
    assert cfg.wandb_run_name == "a=b" and type(cfg.learning_rate) is float
    with pytest.raises(AttributeError):
        cfg.n_layer = 4


@pytest.mark.parametrize("argv,message", [
    (["--n_layr=3"], "--n_layr=3: unknown key 'n_layr'; did you mean 'n_layer'?"),
    (["--qqqq=3"], "--qqqq=3: unknown key 'qqqq'; see --help"),
    (["--n_layer=three"], "n_layer='three' must be int"),
    (["--n_layer=2.5"], "n_layer='2.5' must be int"),
    (["--bias=1"], "bias='1' must be true or false"),
    (["--n_layer"], "'--n_layer' must have the form --key=value; see --help"),
    (["-x"], "'-x' must have the form --key=value; see --help"),
    (["a.py", "b.py"], "'b.py': there is a config file already, 'a.py'; keys are given as --key=value"),
    (["none.py"], "config file 'none.py' does not exist; see config/"),
    (["--n_layer=0"], "n_layer=0 must be at least 1"),
    (["--beta2=1.0"], "beta2=1.0 must be below 1.0 (a moment of 1 never changes)"),
    (["--learning_rate=nan"], "learning_rate=nan must be at least 0.0"),
    (["--learning_rate=inf"], "learning_rate=inf must be finite"),
    (["--dtype=float16"], "dtype='float16' must be one of auto, float32, bfloat16"),
    (["--rope_theta=1", '--rope_scaling={"rope_type": "yarn", "factor": 2, '
      '"original_max_position_embeddings": 64}'],
     "rope_theta=1.0 must be above 1 for rope_type=yarn (all pairs turn equally fast); raise it, or give "
     "rope_type linear"),
    (["--layer_types=sliding,half", "--sliding_window=8"],
     "layer_types='sliding,half' must be kinds of layers, sliding or full or either with -nope, each with "
     "how often it follows itself, as in sliding*5,full"),
    (["--layer_types=sliding*99,full", "--sliding_window=8"],
     "layer_types='sliding*99,full' has 100 layers, more than n_layer=4; leave some out, for they come over "
     "and over"),
    (["--layer_types=sliding,full"], "layer_types='sliding,full' has a sliding layer and sliding_window=0; "
     "give the tokens that it sees"),
    (["--layer_types=full-nope", "--sliding_window=8"], "layer_types='full-nope' has no sliding layer and "
     "sliding_window=8; leave one of them out"),
    (["--layer_types=full-nope,full", "--position=learned"], "layer_types='full-nope,full' goes with "
     "position=rope only, not position=learned; leave one of them out"),
    (["--query_scalar=8", "--partial_rotary_factor=0.5"], "query_scalar=8 goes with positions rotated into "
     "all elements by every layer only (queries are scaled there); leave it out"),
    (["--rope_local_theta=500.0"], "rope_local_theta=500.0 goes with sliding layers only, and there is none; "
     "leave it out, or give a sliding_window"),
    (["--position=learned", "--partial_rotary_factor=0.5"],
     "partial_rotary_factor=0.5 goes with position=rope only, not position=learned; leave one of them out"),
    (["--rope_scaling=yarn"],
     'rope_scaling=\'yarn\' must be a JSON object, as in --rope_scaling=\'{"rope_type": "yarn", '
     '"factor": 4.0, "original_max_position_embeddings": 8192}\''),
    (["--n_head=8", "--n_kv_head=3"],
     "n_head=8 % n_kv_head=3 != 0 (each head of keys and values serves equally many of queries); try "
     "n_kv_head=2"),
    (["--n_head=4", "--n_kv_head=8"],
     "n_head=4 % n_kv_head=8 != 0 (each head of keys and values serves equally many of queries); try "
     "n_kv_head=4"),
    (["--n_head=12", "--n_kv_head=4", "--n_embd=192", "--tp=6"],
     "n_kv_head=4 and tp=6: one must divide the other (a rank has whole heads of keys and values, or equally "
     "many ranks share one); try tp=4 with more cp"),
    (["--tensor_parallel=metp", "--n_head=8", "--tp=3"],
     "n_head=8 % tp=3 != 0 (the heads are shared out); try tp=1"),
    (["--tensor_parallel=metp", "--n_head=12", "--n_kv_head=6", "--n_embd=192", "--tp=4"],
     "n_kv_head=6 and tp=4: one must divide the other (a rank has whole heads of keys and values, or equally "
     "many ranks share one); try tp=3 with more cp"),
    (["--tensor_parallel=metp", "--n_head=8", "--n_kv_head=1", "--head_dim=2", "--n_embd=64", "--tp=4"],
     "n_kv_head*head_dim=2 % tp=4 != 0 (the columns of keys and values are shared out); try tp=2"),
    (["--tensor_parallel=metp", "--n_head=8", "--mlp=swiglu", "--n_inner=150", "--tp=4"],
     "n_inner=150 % tp=4 != 0 (the MLP's columns are shared out); try tp=2"),
    (["--tensor_parallel=metp", "--n_head=8", "--tp=2", "--head_groups=3"],
     "head_groups=3 must be a multiple of tp=2 that divides n_head=8, and divide n_kv_head=8 or be a "
     "multiple of it (each group has equally many heads of one rank); try head_groups=2, or auto"),
    (["--tensor_parallel=metp", "--tp=2", "--context_parallel=ulysses"],
     "tensor_parallel=metp goes with context_parallel=ring only, not ulysses (its keys and values go round "
     "all ranks that share a sequence); try context_parallel=ring"),
    (["--head_groups=4"], "head_groups=4 goes with tensor_parallel=metp only; leave it out"),
    (["--tensor_parallel=metp", "--head_groups=many"], "head_groups='many' must be int or auto"),
    (["--tensor_parallel=metp", "--tp=2", "--block_size=4098"],
     "block_size=4098 % (2*cp*tp)=4 != 0 (zigzag gives each rank two chunks); try block_size=4096"),
    (["--pp=0"], "pp=0 must be at least 1"),
    (["--pp=-2"], "pp=-2 must be at least 1"),
    (["--pp=5"], "pp=5 must be at most n_layer=4 (each stage has whole layers); try pp=4"),
    (["--pp=2", "--subsequences=4", "--unit_order=layer"],
     "pp=2 goes with unit_order=subsequence only, not layer (a stage hands on what all its layers are done "
     "with); try --unit_order=subsequence"),
    (["--qk_norm_over=all"], "qk_norm_over=all goes with qk_norm=True only; leave one of them out"),
    (["--tensor_parallel=metp", "--qk_norm=true", "--qk_norm_over=all"],
     "tensor_parallel=metp goes with qk_norm_over=head only, not all (a group of heads has a part of what is "
     "normed); try tensor_parallel=megatron"),
    (["--mlp=swiglu", "--bias=true"],
     "bias=True goes with norm=layernorm and mlp=gelu only, not norm=layernorm and mlp=swiglu; leave it out, "
     "or give qkv_bias=True"),
    (["--n_embd=256", "--n_head=5"],
     "n_embd=256 % n_head=5 != 0 (heads share the hidden size equally); try n_head=4, or give head_dim"),
    (["--n_embd=6", "--n_head=2"],
     "n_embd/n_head=3 must be even for position=rope (it rotates pairs); try another n_head "
     "or position=learned"),
    (["--min_lr=1"], "min_lr=1.0 must be <= learning_rate=0.001; lower min_lr"),
    (["--max_iters=5", "--warmup_iters=20"],
     "warmup_iters=20 must be <= max_iters=5; lower warmup_iters, or raise max_iters"),
    (["--lr_decay_iters=5", "--warmup_iters=6"],
     "warmup_iters=6 must be <= lr_decay_iters=5; lower warmup_iters, or raise lr_decay_iters"),
    (["--init_from=gpt2"], "init_from='gpt2' must be scratch, resume or hf:<folder>"),
    (["--init_from=resume", "--out_dir=nowhere"],
     "nowhere/ckpt holds no checkpoint; train with --init_from=scratch, or see memo.convert"),
    (["--alpha=1.5"], "alpha=1.5 must be at most 1.0 (1 is all of it)"),
    (["--alpha=half"], "alpha='half' must be float or auto"),
    (["--alpha=nan"], "alpha=nan must be at least 0.0"),
    (["--activation=swap", "--alpha=0.5"],
     "alpha=0.5 goes with activation=memo only, not activation=swap; leave one of them out"),
    (["--activation=none"], "activation='none' must be one of keep, recompute, swap, memo"),
    (["--host_memory_gb=-1"], "host_memory_gb=-1.0 must be at least 0.0"),
    (["--learning_rate=auto"], "learning_rate='auto' must be float"),
    (["--seed=99999999999999999999"], "seed=99999999999999999999 must be below 9223372036854775808 "
                                      "(seeds have 63 bits)"),
    (["--n_embd=1000003", "--n_head=3"],
     "n_embd=1000003 % n_head=3 != 0 (heads share the hidden size equally); try n_head=1, or give head_dim"),
    (["--n_layer=1000000"],
     "n_layer=1000000 must be at most 2000 (the deepest models known have 1,000, and each layer "
     "is planned by itself)"),
    (["--n_embd=1000000000000"],
     "n_embd=1000000000000 must be at most 1048576 (a single layer of that width has 13e12 parameters)"),
    (["--n_head=100000"],
     "n_head=100000 must be at most n_embd=256 (each head has columns of its own); lower n_head"),
    (["--batch_size=1000000"],
     "batch_size*block_size/cp=4096000000 must be at most 2147483648 (rows of a rank are counted "
     "in 32 bits)"),
    (["--batch_size=1000", "--gradient_accumulation_steps=1000000"],
     "gradient_accumulation_steps*batch_size*block_size=4096000000000 must be at most 1099511627776 (the ids "
     "of a step's tokens alone take 16 TiB)"),
    (["--n_layer=1000", "--n_embd=262144"],
     "parameters=824633720832000 must be at most 100000000000000 (their states take 1.6e15 bytes; lower "
     "n_layer, n_embd, vocab_size or block_size)"),
    (["--position=learned", "--n_embd=65536", "--block_size=2147483648"],
     "parameters=140943646785536 must be at most 100000000000000 (their states take 1.6e15 bytes; lower "
     "n_layer, n_embd, vocab_size or block_size)"),
    (["--out_dir="], "out_dir='' must not be empty; leave it out, or give one"),
    (["--dataset="], "dataset='' must not be empty; leave it out, or give one"),
    (["--out_dir=a\nb"],
     "out_dir='a\\nb' must be one line of at most 1000 characters, all of them printable"),
    (["--dataset=a\0b"],
     "dataset='a\\x00b' must be one line of at most 1000 characters, all of them printable"),
    (["--wandb_run_name=" + "x" * 1001],
     f"wandb_run_name='{'x' * 96}... must be one line of at most 1000 characters, all "
     "of them printable"),
    (["--n_layer=1" + "0" * 5000], f"n_layer='1{'0' * 95}... must be int"),
])
def test_mistakes_on_the_command_line(argv, message):
    with pytest.raises(ConfigError) as e:
        load_config(argv)
    assert str(e.value) == message


@pytest.mark.parametrize("text,message", [
    ("import os", "a config file holds assignments only"),
    ("n_layer += 1", "a config file holds assignments only"),
    ("if True:\n    n_layer = 1", "a config file holds assignments only"),
    ("n_layer = ", "c.py:1: invalid syntax"),
    ("n_layer = '2'", "n_layer='2' must be of type int, not str"),
    ("n_layer = True", "n_layer=True must be of type int, not bool"),
    ("\nn_layer = 1 / 0", "c.py:2: division by zero"),
    ("n_layer = open('x')",
     "c.py:1: a value is a number, a string, True, False, a key assigned above, or + - *"),
    ("alpha = 'half'", "alpha='half' must be of type float or auto, not str"),
    ("n_layers = 2", "unknown key 'n_layers'; did you mean 'n_layer'?"),
])
def test_mistakes_in_a_file(tmp_path, text, message):
    (tmp_path / "c.py").write_text(text)
    with pytest.raises(ConfigError) as e:
        load_config([str(tmp_path / "c.py")])
    assert message in str(e.value) and "\n" not in str(e.value)


ESCAPE = "().__class__.__base__.__subclasses__()[0].__init__.__globals__['os'].system('touch {marker}')"
REFUSED = (ESCAPE, "__import__('os').system('touch {marker}')", "(lambda: 0)()", "[1 for _ in 'ab']",
           "f'{{1}}'", "[1, 2]", "'a' % 1", "'a' * 9", "True + 1", "n_head", "None", "1j", "b'a'", "...",
           "1 if 1 else 2", "~1", "7 % 2", "1 < 2", "(n_head := 3)", "9**9**9", "2**63", "-2**62 - 2**62",
           "10**400 // 10**399", "2.0**5000", "1e999", "0.0**-1", "(-8)**0.5", "9" * 30, "9" * 5000,
           r"'a\nb'", r"'a\0b'", "'{long}'", "(" * 400 + "1" + ")" * 400, "-" * 60000 + "1",
           "1" + "+1" * 30000, "1" + "**1" * 20000)


@pytest.mark.parametrize("value", REFUSED, ids=lambda value: value[:20])
def test_a_config_file_runs_nothing(tmp_path, value):
    path, marker = tmp_path / "c.py", tmp_path / "marker"
    value = value.format(marker=marker, long="a" * 5000) if "{" in value else value
    path.write_text(f"# a comment\nn_layer = {value}\n")
    with pytest.raises(ConfigError, match=r"^\S+/c\.py:[12]: [^\n]{5,300}$"):
        load_config([str(path)])
    assert not marker.exists()


def test_what_a_config_file_can_say(tmp_path):
    (tmp_path / "c.py").write_bytes(b"\xef\xbb\xbf'''" + """a docstring'''
n_head = n_layer = +2
n_embd = 2**6 * n_head
batch_size = 7 // 2
learning_rate = 3 / 10**3 - -1e-3
min_lr = 2**-20
bias = True
dataset = 'é'  # ä
""".replace("\n", "\r\n").encode())
    cfg = load_config([str(tmp_path / "c.py")])
    assert (cfg.n_layer, cfg.n_head, cfg.n_embd, cfg.batch_size) == (2, 2, 128, 3)
    assert cfg.bias is True and cfg.dataset == "é"
    assert (cfg.learning_rate, cfg.min_lr) == (3 / 10**3 + 1e-3, 2**-20)


@pytest.mark.parametrize("make,message", [
    (os.mkfifo, "is no regular file"), (Path.mkdir, "is no regular file"),
    (lambda path: path.symlink_to("/dev/zero"), "is no regular file"),
    (lambda path: path.write_bytes(b"n_layer = 1\xff"), "invalid start byte"),
    (lambda path: path.write_bytes(b"#" * 2**16 + b"\n"), "must be at most 65,536 characters"),
    (lambda path: path.write_bytes(b"n_layer = 1\0"), "null bytes")])
def test_a_config_file_that_is_none(tmp_path, make, message):
    make(tmp_path / "c.py")
    with pytest.raises(ConfigError, match=rf"^[^\n]*c\.py[^\n]*{message}[^\n]*$"):
        load_config([str(tmp_path / "c.py")])


def test_alpha_and_the_hosts_memory_are_numbers_or_auto(tmp_path):
    (tmp_path / "c.py").write_text("alpha = 1\nhost_memory_gb = 'auto'\n")
    cfg = load_config([str(tmp_path / "c.py")])
    assert (cfg.alpha, cfg.host_memory_gb) == (1.0, "auto") and type(cfg.alpha) is float
    cfg = load_config([str(tmp_path / "c.py"), "--alpha=auto", "--host_memory_gb=1.5"])
    assert (cfg.alpha, cfg.host_memory_gb) == ("auto", 1.5)


def test_a_broken_checkpoint_is_named(tmp_path):
    save_header(tmp_path, Config())
    path = tmp_path / "ckpt" / "5" / "checkpoint.json"
    for content, message in ((b"", "cannot be read"), (b"\xff" * 100, "cannot be read"),
                             (b"{}", "is corrupt"),
                             (path.read_bytes().replace(b"256", b"257"), "is corrupt")):
        path.write_bytes(content)
        with pytest.raises(ConfigError, match=f"ckpt/5/checkpoint.json {message}.*; use another copy"):
            load_config(["--init_from=resume", f"--out_dir={tmp_path}"])


def test_the_latest_of_the_finished_checkpoints_counts(tmp_path):
    for iter, n_layer in ((9, 3), (10, 4), ("11.tmp", 5), ("copy", 6)):
        save_header(tmp_path, Config(n_layer=n_layer, vocab_size=99), iter)
    assert load_config(["--init_from=resume", f"--out_dir={tmp_path}"]).n_layer == 4


def test_resume_starts_from_the_saved_config_but_keeps_the_model(tmp_path):
    save_header(tmp_path, Config(n_layer=7, position="learned", vocab_size=99, max_iters=50))
    cfg = load_config(["--init_from=resume", f"--out_dir={tmp_path}", "--max_iters=60", "--vocab_size=0"])
    assert (cfg.n_layer, cfg.max_iters, cfg.vocab_size, cfg.init_from) == (7, 60, 99, "resume")
    for key in ("--n_layer=8", "--block_size=64"):
        with pytest.raises(ConfigError, match="of the weights that init_from=resume loads; leave it out"):
            load_config(["--init_from=resume", f"--out_dir={tmp_path}", key])
    # another word for the same
    cfg = load_config(["--init_from=resume", f"--out_dir={tmp_path}", "--n_kv_head=4", "--head_dim=64"])
    assert (cfg.kv_heads, cfg.head_width) == (4, 64)
    with pytest.raises(ConfigError, match="n_kv_head=2 differs from 0 of the weights"):
        load_config(["--init_from=resume", f"--out_dir={tmp_path}", "--n_kv_head=2"])


@pytest.mark.parametrize("argv,warmup", [
    ([], 20), (["--max_iters=20"], 20), (["--max_iters=6"], 6), (["--lr_decay_iters=7"], 7),
    (["--warmup_iters=3"], 3), (["--max_iters=6", "--lr_decay_iters=50"], 20),
    (["--max_iters=6", "--warmup_iters=0"], 0)])
def test_a_warmup_that_is_left_out_is_no_longer_than_the_decay(argv, warmup):
    assert load_config(argv).warmup_iters == warmup


@pytest.mark.parametrize("argv,warmup", [
    ([], 20), (["--max_iters=6"], 6), (["--lr_decay_iters=7"], 7), (["--max_iters=50"], 20),
    (["--max_iters=6", "--lr_decay_iters=50"], 20)])
def test_a_shorter_run_lowers_the_warmup_of_its_file(tmp_path, argv, warmup):
    (tmp_path / "c.py").write_text("warmup_iters = 20\n")
    assert load_config([str(tmp_path / "c.py"), *argv]).warmup_iters == warmup


def test_a_warmup_is_lowered_only_by_what_comes_after_it(tmp_path):
    assert load_config([str(ROOT / "config" / "stdlib.py"), "--max_iters=5"]).warmup_iters == 5
    (tmp_path / "c.py").write_text("max_iters = 6\nwarmup_iters = 20\n")
    for argv in ([str(tmp_path / "c.py")], ["--max_iters=6", "--warmup_iters=20"]):
        with pytest.raises(ConfigError,
                           match="^warmup_iters=20 must be <= max_iters=6; lower warmup_iters, or raise"):
            load_config(argv)
    resume = ["--init_from=resume", f"--out_dir={tmp_path}"]
    save_header(tmp_path, load_config(["--vocab_size=99", "--max_iters=6"]))
    assert load_config([*resume, "--max_iters=100"]).warmup_iters == 6  # steps are done with it
    save_header(tmp_path, Config(vocab_size=99), 7)
    assert load_config(resume).warmup_iters == 20
    assert load_config([*resume, "--max_iters=8"]).warmup_iters == 8


def test_a_converted_checkpoint_brings_its_model_and_no_way_to_train(tmp_path):
    save_header(tmp_path, Config(vocab_size=99, n_layer=3), 0)
    cfg = load_config(["--init_from=resume", f"--out_dir={tmp_path}", "--max_iters=6"])
    assert (cfg.n_layer, cfg.warmup_iters) == (3, 6)


def test_another_mode_drops_the_alpha_of_the_saved_one(tmp_path):
    save_header(tmp_path, Config(vocab_size=99, alpha=0.5))
    resume = ["--init_from=resume", f"--out_dir={tmp_path}"]
    assert load_config(resume).alpha == 0.5
    assert load_config([*resume, "--activation=keep"]).alpha == "auto"


def test_rotary_models_may_resume_at_a_longer_context(tmp_path):
    save_header(tmp_path, Config(vocab_size=99))
    longer = load_config(["--init_from=resume", f"--out_dir={tmp_path}", "--block_size=8192"])
    assert longer.block_size == 8192


def test_hf_brings_its_model_keys(tmp_path):
    hf = dict(model_type="gpt2", n_layer=3, n_head=2, n_embd=64, n_positions=128, vocab_size=500)
    (tmp_path / "config.json").write_text(json.dumps(hf))
    cfg = load_config([f"--init_from=hf:{tmp_path}", "--block_size=64"])
    assert (cfg.n_layer, cfg.bias, cfg.gelu, cfg.position, cfg.block_size) == (3, True, "tanh", "learned", 64)
    for wrong, message in (("--n_layer=4", "n_layer=4 differs from 3"),
                           ("--block_size=256", "=256 differs from 128")):
        with pytest.raises(ConfigError, match=message):
            load_config([f"--init_from=hf:{tmp_path}", wrong])
    for change, message in ((dict(activation_function="relu"), "activation_function='relu' must be"),
                            (dict(model_type="bert"), "model_type='bert' must be one of gpt2, llama, "),
                            (dict(n_head=[]), r"n_head is \[\], must be a whole number")):
        (tmp_path / "config.json").write_text(json.dumps(hf | change))
        with pytest.raises(ConfigError, match=message):
            load_config([f"--init_from=hf:{tmp_path}"])


def test_every_number_has_bounds_with_their_reason():
    for f in KEYS.values():
        m = f.metadata
        if f.type in (int, float):
            most = m["most"] if m["below"] is None else m["below"]
            assert m["least"] is not None and most is not None and m["why"], f.name
            with pytest.raises(ConfigError, match=f"^{f.name}=.* must be .*{re.escape(m['why'])}"):
                check_value(f, 2 * most)


@pytest.mark.parametrize("columns", [70, 80, 200])
def test_help_has_every_key_in_its_section(monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    lines = keys_help().splitlines()
    assert max(map(len, lines)) <= min(columns, 110)
    headings = [line.partition(":")[0] for line in lines[1:] if line and not line.startswith(" ")]
    assert headings == ["model", "data", "ranks", "activations", "optimizer", "the run"]
    names = [line.split("=")[0] for line in lines if line.startswith("  --")]
    assert names == [f"  --{name}" for name in KEYS]
    columns = {re.match(r"  (--\S+)? *", line).end() for line in lines if line.startswith(" ")}
    assert len(columns) == 1


def test_every_preset_loads():
    presets = sorted((ROOT / "config").glob("*.py"))
    assert len(presets) == 22
    for path in presets:
        load_config([str(path)])


@pytest.mark.parametrize("preset,model",
                         [("7b_1m", "7B"), ("13b_1m", "13B"), ("30b_1m", "30B"), ("65b_1m", "65B")])
def test_the_papers_models_build_on_the_meta_device(preset, model):
    cfg = Layout.of(load_config([str(ROOT / "config" / f"{preset}.py")]))
    gpt = Model(GPT, cfg, "meta", torch.bfloat16)
    m = PAPER["models"][model]
    P = 12 * m["n_layer"] * m["n_embd"] ** 2 + m["vocab_size"] * m["n_embd"]  # the paper's count
    assert parameters(cfg) == P and cfg.block_size == 2**20
    norms = (2 * cfg.n_layer + 1) * cfg.n_embd
    padding = (cfg.padded_vocab_size - cfg.vocab_size) * cfg.n_embd
    assert gpt.params.numel() == P + norms + padding


# parameters of the published weights, without biases for GPT-3, whose paper says 175.0B
PUBLISHED = {"llama3_8b_1m": 8_030_261_248, "qwen3_8b_1m": 8_190_735_360, "llama2_7b_1m": 6_738_415_616,
             "mistral_7b_1m": 7_241_732_096, "smollm3_3b_1m": 3_075_098_624, "olmo2_7b_1m": 7_298_617_344,
             "olmo3_7b_1m": 7_298_011_136, "gemma3_12b_1m": 11_766_034_176,
             "llama2_70b_1m": 68_976_648_192, "phi4_mini_128k": 3_836_021_760,
             "gpt_175b": 12 * 96 * 12288**2 + (50257 + 2 * 96 + 1) * 12288}


@pytest.mark.parametrize("preset", PUBLISHED)
def test_published_models_build_on_the_meta_device(preset):
    cfg = Layout.of(load_config([str(ROOT / "config" / f"{preset}.py")]))
    tables = 1 if cfg.tie_embeddings else 2
    padding = tables * (cfg.padded_vocab_size - cfg.vocab_size) * cfg.n_embd
    shapes = [p.shape for p in model_parameters(cfg).values()]
    assert sum(map(prod, shapes)) - padding == PUBLISHED[preset]
    assert Model(GPT, cfg, "meta", torch.bfloat16).params.numel() - padding == PUBLISHED[preset]
    vectors = sum(prod(shape) for shape in shapes if len(shape) == 1)
    assert parameters(cfg) == PUBLISHED[preset] - vectors
    looked_up = 0 if cfg.tie_embeddings else cfg.vocab_size * cfg.n_embd
    S, Q = cfg.block_size, cfg.n_head * cfg.head_width
    pairs = sum(S**2 - (S - kind.window)**2 * (kind.window > 0) for kind in cfg.kinds)  # twice
    assert flops_per_sample(cfg) == 6 * S * (parameters(cfg) - looked_up) + 6 * Q * pairs


# packages of memo/, each of which imports only itself and those before it; commands may import all
PACKAGES = [
    "config", "system", "schedule", "kernels", "parallel", "layer", "memory", "dsa", "planner", "decide",
    "states", "checkpoint", "data", "huggingface", "plots", "estimate", "run"]
TORCH_FREE = {  # by themselves and in all that they import
    "errors", "config.config", "config.keys", "config.layer", "config.layout", "system.command",
    "system.files", "system.hardware", "kernels.backends", "memory.flat", "memory.placement",
    "checkpoint.manifest", "data.tokens", "plots.figures", "plots.pipeline", "dsa.problem", "dsa.solvers",
    "dsa.__main__", "planner.trace", "planner.plan", "planner.__main__", "schedule.waits",
    "schedule.simulate", "schedule.spans", "schedule.listing", "schedule.periods", "decide.alpha",
    "decide.pipeline", "decide.step_seconds", "estimate.roofline", "estimate.budget", "estimate.search",
    "estimate.report", "estimate.__main__"}


def modules():
    """{module of memo/: its path}."""
    paths = (path.relative_to(ROOT) for path in (ROOT / "memo").rglob("*.py") if path.stem != "__init__")
    return {".".join(path.with_suffix("").parts): path for path in paths}


def imports(path):
    """The modules that a file imports, anywhere in it, but those for annotations alone."""
    names, tree = set(), ast.parse((ROOT / path).read_text())
    tree.body = [node for node in tree.body
                 if not (isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {a.name for a in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {node.module} | {f"{node.module}.{a.name}" for a in node.names}
    return names


@pytest.mark.slow
def test_tests_and_benches_import_neither_each_other_nor_a_test():
    """But for the GPU hour, which users run, and which has tests."""
    for folder, others in (("tests", ("bench", "tests.test_")), ("bench", ("tests",)),
                           ("testing", ("bench", "tests")), ("research", ("bench", "tests")),
                           ("memo", ("bench", "research", "tests", "testing"))):
        for path in (ROOT / folder).rglob("*.py"):
            names = {name for name in imports(path) if not name.startswith("bench.gpu_hour")}
            assert not any(name.startswith(others) for name in names), path


def test_imports_point_one_way():
    """Packages import those before them alone. memo/ never imports model.py or train.py, but for commands,
    which nobody imports, but that a run traces its step as memo.run.trace_step does, and memo.verify drives
    train.py; no module imports itself, at any distance; torch-free ones import neither torch nor a module
    that does."""
    graph = {name: imports(path) for name, path in modules().items()}
    commands = {"memo.sample", "memo.evaluate", "memo.run.trace_step"}
    flat = {name for name in graph if name.count(".") == 1}
    assert len(flat | {"memo"}) <= 8
    for name, found in graph.items():
        package = name.split(".")[1]
        if name not in flat and not name.endswith("__main__") and package != "verify":
            lower = {"errors", *PACKAGES[:PACKAGES.index(package) + 1]}
            below = {n.split(".")[1] for n in found if n in graph}
            assert below <= lower, (name, below - lower)
        may = {"memo.run.prepare": {"memo.run.trace_step"}}.get(name, set())
        may |= {"train"} if package == "verify" else set()
        assert {"train", *commands} & found <= may, name
        assert "model" not in found or name in commands, name
    for name in graph:
        reached, new = set(), {name}
        while new:
            new = {n for at in new for n in graph[at] if n in graph} - reached
            assert name not in new, f"{name} imports itself"
            reached |= new
        if name.removeprefix("memo.") in TORCH_FREE:
            assert not any(n.split(".")[0] == "torch" for at in {name} | reached for n in graph[at]), name


def test_an_empty_argument_is_no_config_file():
    with pytest.raises(ConfigError, match="config file '' does not exist"):
        load_config([""])


def test_a_files_value_is_checked_though_the_command_line_has_another(tmp_path):
    (tmp_path / "c.py").write_text("n_layer = True\n")
    with pytest.raises(ConfigError, match=r"c.py:1: n_layer=True must be of type int"):
        load_config([str(tmp_path / "c.py"), "--n_layer=1"])


@pytest.mark.parametrize("text", ["1_0", "\u0663", " 7", "7\u2028", "7\n"])
def test_numbers_have_plain_digits(text):
    for key, kind in (("n_layer", "int"), ("learning_rate", "float")):
        with pytest.raises(ConfigError, match=f"must be {kind}|must be of type {kind}"):
            load_config([f"--{key}={text}"])


def test_the_weights_of_a_checkpoint_depend_on_these_keys():
    assert MODEL_KEYS == (
        "n_layer", "n_head", "n_embd", "block_size", "vocab_size", "n_kv_head", "head_dim", "n_inner",
        "norm", "norm_eps", "mlp", "bias", "qkv_bias", "norms", "qk_norm", "qk_norm_over", "query_scalar",
        "scale_embeddings", "tie_embeddings", "gelu", "position", "rope_theta", "rope_scaling",
        "partial_rotary_factor", "sliding_window", "layer_types", "rope_local_theta")
