"""What README and docs say of the papers, of METP, pipelines and subsequences, and of dry runs, against the
files in bench/results: each claim is made of the file's figures, and must stand on its page."""

import json
import re
from math import ceil
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def result(name):
    return json.loads((ROOT / f"bench/results/{name}.json").read_text())


FAILS = "both_fail", "only_papers_fails", "only_ours_fails"
MEMO, METP, SPPO = (result(f"papers/{paper}") for paper in ("memo", "metp", "sppo"))
OFF, RIVALS, RIVAL_TABLES = MEMO["table3"]["off"], MEMO["rivals"]["totals"], MEMO["rivals"]["tables"]
LONG, SHORT = OFF["all, from 64K on"], OFF["all, 4K to 32K"]
OF = {model: f"{OFF[f'{model}, from 64K on']['mean']:.1f}" for model in ("7B", "13B", "30B", "65B")}
SPEED, HERE = result("estimate_speed"), result("estimate_here_cpu")["worst"]
FARTHEST = "{:.0f} s for 7B and {:.0f} s for Llama-3-8B".format(
    *(SPEED[f"{model}, longest context on 8 H100"] for model in ("7B", "Llama-3-8B")))
SEVERAL = result("estimate_subsequences_cpu")["worst"]
BEST = MEMO["table5"]["tables"][2][1]
HOST = [sum(off[fails] for off in MEMO["table5"]["off"].values()) for fails in FAILS]
FITS = LONG[FAILS[1]] + SHORT[FAILS[1]] + sum(off[FAILS[1]] for name, off in MEMO["table4"]["off"].items()
                                              if name != "full_recompute")  # which is Megatron-LM's model
LONGER = [row[-1] for row in METP["figure6"]["tables"][1][1]]


def fits(part, column):
    """The lengths whose cell in the column ran out of memory in the paper, and has an MFU here, behind it."""
    *most, last = [f"{int(row[0][:-1]):,}K" for row in MEMO[part]["tables"][0][1]
                   if isinstance(row[column], str) and not isinstance(row[column + 1], str)]
    return f"{', '.join(most)} and {last}" if most else last


def least_to_most(found, form=".2f"):
    return " to ".join(dict.fromkeys(f"{one:{form}}" for one in (min(found), max(found))))


def overlap(p, half, *ways):
    """Seconds of METP's halves over the longer of computing and messages where both take equally long, of all
    models, and the same without overlap."""
    mine = [one for one in result("metp_time")["overlap"]["found"]
            if (one["p"], one["half"], one["ratio"]) == (p, half, 1) and one["way"] in ways]
    return [[one[key] / one["seconds"] * one["over_longer"] for one in mine]
            for key in ("seconds", "at_once_s")]


def lines_of_halves():
    """Ends of the lines of the table of docs/metp.md."""
    for p in 2, 4:
        for name, half, *ways in (("attention, forward", "attention", "forward"),
                                  ("attention, backward", "attention", "backward"),
                                  ("MLP", "MLP", "forward", "backward")):
            yield f"| {p}, {name} | ...| {' | '.join(map(least_to_most, overlap(p, half, *ways)))} |"


def several():
    """Estimates over runs with 1, 4 and 8 subsequences: the least to the most."""
    return least_to_most([run["step_ratio"] for run in result("estimate_subsequences_cpu")["runs"]
                          if "=auto" not in run["keys"]])


def choices():
    """N = 4 and 16 over the fastest of the default, and how far all N of GPT-2 are from it."""
    default, gpt2 = ([result("choice")[name]["found"][n]["over_fastest"] for n in ("1", "4", "16")]
                     for name in ("default", "gpt2"))
    assert default[0] == 1
    return (f"N = 4 and 16 take {default[1]:.3f} and {default[2]:.3f} of N = 1 for `config/stdlib.py`, as "
            f"long as N = 1 (to {max(gpt2) - 1:.1%})")


def contexts():
    """What docs/results.md says of the longest contexts of 7B on eight GPUs."""
    found = result("estimate_contexts")
    assert min(one["device_share"] for one in found) > 0.998
    tokens, mfu = ([f(one) for one in found] for f in (lambda one: f"{one['tokens']:,}",
                                                       lambda one: f"{one['mfu']:.0%}"))
    assert tokens[0] == tokens[1]
    yield f"reaches {tokens[0]} tokens: MFU {mfu[0]} with 1.035 TB of host memory a node, {mfu[1]} with 2 TB"
    yield f"{tokens[2]} on A800, {tokens[3]} on H100, {tokens[4]} on H200 (MFU {', '.join(mfu[2:])})"


def spread(found):
    least, *_, most = sorted(found)
    return f"{least:.0f} to {most:.0f}%"


def lines_of_rivals():
    """What research/baselines.md says of the cells of MEMO's rivals."""
    agree, order = ({tuple(row[:n]): row[n:] for row in RIVAL_TABLES[at][1]} for at, n in ((1, 3), (2, 2)))
    systems = "Megatron-LM", "DeepSpeed-Ulysses"
    every, same = "every way to recompute", "nothing or everything"
    for way, name, share, room in ((every, every, 1.0, "all"), (same, same + " recomputed", 1.0, "all"),
                                   (same, same + " recomputed", 0.8, "80%")):
        own = " | ".join(f"{agree[way, share, system][1]} of 64" for system in systems)
        yield f"| {name}, {room} of the device | {own} |"
    (_, _, *mine), (_, _, *deepspeed) = (agree[same, 1.0, system] for system in systems)
    yield f"is {mine[0]} points (Megatron-LM) and {deepspeed[0]} (DeepSpeed); below 64K it is {mine[1]} and "
    yield f"{deepspeed[1]}."
    yield f"{order[same, ', '.join(systems)][2]} of {order[same, ', '.join(systems)][0]}"
    strictly = sum(row[2] for (way, of), row in order.items() if way == every and ", " in of)
    yield f"recompute it is strictly {strictly} of {RIVALS['pairs']}."
    cells = MEMO["table4"]["tables"][0][1]
    planned = [(row[3], row[2]) for row in cells if not isinstance(row[3], str)]
    off = sum(abs(paper - ours) for paper, ours in planned) / len(planned)
    yield f"the model says {spread(ours for _, ours in planned)}: {off:.1f} points off"
    late = [100 * one[same]["mfu"] for one in MEMO["rivals"]["cells"] if one["system"] == "deepspeed"
            and one["tokens"] >= 2**17 and not isinstance(one["paper"], str)]
    yield f"where the model says {spread(late)}."
    halved = MEMO["rivals"]["halved"]
    yield f"is {halved['off']} points off from 64K on instead of {halved['was']}"
    mfu = {(one["model"], one["tokens"] // 1024, one["system"]): (one["paper"], 100 * one[same]["mfu"])
           for one in MEMO["rivals"]["cells"]}
    for model, S in (("7B", 128), ("13B", 128), ("13B", 64), ("65B", 32), ("65B", 256)):
        both = mfu[model, S, "megatron"], mfu[model, S, "deepspeed"]
        theirs, ours = (one - other for one, other in zip(*both, strict=True))
        yield f"{model} at {S}K, ... ahead by {abs(theirs):.1f}...behind by {abs(ours):.1f}"
    for pairs, point, strictly, cells, _, whole in MEMO["rivals"]["supposed"].values():
        yield f"{strictly} of {pairs} | {point} | {whole} of {cells} |"


def short(layout):
    """A layout as tables name it."""
    return layout.replace("=", "").replace(" dp1", "")


def cells(name, *texts):
    return re.sub(" +", " ", f"| {name} | {' | '.join(texts)} |")


def lines_of_lengths():
    """Tables of docs/longest.md."""
    found = result("longest")
    machines = {"1 x RTX 4090, 128 GB": "1 x 4090", "1 x H100-80GB, 2 TB": "1 x H100",
                "8 x A800-80GB, the paper's": "8 x A800", "8 x H100-80GB": "8 x H100", "8 x H200": "8 x H200",
                "64 x H100-80GB": "64 x H100"}
    assert {*machines} == {*found["table"]}
    yield cells("tokens", *machines.values())
    for model in found["table"]["8 x H200"]:
        of_model = [found["table"][machine][model] for machine in machines]
        yield cells(model, *(f"{got['tokens']:,}" if got["tokens"] else "none" for got in of_model))
    yield cells("MFU", *(least_to_most([got["mfu"] for got in found["table"][machine].values()
                                        if got["tokens"]], ".1%") for machine in machines))
    yield f"of 7B on eight H100 in {found['table']['8 x H100-80GB']['7B']['repeated']:.0%} of the units"
    models = "7B", "Llama-3-8B", "Qwen3-8B", "Llama-2-70B"
    yield cells("states on the host", *models)
    for machine, of in found["elsewhere"].items():
        assert {*of} <= {*models}
        yield cells(machine, *((f"{of[model]['tokens']:,} ({of[model]['mfu']:.1%})" if of[model]["tokens"]
                                else "none") if model in of else "" for model in models))
    for one in found["targets"]:
        got = one["got"]
        assert got["mfu"] >= one["wanted_mfu"] and got["tokens"] >= one["wanted_tokens"]
        repeated = f", {got['repeated']:.0%} repeated" if got["repeated"] else ""
        yield (f"| {one['machine']} | {one['model']} | {got['tokens']:,}: N = {got['subsequences']}, "
               f"{short(got['layout'])}, MFU {got['mfu']:.1%}{repeated} |")
    for of in found["whole"].values():
        yield "Without repetition {} fits {:,} ...(MFU {:.1%}), {} {:,} ({:.1%}).".format(
            *(value for model, got in of.items() for value in (model, got["tokens"], got["mfu"])))
    numbers = "1", "16", "64"
    yield cells("layout", *(f"{one['model']}, N = 1" if N == "1" else N
                            for one in found["cost"] for N in numbers))
    assert len({tuple(one["layouts"]) for one in found["cost"]}) == 1
    for layout in found["cost"][0]["layouts"]:
        by_number = [(one["layouts"].get(layout, {}), N) for one in found["cost"] for N in numbers]
        yield cells(short(layout), *(f"{100 * of[N]['mfu']:.1f}" if N in of else "" for of, N in by_number))
    fewest, many = ([max(of[N]["mfu"] for of in one["layouts"].values() if N in of) for one in found["cost"]]
                    for N in ("1", "16"))
    costs = [f"{100 * (a - b):.1f}" for a, b in zip(fewest, many, strict=True)]
    yield "In the fastest layout of each N, 16 cost {} points (7B) and {} (Llama-3-8B)".format(*costs)


def lines_of_states():
    """The table of docs/states.md, the lines of a model as one: the longest with states in each place, and
    the fastest at a length, which the second line names. Below it: where states fit the device."""
    found = result("states")["targets"]["found"]
    for target in found[3:]:
        most = [f"{one['longest']['tokens']:,}" for one in target["places"]]
        mfu = [one["at_tokens"]["mfu"] for one in target["places"]]
        yield "...".join(most) + f"...with ...{min(mfu):.1%} to {max(mfu):.1%} at {target['wanted_tokens']:,}"
    for target in found[:3]:
        lines = []
        for one in target["places"]:
            most, there = one["longest"], one["at_tokens"]
            name = one["states"] + (", cpu" if one.get("optimizer_device") == "cpu" else "")
            left = (f"{most['tokens']:,}, {most['subsequences']}, {short(most['layout'])} | {most['mfu']:.1%}"
                    if most else "none |")
            right = (f"{there['subsequences']}, {short(there['layout'])} | {there['mfu']:.1%}, "
                     f"...| {there['repeated']:.0%} |" if there else "none | | |")
            lines.append(f"| {name} | {left} | {right}")
        first, *rest = lines
        yield f"{first} | at {target['wanted_tokens']:,} {'...'.join(rest)}"


CLAIMS = {
    "README.md": [
        f"7B (fitted) {OF['7B']}, 13B {OF['13B']}, 30B {OF['30B']}, "
        f"65B {OF['65B']}; worst {LONG['worst']:.1f}",
        f"bytes to {HERE['bytes_ratio_worst']:.2%}, seconds to {HERE['step_ratio']:.0%}"],
    "docs/results.md": [
        f"{LONG['mean']:.1f} points off from 64K on (7B {OF['7B']}, 13B {OF['13B']}, 30B {OF['30B']}, "
        f"65B {OF['65B']}), {SHORT['mean']:.1f} below",
        f"is the paper's at {sum(row[1] == row[2] for row in BEST)} of {len(BEST)} lengths, and "
        f"{HOST[0]} of {sum(HOST)} cells without host memory are",
        f"hide from {MEMO['figure6']['crossing'][0]}K tokens on",
        f"Tables 3 and 4, {FITS} cells that ran out of memory there are predicted to fit",
        f"{RIVALS['agree']} of {RIVALS['cells']} cells run out of memory",
        f"strictly the paper's in {RIVALS['strictly']} of {RIVALS['pairs']} pairs",
        f"takes {METP['figure4']['saved'][0]}% less memory",
        f"messages, {METP['figure4']['saved'][1]}% less with them",
        f"{min(LONGER):.1f} to {max(LONGER):.1f} times those of memo's TP",
        f"{SPPO['table4']['tables'][0][1][0][1]} times as fast as Megatron-LM",
        *contexts(),
        *(f"{one['fastest']['mfu']:.1%}, {one['fastest']['binds']} | {one['longest']['tokens']:,}: ... | "
          f"{one['longest']['mfu']:.1%}, {one['longest']['limit']}" for one in result("estimate_models")),
        f"{SPEED['7B at 1M, no cache']:.1f} s without a cache, {SPEED['7B at 1M, cached']:.1f} s with it",
        f"takes {SPEED['7B, search over 128 GPUs']:.0f} s for 7B, "
        f"{SPEED['65B, search over 128 GPUs']:.0f} s for 65B; ...on eight H100 {FARTHEST}",
        *(f"| {one['pp']}, {one['subsequences']} | {one['bubble']:.1%} | {one['formula']:.1%} |"
          for one in result("pipeline")["bubbles"]),
        *(f"| {one['pp']}, {one['subsequences']} | {one['simulated']:.1%} | {one['bubble']:.1%} | "
          f"{one['formula']:.1%} |" for one in result("msp")["bubbles"]),
        f"within {SEVERAL['bytes_ratio_worst']:.2%}, seconds within {ceil(100 * SEVERAL['step_ratio'])}% "
        f"({several()} of the measured)", choices(),
        f"takes {least_to_most([row['over_best'] for row in result('decision')['results']], '.3f')} of the "
        "fastest",
        "takes {} of the longer of both, {} without overlap".format(*map(least_to_most, (
            [one for p in (2, 4) for half in ("attention", "MLP")
             for one in overlap(p, half, "forward", "backward")[of]] for of in (0, 1))))],
    "docs/metp.md": [*lines_of_halves()],
    "docs/estimate.md": [
        f"takes {FARTHEST}.", f"with {MEMO['table3']['tables'][0][1][0][3]:.0f}% MFU",
        f"{SHORT['mean']:.1f} points off",
        f"7B at {fits('table3', 1)} (OOM in Table 3), 30B at {fits('table3', 7)} (OOHM in Table 3), and 7B "
        f"with full recomputation at {fits('table4', 3)} (OOM",
        f"at most {max(MEMO['table3']['above'].values()):.1f} points above",
        f"65B on 64 GPUs at 4K is {OFF['65B, 4K to 32K']['worst']:.1f} points below"],
    "research/baselines.md": [
        f"{RIVALS['agree']} of {RIVALS['cells']}",
        f"**strictly the paper's in {RIVALS['strictly']} of {RIVALS['pairs']} pairs**",
        f"to a point of MFU in {RIVALS['right']}", *lines_of_rivals(),
        f"in {RIVALS['ordered_strictly']} of {RIVALS['ordered']} cells, to a point in "
        f"{RIVALS['ordered_right']}"],
    "docs/longest.md": [*lines_of_lengths()],
    "docs/states.md": [*lines_of_states()]}


@pytest.mark.parametrize("page", CLAIMS)
def test_what_a_page_says_is_what_was_found(page):
    """"..." stands for a few words."""
    text = " ".join((ROOT / page).read_text().split())
    patterns = {claim: ".{0,60}?".join(map(re.escape, claim.split("..."))) for claim in CLAIMS[page]}
    assert [claim for claim, pattern in patterns.items() if not re.search(pattern, text)] == []
