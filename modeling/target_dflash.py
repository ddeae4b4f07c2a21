"""What a drafter needs from a frozen target: its layers' outputs, its raw embedding table, its head."""

import contextlib
import functools
import inspect
import math
import threading
import weakref
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import DynamicCache, masking_utils
from transformers.cache_utils import LinearAttentionCacheLayerMixin
from transformers.utils import logging

from .accept_dflash import Block, Verdict


logger = logging.get_logger(__name__)

# Libraries whose hooks and replaced forwards only place, shard or adapt a model.
_KNOWN = ("torch", "transformers", "accelerate", "peft", "kernels", "dflash_hf")
_OURS = "target_dflash"  # hooks of this file, of whichever copy of it

# The name of a cache in forwards, outputs and masks; transformers 5.24 renamed `past_key_values`.
CACHE_NAME = (
    "cache" if "cache" in inspect.signature(masking_utils.create_causal_mask).parameters else "past_key_values"
)


def text_depth(target_config) -> int:
    """Decoder layers of a target's text stack; LongCat counts the two attentions of a layer as `num_hidden_layers`."""
    text = target_config.get_text_config()
    return getattr(text, "num_layers", None) or text.num_hidden_layers


def decoder_layers(target) -> nn.ModuleList:
    """
    The decoder layers of a target's text stack (of a multimodal wrapper too).

    Raises:
        `ValueError`: no list with as many layers as the configuration counts is found.
    """
    depth = text_depth(target.config)
    for stack in (target.get_decoder(), target.base_model):  # ModernBERT's decoder is part of its head
        for module in stack.modules():
            if isinstance(module, nn.ModuleList) and len(module) == depth:
                return module
    raise ValueError(
        f"{type(target).__name__} has no list of {depth} decoder layers, so its features cannot be read; use a "
        "decoder-only transformer as the target."
    )


def running_device(module: nn.Module) -> torch.device:
    """The device of a module's weight, or, where accelerate has offloaded it, the one it is fetched to."""
    device = module.weight.device
    if device.type != "meta":
        return device
    if not hasattr(module, "_hf_hook"):
        raise ValueError(f"A {type(module).__name__} is on the meta device, without values: load the model first.")
    return torch.device(module._hf_hook.execution_device)


def input_device(target) -> torch.device:
    """The device on which a target expects token ids."""
    return running_device(target.get_input_embeddings())


def cache_argument(target) -> str:
    """The name under which `generate` keeps a target's cache and passes it to the forward."""
    accepted = inspect.signature(target.forward).parameters
    if CACHE_NAME in accepted or CACHE_NAME == "cache":  # upstream translates `cache` for forwards that say otherwise
        return CACHE_NAME
    return "cache_params" if "cache_params" in accepted else CACHE_NAME


def empty_cache(target) -> DynamicCache:
    """The cache that `generate` makes by default."""
    return DynamicCache(config=target.config.get_text_config(decoder=True))


@torch.no_grad()
def try_out(target, cache=None) -> None:
    """Run a short forward, to observe what happens in it."""
    ids = torch.ones(2, 3, dtype=torch.long, device=input_device(target))
    target(input_ids=ids, use_cache=True, **{cache_argument(target): empty_cache(target) if cache is None else cache})


def raw_embedding(target, input_ids: torch.LongTensor) -> torch.Tensor:
    """`[..., H]` rows of the target's embedding table, without the scale or norm that its embedding module may add."""
    module = target.get_input_embeddings()
    if module.weight.device.type != "meta":
        return nn.functional.embedding(input_ids, module.weight)
    module._hf_hook.pre_forward(module)  # offloaded: fetch the weights, as before any forward
    try:
        return nn.functional.embedding(input_ids, module.weight)
    finally:
        module._hf_hook.post_forward(module, None)


_running: ContextVar["FeatureTap | None"] = ContextVar("dflash_tap", default=None)
_lock = threading.Lock()
# The hooks on each module while calls need them: how many calls, and the handle.
_hooks: "weakref.WeakKeyDictionary[nn.Module, dict[Callable, list]]" = weakref.WeakKeyDictionary()


traced: list["FeatureTap"] = []  # of the forward that torch.compile traces, which knows no context variables


def _tap() -> "FeatureTap | None":
    # Not `is_compiling`, which is true in all threads while one compiles.
    if torch.compiler.is_dynamo_compiling():
        return traced[-1] if traced else None
    return _running.get()


def _input(layer, args, kwargs=None) -> None:  # none in a thread that runs while the hook is registered
    if (tap := _tap()) is not None:
        states = args[0] if args else (kwargs or {}).get("hidden_states")  # remote code may name it differently
        if states is not None:
            tap.put((layer, _input), states)


def _output(layer, args, output) -> None:
    if (tap := _tap()) is not None:
        tap.put((layer, _output), output if isinstance(output, torch.Tensor) else output[0])


def _positions(target, args, kwargs=None) -> None:
    if (tap := _tap()) is not None and kwargs is not None:
        tap.positions = kwargs.get("position_ids")


def is_tap(hook) -> bool:
    """Whether a hook is one of a [`FeatureTap`], of whichever copy of this file."""
    return _home(hook).endswith(_OURS)


def attach(hooks) -> None:
    """Put each of these hooks on its module once, however many calls need it; `hooks` are pairs of both."""
    with _lock:
        for module, hook in hooks:
            uses = _hooks.setdefault(module, {}).setdefault(hook, [0, None])
            if not uses[0]:
                for held in (module._forward_hooks, module._forward_pre_hooks):  # of a copy made during a call
                    for key in [key for key, one in held.items() if one is hook]:
                        del held[key]
                        module._forward_pre_hooks_with_kwargs.pop(key, None)
                if hook is _output:
                    uses[1] = module.register_forward_hook(hook)
                else:
                    uses[1] = module.register_forward_pre_hook(hook, with_kwargs=True)
            uses[0] += 1


def detach(hooks) -> None:
    """Take these hooks off if no other call needs them."""
    with _lock:
        for module, hook in hooks:
            uses = _hooks[module][hook]
            uses[0] -= 1
            if not uses[0]:
                _hooks[module].pop(hook)[1].remove()


class FeatureTap:
    """
    Collects the outputs of a target's decoder layers in the forwards of one call.

    Hooks lie on the layers while a tap is open on them. They do nothing but in a forward that runs `with
    tap.running()` in the same thread, so other calls of the same target do not notice them: transformers' own way of
    capturing outputs (`utils/output_capturing.py`). Its `output_hidden_states=[i]` is not used: its meaning changed in
    5.23, and its last entry is taken after the final norm.

    Args:
        target (`PreTrainedModel`): The target.
        layer_ids (`list[int]`): Id `i` is the output of decoder layer `i`, -1 the input of the first one.
        consume (`callable`, *optional*): Called with the layers' outputs, `[N, S, H]` each, as soon as a forward has
            produced the last of them; they are not kept.
    """

    def __init__(self, target, layer_ids: list[int], consume=None):
        layers = decoder_layers(target)
        self.layer_ids = tuple(layer_ids)
        self.places = [(layers[max(i, 0)], _input if i < 0 else _output) for i in layer_ids]
        self.hooks = {*self.places, (target, _positions)}
        self.consume = consume
        self.captured: dict[tuple, torch.Tensor] = {}
        self.positions: torch.LongTensor | None = None  # `position_ids` of the last forward

    def __enter__(self):
        attach(self.hooks)
        return self

    def __exit__(self, *exc):
        detach(self.hooks)
        self.captured.clear()

    @contextlib.contextmanager
    def running(self):
        """Collect the forwards that run in this context."""
        token = _running.set(self)
        try:
            yield
        finally:
            _running.reset(token)

    def put(self, place: tuple, output: torch.Tensor) -> None:
        """Keep an output of a layer, if it is among those that are read."""
        if place in self.places:
            self.captured[place] = output
            if self.consume is not None and len(self.captured) == len({*self.places}):
                self.consume(*self._layers())

    def take(self) -> torch.Tensor:
        """Return the features of the last forward, `[N, S, L * H]`, in the order of `layer_ids`, and drop them."""
        layers = self._layers()
        return torch.cat([layer.to(layers[0].device) for layer in layers], dim=-1)

    def _layers(self) -> list[torch.Tensor]:
        captured, self.captured = self.captured, {}
        return [captured[place] for place in self.places]


def why_hidden(target) -> str | None:
    """Why other code may see or change drafted tokens, or `None`: hooks, compiled or replaced forwards."""
    for module in target.modules():
        replaced = vars(module).get("forward")
        if module._compiled_call_impl is not None or hasattr(replaced, "_torchdynamo_orig_callable"):
            return f"{type(module).__name__} is compiled; pass the model as it was before"
        if replaced is not None and not _is_known(replaced):
            return f"the forward of a {type(module).__name__} is replaced"
        for hook in (*module._forward_pre_hooks.values(), *module._forward_hooks.values()):
            if not _is_known(hook):
                return f"a hook of {_home(hook)} on a {type(module).__name__} would see drafted tokens"
    return None


def _is_known(function) -> bool:
    """Whether a hook or forward only places, shards or adapts, by its library; an activated LoRA counts tokens."""
    known = is_tap(function) or _home(function).partition(".")[0] in _KNOWN
    return known and not getattr(function, "keywords", {}).get("alora_offsets")


def _home(function) -> str:
    """The module in which the code of a function, method or partial stands."""
    function = getattr(function, "func", function)
    return getattr(function, "__globals__", {}).get("__name__") or type(function).__module__


class Support(NamedTuple):
    """What a target supports, found by trying."""

    session: Any  # how its cache is rolled back; `None` if no way restores it
    error: float  # the largest relative error after rolling back
    pads: bool = True  # whether rows with padding on the left can be drafted
    trees: bool = False  # whether trees can be verified
    features: frozenset[int] = frozenset()  # layers with an output of one vector per token, -1: their input
    failure: str | None = None  # why it could not be tried this time
    attention: str | None = None  # the attention, if it takes no masks of drafts

    def why_plain(self, name: str, layer_ids: list[int], mask: torch.Tensor | None) -> str | None:
        """Why a drafter that reads these layers cannot draft for a prompt with this mask, or `None`."""
        if self.attention is not None:
            return (
                f"{name} was loaded with attn_implementation={self.attention!r}, which takes no mask of a draft; load "
                "it with attn_implementation='sdpa'"
            )
        if self.failure is not None:
            return f"{name} could not be tried on a few tokens ({self.failure})"
        if not self.features:
            return f"the decoder layers of {name} are in no list, or none has an output of one vector per token"
        if self.session is None:
            if math.isfinite(self.error):
                return (
                    f"{name} computes different logits for several tokens than for one at a time (relative error "
                    f"{self.error:.2g}): its cache cannot be rolled back, or its weights are quantised dynamically"
                )
            return f"the cache of {name} cannot be rolled back"
        for layer_id in layer_ids:
            if max(layer_id, -1) not in self.features:
                return f"decoder layer {layer_id} of {name} is skipped, or has no output of one vector per token"
        if not self.pads and mask is not None and not bool(mask.all()):
            return f"rows of {name} with padding on the left cannot be rolled back"
        return None


def takes_masks(attention: str | None) -> bool:
    """
    Whether an attention implementation takes additive masks `[R, 1, n, S]`, as upstream makes them for it.

    FlashAttention reads a mask as a list of rows: on a GPU an index out of bounds ends the process, so a target with
    it is not even tried. FlexAttention wants a function. An attention of somebody's own gets no masks from upstream,
    and is tried.
    """
    create = masking_utils.ALL_MASK_ATTENTION_FUNCTIONS.get(attention)
    return "flash" not in (attention or "") and create in (None, masking_utils.sdpa_mask, masking_utils.eager_mask)


# What was found, as long as a target lives.
_supports: "weakref.WeakKeyDictionary" = weakref.WeakKeyDictionary()


@torch.no_grad()
def support_of(target, sessions: tuple[Any, ...], draft_tree=None) -> Support:
    """
    Try a target once for each attention, dtype and code of its forwards and inputs: a short prompt, a draft with
    rejected tokens, a roll-back and a second draft must give the same logits and states as decoding the kept tokens
    one by one.

    Args:
        target (`PreTrainedModel`): The target.
        sessions (`tuple[type]`): The kinds of sessions to try, the simplest first.
        draft_tree (`callable`, *optional*): Makes a tree of a block `[R, n]`, and the path of the block in it.
    """
    attention = target.config.get_text_config()._attn_implementation
    if not takes_masks(attention):
        return Support(None, math.inf, attention=attention)
    device = input_device(target).type
    forwards = {kind.forward for kind in {type(module) for module in target.modules()}}
    steps = (target.prepare_inputs_for_generation, target._update_model_kwargs_for_generation)
    key = (
        *(sessions, attention, target.dtype, frozenset(forwards)),
        tuple(getattr(step, "__func__", step) for step in steps),
        torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device),
    )
    known = _supports.setdefault(target, {})
    if key not in known:
        try:
            known[key] = Trial(target, draft_tree).support(sessions)
        except Exception as error:  # the target itself cannot run on two rows, now
            return Support(None, math.inf, failure=f"{type(error).__name__}: {error}")
    return known[key]


class Trial:
    """Finds out what a target supports, by running it on a few tokens."""

    # Rounding; targets that round differently for one token and for several. Nemotron-H differs by 7e-4, another text:
    # it limits time steps in forwards over several tokens only.
    EXACT, CLOSE = 1e-4, 3e-4
    # Slots that attention gets, and the length that a cache reports: some targets take positions or windows from them.
    VIEW, REPORTED = 512, 1 << 20

    def __init__(self, target, draft_tree=None):
        self.target, self.draft_tree, self.device = target, draft_tree, input_device(target)
        vocab_size = target.config.get_text_config().vocab_size
        tokens = torch.arange(3, 31, device=self.device).view(2, 14)
        self.tokens = tokens * 7 % max(vocab_size - 1, 2)  # no random numbers drawn
        self.kept = [2, 3]  # tokens of the draft that each row keeps

    def support(self, sessions: tuple[Any, ...]) -> Support:
        """The simplest way to roll back, and what it cannot do."""
        features: frozenset[int] = frozenset()
        with contextlib.suppress(ValueError):  # HRM-Text runs two stacks in cycles
            features = self.features()
        best = Support(None, math.inf, features=features)
        expected = functools.cache(self.one_by_one)
        for session in sessions:
            for padding, tree in ((2, True), (2, False), (0, True), (0, False)):
                if tree and (self.draft_tree is None or not session.rollback_is_free):
                    continue
                error = self.error(session, padding, tree, expected(padding))
                if error < self.EXACT:
                    return Support(session, error, padding > 0, tree, features)
                if best.session is None and error < best.error:  # the first that is close, or the best, to tell
                    best = Support(session if error < self.CLOSE else None, error, padding > 0, tree, features)
        return best

    def error(self, session_class: Any, padding: int, tree: bool, expected) -> float:
        """
        The largest relative error of logits and states after rolling back two rows, which keep different numbers of
        tokens; the second row starts with padding.
        """
        logits, states = expected
        kept, padded = torch.tensor(self.kept, device=self.device), [0, padding]
        rejected = self.tokens[:, 5:10].clone()
        for row, count in enumerate(self.kept):
            rejected[row, count:] += 1
        session = None
        try:
            cache = empty_cache(self.target)
            _, positions, _ = self.prefilled(padding, cache)
            if not session_class.CACHE.can_adopt(cache):
                return math.inf
            offset = first_positions(positions, 5, padded, self.device)
            session = session_class(self.target, cache, padded, offset, {})
            draft, path = self.draft_tree(rejected) if tree else (Block(rejected), None)
            session.cache.least, session.cache.reported = self.VIEW, self.REPORTED
            first = session.verify(draft)[0]
            verdict = Verdict(self.kept, path)
            session.keep(verdict)
            errors = [
                _relative_error(ours[row].flatten(), theirs.flatten())
                for row in range(2)
                for ours, theirs in zip(recurrent_states(session.cache.layers), states[row], strict=True)
            ]
            places = (kept + 5)[:, None] + torch.arange(6, device=self.device)
            second = session.verify(Block(self.tokens.gather(1, places)))[0]
            first = verdict.along(first)
            for row, count in enumerate(self.kept):
                ours = torch.cat([first[row, :count], second[row]])
                errors.append(_relative_error(ours, logits[row, : len(ours)]))
            return max(errors)
        except torch.OutOfMemoryError:  # says nothing about the target
            raise
        except Exception as error:  # a target may fail in any way here
            logger.debug("%s cannot roll back with %s: %s", type(self.target).__name__, session_class.__name__, error)
            return math.inf
        finally:
            if session is not None:
                session.clear()

    def prefilled(self, padding: int, cache) -> tuple:
        """The output for a prompt `[2, 5]`, its positions, and the arguments of the next forward, as in `generate`."""
        target, tokens, mask = self.target, self.tokens[:, :5], torch.ones_like(self.tokens[:, :5])
        mask[1, :padding] = 0
        arguments = {cache_argument(target): cache, "use_cache": True, "attention_mask": mask}
        if "position_ids" in inspect.signature(target.forward).parameters:
            arguments["position_ids"] = (mask.cumsum(dim=1) - 1).masked_fill(mask == 0, 0)
        if padding:
            inputs = target.prepare_inputs_for_generation(tokens, is_first_iteration=True, **arguments)
        else:
            positions = torch.arange(tokens.shape[1], device=tokens.device)[None]
            inputs = {cache_argument(target): cache, "use_cache": True, "input_ids": tokens, "position_ids": positions}
        return target(**inputs, return_dict=True), inputs.get("position_ids"), arguments

    def one_by_one(self, padding: int) -> tuple[torch.Tensor, dict]:
        """Logits after each token from the sixth on, one by one as in `generate`, and each row's states when kept."""
        target, cache, logits, states = self.target, empty_cache(self.target), [], {}
        output, _, arguments = self.prefilled(padding, cache)
        for step in range(1, self.tokens.shape[1] - 4):
            arguments = target._update_model_kwargs_for_generation(
                output, arguments, is_encoder_decoder=target.config.is_encoder_decoder
            )
            inputs = target.prepare_inputs_for_generation(
                self.tokens[:, : 5 + step], next_sequence_length=1, is_first_iteration=False, **arguments
            )
            output = target(**inputs, return_dict=True)
            logits.append(output.logits)
            rows = [row for row, count in enumerate(self.kept) if count == step]
            states |= {row: [state[row].clone() for state in recurrent_states(cache.layers)] for row in rows}
        return torch.cat(logits, dim=1), states

    def features(self) -> frozenset[int]:
        """The decoder layers whose output in a short forward over text is one vector per token; -1: their input."""
        ids = [-1, *range(len(decoder_layers(self.target)))]
        with FeatureTap(self.target, ids) as tap, tap.running():
            try_out(self.target)
            outputs = [tap.captured.get(place) for place in tap.places]
        return frozenset(i for i, output in zip(ids, outputs) if output is not None and output.dim() == 3)


def recurrent_states(layers) -> list[torch.Tensor]:
    """Every state of every recurrent layer among `layers`, `[R, ...]` each."""
    recurrent = [layer for layer in layers if isinstance(layer, LinearAttentionCacheLayerMixin)]
    nests = [nest for layer in recurrent for nest in (layer.conv_states, layer.recurrent_states)]
    return [state for nest in nests for state in nest.values() if state is not None]


def first_positions(positions, columns: int, padding: list[int], device) -> torch.Tensor:
    """
    The position of the first token of each row, `[R, 1]`, or `[axes, R, 1]` where positions have several axes.

    Args:
        positions (`torch.LongTensor`, *optional*): `[..., R, n]`, the positions of the prompt's last forward. Counted
            back from the last one as if the prompt were text only; images break that rule.
        columns (`int`): Columns of the prompt, padding included.
        padding (`list[int]`): Padding columns at the start of each row.
    """
    pads = torch.tensor(padding, device=device)
    if positions is None:
        return torch.zeros_like(pads)[:, None]
    last = positions[..., -1].to(device)  # [..., R], or [..., 1] for all rows
    return (last - (columns - 1 - pads))[..., None]


def _relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    if actual.shape != expected.shape:
        return math.inf
    difference = (actual - expected).double().norm(dim=-1) / expected.double().norm(dim=-1).clamp(min=1e-12)
    if actual.dtype in (torch.float32, torch.float64):
        return float(difference.nan_to_num(math.inf).max())
    # Half precision: rounding changes single positions (another expert is chosen), a wrong state changes all of them.
    return 0.0 if difference.median() < 0.1 else math.inf


def check_pair(target, config) -> None:
    """
    Check that a drafter fits a target, as far as shapes show. An embedding that has grown or shrunk by a few rows is
    still that of the same target: its drafter drafts the tokens that both know.

    Raises:
        `ValueError`: names every mismatch, both values and the remedy.
    """
    name, table, head = type(target).__name__, target.get_input_embeddings(), target.get_output_embeddings()
    width = table.weight.shape[1] if hasattr(table, "weight") and hasattr(head, "weight") else None
    if target.config.is_encoder_decoder or width is None or getattr(head, "in_features", width) != width:
        raise ValueError(
            f"{name} cannot have a drafter, which shares the embedding and the head of a decoder-only target, single "
            f"layers of one width; here they are {table} and {head}. Load the target with `AutoModelForCausalLM`, or "
            "call `generate` without `assistant_model`."
        )
    rows, depth, text = len(table.weight), text_depth(target.config), target.config.get_text_config()
    read, known = text.hidden_size, config.vocab_size or rows
    wrong = {
        f"target_hidden_size={config.target_hidden_size}, not {read}": config.target_hidden_size != read,
        f"hidden_size={config.hidden_size}, not {width} as its embedding": config.hidden_size != width,
        f"vocab_size={known}, not {rows}": abs(known - rows) > known * 0.1 and known != text.vocab_size,
        f"mask_token_id={config.mask_token_id} of {rows} embeddings": config.mask_token_id >= rows,
        f"target_layer_ids={config.target_layer_ids} of {depth} layers": max(config.target_layer_ids) >= depth,
        f"num_target_layers={config.num_target_layers}, not {depth}": config.num_target_layers not in (None, depth),
    }
    if any(wrong.values()):
        found = "; ".join(what for what, is_wrong in wrong.items() if is_wrong)
        raise ValueError(f"The drafter does not fit this {name}: {found}. Load the drafter that was trained for it.")
