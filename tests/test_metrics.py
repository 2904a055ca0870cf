"""The formulas against the paper's own table, and the loggers."""

import json
import math
import os
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest

from memo.config.config import Config
from memo.config.formulas import flops_per_sample, mfu, parameters, percent, tgs
from memo.errors import ConfigError
from memo.run.loggers import JsonlLogger, StepStats, WandbLogger, read_metrics
from memo.system.hardware import peak_flops_per_s
from testing.paper import PAPER


def paper_config(model, S=4096):
    m = PAPER["models"][model]
    return Config(n_layer=m["n_layer"], n_head=m["n_head"], n_embd=m["n_embd"], vocab_size=m["vocab_size"],
                  block_size=S)


def test_mfu_reproduces_every_consistent_row_of_the_paper():
    """Table 3, all models: to 0.02 points of MFU, or to what the two decimals of a printed TGS
    leave open where that is more."""
    rows = [r for r in PAPER["table3"] if "mfu" in r and not r.get("inconsistent")]
    assert len(rows) == 127
    for r in rows:
        cfg = paper_config(r["model"], r["seq_tokens"])
        ours = 100 * mfu(cfg, r["tgs"], PAPER["peak_flops"])
        assert abs(ours - r["mfu"]) <= max(0.02, 0.005 + 0.005 / r["tgs"] * ours), r


def test_the_rows_marked_inconsistent_really_are():
    for r in PAPER["table3"]:
        if r.get("inconsistent"):
            assert abs(100 * mfu(paper_config(r["model"], r["seq_tokens"]), r["tgs"],
                                 PAPER["peak_flops"]) - r["mfu"]) > 0.02


def test_attention_counts_the_unmasked_half_only():
    cfg = Config(n_layer=1, n_head=1, n_embd=8, vocab_size=1, block_size=16)
    visible = sum(t + 1 for t in range(16))  # pairs of query and key under the mask
    products = 2 * 2 * cfg.n_embd * visible  # scores and weighted sum, a multiply and an add each
    attention = flops_per_sample(cfg) - 6 * 16 * parameters(cfg)
    assert attention == 6 * 1 * 8 * 16 * 16
    assert abs(attention - 3 * products) <= 3 * 2 * 2 * cfg.n_embd * 16 / 2  # half of the diagonal


@pytest.mark.parametrize("name,peak", [
    ("NVIDIA A100-SXM4-80GB", 312e12), ("NVIDIA A100-PCIE-40GB", 312e12), ("NVIDIA A100 80GB PCIe", 312e12),
    ("A100-SXM4-40GB", 312e12), ("NVIDIA A800-SXM4-80GB", 312e12), ("NVIDIA A800 80GB PCIe", 312e12),
    ("NVIDIA H100 80GB HBM3", 989.4e12), ("NVIDIA H100 PCIe", 756e12), ("NVIDIA H200", 989.4e12),
    ("NVIDIA B200", 2250e12), ("NVIDIA L40S", 362.05e12), ("NVIDIA GeForce RTX 4090", 165.2e12),
    ("NVIDIA H100 NVL", 835.5e12), ("NVIDIA H200 NVL", 835.5e12), ("NVIDIA H800", 989.4e12),
    ("NVIDIA H800 PCIe", 756e12), ("NVIDIA GH200 480GB", 989.4e12), ("NVIDIA GH200 144G HBM3e", 989.4e12),
    ("NVIDIA B300 SXM6 AC", 2250e12), ("NVIDIA GeForce RTX 4090 Laptop GPU", None), ("NVIDIA H20", None),
    ("NVIDIA L40", None), ("CPU, 2 threads", None)])
def test_peaks(name, peak):
    assert peak_flops_per_s(name) == peak


def test_an_unknown_peak_gives_no_mfu():
    assert mfu(paper_config("7B"), 1000.0, None) is None
    assert percent(None) == "n/a" and percent(0.5234) == "52.3%"
    assert tgs(tokens=4096 * 16, gpus=8, seconds=2.0) == 4096


def stats(it, **kw):
    return StepStats(it, 1 / 3, 1e-3, 0.1, 0.5, 4096, 8192.0, **kw)


def test_metrics_lines_keep_the_contract_and_full_precision(tmp_path):
    log = JsonlLogger(tmp_path / "metrics.jsonl", 0)
    log.log(stats(0))
    log.log(stats(1, val_loss=2.0))
    rows = read_metrics(tmp_path / "metrics.jsonl")
    assert list(rows[0]) == ("iter loss lr grad_norm step_s tokens tgs mfu alpha offload_bytes stall_s "
                             "transient_peak_bytes device_peak_bytes host_bytes sent_bytes").split()
    assert rows[0]["loss"] == 1 / 3 and rows[0]["mfu"] is None and math.isclose(rows[1]["val_loss"], 2.0)


def test_a_resumed_run_drops_the_lines_it_writes_again(tmp_path, capsys):
    path = tmp_path / "metrics.jsonl"
    first = JsonlLogger(path, 0)
    for i in range(5):
        first.log(stats(i))
    with open(path, "a") as f:
        f.write('{"iter": 5, "lo')  # a kill in the middle of a line
    second = JsonlLogger(path, 3)
    assert capsys.readouterr().err == f"warning: {path}: damaged lines, which are dropped: 1\n"
    second.log(stats(3))
    assert [r["iter"] for r in read_metrics(path)] == [0, 1, 2, 3]


def test_a_loss_of_the_validation_that_is_not_finite_costs_no_line(tmp_path, capsys):
    path = tmp_path / "metrics.jsonl"
    JsonlLogger(path, 0).log(replace(stats(0), val_loss=math.nan))
    JsonlLogger(path, 1)
    assert [r["iter"] for r in read_metrics(path)] == [0] and not capsys.readouterr().err


def test_a_spoilt_line_costs_that_line_only(tmp_path):
    path = tmp_path / "metrics.jsonl"
    lines = [json.dumps(stats(i).as_dict()) for i in range(2)]
    wrong = (dict(iter=True), dict(iter=-1), dict(loss=None), dict(loss=10**400), dict(tgs="x"),
             dict(tokens=[]), dict(val_loss="x"))
    bad = [json.dumps(stats(1).as_dict() | row) for row in wrong]
    bad += ['{"it', "null", "\udcff", '{"a": 1}', '{"iter": 1}', "[" * 99999,
            '{"iter": 1, "a": ' + "[" * 99999, "9" * 9999]
    path.write_text("\n".join([lines[0], *bad, lines[1], ""]), errors="surrogateescape")
    log = JsonlLogger(path, 2)
    log.log(stats(3))
    assert [r["iter"] for r in read_metrics(path)] == [0, 1, 3]


def test_metrics_take_bounded_memory(tmp_path, capsys):
    """Values that no step has are damage, of which the beginning is kept; zeros without end are refused."""
    path, damaged = tmp_path / "metrics.jsonl", []
    step = json.dumps(stats(0).as_dict())
    path.write_text(step[:-1] + ', "x": [' + "[]," * 9999 + "0]}\n" + step + "\n")
    assert len(read_metrics(path, damaged)) == 1 and [*map(len, damaged)] == [80]
    os.truncate(path, 2**30 + 1)
    with pytest.raises(ConfigError, match=f"{path} has 1,073,741,825 bytes, must have at most 1,073,741,824"):
        JsonlLogger(path, 1)


def wandb_config(tmp_path):
    return Config(wandb_log=True, out_dir=str(tmp_path))


@pytest.mark.slow
def test_wandb_logs_offline_without_an_account(tmp_path, monkeypatch):
    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("WANDB_SILENT", "true")
    log = WandbLogger(wandb_config(tmp_path), {"n_layer": 1})
    assert log.run is not None and log.run.settings.mode == "offline"
    log.log(stats(0))
    log.close()
    assert list(tmp_path.glob("wandb/offline-run-*/*.wandb"))


@pytest.mark.parametrize("fails_at", ["init", "log", "finish"])
def test_wandb_never_stops_a_run(tmp_path, monkeypatch, capsys, fails_at):
    def fail(*args, **kwargs):
        raise ConnectionError("no network")

    run = SimpleNamespace(log=fail if fails_at == "log" else lambda *a, **k: None, finish=fail)
    fake = SimpleNamespace(init=fail if fails_at == "init" else lambda **k: run, login=lambda **k: False,
                           Settings=SimpleNamespace)
    monkeypatch.setitem(sys.modules, "wandb", fake)
    log = WandbLogger(wandb_config(tmp_path), {})
    log.log(stats(0))
    log.close()
    assert "no network" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["wandb", ".wandb"])
def test_wandb_is_off_where_its_folder_is_a_link(tmp_path, monkeypatch, capsys, name):
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(
        login=lambda **k: False, Settings=SimpleNamespace, init=lambda **k: pytest.fail("it follows")))
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / name).symlink_to("elsewhere")
    log = WandbLogger(wandb_config(tmp_path), {})
    log.log(stats(0))
    log.close()
    said = f"warning: wandb is off: NotADirectoryError: {name} must be a folder, and no link\n"
    assert capsys.readouterr().err == said
