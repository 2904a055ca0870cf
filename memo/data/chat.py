"""Conversations as text, through a model's own chat template, and which of their characters are learned. A
template is code from elsewhere: it runs in jinja2's sandbox, in a process with little time and memory."""

import json
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from datetime import datetime
from functools import cache, partial
from pathlib import Path

import jinja2
from jinja2 import ext, nodes, sandbox, utils

from memo.data.tokenizer import NAMES, TOKENIZER_CONFIG, content, said_in
from memo.data.tokens import Conversation
from memo.errors import ConfigError, reason
from memo.system import files
from memo.system.files import TRIAL_BYTES, TRIAL_S, Json, JsonObject, command_of, read_text, reading

TEMPLATE = "chat_template.jinja"
MARKS = re.compile(r"\{%-?\s*generation\s*-?%\}")  # around what the model says
FREE_CHARS, MOST_RATIO = 2**20, 64  # a template may write so many times as much as it reads, and so much more
Spans = list[tuple[int, int]]


def chat_templates_of(folder: Path) -> dict[str, tuple[Path, str]]:
    """Reads the chat templates of a model: {name: (file, text)}, mostly "default" alone. Errors: ConfigError.
    """
    said = said_in(folder, TOKENIZER_CONFIG).get("chat_template")
    named = said if isinstance(said, list) else [dict(name="default", template=said)]
    found = {row["name"]: (folder / TOKENIZER_CONFIG, row["template"]) for row in named
             if isinstance(row, dict) and {str} == {type(row.get(key)) for key in ("name", "template")}}
    for path in (folder / TEMPLATE, *folder.glob("additional_chat_templates/*.jinja")):
        if path.is_file():
            with reading(path, "mend or remove it"):
                text = read_text(path, files.MOST_JSON_CHARS)
            found["default" if path.name == TEMPLATE else path.stem] = path, text
    if "default" not in found:
        raise ConfigError(f"tokenizer={folder} must have a chat template, {TEMPLATE} or the chat_template of "
                          f"{TOKENIZER_CONFIG}, it has none; put one there")
    return found


def rendered(rows: Iterable[tuple[str, JsonObject]], folder: Path, learn: str) -> Iterator[Conversation]:
    """Renders rows, of each (where, its messages and tools). `learn`: all assistant turns, the last one, or
    all. Errors: ConfigError."""
    said = said_in(folder, "special_tokens_map.json", TOKENIZER_CONFIG)
    templates = chat_templates_of(folder)
    model = dict(templates={name: text for name, (_, text) in templates.items()}, learn=learn,
                 specials={name: text for name in NAMES if (text := content(said.get(name)))})
    with subprocess.Popen(command_of("memo.data.chat", "render_rows"), stdin=subprocess.PIPE,
                          stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdin
        assert process.stdout
        try:
            print(json.dumps(model), file=process.stdin, flush=True)
            for where, row in rows:
                print(json.dumps(row), file=process.stdin, flush=True)
                answer = json.loads(process.stdout.readline() or "{}")
                if "text" not in answer:
                    why = answer.get("error", f"the chat template takes more than {TRIAL_S} s or "
                                     f"{TRIAL_BYTES >> 30} GiB of memory; give another, or a shorter row")
                    raise ConfigError(f"{templates[answer['of']][0] if 'of' in answer else where}: {why}")
                yield Conversation(answer["text"], answer["spans"])
        finally:
            process.kill()


# --- in a process of its own ---

def render_rows() -> None:
    """Reads a model, then conversations from stdin, an object a line, and writes to stdout for each its text
    and spans, or what is wrong."""
    files.limit_process(2**50)  # of memory: of time each rendering has its own
    model = json.loads(sys.stdin.readline())
    for line in sys.stdin:
        row = json.loads(line)
        name = "tool_use" if row["tools"] is not None and "tool_use" in model["templates"] else "default"
        template = model["templates"][name]
        render = partial(render_in_time, template, FREE_CHARS + MOST_RATIO * len(line),
                         dict(tools=row["tools"], documents=None) | model["specials"])
        try:
            text, spans = learned_spans(render, row["messages"], model["learn"], bool(MARKS.search(template)))
            text.encode()  # half a surrogate pair is no text
            answer = dict(text=text, spans=spans)
        except ConfigError as e:
            answer = dict(error=str(e))
        except jinja2.TemplateSyntaxError as e:
            answer = dict(error=f"a chat template must be one of jinja2 (its line {e.lineno}: {e.message}); "
                          "mend it", of=name)
        except Exception as e:  # whatever a template raises
            why = " ".join(f"{type(e).__name__}: {reason(e)}".split())[:300]
            answer = dict(error=f"the chat template fails ({why}); mend the row or the template")
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(json.dumps(answer), flush=True)


def render_in_time(template: str, most: int, variables: JsonObject, messages: list[JsonObject],
                   prompt: bool = False) -> tuple[str, Spans]:
    signal.setitimer(signal.ITIMER_PROF, TRIAL_S)  # SIGPROF ends this process
    render = compile_template(template)
    return render(most, messages=messages, add_generation_prompt=prompt, **variables)


def learned_spans(render: Callable[..., tuple[str, Spans]], messages: list[JsonObject], learn: str,
                  marked: bool) -> tuple[str, Spans]:
    """Renders a conversation -> (text, its learned spans): of a template with marks what they enclose, else
    what each turn of the assistant adds to the turns before and the prompt for it. Errors: ConfigError: the
    template writes earlier turns otherwise later."""
    text, spans = render(messages)
    turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    turns = turns[-1:] if learn == "last" else turns
    if learn == "all":
        return text, [(0, len(text))]
    if marked:
        before = len(render(messages[:turns[0]])[1]) if learn == "last" and turns and turns[0] else 0
        return text, spans[before:]
    spans = []
    for i in turns:
        begin, end = render(messages[:i], prompt=True)[0], render(messages[:i + 1])[0]
        if not text.startswith(end) or not end.startswith(begin):
            raise ConfigError(f"the chat template must write messages 1 to {i + 1} alone as in the whole "
                              "conversation, or what is learned is not known; give a template with "
                              "{% generation %} marks" + ", or --learn=last" * (learn != "last"))
        spans.append((len(begin), len(end)))
    return text, spans


class Marks(ext.Extension):
    """Notes where what {% generation %} encloses lies in the text."""

    tags = {"generation"}
    environment: Json

    def parse(self, parser: Json) -> Json:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("mark"), [], [], body).set_lineno(line)

    def mark(self, caller: Callable[[], str]) -> str:
        start, text = self.environment.written, caller()
        self.environment.spans.append((start, start + len(text)))
        return text


class Namespace(utils.Namespace):
    """Refuses names that may lead into Python's own."""

    def __init__(*args: Json, **named: Json) -> None:  # one of the names may be self
        super(Namespace, args[0]).__init__()
        for name, value in dict(*args[1:], **named).items():
            args[0][name] = value

    def __setitem__(self, name: str, value: Json) -> None:
        if str(name).startswith("_"):
            raise jinja2.exceptions.SecurityError(f"a namespace must not have {name!r}")
        super().__setitem__(name, value)


class Dict:
    """Makes dicts, and has nothing else of the class."""

    def __call__(self, *args: Json, **named: Json) -> JsonObject:
        return dict(*args, **named)

    def fromkeys(self, *args: Json) -> JsonObject:
        return dict.fromkeys(*args)


def fail(message: str) -> None:
    raise jinja2.TemplateError(message)


def to_json(value: Json, ensure_ascii: bool = False, indent: Json = None, separators: Json = None,
            sort_keys: bool = False) -> str:
    """Writes `value` as it is: jinja2's own makes HTML of it."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators,
                      sort_keys=sort_keys)


@cache
def compile_template(text: str) -> Callable[..., tuple[str, Spans]]:
    """Compiles a template -> function(most characters, its variables) -> (text, spans that it marks), with
    the sandbox, filters and functions that `transformers` has. Errors: jinja2's; ValueError: too long."""
    environment: Json = sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Marks, ext.loopcontrols])
    environment.filters["tojson"] = to_json
    environment.globals |= dict(raise_exception=fail, namespace=Namespace, dict=Dict(),
                                strftime_now=lambda format: datetime.now().strftime(format))
    template = environment.from_string(text)

    def render(most: int, **variables: Json) -> tuple[str, Spans]:
        parts, environment.written, environment.spans = [], 0, []
        for part in template.generate(**variables):
            parts.append(part)
            environment.written += len(part)
            if environment.written > most:
                raise ValueError(f"it writes more than {most:,} characters")
        return "".join(parts), environment.spans
    return render
