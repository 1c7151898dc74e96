"""`jaxvlm data check`: list the records that a run would refuse, by reason, before it starts."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxvlm.config import DataConfig
from jaxvlm.data.conversations import mixture_records, packed_set, tokenize
from jaxvlm.data.conversations.content import ModelInputs, select, validate_settings
from jaxvlm.data.conversations.mixture import MixtureOrder
from jaxvlm.data.errors import MIXTURE, DataError, ImageError, Problem, printable
from jaxvlm.data.image_inputs import ImageCache, ImageInputs
from jaxvlm.data.image_placeholders import ImageSpans
from jaxvlm.data.images import image_files
from jaxvlm.data.images.look_alikes import BITS, Look, alike, look_at
from jaxvlm.data.images.patches import Patching
from jaxvlm.data.sources import conversation_formats
from jaxvlm.data.sources.member_names import digest_of, is_video, shown
from jaxvlm.data.tokenizer import chat_tokenizer as tokenizer
from jaxvlm.data.videos import video_files

_MAX_LISTED = 5  # ids listed for each reason
_PERCENTILES = (0, 50, 90, 99, 100)


@dataclasses.dataclass(frozen=True)
class ValidationReport:
    """Report on the contents of a data file."""

    name: str
    """The file or named source."""
    total: int
    """Number of all records, good and bad."""
    good: int
    """Number of records that can be used."""
    images: int
    """Number of distinct image files that were decoded without error."""
    problems: dict[str, list[str]]
    """Reason -> ids of the records refused for it, most frequent reason first."""
    details: dict[str, list[str]]
    """Reason -> what is special about each of these records (a path, a count), or ""."""
    tokens: dict[str, int]
    """Percentiles (p0 ... p100) of the tokens of good records; empty if there are none."""
    images_most: int
    """Maximum number of images of a record."""
    repeats: dict[str, list[str]] = dataclasses.field(default_factory=dict)
    """What repeats an earlier record, though it is good -> ids; a run uses both."""
    without_image: int = 0
    """Number of good records that have no image."""
    image_sizes: dict[str, dict[str, int]] = dataclasses.field(default_factory=dict)
    """``width`` and ``height`` of good records' images, in pixels -> percentiles."""
    images_of_note: dict[str, list[str]] = dataclasses.field(default_factory=dict)
    """What is odd about images that can be used -> the images, with the record that each is in."""
    histograms: dict[str, tuple[list[float], list[int]]] = dataclasses.field(default_factory=dict)
    """Tokens and images of good records, pixels of images -> edges of bins, and counts."""
    of: str = "records"
    """Unit of the counts: ``records``, or examples, of which a record of pairs may give several."""

    @property
    def skip_share(self) -> float:
        """Fraction of records that a run would skip, 0..1."""
        return (self.total - self.good) / max(self.total, 1)

    def to_dict(self) -> dict[str, Any]:
        """The report as JSON-able values."""
        return {**dataclasses.asdict(self), "skip_share": self.skip_share}

    def lines(self) -> list[str]:
        """The report for people."""
        out = [
            f"{self.name}: {self.good} of {self.total} {self.of} are good"
            f" ({self.skip_share:.2%} would be skipped), {self.images} images decoded"
        ]
        if self.tokens:
            spread = ", ".join(f"{name} {value}" for name, value in self.tokens.items())
            sizes = [f"{x['p0']}..{x['p100']}" for x in self.image_sizes.values()]
            out += [f"images of {' x '.join(sizes)} pixels"] if sizes else []
            most = f"images per record: at most {self.images_most}"
            if self.images and self.without_image:
                most += f"; {self.without_image} {self.of} have none"
            out.append(f"tokens per record: {spread}; {most}")
        for reason, ids in (*self.problems.items(), *self.repeats.items()):
            more = ", ..." if len(ids) > _MAX_LISTED else ""
            details = self.details.get(reason, [""] * len(ids))
            pairs = zip(ids[:_MAX_LISTED], details)
            listed = [f"{name} ({detail})" if detail else name for name, detail in pairs]
            out.append(f"{len(ids):>7}  {reason}: {', '.join(listed)}{more}")
        for what, images in self.images_of_note.items():
            more = ", ..." if len(images) > _MAX_LISTED else ""
            out.append(f"{len(images):>7}  {what}: {', '.join(images[:_MAX_LISTED])}{more}")
        return [printable(line) for line in out]


def validate(
    spec: str,
    config: DataConfig,
    *,
    chat_tokenizer: tokenizer.ChatTokenizer | None = None,
    prepare: image_files.Preparation,
    num_patches: ImageSpans = 16,
    patching: Patching | None = None,
    look_alikes: int = -1,
    given: tuple[Sequence[conversation_formats.Record], list[Problem]] | None = None,
) -> ValidationReport:
    """Validate a data file completely, decoding every image.

    Args:
        spec: file or named source, see :func:`jaxvlm.data.sources.conversation_formats.read`.
        config: data settings: limits on length and images.
        chat_tokenizer: ``None`` builds a word tokenizer from the file.
        prepare: preprocessing of images.
        num_patches: token span of an image.
        patching: how images of any size are cut into patches; ``None`` if all have the same size.
        look_alikes: bits in which the perceptual hashes of images that look alike may differ, from
            0 to 16; below 0 looks for none.
        given: what was read of the file before: records and problems.

    Raises:
        DataError: the file as a whole can't be used.
    """
    settings = ModelInputs(0, prepare, num_patches, patching=patching)
    validate_settings(config, settings)
    read, problems = given or conversation_formats.read(spec, config)
    records = tokenize.split_turns(read, config.loss_turns)
    total = len(records) + len(problems)
    chat_tokenizer = chat_tokenizer or tokenizer.build(tokenize.texts(records))
    corpus, pieces, bad, too_long = select(records, config, chat_tokenizer, settings)
    problems = [*problems, *bad, *too_long]
    used = np.sort(pieces.record[pieces.record >= 0]).tolist()
    cache = ImageCache(prepare, config.max_pixels, cache_mb=0)
    broken = broken_images(
        ImageInputs(corpus.paths, corpus.spans, cache, patching),
        sorted({image for i in used for image in corpus.images[i]}),
    )
    good = []
    for i in used:
        if failed := [p for p in corpus.images[i] if broken.get(p)]:
            identifier = records[int(corpus.source[i])].id
            problems.append(Problem(identifier, broken[failed[0]], shown(corpus.paths[failed[0]])))
        else:
            good.append(i)
    counts = [len(corpus.images[i]) for i in good]
    report = ValidationReport(
        name=spec,
        total=total,
        good=len(good),
        images=sum(not reason for reason in broken.values()),
        problems=by_reason(problems),
        details=by_reason(problems, "detail"),
        tokens=percentiles(corpus.length[good]),
        images_most=max(counts, default=0),
        repeats=_repeats(read),
        without_image=counts.count(0),
        histograms={
            "tokens per record": _histogram(corpus.length[good]),
            "images per record": _histogram(np.asarray(counts)),
        },
    )
    owner: dict[str, str] = {}  # image -> the first record that it is in
    for i in good:
        for image in corpus.images[i]:
            owner.setdefault(corpus.paths[image], records[int(corpus.source[i])].id)
    return _with_images(report, owner, config.max_pixels, look_alikes)


def _with_images(
    report: ValidationReport, owner: Mapping[str, str], max_pixels: int, distance: int
) -> ValidationReport:
    """A report with what its images are like, which are those of ``owner``: image -> record."""
    if not owner:
        return report
    sizes = np.asarray([_size(path, max_pixels) for path in owner])
    notes = {}
    if distance >= 0:
        images = {path: name for path, name in owner.items() if not is_video(path)}
        names = [f"{name} ({shown(path)})" for path, name in images.items()]
        notes = _of_note(look_at(list(images), max_pixels), names, distance) if images else {}
    width, height = sizes.T
    return dataclasses.replace(
        report,
        image_sizes={"width": percentiles(width), "height": percentiles(height)},
        images_of_note=notes,
        histograms=report.histograms | {"pixels per image": _histogram(width * height)},
    )


def _size(path: str, max_pixels: int) -> tuple[int, int]:
    """Width and height of an image, or of a video's frames."""
    if is_video(path):
        clip = video_files.read_clip(path, max_pixels)
        return clip.width, clip.height
    return image_files.upright_size(path)


def _of_note(look: Look, shown_images: Sequence[str], distance: int) -> dict[str, list[str]]:
    """``ValidationReport.images_of_note``."""
    found: dict[str, list[str]] = {}
    if plain := np.flatnonzero(look.one_colour).tolist():
        found["an image of one colour"] = [shown_images[i] for i in plain]
    others = np.flatnonzero(~look.one_colour)  # the hash of nothing says nothing
    if pairs := alike(look.hash[others], distance):
        found[f"an image that looks like an earlier one, to {distance} of {BITS} bits"] = [
            f"{shown_images[others[x.image]]} like {shown_images[others[x.first]]}, {x.distance}"
            for x in pairs
        ]
    return found


def _histogram(values: np.ndarray) -> tuple[list[float], list[int]]:
    counts, edges = np.histogram(values, bins=min(40, len(np.unique(values)) or 1))
    return edges.tolist(), counts.tolist()


def validate_mixture(
    config: DataConfig, seed: int, read: Any, of_model: Mapping[str, Any], **how: Any
) -> tuple[list[ValidationReport], list[str], bool]:
    """Validate each source of ``config.mixture``, and say what an epoch reads of it.

    Args:
        config: data settings.
        seed: of the run.
        read: result of :func:`mixture_records.read`.
        of_model: ``image_size`` and ``visual_mask`` of the run's model.
        how: arguments of :func:`validate`; a tokenizer is one.

    Returns:
        A report for each source that is not packed; lines about their shares, or why no run can mix
        them; and whether one can.

    Raises:
        DataError: a source as a whole can't be used.
    """
    reports, lines, pieces = [], [], []
    given = {name: how[name] for name in ("prepare", "num_patches", "patching")}
    inputs = ModelInputs(seed=seed, **given, **of_model)
    for name, source in config.mixture.items():
        settings = mixture_records.of_source(config, source)
        if name not in read:
            settings = mixture_records.packed_source(config, source)
            try:
                packed = packed_set.open_set(source.train, settings, how["chat_tokenizer"], inputs)
            except DataError as error:
                raise DataError(f"{MIXTURE}.{name}: {error}") from None
            lines.append(
                f"{name}: {source.train}: {len(packed.records):,} records, packed; "
                f"`jaxvlm data verify {source.train}` reads it"
            )
            pieces.append((packed.pieces, packed.sequences, packed.tokens))
            continue
        report = validate(source.train, settings, **how, given=read[name])
        reports.append(dataclasses.replace(report, name=f"{name}: {source.train}"))
        records = tokenize.split_turns(read[name][0], config.loss_turns)
        chosen = select(records, settings, how["chat_tokenizer"], inputs)
        pieces.append((chosen.pieces, None, int(chosen.pieces.num_tokens.sum())))
    try:
        order = MixtureOrder(pieces, config, seed)
    except DataError as error:
        return reports, [*lines, str(error)], False
    return reports, [*lines, *order.lines(order.steps_per_epoch)], True


def _repeats(records: Sequence[conversation_formats.Record]) -> dict[str, list[str]]:
    """``ValidationReport.repeats`` of a file's records."""
    found: dict[str, list[str]] = collections.defaultdict(list)
    for what, part_of in (
        ("has the id of an earlier record; both are used", lambda r: r.id),
        ("equals an earlier record; both are used", lambda r: (r.turns, r.images)),
    ):
        seen: set[bytes] = set()
        for record in records:
            part = digest_of(repr(part_of(record)).encode())
            if part in seen:
                found[what].append(record.id)
            seen.add(part)
    return dict(found)


def broken_images(inputs: ImageInputs, images: Sequence[int]) -> dict[int, str]:
    """Decode images as a run does.

    Args:
        inputs: the images of a data set.
        images: indices of those to decode.

    Returns:
        Each image -> the reason why a run can't use it; "" where it can.
    """
    reasons = {}
    for image in images:
        try:
            inputs.get(image)
            reasons[image] = ""
        except ImageError as error:
            reasons[image] = str(error)
    return reasons


def by_reason(problems: Sequence[Problem], field: str = "id") -> dict[str, list[str]]:
    """Group record ids, or details, by the reason of refusal, most frequent reason first."""
    ids: dict[str, list[str]] = collections.defaultdict(list)
    for problem in problems:
        ids[problem.reason].append(getattr(problem, field))
    return dict(sorted(ids.items(), key=lambda item: -len(item[1])))


def percentiles(lengths: np.ndarray) -> dict[str, int]:
    """Percentiles p0 ... p100 of some lengths; empty if there are none."""
    if not len(lengths):
        return {}
    return {f"p{p}": int(np.percentile(lengths, p)) for p in _PERCENTILES}
