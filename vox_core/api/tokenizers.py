"""A model folder's tokenizer, and functions in a child process; imports nothing of generation."""

from vox_core.data.tokenizer import end_of_turn_ids as end_of_turn_ids
from vox_core.data.tokenizer import load_tokenizer as load_tokenizer
from vox_core.data.tokenizer import template_source as template_source
from vox_core.data.worker import Worker as Worker, WorkerDied as WorkerDied
