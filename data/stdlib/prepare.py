"""The offline default dataset: the sources of the running Python's standard library, one document a file."""

import sys
import sysconfig
import tokenize
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
from memo.command import Arguments, run
from memo.tokens import DATA, train_tokenizer, write_dataset

SKIPPED = {"site-packages", "dist-packages", "test", "tests", "idle_test"}  # what is not there with every Python


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
    parser.add_argument("--vocab_size", type=int, default=512, help="of the byte-level BPE (default 512)")
    parser.add_argument("--out_dir", default=DATA / "stdlib", help="where to write (default data/stdlib)")
    args = parser.parse_args(argv)
    texts = list(documents(Path(sysconfig.get_paths()["stdlib"])))
    tokenizer = train_tokenizer(texts, args.vocab_size)
    write_dataset(args.out_dir, texts, tokenizer, sum(len(t.encode()) for t in texts))


if __name__ == "__main__":
    sys.exit(run(main))
