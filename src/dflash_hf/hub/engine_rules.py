"""
What vLLM 0.33, SGLang 0.5.23 and transformers read from a drafter's folder, as rules that yield findings.

Engines do not report a wrong drafter: vLLM never reports a missing tensor, SGLang skips an unknown tensor, and a key
that they read differently only costs acceptance.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from dflash_hf.convert import NATIVE_NAMES
from dflash_hf.modeling.configuration_dflash import CONVOLUTION_KEYS
from dflash_hf.modeling.heads_dflash import HEADS, DominoHead, MarkovHead, PathSelector
from dflash_hf.modeling.modeling_dflash import MASK_EMBEDDING
from dflash_hf.names import ENGINES, SERVERS


MUSE = "MuseGlimmerAssistantModel"
DFLASH2 = PathSelector.architecture
DFLASH2_KEYS = (*CONVOLUTION_KEYS, *PathSelector.sizes)
DSPARK = MarkovHead.architecture
ARCHITECTURES = ("DFlashDraftModel", DFLASH2, MUSE, DSPARK)
_SERVED = (PathSelector, MarkovHead, DominoHead)  # heads that engines have
_GEMMA_VOCABULARY = 262144
_V2_RUNNER = "for which vLLM needs its V2 model runner: do not set VLLM_USE_V2_MODEL_RUNNER=0."


@dataclass(frozen=True)
class Finding:
    """
    A problem for an engine.

    Args:
        severity (`str`): `"error"`: it will not load, or not draft as trained. `"warning"`: check before serving.
        engines (`tuple[str, ...]`): The engines affected.
        key (`str`): Key of `config.json`, tensor or file.
        message (`str`): The problem and the remedy.
    """

    severity: str
    engines: tuple[str, ...]
    key: str
    message: str


error = partial(Finding, "error")
warning = partial(Finding, "warning")


@dataclass(frozen=True)
class Drafter:
    """
    A folder as the rules see it: the raw keys, with nested keys separate; the shapes of its tensors, and those that
    its configuration requires; whether this package can load it.
    """

    folder: Path
    config: dict
    nested: dict
    shapes: dict[str, tuple[int, ...]]
    wanted: dict[str, tuple[int, ...]]
    loads: bool = True

    def get(self, key: str, default=None):
        """A key as SGLang and z-lab read it: nested first, then at the top level."""
        value = self.nested.get(key)
        value = self.config.get(key) if value is None else value
        return default if value is None else value


def oldest_versions(config, architectures: list[str] | None) -> dict[str, str]:
    """The oldest versions of vLLM and SGLang that serve a drafter of this `DFlashDraftConfig`, saved as that class."""
    if config.sample_from_anchor or (config.has_head and config.head is not PathSelector):
        vllm, sglang = "0.33", "0.5.23"
    elif architectures == [DFLASH2]:
        vllm, sglang = "0.30", "0.5.20"
    elif architectures == [MUSE] or "sliding_attention" in config.layer_types:
        vllm, sglang = "0.26", "0.5.14"
    else:
        vllm, sglang = "0.21", "0.5.12"
    return {"vllm": vllm, "sglang": sglang}


def has_own_head(drafter: Drafter) -> bool:
    """Whether the drafter has its own head, over a reduced vocabulary."""
    return drafter.get("draft_vocab_size") not in (None, drafter.get("vocab_size"))


def layers_as_read(drafter: Drafter) -> dict[str, list[tuple[int | None, bool]]]:
    """For each serving engine, `(window, causal inside the block)` of each layer."""
    config, nested = drafter.config, drafter.nested
    muse = config.get("architectures") == [MUSE]
    count, window = config["num_hidden_layers"], config.get("sliding_window")
    kinds = config.get("layer_types") or ["full_attention"] * count  # Qwen3Config fills them in
    sliding = [kind == "sliding_attention" for kind in kinds]
    top = config.get("is_causal", False if muse else None)  # both set it for a Muse assistant
    # vLLM: the top level, then the nested key, and a forced window.
    override = top if top is not None else nested.get("causal")
    forced = bool(nested.get("use_swa")) and not any(sliding)
    vllm_window = nested.get("swa_window_size", window)
    vllm = [(vllm_window if s or forced else None, s if override is None else bool(override)) for s in sliding]
    # SGLang: the top level only; nested keys for windows and causality are not read.
    sglang = [(window if s else None, s if top is None else bool(top)) for s in sliding]
    return {"vllm": vllm, "sglang": sglang}


def _identity(drafter: Drafter) -> Iterator[Finding]:
    config = drafter.config
    model_type, muse = config.get("model_type"), config["architectures"] == [MUSE]
    if str(model_type) not in CONFIG_MAPPING_NAMES:
        yield error(SERVERS, "model_type", f"{model_type!r} is unknown to the engines' AutoConfig; write 'qwen3'.")
    elif muse != (model_type == "muse_glimmer_assistant"):
        message = f"{model_type!r} does not match {config['architectures'][0]}; save or convert the drafter again."
        yield error(ENGINES, "model_type", message)
    if "vocab_size" not in config and not muse:
        message = "is missing: engines use their default instead of the target's; write the target's vocab_size."
        yield error(SERVERS, "vocab_size", message)
    if not config.get("dtype", config.get("torch_dtype")):
        yield warning(ENGINES, "dtype", "is missing; write dtype and torch_dtype.")
    if "max_position_embeddings" not in config:
        message = "is missing: engines use their default; write at least the length that will be served."
        yield error(SERVERS, "max_position_embeddings", message)


def _features(drafter: Drafter) -> Iterator[Finding]:
    config, nested = drafter.config, drafter.nested
    muse = config["architectures"] == [MUSE]
    ids, depth = drafter.get("target_layer_ids"), drafter.get("num_target_layers")
    if ids is None:
        message = "is missing; engines then choose layers themselves. Write it in dflash_config and at the top."
        yield error(ENGINES, "target_layer_ids", message)
        return
    if list(ids) != sorted(ids):
        message = f"{ids} must increase: engines concatenate features in the order of the target's layers."
        yield error(SERVERS, "target_layer_ids", message)
    shifted = config.get("eagle_aux_hidden_state_layer_ids")
    if shifted and shifted != [i + 1 for i in ids]:
        message = f"{shifted} is what vLLM reads first and must be target_layer_ids + 1; remove it."
        yield error(("vllm",), "eagle_aux_hidden_state_layer_ids", message)
    if depth is None and not muse:
        message = "is missing, so the range of target_layer_ids is not checked; write the target's depth."
        yield warning(ENGINES, "num_target_layers", message)
    if depth is not None and max(ids) == depth - 1:
        message = f"{max(ids)} is the target's last layer: engines read it before the final norm. Compare tau."
        yield warning(SERVERS, "target_layer_ids", message)
    for key in ("block_size", "mask_token_id", "target_layer_ids"):
        top, inner = config.get(key), nested.get(key)
        if top is not None and inner is not None and top != inner:
            yield error(ENGINES, key, f"is {inner} in dflash_config and {top} at the top; readers differ.")
        elif top is None and inner is None:
            yield error(ENGINES, key, "is missing, so every reader uses its own default; write it in dflash_config.")
        elif top is None:
            message = "is in dflash_config only; transformers' own DFlash decoding reads the top level."
            yield warning(("transformers",), key, message)


def _attention(drafter: Drafter) -> Iterator[Finding]:
    config = drafter.config
    if config.get("layer_types") is None:
        yield warning(ENGINES, "layer_types", "is missing; write 'full_attention' or 'sliding_attention' by layer.")
    kinds = set(config.get("layer_types") or ["full_attention"])
    qwen3 = config.get("model_type") == "qwen3"
    if "sliding_attention" in kinds and qwen3 and config.get("use_sliding_window") is not True:
        yield error(SERVERS, "use_sliding_window", "must be true, or Qwen3Config drops the windows.")
    if len(kinds) > 1:
        yield warning(("vllm",), "layer_types", f"mixes full and sliding layers, {_V2_RUNNER}")
    read, said = layers_as_read(drafter), (config.get("is_causal"), drafter.nested.get("causal"))
    if None not in said and said[0] != said[1]:
        message = f"{said[1]} in dflash_config contradicts is_causal={said[0]}, which engines use. Compare tau."
        yield warning(ENGINES, "causal", message)
    if drafter.nested.get("causal_head") and not all(causal for layers in read.values() for _, causal in layers):
        message = "is JetSpec's key, which engines do not read: they draft bidirectionally. Save the drafter again."
        yield error(SERVERS, "causal_head", message)
    for i, (vllm, sglang) in enumerate(zip(read["vllm"], read["sglang"])):
        if vllm != sglang:
            message = f"layer {i}: vLLM reads (window, causal) = {vllm}, SGLang {sglang}; write layer_types, "
            message += "sliding_window and is_causal at the top level."
            yield error(SERVERS, "is_causal", message)
            break


def _rope(drafter: Drafter) -> Iterator[Finding]:
    config = drafter.config
    rope = config.get("rope_parameters")
    rope = {} if rope is None else rope
    scaling = config.get("rope_scaling") or {}
    if any(isinstance(value, dict) for value in rope.values()):
        message = "differs by layer type; vLLM rotates the context of all layers with one table. Write one."
        yield error(SERVERS, "rope_parameters", message)
        return
    thetas = [table["rope_theta"] for table in (rope, config, scaling) if table.get("rope_theta") is not None]
    if not thetas:
        yield error(SERVERS, "rope_theta", "is missing: vLLM uses 1000000, others 10000; write it.")
    elif any(theta != thetas[0] for theta in thetas):
        yield error(ENGINES, "rope_theta", f"is {thetas} in rope_parameters, top level and rope_scaling; write one.")
    elif "rope_theta" not in config:
        message = "is in rope_parameters only; readers before transformers 5 fall back to 10000. Write both."
        yield warning(SERVERS, "rope_theta", message)
    kinds = [table.get("rope_type", table.get("type", "default")) for table in (rope, scaling) if table]
    if any(kind != kinds[0] for kind in kinds) and scaling:
        message = f"has rope_type {kinds[1]!r}, but rope_parameters has {kinds[0]!r}; write one value in both."
        yield error(ENGINES, "rope_scaling", message)
    if "yarn" in kinds and not scaling:
        message = "is missing next to rope_parameters; readers before transformers 5 lose YaRN. Write both."
        yield warning(SERVERS, "rope_scaling", message)
    if "yarn" in kinds and any(key in {**rope, **scaling} for key in ("mscale", "mscale_all_dim")):
        message = "has mscale, which engines turn into an attention factor in different ways; compare tau."
        yield warning(SERVERS, "rope_parameters", message)
    if False in (drafter.get("rope_is_neox_style"), drafter.get("is_neox_style")):
        message = "is false, which few readers support. `dflash convert` writes the same drafter in the usual order."
        yield warning(SERVERS, "rope_is_neox_style", message)
    backbone = drafter.get("backbone_rotary_base")
    if backbone is not None and thetas and backbone != thetas[0]:
        message = f"{backbone} differs from rope_theta={thetas[0]}: engines rotate context and block alike."
        yield error(SERVERS, "backbone_rotary_base", message)


def _numbers(drafter: Drafter) -> Iterator[Finding]:
    get = drafter.get
    if get("hidden_act", "silu") != "silu":
        yield error(SERVERS, "hidden_act", f"{get('hidden_act')!r} is not supported; engines only have silu.")
    width, hidden = get("target_hidden_size"), get("hidden_size")
    if width not in (None, hidden):
        message = f"{width} differs from hidden_size={hidden}, but the target's embedding feeds the drafter."
        yield error(SERVERS, "target_hidden_size", message)
    if get("v_head_dim", get("head_dim")) != get("head_dim"):
        message = f"{get('v_head_dim')} differs from head_dim={get('head_dim')}; engines have one size for both."
        yield error(SERVERS, "v_head_dim", message)
    scale = get("input_embedding_scale", 1.0)
    dflash2 = drafter.config["architectures"] == [DFLASH2]
    if scale != 1.0:
        # Only vLLM's DFlash 2 model has it. SGLang asks the target's class for a factor, but no class has one.
        blind = ("sglang",) if dflash2 and "input_embedding_scale" in drafter.nested else SERVERS
        yield error(blind, "input_embedding_scale", f"{scale} is not read: the raw embedding is fed.")
    if has_own_head(drafter):
        # vLLM's DFlash 2 mistakes draft ids for the target's ids.
        blind, who = (SERVERS, "DFlash 2 in engines") if dflash2 else (("sglang",), "SGLang")
        message = f"{get('draft_vocab_size')} is a reduced vocabulary, which {who} does not support: "
        message += "`dflash convert DRAFT OUTPUT --share-head` writes a drafter without it."
        yield error(blind, "draft_vocab_size", message)
    if get("vocab_size") == _GEMMA_VOCABULARY:
        yield _gemma()


def _head(drafter: Drafter) -> Iterator[Finding]:
    for head in HEADS:
        if head not in _SERVED and head.is_set(drafter.get):
            field = next(iter(head.fields))
            message = f"{drafter.get(field)}: no engine has a {head.name}; decode with transformers' generate()."
            yield error(SERVERS, field, message)


def _dspark(drafter: Drafter) -> Iterator[Finding]:
    rank, kind = drafter.get("markov_rank"), drafter.get("markov_head_type", "vanilla")
    if drafter.config["architectures"] != [DSPARK]:
        if rank:
            message = f"{drafter.config['architectures'][0]} has no Markov head in vLLM; it needs {DSPARK}."
            yield error(("vllm",), "architectures", message)
    elif not rank:
        yield error(("vllm",), "markov_rank", "0: vLLM needs a Markov head for anchor-first drafters, SGLang none.")
    elif kind != "vanilla":
        yield error(("vllm",), "markov_head_type", f"{kind!r}: vLLM has only the vanilla Markov head, SGLang all.")


def _domino(drafter: Drafter) -> Iterator[Finding]:
    if not drafter.get("gru_hidden_dim"):
        return
    yield error(("vllm",), "gru_hidden_dim", "vLLM has no Domino head; SGLang serves it.")
    if drafter.get("pure_draft_prefix_len") != 1:
        message = f"{drafter.get('pure_draft_prefix_len')} is not 1, the only value that SGLang supports."
        yield error(("sglang",), "pure_draft_prefix_len", message)
    if (kind := drafter.get("projector_type")) != "domino":
        yield error(("sglang",), "projector_type", f"{kind!r}: SGLang needs 'domino'. Save the drafter again.")
    yield warning(("sglang",), "projector_type", "is drafted greedily by SGLang, on one GPU, in bfloat16.")


def _dflash2(drafter: Drafter) -> Iterator[Finding]:
    config, nested = drafter.config, drafter.nested
    named = [key for key in DFLASH2_KEYS if drafter.get(key)]
    if config["architectures"] != [DFLASH2]:
        if named:
            message = f"{config['architectures'][0]} has no {named[0]}; engines need {DFLASH2} to build it."
            yield error(SERVERS, "architectures", message)
        return
    yield warning(("vllm",), "architectures", f"{DFLASH2} drafts through a path selector, {_V2_RUNNER}")
    for key in DFLASH2_KEYS:
        if type(nested.get(key)) is not int or nested[key] < 1:
            # If both keys of the convolution are missing, SGLang builds none.
            alone = key in CONVOLUTION_KEYS and not any(nested.get(other) for other in CONVOLUTION_KEYS)
            message = f"{nested.get(key)} in dflash_config must be a positive integer; it is read nowhere else."
            yield error(("vllm",) if alone else SERVERS, key, message)
    group = nested.get("conv_group_size")
    if type(group) is int and group > 0 and config["hidden_size"] % group:
        yield error(ENGINES, "conv_group_size", f"{group} must divide hidden_size={config['hidden_size']}.")


def _tensors(drafter: Drafter) -> Iterator[Finding]:
    """Engines know only the published names; whether this package can load others, its own reader decides."""
    wanted, found = dict(drafter.wanted), dict(drafter.shapes)
    for shapes in (wanted, found):  # skipped by both engines, which read a separate file
        shapes.pop("mask_embedding", None)
    if drafter.config["architectures"] == [MUSE]:
        wanted = {NATIVE_NAMES.get(name, name): shape for name, shape in wanted.items()}
    for name in sorted(wanted.keys() - found.keys()):
        yield error(SERVERS, name, f"is missing {wanted[name]}; vLLM would serve without any warning.")
    remedy = " `dflash convert` gives canonical names." if drafter.loads else ""
    own = {name for name in ("embed_tokens.weight", "lm_head.weight") if name in found}
    for name in sorted(own if not has_own_head(drafter) else own - {"lm_head.weight"}):
        message = f"{found[name]} is skipped by SGLang, which uses the target's; vLLM loads and uses it."
        yield error(("sglang",), name, message)
    for name in sorted(found.keys() - wanted.keys() - own):
        if not (has_own_head(drafter) and name == "t2d"):
            yield error(SERVERS, name, f"is unknown {found[name]}: vLLM fails, SGLang skips it.{remedy}")
    for name in sorted(wanted.keys() & found.keys()):
        if wanted[name] != found[name]:
            yield error(SERVERS, name, f"has shape {found[name]}, but config.json requires {wanted[name]}.")


def _own_mask(drafter: Drafter) -> Iterator[Finding]:
    """Engines read the mask's embedding from a separate file, and silently skip a tensor of that name."""
    there = (drafter.folder / MASK_EMBEDDING).is_file()
    if not there and (drafter.get("own_mask_embedding") or "mask_embedding" in drafter.shapes):
        message = "is missing: engines skip the tensor mask_embedding and feed the target's. Save the drafter again."
        yield error(SERVERS, MASK_EMBEDDING, message)
    elif there:
        message = "is read from a local folder only: SGLang ignores it if the drafter is named by repository."
        yield warning(("sglang",), MASK_EMBEDDING, message)


def _beside_the_weights(drafter: Drafter) -> Iterator[Finding]:
    """Native folders need no code; ours include it, for readers without this package."""
    if drafter.config["architectures"] == [MUSE]:
        return
    auto_map = drafter.config.get("auto_map")
    auto_map = auto_map if isinstance(auto_map, dict) else {}
    files = [f"{str(name).split('.')[0]}.py" for name in auto_map.values() if "--" not in str(name)]
    missing = [name for name in (*files, "custom_generate/generate.py") if not (drafter.folder / name).is_file()]
    if "AutoModel" not in auto_map:
        message = "names no AutoModel: without this package the folder loads as a Qwen3 model with random weights."
        yield warning(("transformers",), "auto_map", message)
    elif missing:
        message = "is not in the folder, which does not load without this package; publish it, or save it again."
        yield warning(("transformers",), missing[0], message)


def of_speculators(config: dict) -> Iterator[Finding]:
    """Where drafting differs from training, for a file in speculators' own layout."""
    layers = config["transformer_layer_config"]
    kinds = set(layers.get("layer_types") or ()) if isinstance(layers, dict) else set()
    if "sliding_attention" in kinds:
        message = "was counted from the anchor in training, for every slot, and not in the block; engines and this"
        yield warning(ENGINES, "sliding_window", f"{message} package count it from each slot. Compare tau.")
    if "full_attention" in kinds and config.get("sliding_window_non_causal") is False:
        message = "is false, which vLLM applies to full layers too: they were trained bidirectionally in the block."
        yield warning(("vllm",), "sliding_window_non_causal", f"{message} `dflash convert` keeps them so.")


def fits_target(drafter: Drafter, target: dict) -> Iterator[Finding]:
    get, name = drafter.get, target.get("model_type")
    sizes = {"hidden_size": get("target_hidden_size", get("hidden_size")), "vocab_size": get("vocab_size")}
    for theirs, ours in {**sizes, "num_hidden_layers": get("num_target_layers")}.items():
        if None not in (ours, target.get(theirs)) and ours != target[theirs]:
            key = theirs if theirs in sizes else "num_target_layers"
            yield error(ENGINES, key, f"{ours} is not the target's {theirs}={target[theirs]}.")
    depth, ids = target.get("num_hidden_layers"), get("target_layer_ids", [])
    if depth is not None and ids and max(ids) >= depth:
        yield error(ENGINES, "target_layer_ids", f"{max(ids)} is past the target's last layer, {depth - 1}.")
    vocabulary = target.get("vocab_size")
    if vocabulary is not None and (get("mask_token_id") or 0) >= vocabulary:
        yield error(ENGINES, "mask_token_id", f"{get('mask_token_id')} is not one of the target's {vocabulary} ids.")
    longest, ours = target.get("max_position_embeddings"), get("max_position_embeddings")
    if longest is not None and ours is not None and ours < longest:
        message = f"{ours} is below the target's {longest}; vLLM before 0.33 reads past its rotary table. Raise it."
        yield warning(("vllm",), "max_position_embeddings", message)
    if target.get("tie_word_embeddings") and (drafter.folder / MASK_EMBEDDING).is_file():
        message = "is written into the target's embedding, which is also its head: that token's logits change."
        yield warning(("sglang",), "tie_word_embeddings", message)
    if str(name).startswith("gemma") and get("vocab_size") != _GEMMA_VOCABULARY:
        yield _gemma()


def _gemma() -> Finding:
    message = "looks like Gemma, whose embeddings are scaled: vLLM feeds raw values. Compare tau before serving."
    return warning(("vllm",), "vocab_size", message)


RULES = (
    _identity,
    _features,
    _attention,
    _rope,
    _numbers,
    _head,
    _dspark,
    _domino,
    _dflash2,
    _tensors,
    _own_mask,
    _beside_the_weights,
)
