"""A dataset from conversations, through a model's own chat template, with the answers as what is learned.

Read are .jsonl and .json, also as .gz and .zst: a conversation a row, `messages` with role and content (and
tool_calls), or ShareGPT's `conversations` with from and value; `tools` beside them.

    python data/chat/prepare.py --source=chats.jsonl --tokenizer=hf:qwen3/
"""

import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # memo need not be installed

from memo.system.command import Arguments, import_failed, run

if __name__ == "__main__":
    sys.excepthook = import_failed  # a package that is missing is one line

from data.text.prepare import given_tokenizer, json_of, out_dir_of, rows_of, say_next, source_files
from memo.data.chat import chat_templates_of, rendered
from memo.data.tokenizer import end_of_document, stated_ends
from memo.data.tokens import write_dataset
from memo.errors import ConfigError
from memo.system.files import MOST_DEPTH, depth

KIND = re.compile(r"\.(json|jsonl)(\.gz|\.zst)?$", re.IGNORECASE)
SUFFIXES = ".jsonl, .json (each also with .gz or .zst)"
ROLES = ("system", "developer", "user", "assistant", "tool")
# ShareGPT's names of them
FROM = dict(human="user", gpt="assistant", chatgpt="assistant", function_call="assistant", observation="tool",
            function_response="tool")
REASONING = ("reasoning_content", "thinking", "reasoning")  # what templates read, and other names for it
ROW = ("messages, a list of objects with role and content, or conversations, one of objects with from and "
       "value")


def read_argv(argv):
    parser = Arguments(description=__doc__)
    parser.option("--source", required=True, help="a file, or a folder of files", least=1)
    parser.option("--tokenizer", required=True, least=1,
                  help="hf:<folder> of a model, with its chat template")
    parser.option("--learn", default="assistant", choices=("assistant", "last", "all"),
                  help="the tokens that are learned: of all turns of the assistant, of its last, or all")
    parser.option("--out_dir", help="where to write; by default data/<name of the source>", least=1)
    return parser.parse_args(argv)


def message_of(said, where):
    """A message of a row as `transformers` hands it to a template. Errors: it is none, or of another role."""
    if not isinstance(said, dict):
        raise ConfigError(f"{where} must have {ROW}; mend or drop it")
    said = {key: value for key, value in said.items() if value is not None}
    if "from" in said and "role" not in said:
        by, value = said["from"], said.get("value")
        said = dict(role=FROM.get(by, by) if isinstance(by, str) else by, content=value)
        if by == "function_call":
            call = json_of(value, where, "a JSON object") if isinstance(value, str) else value
            said = dict(role="assistant", content="", tool_calls=[dict(type="function", function=call)])
    if said.get("role") not in ROLES:
        raise ConfigError(f"{where}: role={said.get('role')!r:.50} must be one of {', '.join(ROLES)}; rename "
                          "it, or drop the row")
    calls = said.get("tool_calls", [])
    if not isinstance(calls, list) or not isinstance(said.get("content", "" if calls else None), str | list):
        raise ConfigError(f"{where}: a message of role={said['role']} must have content, or a list of "
                          "tool_calls; mend or drop the row")
    reasoning = next((said[key] for key in REASONING if key in said), None)
    return said if reasoning is None else dict(thinking=reasoning) | said | dict(reasoning_content=reasoning)


def conversation_of(row, where):
    """{messages, tools} of a row. Errors: it has none, or something else in their place."""
    said = row.get("messages", row.get("conversations")) if isinstance(row, dict) else None
    if not isinstance(said, list) or not said:
        raise ConfigError(f"{where} must have {ROW}, at least one; mend or drop it")
    if depth(row) > MOST_DEPTH:
        raise ConfigError(f"{where} must be nested at most {MOST_DEPTH} deep; mend or drop it")
    messages = [message_of(message, where) for message in said]
    if isinstance(system := row.get("system"), str) and system and messages[0]["role"] != "system":
        messages.insert(0, dict(role="system", content=system))
    tools = row.get("tools") or None
    tools = json_of(tools, where, "tools, a JSON list") if isinstance(tools, str) else tools
    if not isinstance(tools, list | None) or not all(isinstance(tool, dict) for tool in tools or ()):
        raise ConfigError(f"{where}: tools must be a list of objects; mend or drop the row")
    return dict(messages=messages, tools=tools)


def conversations(files):
    """Yields (where, conversation) of the rows of files, in order."""
    for path in files:
        for where, row in rows_of(path, KIND.search(path.name)[1].lower() == "json"):
            yield where, conversation_of(row, where)


def main(argv):
    args = read_argv(argv)
    out_dir = out_dir_of(args)
    tokenizer, folder, model = given_tokenizer(args.tokenizer)
    end = end_of_document(tokenizer, folder, next(iter(stated_ends(tokenizer, Path(folder))), None))
    files = source_files(args.source, KIND, SUFFIXES)
    documents = rendered(conversations(files), Path(folder), args.learn)
    template, _ = chat_templates_of(Path(folder))["default"]
    nothing = (f"the conversations of source={args.source} have no turns that learn={args.learn} takes, or "
               f"{template} writes none; add answers, mend it, or give --learn=all")
    meta = write_dataset(out_dir, documents, tokenizer, end=end, parse_special=True, weighted=nothing)
    say_next(args, out_dir, meta, model, "--documents=true")


if __name__ == "__main__":
    sys.exit(run(main))
