"""The offline default dataset: the sources of the running Python's standard library, one document a file."""

import sys
import sysconfig
import tokenize
from pathlib import Path

from memo.command import Arguments, run
from memo.tokens import DATA, VOCAB_SIZE, train_tokenizer, write_dataset

SKIPPED = {"site-packages", "dist-packages", "test", "tests", "idle_test"}  # not there with every Python


def documents(folder):
    for path in sorted(folder.rglob("*.py")):
        if SKIPPED.isdisjoint(path.relative_to(folder).parts):
            try:
                with tokenize.open(path) as file:  # reads the encoding that the source declares
                    yield file.read()
            except (SyntaxError, UnicodeDecodeError):
                continue


def main(argv):
    parser = Arguments(description=__doc__)
    parser.option("--vocab_size", int, 512, "of the byte-level BPE", **VOCAB_SIZE)
    parser.option("--out_dir", default=str(DATA / "stdlib"), help="where to write", least=1)
    args = parser.parse_args(argv)
    texts = list(documents(Path(sysconfig.get_paths()["stdlib"])))
    tokenizer = train_tokenizer(texts, args.vocab_size)
    write_dataset(args.out_dir, texts, tokenizer, sum(len(t.encode()) for t in texts))


if __name__ == "__main__":
    sys.exit(run(main))
