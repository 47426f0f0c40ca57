"""Generation: sample many rows from a `Model` or a `Trainer`."""

from vox_core.run.generate import (
    Generator as Generator,
    Prompt as Prompt,
    Token as Token,
    cache_bytes as cache_bytes,
    most_rows as most_rows,
)
from vox_core.run.sampling import (
    Sampling as Sampling,
    log_prob as log_prob,
    next_token as next_token,
)
