"""Data: files of conversations about pictures -> batches of packed rows."""

from jaxvlm.data.batch import Meta
from jaxvlm.data.check import Report
from jaxvlm.data.errors import DataError, ImageError, Problem
from jaxvlm.data.formats import Record, Turn
from jaxvlm.data.iterate import TrainBatches, resume_step
from jaxvlm.data.loader import Dataset
from jaxvlm.data.tokenizer import ChatTokenizer

__all__ = [
    "ChatTokenizer",
    "DataError",
    "Dataset",
    "ImageError",
    "Meta",
    "Problem",
    "Record",
    "Report",
    "TrainBatches",
    "Turn",
    "resume_step",
]
