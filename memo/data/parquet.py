"""The texts of a Parquet file. Its library believes a file's sizes, and may crash: it has its own process."""

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

from memo.errors import ConfigError, last_line, reason
from memo.system.files import TRIAL_BYTES, TRIAL_S, command_of, limit_process

MOST_BYTES = 2**26  # of a row
MOST_ROWS, BATCH_BYTES = 256, 2**24  # in memory at once, about


def parquet_texts(path: Path, column: str) -> Iterator[bytes]:
    """Yields the texts of `column`, in UTF-8, but for empty ones. Errors: ConfigError."""
    with subprocess.Popen(command_of("memo.data.parquet", "send", str(path), column),
                          stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
                          env=os.environ | dict(ARROW_DEFAULT_MEMORY_POOL="system")) as reader:
        try:
            for line in reader.stdout or ():
                if not line.endswith(b"\n"):  # it ended in its midst
                    break
                if isinstance(text := json.loads(line), dict):
                    raise ConfigError(text["error"])
                yield text.encode()
            if reader.wait():
                raise ConfigError(f"source={path} cannot be loaded (to read it takes more than {TRIAL_S} s "
                                  f"and one a MiB, or {TRIAL_BYTES >> 30} GiB of memory); write it as .jsonl")
        finally:
            reader.kill()


def send(path: str, column: str) -> None:
    """Writes to stdout each text in a line of JSON, and as an object what is wrong."""
    try:
        for text in read_texts(path, column):
            print(json.dumps(text))
    except MemoryError:
        raise
    except Exception as e:
        why = f"source={path} cannot be loaded ({type(e).__name__}: {reason(e)}); give a whole file"
        if isinstance(e, (ConfigError, ModuleNotFoundError)):
            why = last_line(e) or why
        print(json.dumps(dict(error=why)))


def read_texts(path: str, column: str) -> Iterator[str]:
    """Reads parquet_texts() in this process. Errors: ConfigError; what the library raises."""
    import pyarrow.parquet  # takes half a second: only where it is needed
    limit_process(os.stat(path).st_size)
    file, more = pyarrow.parquet.ParquetFile(path, buffer_size=2**16), "give another --text_key"
    if column not in (names := file.schema_arrow.names):
        names = ", ".join(names)
        raise ConfigError(f"{path}: text_key={column} must be one of the columns ({names:.300}); {more}")
    about = file.metadata
    nbytes = sum(about.row_group(i).total_byte_size for i in range(about.num_row_groups))
    rows = min(MOST_ROWS, BATCH_BYTES * about.num_rows // max(1, nbytes) + 1)
    for batch in file.iter_batches(rows, columns=[column], use_threads=False):
        for text in batch.column(0).drop_null().to_pylist():
            if not isinstance(text, str):
                kind = type(text).__name__
                raise ConfigError(f"{path}: text_key={column} must hold text, not {kind}; {more}")
            if len(text.encode()) > MOST_BYTES:
                raise ConfigError(f"{path}: a row must have at most {MOST_BYTES} bytes; split it")
            if text:
                yield text
