"""
The slot cache: every row starts at slot 0, new keys are written to the slots of their tokens, and rolling back just
keeps a smaller length. Nothing is copied, shapes do not change, and every row has its own length.
"""

import torch
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionCacheLayerMixin,
    LinearAttentionLayer,
)

from .tree_dflash import DraftTree


CAPACITY_STEP = 64  # capacities are multiples of this
VIEW_STEP = 8  # the view handed to attention is the used length rounded up to this
SMALLEST_BUCKET = 256  # for compiled rounds: capacities, and therefore views, are powers of two from here on


class Places:
    """
    The slots `[R, n]` of tokens in buffers `[R, heads, capacity, head_dim]`, as one flat index over the first three
    dimensions. The index is built once for all layers, and copying with it is faster than `scatter_`: 30x on a CPU in
    bfloat16.
    """

    def __init__(self, slots: torch.LongTensor):
        self.slots = slots
        self._flat: dict[torch.Size, torch.LongTensor] = {}  # `[R * heads * n]` by shape

    def read(self, buffer: torch.Tensor) -> torch.Tensor:
        """The states at these slots, `[R * heads * n, head_dim]`."""
        return buffer.view(-1, buffer.shape[3]).index_select(0, self._index(buffer))

    def write(self, buffer: torch.Tensor, states: torch.Tensor) -> None:
        """Write states `[R, heads, n, head_dim]`, or in the shape that [`read`] returns, to these slots."""
        states = states.to(buffer.dtype).reshape(-1, buffer.shape[3])  # autocast mixes dtypes
        buffer.view(-1, buffer.shape[3]).index_copy_(0, self._index(buffer), states)

    def _index(self, buffer: torch.Tensor) -> torch.LongTensor:
        shape = buffer.shape[:3]
        if shape not in self._flat:
            rows, heads, capacity = shape
            first = torch.arange(rows * heads, device=self.slots.device).view(rows, heads, 1) * capacity
            self._flat[shape] = (first + self.slots[:, None]).flatten()
        return self._flat[shape].to(buffer.device)


class SlotLayer(CacheLayerMixin):
    """Keys and values `[R, heads, capacity, head_dim]` of one layer, written at the cache's current slots."""

    is_sliding = False

    def __init__(self, cache: "SlotCache"):
        super().__init__()
        self.cache = cache

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        self.keys, self.values = self._buffer("keys", key_states), self._buffer("values", value_states)
        self.is_initialized = True

    def adopt(self, layer: CacheLayerMixin, padding: list[int], columns: int) -> None:
        """Move `columns` left-padded columns of a layer here: first its keys, which are freed, then its values."""
        self.dtype, self.device = layer.keys.dtype, layer.keys.device
        first = columns - layer.keys.shape[2]  # a sliding layer has dropped the columns before its window
        for name in ("keys", "values"):
            states = getattr(layer, name)
            buffer = self._buffer(name, states)
            for row, pad in enumerate(padding):
                skip = max(pad - first, 0)
                buffer[row, :, first + skip - pad : columns - pad] = states[row, :, skip:]
            setattr(self, name, buffer)
            setattr(layer, name, states[:, :, :0].clone())
        self.is_initialized = True

    def _buffer(self, name: str, like: torch.Tensor) -> torch.Tensor:
        """`[R, heads, capacity, head_dim]` zeros: a masked slot is still multiplied by zero, and 0 * NaN is NaN."""
        shape = (self.cache.rows, like.shape[1], self.cache.capacity, like.shape[3])
        pool, key = self.cache.pool, (self.cache.layers.index(self), name, shape, like.dtype, like.device)
        if pool is not None and key in pool:
            return pool[key].zero_()
        with torch.inference_mode(False):  # otherwise it could not be written outside of inference mode
            buffer = torch.zeros(shape, dtype=like.dtype, device=like.device)
        if pool is not None:
            torch._dynamo.mark_static_address(buffer)
            pool[key] = buffer
        return buffer

    def update(self, key_states, value_states, *args, **kwargs):
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        start = 0
        # In order: a later group may overwrite slots of an earlier one.
        for group in self.cache.groups:
            stop = start + group.slots.shape[1]
            group.write(self.keys, key_states[:, :, start:stop])
            group.write(self.values, value_states[:, :, start:stop])
            start = stop
        view = self.cache.view
        return self.keys[:, :, :view], self.values[:, :, :view]

    def resize(self) -> None:
        """Move to buffers of the cache's new capacity."""
        for name in ("keys", "values"):
            old = getattr(self, name)
            new = self._buffer(name, old)
            kept = min(old.shape[2], self.cache.capacity)
            new[:, :, :kept] = old[:, :, :kept]
            setattr(self, name, new)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.cache.view, 0

    def get_seq_length(self) -> int:
        return self.cache.view

    def get_max_length(self) -> int:
        return self.cache.capacity


class RecurrentSlotLayer(SlotLayer, LinearAttentionLayer):
    """A layer with keys in slots, and recurrent states that are shared with the original layer."""

    is_compileable = False

    def __init__(self, cache: "SlotCache", recurrent: LinearAttentionLayer):
        self.__dict__ = {**vars(recurrent), "cache": cache}

    def lazy_initialization(self, *args, **kwargs) -> None:
        """Upstream's convention: keys and values are passed by position, states by keyword."""
        (SlotLayer if args else LinearAttentionLayer).lazy_initialization(self, *args, **kwargs)


class SlotCache(Cache):
    """
    A cache of `rows` x `capacity` slots, in which slot `i` of a row holds its `i`-th token.

    `reserve` makes room for a forward, `place` sets where its tokens go, and the forward's mask sets what each query
    sees. A caller keeps nothing but a length, so rolling back is free.

    Args:
        rows (`int`): Batch rows.
        capacity (`int`): Initial slots per row; `reserve` grows them when they run out. The last slot is never
            attended to: tokens to be dropped are written there.
        pool (`dict`, *optional*): Keeps buffers beyond the life of the cache, for compiled rounds, which are bound to
            fixed addresses and shapes: with it capacities are powers of two, and attention sees all slots.
        most (`int`, *optional*): Use no more slots than this, however many are reserved: the caller reuses them.
    """

    def __init__(self, rows: int, capacity: int, pool: dict | None = None, most: int | None = None):
        super().__init__(layers=[])
        self.rows, self.pool, self.most = rows, pool, most
        self.capacity = self._fitting(capacity if most is None else most)
        self.groups: tuple[Places, ...] = ()
        self.view = 0

    def reserve(self, used: int) -> None:
        """
        Make room for a forward in which no row sees a slot at or past `used`, and set how many slots attention gets:
        the used ones rounded up or, for compiled rounds, all.
        """
        used = used if self.most is None else min(used, self.most)
        if used >= self.capacity:
            self._resize(self._fitting(max(used, self.capacity * 9 // 8)))
        self.view = self.capacity if self.pool is not None else min(_round_up(used, VIEW_STEP), self.capacity)

    def fit(self, used: int) -> None:
        """As `reserve`, but attention gets whole buffers, as matrix products need them, with few unused slots."""
        if not used <= self.capacity <= used * 9 // 8 + 2 * VIEW_STEP:
            self._resize(_round_up(used * 17 // 16, VIEW_STEP))
        self.view = self.capacity

    def _resize(self, capacity: int) -> None:
        self.capacity = capacity
        for layer in self.layers:
            if isinstance(layer, SlotLayer) and layer.is_initialized:  # recurrent layers of a hybrid do not grow
                layer.resize()

    def place(self, *slots: torch.Tensor) -> None:
        """
        Set the slots of the tokens of the next forward.

        Args:
            slots (`torch.LongTensor`): One or more groups `[R, n]`, written in order, in the order of the new tokens.
        """
        self.groups = tuple(map(Places, slots))

    def move(self, source: torch.LongTensor, goal: torch.LongTensor) -> None:
        """Copy slots `[R, n]` of each row to others; no goal may be the source of a later copy."""
        read, written = Places(source), Places(goal)
        for layer in self.layers:
            if isinstance(layer, SlotLayer) and layer.is_initialized:
                for buffer in (layer.keys, layer.values):
                    written.write(buffer, read.read(buffer))

    def _fitting(self, slots: int) -> int:
        """A capacity for `slots` plus the slot that is never attended to."""
        if self.pool is None:
            return _round_up(slots + 1)
        return max(SMALLEST_BUCKET, 1 << slots.bit_length())

    def update(self, key_states, value_states, layer_idx: int, *args, **kwargs):
        while len(self.layers) <= layer_idx:
            self.layers.append(SlotLayer(self))
        return self.layers[layer_idx].update(key_states, value_states)

    @property
    def trash(self) -> int:
        """The slot for tokens that no query may see, such as padding."""
        return self.capacity - 1

    @classmethod
    def adopt(cls, cache: Cache, padding: list[int], capacity: int, pool: dict | None = None) -> "SlotCache":
        """
        Move a prefilled, left-padded cache into slots, so that every row starts at slot 0.

        The prompt is held once: keys and values of the source are freed as soon as they have moved, until `release`.

        Args:
            cache (`Cache`): Its keys in dynamic and sliding-window layers only. Recurrent states, and layers that hold
                nothing, are shared with it.
            padding (`list[int]`): Padding columns at the start of each row.
            capacity (`int`): Slots of each row.
            pool (`dict`, *optional*): As for the class.
        """
        slots = cls(len(padding), capacity, pool)
        columns = cached_columns(cache)
        for layer in cache.layers:
            if not isinstance(layer, CacheLayerMixin):
                slots.layers.append(layer)
                continue
            recurrent = isinstance(layer, LinearAttentionLayer)
            moved = RecurrentSlotLayer(slots, layer) if recurrent else SlotLayer(slots)
            slots.layers.append(moved)
            if layer.is_initialized:  # otherwise it shares the keys of another layer
                moved.adopt(layer, padding, columns)
        return slots

    def clear(self) -> None:
        """Free all slots now: layers and cache refer to each other and would wait for the garbage collector."""
        self.layers.clear()

    def release(self, cache: Cache, padding: list[int], columns: int) -> Cache:
        """
        Write the slots back into the cache they were adopted from, as `columns` left-padded columns: an ordinary cache
        that continues the conversation with or without a drafter. The slots are freed on the way.
        """
        for source, layer in zip(self.layers, cache.layers, strict=True):
            if not isinstance(source, SlotLayer) or not source.is_initialized:
                continue
            first = 0
            if isinstance(layer, DynamicSlidingWindowLayer):
                first = max(columns - layer.sliding_window + 1, 0)
                layer.cumulative_length = columns
            for name in ("keys", "values"):
                buffer = getattr(source, name)
                rows = [_left_padded(buffer[row], pad, first, columns) for row, pad in enumerate(padding)]
                if self.pool is not None:  # the next call reuses the buffers
                    rows = [row.clone() for row in rows]
                setattr(layer, name, torch.stack(rows) if len(rows) > 1 else rows[0][None])
                setattr(source, name, None)
                del buffer, rows
        return cache


def can_adopt(cache: Cache) -> bool:
    """
    Whether every layer of a cache is empty, ordinary or sliding-window, so that its tokens fit into slots, and nothing
    else happens when they are written.
    """
    if getattr(cache.update, "__func__", None) is not Cache.update:
        return False
    holding = [layer for layer in cache.layers if isinstance(layer, CacheLayerMixin | LinearAttentionCacheLayerMixin)]
    return all(type(layer) in (DynamicLayer, DynamicSlidingWindowLayer) for layer in holding)


def cached_columns(cache) -> int:
    """Columns that a cache holds before the prompt; 0 if all layers are recurrent, which do not count them."""
    if cache is None:
        return 0
    return cache.get_seq_length() if any(isinstance(layer, CacheLayerMixin) for layer in cache.layers) else 0


def additive(visible: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A float mask from a boolean one: eager attention would silently *add* a boolean mask as 0 and 1."""
    return torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill_(
        ~visible, torch.finfo(dtype).min
    )


def slot_mask(
    slots: torch.Tensor,
    last_seen: torch.Tensor,
    view: int,
    window: int | None,
    chunk: int | None,
    dtype: torch.dtype,
    tree: DraftTree | None = None,
    held: torch.Tensor | None = None,
) -> torch.Tensor:
    """
    The additive mask of queries at `slots` over the first `view` slots.

    Args:
        slots (`torch.LongTensor`): `[R, n]`, the queries' slots.
        last_seen (`torch.LongTensor`): `[R, n]`, the last slot each query sees: its own slot for a causal layer.
        view (`int`): Slots handed to attention.
        window (`int`, *optional*): A key is seen when `query slot - key slot < window`.
        chunk (`int`, *optional*): A key is seen only within the query's own chunk of that many slots.
        dtype (`torch.dtype`): A floating dtype. Eager attention adds the mask; a boolean one would be added as 0, 1.
        tree (`DraftTree`, *optional*): The tree at `slots`, instead of a sequence: there a query sees its ancestors,
            and windows and chunks count depths.
        held (`torch.LongTensor`, *optional*): `[R, view]`, the token that each slot holds. Default: its own number.

    Returns:
        `torch.Tensor` `[R, 1, n, view]`.
    """
    key = torch.arange(view, device=slots.device) if held is None else held[:, None]  # [view] or [R, 1, view]
    query = slots[:, :, None]  # [R, n, 1]
    if tree is None:
        visible = key <= last_seen[:, :, None]  # [R, n, view]
    else:
        places = slots[:, None].expand_as(tree.ancestors)
        visible = (key < slots[:, :1, None]).expand(-1, slots.shape[1], -1).scatter(2, places, tree.ancestors)
        depths = slots[:, :1] + tree.depths
        key = key.expand(len(slots), -1).scatter(1, slots, depths)[:, None]  # [R, 1, view]
        query = depths[:, :, None]
    if window is not None:
        visible = visible & (query - key < window)
    if chunk is not None:
        visible = visible & (query // chunk == key // chunk)
    return additive(visible, dtype)[:, None]


def _round_up(length: int, step: int = CAPACITY_STEP) -> int:
    return -(-length // step) * step


def _left_padded(row: torch.Tensor, pad: int, first: int, columns: int) -> torch.Tensor:
    """Columns `first..columns` of one row `[heads, capacity, head_dim]` whose slot 0 is column `pad`."""
    if first >= pad:
        return row[:, first - pad : columns - pad]
    padding = row.new_zeros(row.shape[0], pad - first, row.shape[2])
    return torch.cat([padding, row[:, : columns - pad]], dim=1)
