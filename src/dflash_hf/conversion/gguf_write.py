"""A drafter as the GGUF file that llama.cpp runs, with the target's tokenizer."""

import json
from pathlib import Path

import torch
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from dflash_hf._io.files import atomic, digest_of
from dflash_hf._io.names import dtype_name
from dflash_hf._io.progress import without_standard_error
from dflash_hf._io.repositories import is_gguf
from dflash_hf.conversion.gguf_names import (
    ARCH,
    CONFIG_KEY,
    FIELD_OF_KEY,
    TOKEN_TYPES_KEY,
    TOKENS_KEY,
    WEIGHTS_KEY,
    import_gguf,
    llama_cpp_names,
)
from dflash_hf.conversion.gguf_read import open_gguf, target_config
from dflash_hf.conversion.llama_cpp_limits import llama_cpp_limits
from dflash_hf.drafter import DFlashDraftModel
from dflash_hf.layouts.configuration import DFlashDraftConfig
from dflash_hf.modeling.configuration_dflash import CONVOLUTION_KEYS
from dflash_hf.modeling.heads_dflash import MarkovHead, PathSelector
from dflash_hf.modeling.modeling_dflash import DFlashRotaryEmbedding
from dflash_hf.targets.digests import digest_of_parameters
from dflash_hf.targets.weights import plain_weight


DTYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16", "q8_0": "Q8_0"}
# Factors that llama.cpp takes to be 1.0 where they are absent.
_FACTORS = ("attention_value_scale", "input_embedding_scale", "output_multiplier")


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
    gguf = import_gguf()
    config = draft.config
    # 1. Whether llama.cpp could run it, before anything is written.
    config_of_target = target_config(target)
    limits = [f"{key}: {reason}" for key, reason in llama_cpp_limits(config, config_of_target)]
    if limits:
        raise ValueError(f"{path.name} cannot be written for llama.cpp: {' '.join(limits)}")
    dtype = dtype or dtype_name(draft.dtype)
    if dtype not in DTYPES:
        raise ValueError(f"{path.name} cannot be written in {dtype}; use `dtype='float32'` or a smaller one.")
    tensor_type = gguf.GGMLQuantizationType[DTYPES[dtype]]
    with atomic(path) as temporary_path:
        writer = gguf.GGUFWriter(temporary_path, ARCH)
        try:
            # 2. Keys. `_write_metadata` may add a tensor, so that the tensors are written after all keys.
            writer.add_name(path.stem)
            share = "ALL" if tensor_type.name == "F32" else "MOSTLY"  # of the tensors
            writer.add_file_type(gguf.LlamaFileType[f"{share}_{tensor_type.name}"])
            writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
            stored_config = json.loads(config.to_json_string())
            stored_config.pop("auto_map", None)
            writer.add_string(CONFIG_KEY, json.dumps(stored_config))
            writer.add_string(WEIGHTS_KEY, digest_of_parameters(draft.named_parameters()))
            tensors = _tensors(draft, target)
            has_mrope = "mrope_section" in (config_of_target.get("rope_parameters") or {})
            _write_metadata(writer, config, tensors, has_mrope)
            _write_tokenizer(writer, target, config, config.vocab_size or config_of_target["vocab_size"])
            writer.add_mask_token_id(config.mask_token_id)
            # 3. Tensors.
            for name, tensor in tensors.items():
                _write_tensor(writer, name, tensor, tensor_type)
            # 4. The file, in the only order that `gguf` allows.
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_tensors_to_file()
        finally:
            writer.close()


def _write_metadata(writer, config: DFlashDraftConfig, tensors: dict[str, torch.Tensor], has_mrope: bool) -> None:
    """
    Write llama.cpp's keys.

    Args:
        writer (`GGUFWriter`), config (`DFlashDraftConfig`): The file, and the drafter's configuration.
        tensors (`dict[str, torch.Tensor]`): The tensors of the file; a rotary table other than the default is added.
        has_mrope (`bool`): Whether a position of the target has several parts.
    """
    value_types = import_gguf().GGUFValueType
    type_of = {
        bool: value_types.BOOL,
        int: value_types.UINT32,
        float: value_types.FLOAT32,
        str: value_types.STRING,
    }

    def put(key: str, value) -> None:
        writer.add_key_value(f"{ARCH}.{key}", value, type_of[type(value)])

    for key, field in FIELD_OF_KEY.items():
        value = getattr(config, field)
        if value is None or (field in _FACTORS and value == 1.0):
            continue
        if field in (*_FACTORS, "rms_norm_eps", "final_logit_softcapping"):
            value = float(value)
        put(key, value)
    if config.token_head_class is MarkovHead:
        put("sample_from_anchor", config.sample_from_anchor)
        put("has_confidence_head", config.enable_confidence_head)
    if _is_dflash2(config):  # sizes of `_no_op_parts`
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
    elif has_mrope:  # positions have several parts; a drafter uses the first
        writer.add_array(f"{ARCH}.rope.dimension_sections", [rotated // 2, 0, 0, 0])


def _rope_factors(config: DFlashDraftConfig) -> tuple[torch.Tensor, float]:
    """Any rotary table in llama.cpp's form: the divisor of each default frequency `[head_dim / 2]`, and a scale."""
    frequencies, scale = ROPE_INIT_FUNCTIONS[config.rope_parameters["rope_type"]](config, device="cpu")
    default_frequencies, _ = DFlashRotaryEmbedding.compute_default_rope_parameters(config)
    divisors = torch.ones(config.head_dim // 2)
    divisors[: len(frequencies)] = default_frequencies / frequencies
    return divisors, scale


def _is_dflash2(config: DFlashDraftConfig) -> bool:
    """Whether llama.cpp takes the drafter for DFlash 2, which has both a convolution and a selector."""
    return config.conv_kernel_size is not None or config.token_head_class is PathSelector


def _tensors(draft: DFlashDraftModel, target) -> dict[str, torch.Tensor]:
    """
    All tensors of the file, by llama.cpp's names. If llama.cpp has no tensor for a part of the drafter, or needs one
    that the drafter lacks, others are changed or added so that the drafter computes the same.
    """
    config = draft.config
    state = {name: tensor.detach().cpu() for name, tensor in draft.state_dict().items()}
    mask_embedding = state.pop("mask_embedding", None)
    names = llama_cpp_names(state, config.num_hidden_layers)
    tensors = {names[name]: tensor for name, tensor in state.items()}
    if config.has_own_lm_head:
        tensors["d2t"] = tensors["d2t"] + torch.arange(len(tensors["d2t"]))  # from differences to ids
    if mask_embedding is not None or "token_embd.weight" in tensors:
        tensors = _with_both_tables(tensors, target)
    if mask_embedding is not None:  # llama.cpp has no tensor for it: it replaces a row of the embedding
        tensors["token_embd.weight"] = tensors["token_embd.weight"].clone()
        tensors["token_embd.weight"][config.mask_token_id] = mask_embedding
    return {**tensors, **_no_op_parts(config)}


def _with_both_tables(tensors: dict[str, torch.Tensor], target) -> dict[str, torch.Tensor]:
    """The tensors with an embedding and a head: llama.cpp would also use an own embedding as the head."""
    if {"token_embd.weight", "output.weight"} <= tensors.keys():
        return tensors
    embedding, head = _embedding_and_head(target)
    return {"token_embd.weight": embedding, "output.weight": head, **tensors}


def _no_op_parts(config: DFlashDraftConfig) -> dict[str, torch.Tensor]:
    """A convolution or a selector that changes nothing: llama.cpp has both only together, in DFlash 2."""
    tensors: dict[str, torch.Tensor] = {}
    if not _is_dflash2(config):
        return tensors
    if config.conv_kernel_size is None:
        for i in range(config.num_hidden_layers):
            for part in ("attn", "ffn"):
                tensors[f"blk.{i}.{part}_conv_base"] = torch.ones(2, 1, config.hidden_size)
                tensors[f"blk.{i}.{part}_conv_proj.weight"] = torch.zeros(2, config.hidden_size)
    if config.token_head_class is not PathSelector:
        tensors["selector_hidden.weight"] = torch.zeros(1, config.hidden_size)
        for part in ("predecessor", "successor"):
            tensors[f"selector_{part}.weight"] = torch.zeros(config.vocab_size, 1)
    return tensors


def _embedding_and_head(target) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights `[V, H]` of the target's embedding and of its head, from its file, folder or repository."""
    from transformers import AutoModelForCausalLM

    source = target
    options = {}
    if is_gguf(target):
        source = Path(target).parent
        options = {"gguf_file": Path(target).name}
    with without_standard_error():
        model = AutoModelForCausalLM.from_pretrained(source, dtype="auto", **options)
    return model.get_input_embeddings().weight.detach(), plain_weight(model.get_output_embeddings()).detach()


def _write_tensor(writer, name: str, tensor: torch.Tensor, tensor_type) -> None:
    """Write a tensor in a type of GGUF, or in the larger one that llama.cpp needs for its shape."""
    gguf = import_gguf()
    if name == "d2t":
        writer.add_tensor(name, tensor.numpy())
        return
    numbers = tensor.float().contiguous().numpy()
    if numbers.ndim != 2:  # norms, sinks, kernels
        tensor_type = gguf.GGMLQuantizationType.F32
    elif numbers.shape[-1] % gguf.GGML_QUANT_SIZES[tensor_type][0]:  # not a multiple of the blocks of a quantised type
        tensor_type = gguf.GGMLQuantizationType.F16
    if tensor_type.name == "F16" and abs(numbers).max() > torch.finfo(torch.float16).max:
        raise ValueError(f"{name} has values that overflow float16; use `dtype='bfloat16'`.")
    writer.add_tensor(name, gguf.quantize(numbers, tensor_type), raw_dtype=tensor_type)


def _write_tokenizer(writer, target, config: DFlashDraftConfig, vocab_size: int) -> None:
    """Write the target's tokenizer: unchanged from its GGUF file, else from `tokenizer.json`."""
    if is_gguf(target):
        _copy_tokenizer(writer, target, config)
    else:
        _convert_tokenizer(writer, target, config, vocab_size)


def _copy_tokenizer(writer, target, config: DFlashDraftConfig) -> None:
    """Write the tokenizer of a target's GGUF file."""
    gguf = import_gguf()
    fields = open_gguf(target).fields
    texts = fields[TOKENS_KEY].contents()
    token_types = [gguf.TokenType.NORMAL] * len(texts)
    if TOKEN_TYPES_KEY in fields:
        token_types = fields[TOKEN_TYPES_KEY].contents()
    _check_same_vocabulary(config, target, texts, [token_type == gguf.TokenType.UNUSED for token_type in token_types])
    for name, field in fields.items():
        if name.startswith("tokenizer.") and name != "tokenizer.ggml.mask_token_id":
            types = field.types
            writer.add_key_value(name, field.contents(), types[0], types[-1] if len(types) > 1 else None)


def _convert_tokenizer(writer, target, config: DFlashDraftConfig, vocab_size: int) -> None:
    """
    Write the tokenizer of a target's folder or repository, padded to `vocab_size`.

    Raises:
        `ValueError`: `gguf` cannot write it, or it belongs to another target.
    """
    gguf = import_gguf()
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
    unused = gguf.TokenType.UNUSED
    tokens += [(f"[PAD{i}]", 0.0, unused) for i in range(len(tokens), vocab_size)]
    texts, scores, token_types = zip(*tokens, strict=True)
    texts = [text.decode() if isinstance(text, bytes) else text for text in texts]
    _check_same_vocabulary(config, target, texts, [token_type == unused for token_type in token_types])
    writer.add_tokenizer_model(vocabulary.tokenizer_model)
    writer.add_tokenizer_pre("default")  # the target does the tokenization: a drafter only sees ids
    writer.add_token_list(texts)
    writer.add_token_scores(scores)
    writer.add_token_types(token_types)
    special = gguf.SpecialVocab(folder, load_merges=vocabulary.tokenizer_model == "gpt2", n_vocab=vocab_size)
    special.special_token_ids.pop("mask", None)
    special.add_to_gguf(writer, quiet=True)


def _check_same_vocabulary(config: DFlashDraftConfig, target, texts: list[str], unused: list[bool]) -> None:
    """
    Compare the vocabulary with that of training, whose digest drafters of this package record.

    Args:
        config (`DFlashDraftConfig`), target: The drafter's configuration, and the target's name.
        texts (`list[str]`): The texts of all tokens.
        unused (`list[bool]`): Which tokens only pad the vocabulary.

    Raises:
        `ValueError`: the drafter was trained with another vocabulary.
    """
    trained_with = (config.dflash_config.get("trained_with") or {}).get("tokenizer")
    digest = digest_of({text: i for i, text in enumerate(texts) if not unused[i]})
    if trained_with not in (None, digest):
        raise ValueError(
            f"{target} has a tokenizer with digest {digest}, but the drafter was trained with {trained_with}: it "
            "belongs to another target. If the tokenizer is nevertheless the right one, remove `trained_with` from "
            "the drafter's config.json."
        )


def _tokenizer_of_hub(target) -> Path:
    """A folder of the Hub's cache with the files of a repository's tokenizer, which are downloaded."""
    from huggingface_hub import snapshot_download

    files = ["tokenizer*", "vocab.json", "merges.txt", "added_tokens.json", "config.json", "chat_template*"]
    return Path(snapshot_download(str(target), allow_patterns=files))
