"""The words every part of jaxvlm shares: the axis legend, the batch, and the protocols.

Legend (one letter, one meaning, everywhere):

    B batch rows        T query/text tokens    S key tokens        P image patches
    I images in a row   D model width          F MLP width         N query heads
    K kv heads          G = N / K              H head dim          V vocabulary
    L layers            E experts              C cache slots       R position rows (1 or 3)

Logical axes are words (``batch seq embed heads kv_heads head_dim mlp vocab layers experts``):
they say what a dim *means*. Mesh axes (``data fsdp stage context tensor expert``) say where
devices lie. ``jaxvlm.parallel.rules`` maps one to the other. We say *axis* for the mesh and
*dim* for a tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np

Array = jax.Array | np.ndarray
PAGE = 64
"""Tokens of a page of the visual-token cache."""
KEYS = "threefry2x32"
"""How random keys and what is drawn of them are made, whatever JAX's own default is."""
Params = dict[str, Any]
"""Flat parameters: ``"decoder/blocks/attn/wq" -> array``. The path is the parameter's only name."""

Logical = tuple[str, ...]
"""The meaning of each dim of a parameter or an activation, one word a dim."""


class Age(NamedTuple):
    """What is known of visual tokens that may be too old. Of each picture, [B, I]."""

    version: Any
    """i32: the tower's when they were made."""
    due: Any
    """i32: the version from which on they are to be made anew; where ``drift`` was measured."""
    drift: Any
    """f32: relative change with an update at learning rate 1; 0: it was never measured."""
    pull: Any
    """f32: norm of the loss's gradient at them, when last shown."""


class Batch(NamedTuple):
    """One global batch of packed rows. Static shapes; ``None`` means the field is not in use.

    A *segment* is a piece of one conversation. A token attends to its own segment and to its
    parent's, so many questions (children) can share one picture (their parent) in one row.
    """

    tokens: Any
    """i32[B, T]: token ids; picture places hold the image token's id."""
    loss_weight: Any
    """f32[B, T]: weight of *predicting this token* from the ones before it; 0 on prompts."""
    positions: Any
    """i32[B, R, T]: rotary positions; R = 1, or 3 (time, height, width) for M-RoPE."""
    segment: Any
    """i32[B, T]: segment id within the row, from 1; 0 is padding."""
    parent: Any = None
    """i32[B, T]: segment id that this token may also attend to; 0 is none."""
    bidirectional: Any = None
    """i32[B, T]: tokens with the same id > 0 see each other both ways; 0 is causal."""
    pixels: Any = None
    """u8[B, I, H, W, 3]: pictures of one fixed size, row by row; unused places are zero."""
    patches: Any = None
    """u8 or f32[B, P, patch_dim]: packed patches of pictures of any size (instead of ``pixels``),
    values of pixels in 0..255; those of padding are zero."""
    grid: Any = None
    """i32[B, I, 3]: (t, h, w) patch grid of each packed picture; zeros where unused."""
    image_start: Any = None
    """i32[B, I]: index in the row of a picture's first token; -1 where there is no picture."""
    image_source: Any = None
    """i32[B, T, K]: the features that a token is the sum of, counted through the tiles of its row
    (place * P + feature); -1 is none (text), NEWLINE the learned end of a row of patches. ``None``:
    a tile's features follow each other from its ``image_start``."""
    image_weight: Any = None
    """f32[B, T, K]: the share of each; ``None`` where K is 1 and each is whole."""
    image_key: Any = None
    """u32[B, I, 4]: hash of picture bytes and preprocessing; the visual-token cache's key."""
    image_pages: Any = None
    """i32[B, I, n]: pages of the visual-token cache for the picture's tokens; -1 is none."""
    in_pages: Any = None
    """bool[B, I]: whose pages are known to hold its tokens, so that it came without pixels."""
    stored: Any = None
    """As ``features``: of some of the pictures, as they were made before; zeros of the others."""
    is_stored: Any = None
    """bool[B, I]: which; of these there are no pixels, unless they have an age."""
    stored_age: Any = None
    """Age of what is ``stored``, of a tower that learns; ``None``: it is as good as made now."""
    features: Any = None
    """[B, I, P, D], or [B, P, D] of packed patches: what the vision tower made of the pictures,
    given instead of them; with their texture behind it where relevance reads that."""
    text_features: Any = None
    """[B, D]: what a text encoder made of the tokens, given instead of them."""
    example_id: Any = None
    """i32[B]: global index of the row in the run."""
    noise: Any = None
    """u32[B, 2]: a key of the row, of the run's seed, the step and the row's place in the global
    batch; made inside of the step where something is dropped out; ``None``: nothing is."""


class Pairs(NamedTuple):
    """One global batch of queries and of documents, to train an embedding model on.

    An *example* is a query, its positive and its hard negatives. Everything has a leading dim b of
    examples, which is what a mesh splits and a microbatch takes a part of. A query and a document
    are a text, a picture, or both: a row of a :class:`Batch`, nothing packed with it.
    """

    query: Batch
    """Leaves [b, ...]: a row each."""
    document: Batch
    """Leaves [b, K, ...]: an example's positive, then its hard negatives."""
    there: Any
    """bool[b, K]: False where an example has fewer negatives than others; the row is padding. An
    example whose query or positive could not be read is no example: it has none at all."""
    query_key: Any
    """i32[b]: queries of one content (text and picture) have one key, and a document of that
    content has it too."""
    document_key: Any
    """i32[b, K]: likewise, -1 where none is there. A document that is a query's positive under
    another example is no negative of it."""
    group: Any = None
    """i32[b]: labels; examples of one group are positives of each other, -1 is in none."""
    teacher: Any = None
    """f32[b, K]: a teacher's score of each document, or how like they are (0..1 or -1..1)."""
    example_id: Any = None
    """i32[b]: global index of the example in the run."""


class Vectors(NamedTuple):
    """What an embedding model makes of :class:`Pairs`, handed to a loss."""

    query: Any
    """f32[b, E]; of late interaction f32[b, T, E], a vector a token."""
    document: Any
    """f32[b, K, E], or f32[b, K, T, E]."""
    query_seen: Any = None
    """bool[b, T]: which tokens have a vector; ``None``: a row has one vector."""
    document_seen: Any = None
    """bool[b, K, T]."""
    scale: Any = None
    """f32[]: learned log of what cosines are multiplied by; ``None``: the loss has its own."""
    bias: Any = None
    """f32[]: learned, added to the logits."""


class ChatStyle(NamedTuple):
    """How a family writes pictures in a conversation."""

    written: str = ""
    """What its chat template writes for a picture; "" is the picture's token."""
    seen: str = ""
    """What the model sees in its place; holds the picture's token once."""
    template: str = ""
    """Chat template for folders that have none."""


TileGrid = Callable[[int, int], tuple[int, int]]
"""(width, height) of a picture -> (rows, columns) of tiles that its image processor cuts from it
beside the whole view; (0, 0) where it cuts none. Where patches are packed: of visual tokens."""
NEWLINE = -2
"""In :class:`Sources` and ``Batch.image_source``: the connector's learned token."""


class Sources(NamedTuple):
    """Which features the tokens of a span hold, where these don't just follow each other."""

    feature: np.ndarray
    """i32[n, K]: features counted through the picture's tiles; -1 is none (text)."""
    weight: np.ndarray | None
    """f32[n, K]: the share of each in a token; ``None``: K is 1 and it is the whole."""
    tiles: int
    """Of the picture, those too of which no feature is taken."""
    per_tile: int
    """P: features of a tile."""


class TextStyle(NamedTuple):
    """How a text becomes a row of a text encoder."""

    max_length: int
    """Tokens of a row at most, special ones counted; a longer text is cut."""
    see_padding: bool = False
    """Rows are filled up to ``max_length``, and padding is like any token."""
    clean: Callable[[str], str] = str
    """Applied to a text before it is tokenized."""


class Span(NamedTuple):
    """What a picture is in a row: the tokens that the chat template's one picture token becomes.

    A picture may be cut in tiles, each encoded by itself: a tile's features lie one after
    another, with text between the tiles where the family wants it.
    """

    ids: np.ndarray
    """i32[n]."""
    tile: np.ndarray
    """i32[n]: from 1, the tile whose feature this token holds; 0 is none, it is text. With
    ``sources``, 1 wherever there is no text."""
    positions: np.ndarray
    """i32[R, n]: rotary positions, counted from where the picture stands."""
    advance: int
    """How far positions have gone on behind the picture."""
    sources: Sources | None = None
    """``None``: a tile's features follow each other."""
    lead: str = ""
    """Text that the model sees before what stands for a picture in the conversation."""

    @property
    def starts(self) -> np.ndarray:
        """i32[tiles]: index of each tile's first feature; with ``sources``, of the picture's."""
        if self.sources is not None:
            return np.full(self.sources.tiles, np.argmax(self.tile > 0), np.int32)
        where = np.flatnonzero(self.tile)
        _, first = np.unique(self.tile[where], return_index=True)
        return where[first].astype(np.int32)

    @classmethod
    def of(
        cls, image_id: int, count: int, before: Sequence[int] = (), after: Sequence[int] = ()
    ) -> Span:
        """One tile of ``count`` features with fixed tokens around it.

        Args:
            image_id: what stands where a feature goes.
            count: features.
            before: ids before them.
            after: ids behind them.
        """
        return cls.of_tiles([*before, image_id, *after], image_id, count)

    @classmethod
    def of_tiles(cls, ids: Sequence[int], image_id: int, count: int) -> Span:
        """Tiles of ``count`` features each with text among them, one position a token.

        Args:
            ids: of the text; each ``image_id`` in it is a tile.
            image_id: what stands where a feature goes.
            count: features of a tile.
        """
        short = np.asarray(ids, np.int32)
        here = short == image_id
        repeats = np.where(here, count, 1)
        tile = np.where(here, np.cumsum(here), 0).astype(np.int32)
        length = int(repeats.sum())
        positions = np.arange(length, dtype=np.int32)[None]
        return cls(np.repeat(short, repeats), np.repeat(tile, repeats), positions, length)


class Out(NamedTuple):
    """What a model's forward pass hands to a loss; the loss needs no model import."""

    hidden: Any
    """[B, T, D]: final hidden states, after the last norm; [B, M, E] of a dual encoder: each
    row's vectors, its picture's and then its text's."""
    head: Any = None
    """[D, V]: output matrix, so that the loss can chunk the logits; ``None``: there is none."""
    scale: Any = None
    """[]: learned log-temperature of a contrastive model."""
    bias: Any = None
    """[]: learned bias of a contrastive model."""
    aux: Any = None
    """dict of extra terms. ``router_load`` and ``router_probability``, f32[L, E]: see
    ``jaxvlm.nn.moe.Routed``."""
    logit_cap: Any = None
    """f32[]: logits become ``cap * tanh(logits / cap)``; ``None`` leaves them as they are."""

    def logits(self, hidden: Any) -> jax.Array:
        """f32[..., V]: the logits of some of ``hidden``'s states [..., D]."""
        if self.head is None:
            raise ValueError("this model has no output matrix (config.model.decoder.head=False)")
        head = self.head.astype(hidden.dtype)
        logits = jnp.matmul(hidden, head, preferred_element_type=jnp.float32)
        cap = self.logit_cap
        return logits if cap is None else cap * jnp.tanh(logits / cap)


class Sums(NamedTuple):
    """Sums that add over microbatches and devices; nothing here is a mean."""

    terms: dict[str, Any]
    """Loss term -> f32[] sum S_k; the loss is sum_k coefficient_k * S_k / W_k."""
    metrics: dict[str, tuple[Any, Any]]
    """Metric -> (f32[] sum, f32[] weight)."""


@runtime_checkable
class Loss(Protocol):
    """A loss is sums and weights, so that any split of the batch gives the same gradient.

    It is of a :class:`Batch` and what a model makes of it, :class:`Out`; or, where vectors are
    trained, of :class:`Pairs` and :class:`Vectors`.
    """

    @property
    def additive(self) -> bool:
        """True if the loss is a sum over examples; plain microbatching refuses one that is not."""
        ...

    def weights(self, batch: Any) -> dict[str, Any]:
        """Denominators W_k f32[] of the *global* batch; depends on no parameter."""
        ...

    def coefficients(self) -> Mapping[str, float]:
        """The factor of each term."""
        ...

    def __call__(self, out: Any, batch: Any) -> Sums:
        """Sums S_k and metrics over the examples in ``batch``."""
        ...


@runtime_checkable
class Runner(Protocol):
    """How a model is run: plainly, as a pipeline, or on two meshes. Only these three verbs."""

    def fwd(self, params: Params, frozen: Params, batch: Batch) -> Out:
        """The forward pass."""
        ...

    def vjp(self, params: Params, frozen: Params, batch: Batch, d_out: Out) -> Params:
        """Gradients of ``params`` for a cotangent of :meth:`fwd`'s output."""
        ...

    def loss_grad(
        self, params: Params, frozen: Params, batch: Any, loss: Loss, scale: Mapping[str, Any]
    ) -> tuple[Sums, Params]:
        """The loss's sums over a Batch or Pairs, and the gradient of ``sum_k scale_k * S_k``."""
        ...


class Read(NamedTuple):
    """What a step runs in the place of its parameters and its batch."""

    params: Params
    """Trainable parameters, or what they are reached through."""
    frozen: Params
    batch: Any
    """Batch or Pairs."""
    back: Callable[[Params], Params]
    """Gradients of ``params`` -> those of the parameters that were given."""
    seen: Any = ()
    """What ``Cache.write`` goes by."""
    metrics: Mapping[str, Any] = {}
    """Name -> a scalar of the step."""


class Cache(NamedTuple):
    """Where a step's visual tokens come from; pure functions, as of an optax transformation."""

    init: Callable[..., Any] = lambda halved=0: ()
    """The empty state; with a number, halved so often; under ``jit``."""
    shardings: Any = ()
    """Of each of its leaves."""
    read: Callable[[Any, Params, Params, Any], Read] = lambda state, params, frozen, batch: Read(
        params, frozen, batch, lambda grads: grads
    )
    """(state, trainable, frozen, batch) -> what the step runs."""
    write: Callable[[Any, Read, Params, Any], tuple[Any, Mapping[str, Any]]] = (
        lambda state, read, grads, ok: (state, {})
    )
    """(state, what was read, gradients of ``Read.params``, bool[] whether the step is good) -> the
    state behind it, and scalars of the step; where it ``gives``, arrays under one name too."""
    gives: bool = False
    """Whether a step gives the tokens that it made, rows as the batch's."""
    saved: bool = False
    """Whether a run that goes on from a checkpoint without the state would differ in its bits."""


@runtime_checkable
class WeightMap(Protocol):
    """Which tensors of a checkpoint hold which parameters, both ways."""

    @property
    def copies(self) -> Mapping[str, str]:
        """Name -> the tensor that it must be equal to, in files that hold both."""
        ...

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Every tensor's name and shape."""
        ...

    def check(self, found: Mapping[str, tuple[int, ...]], where: str) -> dict[str, str]:
        """Name -> how ``found`` spells it; refuses what does not fit."""
        ...

    def read(
        self,
        path: str,
        index: tuple[slice, ...],
        get: Callable[[str, tuple[slice, ...]], np.ndarray],
        out: np.ndarray,
    ) -> None:
        """Fill ``out`` with the part ``index`` of a parameter."""
        ...

    def write(self, name: str, get: Callable[[str, tuple[int, ...]], np.ndarray]) -> np.ndarray:
        """A tensor, from parameters' places in their stacks."""
        ...


class Guard(NamedTuple):
    """Counts of skipped (non-finite) updates."""

    skipped: Any
    """i32[]: updates skipped in all."""
    in_a_row: Any
    """i32[]: updates skipped since the last good one."""


class TrainState(NamedTuple):
    """Everything a step changes (and the frozen weights it reads)."""

    step: Any
    """i32[]: steps taken, skipped ones counted too."""
    params: Params
    """Trainable parameters."""
    frozen: Params
    """Parameters that no step changes: no gradient, no optimizer bytes."""
    opt_state: Any
    """optax state over ``params``."""
    cache: Any
    """Visual-token cache; ``()`` when off."""
    comm: Any
    """Error feedback of quantised collectives; ``()`` when off."""
    guard: Guard
