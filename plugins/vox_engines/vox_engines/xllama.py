"""llama-server of the Python package `xllamacpp`, with the options of `llama-server` that vox uses.

    PYTHON xllama.py -m FILE --host SOCKET ...

It runs in the environment that has `xllamacpp`, and imports nothing else.
"""

import argparse
import os
import signal
import sys
from typing import Any


def main() -> None:
    """Serve until a signal."""
    import xllamacpp as x

    given = options(sys.argv[1:])
    params = x.CommonParams()
    params.model.path = given.model
    params.hostnames, params.ui = [given.host], False
    params.api_keys = [os.environ["LLAMA_API_KEY"]]
    params.n_parallel, params.n_ctx, params.kv_unified = given.parallel, given.ctx_size, True
    params.use_jinja = True
    if given.chat_template_file:
        with open(given.chat_template_file, encoding="utf-8") as file:  # noqa: PTH123
            params.chat_template = file.read()
    params.lora_init_without_apply = True
    params.lora_adapters = [x.CommonAdapterLoraInfo(path, 0.0) for path in given.lora]
    if given.cache_type_k == "f32":
        params.cache_type_k = params.cache_type_v = x.ggml_type.GGML_TYPE_F32
    if given.flash_attn == "off":
        kind = x.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
        params.flash_attn_type = kind
    server = x.Server(params)
    print("listening at", server.listening_address, flush=True)  # noqa: T201
    signal.pause()


def options(arguments: list[str]) -> Any:
    """Return the values of the options; end with a message if one is unknown."""
    parser = argparse.ArgumentParser()
    parser.add_argument("-m", "--model", required=True)
    parser.add_argument("--host", required=True)
    parser.add_argument("-np", "--parallel", type=int, default=1)
    parser.add_argument("-c", "--ctx-size", type=int, default=0)
    parser.add_argument("--lora", type=lambda paths: paths.split(","), default=[])
    parser.add_argument("--chat-template-file")
    parser.add_argument("-ctk", "--cache-type-k", choices=["f16", "f32"], default="f16")
    parser.add_argument("-ctv", "--cache-type-v", choices=["f16", "f32"], default="f16")
    parser.add_argument("-fa", "--flash-attn", choices=["on", "off", "auto"], default="auto")
    for flag in ("--jinja", "--no-webui", "--kv-unified", "--lora-init-without-apply"):
        parser.add_argument(flag, action="store_true")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
