"""Go templates of the golden chat templates, and what Jinja renders with those, as JSON."""

from __future__ import annotations

import json

from tests.golden.families import FAMILIES, tokenizer
from vox_core.errors import ModelError
from vox_core.run.load import prompt_text
from vox_export.ollama import _battery, carried_over

made = {}
for name in FAMILIES:
    own = tokenizer(name)
    try:
        pieces = carried_over(own)
    except ModelError:
        continue
    cases = [
        {"Messages": messages, "Expected": prompt_text(own, messages)[0]}
        for messages in _battery(pieces.system is not None)
    ]
    made[name] = {"Go": pieces.go(), "Cases": cases}
print(json.dumps(made))
