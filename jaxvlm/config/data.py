"""Settings of the data: files, tokenizer, packing, images, pairs."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from jaxvlm.config.convert import NO_OPTIONS, ConfigError, Options
from jaxvlm.config.extension import Extension
from jaxvlm.config.mixture import SourceConfig


@dataclasses.dataclass(frozen=True)
class TokenizerConfig:
    """Chooses the tokenizer: a folder with ``tokenizer.json``, or one built from the training text.

    A checkpoint's tokenizer is used without any of these settings.
    """

    path: str = ""
    """Names the folder of an existing tokenizer; the default "" builds one from the training
    text."""
    kind: str = "word"
    """Chooses the kind of tokenizer that is built: lower-case words ('word'), or byte-level BPE
    ('bpe'). Allowed values: 'word', 'bpe'."""
    vocab_size: int = 8192
    """Limits the vocabulary of a tokenizer that is built, in tokens."""


@dataclasses.dataclass(frozen=True)
class PairDataConfig:
    """Configures the queries, positives and negatives of pairs (docs/embedding_data.md)."""

    max_query_length: int = 0
    """Limits the length of queries in tokens; longer texts are truncated. The default 0 means
    ``data.max_length``."""
    max_document_length: int = 0
    """Limits the length of documents (positives and negatives) in tokens; longer texts are
    truncated. The default 0 means ``data.max_length``."""
    query_instruction: str = ""
    """Sets the instruction of queries that have none of their own; a text encoder reads it directly
    before the text, so it should end with a space there."""
    document_instruction: str = ""
    """Sets the instruction of positives and negatives that have none of their own; a text encoder
    reads it directly before the text, so it should end with a space there."""
    max_negatives: int = -1
    """Limits the hard negatives of an example; each epoch samples them anew. The default -1 uses
    all of them."""
    require_negatives: bool = False
    """Treats an example without a hard negative as a bad record (see ``data.on_bad_record``)."""
    batch_sampler: str = "no_duplicates"
    """Chooses how examples are grouped into batches: at random, but with no query or positive twice
    in a batch ('no_duplicates'), or at random without this rule ('random'). Allowed values:
    'no_duplicates', 'random'."""
    tasks: str = "mixed"
    """Chooses whether a batch mixes examples of several tasks ('mixed') or has those of one task
    only ('homogeneous'). Allowed values: 'mixed', 'homogeneous'."""
    task_alpha: float = 1.0
    """Makes a task's number of batches proportional to its number of examples to this power, with
    ``tasks='homogeneous'``."""


@dataclasses.dataclass(frozen=True)
class VideoConfig:
    """Configures which frames of a video a model is shown (docs/data.md)."""

    fps: float = 0.0
    """Sets how many frames a second are sampled; the default 0 means what the checkpoint's video
    processor says, or ``num_frames``."""
    num_frames: int = 0
    """Sets how many frames are sampled, whatever the video's length; the default 0 means as many as
    ``fps`` asks for, or 8 where nothing says otherwise."""
    max_frames: int = 0
    """Limits the frames of a video; the default 0 means the checkpoint's limit."""
    max_tokens: int = 0
    """Limits the visual tokens of a video: frames of any size are made smaller, and then fewer are
    sampled, until they fit; the default 0 means no limit but ``data.max_length``."""
    pixels_range: tuple[int, int] = (0, 0)
    """Sets the minimum and the maximum number of pixels that frames of any size are resized to: of
    one frame in Qwen2-VL and Qwen2.5-VL, of all frames together in Qwen3-VL; a 0 takes the limit of
    the checkpoint's video processor."""

    def __post_init__(self) -> None:
        """Refuse two ways of sampling at once."""
        if self.fps and self.num_frames:
            raise ConfigError(
                f"fps={self.fps:g} and num_frames={self.num_frames} of videos: set one of them; "
                "max_frames limits the frames of fps"
            )


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """Configures what a run reads, and how records become sequences of a batch."""

    train: str = ""
    """Names the training data, of conversations (docs/data.md) or pairs (docs/embedding_data.md): a
    .json, .jsonl, .csv, .tsv, .parquet, .arrow, .array_record or .tar file; all files that match a
    pattern such as ``shards/*.tar``; a folder that Hugging Face's save_to_disk, MosaicML Streaming
    (MDS) or `jaxvlm data pack` wrote; or a built-in data set such as easy-vqa:train. Files,
    patterns and packed sets may also be at gs://, s3://, http:// and https:// URLs, and files of
    the Hugging Face hub at hf://datasets/OWNER/NAME/PATTERN. With config.data.format, it is
    whatever that format takes."""
    eval: str = ""
    """Names the evaluation data, in the same form as ``train`` but not packed; the default "" means
    that the run is not evaluated."""
    mixture: Mapping[str, SourceConfig] = NO_OPTIONS
    """Names several sources of training data instead of ``train``, by names of your own, with the
    settings of each."""
    mixture_temperature: float = 1.0
    """Makes the weights of a mixture's sources without weights and budgets their sizes to the power
    of 1 / temperature: 1 reads all sources as one, a higher one reads small sources more often."""
    format: Extension = Extension()
    """Groups the settings of a data format of the user's own, which reads ``train`` and
    ``eval``."""
    image_root: str = ""
    """Names the folder that image paths are relative to, or its gs:// or s3:// URL; the default ""
    means the data file's own folder."""
    fetched: str = ""
    """Names the folder in which `jaxvlm data fetch` has kept the images and videos that records
    name by http:// and https:// URLs; with the default "" such records are bad records."""
    column_mapping: tuple[tuple[str, str], ...] = ()
    """Lists pairs of a column's name in the file and the name of the field that it is read as, e.g.
    (('prompt', 'question'), ('label', 'answer')); the default () renames none."""
    tsv_quoting: bool = False
    """Makes quotation marks around a cell of a .tsv file quote the cell, as in a .csv file; with
    the default False they are part of the text."""
    ignored_fields: tuple[str, ...] = ()
    """Lists fields of records, turns and content parts that are ignored, even those that could be
    read. A record with any other field that jaxvlm does not read is a bad record (see
    ``on_bad_record``), because the field may say what is to be trained."""
    literal_markers: tuple[str, ...] = ()
    """Lists image markers of other formats, such as '<img>' or '<image_1>', that are text in these
    data. A record with an image is a bad record if it has any other marker than ``<image>``."""
    loss_turns: str = "all"
    """Chooses the answers of a conversation that the loss covers: all of them ('all'); the last one
    ('last'), as ``loss_scale=last_round`` or ``mask_history`` do elsewhere; or each of them in a
    record of its own, which ends there ('each'). A chat template that writes an earlier answer
    without its thinking needs 'last' or 'each'. Allowed values: 'all', 'last', 'each'."""
    batch_size: int = 32
    """Sets the number of sequences per step over all devices; with pairs, the number of
    examples."""
    max_length: int = 256
    """Sets the length of a sequence in tokens."""
    max_images_per_sequence: int = 2
    """Limits the images in a sequence, or the tiles where images are cut into tiles."""
    max_patches_per_sequence: int = 0
    """Limits the patches in a sequence of images of any size; the default 0 allows as many as a
    sequence can need."""
    image_pixels_range: tuple[int, int] = (0, 0)
    """Sets the minimum and the maximum number of pixels that an image of any size is resized to; a
    0 takes the limit of the checkpoint's image processor."""
    packing: bool = True
    """Packs several records into one sequence; with False each record is a sequence of its own."""
    share_images: bool = True
    """Encodes an image once for all packed records that begin with it."""
    buckets: int = 4
    """Limits the number of sequence lengths that are compiled where ``packing`` is off; with pairs,
    the number of lengths of queries and that of documents."""
    on_too_long: str = "refuse"
    """Chooses what happens to a record that exceeds ``max_length``, ``max_images_per_sequence`` or
    ``max_patches_per_sequence``: the run is refused, or the record is skipped. Allowed values:
    'refuse', 'skip'."""
    on_bad_record: str = "skip"
    """Chooses what happens to a record that can't be read: the run is refused, or the record is
    skipped. Allowed values: 'refuse', 'skip'."""
    max_skip_fraction: float = 0.01
    """Stops the run if more than this fraction of all records is skipped; a number between 0 and
    1."""
    max_pixels: int = 50_000_000
    """Treats an image of more pixels as a bad record, which protects against decompression
    bombs."""
    resize: str = "auto"
    """Chooses how images are resized: as the checkpoint's image processor does ('auto'), or to the
    model's square by squashing, padding or cropping; without a checkpoint 'auto' squashes. Allowed
    values: 'auto', 'squash', 'pad', 'crop'."""
    flip: bool = False
    """Flips images horizontally at random (augmentation)."""
    max_shift: int = 0
    """Shifts images at random by up to this many pixels in each direction (augmentation)."""
    workers: int = 1
    """Sets the number of threads that read and decode data ahead of the step; at least 1."""
    prefetch: int = 4
    """Sets how many batches are prepared ahead of the step; at least 1."""
    image_cache_mb: int = 512
    """Sets the host memory in MiB in which decoded images are cached."""
    download_dir: str = ""
    """Names the folder of this machine for copies of data at gs://, s3://, http:// and https://
    URLs; the default "" means jaxvlm/sets in $XDG_CACHE_HOME or in ~/.cache."""
    download_gb: float = 0.0
    """Limits the copies of images of a packed set at a URL, in GiB of disk; those that were read
    longest ago are removed. The default 0 keeps all."""
    video: VideoConfig = VideoConfig()
    """Groups the settings of videos."""
    pairs: PairDataConfig = PairDataConfig()
    """Groups the settings of pairs, for embedding models."""

    def __post_init__(self) -> None:
        """Order sources by name, as a ConfigDict has them: batches do not depend on a recipe's."""
        if not isinstance(self.mixture, Mapping):
            raise ConfigError(
                f"config.data.mixture is a group of sources by name, not {self.mixture!r}"
            )
        object.__setattr__(self, "mixture", Options(sorted(self.mixture.items())))
