"""What a target supports, found by trying it once on a few tokens, never from a list of names."""

import contextlib
import hashlib
import inspect
import math
import os
import weakref
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
import transformers
from torch import nn
from transformers import cache_utils, masking_utils
from transformers.utils import logging

from .accept_dflash import Draft, Verdict
from .cache_dflash import SlotCache, SlotLayer
from .drafting_dflash import first_positions
from .isolation_dflash import HOOKS, isolated
from .recurrent_dflash import ReplaySession, StepSession, moving_modules, recurrent_states
from .remembered_dflash import recall, remember
from .sessions_dflash import SlotSession
from .target_dflash import (
    CACHE_NAME,
    FeatureTap,
    cache_argument,
    decoder_layers,
    empty_cache,
    input_device,
    methods_of,
    try_out,
)
from .tree_dflash import every_path, independent_paths, likeliest_tree


logger = logging.get_logger(__name__)

KINDS = (SlotSession, ReplaySession, StepSession)
# Largest relative errors. Rounding stays below the first; between the two are targets that upstream itself computes
# slightly differently for one token and for several.
EXACT, CLOSE = 1e-4, 1e-3
# Lengths of texts that are tried, see `TargetFacts.reach`; slots that attention gets, and tokens that a cache reports.
REACHES = (math.inf, 8192, 4096, 1024, 512, 256, 128, 64, 32)
LARGEST_VIEW, LONGEST = 1024, 2**16

# Configuration keys that do not affect what a target supports.
_OF_THE_CHECKPOINT = ("_name_or_path", "transformers_version", "dtype", "torch_dtype", "architectures")

_known: "weakref.WeakKeyDictionary" = weakref.WeakKeyDictionary()
# The facts about all targets of this process whose code comes from files, for the next one like them.
_alike: dict[tuple, "TargetFacts"] = {}


@dataclass
class TargetFacts:
    """
    What a target supports.

    Args:
        name (`str`): Name of its class.
        session_class (`type`, *optional*): `SlotSession`, `ReplaySession` or `StepSession`: how its cache is rolled
            back; `None` if no method restores the state.
        moving (`dict[str, int]`): For recurrent targets, the result of [`moving_modules`].
        trees (`bool`): Whether trees can be verified: not if positions follow from the places of keys in the cache, as
            MPT's, nor if a recurrent state would have to follow several paths.
        pads (`bool`): Whether rows with padding on the left can be drafted.
        counts_columns (`bool`): Whether, if given no positions, it counts columns, padding included.
        features (`dict[int, tuple]`): Shapes of its decoder layers' outputs (-1: of the first layer's input), without
            layers that it skips or that are not reached in copies of the modules.
        error (`float`): The largest relative error after rolling back with the best method.
        cache_name (`str`): Name of its forward's cache argument.
        reach (`float`): Maximum length of a text: some targets take positions from the length of the cache, or build
            masks of a window over its keys, and their cache in slots is longer than the text.
        observed (`bool`): Whether hooks or replaced forwards run in its forward: they may keep what they get, or
            compute gradients.
        training (`bool`): Whether it was in training mode.
        lasting (`bool`): Whether these facts hold for the next call too: not if the target itself could not run on two
            rows, as while hooks of this call set adapters for another number of rows.
    """

    name: str
    session_class: type[SlotSession] | None = None
    moving: dict[str, int] = field(default_factory=dict)
    trees: bool = False
    pads: bool = True
    counts_columns: bool = False
    features: dict[int, tuple] = field(default_factory=dict)
    error: float = math.inf
    cache_name: str = CACHE_NAME
    reach: float = math.inf
    observed: bool = False
    training: bool = False
    lasting: bool = True

    @classmethod
    def remembered(cls, found) -> "TargetFacts | None":
        """The facts that another process stored; `None` if they are invalid."""
        try:
            session_class = next(kind for kind in KINDS if kind.__name__ == found["session_class"])
            features = {int(layer_id): tuple(shape) for layer_id, shape in found["features"].items()}
            return cls(**{**found, "session_class": session_class, "features": features})
        except (AttributeError, KeyError, StopIteration, TypeError, ValueError):
            return None

    def why_plain(self, layer_ids: list[int], mask: torch.Tensor | None) -> str | None:
        """Why a drafter that reads these layers cannot draft for a prompt with this mask, or `None`."""
        if self.session_class is None and self.training:
            return f"{self.name} is in training mode, with dropout or gradient checkpointing; call its `eval()` first"
        if not self.lasting:
            return f"{self.name} cannot be probed with two rows"
        if self.session_class is None:
            if math.isfinite(self.error):
                return (
                    f"{self.name} computes different logits for several tokens than for one at a time (relative error "
                    f"{self.error:.2g}), as with dynamically quantised weights or a hook on the last token"
                )
            return f"the cache of {self.name} cannot be rolled back"
        if not self.features:
            return (
                f"the outputs of the decoder layers of {self.name} cannot be read: the layers are in no list, or a "
                "forward was replaced by one that finds the original outside its closure, as in a global"
            )
        for layer_id in layer_ids:
            shape = self.features.get(layer_id)
            if shape is None:
                return f"{self.name} skips decoder layer {layer_id}, whose output the drafter reads"
            if len(shape) != 3:
                return (
                    f"decoder layer {layer_id} of {self.name} has an output of shape {shape}, but the drafter reads "
                    "one vector per token, [rows, tokens, hidden_size]"
                )
        if not self.pads and mask is not None and not bool(mask.all()):
            return f"rows of {self.name} with padding on the left cannot be rolled back"
        return None

    def open_session(self, target, *args):
        """Open a session; the arguments are those of [`SlotSession`]."""
        if self.session_class is SlotSession:
            return SlotSession(target, *args)
        return self.session_class(target, *args, moving=self.moving)


@torch.no_grad()
def facts_of(target) -> TargetFacts:
    """
    Probe a target, once for each combination of forward code, hooks, attention implementation, dtype, mode, autocast.
    Targets of the same modules, code and configuration share their facts, with other processes through the disk.

    A short prompt, a block with rejected tokens, a roll-back and a second block must give the same logits and state as
    decoding the kept tokens one by one. Tried with slots, with slots and replay of the recurrent layers, then with
    slots and steps through the recurrent layers. The target is observed in copies of its modules, so it may be in use
    meanwhile; concurrent first calls find the same. In training mode with dropout it is found not to roll back; the
    random state is left unchanged.
    """
    known, device = _known.setdefault(target, {}), input_device(target)
    modules = list(target.modules())
    training = any(module.training for module in modules)
    key: tuple = (target.config._attn_implementation, target.dtype)
    # A forward wrapped or replaced later, in a module or its class, makes another target, and so does a hook.
    replaced = [vars(module)["forward"] for module in modules if "forward" in vars(module)]
    classes = [kind.forward for kind in {type(module) for module in modules}]
    steps = [target.prepare_inputs_for_generation, target._update_model_kwargs_for_generation]
    hooks = _hooks_of(modules)
    key += (_codes(target.forward), frozenset(_codes(*steps, *replaced, *classes, *hooks)))
    checkpoints = any(getattr(module, "gradient_checkpointing", False) for module in modules)
    key += (training, training and checkpoints)  # which drop the cache
    key += (torch.is_autocast_enabled(device.type) and torch.get_autocast_dtype(device.type),)
    if key not in known:
        own = replaced or training or hooks
        functions = set() if own else methods_of(target)
        on_disk = None if own else _key_on_disk(target, key, functions)
        # Here a function is itself, since two of the same place in a file may differ in their closures.
        alike = (*map(str, on_disk.values()), frozenset(map(weakref.ref, functions))) if on_disk else ()
        facts = _alike.get(alike) or on_disk and TargetFacts.remembered(recall("targets", on_disk))
        if not facts:
            devices = [] if device.type == "cpu" else [device]
            kind = device.type if devices else "cuda"
            with torch.random.fork_rng(devices, enabled=training, device_type=kind), _kept_hooks(modules):
                facts = _Trial(target).found()
            facts.observed, facts.training = bool(hooks or replaced), target.training
            if not facts.lasting:
                return facts
            if on_disk and facts.features:
                remember("targets", on_disk, {**asdict(facts), "session_class": facts.session_class.__name__})
        if on_disk and facts.features:
            _alike[alike] = facts
        known[key] = facts
    return known[key]


def _hooks_of(modules: list) -> list:
    """
    The forward hooks of modules, without those of transformers, which only listen, and of PEFT, with which adapters
    come and go from call to call; an activated LoRA, which acts on the last tokens of a forward, counts.
    """
    kinds = [(module._forward_pre_hooks, module._forward_hooks) for module in modules]
    hooks = [hook for pair in kinds for some in pair for hook in some.values()]
    counted = [bool(getattr(hook, "keywords", {}).get("alora_offsets")) for hook in hooks]
    known = [_module_of(hook).startswith(("peft.", "transformers.")) for hook in hooks]
    return [hook for hook, counts, skip in zip(hooks, counted, known) if counts or not skip]


def _module_of(hook) -> str:
    return getattr(getattr(hook, "func", hook), "__module__", None) or ""  # `func`: of a partial


@contextlib.contextmanager
def _kept_hooks(modules: list):
    """Hooks that remove themselves when they are called in here are there again afterwards."""
    before = [(vars(module)[name], vars(module)[name].copy()) for module in modules for name in HOOKS]
    try:
        yield
    finally:
        for hooks, earlier in before:
            if earlier.keys() - hooks.keys():
                earlier.update(hooks)
                hooks.clear()
                hooks.update(earlier)


def _key_on_disk(target, key: tuple, functions: set) -> dict | None:
    """
    The key under which other processes find the facts about a target: its modules and configuration, and the current
    files of their code, of the decoding code and of this package. `None` if some code comes from no file.
    """
    codes = {*key[2], *key[3], *_codes(*functions)}
    modules = [f"{name}: {type(module).__qualname__}" for name, module in target.named_modules()]
    config = {name: value for name, value in target.config.to_dict().items() if name not in _OF_THE_CHECKPOINT}
    try:
        places = sorted(f"{code.co_filename}:{code.co_firstlineno}" for code in codes)
        files = {code.co_filename for code in codes} | {cache_utils.__file__, masking_utils.__file__}
        files |= {str(path) for path in Path(__file__).parent.glob("*.py")}
        stamps = [(file, (stat := os.stat(file)).st_size, stat.st_mtime_ns) for file in sorted(files)]
    except (AttributeError, OSError):
        return None
    content = repr((modules, sorted(config.items()), places, stamps, key[4:], target.device.type))
    return {
        "target": f"{type(target).__module__}.{type(target).__qualname__}",
        "attention": key[0],
        "dtype": str(key[1]),
        "versions": [torch.__version__, transformers.__version__],
        "digest": hashlib.sha256(content.encode()).hexdigest(),
    }


def _codes(*functions) -> tuple:
    """The code of functions and of the functions they wrap; unlike a closure, code keeps no model alive."""
    codes = []
    for function in functions:
        while function is not None:
            function = getattr(function, "func", function)  # of a partial
            codes.append(getattr(function, "__code__", type(function)))
            function = getattr(function, "__wrapped__", None)
    return tuple(codes)


class _Trial:
    """
    Finds out what a target supports by running it on a few tokens.

    Args:
        target (`PreTrainedModel`): Observed in copies of its modules, so it may be in use meanwhile.
    """

    def __init__(self, target):
        self.target, self.device = target, input_device(target)
        self.facts = TargetFacts(type(target).__name__, cache_name=cache_argument(target))

    def found(self) -> TargetFacts:
        """The best method of rolling back, and what it requires."""
        facts = self.facts
        facts.session_class = SlotSession
        for facts.trees in (True, False):
            facts.error = self.error(padding=2, reach=math.inf)
            if facts.error < EXACT:
                break
        else:
            self.search()
            if facts.session_class is SlotSession:
                largest = max(EXACT, 2 * facts.error)
                facts.reach = next((reach for reach in REACHES if self.error(0, reach) < largest), 0)
                facts.trees = facts.trees and facts.reach == math.inf  # they are wider than the text is long
        if facts.session_class is not None:
            facts.features = self.features()
        return facts

    def search(self) -> None:
        """Try all methods on rows without padding, then the best one on a row with padding."""
        target, facts, errors = self.target, self.facts, {}
        for kind in KINDS:
            try:
                facts.moving = {} if kind is SlotSession else facts.moving or moving_modules(target)
            except Exception as error:  # a target may fail in any way here and below
                logger.debug("%s: no modules that move a state: %s", facts.name, error)
                break
            if kind is not SlotSession and not facts.moving:
                break
            facts.session_class = kind
            errors[kind] = self.error(padding=0)
            if errors[kind] < EXACT:
                break
        best = min(errors, key=errors.get)
        facts.session_class, facts.error = best if errors[best] < CLOSE else None, errors[best]
        if facts.session_class is None:
            return
        # A row with padding, and which positions the target uses if it is given none.
        for facts.counts_columns in (False, True):
            facts.pads = not self.error(padding=2) >= CLOSE
            if facts.pads or "position_ids" in inspect.signature(target.forward).parameters:
                break
        facts.trees = facts.session_class is SlotSession  # so that a tree is tried
        facts.trees = facts.trees and self.error(padding=0) < CLOSE

    def error(self, padding: int, reach: float | None = None) -> float:
        """
        The largest relative error of logits and states after rolling back two rows, which keep different numbers of
        tokens; the second row starts with padding. NaN if the target itself gives NaN for rows with padding: there is
        nothing to compare with. With a `reach`, the cache looks as in a text of that length.
        """
        target, facts, device = self.target, self.facts, self.device
        vocab_size = target.config.get_text_config().vocab_size
        tokens = torch.arange(3, 31, device=device).view(2, 14) * 7 % max(vocab_size - 1, 2)  # no random numbers drawn
        mask = torch.ones_like(tokens)
        mask[1, :padding] = 0
        block, kept = tokens[:, 5:10].clone(), torch.tensor([2, 3], device=device)
        for row, count in enumerate(kept.tolist()):
            block[row, count:] += 1  # rejected
        expected = None
        try:
            watched = [target.get_submodule(name) for name in facts.moving]
            with isolated(target, watched) as own:
                cache = empty_cache(own)
                positions = _prefilled(own, tokens[:, :5], mask[:, :5], cache)[1]
                if not facts.session_class.takes(cache):
                    return math.inf
                expected, states = _decoded(own, tokens, mask, kept.tolist())  # [2, 9, V]
                if padding and not bool(expected.isfinite().all()):
                    return math.nan
                padded = torch.tensor([0, padding], device=device)
                offset = first_positions(positions, 5, padded.tolist(), device, facts.counts_columns)
                session = facts.open_session(own, cache, padded.tolist(), 32, offset, {})
                start = 5 - padded
                if reach is not None:
                    _lengthen(session.cache, reach)
                draft, path = _tree(block) if facts.trees else (Draft(block), None)
                first = _verified(session, draft, start, kept, path)
                errors = [
                    _relative_error(a[row].flatten(), b.flatten())
                    for row in range(2)
                    for a, b in zip(recurrent_states(session.cache.layers), states[row], strict=True)
                ]
                start = start + kept
                rest = tokens.gather(1, (start + padded)[:, None] + torch.arange(6, device=device))  # [2, 6]
                second = _verified(session, Draft(rest), start, torch.full_like(kept, 6))
            for row, count in enumerate(kept.tolist()):
                ours = torch.cat([first[row, :count], second[row]])
                errors.append(_relative_error(ours, expected[row, : len(ours)]))
            return max(errors)
        except Exception as error:
            facts.lasting = facts.lasting and (padding > 0 or expected is not None)
            logger.debug("%s cannot roll back with %s: %s", facts.name, facts.session_class.__name__, error)
            return math.inf

    def features(self) -> dict[int, tuple]:
        """The shape of each decoder layer's output in a short forward over text; -1 is the first layer's input."""
        try:
            layers = decoder_layers(self.target)
        except ValueError:  # HRM-Text runs two stacks in cycles
            return {}
        with isolated(self.target, layers) as own, FeatureTap(own, [*range(-1, len(layers))]) as tap:
            try_out(own)
            return {layer_id: tuple(features.shape) for layer_id, features in tap.captured.items()}


def _lengthen(cache: SlotCache, length: float) -> None:
    """Make a cache look as in a long text: attention gets more slots, and it reports more tokens."""
    view, reported = int(min(length, LARGEST_VIEW)), int(min(length, LONGEST))

    def lengthened(update):
        def run(*args, **kwargs):
            states = update(*args, **kwargs)
            return tuple(nn.functional.pad(one, (0, 0, 0, view - one.shape[2])) for one in states)

        return run

    cache.__dict__.update(reserve=lambda used: setattr(cache, "view", view), get_seq_length=lambda *args: reported)
    for layer in cache.layers:
        if isinstance(layer, SlotLayer):
            layer.__dict__.update(update=lengthened(layer.update), get_seq_length=lambda: reported)


def _verified(session, draft: Draft, start, kept, path: torch.LongTensor | None = None) -> torch.Tensor:
    """Verify a draft, commit `kept` tokens of each row, and return the logits along the accepted path."""
    session.cache.reserve(int(start.max()) + draft.tokens.shape[1])
    logits = session.verify(draft, start).logits
    verdict = Verdict(draft.tokens, kept, draft.tokens[:, -1], torch.ones_like(kept, dtype=torch.bool), path)
    session.commit(start, verdict)
    return verdict.along(logits)


def _tree(block: torch.LongTensor) -> tuple[Draft, torch.LongTensor]:
    """A tree with the first three tokens of a block, next to others that come before them, and the path of these."""
    anchors, second, third = block[:, :3].T
    ids = torch.stack([second + 1, second, third, anchors], dim=1).view(2, 2, 2)  # [R, slots, candidates]
    log_probs = torch.tensor([[-0.1, -0.2], [-0.5, -9.0]], device=block.device).expand(2, 2, 2)
    paths = every_path(4, 2, 2, block.device)
    tree = likeliest_tree(anchors, *independent_paths(ids, log_probs, paths), paths)
    return Draft(tree.tokens, tree=tree), torch.tensor([[0, 2, 4]], device=block.device).expand(2, 3)


def _prefilled(target, tokens, mask, cache) -> tuple:
    """The output for a prompt `[2, S]`, its positions, and the arguments of the next forward, as in `generate`."""
    arguments = {cache_argument(target): cache, "use_cache": True, "attention_mask": mask}
    if "position_ids" in inspect.signature(target.forward).parameters:
        arguments["position_ids"] = (mask.cumsum(dim=1) - 1).masked_fill(mask == 0, 0)
    if bool(mask.all()):
        positions = torch.arange(tokens.shape[1], device=tokens.device)[None]
        inputs = {cache_argument(target): cache, "use_cache": True, "input_ids": tokens, "position_ids": positions}
    else:
        inputs = target.prepare_inputs_for_generation(tokens, is_first_iteration=True, **arguments)
    return target(**inputs, return_dict=True), inputs.get("position_ids"), arguments


def _decoded(target, tokens, mask, kept: list[int]):
    """Logits after each token from the sixth on, fed one by one as in `generate`, and each row's states over time."""
    cache, logits, states = empty_cache(target), [], {}
    output, _, arguments = _prefilled(target, tokens[:, :5], mask[:, :5], cache)
    for step in range(1, tokens.shape[1] - 4):
        arguments = target._update_model_kwargs_for_generation(
            output, arguments, is_encoder_decoder=target.config.is_encoder_decoder
        )
        inputs = target.prepare_inputs_for_generation(
            tokens[:, : 5 + step], next_sequence_length=1, is_first_iteration=False, **arguments
        )
        output = target(**inputs, return_dict=True)
        logits.append(output.logits)
        rows = [row for row, count in enumerate(kept) if count == step]
        states |= {row: [state[row].clone() for state in recurrent_states(cache.layers)] for row in rows}
    return torch.cat(logits, dim=1), states


def _relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    if actual.shape != expected.shape:
        return float("inf")
    difference = (actual - expected).double().norm(dim=-1) / expected.double().norm(dim=-1).clamp(min=1e-12)
    if actual.dtype in (torch.float32, torch.float64):
        return float(difference.nan_to_num(float("inf")).max())
    # Half precision: rounding changes single positions (another expert is chosen), a wrong state changes all of them.
    return 0.0 if difference.median() < 0.1 else float("inf")
