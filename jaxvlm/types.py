"""Types that every part of jaxvlm shares: axis legend, batches, train state, Loss and Runner.

Legend of tensor dims. A letter means the same thing in every file, unless a docstring says so:

    B  packed sequences in a batch     b  examples in a batch of pairs
    T  query (text) tokens             S  key tokens
    P  patches of an image             I  images of a packed sequence
    D  model width                     F  MLP width
    N  query heads                     K  key/value heads
    G  query heads per kv head, N / K  H  head dim
    V  vocabulary                      L  layers
    E  experts                         C  slots of the visual-token cache
    R  rows of positions: 1, or 3 for M-RoPE (time, height, width)

Two kinds of axes, and the words for them:

* A *logical axis* says what a dim of a tensor means: ``batch seq embed heads kv_heads head_dim
  mlp vocab layers experts``. Models annotate parameters and activations with these words only.
* A *mesh axis* says how devices are arranged: ``data pipeline fsdp expert context tensor``.

``jaxvlm.parallel.rules`` maps logical axes to mesh axes. In prose, *axis* is an axis of the mesh
and *dim* is a dim of a tensor.

How the types meet in a train step: the data pipeline yields a :class:`Batch` (or :class:`Pairs`);
a :class:`Cache` decides which images the vision encoder has to run on and yields a :class:`Read`;
a :class:`Runner` computes an :class:`Out` from it; a :class:`Loss` turns that into :class:`Sums`;
and the step returns the next :class:`TrainState`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np

Array = jax.Array | np.ndarray
PAGE = 64
"""Tokens per page of the visual-token cache."""
KEY_IMPL = "threefry2x32"
"""Implementation of random keys and of draws from them, whatever JAX's own default is."""
Params = dict[str, Any]
"""Flat parameters: ``"decoder/blocks/attn/wq" -> array``. The path is the parameter's only name."""


def is_vision_path(path: str) -> bool:
    """Whether a parameter belongs to the vision encoder."""
    return path.startswith("vision/")


def trains_vision(paths: Iterable[str]) -> bool:
    """Whether the vision encoder is trained, where ``paths`` are the trainable parameters."""
    return any(map(is_vision_path, paths))


Logical = tuple[str, ...]
"""Logical axes of a parameter or an activation, one word per dim."""


class Age(NamedTuple):
    """How stale cached visual tokens are, and how fast they drift. Each field is [B, I]."""

    version: Any
    """i32: version of the vision encoder that computed them."""
    refresh_at: Any
    """i32: version from which on they are stale and are recomputed, where ``drift`` was
    measured."""
    drift: Any
    """f32: relative change per update at learning rate 1; 0 if it was never measured."""
    grad_norm: Any
    """f32: norm of the loss's gradient with respect to them, when a step last used them."""


class Batch(NamedTuple):
    """One global batch of packed sequences. Shapes are static; ``None`` marks an unused field.

    A *segment* is a piece of one conversation. A token attends to its own segment and to its
    parent's, so that many questions (children) share one image (their parent) in one sequence.
    """

    tokens: Any
    """i32[B, T]: token ids; positions of visual tokens hold the image token's id."""
    loss_weight: Any
    """f32[B, T]: weight of *predicting this token* from the ones before it; 0 on prompts."""
    positions: Any
    """i32[B, R, T]: rotary positions; R = 1, or 3 (time, height, width) for M-RoPE."""
    segment: Any
    """i32[B, T]: segment id within the sequence, from 1; 0 is padding."""
    parent: Any = None
    """i32[B, T]: id of another segment that this token may attend to; 0 is none."""
    bidirectional: Any = None
    """i32[B, T]: tokens with the same id > 0 attend to each other both ways; 0 is causal."""
    pixels: Any = None
    """u8[B, I, H, W, 3]: images of one fixed size, in the order of their sequence; unused slots
    are zero."""
    patches: Any = None
    """u8 or f32[B, P, patch_dim]: packed patches of images of any size (instead of ``pixels``),
    with pixel values in 0..255; padding is zero."""
    grid: Any = None
    """i32[B, I, 3]: (t, h, w) patch grid of each packed image; zeros in unused slots."""
    image_start: Any = None
    """i32[B, I]: index in the sequence of an image's first token; -1 in unused slots."""
    image_source: Any = None
    """i32[B, T, K]: the features whose weighted sum is this token, as indices slot * P + feature
    over the tiles of its sequence; -1 is none (text), NEWLINE the learned end of a row of patches.
    ``None``: the features of a tile are consecutive tokens from its ``image_start``."""
    image_weight: Any = None
    """f32[B, T, K]: weight of each of these features; ``None``: K is 1 and each weight is 1."""
    image_key: Any = None
    """u32[B, I, 4]: hash of image bytes and preprocessing; the visual-token cache's key."""
    image_pages: Any = None
    """i32[B, I, n]: pages of the visual-token cache allocated to the image's tokens; -1 is none."""
    in_pages: Any = None
    """bool[B, I]: images known to be cached in their pages, so that they come without pixels."""
    stored: Any = None
    """Like ``features``: tokens of some of the images, computed before and read from a store;
    zeros for the other images."""
    is_stored: Any = None
    """bool[B, I]: images whose tokens are in ``stored``. They come without pixels, unless there
    is a ``stored_age``."""
    stored_age: Any = None
    """Age of the ``stored`` tokens of a vision encoder that is trained; ``None``: they are what
    the encoder would compute now."""
    features: Any = None
    """[B, I, P, D], or [B, P, D] for packed patches: the vision encoder's output, given instead of
    images; followed in D by the patches' texture where ``relevance`` reads it."""
    text_features: Any = None
    """[B, D]: a text encoder's output, given instead of its tokens."""
    example_id: Any = None
    """i32[B]: global index of the sequence in the run."""
    dropout_keys: Any = None
    """u32[B, 2]: a random key per sequence, a function of the run's seed, the step and the
    sequence's index in the global batch; set inside of the step. ``None``: no dropout."""


class Pairs(NamedTuple):
    """One global batch of queries and documents, to train an embedding model on.

    An *example* is a query, its positive and its hard negatives. Every field has a leading dim b of
    examples, which a mesh shards and a microbatch takes a slice of. A query and a document are a
    text, an image, or both: one unpacked sequence of a :class:`Batch`.
    """

    query: Batch
    """Leaves [b, ...]: one sequence per example."""
    document: Batch
    """Leaves [b, K, ...]: an example's positive, then its hard negatives."""
    valid: Any
    """bool[b, K]: False where a document is padding, because its example has fewer negatives than
    others. All False for an example whose query or positive could not be read."""
    query_key: Any
    """i32[b]: id of a query's content (text and image). Queries and documents with the same
    content have the same id."""
    document_key: Any
    """i32[b, K]: id of a document's content; -1 for padding. A document that is a query's positive
    in another example, or the query itself, is no negative of that query."""
    group: Any = None
    """i32[b]: labels; examples of one group are positives of each other, -1 is in none."""
    teacher: Any = None
    """f32[b, K]: a teacher's score of each document, or a similarity (0..1 or -1..1)."""
    example_id: Any = None
    """i32[b]: global index of the example in the run."""


class Embeddings(NamedTuple):
    """An embedding model's output for :class:`Pairs`; the input of a loss. E is its width."""

    query: Any
    """f32[b, E]; for late interaction f32[b, T, E], one embedding per token."""
    document: Any
    """f32[b, K, E], or f32[b, K, T, E]."""
    query_mask: Any = None
    """bool[b, T]: tokens that have an embedding; ``None``: one embedding per query."""
    document_mask: Any = None
    """bool[b, K, T]: tokens that have an embedding; ``None``: one embedding per document."""
    scale: Any = None
    """f32[]: learned log of the factor that cosines are multiplied by; ``None``: the loss has its
    own."""
    bias: Any = None
    """f32[]: learned, added to the logits."""


class ChatStyle(NamedTuple):
    """How a model family writes images in a conversation."""

    written: str = ""
    """Text that its chat template writes for an image; "" is the image token."""
    seen: str = ""
    """Text that the model reads instead; it holds the image token once."""
    template: str = ""
    """Default chat template, for checkpoint folders that have none."""
    video: str = ""
    """Text that it writes for a video; "": a video is its frames, written as one image."""
    marks: str = ""
    """Regular expression of further tokens in an image's span, which no text may contain."""


TileGrid = Callable[[int, int], tuple[int, int]]
"""(width, height) of an image -> (rows, columns) of the tiles that its image processor cuts from
it in addition to the downscaled image; (0, 0) where it cuts none. For a model of packed patches:
(rows, columns) of visual tokens."""
NEWLINE = -2
"""Index of the connector's learned newline token in :class:`Sources` and ``Batch.image_source``."""


class Sources(NamedTuple):
    """Which features each token of a span holds, where these are not simply consecutive."""

    feature: np.ndarray
    """i32[n, K]: indices of features, counted over the image's tiles; -1 is none (text)."""
    weight: np.ndarray | None
    """f32[n, K]: weight of each feature in a token's sum; ``None``: K is 1 and each weight is 1."""
    tiles: int
    """Tiles of the image, including those of which no feature is used."""
    per_tile: int
    """P: features per tile."""


class TextStyle(NamedTuple):
    """How a text becomes a sequence of a text encoder."""

    max_length: int
    """Maximum tokens per sequence, special tokens included; longer texts are truncated."""
    see_padding: bool = False
    """Pad sequences to ``max_length`` and attend to padding as to any token."""
    clean: Callable[[str], str] = str
    """Text normalization, applied before tokenization."""


class Span(NamedTuple):
    """The tokens of an image in a sequence, which replace the chat template's one image token.

    An image may be cut into tiles, each encoded on its own. A tile's features are consecutive
    tokens, with text between the tiles where the family has it.
    """

    ids: np.ndarray
    """i32[n]: token ids."""
    tile: np.ndarray
    """i32[n]: number, from 1 without a gap and in this order, of the tile whose feature this token
    holds; 0 is text. With ``sources``, 1 for every token that is not text."""
    positions: np.ndarray
    """i32[R, n]: rotary positions, relative to the image's start."""
    advance: int
    """How far the position of the token after the image is from the image's start."""
    sources: Sources | None = None
    """Features of each token; ``None``: a tile's features are consecutive tokens."""
    lead: str = ""
    """Text that the model reads right before what stands for the image in the conversation."""
    trail: str = ""
    """Text right after it."""
    is_video: bool = False

    @property
    def starts(self) -> np.ndarray:
        """i32[tiles]: index of each tile's first visual token; with ``sources``, the image's."""
        if self.sources is not None:
            return np.full(self.sources.tiles, np.argmax(self.tile > 0), np.int32)
        highest = np.maximum.accumulate(self.tile)  # tiles come in the order of their numbers
        count = int(highest[-1]) if len(highest) else 0
        return np.searchsorted(highest, np.arange(1, count + 1)).astype(np.int32)

    @classmethod
    def of(
        cls, image_id: int, count: int, before: Sequence[int] = (), after: Sequence[int] = ()
    ) -> Span:
        """Span of one tile of ``count`` features with fixed tokens before and after it.

        Args:
            image_id: token id at the positions of features.
            count: features of the tile.
            before, after: token ids around the features.
        """
        return cls.of_tiles([*before, image_id, *after], image_id, count)

    @classmethod
    def of_tiles(cls, ids: Sequence[int], image_id: int, count: int) -> Span:
        """Span of tiles of ``count`` features each, with text between them; R = 1.

        Args:
            ids: token ids; each ``image_id`` stands for a whole tile.
            image_id, count: as of :meth:`of`.
        """
        compact = np.asarray(ids, np.int32)
        is_tile = compact == image_id
        repeats = np.where(is_tile, count, 1)
        tile = np.where(is_tile, np.cumsum(is_tile), 0).astype(np.int32)
        length = int(repeats.sum())
        positions = np.arange(length, dtype=np.int32)[None]
        return cls(np.repeat(compact, repeats), np.repeat(tile, repeats), positions, length)


class Out(NamedTuple):
    """Output of a model's forward pass; all that a loss reads, so that losses import no model."""

    hidden: Any
    """[B, T, D]: final hidden states, after the last norm; for a dual encoder [B, M, E]: the
    embeddings of each sequence's image and then of its text."""
    head: Any = None
    """[D, V]: output projection, so that the loss can compute logits in chunks; ``None``: the
    model has none."""
    scale: Any = None
    """[]: learned log-temperature of a contrastive model."""
    bias: Any = None
    """[]: learned bias of a contrastive model."""
    aux: Any = None
    """Inputs of auxiliary loss terms: ``router_load`` and ``router_probability``, f32[L, E]; see
    ``jaxvlm.nn.moe.Routed``."""
    logit_cap: Any = None
    """f32[]: logits become ``cap * tanh(logits / cap)``; ``None``: logits are not capped."""

    def logits(self, hidden: Any, product: Callable[..., Any] = jnp.matmul) -> jax.Array:
        """Compute the logits f32[..., V] of hidden states [..., D]; ``product`` is like matmul.

        Raises:
            ValueError: the model has no output projection.
        """
        if self.head is None:
            raise ValueError("this model has no output matrix (config.model.decoder.head=False)")
        head = self.head.astype(hidden.dtype)
        logits = product(hidden, head, preferred_element_type=jnp.float32)
        cap = self.logit_cap
        return logits if cap is None else cap * jnp.tanh(logits / cap)


class Sums(NamedTuple):
    """Sums that add over microbatches and devices; no field is a mean."""

    terms: dict[str, Any]
    """Loss term -> f32[] sum S_k; the loss is sum_k coefficient_k * S_k / W_k."""
    metrics: dict[str, tuple[Any, Any]]
    """Metric -> (f32[] sum, f32[] weight); the metric is their quotient."""


@runtime_checkable
class Loss(Protocol):
    """A loss as sums and weights, so that any split of the batch gives the same gradient.

    It reads a :class:`Batch` and the model's :class:`Out`; or, to train embeddings, :class:`Pairs`
    and :class:`Embeddings`.
    """

    @property
    def additive(self) -> bool:
        """True if the loss is a sum over examples; gradient accumulation refuses others."""
        ...

    def weights(self, batch: Any) -> dict[str, Any]:
        """Return the denominators W_k, f32[], of the *global* batch; they read no parameter."""
        ...

    def coefficients(self) -> Mapping[str, float]:
        """Return the coefficient of each term."""
        ...

    def __call__(self, out: Any, batch: Any) -> Sums:
        """Return the sums S_k and the metrics over the examples in ``batch``."""
        ...


@runtime_checkable
class Runner(Protocol):
    """Executes a model: on one mesh, as a pipeline, or on two meshes.

    Gradient accumulation and GradCache use nothing but these three methods.
    """

    def fwd(self, params: Params, frozen: Params, batch: Batch) -> Out:
        """Run the forward pass."""
        ...

    def vjp(self, params: Params, frozen: Params, batch: Batch, d_out: Out) -> Params:
        """Return the gradients of ``params`` for a cotangent of :meth:`fwd`'s output."""
        ...

    def loss_grad(
        self, params: Params, frozen: Params, batch: Any, loss: Loss, scale: Mapping[str, Any]
    ) -> tuple[Sums, Params]:
        """Return the sums over a Batch or Pairs, and the gradient of ``sum_k scale_k * S_k``."""
        ...


class Read(NamedTuple):
    """Result of ``Cache.read``: what a step runs instead of its own parameters and batch."""

    params: Params
    """Trainable parameters, or the arrays through which their gradients are reached."""
    frozen: Params
    """Frozen parameters."""
    batch: Any
    """Batch or Pairs."""
    back: Callable[[Params], Params]
    """Maps gradients of ``params`` to gradients of the parameters passed to ``Cache.read``."""
    seen: Any = ()
    """Lookup results that ``Cache.write`` needs."""
    metrics: Mapping[str, Any] = {}
    """Metric -> a scalar of the step."""


class Cache(NamedTuple):
    """The visual-token cache of a train step, as pure functions in optax's manner.

    The default values are a cache that is off: empty state, every image encoded in the step.
    """

    init: Callable[..., Any] = lambda halved=0: ()
    """(halved=0) -> the empty state, its capacity halved that many times; runs under ``jit``."""
    shardings: Any = ()
    """Sharding of each leaf of the state."""
    read: Callable[[Any, Params, Params, Any], Read] = lambda state, params, frozen, batch: Read(
        params, frozen, batch, lambda grads: grads
    )
    """(state, trainable, frozen, batch) -> what the step runs."""
    write: Callable[[Any, Read, Params, Any], tuple[Any, Mapping[str, Any]]] = (
        lambda state, read, grads, ok: (state, {})
    )
    """(state, result of ``read``, gradients of ``Read.params``, bool[]: the update is finite) ->
    the next state, and scalars of the step; with ``outputs_tokens``, also the computed tokens under
    one name."""
    outputs_tokens: bool = False
    """Whether the step returns the tokens that it computed, in the order of the batch."""
    in_checkpoint: bool = False
    """Whether the state belongs in checkpoints: without it a resumed run would not have the same
    bits as an uninterrupted one."""


@runtime_checkable
class WeightMap(Protocol):
    """Maps a checkpoint's tensors to parameters, and parameters to tensors."""

    @property
    def copies(self) -> Mapping[str, str]:
        """Tensor -> the tensor that it must be equal to, in checkpoints that hold both."""
        ...

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Return the name and shape of every tensor."""
        ...

    def fitting(self, found: Mapping[str, tuple[int, ...]]) -> WeightMap:
        """Return the map in the layout of the tensors ``found``, if there are several."""
        ...

    def check(self, found: Mapping[str, tuple[int, ...]], where: str) -> dict[str, str]:
        """Compare with the tensors ``found`` in a checkpoint; refuse missing or extra ones.

        Returns:
            Tensor -> its name in the checkpoint.
        """
        ...

    def read(
        self,
        path: str,
        index: tuple[slice, ...],
        get: Callable[[str, tuple[slice, ...]], np.ndarray],
        out: np.ndarray,
    ) -> None:
        """Fill ``out`` with the slice ``index`` of the parameter ``path``, reading with ``get``."""
        ...

    def write(self, name: str, get: Callable[[str, tuple[int, ...]], np.ndarray]) -> np.ndarray:
        """Build the tensor ``name``; ``get`` reads a parameter at an index of its layer stack."""
        ...


class Guard(NamedTuple):
    """Counts of skipped (non-finite) updates."""

    skipped: Any
    """i32[]: updates skipped in total."""
    in_a_row: Any
    """i32[]: updates skipped since the last finite one."""


class TrainState(NamedTuple):
    """Everything that a train step changes, and the frozen weights that it reads.

    With islands, these are what all islands share, and what each has of its own is ``islands``.
    """

    step: Any
    """i32[]: steps taken, skipped updates included."""
    params: Params
    """Trainable parameters; with islands those of the last outer update, which each began with."""
    frozen: Params
    """Frozen parameters: no gradient, no optimizer state, no weight decay."""
    opt_state: Any
    """optax state over ``params``; with islands the outer optimizer's."""
    cache: Any
    """State of the visual-token cache; ``()`` when it is off."""
    comm: Any
    """Error feedback of quantized collectives; ``()`` when they are off. With islands, that of
    outer updates."""
    guard: Guard
    """Skipped updates; with islands skipped outer updates."""
    islands: Any = ()
    """``jaxvlm.train.islands.Islands``; ``()`` without islands."""
