"""A GGUF file -> a Hugging Face folder: bf16 safetensors, config, tokenizer, chat template.

    source.py        the file: metadata and tensors, read with the `gguf` package, within bounds
    families.py      what llama.cpp calls things, and what it did to them, undone: config, names
    tokenizer.py     tokenizer.json and tokenizer_config.json out of the metadata
    convert.py       `convert_gguf`: the folder

Tensors are dequantised and written one by one, in numpy. What is not supported is refused by name;
nothing is guessed. See docs/adr/0001-gguf-in-numpy.md.
"""

from __future__ import annotations

from vox_core.gguf.convert import convert_gguf

__all__ = ["convert_gguf"]
