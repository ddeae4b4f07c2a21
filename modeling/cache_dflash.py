"""
The slot cache: every row starts at slot 0, new keys are written to the slots of their tokens, and rolling back just
keeps a smaller length. Nothing is copied, shapes do not change, and every row has its own length.
"""

import functools
from typing import NamedTuple

import torch
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionCacheLayerMixin,
)


CAPACITY_STEP = 64  # capacities are multiples of this
VIEW_STEP = 8  # the view handed to attention is the used length rounded up to this


class Ring(NamedTuple):
    """Slots that are used again and again: token `i` of a row is in slot `i`, or `sink + (i - sink) % size`."""

    size: int
    sink: int = 0  # tokens at the start of a row that stay

    def slots(self, tokens: torch.LongTensor) -> torch.LongTensor:
        """The slots of tokens; those of tokens to be dropped, which are negative, stay negative."""
        return torch.where(tokens < self.sink, tokens, self.sink + (tokens - self.sink) % self.size)

    def held(self, view: int, last: torch.LongTensor) -> torch.LongTensor:
        """`[R, view]`, the token in each slot once the tokens up to `last` `[R, 1]` are written; negative: none."""
        slots = torch.arange(view, device=last.device)
        tokens = last - (last - slots) % self.size
        tokens = tokens.masked_fill((tokens < self.sink) | (slots >= self.sink + self.size), -1)
        return torch.where(slots < self.sink, slots, tokens)


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
    """
    Keys and values `[R, heads, capacity, head_dim]` of one layer, written at the cache's current slots.

    Args:
        cache (`SlotCache`): The cache that it belongs to.
        ring (`Ring`, *optional*): Which slots tokens share; `None`: every token has its own.
    """

    is_sliding = False

    def __init__(self, cache: "SlotCache", ring: Ring | None = None):
        super().__init__()
        self.cache, self.ring = cache, ring

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        self.keys, self.values = self._buffer(key_states), self._buffer(value_states)
        self.is_initialized = True

    def adopt(self, layer: CacheLayerMixin, padding: list[int], columns: int) -> None:
        """Move `columns` left-padded columns of a layer here: first its keys, which are freed, then its values."""
        self.dtype, self.device = layer.keys.dtype, layer.keys.device
        first = columns - layer.keys.shape[2]  # a sliding layer has dropped the columns before its window
        for name in ("keys", "values"):
            states = getattr(layer, name)
            buffer = self._buffer(states)
            for row, pad in enumerate(padding):
                skip = max(pad - first, 0)
                if self.ring is None:
                    buffer[row, :, first + skip - pad : columns - pad] = states[row, :, skip:]
                else:
                    kept = torch.arange(first + skip - pad, columns - pad, device=states.device)[-self.ring.size :]
                    buffer[row][:, self.ring.slots(kept)] = states[row, :, states.shape[2] - len(kept) :]
            setattr(self, name, buffer)
            setattr(layer, name, states[:, :, :0].clone())
        self.is_initialized = True

    def release(self, layer: CacheLayerMixin, padding: list[int], columns: int) -> None:
        """Write the slots back into a layer, as `columns` left-padded columns; they are freed on the way."""
        first, moved = 0, [name for name in ("keys", "values") if getattr(self, name) is not None]
        if moved and isinstance(layer, DynamicSlidingWindowLayer):
            first = max(columns - layer.sliding_window + 1, 0)
            layer.cumulative_length = columns
        for name in moved:
            buffer, rows = getattr(self, name), []
            for row, pad in enumerate(padding):
                start = max(first - pad, 0)
                states = buffer[row, :, start : columns - pad]
                if self.ring is not None:
                    states = buffer[row][:, self.ring.slots(torch.arange(start, columns - pad, device=buffer.device))]
                missing = columns - first - states.shape[1]
                rows.append(torch.nn.functional.pad(states, (0, 0, missing, 0)) if missing else states)
            setattr(layer, name, torch.stack(rows) if len(rows) > 1 else rows[0][None])
            setattr(self, name, None)

    @property
    def capacity(self) -> int:
        """Slots of a row; the last is never attended to."""
        return self.cache.capacity_of(self.ring)

    def _buffer(self, like: torch.Tensor) -> torch.Tensor:
        """`[R, heads, capacity, head_dim]` zeros: a masked slot is still multiplied by zero, and 0 * NaN is NaN."""
        with torch.inference_mode(False):  # otherwise it could not be written outside of inference mode
            shape = (self.cache.rows, like.shape[1], self.capacity, like.shape[3])
            return torch.zeros(shape, dtype=like.dtype, device=like.device)

    def update(self, key_states, value_states, *args, **kwargs):
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        start = 0
        # In order: a later group may overwrite slots of an earlier one.
        for places in self.cache.places(self.ring):
            stop = start + places.slots.shape[1]
            places.write(self.keys, key_states[:, :, start:stop])
            places.write(self.values, value_states[:, :, start:stop])
            start = stop
        view = self.cache.view_of(self.ring)
        return self.keys[:, :, :view], self.values[:, :, :view]

    def resize(self) -> None:
        """Move to buffers of the cache's new capacity."""
        for name in ("keys", "values"):
            old = getattr(self, name)
            if old.shape[2] != self.capacity:
                new, kept = self._buffer(old), min(old.shape[2], self.capacity)
                new[:, :, :kept] = old[:, :, :kept]
                setattr(self, name, new)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.cache.view_of(self.ring), 0

    def get_seq_length(self) -> int:
        return self.cache.reported or self.cache.view

    def get_max_length(self) -> int:
        return self.cache.capacity


class SlotCache(Cache):
    """
    A cache of `rows` x `capacity` slots, in which slot `i` of a row holds its `i`-th token.

    `reserve` makes room for a forward, `place` sets where its tokens go, and the forward's mask sets what each query
    sees. A caller keeps nothing but a length, so rolling back is free.

    Args:
        rows (`int`): Batch rows.
        capacity (`int`): Initial slots per row; `reserve` grows them when they run out. The last slot is never
            attended to: tokens to be dropped are written there.
        ring (`Ring`, *optional*): Which slots tokens share, in layers that are not adopted.

    Attributes:
        columns (`int`): Columns of the adopted cache, padding included.
        view (`int`): Slots that attention gets, in layers without a ring.
        spare (`int`): Slots of an adopted ring beyond its window.
        least (`int`): Minimum of `view`.
        reported (`int`, *optional*): The length that a target is told instead, to find out whether it is used.
        tokens (`tuple[torch.LongTensor]`): Groups `[R, n]` of the tokens of the next forward; negative: dropped.
    """

    SPARE = 128  # slots of a ring beyond its window, at least: a draft overwrites nothing that its tokens see

    def __init__(self, rows: int, capacity: int, ring: Ring | None = None):
        super().__init__(layer_class_to_replicate=functools.partial(SlotLayer, self, ring))  # which copies are rebound
        self.rows, self.ring, self.columns, self.view, self.spare = rows, ring, 0, 0, self.SPARE
        self.capacity = _round_up(capacity + 1)
        self.least, self.reported = 0, None
        self.tokens: tuple[torch.LongTensor, ...] = ()
        self._places: dict[Ring | None, tuple[Places, ...]] = {}

    def reserve(self, used: int) -> None:
        """Make room for a forward in which no row sees a token at or past `used`; attention gets as many, rounded."""
        used = max(used, self.least)
        if used >= self.capacity:
            self._resize(_round_up(max(used, self.capacity * 9 // 8) + 1))
        self.view = min(_round_up(used, VIEW_STEP), self.capacity)

    def _resize(self, capacity: int) -> None:
        self.capacity = capacity
        for layer in self.layers:
            if isinstance(layer, SlotLayer) and layer.is_initialized:  # recurrent layers of a hybrid do not grow
                layer.resize()

    def capacity_of(self, ring: Ring | None) -> int:
        """Slots of a row in a layer."""
        return self.capacity if ring is None else min(_round_up(ring.sink + ring.size + 1), self.capacity)

    def view_of(self, ring: Ring | None) -> int:
        """Slots that attention gets in a layer."""
        return self.view if ring is None else min(self.view, _round_up(ring.sink + ring.size, VIEW_STEP))

    def place(self, *tokens: torch.LongTensor) -> None:
        """
        Set the tokens of the next forward.

        Args:
            tokens (`torch.LongTensor`): One or more groups `[R, n]`, written in order, in the order of the new tokens.
        """
        self.tokens, self._places = tokens, {}
        for ring in {self.ring, *(layer.ring for layer in self.layers if isinstance(layer, SlotLayer))}:
            self.places(ring)

    def places(self, ring: Ring | None) -> tuple[Places, ...]:
        """Where the tokens of the next forward go in a layer."""
        if ring not in self._places:
            last = self.capacity_of(ring) - 1
            slots = self.tokens if ring is None else map(ring.slots, self.tokens)
            self._places[ring] = tuple(Places(torch.where(one < 0, last, one)) for one in slots)
        return self._places[ring]

    def move(self, source: torch.LongTensor, goal: torch.LongTensor) -> None:
        """Copy tokens `[R, n]` of each row to the places of others."""
        for ring in {layer.ring for layer in self.layers if isinstance(layer, SlotLayer)}:
            read, written = (Places(one if ring is None else ring.slots(one)) for one in (source, goal))
            for layer in self.layers:
                if isinstance(layer, SlotLayer) and layer.is_initialized and layer.ring == ring:
                    for buffer in (layer.keys, layer.values):
                        written.write(buffer, read.read(buffer))

    @staticmethod
    def can_adopt(cache: Cache) -> bool:
        """
        Whether every layer of a cache is empty, ordinary or sliding-window, so that its tokens fit into slots, and
        nothing else happens when they are written.
        """
        if getattr(cache.update, "__func__", None) is not Cache.update:
            return False
        holding = [
            layer for layer in cache.layers if isinstance(layer, CacheLayerMixin | LinearAttentionCacheLayerMixin)
        ]
        return all(type(layer) in (DynamicLayer, DynamicSlidingWindowLayer) for layer in holding)

    @classmethod
    def adopt(cls, cache: Cache, padding: list[int], largest: int = 0) -> "SlotCache":
        """
        Move a prefilled, left-padded cache into slots, so that every row starts at slot 0. Layers with a sliding
        window get a ring of slots.

        The prompt is held once: keys and values of the source are freed as soon as they have moved, until `release`.

        Args:
            cache (`Cache`): Its keys in dynamic and sliding-window layers only. Recurrent states, and layers that hold
                nothing, are shared with it.
            padding (`list[int]`): Padding columns at the start of each row.
            largest (`int`): Tokens of the largest draft.
        """
        columns = cached_columns(cache)
        slots = cls(len(padding), columns + CAPACITY_STEP)
        slots.columns, slots.spare = columns, max(cls.SPARE, largest)
        try:
            for layer in cache.layers:
                slots.layers.append(slots.slot_layer(layer) if isinstance(layer, CacheLayerMixin) else layer)
                if isinstance(slots.layers[-1], SlotLayer) and layer.is_initialized:  # or it shares another's keys
                    slots.layers[-1].adopt(layer, padding, columns)
        except BaseException:  # out of memory, or interrupted
            slots.release(cache, padding, columns)
            raise
        return slots

    def slot_layer(self, layer: CacheLayerMixin) -> SlotLayer:
        """The slots that a layer's tokens move into."""
        sliding = type(layer) is DynamicSlidingWindowLayer
        return SlotLayer(self, Ring(layer.sliding_window + self.spare) if sliding else None)

    def clear(self) -> None:
        """Free all slots now: layers and cache refer to each other and would wait for the garbage collector."""
        self.layers.clear()
        self.layer_class_to_replicate = None

    def release(self, cache: Cache, padding: list[int], columns: int) -> Cache:
        """
        Write the slots back into the cache they were adopted from, as `columns` left-padded columns: an ordinary cache
        that continues the conversation with or without a drafter. The slots are freed on the way.
        """
        for source, layer in zip(self.layers, cache.layers):  # fewer, if not all were moved
            if isinstance(source, SlotLayer):
                source.release(layer, padding, columns)
        return cache


def cached_columns(cache) -> int:
    """Columns that a cache holds before the prompt; 0 if all layers are recurrent, which do not count them."""
    if cache is None:
        return 0
    return cache.get_seq_length() if any(isinstance(layer, CacheLayerMixin) for layer in cache.layers) else 0


def additive(visible: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A float mask from a boolean one: eager attention would silently *add* a boolean mask as 0 and 1."""
    mask = torch.zeros(visible.shape, dtype=dtype, device=visible.device)
    return mask.masked_fill_(~visible, torch.finfo(dtype).min)


def visible(
    slots: torch.LongTensor,
    held: torch.LongTensor,
    window: int | None = None,
    chunk: int | None = None,
    draft=None,
    last_seen: torch.LongTensor | None = None,
) -> torch.BoolTensor:
    """
    What queries see.

    Args:
        slots (`torch.LongTensor`): `[R, n]`, the tokens' own numbers, consecutive in each row.
        held (`torch.LongTensor`): `[view]` or `[R, view]`, the token in each slot; negative: none.
        window (`int`, *optional*): A key is seen when it is less than so many tokens back.
        chunk (`int`, *optional*): A key is seen only within the query's own chunk of that many tokens.
        draft (`Block` or the like, *optional*): With `ancestors`, a query sees these of the draft at `slots`, and
            windows and chunks count its `depths`.
        last_seen (`torch.LongTensor`, *optional*): `[R, n]`, the last token that each query sees. Default: itself.

    Returns:
        `torch.BoolTensor` `[R, n, view]`.
    """
    key = held[None, None] if held.dim() == 1 else held[:, None]  # [R, 1, view]
    query = slots[:, :, None]  # [R, n, 1]
    if draft is None or draft.ancestors is None:
        seen = key <= (query if last_seen is None else last_seen[:, :, None])
    else:
        start, size = slots[:, :1, None], slots.shape[1]
        place = (key - start).expand(len(slots), 1, -1)  # in the draft
        drafted = (place >= 0) & (place < size)
        place = place.clamp(0, size - 1)
        seen = (key < start) | drafted & draft.ancestors.gather(2, place.expand(-1, size, -1))
        depth = draft.depths[:, None].gather(2, place)  # [R, 1, view]
        key, query = torch.where(drafted, start + depth, key), start + draft.depths[:, :, None]
    if held.dim() > 1:
        seen = seen & (held[:, None] >= 0)
    if window is not None:
        seen = seen & (query - key < window)
    if chunk is not None:
        seen = seen & (query // chunk == key // chunk)
    return seen


def slot_mask(cache: SlotCache, slots, window: int | None, chunk: int | None, dtype, draft) -> torch.Tensor:
    """
    The additive mask `[R, 1, n, view]` of a draft at `slots` `[R, n]` of a cache; see [`visible`]. Eager attention
    adds the mask, so its dtype is floating: a boolean one would be added as 0, 1.
    """
    rings = {layer.ring for layer in cache.layers if isinstance(layer, SlotLayer) and layer.ring is not None}
    ring = next((one for one in rings if one.size == (window or chunk or 0) + cache.spare), None)
    if ring is None:
        held = torch.arange(cache.view, device=slots.device)
    else:
        held = ring.held(cache.view_of(ring), slots[:, -1:])
    return additive(visible(slots, held, window, chunk, draft), dtype)[:, None]


def _round_up(length: int, step: int = CAPACITY_STEP) -> int:
    return -(-length // step) * step
