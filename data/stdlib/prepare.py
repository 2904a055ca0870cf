"""The offline default dataset: the sources of the running Python's standard library, one document a file."""

import sys
import sysconfig
import tokenize
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # memo need not be installed

from memo.system.command import Arguments, import_failed, run

if __name__ == "__main__":
    sys.excepthook = import_failed  # a package that is missing is one line

from memo.config.config import KEYS
from memo.data.tokens import DATA, VOCAB_SIZE, train_tokenizer, train_with, write_dataset

SKIPPED = {"site-packages", "dist-packages", "test", "tests", "idle_test"}  # not there with every Python


def documents(folder):
    for path in sorted(folder.rglob("*.py")):
        if SKIPPED.isdisjoint(path.relative_to(folder).parts):
            try:
                with open(path, "rb") as file:
                    encoding, _ = tokenize.detect_encoding(file.readline)  # as the source declares it
                yield path.read_bytes().decode(encoding)  # tokenize.open() would change ends of lines
            except (SyntaxError, UnicodeDecodeError):
                continue


def main(argv):
    parser = Arguments(description=__doc__)
    parser.option("--vocab_size", int, 512, "of the byte-level BPE", **VOCAB_SIZE)
    parser.option("--out_dir", default=str(DATA / "stdlib"), help="where to write", least=1)
    args = parser.parse_args(argv)
    texts = list(documents(Path(sysconfig.get_paths()["stdlib"])))
    tokenizer = train_tokenizer(texts, args.vocab_size)
    meta = write_dataset(args.out_dir, texts, tokenizer, sum(len(t.encode()) for t in texts))
    print(f"train on it: {train_with(args.out_dir, meta, KEYS['block_size'].default)}")


if __name__ == "__main__":
    sys.exit(run(main))
