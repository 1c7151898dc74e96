"""A data format of one's own: tables of questions about images, and a recipe that trains on them.

    jaxvlm train --config=examples/custom_data.py:train.tsv,test.tsv --workdir=runs/table

A line of such a file is ``cat.png<TAB>What is it?<TAB>a cat``. docs/extend.md explains each part.
"""

import dataclasses
import pathlib

from jaxvlm.config import default_config
from jaxvlm.data.errors import Problem


@dataclasses.dataclass(frozen=True)
class Table:
    """Lines of an image's file name, a question and an answer."""

    separator: str = "\t"  # a setting: config.data.format.options.separator

    def __call__(self, file):
        """A dict in a built-in format for each line, or a Problem where a line can't be read."""
        lines = pathlib.Path(file).read_text(encoding="utf-8").splitlines()
        for number, line in enumerate(lines, start=1):
            cells = line.split(self.separator)
            if len(cells) != 3:
                yield Problem(f"line {number}", "not three cells", f"{len(cells)} cells")
                continue
            image, question, answer = cells
            yield {
                "image": image,
                "messages": [
                    {"role": "user", "content": question},
                    {"role": "assistant", "content": answer},
                ],
            }


def get_config(files: str):
    """A tiny model on the table ``files``: TRAIN,EVAL."""
    config = default_config()
    config.data.format.target = f"{__file__}:Table"
    config.data.train, config.data.eval = files.split(",")
    config.data.batch_size, config.data.max_length = 8, 64
    config.model.vision.image_size, config.model.vision.patch_size = 16, 8
    config.steps, config.log_every, config.checkpoint.every = 12, 1, 4
    return config
