"""Collates prompts with images into the batch that is embedded."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy as np

from jaxvlm.config import ConfigError
from jaxvlm.data.image_placeholders import Lead
from jaxvlm.data.images import image_files
from jaxvlm.data.pairs import collate_prompt_items
from jaxvlm.data.sources.conversation_formats import PLACEHOLDER
from jaxvlm.data.tokenizer.chat_template import TemplateError
from jaxvlm.data.tokenizer.chat_tokenizer import ChatTokenizer
from jaxvlm.inference import prompts
from jaxvlm.inference.visual_tokens import VisualTokens
from jaxvlm.spmd.model import Model
from jaxvlm.types import Batch, Span

_log = logging.getLogger(__name__)


def batch(
    queries: Sequence[tuple[Sequence[prompts.ImageLike], str]],
    model: Model,
    tokenizer: ChatTokenizer,
    image_format: image_files.ImageFormat,
    max_pixels: int,
    instruction: str,
    max_length: int = 0,
    cache: VisualTokens | None = None,
) -> Batch:
    """Builds a batch of prompts to embed, padded on the left to one length, with their images.

    Args:
        queries: (images, prompt), each a sequence; ``<image>`` marks where each image goes.
        model: model on its mesh; the batch is padded to a size that the mesh divides.
        tokenizer: tokenizer with the chat template.
        image_format: how the model takes images.
        max_pixels: maximum number of pixels of an image file.
        instruction: instruction that the model reads as the system turn.
        max_length: maximum number of tokens of a prompt: longer texts are truncated as in
            training, which is logged; 0 is no limit.
        cache: of the images' visual tokens; ``None``: the model encodes all images.

    Returns:
        The batch, sharded over the mesh.

    Raises:
        ConfigError: the numbers of marks and images differ, the text has a special token, or a
            prompt is longer than ``max_length`` without its text.
        DataError: an image can't be read.
    """
    queries = [(list(given), prompt) for given, prompt in queries]
    loaded = prompts.load_images([given for given, _ in queries], image_format, max_pixels, cache)
    spans = [[image.span for image in images] for images in loaded]
    ids, truncated = [], 0
    for (_, prompt), of_prompt in zip(queries, spans, strict=True):
        cut, is_cut = _ids(of_prompt, prompt, tokenizer, instruction, max_length)
        ids.append(cut)
        truncated += is_cut
    if truncated:
        text = "%d of %d texts are longer than %d tokens and were truncated"
        _log.warning(text, truncated, len(queries), max_length)
    how = (model, tokenizer, image_format, cache)
    return prompts.collated(prompts.expanded(ids, loaded, tokenizer), range(len(ids)), *how)


def _ids(
    images: list[Span], prompt: str, tokenizer: ChatTokenizer, instruction: str, max_length: int
) -> tuple[np.ndarray, bool]:
    """The tokens of a prompt to embed, and whether its text was truncated."""
    prompt = prompts.checked(images, prompt, tokenizer)
    prompts.refuse_special_tokens(
        "instruction", instruction, tokenizer.reserved_tokens | {PLACEHOLDER}
    )
    leads = list(map(Lead.of, images))
    rendered = collate_prompt_items.rendered(tokenizer, prompt, instruction, leads, {})
    if rendered.reason:
        raise TemplateError(f"{rendered.reason}: {rendered.text}")
    (encoding,) = tokenizer.encode_chats([rendered.text])
    ids = np.asarray(encoding.ids, np.int32)
    over = len(ids) + sum(len(span.ids) - 1 for span in images) - max_length
    if not max_length or over <= 0:
        return ids, False
    shorter = rendered.shortened(encoding, over, tokenizer.image_id)
    if (missing := over - len(ids) + len(shorter)) > 0:
        raise ConfigError(
            f"an item has {max_length + missing} tokens without its text, but the model embeds "
            f"items of at most {max_length}; leave it out, or use a smaller image"
        )
    return shorter, True
