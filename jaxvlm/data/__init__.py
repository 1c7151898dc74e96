"""Data loading: files of conversations, or of queries and documents, become training batches."""

from jaxvlm.data.conversations.collate import Meta
from jaxvlm.data.conversations.dataset import Dataset
from jaxvlm.data.errors import DataError, ImageError, Problem
from jaxvlm.data.pairs.collate_prompt_items import PromptCollator
from jaxvlm.data.pairs.collate_texts import TextCollator
from jaxvlm.data.pairs.dataset import PairDataset, PairMeta
from jaxvlm.data.pairs.examples import Example, Item
from jaxvlm.data.prefetch import TrainBatches, resume_step
from jaxvlm.data.sources.conversation_formats import Record, Turn
from jaxvlm.data.tokenizer.chat_tokenizer import ChatTokenizer
from jaxvlm.data.validate import ValidationReport

__all__ = [
    "ChatTokenizer",
    "DataError",
    "Dataset",
    "Example",
    "ImageError",
    "Item",
    "Meta",
    "PairDataset",
    "PairMeta",
    "Problem",
    "PromptCollator",
    "Record",
    "TextCollator",
    "TrainBatches",
    "Turn",
    "ValidationReport",
    "resume_step",
]
