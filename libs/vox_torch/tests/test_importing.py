"""What vox does not use is not imported, and works for whoever imports it later."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping

import pytest

_BEGIN = """
import gc, sys, torch, types
from vox_torch.importing import import_models, without_compiler
from vox_torch.libraries import absent

def tiny():
    from transformers import LlamaConfig, LlamaForCausalLM
    sizes = dict(hidden_size=16, intermediate_size=32, num_hidden_layers=1, vocab_size=64)
    return LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=1))
"""


def says(code: str, environ: Mapping[str, str] | None = None) -> list[str]:
    """Words that Python code prints in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", _BEGIN + code],
        env=dict(environ) if environ is not None else None,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_nothing_is_imported_that_a_step_does_not_need() -> None:
    """Building a model, an adapter in it, a step and an optimizer's."""
    code = """
with without_compiler(), absent('bitsandbytes'):
    import_models()
    from peft import LoraConfig, get_peft_model
    from vox_torch.building import WithoutSymbols
    with WithoutSymbols(), torch.device("meta"):
        tiny()
    model = get_peft_model(tiny(), LoraConfig(target_modules=["q_proj"]))
    optimizer = torch.optim.AdamW(p for p in model.parameters() if p.requires_grad)
    model(input_ids=torch.arange(8)[None], labels=torch.arange(8)[None]).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
unused = ["torch._dynamo", "torch._inductor", "torch.distributed.tensor", "bitsandbytes"]
unused += ["sympy", "scipy"]
print([name for name in unused if sys.modules.get(name)])
"""
    assert says(code) == ["[]"]


def test_nothing_of_the_stand_in_is_left() -> None:
    """But one class that is asked for by its name, and only made once it is called."""
    code = """
import_models()
with without_compiler(), torch.device("meta"):
    tiny()
from vox_torch import importing
ours = (importing._Compiler, importing._Later)
for name, module in list(sys.modules.items()):
    for key, value in list(vars(module).items()) if name != "vox_torch.importing" else ():
        owner = value.__self__ if type(value) is types.MethodType else value
        if issubclass(type(owner), ours):
            print(f"{name}.{key}")
for function in (each for each in gc.get_objects() if type(each) is types.FunctionType):
    if "__dynamo_disable" in vars(function):
        print(function)
from transformers import masking_utils
import torch._dynamo._trace_wrapped_higher_order_op as real
print(isinstance(masking_utils.TransformGetItemToIndex(), real.TransformGetItemToIndex))
print(torch.distributed.is_available())
"""
    available = "import torch.distributed; print(torch.distributed.is_available())"
    assert says(code) == ["True", *says(available)]


def test_a_model_can_be_compiled_afterwards() -> None:
    code = """
with without_compiler():
    import_models()
    model = tiny().eval()
tokens = torch.arange(8)[None]
with torch.no_grad():
    expected = model(input_ids=tokens).logits
    found = torch.compile(model, backend="eager")(input_ids=tokens).logits
print(type(sys.modules["torch._dynamo"]).__name__, torch.equal(found, expected))
"""
    assert says(code) == ["module", "True"]


@pytest.mark.parametrize(
    "asked",
    [
        "import torch._dynamo; torch._dynamo.config.suppress_errors",
        "from transformers import masking_utils; masking_utils.TransformGetItemToIndex()",
        "torch.compile(lambda x: x + 1, backend='eager')(torch.ones(1))",
    ],
)
def test_the_stand_in_gives_way(asked: str) -> None:
    code = f"with without_compiler():\n    {asked}\n    import torch._dynamo\n"
    assert says(code + "    print(type(torch._dynamo).__name__)") == ["module"]


def test_what_is_asked_for_first_is_what_the_compiler_has() -> None:
    """A module within that were executed twice would be two modules."""
    code = """
with without_compiler():
    import torch._dynamo.config as config
with without_compiler():
    import torch._dynamo.exc as it
import torch._dynamo.symbolic_convert as user
print(config is user.config)
print(it is user.exc is torch._dynamo.exc is sys.modules["torch._dynamo.exc"])
print(it.__spec__.origin.endswith("exc.py"), it.Unsupported is user.Unsupported)
"""
    assert says(code) == ["True", "True", "True", "True"]


def test_the_compiler_can_be_looked_for() -> None:
    code = """
import importlib.util
with without_compiler():
    print(importlib.util.find_spec("torch._dynamo").origin.endswith("_dynamo/__init__.py"))
print(any("vox_torch" in type(finder).__module__ for finder in sys.meta_path))
"""
    assert says(code) == ["True", "False"]


def test_a_mark_is_a_decorator_with_and_without_arguments() -> None:
    code = """
with without_compiler():
    @torch.compiler.disable
    def one(): return "one"
    @torch._dynamo.disable(recursive=False)
    def two(): return "two"
    print(one(), two())
print("torch._dynamo" in sys.modules)
"""
    assert says(code) == ["one", "two", "False"]


def test_what_is_in_use_stays() -> None:
    code = """
import torch._dynamo
before = torch._dynamo
with without_compiler():
    print(sys.modules["torch._dynamo"] is before)
print(sys.modules["torch._dynamo"] is before)
"""
    assert says(code) == ["True", "True"]


@pytest.mark.parametrize(("environ", "known"), [({}, "False"), ({"WORLD_SIZE": "2"}, "True")])
def test_several_processes_are_known_to_transformers(environ: dict[str, str], known: str) -> None:
    code = "from transformers.utils import is_torch_distributed_available as known\n"
    code = f"import_models()\n{code}print(known())"

    inherited = {name: value for name, value in os.environ.items() if name != "WORLD_SIZE"}
    assert says(code, {**inherited, **environ}) == [known]


def test_what_transformers_has_found_before_it_finds_again() -> None:
    """A run that makes its tokens has asked transformers for a tokenizer."""
    code = """
from transformers.utils import is_scipy_available, is_torch_distributed_available as known
print(is_scipy_available(), known())
import_models()
import transformers.modeling_utils as modeling
print(is_scipy_available(), known())
"""
    words = says(code)
    assert words[:2] == words[2:]


def test_scipy_is_there_once_a_function_of_it_is_called() -> None:
    """That of a loss which no language model has; and nobody is told that scipy is missing."""
    code = """
import_models()
print("scipy" in sys.modules)
from transformers.utils import is_scipy_available
from transformers.loss import loss_for_object_detection as detection
print(is_scipy_available(), *detection.linear_sum_assignment([[1.0, 2.0], [0.0, 5.0]])[1])
import scipy.optimize
print(type(scipy.optimize).__name__)
"""
    assert says(code) == ["False", "True", "1", "0", "module"]


def test_what_is_within_scipys_module_is_imported() -> None:
    """While the stand-in is there, too."""
    code = """
from vox_torch.importing import _later
with _later("scipy.optimize"):
    from scipy.optimize._linesearch import line_search_wolfe1
import scipy.optimize._linesearch as real
import scipy.optimize
print(real is sys.modules["scipy.optimize._linesearch"] is scipy.optimize._linesearch)
print(real.line_search_wolfe1 is line_search_wolfe1, type(sys.modules["scipy.optimize"]).__name__)
"""
    assert says(code) == ["True", "True", "module"]


def test_scikit_learn_gets_no_stand_in(tmp_path) -> None:
    """transformers imports it where it is installed, for a curve of candidates."""
    package = tmp_path / "sklearn"
    package.mkdir()
    (package / "__init__.py").write_text("__version__ = '1.8.0'")
    (package / "metrics.py").write_text(
        "from scipy import optimize\nfrom scipy.optimize import OptimizeResult\n"
        "class roc_curve(OptimizeResult): pass\n"
        "kind = type(optimize).__name__\n"
    )
    code = f"""
sys.path.insert(0, {str(tmp_path)!r})
import importlib.metadata as metadata
own = metadata.version
metadata.version = lambda name: "1.8.0" if name == "scikit-learn" else own(name)
import_models()
import sklearn.metrics
print(sklearn.metrics.kind)
"""
    assert says(code) == ["module"]


def test_without_scipy_it_is_not_there() -> None:
    code = """
with absent("scipy"):
    import_models()
    from transformers.loss import loss_for_object_detection as detection
print(hasattr(detection, "linear_sum_assignment"))
"""
    assert says(code) == ["False"]


def test_models_are_known_by_one_scan_as_by_two() -> None:
    own = """
import transformers.models
import transformers.utils.import_utils as utils
print(utils.create_import_structure_from_path.cache_info().misses)
print(hash(repr(sorted(transformers.models._class_to_module.items()))))
print(hash(repr(sorted(transformers._class_to_module.items()))))
"""
    environ = {**os.environ, "PYTHONHASHSEED": "0"}
    two, *names = says(own, environ)
    one, *same = says(f"import_models(){own}", environ)
    assert same == names
    assert int(one) < 0.6 * int(two)
