"""How each kind of question is put: several ways, of which the name of the thing chooses one."""

from __future__ import annotations

from vox_extract.rows import choose

_DESCRIBE = {
    "module": (
        "What is the module `{name}` for?",
        "What does the module `{name}` provide?",
        "Describe the Python module `{name}`.",
    ),
    "class": (
        "What is the class `{name}`?",
        "What is `{name}` for?",
        "Describe the class `{name}`.",
        "What does the class `{name}` do?",
    ),
    "attribute": (
        "What is `{name}`?",
        "What does the attribute `{name}` hold?",
        "Describe the attribute `{name}`.",
    ),
    "object": ("What is `{name}`?", "What does `{name}` do?", "Describe `{name}`."),
    "function": (
        "What does `{name}` do?",
        "What is the function `{name}` for?",
        "Explain what `{name}` does.",
        "Describe the function `{name}`.",
    ),
    "method": (
        "What does `{name}` do?",
        "What is the method `{name}` for?",
        "Explain what `{name}` does.",
        "Describe the method `{name}`.",
    ),
}
_OTHERS = {
    "signature": (
        "What is the signature of `{name}`?",
        "Which arguments does `{name}` take?",
        "How is `{name}` called?",
        "Show the signature of `{name}`.",
    ),
    "parameter": (
        "What does the parameter `{part}` of `{name}` mean?",
        "What is the argument `{part}` of `{name}`?",
        "In `{name}`, what is `{part}` for?",
        "Explain the parameter `{part}` of `{name}`.",
    ),
    "attribute": (
        "What is the attribute `{part}` of `{name}`?",
        "What does `{part}` of `{name}` hold?",
        "Describe the attribute `{part}` of `{name}`.",
    ),
    "returns": (
        "What does `{name}` return?",
        "What is the return value of `{name}`?",
        "What do I get back from `{name}`?",
    ),
    "yields": ("What does `{name}` yield?", "Over what does `{name}` iterate?"),
    "raises": (
        "Which exceptions does `{name}` raise?",
        "What can `{name}` raise?",
        "When does `{name}` raise an exception?",
    ),
    "example": (
        "Show an example of `{name}`.",
        "How do I use `{name}`?",
        "Give me an example of using `{name}`.",
        "Can you show how `{name}` is used?",
    ),
    "deprecated": (
        "Is `{name}` deprecated?",
        "Should I still use `{name}`?",
        "Has `{name}` been deprecated?",
    ),
}


def question(kind: str, what: str, name: str, part: str = "") -> str:
    """A question.

    Args:
        kind: describe, or a key of the table above.
        what: kind of thing that `name` is.
        part: of `name`, that the question is about.
    """
    templates = _DESCRIBE[what] if kind == "describe" else _OTHERS[kind]
    return choose(templates, kind, name, part).format(name=name, part=part)
