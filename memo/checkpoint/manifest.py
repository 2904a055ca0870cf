"""The checkpoints in out_dir/ckpt, and checkpoint.json, the manifest of each one."""

import errno
import json
import re
import zlib
from collections.abc import Mapping
from pathlib import Path

from memo.config.keys import shown
from memo.errors import CheckpointError, reason
from memo.system.files import MOST_JSON_CHARS, JsonObject, check_folder, parse_json, plain_name, read_text

CHECKPOINT, CHECKPOINT_JSON = "ckpt", "checkpoint.json"
METADATA = ".metadata"  # torch.distributed.checkpoint's own manifest
FORMAT = "memo 2"
SAVE = "the save"  # what a Watch calls its parts
REMEDY = "use another copy of the checkpoint or start from scratch"


class Damaged(CheckpointError):
    """The checkpoint in `folder` is damaged. There may be one before it."""

    def __init__(self, folder: Path, text: str) -> None:
        super().__init__(f"{text}; {REMEDY}")
        self.folder = folder


def read_error(folder: Path, path: Path, e: OSError | ValueError) -> CheckpointError:
    """Makes the error of a file that raised `e`: Damaged, or CheckpointError where the fault may pass."""
    text = f"{path} cannot be read ({reason(e)})"
    wrong = isinstance(e, (ValueError, FileNotFoundError, NotADirectoryError, IsADirectoryError))
    if wrong or getattr(e, "errno", 0) in (errno.EINVAL, errno.ELOOP):  # no regular file; links in a ring
        return Damaged(folder, text)
    return CheckpointError(f"{text}; try again, or rename it to {folder.name}.aside "
                           "to go on from the one before")


def checkpoints(out_dir: str | Path) -> list[Path]:
    """Lists the folders of the finished checkpoints, the newest first: their names are iterations."""
    numbers = [f for f in (Path(out_dir) / CHECKPOINT).glob("*")
               if re.fullmatch("0|[1-9][0-9]{0,15}", f.name) and f.is_dir()]
    return sorted(numbers, key=lambda f: int(f.name), reverse=True)


def damaged(out_dir: str | Path) -> list[Path]:
    """Lists the folders of damaged checkpoints in `out_dir`, the newest first."""
    folders = [f for f in (Path(out_dir) / CHECKPOINT).glob("*.damaged*")
               if re.fullmatch("[0-9]{1,16}.damaged[0-9]{0,16}", f.name)]
    return sorted(folders, key=lambda f: [int(n or 0) for n in f.name.split(".damaged")], reverse=True)


def latest(out_dir: str | Path) -> Path | None:
    return next(iter(checkpoints(out_dir)), None)


def last_good(out_dir: str | Path, iter: int) -> str:
    """Says which checkpoint serves where the state after `iter` steps does not, saved or not."""
    saved = checkpoints(out_dir)
    for good in (folder for folder in saved if int(folder.name) < iter):
        rename = f" (rename {saved[0]} to {saved[0].name}.aside to resume from it)" * (saved[0] != good)
        return f"the last good checkpoint is {good}, before step {good.name}{rename}"
    return "there is no good checkpoint yet"


def manifest_text(stored: JsonObject) -> str:
    """Writes the text of a checkpoint.json: `stored`, with its crc32 at the end."""
    return json.dumps(stored | {"crc32": zlib.crc32(json.dumps(stored).encode())})


def newest(out_dir: str | Path, passed_over: Mapping[Path, str] = {}) -> tuple[Path, JsonObject]:
    """Finds the newest checkpoint not `passed_over` -> its folder and manifest: {format, iter, config, files:
    {name: [bytes, crc32]}}. Errors: Damaged; CheckpointError."""
    folder = next((f for f in checkpoints(out_dir) if f not in passed_over), None)
    if folder is None and passed_over:
        raise CheckpointError(next(iter(passed_over.values())))
    if folder is None:
        check_folder(out_dir, "out_dir")
        raise CheckpointError(f"{Path(out_dir) / CHECKPOINT} holds no checkpoint; train with "
                              "--init_from=scratch, or see memo.convert")
    path = folder / CHECKPOINT_JSON
    try:
        text = read_text(path, MOST_JSON_CHARS)
        stored = parse_json(text)
        stored.pop("crc32", None)
    except (OSError, ValueError) as e:
        raise read_error(folder, path, e) from None
    if text != manifest_text(stored):
        raise Damaged(folder, f"{path} is corrupt (its crc32 differs from the one at its end)")
    if stored.get("format") != FORMAT:
        raise CheckpointError(f"{path}: format={shown(stored.get('format'))} must be {FORMAT!r}; read it "
                              "with the memo that wrote it")
    config, files = stored.get("config"), stored.get("files")
    if type(stored.get("iter")) is not int or stored["iter"] != int(folder.name):
        raise Damaged(folder, f"{path}: iter={shown(stored.get('iter'))} must be {folder.name}, the name of "
                              "the folder")
    if not isinstance(config, dict) or not isinstance(config.get("origin", {}), dict):
        raise Damaged(folder, f"{path}: config must be an object, and origin in it")
    if not isinstance(files, dict) or METADATA not in files:
        raise Damaged(folder, f"{path}: files must be an object that names {METADATA}")
    for name, sizes in files.items():
        counts = isinstance(sizes, list) and [type(n) for n in sizes] == [int, int] and min(sizes) >= 0
        if not (plain_name(name) and counts):
            raise Damaged(folder, f"{path}: files[{shown(name)}]={shown(sizes)} must be a plain name with "
                                  "bytes and crc32")
    return folder, stored
