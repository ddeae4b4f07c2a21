"""
A drafter as the GGUF file that llama.cpp runs, and back.

The drafter may have any layout that `DFlashDraftModel` reads. Keys and tensor names are those of llama.cpp b11549
(`src/models/dflash.cpp`); the file also holds the target's tokenizer, and under our own keys the drafter's
`config.json`, since llama.cpp's keys do not cover all of it, and a digest of its weights.
"""

import json
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

import torch
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from dflash_hf._io.errors import needs
from dflash_hf._io.files import atomic, digest_of
from dflash_hf._io.progress import without_standard_error
from dflash_hf._io.repositories import is_gguf
from dflash_hf._io.weights import save_folder
from dflash_hf.drafter import DFlashDraftModel
from dflash_hf.layouts.configuration import DFlashDraftConfig
from dflash_hf.modeling.configuration_dflash import CONVOLUTION_KEYS
from dflash_hf.modeling.heads_dflash import MarkovHead, PathSelector, TokenHead
from dflash_hf.modeling.modeling_dflash import DFlashRotaryEmbedding
from dflash_hf.pairs.configs import incompatibilities, read_config, resized_vocabulary
from dflash_hf.targets.config_fields import num_layers_of
from dflash_hf.targets.digests import digest_of_parameters


ARCH = "dflash"
FILE_PATTERN = "d[fs][lp]a*-*.gguf"  # dflash-, or dspark- for drafters with a Markov head
DTYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16", "q8_0": "Q8_0"}
_CONFIG = "dflash_hf.config"
_WEIGHTS = "dflash_hf.weights"
_TOKENS = "tokenizer.ggml.tokens"
_TOKEN_TYPES = "tokenizer.ggml.token_type"
# `keys`: our field by llama.cpp's key, which follows "dflash."; fields with their default value are not written.
# `tensors`: llama.cpp's name by the published name, of those that `gguf` has no names for; without `layers.N.`.
# `targets`, `last_layer`: model types, without punctuation, for which llama.cpp exposes the inputs of layers, and the
# output of the last layer as well.
_LLAMA_CPP = json.loads(Path(__file__).with_name("llama_cpp.json").read_text(encoding="utf-8"))
_KEYS = {**_LLAMA_CPP["keys"], **{key: key for key in (*CONVOLUTION_KEYS, *PathSelector.sizes)}}
_NAMES = _LLAMA_CPP["tensors"]
# Factors that llama.cpp takes to be 1.0 where they are absent.
_FACTORS = ("attention_value_scale", "input_embedding_scale", "output_multiplier")
_SUPPORTED_HEADS = (TokenHead, PathSelector, MarkovHead)  # that llama.cpp supports


def gguf_in(folder: Path) -> Path | None:
    """The file in a drafter's folder that llama.cpp finds by its name, if there is one."""
    return next(iter(sorted(folder.glob(FILE_PATTERN))), None)


def limits(config: DFlashDraftConfig, target: dict | None = None) -> Iterator[tuple[str, str]]:
    """
    What llama.cpp cannot run in a drafter, or not with that target: key, and reason.

    Args:
        config (`DFlashDraftConfig`): The drafter's configuration.
        target (`dict`, *optional*): From [`target_config`].
    """
    hidden = config.hidden_size
    rope = config.rope_parameters
    if config.attention_bias:
        yield "attention_bias", "llama.cpp has no biases for q, k, v and o."
    if len({config.layer_is_causal(i) for i in range(config.num_hidden_layers)}) > 1:
        yield "is_causal", "some layers are causal inside the block, some not; llama.cpp has one value for all."
    if config.v_head_dim != config.head_dim:
        yield "v_head_dim", f"{config.v_head_dim} is not head_dim={config.head_dim}; llama.cpp has one size for both."
    if config.target_hidden_size != hidden:
        yield "target_hidden_size", f"{config.target_hidden_size} must equal hidden_size={hidden} in llama.cpp."
    if config.backbone_rotary_base not in (None, rope["rope_theta"]):
        yield "backbone_rotary_base", "llama.cpp rotates the keys of context and block with one base."
    if config.hidden_act not in ("silu", "gelu_pytorch_tanh"):
        yield "hidden_act", f"{config.hidden_act!r} is neither 'silu' nor 'gelu_pytorch_tanh'."
    if rope["rope_type"] in ("dynamic", "longrope"):
        yield "rope_parameters", f"{rope['rope_type']!r} changes with the length; a GGUF file holds one table."
    if config.token_head_class not in _SUPPORTED_HEADS:
        yield next(iter(config.token_head_class.fields)), f"llama.cpp has no {config.token_head_class.name}."
    elif config.token_head_class is MarkovHead and not (config.markov_rank and config.markov_head_type == "vanilla"):
        kind = f"{config.markov_head_type!r} with markov_rank={config.markov_rank}"
        yield "markov_head_type", f"{kind}: llama.cpp only has the 'vanilla' Markov head, with a rank."
    elif config.sample_from_anchor and config.token_head_class is not MarkovHead:
        yield "sample_from_anchor", "llama.cpp reads it only for drafters with a Markov head."
    if config.enable_confidence_head and not config.confidence_head_with_markov:
        yield "confidence_head_with_markov", "llama.cpp's confidence head reads the previous token, too."
    top_k = config.selector_top_k
    if top_k is not None and hidden < top_k * (top_k + 1):
        yield "selector_top_k", f"{top_k} needs a hidden_size of {top_k * (top_k + 1)} in llama.cpp, not {hidden}."
    if getattr(config, "quantization_config", None) is not None:
        yield "quantization_config", "the drafter is quantised: convert the unquantised drafter, with --dtype q8_0."
    if target is not None:
        yield from _limits_of_target(config, target)


def _limits_of_target(config: DFlashDraftConfig, target: dict) -> Iterator[tuple[str, str]]:
    """What llama.cpp does not expose of a target, and where drafter and target do not fit each other."""
    model_type = str(target.get("model_type"))
    architecture = "".join(character for character in model_type.removesuffix("_text") if character.isalnum())
    num_layers = num_layers_of(target)
    reads_last_layer = num_layers is not None and max(config.target_layer_ids) + 1 == num_layers
    if architecture not in _LLAMA_CPP["targets"]:
        yield "model_type", f"llama.cpp (b11549) exposes no features of a {model_type} target, and exits."
    elif reads_last_layer and architecture not in _LLAMA_CPP["last_layer"]:
        yield "target_layer_ids", f"{num_layers - 1} is the last layer, whose output llama.cpp does not expose."
    yield from incompatibilities(config, target)
    resized = resized_vocabulary(config, target)
    if resized is not None:
        yield "vocab_size", f"{resized}; a GGUF file has one vocabulary, for the drafter and its tokenizer."


def target_config(target: str | Path) -> dict:
    """
    The configuration of a target for [`limits`]: its text configuration, or the same keys from a GGUF file.

    Raises:
        `ValueError`, `OSError`: it cannot be read.
    """
    if not is_gguf(target):
        config = read_config(str(target), f"--target {target}", None)
        return config.get("text_config", config)
    fields = _open(target).fields
    kind = fields["general.architecture"].contents()
    if ARCH in kind:
        raise ValueError(f"{target} is a drafter; name the GGUF file of the target that it drafts for.")
    keys = {"embedding_length": "hidden_size", "block_count": "num_hidden_layers"}
    sizes = {field: fields[f"{kind}.{key}"].contents() for key, field in keys.items() if f"{kind}.{key}" in fields}
    if _TOKENS not in fields or len(sizes) < len(keys):
        raise ValueError(f"{target} is not a language model with a tokenizer; name the target's GGUF file or folder.")
    config = {"model_type": kind, "vocab_size": len(fields[_TOKENS].data), **sizes}
    if f"{kind}.rope.dimension_sections" in fields:
        config["rope_parameters"] = {"mrope_section": []}
    return config


def write_gguf(draft: DFlashDraftModel, path: Path, target: str | Path, dtype: str | None = None) -> None:
    """
    Write a drafter for llama.cpp, completely or not at all.

    Args:
        draft (`DFlashDraftModel`): The drafter.
        path (`Path`): The file; llama.cpp finds a file named `dflash-*.gguf` by itself.
        target (`str` or `Path`): The target's GGUF file, its folder or its repository, for the tokenizer.
        dtype (`str`, *optional*): Dtype of matrices, a key of `DTYPES`; vectors stay in fp32. Default: the drafter's.

    Raises:
        `ValueError`: llama.cpp could not run it, or the tokenizer belongs to another target.
        `ImportError`: `gguf` is not installed.
    """
    gguf = _gguf()
    config = draft.config
    config_of_target = target_config(target)
    for key, reason in limits(config, config_of_target):
        raise ValueError(f"{path.name} cannot be written for llama.cpp: {key}: {reason}")
    dtype = dtype or str(draft.dtype).removeprefix("torch.")
    if dtype not in DTYPES:
        raise ValueError(f"{path.name} cannot be written in {dtype}; convert with --dtype float32 or a smaller one.")
    kind = gguf.GGMLQuantizationType[DTYPES[dtype]]
    with atomic(path) as half:
        writer = gguf.GGUFWriter(half, ARCH)
        try:
            writer.add_name(path.stem)
            writer.add_file_type(gguf.LlamaFileType[f"{'ALL' if kind.name == 'F32' else 'MOSTLY'}_{kind.name}"])
            writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
            stored_config = json.loads(config.to_json_string())
            stored_config.pop("auto_map", None)
            writer.add_string(_CONFIG, json.dumps(stored_config))
            writer.add_string(_WEIGHTS, digest_of_parameters(draft.named_parameters()))
            tensors = _tensors(draft, target)
            mrope = "mrope_section" in (config_of_target.get("rope_parameters") or {})
            _write_keys(writer, config, tensors, mrope)
            _write_tokenizer(writer, target, config, config.vocab_size or config_of_target["vocab_size"])
            writer.add_mask_token_id(config.mask_token_id)
            for name, tensor in tensors.items():
                _write_tensor(writer, name, tensor, kind)
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_tensors_to_file()
        finally:
            writer.close()


def _write_keys(writer, config: DFlashDraftConfig, tensors: dict, mrope: bool) -> None:
    """Write llama.cpp's keys; rotary tables other than the default are added to the tensors."""
    gguf_types = _gguf().GGUFValueType
    types = {bool: gguf_types.BOOL, int: gguf_types.UINT32, float: gguf_types.FLOAT32, str: gguf_types.STRING}

    def put(key: str, value) -> None:
        writer.add_key_value(f"{ARCH}.{key}", value, types[type(value)])

    for key, field in _KEYS.items():
        value = getattr(config, field)
        if value is None or (field in _FACTORS and value == 1.0):
            continue
        if field in (*_FACTORS, "rms_norm_eps", "final_logit_softcapping"):
            value = float(value)
        put(key, value)
    if config.token_head_class is MarkovHead:
        put("sample_from_anchor", config.sample_from_anchor)
        put("has_confidence_head", config.enable_confidence_head)
    if _is_dflash2(config):  # sizes of a no-op part, see `_tensors`
        for key in (*CONVOLUTION_KEYS, *PathSelector.sizes):
            if getattr(config, key) is None:
                put(key, config.hidden_size if key == "conv_group_size" else 1)
    writer.add_array(f"{ARCH}.target_layers", [i + 1 for i in config.target_layer_ids])  # features are their inputs
    put("attention.causal", config.layer_is_causal(0))
    sliding = [kind == "sliding_attention" for kind in config.layer_types]
    if any(sliding):
        put("attention.sliding_window", config.sliding_window)
        writer.add_array(f"{ARCH}.attention.sliding_window_pattern", sliding)
    rope = config.rope_parameters
    rotated = int(config.head_dim * rope.get("partial_rotary_factor", 1.0))
    put("rope.freq_base", float(rope["rope_theta"]))
    put("rope.dimension_count", rotated)
    if rope["rope_type"] != "default":
        tensors["rope_freqs.weight"], scale = _rope_factors(config)
        put("rope.scaling.attn_factor", float(scale))
    elif mrope:  # positions have several parts; a drafter uses the first
        writer.add_array(f"{ARCH}.rope.dimension_sections", [rotated // 2, 0, 0, 0])


def _rope_factors(config: DFlashDraftConfig) -> tuple[torch.Tensor, float]:
    """Any rotary table in llama.cpp's form: the slow-down of each frequency `[head_dim / 2]`, and its scale."""
    table, scale = ROPE_INIT_FUNCTIONS[config.rope_parameters["rope_type"]](config, device="cpu")
    default_table, _ = DFlashRotaryEmbedding.compute_default_rope_parameters(config)
    factors = torch.ones(config.head_dim // 2)
    factors[: len(table)] = default_table / table
    return factors, scale


def _is_dflash2(config: DFlashDraftConfig) -> bool:
    """Whether llama.cpp treats the drafter as DFlash 2, of which it supports both parts or none."""
    return config.conv_kernel_size is not None or config.token_head_class is PathSelector


def _tensors(draft: DFlashDraftModel, target) -> dict[str, torch.Tensor]:
    """All tensors by llama.cpp's names."""
    config = draft.config
    state = {name: tensor.detach().cpu() for name, tensor in draft.state_dict().items()}
    mask = state.pop("mask_embedding", None)
    names = _llama_cpp_names(state, config.num_hidden_layers)
    tensors = {names[name]: tensor for name, tensor in state.items()}
    if config.has_own_lm_head:
        tensors["d2t"] = tensors["d2t"] + torch.arange(len(tensors["d2t"]))  # from differences to ids
    # A drafter has both tables or none: llama.cpp would use an own embedding as the head as well.
    has_own_table = mask is not None or "token_embd.weight" in tensors
    if has_own_table and not {"token_embd.weight", "output.weight"} <= tensors.keys():
        embedding, head = _embedding_and_head(target)
        tensors = {"token_embd.weight": embedding, "output.weight": head, **tensors}
    if mask is not None:
        tensors["token_embd.weight"] = tensors["token_embd.weight"].clone()
        tensors["token_embd.weight"][config.mask_token_id] = mask
    # llama.cpp supports convolution and selector only together: a missing part is written as a no-op.
    if _is_dflash2(config) and config.conv_kernel_size is None:
        for i in range(config.num_hidden_layers):
            for part in ("attn", "ffn"):
                tensors[f"blk.{i}.{part}_conv_base"] = torch.ones(2, 1, config.hidden_size)
                tensors[f"blk.{i}.{part}_conv_proj.weight"] = torch.zeros(2, config.hidden_size)
    if _is_dflash2(config) and config.token_head_class is not PathSelector:
        tensors["selector_hidden.weight"] = torch.zeros(1, config.hidden_size)
        for part in ("predecessor", "successor"):
            tensors[f"selector_{part}.weight"] = torch.zeros(config.vocab_size, 1)
    return tensors


def _llama_cpp_names(tensor_names, num_layers: int) -> dict[str, str]:
    """llama.cpp's name of each of a drafter's tensors, by published name; `gguf` knows Qwen3's names."""
    gguf = _gguf()
    qwen3_names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN3, num_layers)
    names = {}
    for published in tensor_names:
        prefix = ""
        part = published
        if published.startswith("layers."):
            _, layer, part = published.split(".", 2)
            prefix = f"blk.{layer}."
        if part in _NAMES:
            name = prefix + _NAMES[part]
        else:
            name = qwen3_names.get_name(f"model.{published}", try_suffixes=(".weight", ".bias"))
        if name is None:
            raise ValueError(f"{published} cannot be written to a drafter's GGUF file: llama.cpp has no such part.")
        names[published] = name
    return names


def _embedding_and_head(target) -> tuple[torch.Tensor, torch.Tensor]:
    """The target's own tables, `[V, H]` each, from its file, folder or repository."""
    from transformers import AutoModelForCausalLM

    source = target
    options = {}
    if is_gguf(target):
        source = Path(target).parent
        options = {"gguf_file": Path(target).name}
    with without_standard_error():
        model = AutoModelForCausalLM.from_pretrained(source, dtype="auto", **options)
    return model.get_input_embeddings().weight.detach(), model.get_output_embeddings().weight.detach()


def _write_tensor(writer, name: str, tensor: torch.Tensor, kind) -> None:
    """Write a tensor in the type `kind`, or in the larger one that llama.cpp needs for its shape."""
    gguf = _gguf()
    if name == "d2t":
        writer.add_tensor(name, tensor.numpy())
        return
    numbers = tensor.float().contiguous().numpy()
    if numbers.ndim != 2:  # norms, sinks, kernels
        kind = gguf.GGMLQuantizationType.F32
    elif numbers.shape[-1] % gguf.GGML_QUANT_SIZES[kind][0]:
        kind = gguf.GGMLQuantizationType.F16
    if kind.name == "F16" and abs(numbers).max() > 65504:
        raise ValueError(f"{name} has values that overflow float16; convert with --dtype bf16.")
    writer.add_tensor(name, gguf.quantize(numbers, kind), raw_dtype=kind)


def _write_tokenizer(writer, target, config: DFlashDraftConfig, vocab_size: int) -> None:
    """Write the target's tokenizer: unchanged from its GGUF file, else from `tokenizer.json`."""
    gguf = _gguf()
    unused = gguf.TokenType.UNUSED
    if is_gguf(target):
        fields = _open(target).fields
        texts = fields[_TOKENS].contents()
        kinds = [gguf.TokenType.NORMAL] * len(texts)
        if _TOKEN_TYPES in fields:
            kinds = fields[_TOKEN_TYPES].contents()
        _check_trained_with(config, target, texts, [kind == unused for kind in kinds])
        for name, field in fields.items():
            if name.startswith("tokenizer.") and name != "tokenizer.ggml.mask_token_id":
                types = field.types
                writer.add_key_value(name, field.contents(), types[0], types[-1] if len(types) > 1 else None)
        return
    folder = Path(target).expanduser()
    if not folder.is_dir():
        folder = _tokenizer_of_hub(target)
    try:
        try:
            vocabulary = gguf.BpeVocab(folder)
        except FileNotFoundError:  # not a byte-level tokenizer
            vocabulary = gguf.LlamaHfVocab(folder)
        tokens = list(vocabulary.all_tokens())
    except Exception as error:  # gguf's readers fail in many ways on unknown files
        raise ValueError(
            f"{target} has no tokenizer.json that `gguf` can write ({error}); name the target's GGUF file instead."
        ) from error
    if len(tokens) > vocab_size:
        raise ValueError(
            f"{target} has a tokenizer of {len(tokens)} tokens, but the drafter's vocab_size={vocab_size}: it belongs "
            "to another target."
        )
    tokens += [(f"[PAD{i}]", 0.0, unused) for i in range(len(tokens), vocab_size)]
    texts, scores, kinds = zip(*tokens, strict=True)
    texts = [text.decode() if isinstance(text, bytes) else text for text in texts]
    _check_trained_with(config, target, texts, [kind == unused for kind in kinds])
    writer.add_tokenizer_model(vocabulary.tokenizer_model)
    writer.add_tokenizer_pre("default")  # the target does the tokenization: a drafter only sees ids
    writer.add_token_list(texts)
    writer.add_token_scores(scores)
    writer.add_token_types(kinds)
    special = gguf.SpecialVocab(folder, load_merges=vocabulary.tokenizer_model == "gpt2", n_vocab=vocab_size)
    special.special_token_ids.pop("mask", None)
    special.add_to_gguf(writer, quiet=True)


def _check_trained_with(config: DFlashDraftConfig, target, texts: list[str], unused: list[bool]) -> None:
    """Compare the vocabulary's digest, which drafters trained with this package record."""
    trained_with = (config.dflash_config.get("trained_with") or {}).get("tokenizer")
    digest = digest_of({text: i for i, text in enumerate(texts) if not unused[i]})
    if trained_with not in (None, digest):
        raise ValueError(
            f"{target} has a tokenizer with digest {digest}, but the drafter was trained with {trained_with}: it "
            "belongs to another target. If it does not, remove `trained_with` from the drafter's config.json."
        )


def _tokenizer_of_hub(target) -> Path:
    """The folder in the cache with a repository's tokenizer."""
    from huggingface_hub import snapshot_download

    files = ["tokenizer*", "vocab.json", "merges.txt", "added_tokens.json", "config.json", "chat_template*"]
    return Path(snapshot_download(str(target), allow_patterns=files))


def unpack_gguf(file: Path, folder: Path) -> Path:
    """
    Unpack a GGUF drafter into a folder of safetensors, which `DFlashDraftModel.from_pretrained` reads.

    Raises:
        `ValueError`: the file is damaged, or not a drafter.
    """
    gguf = _gguf()
    reader = _open(file)
    config = gguf_config(file)
    parsed = DFlashDraftConfig.from_dict(dict(config))
    with torch.device("meta"):
        wanted = DFlashDraftModel(parsed).state_dict()
    stored = {tensor.name: tensor for tensor in reader.tensors}
    kind = stored["fc.weight"].tensor_type.name if "fc.weight" in stored else "F32"
    dtype = {"F16": torch.float16, "BF16": torch.bfloat16}.get(kind, torch.float32)
    tensors = {}
    names = _llama_cpp_names([name for name in wanted if name != "mask_embedding"], parsed.num_hidden_layers)
    for published, name in names.items():
        if name not in stored:
            continue
        tensor = stored[name]
        shape = wanted[published].shape
        if name == "d2t":  # from ids to differences
            ids = torch.tensor(tensor.data).reshape(shape).to(torch.int64)
            tensors["d2t"] = ids - torch.arange(len(ids))
        else:
            numbers = torch.tensor(gguf.dequantize(tensor.data, tensor.tensor_type))
            tensors[published] = numbers.reshape(shape).to(dtype)
    if parsed.own_mask_embedding:
        table = stored["token_embd.weight"]
        row = gguf.dequantize(table.data, table.tensor_type)[parsed.mask_token_id]
        tensors["mask_embedding"] = torch.tensor(row).to(dtype)
    return save_folder(folder, {**config, "dtype": str(dtype).removeprefix("torch.")}, tensors)


def gguf_config(file: str | Path) -> dict:
    """
    The `config.json` of a GGUF drafter: the original if it is stored, else derived from llama.cpp's keys.

    Raises:
        `ValueError`: the file is damaged, or not a drafter.
    """
    reader = _open(file)
    fields = {name.removeprefix(f"{ARCH}."): field for name, field in reader.fields.items()}
    kind = fields["general.architecture"].contents()
    if kind != ARCH:
        raise ValueError(f"{file} is not a DFlash drafter but a model of llama.cpp's architecture {kind!r}.")
    if _CONFIG in fields:
        return json.loads(fields[_CONFIG].contents())

    def get(key: str, default=None):
        return fields[key].contents() if key in fields else default

    tensors = {tensor.name: tensor for tensor in reader.tensors}
    config = {field: get(key) for key, field in _KEYS.items() if key in fields}
    missing = [key for key, field in _KEYS.items() if field in ("num_hidden_layers", "head_dim") and key not in fields]
    if missing:
        raise ValueError(f"{file} is incomplete: it has no {', '.join(f'{ARCH}.{key}' for key in missing)}.")
    pattern = get("attention.sliding_window_pattern", [False] * config["num_hidden_layers"])
    rope = {"rope_type": "default", "rope_theta": get("rope.freq_base", 10_000.0)}
    if get("rope.scaling.type", "none") not in ("none", "linear") or "rope_freqs.weight" in tensors:
        raise ValueError(f"{file} scales its rotary embedding in an unsupported way; convert the original drafter.")
    if "rope.scaling.factor" in fields:
        rope |= {"rope_type": "linear", "factor": get("rope.scaling.factor")}
    rotated = get("rope.dimension_count", config["head_dim"])
    if rotated != config["head_dim"]:
        rope["partial_rotary_factor"] = rotated / config["head_dim"]
    if "markov_w1.weight" in tensors:
        config |= {
            "markov_rank": int(tensors["markov_w1.weight"].shape[0]),
            "markov_head_type": "vanilla",
            "sample_from_anchor": get("sample_from_anchor", True),
            "confidence_head_with_markov": True,
            "enable_confidence_head": "conf_proj.weight" in tensors,
        }
    return {
        "architectures": [(PathSelector if PathSelector.is_set(config.get) else TokenHead).architecture],
        "model_type": "qwen3",
        **config,
        "target_layer_ids": [i - 1 for i in get("target_layers", [])],
        "mask_token_id": get("tokenizer.ggml.mask_token_id"),
        "vocab_size": len(get(_TOKENS, [])) or None,
        "layer_types": ["sliding_attention" if slides else "full_attention" for slides in pattern],
        "sliding_window": get("attention.sliding_window"),
        "use_sliding_window": any(pattern),
        "is_causal": get("attention.causal", False),
        "rope_parameters": rope,
        "draft_vocab_size": int(tensors["d2t"].shape[0]) if "d2t" in tensors else None,
        "has_embed_tokens": "token_embd.weight" in tensors,
    }


def weights_of(file: str | Path) -> str | None:
    """The digest of the weights that a GGUF drafter was made of; `None` if it does not say."""
    fields = _open(file).fields
    return fields[_WEIGHTS].contents() if _WEIGHTS in fields else None


def _open(file: str | Path):
    """
    The reader of a GGUF file.

    Raises:
        `ValueError`: it is not a complete GGUF file.
        `ImportError`: `gguf` is not installed.
    """
    path = Path(file).expanduser()
    _gguf()  # without it no file can be judged
    if not path.is_file():
        raise FileNotFoundError(f"{file}: there is no such file.")
    try:
        # The key of the cache: another file at this path may have the same size and time, as from an archive.
        stat = path.stat()
        return _read(path, (stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns))
    except Exception as error:  # gguf checks little and fails in many ways
        raise ValueError(
            f"{file} is not a complete GGUF file ({error or type(error).__name__}); download it again."
        ) from error


@lru_cache(maxsize=2)  # a pair: commands need a file several times, and a vocabulary takes seconds to read
def _read(path: Path, state: tuple[int, ...]):
    reader = _gguf().GGUFReader(path)
    reader.fields["general.architecture"].contents()
    return reader


def _gguf():
    """The package `gguf`, imported when a GGUF file is read or written."""
    with needs("GGUF files need `gguf`", "gguf"):
        import gguf
    return gguf
