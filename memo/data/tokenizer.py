"""Tokenizers as they lie in a folder, in whatever form: read, compared, what ends a document, and the rule: a
text is encoded without the tokenizer's template, which may put a <s> in front, and special tokens in it are
ordinary text, unless parse_special says that they are special."""

import json
import math
import re
import shlex
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from memo.errors import ConfigError, reason
from memo.system import files
from memo.system.files import TRIAL_BYTES, TRIAL_S, Json, JsonObject, load_json, parse_json, read_text

# of a document, where nothing says what ends it: the one of these that is a special token
ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<｜end▁of▁sentence｜>")
TOKENIZER, TOKENIZER_CONFIG = "tokenizer.json", "tokenizer_config.json"
OTHER_FORMS = ("*.model", "tekken*.json", "vocab.*", "merges.txt", "*.tiktoken")
NAMES = tuple(f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))
FLAGS = ("special", "normalized", "single_word", "lstrip", "rstrip")
MOST_NAMED = 6  # candidates in a message
MOST_CHARS = 2**26           # of a tokenizer.json, a vocabulary or merges
MOST_GROWTH = 2**8           # how many times as long a tokenizer may make a text
REFUSED = 3  # exit code of the process that tries a tokenizer out: it prints why, in JSON
TRIAL = "".join(map(chr, range(32, 127))) * 3 + "\n\n  é ж 中文 \t😀\r\n"
RUNS = "".join(sign * 1000 for sign in "a0 .\né中")  # expressions may be slow on these alone


class OtherForm(ConfigError):
    """Tells of a tokenizer in a form that memo does not read."""

    def __init__(self, folder: Path, what: str) -> None:
        super().__init__(f"tokenizer={folder} holds {what}, a form that memo does not read; transformers' "
                         f"AutoTokenizer.from_pretrained(folder).save_pretrained(folder) writes {TOKENIZER}")


# --- reading ---

def byte_level(model: models.BPE, prefix_space: bool = False) -> Tokenizer:
    """Makes a tokenizer like GPT-2's: bytes, cut into words, decoded without loss."""
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix_space)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def growth(part: object) -> int:
    """Bounds how many times as long parts of a tokenizer.json may make a text, up to 1 + MOST_GROWTH."""
    inner = part.values() if isinstance(part, dict) else part if isinstance(part, list) else ()
    times = 1
    if isinstance(part, dict) and part.get("type") in ("Replace", "Prepend"):
        pattern, output = part.get("pattern"), str(part.get("content", part.get("prepend")))
        matched = str(pattern.get("String", "")) if isinstance(pattern, dict) else ""
        times = -(-len(output) // len(matched)) if matched else 1 + len(output)  # an expression may match ""
    elif isinstance(part, dict):
        times = {"ByteLevel": 2, "Precompiled": 16}.get(str(part.get("type")), 1)
    for other in inner:
        times = min(max(1, times) * growth(other), MOST_GROWTH + 1)
    return times


def tokenizer_of(text: str) -> Tokenizer:
    """Makes the tokenizer of a tokenizer.json's text. Errors: ValueError."""
    parts = parse_json(text, math.inf)  # tried out within limits
    model = parts.pop("model", None)
    if growth([*parts.values()]) > MOST_GROWTH:
        raise ValueError(f"it may make a text more than {MOST_GROWTH} times as long")
    # the library aborts on merges without such a prefix; with dropout a text has other ids each time
    for name in ("continuing_subword_prefix", "dropout"):
        if isinstance(model, dict) and model.get(name) and model.get("type") != "WordPiece":
            raise ValueError(f"{name} must be empty")
    return Tokenizer.from_str(text)


def said_in(folder: Path, *names: str) -> JsonObject:
    """Reads the fields of these JSON files in `folder`, as far as they are there. Errors: ConfigError."""
    said = [load_json(folder / name, "mend or remove it") for name in names if (folder / name).is_file()]
    return {key: value for file in said for key, value in file.items() if value is not None}


def content(token: Json) -> str | None:
    """Reads the text of a token in these files: a text, or an object with its content."""
    token = token.get("content") if isinstance(token, dict) else token
    return token if isinstance(token, str) and token else None


def told_tokens(folder: Path) -> Iterator[tuple[float, AddedToken]]:
    """Yields (id or infinity, token), by id, that files in `folder` add or call special. Errors: any."""
    said = said_in(folder, "special_tokens_map.json", TOKENIZER_CONFIG)
    special = {content(t) for t in (*map(said.get, NAMES), *said.get("additional_special_tokens", ()))}
    told: dict[str | None, tuple[float, dict]] = {text: (math.inf, {}) for text in special if text}
    told |= {text: (int(i), {}) for text, i in said_in(folder, "added_tokens.json").items()}
    told |= {content(row): (int(i), row) for i, row in said.get("added_tokens_decoder", {}).items()}
    for text, (i, row) in sorted(told.items(), key=lambda item: (item[1][0], item[0])):
        flags = dict(special=text in special, normalized=text not in special)
        yield i, AddedToken(text, **flags | {name: row[name] for name in FLAGS if name in row})


def folder_of(path: Path) -> Path | None:
    """Finds the folder whose files tell of the tokenizer at `path`. Other names stand alone."""
    return path if path.is_dir() else path.parent if path.name == TOKENIZER else None


def gpt2_tokenizer(folder: Path) -> Tokenizer:
    """Reads GPT-2's vocab.json and merges.txt. Errors: OtherForm: another class cuts texts otherwise."""
    said = said_in(folder, TOKENIZER_CONFIG)
    kind = said.get("tokenizer_class") or said_in(folder, "config.json").get("model_type", "gpt2")
    if kind not in ("gpt2", "GPT2Tokenizer", "GPT2TokenizerFast"):
        raise OtherForm(folder, f"vocab.json and merges.txt of {kind!r:.100}")
    for name in ("vocab.json", "merges.txt"):
        read_text(folder / name, MOST_CHARS)
    model = models.BPE.from_file(str(folder / "vocab.json"), str(folder / "merges.txt"))
    tokenizer = byte_level(model, said.get("add_prefix_space") is True)
    tokenizer.add_special_tokens([t for t in ENDS[:1] if tokenizer.token_to_id(t) is not None])
    return tokenizer


def read_tokenizer(path: Path) -> Tokenizer | None:
    """Reads a tokenizer for find_tokenizer(), and raises whatever the library raises."""
    folder, file = folder_of(path), path / TOKENIZER if path.is_dir() else path
    if file.is_file():
        tokenizer = tokenizer_of(read_text(file, MOST_CHARS))
    elif (path / "vocab.json").is_file() and (path / "merges.txt").is_file():
        tokenizer = gpt2_tokenizer(path)
    elif others := sorted(other.name for form in OTHER_FORMS for other in path.glob(form)):
        raise OtherForm(path, others[0])
    else:
        return None
    told = [(i, token) for i, token in (told_tokens(folder) if folder else ())
            if tokenizer.token_to_id(token.content) is not None or (i < math.inf and not file.is_file())]
    tokenizer.add_tokens([token for _, token in told])  # at once: each call goes through all
    for i, token in told:
        if i not in (math.inf, known := tokenizer.token_to_id(token.content)):
            raise ValueError(f"the files beside it give {token.content!r:.100} the id {i}, not {known}")
    tokenizer.no_truncation()
    tokenizer.no_padding()
    for trial in ("a b\n", TRIAL, RUNS):
        ids = tokenizer.encode(trial).ids
        if len(ids) > MOST_GROWTH * len(trial):
            raise ValueError(f"it makes a text more than {MOST_GROWTH} times as long")
        tokenizer.decode(ids)
    return tokenizer


def try_out(path: str) -> None:
    """Reads a tokenizer within TRIAL_S and TRIAL_BYTES: else this process, which does nothing else, ends.
    Prints what the library raises, in JSON. A panic writes more than that to stderr, which nobody reads."""
    files.limit_process(0)
    try:
        read_tokenizer(Path(path))
    except MemoryError:
        raise
    except BaseException as e:
        if not isinstance(e, ConfigError):  # whoever waits for this process meets that too
            print("\n" + json.dumps(reason(e)))
            raise SystemExit(REFUSED) from None


@contextmanager
def refusing(what: str) -> Iterator[None]:
    """Makes a ConfigError of what the library raises: bare Exceptions, panics of a class of their own."""
    try:
        yield
    except BaseException as e:
        library = isinstance(e, Exception) or type(e).__name__ == "PanicException"
        if isinstance(e, ConfigError) or not library:  # a signal, say
            raise
        raise ConfigError(f"{what} ({reason(e)}); give a tokenizer.json of `tokenizers`") from None


def find_tokenizer(path: str | Path) -> Tokenizer | None:
    """Reads the tokenizer of a file or folder, in any form; None where there is none. A process of its own
    reads it first, within bounds. Errors: ConfigError."""
    file = Path(path, TOKENIZER) if Path(path, TOKENIZER).is_file() else path
    with refusing(f"tokenizer={file} cannot be read"):
        done = subprocess.run(files.command_of("memo.data.tokenizer", "try_out", str(path)),
                              stdin=subprocess.DEVNULL, capture_output=True, text=True)
        if done.returncode < 0 or "MemoryError" in done.stderr or "memory allocation" in done.stderr:
            raise ValueError(f"to read it and to encode a short text takes more than {TRIAL_S} s or "
                             f"{TRIAL_BYTES >> 30} GiB of memory")
        if done.returncode == REFUSED:
            raise ValueError(json.loads(done.stdout.splitlines()[-1]))
        if done.returncode:
            raise ValueError("the process that tries it out ends with "
                             f"{done.stderr.strip().splitlines()[-1:]}")
        return read_tokenizer(Path(path))


def load_tokenizer(path: str | Path, remedy: str = "give one") -> Tokenizer:
    """Reads a tokenizer like find_tokenizer(). Errors: ConfigError: also where there is none."""
    if tokenizer := find_tokenizer(path):
        return tokenizer
    raise ConfigError(f"tokenizer={path} must be a tokenizer.json, or a folder with one or with GPT-2's "
                      f"vocab.json and merges.txt; {remedy}")


# --- its ids ---

def encode_text(tokenizer: Tokenizer, text: str, parse_special: bool = False) -> list[int]:
    """Encodes a text, by the one rule."""
    tokenizer.encode_special_tokens = not parse_special
    with refusing(f"the tokenizer cannot encode {text[:30]!r}..."):
        return tokenizer.encode(text, add_special_tokens=False).ids


def tokenizer_vocab_size(tokenizer: Tokenizer) -> int:
    """Counts one more than the tokenizer's largest id."""
    return max(tokenizer.get_vocab().values(), default=-1) + 1


def check_vocab_size(tokenizer: Tokenizer, where: str | Path, vocab_size: int) -> None:
    """Raises ConfigError where a tokenizer has more tokens than its model. Fewer are usual."""
    if (n := tokenizer_vocab_size(tokenizer)) > vocab_size:
        raise ConfigError(f"{where}: the tokenizer has {n} tokens, must have at most the model's "
                          f"vocab_size={vocab_size}; put the model's own tokenizer.json there")


def what_decides(tokenizer: Tokenizer) -> list[Json]:
    """Lists all that decides on the ids of a text: tokenizers that are equal in it give the same ids."""
    def bare(part: dict) -> dict:  # without what says nothing
        return {k: v for k, v in part.items()
                if v is not None and v is not False and v != "" and k != "trim_offsets"}
    parts = json.loads(tokenizer.to_str(), object_hook=bare)
    if "normalizer" not in parts:
        for token in parts["added_tokens"]:
            token.pop("normalized", None)
    return [parts.get(part) for part in ("added_tokens", "normalizer", "pre_tokenizer", "model")]


# --- the end of a document ---

def stated_ends(tokenizer: Tokenizer, folder: Path) -> list[str]:
    """Lists the end tokens that a model's, run's or dataset's files name, mostly one. Errors: ConfigError."""
    if end := content(said_in(folder, "special_tokens_map.json", TOKENIZER_CONFIG).get("eos_token")):
        return [end]
    for name in ("meta.json", "config.json", "generation_config.json"):
        said = said_in(folder, name)
        if isinstance(own := said.get("tokenizer"), dict) and (end := content(own.get("end_of_document"))):
            return [end]
        ids = i if isinstance(i := said.get("eos_token_id"), list) else [i]
        ends = [tokenizer.id_to_token(i) for i in ids if type(i) is int and 0 <= i < 2**32]
        if any(ends):
            return [end for end in ends if end]
    return []


def chat_templates(folder: Path) -> str:
    """Reads the texts of chat templates in `folder`. Errors: ConfigError: also where they are too long."""
    said = [said_in(folder, name).get("chat_template") for name in (TOKENIZER_CONFIG, "chat_template.json")]
    texts = [json.dumps(said, ensure_ascii=False)]
    for part in (*folder.glob("*.jinja"), *folder.glob("*/*.jinja")):
        with files.reading(part, "mend or remove it"):
            texts.append(read_text(part, files.MOST_JSON_CHARS - sum(map(len, texts))))
    return "\n".join(texts)


def end_of_document(tokenizer: Tokenizer, path: str | Path = "", given: str | None = None) -> str:
    """Chooses the token that ends a document: `given`, else what files beside the tokenizer name, else of
    ENDS. Errors: ConfigError: none, several, or it ends a chat's turns."""
    added = {t.content: t.special for t in tokenizer.get_added_tokens_decoder().values()}
    known = [token for token in ENDS if added.get(token)]
    folder = folder_of(Path(path)) if path else None
    stated, templates = (stated_ends(tokenizer, folder), chat_templates(folder)) if folder else ([], "")
    ends = [given] if given else stated or known
    why = ""
    if len(set(ends)) != 1:
        why = f"{len(ends) or 'no'} special tokens may end a document"
    elif ends[0] not in added:
        why = f"end_token={ends[0]} is none of its special tokens"
    elif not given and (ends[0] in templates or (stated and re.search(r"\beos_token\b", templates))):
        why = f"its end token {ends[0]} ends the turns of its chat template, so documents may end otherwise"
    if not why:
        return ends[0]
    ways = [f"--end_token={shlex.quote(t)}" for t in dict.fromkeys([*stated, *known, *added]) if t in added]
    raise ConfigError(f"tokenizer={path}: {why}; " + (
        f"give {' or '.join(ways[:MOST_NAMED])}" if ways else f"add {ENDS[0]} to its special tokens"))
