"""Data: files of conversations, or of queries and documents -> batches."""

from jaxvlm.data.batch import Meta
from jaxvlm.data.check import Report
from jaxvlm.data.errors import DataError, ImageError, Problem
from jaxvlm.data.examples import Example, Item
from jaxvlm.data.formats import Record, Turn
from jaxvlm.data.iterate import TrainBatches, resume_step
from jaxvlm.data.loader import Dataset
from jaxvlm.data.pair_loader import PairDataset, PairMeta
from jaxvlm.data.prompt_items import PromptRows
from jaxvlm.data.text_rows import TextRows
from jaxvlm.data.tokenizer import ChatTokenizer

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
    "PromptRows",
    "Record",
    "Report",
    "TextRows",
    "TrainBatches",
    "Turn",
    "resume_step",
]
