"""Generation: load a base with adapters, and sample many rows from a `Model` or a `Trainer`."""

from vox_core.config import GenerateSettings as GenerateSettings
from vox_core.run.answers import Conversation as Conversation, conversation_of as conversation_of
from vox_core.data.messages import Message as Message
from vox_core.data.messages import tool_calls as tool_calls, tool_schemas as tool_schemas
from vox_core.run.generate import (
    Finish as Finish,
    Generator as Generator,
    Prompt as Prompt,
    Rows as Rows,
    Token as Token,
    cache_bytes as cache_bytes,
    most_rows as most_rows,
)
from vox_core.run.load import (
    AnswerText as AnswerText,
    OpenBase as OpenBase,
    apart as apart,
    open_base as open_base,
    OpenModel as OpenModel,
    Question as Question,
    open_model as open_model,
    prompt_text as prompt_text,
)
from vox_core.run.sampling import Sampling as Sampling, top_log_probs as top_log_probs
