"""
Possible causes of low acceptance, each tested by one small change. A new suspicion is a new function here.

If several changes gain about the same, the first in the list is the cause: the smallest changes come first.
"""

import json
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path

import torch
from torch import nn

from dflash_hf.data.encode import RowEncoder
from dflash_hf.doctor.measure import Change
from dflash_hf.doctor.texts import Writer, encoded
from dflash_hf.modeling.target_dflash import text_depth
from dflash_hf.responses import eos_ids
from dflash_hf.target import spare_token_id


WINDOWS = (64, 256, 1024, 4096)  # tokens of context
MOST_MASKS = 8


@dataclass
class Case:
    """
    A pair and the prompts to measure it on.

    Args:
        target, draft: The pair.
        writer (`Writer`): Generates the target's texts.
        rows (`list[dict]`): Rows with prompts.
        encoder (`RowEncoder`, *optional*): Tokenizer and arguments of the chat template, as the pair is used.
        base (`PreTrainedModel`, *optional*): The model that the target was made from, if the drafter was trained for
            it.
        tokenizers (`dict`): Other tokenizers to try, by origin.
        names (`dict[str, str]`): Names of `target`, `draft` and `base` in remedies.
    """

    target: object
    draft: object
    writer: Writer
    rows: Sequence[dict]
    encoder: RowEncoder
    base: object = None
    tokenizers: dict | None = None
    names: dict | None = None

    @cached_property
    def prompts(self) -> list[list[int]]:
        return encoded(self.encoder, self.rows)

    @cached_property
    def texts(self):
        return self.writer.answered(self.prompts)

    def remedy_in_config(self, changes: str) -> str:
        """A shell command that changes the drafter's `config.json` by assignments to its configuration `c`."""
        name = self.names["draft"]
        folder, download = name, ""
        if not Path(name).expanduser().exists():
            folder = name.rpartition("/")[2]
            download = f"hf download {shlex.quote(name)} --local-dir {shlex.quote(folder)} && "
        at = json.dumps(folder)
        load = f"from dflash_hf import DFlashDraftConfig as C; c = C.from_pretrained({at})"
        return f"{download}{_python(f'{load}; {changes}; c.save_pretrained({at})')}"

    def again(self, command: str, options: str) -> str:
        """A command of this package with the pair."""
        target, draft = (shlex.quote(self.names[name]) for name in ("target", "draft"))
        return f"dflash {command} --target {target} --draft {draft} {options}"

    def train_again(self) -> str:
        """The commands that train a drafter for this target."""
        target = shlex.quote(self.names["target"])
        return (
            f"dflash prompts --target {target} --count 10000 --output prompts.jsonl && "
            f"dflash regenerate --data prompts.jsonl --target {target} --output responses.jsonl && "
            f"dflash train --target {target} --data responses.jsonl --output my-drafter"
        )


@dataclass
class Experiment:
    """
    A suspicion and the change that tests it.

    Args:
        key (`str`): For programs.
        name (`str`): Description of the change.
        change (`Change`): The change for [`~dflash_hf.doctor.measure.measure`].
        cause (`str`): The problem, if the change helps.
        remedy (`str`): What to do then, as a shell command.
    """

    key: str
    name: str
    change: Change
    cause: str
    remedy: str


def experiments(case: Case) -> list[Experiment]:
    """All experiments for a pair."""
    families = (masks, layers, blocks, embeddings, heads, ropes, windows, dtypes, templates, tokenizers, bases)
    return [experiment for family in families for experiment in family(case)]


def _in_config(case: Case, key: str, name: str, trained: str, **fields) -> Experiment:
    """Other `fields` of the configuration; `trained` says what the first of them was in training."""
    first = next(iter(fields))
    cause = f"{first}={getattr(case.draft.config, first)!r} is not {trained}"
    changes = "; ".join(f"c.{field} = {value!r}" for field, value in fields.items())
    return Experiment(key, name, Change(config=fields), cause, case.remedy_in_config(changes))


def masks(case: Case) -> Iterator[Experiment]:
    """Another mask token: the usual tokens and the tokenizer's special tokens, except tokens in the texts."""
    config, tokenizer = case.draft.config, case.encoder.tokenizer
    if config.own_mask_embedding:
        return
    rows = case.target.get_input_embeddings().weight.shape[0]
    read = {token for text in case.texts if text is not None for token in text.input_ids[0].tolist()}
    read |= eos_ids(case.target.generation_config)
    names = {spare_token_id(case.target, tokenizer): "first spare row", rows - 1: "last row"}
    for name in ("mask", "pad", "unk", "eos", "bos"):
        names.setdefault(getattr(tokenizer, f"{name}_token_id", None), f"{name} token")
    for token_id, token in sorted(tokenizer.added_tokens_decoder.items(), reverse=True)[:MOST_MASKS]:
        names.setdefault(token_id, str(token))
    for token_id, name in names.items():
        if token_id is not None and 0 <= token_id < rows and token_id not in {config.mask_token_id, *read}:
            name = f"mask id {token_id} ({name})"
            yield _in_config(case, "mask", name, "the mask token of training", mask_token_id=token_id)


def layers(case: Case) -> Iterator[Experiment]:
    """Features of the layers one above and one below: others count from 1."""
    ids, depth = case.draft.config.target_layer_ids, text_depth(case.target.config)
    trained = "the list of layers of training: ids count from 0, and id i is the output of layer i"
    for word, step in (("down", -1), ("up", 1)):
        moved = [i + step for i in ids]
        if 0 <= min(moved) and max(moved) < depth:
            name = f"layer ids one {word}, {moved}"
            yield _in_config(case, f"layers_{word}", name, trained, target_layer_ids=moved)


def blocks(case: Case) -> Iterator[Experiment]:
    """How a block is read: its size, causal or not, anchor-first or not."""
    config = case.draft.config
    causal = [config.layer_is_causal(i) for i in range(config.num_hidden_layers)]
    for wanted, name in ((True, "causal blocks"), (False, "bidirectional blocks")):
        if any(one != wanted for one in causal):
            yield _in_config(case, "causal", name, "the attention mask of training", is_causal=wanted)
    for size in (config.block_size // 2, config.block_size * 2):
        if size > 1:
            trained = "the size of the blocks in training"
            yield _in_config(case, "block_size", f"blocks of {size}", trained, block_size=size)
    cause = (
        "the weights are anchor-first: slot k drafts the token at anchor + 1 + k; in DFlash's layout, at anchor + k"
    )
    remedy = case.train_again() + "  # or serve it with an engine that supports sample_from_anchor"
    yield Experiment("anchor_first", "anchor-first blocks", Change(shift=1), cause, remedy)


def embeddings(case: Case) -> Iterator[Experiment]:
    """The block's embeddings, raw or scaled."""
    config, target = case.draft.config, case.target.config.get_text_config()
    scales = {"raw": 1.0, "times the square root of the width": config.hidden_size**0.5}
    for name in ("embedding_multiplier", "scale_emb", "emb_scale"):
        if isinstance(getattr(target, name, None), int | float):
            scales["scaled as the target's"] = float(getattr(target, name))
    for name, scale in scales.items():
        if abs(scale - config.input_embedding_scale) > 1e-3:
            changed = {"input_embedding_scale": round(scale, 4)}
            yield _in_config(case, "embedding", f"embedding {name}", "the scale of training", **changed)


def heads(case: Case) -> Iterator[Experiment]:
    """Another head for the drafts: the embedding."""
    head, embedding = case.target.get_output_embeddings(), case.target.get_input_embeddings()
    if case.draft.config.has_own_head:
        return
    if head.weight.data_ptr() != embedding.weight.data_ptr() and head.weight.shape == embedding.weight.shape:
        cause = "the target's head is no longer its embedding, as it was in training: replaced, or a norm is folded in"
        own = nn.Linear(*reversed(embedding.weight.shape), bias=False, device="meta")
        own.weight = nn.Parameter(embedding.weight, requires_grad=False)
        change = Change(head=own)
        yield Experiment("head", "the embedding as head", change, cause, case.train_again())


def ropes(case: Case) -> Iterator[Experiment]:
    """Rotary embeddings: the target's own, the default, and the same one for block and context."""
    config, own = case.draft.config, case.draft.config.rope_parameters
    fresh = type(config).for_target(case.target.config, 0, target_layer_ids=config.target_layer_ids).rope_parameters
    plain = {"rope_type": "default", "rope_theta": 10_000.0}
    for name, rope in (("the target's", fresh), ("with base 10000", plain)):
        if rope and any(rope.get(key) != own.get(key) for key in ("rope_type", "rope_theta", "factor")):
            trained = "the rotary embedding of training"
            yield _in_config(case, "rope", f"rotary embedding {name}", trained, rope_parameters=rope)
    trained = "the rotary base of training for the context"
    if config.backbone_rotary_base is not None:
        yield _in_config(case, "rope", "one rotary base", trained, backbone_rotary_base=None)
    elif fresh and fresh.get("rope_theta") != own.get("rope_theta"):
        base = fresh["rope_theta"]
        yield _in_config(case, "rope", f"context with base {base:g}", trained, backbone_rotary_base=base)


def windows(case: Case) -> Iterator[Experiment]:
    """Windows over the context, and no window."""
    config = case.draft.config
    longest = max((text.input_ids.shape[1] for text in case.texts if text is not None), default=0)
    count, causal = config.num_hidden_layers, {"is_causal": config.layer_is_causal(0)}
    if "sliding_attention" in config.layer_types:
        trained = f"that of training: sliding_window={config.sliding_window} hides context that was visible there"
        yield _in_config(case, "window", "no window", trained, layer_types=["full_attention"] * count, **causal)
    for window in WINDOWS:
        if config.block_size < window < longest and window != config.sliding_window:
            name, trained = f"context of {window} tokens", "that of training, where contexts were shorter"
            changed = {"layer_types": ["sliding_attention"] * count, "sliding_window": window, **causal}
            yield _in_config(case, "window", name, trained, **changed)


def dtypes(case: Case) -> Iterator[Experiment]:
    """The drafter in full precision."""
    if case.draft.dtype not in (torch.float32, torch.float64):
        cause = f"the drafter loses accuracy in {str(case.draft.dtype).removeprefix('torch.')}"
        remedy = case.again("generate", "--dtype float32")
        yield Experiment("dtype", "drafter in float32", Change(dtype=torch.float32), cause, remedy)


def templates(case: Case) -> Iterator[Experiment]:
    """The chat template with and without thinking, and no template."""
    now = dict(case.encoder.chat_template_kwargs)
    template = case.encoder.tokenizer.chat_template
    if not template:
        return
    tried = [case.prompts]
    switch = next((name for name in ("enable_thinking", "thinking") if name in str(template)), None)
    for value, name in ((False, "thinking off"), (True, "thinking on"), (None, "thinking not set")):
        wanted = {key: one for key, one in {**now, switch: value}.items() if key != switch or value is not None}
        prompts = encoded(replace(case.encoder, chat_template_kwargs=wanted), case.rows) if switch else tried[0]
        if prompts not in tried:
            tried.append(prompts)
            change = Change(texts=partial(case.writer.answered, prompts))
            cause = f"the drafter was not trained with chat_template_kwargs={json.dumps(now)}, but in another mode"
            remedy = case.remedy_in_config(f"c.dflash_config['chat_template_kwargs'] = {wanted!r}")
            yield Experiment("thinking", name, change, cause, remedy)
    prompts = encoded(case.encoder, case.rows, raw=True)
    if prompts not in tried:
        change = Change(texts=partial(case.writer.answered, prompts))
        cause = "the drafter was trained without the chat template, or it is not the target's template"
        remedy = case.again("eval", "--data prompts.jsonl --raw")
        yield Experiment("raw", "without the chat template", change, cause, remedy)


def tokenizers(case: Case) -> Iterator[Experiment]:
    """Other tokenizers, if there are any, and no tokenizer: text that the target starts itself."""
    cause = "the tokenizer or chat template is not the one that the target and its drafter were trained with"
    for origin, tokenizer in (case.tokenizers or {}).items():
        prompts = encoded(replace(case.encoder, tokenizer=tokenizer), case.rows)
        if prompts != case.prompts:
            remedy = _with_tokenizer_of(case.names[origin], case.names["target"])
            texts = partial(case.writer.answered, prompts)
            yield Experiment("tokenizer", f"tokenizer of the {origin}", Change(texts=texts), cause, remedy)
    remedy = _with_tokenizer_of(case.names.get("origin", "REPOSITORY"), case.names["target"])
    change = Change(texts=partial(case.writer.free, len(case.rows)))
    yield Experiment("tokenizer", "text without a tokenizer", change, cause, remedy)


def _with_tokenizer_of(origin: str, target: str) -> str:
    """A shell command that saves the tokenizer of one model beside another."""
    load = f"from transformers import AutoTokenizer as T; T.from_pretrained({json.dumps(origin)})"
    return _python(f"{load}.save_pretrained({json.dumps(target)})")


def _python(code: str) -> str:
    """A shell command that runs Python code. Names in it come from files of others."""
    return f"python -c {shlex.quote(code)}"


def bases(case: Case) -> Iterator[Experiment]:
    """Parts of the model that the target was made from, and the whole model."""
    base = case.base
    if base is None:
        return
    again = case.train_again()
    if not case.draft.config.has_own_head:
        cause = "the target's head differs from its base's, with which the drafter was trained"
        yield Experiment("head", "head of the base", Change(head=base.get_output_embeddings()), cause, again)
    cause = "the target's embedding differs from its base's, with which the drafter was trained"
    yield Experiment("embedding_weights", "embedding of the base", Change(embedding=base), cause, again)
    cause = "the target's layers have changed since the drafter was trained, by quantisation or further training"
    yield Experiment("base", "features of the base", Change(features=base), cause, again)
    whole = Change(features=base, embedding=base, head=base.get_output_embeddings())
    yield Experiment("base", "features, embedding and head of the base", whole, cause, again)
    change = replace(whole, texts=partial(case.writer.of(base).answered, case.prompts))
    cause = f"the drafter fits {case.names['base']}, and no longer the model made from it"
    yield Experiment("base", "the base itself, on its own text", change, cause, again)
