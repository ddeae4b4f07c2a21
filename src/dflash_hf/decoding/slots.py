"""
The slot cache: every row starts at slot 0, new keys are written to the slots of their tokens, and rolling back just
keeps a smaller length. Nothing is copied, shapes do not change, and every row has its own length.

Four ways to count, for a row with `p` columns of padding on the left:

- a *column* counts in the padded batch, as in `input_ids` and in caches of `generate`;
- an *index* counts the tokens of the row, without padding: column minus `p`;
- a *slot* is where a layer stores a token, a "KV slot", not a slot of the drafter's block. It is the token's index,
  unless the layer has a [`Ring`];
- a *position* is what rotary embeddings rotate by: index plus `first_positions`, the position in slot 0. That is 0 for
  text. After an image whose 4 tokens take 2 positions it is -2 for all later tokens.

An example, two rows after a prompt of four columns, the second with `p = 1`, and one round that drafts two tokens:

    columns              0    1  2  3 | 4  5  6
    row 0  prompt, draft a    b  c  d | e  f  g      indices of the draft 4, 5, 6
    row 1                PAD  x  y  z | u  v  w                           3, 4, 5

    before the round   lengths [4, 3], next_indices [[4, 5, 6], [3, 4, 5]]; `e` and `u` are the anchors
    accepted           row 0: `e` alone, row 1: all; counts [1, 3]
    after the round    lengths [5, 6]; slots 5 and 6 of row 0 are stale, and the next round overwrites them:
                       next_indices [[5, 6, 7], [6, 7, 8]]
    written back       7 columns: the longest row with its padding
    in a ring of 4     `v`, index 4, is in slot 0, and `w` in slot 1

The life of a slot. `SlotCache.adopt` moves the prompt's keys and values into slots. Before each forward `reserve`
makes room and `set_next_indices` decides which slot each new token gets; every layer's `update` writes there. What is
rejected stays and is overwritten; `copy_tokens` makes the accepted path of a tree contiguous. `write_back` moves the
slots into the cache that they came from; `free` drops those that are left.
"""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionCacheLayerMixin,
)


CAPACITY_STEP = 64  # capacities are multiples of this many slots
ATTENDED_STEP = 8  # attention sees the used slots, rounded up to a multiple of this
MIN_BUCKET = 256  # minimum number of slots of a cache whose shapes are fixed for graphs
MIN_RING_MARGIN = 128  # slots of a ring beyond its window: a draft overwrites nothing that its tokens attend to


class Ring(NamedTuple):
    """
    Slots that are reused: the token of index `i` is in slot `i` if `i < sink`, else in `sink + (i - sink) % size`.

    Args:
        window (`int`): Attention window of the layers, in tokens.
        size (`int`): Slots that are reused: the window, and room for a draft.
        sink (`int`): Tokens at the start of a row that stay.
    """

    window: int
    size: int
    sink: int = 0

    def slots(self, indices: torch.LongTensor) -> torch.LongTensor:
        """The slots of tokens; the indices of rejected tokens, which are negative, stay negative."""
        return torch.where(indices < self.sink, indices, self.sink + (indices - self.sink) % self.size)

    def indices(self, num_slots: int, last: torch.LongTensor) -> torch.LongTensor:
        """
        `[R, num_slots]`, the index of the token in each slot after those up to index `last` `[R, 1]` were written;
        negative: none.
        """
        slots = torch.arange(num_slots, device=last.device)
        indices = last - (last - slots) % self.size
        unused = (indices < self.sink) | (slots >= self.sink + self.size)
        return torch.where(slots < self.sink, slots, indices.masked_fill(unused, -1))


class SlotIndex:
    """
    The slots `[R, n]` of tokens in buffers `[R, heads, capacity, head_dim]`, as one flat index over the first three
    dimensions. The index is built once for all layers, and copying with it is faster than `scatter_`: 30x on a CPU in
    bfloat16. It goes through rows, then tokens, then heads: in this order projections have written the states, which
    need no copy before they are written to their slots.
    """

    def __init__(self, slots: torch.LongTensor):
        self.slots = slots
        self._flat: dict[torch.Size, torch.LongTensor] = {}  # `[R * n * heads]` by shape

    def read(self, buffer: torch.Tensor) -> torch.Tensor:
        """The states at these slots, `[R, heads, n, head_dim]`."""
        states = buffer.view(-1, buffer.shape[3]).index_select(0, self._index(buffer))
        return states.view(*self.slots.shape, -1, buffer.shape[3]).transpose(1, 2)

    def write(self, buffer: torch.Tensor, states: torch.Tensor) -> None:
        """Write states `[R, heads, n, head_dim]` to these slots."""
        states = states.to(buffer.dtype).transpose(1, 2).reshape(-1, buffer.shape[3])  # autocast mixes dtypes
        buffer.view(-1, buffer.shape[3]).index_copy_(0, self._index(buffer), states)

    def _index(self, buffer: torch.Tensor) -> torch.LongTensor:
        shape = buffer.shape[:3]
        if shape not in self._flat:
            rows, heads, capacity = shape
            first = torch.arange(rows * heads, device=self.slots.device).view(rows, 1, heads) * capacity
            self._flat[shape] = (first + self.slots[:, :, None]).flatten()
        return self._flat[shape].to(buffer.device)


class SlotLayer(CacheLayerMixin):
    """
    Keys and values `[R, heads, capacity, head_dim]` of one layer, written to the slots of the cache's next tokens.

    Args:
        cache (`SlotCache`): The cache that it belongs to.
        ring (`Ring`, *optional*): Which slots are reused; `None`: every token has its own.
    """

    is_sliding = False

    def __init__(self, cache: "SlotCache", ring: Ring | None = None):
        super().__init__()
        self.cache = cache
        self.ring = ring

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.dtype = key_states.dtype
        self.device = key_states.device
        self.keys = self._buffer(key_states)
        self.values = self._buffer(value_states)
        self.is_initialized = True

    def adopt(self, layer: CacheLayerMixin, padding: list[int], columns: int) -> None:
        """Move `columns` left-padded columns of a layer here: its keys, then its values; the layer is left empty."""
        self.dtype = layer.keys.dtype
        self.device = layer.keys.device
        first_column = columns - layer.keys.shape[2]  # a sliding layer has dropped the columns before its window
        for name in ("keys", "values"):
            states = getattr(layer, name)
            buffer = self._buffer(states)
            for row, pad in enumerate(padding):
                skipped = max(pad - first_column, 0)  # columns of padding that the layer holds
                first_index = first_column + skipped - pad
                if self.ring is None:
                    buffer[row, :, first_index : columns - pad] = states[row, :, skipped:]
                else:
                    indices = torch.arange(first_index, columns - pad, device=states.device)[-self.ring.size :]
                    buffer[row][:, self.ring.slots(indices)] = states[row, :, states.shape[2] - len(indices) :]
            setattr(self, name, buffer)
            setattr(layer, name, states[:, :, :0].clone())
        self.is_initialized = True

    def write_back(self, layer: CacheLayerMixin, padding: list[int], columns: int) -> None:
        """Write the slots back into a layer as `columns` left-padded columns. Each buffer is freed once copied."""
        first_column = 0
        names = [name for name in ("keys", "values") if getattr(self, name) is not None]
        if names and isinstance(layer, DynamicSlidingWindowLayer):
            first_column = max(columns - layer.sliding_window + 1, 0)
            layer.cumulative_length = columns
        for name in names:
            buffer = getattr(self, name)
            rows = []
            for row, pad in enumerate(padding):
                first_index = max(first_column - pad, 0)
                if self.ring is None:
                    states = buffer[row, :, first_index : columns - pad]
                else:
                    indices = torch.arange(first_index, columns - pad, device=buffer.device)
                    states = buffer[row][:, self.ring.slots(indices)]
                missing = columns - first_column - states.shape[1]
                if missing > 0:  # zeros in place of padding
                    states = torch.nn.functional.pad(states, (0, 0, missing, 0))
                rows.append(states)
            setattr(layer, name, torch.stack(rows) if len(rows) > 1 else rows[0][None])
            setattr(self, name, None)

    @property
    def capacity(self) -> int:
        """Slots of a row; the last is never attended to."""
        return self.cache.capacity_of(self.ring)

    def _buffer(self, like: torch.Tensor) -> torch.Tensor:
        """
        `[R, heads, capacity, head_dim]` zeros. Not uninitialised memory: attention multiplies the values of masked
        slots by zero, and 0 * NaN is NaN.
        """
        with torch.inference_mode(False):  # otherwise it could not be written outside of inference mode
            shape = (self.cache.rows, like.shape[1], self.capacity, like.shape[3])
            return torch.zeros(shape, dtype=like.dtype, device=like.device)

    def update(self, key_states, value_states, *args, **kwargs):
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        start = 0
        # In order: a later group may overwrite slots of an earlier one.
        for index in self.cache.slot_indices(self.ring):
            stop = start + index.slots.shape[1]
            index.write(self.keys, key_states[:, :, start:stop])
            index.write(self.values, value_states[:, :, start:stop])
            start = stop
        num_attended = self.cache.num_attended_of(self.ring)
        return self.keys[:, :, :num_attended], self.values[:, :, :num_attended]

    def resize(self) -> None:
        """Move to buffers of the cache's new capacity."""
        for name in ("keys", "values"):
            old = getattr(self, name)
            if old.shape[2] != self.capacity:
                new = self._buffer(old)
                copied = min(old.shape[2], self.capacity)
                new[:, :, :copied] = old[:, :, :copied]
                setattr(self, name, new)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.cache.num_attended_of(self.ring), 0

    def get_seq_length(self) -> int:
        if self.cache.probe_lengths is not None:
            return self.cache.probe_lengths.seq_length
        return self.cache.num_attended

    def get_max_length(self) -> int:
        return self.cache.capacity


class ProbeLengths(NamedTuple):
    """
    Lengths that a cache reports in a probe, far from the true ones, to find targets that derive positions or windows
    from them.
    """

    min_attended: int  # minimum of `num_attended`
    seq_length: int  # returned by `get_seq_length`


class SlotCache(Cache):
    """
    A cache of `rows` x `capacity` slots.

    `reserve` makes room for a forward, `set_next_indices` sets where its tokens go, and the forward's mask decides
    what each query attends to. The caller keeps the lengths of rows, so rolling back is free.

    A cache is made empty, or by [`adopt`], which moves the tokens of a cache of `generate` into its slots.

    Args:
        rows (`int`): Batch rows.
        capacity (`int`): Initial slots per row; `reserve` grows them when they run out. The last slot is never
            attended to: rejected tokens are written there.
        ring (`Ring`, *optional*): Which slots are reused, in layers that the first forward adds; `adopt` gives each
            layer its own.
        fixed_shapes (`bool`): For graphs: capacities are powers of two, and attention always sees all slots.

    Attributes:
        columns (`int`): Columns of the adopted cache, padding included; 0 if none was adopted.
        num_attended (`int`): Slots of a row that attention sees in layers without a ring, `K` in shapes: those in use,
            and unused ones, which masks hide.
        next_indices (`tuple[torch.LongTensor]`): Groups `[R, n]` of the indices of the next forward's tokens;
            negative: rejected.
        probe_lengths (`ProbeLengths`, *optional*): Set by a probe.
    """

    def __init__(self, rows: int, capacity: int, ring: Ring | None = None, fixed_shapes: bool = False):
        # A partial, not a closure: in a deep copy, new layers belong to the copy.
        super().__init__(layer_class_to_replicate=functools.partial(SlotLayer, self, ring))
        self.rows = rows
        self.ring = ring
        self.fixed_shapes = fixed_shapes
        if fixed_shapes:
            self.capacity = max(MIN_BUCKET, 1 << capacity.bit_length())
        else:
            self.capacity = _round_up(capacity + 1, CAPACITY_STEP)
        self.columns = 0
        self.num_attended = 0
        self.probe_lengths: ProbeLengths | None = None
        self.next_indices: tuple[torch.LongTensor, ...] = ()
        self._slot_indices: dict[Ring | None, tuple[SlotIndex, ...]] = {}

    def reserve(self, used: int, exactly: bool = False) -> None:
        """
        Make room for indices `0` to `used - 1` of each row. Attention then sees their slots, `exactly` or rounded up.
        """
        if self.fixed_shapes:
            if used >= self.capacity:
                self._resize(1 << used.bit_length())
            self.num_attended = self.capacity
            return
        if self.probe_lengths is not None:
            used = max(used, self.probe_lengths.min_attended)
        if used >= self.capacity:
            self._resize(_round_up(max(used, self.capacity * 9 // 8) + 1, CAPACITY_STEP))
        self.num_attended = used if exactly else min(_round_up(used, ATTENDED_STEP), self.capacity)

    def _resize(self, capacity: int) -> None:
        self.capacity = capacity
        for layer in self.filled_layers:
            layer.resize()

    @property
    def slot_layers(self) -> list[SlotLayer]:
        """The layers with slots; recurrent layers of a hybrid do not grow."""
        return [layer for layer in self.layers if isinstance(layer, SlotLayer)]

    @property
    def filled_layers(self) -> list[SlotLayer]:
        """The layers that hold keys; others share the keys of a layer before them, or have not been run yet."""
        return [layer for layer in self.slot_layers if layer.is_initialized]

    def ring_of(self, window: int | None) -> Ring | None:
        """The ring of the layers with a window; `None`: they keep all tokens."""
        return next((layer.ring for layer in self.slot_layers if layer.ring and layer.ring.window == window), None)

    def capacity_of(self, ring: Ring | None) -> int:
        """Slots of a row in a layer."""
        if ring is None:
            return self.capacity
        return min(_round_up(ring.sink + ring.size + 1, CAPACITY_STEP), self.capacity)

    def num_attended_of(self, ring: Ring | None) -> int:
        """Slots that attention sees in a layer."""
        if ring is None:
            return self.num_attended
        return min(self.num_attended, _round_up(ring.sink + ring.size, ATTENDED_STEP))

    def set_next_indices(self, *indices: torch.LongTensor) -> None:
        """
        Set where the tokens of the next forward go.

        Args:
            indices (`torch.LongTensor`): One or more groups `[R, n]` of token indices, in the order of the forward's
                inputs; negative: rejected. Groups are written one after another; within one, no two tokens may share a
                slot.
        """
        self.next_indices = indices
        self._slot_indices = {}
        # Built here, since the layers' `update` may be part of a compiled forward, which then only reads them.
        for ring in {self.ring, *(layer.ring for layer in self.slot_layers)}:
            self.slot_indices(ring)

    def slot_indices(self, ring: Ring | None) -> tuple[SlotIndex, ...]:
        """Where the tokens of the next forward go in a layer, a [`SlotIndex`] for each group."""
        if ring not in self._slot_indices:
            rejected_slot = self.capacity_of(ring) - 1
            groups = []
            for indices in self.next_indices:
                slots = indices if ring is None else ring.slots(indices)
                groups.append(SlotIndex(torch.where(slots < 0, rejected_slot, slots)))
            self._slot_indices[ring] = tuple(groups)
        return self._slot_indices[ring]

    def copy_tokens(self, source: torch.LongTensor, destination: torch.LongTensor) -> None:
        """Copy the keys and values of tokens with indices `[R, n]` to other indices of the same row."""
        for ring in {layer.ring for layer in self.slot_layers}:
            reading = SlotIndex(source if ring is None else ring.slots(source))
            writing = SlotIndex(destination if ring is None else ring.slots(destination))
            for layer in self.filled_layers:
                if layer.ring == ring:
                    for buffer in (layer.keys, layer.values):
                        writing.write(buffer, reading.read(buffer))

    @staticmethod
    def can_adopt(cache: Cache) -> bool:
        """
        Whether every layer of a cache is empty, ordinary or sliding-window, so that its tokens fit into slots, and
        nothing else happens when they are written.
        """
        if getattr(cache.update, "__func__", None) is not Cache.update:
            return False
        stateful = (CacheLayerMixin, LinearAttentionCacheLayerMixin)
        layers = [layer for layer in cache.layers if isinstance(layer, stateful)]
        return all(type(layer) in (DynamicLayer, DynamicSlidingWindowLayer) for layer in layers)

    @classmethod
    def adopt(
        cls, cache: Cache, padding: list[int], max_candidates: int = 0, fixed_shapes: bool = False
    ) -> "SlotCache":
        """
        Move a prefilled, left-padded cache into slots, so that every row starts at slot 0. Layers with a sliding
        window get a ring of slots.

        The prompt is in memory once: keys and values of the source are freed as soon as they are copied.

        Args:
            cache (`Cache`): With keys in dynamic and sliding-window layers only. Recurrent states, and layers without
                states, are shared with it.
            padding (`list[int]`): Padding columns at the start of each row.
            max_candidates (`int`): Maximum number of tokens of a round's candidates, anchor included.
            fixed_shapes (`bool`): As for the class.
        """
        columns = cached_length(cache)
        slots = cls(len(padding), columns + CAPACITY_STEP, fixed_shapes=fixed_shapes)
        slots.columns = columns
        margin = max(MIN_RING_MARGIN, max_candidates)
        try:
            for layer in cache.layers:
                slot_layer = slots.slot_layer(layer, margin) if isinstance(layer, CacheLayerMixin) else layer
                slots.layers.append(slot_layer)
                if isinstance(slot_layer, SlotLayer) and layer.is_initialized:  # else it shares another layer's keys
                    slot_layer.adopt(layer, padding, columns)
        except BaseException:  # out of memory, or interrupted
            slots.write_back(cache, padding, columns)
            raise
        return slots

    def slot_layer(self, layer: CacheLayerMixin, margin: int) -> SlotLayer:
        """The empty layer of slots that takes a layer's tokens."""
        if type(layer) is DynamicSlidingWindowLayer:
            return SlotLayer(self, Ring(layer.sliding_window, layer.sliding_window + margin))
        return SlotLayer(self)

    def free(self) -> None:
        """Free all slots now: layers and cache refer to each other and would wait for the garbage collector."""
        self.layers.clear()
        self.layer_class_to_replicate = None

    def write_back(self, cache: Cache, padding: list[int], columns: int) -> Cache:
        """
        Write the slots back into the cache they were adopted from, as `columns` left-padded columns: an ordinary cache
        that continues the conversation with or without a drafter. Each layer's slots are freed once they are copied.
        """
        for slot_layer, layer in zip(self.layers, cache.layers):  # fewer slot layers if `adopt` was interrupted
            if isinstance(slot_layer, SlotLayer):
                slot_layer.write_back(layer, padding, columns)
        return cache


def cached_length(cache) -> int:
    """Columns that a cache holds; 0 if all layers are recurrent, which do not count them."""
    if cache is None or not any(isinstance(layer, CacheLayerMixin) for layer in cache.layers):
        return 0
    return cache.get_seq_length()


def common_prefix_length(ids: Sequence[int], other_ids: Sequence[int]) -> int:
    """How many tokens two sequences of ids have in common at their start: what a cache of one holds of the other."""
    for number, (token, other_token) in enumerate(zip(ids, other_ids, strict=False)):
        if token != other_token:
            return number
    return min(len(ids), len(other_ids))


def recurrent_states(layers) -> list[torch.Tensor]:
    """The states `[R, ...]` of all recurrent layers among `layers`."""
    states = []
    for layer in layers:
        if isinstance(layer, LinearAttentionCacheLayerMixin):
            states += [*layer.conv_states.values(), *layer.recurrent_states.values()]
    return [state for state in states if state is not None]


def _round_up(length: int, step: int) -> int:
    return -(-length // step) * step
