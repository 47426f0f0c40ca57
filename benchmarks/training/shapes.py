"""The shapes of real models, as constants: speed depends on them, and not on the weights.

Each is the `config.json` of the repository named beside it on huggingface.co. Left out is what
changes no shape and no speed (the scaling of rotary positions, special tokens).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Shape:
    """A dense decoder with gated feed-forward layers."""

    model_type: str
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    tied: bool
    positions: int
    rope_theta: float

    def linears(self) -> tuple[tuple[int, int], ...]:
        """(output, input) features of each linear module of a layer."""
        query, value = self.heads * self.head_dim, self.kv_heads * self.head_dim
        attention = ((query, self.hidden), *[(value, self.hidden)] * 2, (self.hidden, query))
        up, down = (self.intermediate, self.hidden), (self.hidden, self.intermediate)
        return (*attention, up, up, down)

    @property
    def body(self) -> int:
        """Weights in the linear modules of all layers, without embedding and output head."""
        return self.layers * sum(outputs * inputs for outputs, inputs in self.linears())


SHAPES = {
    # Two layers of width 64: what is left of a step is the framework.
    "tiny": Shape("llama", 64, 128, 2, 4, 2, 16, 512, True, 2048, 1e4),
    # HuggingFaceTB/SmolLM2-135M
    "smollm2-135m": Shape("llama", 576, 1536, 30, 9, 3, 64, 49152, True, 8192, 1e5),
    # HuggingFaceTB/SmolLM2-360M
    "smollm2-360m": Shape("llama", 960, 2560, 32, 15, 5, 64, 49152, True, 8192, 1e5),
    # Qwen/Qwen2.5-0.5B
    "qwen2.5-0.5b": Shape("qwen2", 896, 4864, 24, 14, 2, 64, 151936, True, 32768, 1e6),
    # Qwen/Qwen2.5-1.5B
    "qwen2.5-1.5b": Shape("qwen2", 1536, 8960, 28, 12, 2, 128, 151936, True, 131072, 1e6),
    # Qwen/Qwen3-0.6B
    "qwen3-0.6b": Shape("qwen3", 1024, 3072, 28, 16, 8, 128, 151936, True, 40960, 1e6),
    # meta-llama/Llama-3.1-8B
    "llama-3.1-8b": Shape("llama", 4096, 14336, 32, 32, 8, 128, 128256, False, 131072, 5e5),
}
