"""
A target's responses to many prompts, from a batch that is always full: a finished row is immediately replaced by the
next prompt, so that no row waits for the longest.
"""

import copy
import inspect
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice

import torch
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList, PreTrainedModel

from dflash_hf.decoding.acceptance import Block, argmax_token
from dflash_hf.decoding.probe import capabilities_of
from dflash_hf.decoding.session import SlotSession
from dflash_hf.decoding.slots import SlotCache, SlotLayer
from dflash_hf.modeling.target_dflash import length_dependent_rope
from dflash_hf.targets.features import empty_cache, input_device
from dflash_hf.targets.generation import eos_ids, generate_one, max_answer_tokens, without_token
from dflash_hf.targets.memory import free_memory
from dflash_hf.targets.unsafe_hooks import unsafe_hook


Prompts = Iterable[tuple[object, Sequence[int]]]  # number, or another key, and ids

# Generation settings that a full batch supports; with others, `generate` decodes.
_SUPPORTED_SETTINGS = {
    "do_sample",
    "temperature",
    "top_p",
    "top_k",
    "suppress_tokens",
    "max_new_tokens",
    "use_cache",
    "eos_token_id",
    "pad_token_id",
    "bos_token_id",
    "max_length",
    "transformers_version",
}
_REMEMBERED = 16  # prompts whose logits are kept in case they repeat: a fifth of the time of short samples
_PIECE = 512  # prompt tokens read at a time: bounds the mask
_LIKELY = 1024  # top tokens tried before the whole vocabulary is sorted
_ROWS = 16  # batch size with `generate`


class Choice:
    """
    How the next token is chosen: the likeliest, or drawn. Each row draws with its own generator, so that its text
    depends only on the seed and its number, whatever else is in the batch.

    Args:
        config (`GenerationConfig`): `do_sample`, `temperature`, `top_k`, `top_p` and `suppress_tokens`.
        seed (`int`): Seed of all rows.
    """

    def __init__(self, config: GenerationConfig, seed: int):
        self.do_sample = bool(config.do_sample)
        self.seed = seed
        self.temperature = 1.0 if config.temperature is None else config.temperature
        self.top_k = config.top_k or 0
        self.top_p = 1.0 if config.top_p is None else config.top_p
        self.suppressed = list(config.suppress_tokens or [])

    def generator(self, number) -> random.Random:
        """The generator of a row."""
        return random.Random(f"{self.seed} {number}")

    def __call__(self, logits: torch.Tensor, generators: Sequence[random.Random]) -> torch.LongTensor:
        """The next token `[R]` of each row, from logits `[R, V]`."""
        scores = logits.float()
        if self.suppressed:
            scores[:, self.suppressed] = -torch.inf
        if not self.do_sample:
            return argmax_token(scores)
        chances = [generator.random() for generator in generators]
        chances = torch.tensor(chances, dtype=torch.double, device=scores.device)
        return sample_tokens(scores / self.temperature, chances, self.top_k, self.top_p)


def sample_tokens(scores: torch.Tensor, chances: torch.Tensor, top_k: int = 0, top_p: float = 1.0) -> torch.LongTensor:
    """
    Inverse-transform sampling: the token of each row `[R]` at which the cumulative distribution, likeliest tokens
    first, reaches the row's chance.

    Args:
        scores (`torch.Tensor`): `[R, V]`.
        chances (`torch.Tensor`): `[R]`, uniform in [0, 1).
        top_k, top_p: Restrict the distribution to the `top_k` likeliest tokens (0: all), then to the nucleus `top_p`.
    """
    size = min(top_k or _LIKELY, scores.shape[1])
    top, ids = scores.topk(size)  # [R, K], descending; sorting a whole vocabulary takes longer than a small forward
    candidates = top if top_k else scores
    shares = (top.double() - candidates.double().logsumexp(-1, keepdim=True)).exp()  # [R, K]
    before = shares.cumsum(-1) - shares  # of likelier tokens
    nucleus = shares.where(before < top_p, 0.0)
    if top_p < 1 or top_k:
        total = nucleus.sum(-1, keepdim=True)
    else:
        total = torch.ones_like(before[:, :1])
    reached = nucleus.cumsum(-1)
    places = torch.searchsorted(reached, (chances[:, None] * total), right=True).clamp(max=size - 1)
    tokens = ids.gather(1, places)[:, 0]
    # The top tokens may cover less than the nucleus, or less than the chance.
    wider = (before[:, -1] < top_p) & ((top_p < 1) | (reached[:, -1] <= chances))
    if not top_k and size < scores.shape[1] and wider.any():
        tokens[wider] = sample_tokens(scores[wider], chances[wider], scores.shape[1], top_p)
    return tokens


def decodes_in_slots(target: PreTrainedModel, config: GenerationConfig) -> bool:
    """Whether a full batch decodes as `generate` does: a cache that lives in slots, and only plain settings."""
    if not _has_supported_settings(config) or _rotates_by_length(target):
        return False
    return not target.training and unsafe_hook(target) is None and capabilities_of(target).session is SlotSession


def _rotates_by_length(target: PreTrainedModel) -> bool:
    """Whether its rotary frequencies depend on the length of the text."""
    return bool(length_dependent_rope(target.config))


def _rope(target: PreTrainedModel) -> dict | None:
    """The rotary embedding's parameters; `None` of a target without one."""
    return getattr(target.config.get_text_config(decoder=True), "rope_parameters", None)


def _has_supported_settings(config: GenerationConfig) -> bool:
    """Whether a [`Choice`] supports all settings."""
    for name, value in config.to_diff_dict().items():
        if value not in (None, False) and not name.startswith("_") and name not in _SUPPORTED_SETTINGS:
            return False
    return True


def generate_responses(
    target: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    mask_token_id: int | None,
    batch_size: int | None = None,
    generation_config: GenerationConfig | None = None,
    seed: int = 0,
) -> list[list[int]]:
    """
    The target's own responses to prompts, the text that a drafter should be trained on.

    The mask token is suppressed: in the data it would mean both itself and an unknown token.

    Args:
        prompts (`Sequence[Sequence[int]]`): Prompt ids, chat template applied.
        max_new_tokens (`int`): Longest response.
        mask_token_id (`int`): The drafter's mask token; `None` if it is not known yet.
        batch_size (`int`, *optional*): Rows that decode together; see [`~dflash_hf.synthetic.responses.responses`].
        generation_config (`GenerationConfig`): Sampling, end-of-sequence ids. Default: the target's.
        seed (`int`): Seed for sampling.

    Returns:
        `list[list[int]]`: Responses in the order of `prompts`, each up to and including its end-of-sequence token.

    Raises:
        `ValueError`: a prompt is empty, a text, or fills the target's context.
    """
    text = next((prompt for prompt in prompts if isinstance(prompt, str)), None)
    if text:
        raise ValueError(f'prompts holds the text {text[:40]!r}; pass its ids, `tokenizer(text)["input_ids"]`.')
    lengths = [len(prompt) for prompt in prompts]
    if 0 in lengths:
        raise ValueError(
            f"prompts[{lengths.index(0)}] is empty; start it with the target's beginning-of-sequence token."
        )
    max_answer_tokens(target, max(lengths, default=0), max_new_tokens)
    config = without_token(generation_config or target.generation_config, mask_token_id)
    # Prompts of similar length next to each other.
    numbered = sorted(enumerate(prompts), key=lambda numbered_prompt: len(numbered_prompt[1]))
    response_of = dict(responses(target, numbered, max_new_tokens, config, batch_size, seed))
    return [response_of[i] for i in range(len(prompts))]


def responses(
    target: PreTrainedModel,
    prompts: Prompts,
    max_new_tokens: int,
    config: GenerationConfig,
    rows: int | None = None,
    seed: int = 0,
) -> Iterator[tuple]:
    """
    Yield responses as they finish, each up to and including its end-of-sequence token.

    A target whose cache lives in slots decodes in a batch that is always full, any other batch by batch. Prompts are
    taken one by one as rows become free, and asked for again when a row has finished: an iterator that had nothing may
    go on. Consecutive prompts of similar length save work, and one that continues a row that has just finished is read
    from where that ends.

    Args:
        target (`PreTrainedModel`): The target.
        prompts: A number (or another key) and the ids of each prompt.
        max_new_tokens (`int`): Longest response; shorter where the target's context is full.
        config (`GenerationConfig`): Sampling, end-of-sequence ids.
        rows (`int`, *optional*): Rows of the batch. Default: 64 in slots, 16 otherwise; see [`rows_that_fit`].
        seed (`int`): Seed for sampling. A row's samples depend on it and the prompt's number; with settings that only
            `generate` supports, also on the other prompts of the batch.

    Yields:
        The number of a prompt, and its response.

    Raises:
        `ValueError`: a prompt fills the target's context.
    """
    if decodes_in_slots(target, config):
        choice = Choice(config, seed)
        yield from _full_batch(target, iter(prompts), max_new_tokens, choice, eos_ids(config), rows or 64)
    else:
        yield from _batch_by_batch(target, iter(prompts), max_new_tokens, config, rows or _ROWS, seed)


@dataclass
class _Row:
    """A prompt that is being answered."""

    number: object
    ids: Sequence[int]
    limit: int | None
    generator: random.Random
    text: list[int] = field(default_factory=list)

    @property
    def slot(self) -> int:
        """Slot of the last token, which has not been read yet."""
        return len(self.ids) + len(self.text) - 1


class _Cache(SlotCache):
    """Slots without rings: after any beginning of a row's text another one may follow."""

    def slot_layer(self, layer, margin: int) -> SlotLayer:
        return SlotLayer(self)


class _Session(SlotSession):
    """A session over such a cache."""

    cache_class = _Cache


class _Slots:
    """The places of a batch: rows of a target's cache, each filled, decoded and replaced independently."""

    def __init__(self, target, rows: int):
        self.target = target
        self.rows = rows
        self.device = input_device(target)
        accepted = inspect.signature(target.forward).parameters
        last_only = {"logits_to_keep": torch.tensor([-1])} if "logits_to_keep" in accepted else {}
        offset = torch.zeros(rows, 1, dtype=torch.long, device=self.device)
        self.session = _Session(target, empty_cache(target), [0] * rows, offset, {})
        self.session.verify(Block(torch.zeros_like(offset)))  # allocates the slots
        self.reader = _Session(target, empty_cache(target), [0], offset[:1], last_only)  # of a single place
        self.after: dict[tuple, torch.Tensor] = {}  # logits after the latest prompts

    def read(self, place: int, ids: Sequence[int], texts: dict[int, Sequence[int]]) -> torch.Tensor:
        """
        Put a prompt into a place, and return the logits `[1, V]` after it. What another place has already read of it
        is copied; `texts` are those that places hold.
        """

        def usefulness(other: int) -> tuple[int, bool]:
            """What is compared; of two equal ones, the place itself needs no copy."""
            return _common_length(texts[other], ids), other == place

        source = max(texts, key=usefulness, default=place)
        shared = _common_length(texts.get(source, ()), ids)
        self.session.cache.reserve(len(ids))
        self.session.cache.copy_prefix(source, place, shared)
        self.reader.cache.view_row(self.session.cache, place)
        if shared == len(ids) and tuple(ids) in self.after:
            return self.after[tuple(ids)]
        for start in range(min(shared, len(ids) - 1), len(ids), _PIECE):
            piece = torch.tensor([ids[start : start + _PIECE]], device=self.device)
            self.reader.lengths = [start]
            logits = self.reader.verify(Block(piece))[0][:, -1]
        if len(self.after) == _REMEMBERED:  # the oldest goes
            self.after.pop(next(iter(self.after)))
        self.after[tuple(ids)] = logits
        return logits

    def step(self, tokens: dict[int, tuple[int, int]]) -> torch.Tensor:
        """The logits `[len(tokens), V]` after the given tokens, which are given with their slots by place."""
        of_places = [tokens.get(place, (0, 0)) for place in range(self.rows)]  # unused places write to slot 0
        self.session.lengths = [slot for _, slot in of_places]
        ids = torch.tensor([[token] for token, _ in of_places], device=self.device)
        return self.session.verify(Block(ids))[0][list(tokens), -1]

    @property
    def memory(self) -> int:
        """Bytes of the slots, which grow with the text, and of the scores."""
        vocab_size = self.target.get_output_embeddings().weight.shape[0]
        return self.session.cache.nbytes + self.rows * vocab_size * 16

    def keep(self, places: list[int]) -> None:
        """Drop all other places."""
        self.rows = len(places)
        self.session.cache.keep_rows(places)
        self.session.first_positions = self.session.first_positions[places]


def _common_length(text: Sequence[int], other: Sequence[int]) -> int:
    """How many ids two texts have in common at their beginning."""
    for i, (token, other_token) in enumerate(zip(text, other)):
        if token != other_token:
            return i
    return min(len(text), len(other))


@torch.no_grad()
def _full_batch(target, prompts, max_new_tokens: int, choice: Choice, stops: set[int], rows: int):
    """The rows of [`responses`], from a batch that is always full."""
    slots = _Slots(target, rows)
    running: dict[int, _Row] = {}  # by place
    ended: dict[int, Sequence[int]] = {}  # texts of places whose rows have just ended
    while True:
        # 1. Put the next prompts into the free places, each where the text that it continues has just ended.
        free = set(range(slots.rows)) - running.keys()
        for number, ids in islice(prompts, len(free)):
            limit = max_answer_tokens(target, len(ids), max_new_tokens)
            place = _best_place(free, ended, ids)
            free.remove(place)
            texts = {running_place: row.ids for running_place, row in running.items()}
            logits = slots.read(place, ids, {**texts, **ended})
            ended.pop(place, None)
            row = _Row(number, ids, limit, choice.generator(number))
            row.text.append(int(choice(logits, [row.generator])))
            running[place] = row
        ended.clear()
        if not running:
            return
        # 2. Finished rows leave their places, which are filled first.
        for place, row in list(running.items()):
            if row.text[-1] in stops or len(row.text) == row.limit:
                running.pop(place)
                ended[place] = (*row.ids, *row.text[:-1])  # the last token was not read
                yield row.number, row.text
        if ended:
            continue
        # 3. No prompts are left: drop free places from time to time.
        if 4 * len(running) <= 3 * slots.rows:
            slots.keep(list(running))
            running = dict(enumerate(running.values()))
        # 4. One more token for each row.
        logits = slots.step({place: (row.text[-1], row.slot) for place, row in running.items()})
        tokens = choice(logits, [row.generator for row in running.values()]).tolist()
        for row, token in zip(running.values(), tokens, strict=True):
            row.text.append(token)


def _best_place(free: set[int], ended: dict[int, Sequence[int]], ids: Sequence[int]) -> int:
    """
    The free place for a prompt: the one whose text it continues the furthest; then one without a text, which other
    prompts may continue; then the first.
    """

    def fitness(place: int) -> tuple[int, bool, int]:
        """What is compared, in this order."""
        return _common_length(ended.get(place, ()), ids), place not in ended, -place

    return max(free, key=fitness)


def _batches(target, prompts, max_new_tokens: int, rows: int):
    """
    Batches of numbers, ids and room for the answer. Rows that have ended go on to the end of the longest: where
    positions are learned, or frequencies depend on the length, all rows of a batch have equal room.
    """
    needs_equal_room = not _rope(target) or _rotates_by_length(target)
    while True:
        batch = []
        for number, ids in islice(prompts, rows):
            batch.append((number, ids, max_answer_tokens(target, len(ids), max_new_tokens)))
        if not batch:
            return
        if not needs_equal_room:
            yield batch
            continue
        for equal_room in dict.fromkeys(room for *_, room in batch):
            yield [row for row in batch if row[2] == equal_room]


@torch.no_grad()
def _batch_by_batch(target, prompts, max_new_tokens: int, config, rows: int, seed: int):
    """The rows of [`responses`], by `generate`."""
    stops = eos_ids(config)
    config = copy.deepcopy(config)
    if config.pad_token_id is None:
        config.pad_token_id = min(stops, default=0)
    config.max_length = config.num_return_sequences = None
    config.return_dict_in_generate = False  # one row of tokens for each prompt
    pad = config.pad_token_id
    choice = None
    if config.do_sample and _has_supported_settings(config):  # each row draws by itself, see `_Drawn`
        choice = Choice(config, seed)
        config.do_sample = False
        config.temperature = config.top_p = config.top_k = None
    for batch in _batches(target, prompts, max_new_tokens, rows):
        config.max_new_tokens = max(room for *_, room in batch)
        width = max(len(ids) for _, ids, _ in batch)
        # Left padding: new tokens must follow the prompt directly.
        input_ids = torch.tensor([[pad] * (width - len(ids)) + list(ids) for _, ids, _ in batch])
        attention_mask = torch.tensor([[0] * (width - len(ids)) + [1] * len(ids) for _, ids, _ in batch])
        processors = [] if choice is None else [_Drawn(choice, [number for number, *_ in batch])]
        with torch.random.fork_rng([target.device] if target.device.type == "cuda" else []):
            torch.manual_seed(random.Random(f"{seed} {batch[0][0]}").getrandbits(63))
            output = target.generate(
                input_ids=input_ids.to(target.device),
                attention_mask=attention_mask.to(target.device),
                generation_config=config,
                logits_processor=LogitsProcessorList(processors),
            )  # [n, width + new]
        for (number, _, room), text in zip(batch, output[:, width:].tolist(), strict=True):
            end = next((i + 1 for i, token in enumerate(text) if token in stops), room)
            yield number, text[: min(end, room)]


def responses_to_images(target, prompts: Prompts, max_new_tokens: int, config, seed: int = 0) -> Iterator[tuple]:
    """As [`responses`], of [`~dflash_hf.data.images.ImagePrompt`]s, one at a time."""
    config = copy.deepcopy(config)
    config.max_length = config.num_return_sequences = None
    for number, prompt in prompts:
        config.max_new_tokens = max_answer_tokens(target, len(prompt), max_new_tokens)
        with torch.random.fork_rng([target.device] if target.device.type == "cuda" else []):
            torch.manual_seed(random.Random(f"{seed} {number}").getrandbits(63))
            output = generate_one(target, prompt, generation_config=config)
        yield number, output.sequences[0, len(prompt) :].tolist()


class _Drawn(LogitsProcessor):
    """Leaves only the tokens of a [`Choice`] to greedy decoding."""

    def __init__(self, choice: Choice, numbers: list[int]):
        self.choice = choice
        self.generators = [choice.generator(number) for number in numbers]

    def __call__(self, input_ids: torch.LongTensor, scores: torch.Tensor) -> torch.Tensor:
        tokens = self.choice(scores, self.generators)
        return torch.full_like(scores, -torch.inf).scatter(1, tokens[:, None], 0.0)


@torch.no_grad()
def rows_that_fit(target: PreTrainedModel, config: GenerationConfig, length: int, texts: int) -> int:
    """
    How many rows decode together: 128 on a CPU, 256 elsewhere, at most half of the texts, since a batch that is never
    full is slow, and as many as half of the free memory holds. Where batches are not always full, 16.

    Args:
        target (`PreTrainedModel`), config (`GenerationConfig`): The model and its generation settings.
        length (`int`): Tokens of a typical row.
        texts (`int`): Number of texts wanted.
    """
    if not decodes_in_slots(target, config):
        return _ROWS
    slots = _Slots(target, 1)
    device = input_device(target)
    slots.step({0: (0, max_answer_tokens(target, 1, length))})  # allocates its buffers
    # Of a target on several devices, each holds about as many layers; an offloaded one's weights are on none.
    devices = {parameter.device for parameter in target.parameters() if not parameter.is_meta} or {device}
    rows_in_memory = int(len(devices) * min(map(free_memory, devices)) / 2 / slots.memory)
    most = 128 if device.type == "cpu" else 256
    return max(1, min(most, texts // 2, rows_in_memory))
