"""What the GPU hour tells: report.json, the one file to post; report.md, all of its lines; gpu.md, a short
page of it; and what the figures would change in memo. No torch."""

from memo.config.formulas import percent
from memo.system.files import save_bytes, save_json
from memo.system.hardware import EFFICIENCY, GPUS, gpu_named

FORMAT = 1
WITHIN = 0.05  # of a table's figure a measured one changes nothing
LARGE = ("nvidia_smi", "calibration")  # kept in report.json alone


def shown(value, unit=""):
    """A value as people read it."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return "" if value is None else str(value).replace("|", "/").replace("\n", " ")
    if unit == "bytes":
        return f"{value / 2**30:.3f} GiB"
    if unit == "away":
        return f"{value:.1e}"
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"


def number(value):
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def differs(line):
    """Whether a line's figure is not what a table of memo has."""
    got, expected = line.get("measured"), line.get("predicted")
    return "entry" in line and number(got) and number(expected) and expected and (
        abs(got / expected - 1) > WITHIN)


def changes(done, device):
    """Lines of text: what failed, and which figures of hardware.py are others here."""
    told, short = [], gpu_named(device)
    table = EFFICIENCY[GPUS[short].architecture] if short else {}
    if device and not short:
        told.append(f"memo/system/hardware.py: GPUS does not know {device!r}")
    for name, found in done.items():
        verdict, wrong = found["verdict"], [one for one in found["lines"] if one["ok"] is False]
        if verdict != "pass" and not verdict.startswith("skipped") and not wrong:
            told.append(f"{name}: {verdict}")
        for line in wrong:
            limit = f", at most {shown(line['predicted'], line['unit'])}" * (line["predicted"] is not None)
            told.append(f"{name}: {line['what']}: {shown(line['measured'], line['unit'])}{limit}")
        for line in filter(differs, found["lines"]):
            entry, part = line["entry"], line["measured"] / line["predicted"]
            now = line.get("of_peak") or (table[entry] * part if number(table.get(entry)) else None)
            if entry in table and now:  # one part of the peak, or several by length
                was = f"EFFICIENCY[{GPUS[short].architecture!r}][{entry!r}]: {now / part:.3f}"
                told.append(f"{name}: {was} is {now:.3f} ({line['what']})")
            else:
                unit = line["unit"]
                told.append(f"{name}: {entry}: {shown(line['predicted'], unit)} is "
                            f"{shown(line['measured'], unit)} {unit * (unit != 'bytes')} ({line['what']})")
    return told


def table(columns, rows):
    cells = [[shown(cell) for cell in row] for row in rows]
    return [f"| {' | '.join(columns)} |", "|" + "---|" * len(columns),
            *(f"| {' | '.join(row)} |" for row in cells), ""]


def more_of(line):
    """The figures of a step, or of a kernel, that a line has beside its own."""
    parts = []
    if line.get("mfu") is not None:
        expected = f" (expected {percent(line.get('expected_mfu'))})" * number(line["predicted"])
        parts.append(f"MFU {percent(line['mfu'])}{expected}")
    if line.get("tokens_per_s"):
        parts.append(f"{line['tokens_per_s']:,.0f} tokens/s")
    for key, text in (("device_peak_bytes", "device"), ("host_bytes", "host")):
        if line.get(key):
            parts.append(f"{text} {line[key] / 2**30:.1f} GiB")
    for key, text in (("alpha", "alpha {:.2f}"), ("stall_s", "stall {:.3f} s"), ("floor_s", "floor {:.3f} s"),
                      ("of_peak", "{:.3f} of the peak"), ("sm_mhz", "{:.0f} MHz"), ("watts", "{:.0f} W")):
        if number(line.get(key)):
            parts.append(text.format(line[key]))
    return ", ".join(parts)


def rows_of(lines):
    for line in lines:
        if "skipped" in line:
            yield line["what"], f"skipped: {line['skipped']}", "", ""
        else:
            unit = line["unit"] if line["unit"] not in ("bytes", "away") else ""
            got, expected = (shown(line[key], line["unit"]) for key in ("measured", "predicted"))
            judged = {True: "", False: "**wrong** ", None: ""}[line["ok"]]
            yield line["what"], f"{got} {unit}", expected, judged + more_of(line)


def head(report):
    """What all pages begin with."""
    machine = report["machine"]
    versions = ", ".join(f"{k} {v}" for k, v in report["versions"].items())
    return [f"# memo on {machine.get('device', 'an unknown machine')}", "",
            f"Driver {machine.get('driver')}, {versions}; commit {machine.get('commit')}. "
            "Written by `python -m bench.gpu_hour`; docs/gpu.md says what each item asks.", "",
            *table(("item", "question", "verdict", "seconds"),
                   [(name, found["question"], found["verdict"], f"{found['seconds']:.0f}")
                    for name, found in report["items"].items()]),
            *(["Not run: " + ", ".join(report["not_run"]) + ".", ""] if report["not_run"] else []),
            "## What to change", "",
            *([f"- {line}" for line in report["change"]] or ["Nothing."]), ""]


COLUMNS = ("what", "measured", "expected", "")


def page(report, short):
    """The report as Markdown; `short`: of B what has an expectation, of C and D all."""
    text = head(report)
    for name, found in report["items"].items():
        lines = found["lines"]
        if short:
            lines = [one for one in lines if name[0] in "CD" or (name[0] == "B" and number(one["predicted"]))]
        tables = {} if short else found.get("tables", {})
        if lines or tables:
            text += [f"## {name}: {found['question']}", "", *table(COLUMNS, rows_of(lines))]
        for title, (columns, *rows) in tables.items():
            text += [f"### {title}", "", *table(columns, rows)]
    return "\n".join(text)


def report_of(done, missing):
    """Everything as one object. `done`: {item: what it found}; `missing`: items without a verdict."""
    machine = next((found["machine"] for found in done.values() if found.get("machine")), {})
    first = done.get("A1", {})
    items = {name: {k: v for k, v in found.items() if k not in LARGE} for name, found in done.items()}
    kept = {f"{key} of {name}": found[key] for name, found in done.items() for key in LARGE if key in found}
    return dict(format=FORMAT, machine=machine, versions=first.get("versions", {}), items=items,
                not_run=list(missing), change=changes(done, machine.get("device", "")), **kept)


def write_report(done, missing, out):
    """Writes report.json, report.md and gpu.md."""
    report = report_of(done, missing)
    save_json(report, out / "report.json")
    save_bytes(page(report, short=False).encode(), out / "report.md")
    save_bytes(page(report, short=True).encode(), out / "gpu.md")
