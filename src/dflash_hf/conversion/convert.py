"""
Converting a drafter between the layout that engines serve (`"z-lab"`), transformers' own (`"native"`) and llama.cpp's
file (`"gguf"`).

Sources: every layout that `DFlashDraftModel.from_pretrained` reads, and `.gguf` files. Native folders load as
`MuseGlimmerAssistantModel` without any code next to them.
"""

import tempfile
from pathlib import Path

import torch
from transformers import MuseGlimmerAssistantConfig

from dflash_hf._io.errors import UsageError
from dflash_hf._io.names import OUTPUT_LAYOUTS, dtype_name
from dflash_hf._io.progress import without_bars
from dflash_hf._io.repositories import is_gguf
from dflash_hf.conversion.gguf_read import unpack_gguf
from dflash_hf.conversion.gguf_write import write_gguf
from dflash_hf.conversion.safetensors_folder import save_folder
from dflash_hf.drafter import DFlashDraftModel
from dflash_hf.pairs.configs import non_default_fields
from dflash_hf.pairs.draft_vocabulary import with_shared_head
from dflash_hf.targets.weights import quantised_layer


# The native layout's names of tensors that it names differently, by published name.
NATIVE_NAMES = {"fc.weight": "encoder.fc.weight", "hidden_norm.weight": "encoder.output_norm_enc.weight"}
# Keys of a native config.json. Without `vocab_size`, engines would use Muse's.
_NATIVE_KEYS = (*MuseGlimmerAssistantConfig.__annotations__, "vocab_size")


def convert(
    src: str | Path,
    dst: str | Path,
    to: str = "z-lab",
    revision: str | None = None,
    dtype: str | None = None,
    share_head: bool = False,
    target: str | Path | None = None,
) -> Path:
    """
    Write the drafter in `src` to the new folder `dst`, or the new file `dst`, in another layout.

    Args:
        src (`str` or `Path`): A folder or repository of any published layout, or a `.gguf` file.
        dst (`str` or `Path`): A folder that does not exist yet, or is empty. Written completely or not at all.
        to (`str`): `"z-lab"`: served by vLLM and SGLang, with the package's code beside the weights. `"native"`: for
            plain transformers; only drafters with full, bidirectional, bias-free attention can be expressed in it.
            `"gguf"`: one file for llama.cpp, whose limits
            [`~dflash_hf.conversion.llama_cpp_limits.llama_cpp_limits`] lists.
        revision (`str`, *optional*): Branch, tag or commit of a repository.
        dtype (`str`, *optional*): Dtype of the weights, such as `"bfloat16"`; for a GGUF file also `"q8_0"`. Default:
            unchanged.
        share_head (`bool`): Drop the own head of a drafter with a reduced vocabulary and draft all tokens with the
            target's head, for engines that support no other.
        target (`str` or `Path`, *optional*): For a GGUF file: the target's GGUF file, folder or repository, whose
            tokenizer is included.

    Returns:
        `Path`: `dst`.

    Raises:
        `ValueError`: the drafter cannot be expressed in that layout, or `src` is not a drafter; says why.
        `FileExistsError`: `dst` exists and is not an empty folder.
    """
    _check_arguments(to, str(dst), dtype, target)
    dst = Path(dst).resolve()  # `Path(".")` has neither a name nor a parent
    if dst.is_file() or (dst.is_dir() and (to == "gguf" or any(dst.iterdir()))):
        raise FileExistsError(f"{dst} exists; name a new {'file' if to == 'gguf' else 'folder'}.")
    dst.parent.mkdir(parents=True, exist_ok=True)
    # Windows keeps the files of tensors that are in use.
    temporary_folder = tempfile.TemporaryDirectory(dir=dst.parent, prefix=f".{dst.name}.", ignore_cleanup_errors=True)
    with temporary_folder as scratch:
        with without_bars():
            draft = _load_source(src, Path(scratch, "unpacked"), revision)
        _check_plain(draft, src)
        if share_head:
            draft = with_shared_head(draft)
        if to == "gguf":
            write_gguf(draft, dst, target, dtype)
            return dst
        if dtype is not None:
            draft = draft.to(getattr(torch, dtype))
        result = Path(scratch, "result")
        if to == "native":
            _save_native(draft, result)
        else:
            with without_bars():
                draft.save_pretrained(result)
        if dst.is_dir():  # an empty folder, which stays: it may be the working directory of a shell
            for file in result.iterdir():
                file.rename(dst / file.name)
        else:
            result.rename(dst)
    return dst


def _check_arguments(to: str, dst: str, dtype: str | None, target) -> None:
    """
    Raises:
        `UsageError`: the arguments of [`convert`] do not fit each other.
    """
    if to not in OUTPUT_LAYOUTS:
        raise UsageError(f"to={to!r} must be one of {', '.join(OUTPUT_LAYOUTS)}.")
    if to == "gguf" and not dst.endswith(".gguf"):
        raise UsageError(f"{dst} must end in .gguf, as `to='gguf'` writes a file; name it {dst}.gguf.")
    if to != "gguf" and dst.endswith(".gguf"):
        raise UsageError(f"{dst} would be a folder with to={to!r}; choose `to='gguf'` for a file, or name a folder.")
    if to == "gguf" and target is None:
        raise UsageError(f"{dst} needs the target's tokenizer, which a GGUF file contains; add `target=...`.")
    if to != "gguf" and target is not None:
        raise UsageError(f"target={target} is for GGUF files only; name a file that ends in .gguf, or leave it out.")
    if dtype == "q8_0" and to != "gguf":
        raise UsageError(f"dtype={dtype} is for GGUF files only, not for `to={to!r}`.")


def _check_plain(draft: DFlashDraftModel, src: str | Path) -> None:
    """
    Check that a drafter's weights are numbers. Codes cannot be cast or renamed, and transformers cannot save most of
    those that it has loaded.

    Raises:
        `ValueError`: the drafter is quantised.
    """
    layer = quantised_layer(draft)
    if layer is not None:
        raise ValueError(
            f"{src} is quantised ({layer} holds codes), and only plain weights are converted: convert the drafter as "
            "it was before it was quantised."
        )


def _load_source(src: str | Path, unpacked: Path, revision: str | None) -> DFlashDraftModel:
    """The drafter to convert. Errors name the GGUF file, not the temporary folder that it is unpacked into."""
    if not is_gguf(src):
        return DFlashDraftModel.from_pretrained(src, revision=revision or "main")
    try:
        return DFlashDraftModel.from_pretrained(unpack_gguf(Path(src), unpacked))
    except ValueError as error:
        message = str(error).replace(str(unpacked / "model.safetensors"), str(src))
        raise ValueError(message.replace(str(unpacked), str(src))) from error


def native_obstacle(draft: DFlashDraftModel) -> str | None:
    """Why a drafter cannot be a `MuseGlimmerAssistantModel`, or `None`."""
    config = draft.config
    if config.attention_bias:
        return "attention_bias is true, but native projections have no bias"
    if "sliding_attention" in config.layer_types:
        return f"layer_types={config.layer_types} has sliding layers, whose windows native masks count differently"
    if any(config.layer_is_causal(i) for i in range(config.num_hidden_layers)):
        return "its attention is causal inside the block, but native attention is bidirectional"
    for key, value, _ in non_default_fields(config):
        return f"{key}={value!r}, which the native model does not have"
    for key, default in (("output_multiplier", 1.0), ("final_logit_softcapping", None)):
        if getattr(config, key) not in (None, default):
            return f"{key}={getattr(config, key)}, which the native model does not have"
    return None


def _save_native(draft: DFlashDraftModel, folder: Path) -> None:
    """
    Raises:
        `ValueError`: the drafter cannot be expressed in the native layout.
    """
    obstacle = native_obstacle(draft)
    if obstacle is not None:
        remedy = "keep it in the default layout (`to='z-lab'`), which this package and the engines read"
        if draft.config.has_own_lm_head and obstacle.startswith("draft_vocab_size"):
            remedy = f"add `share_head=True`, which drafts all tokens with the target's head, or {remedy}"
        raise ValueError(
            f"This drafter cannot be written for transformers alone (`to='native'`): {obstacle}; {remedy}."
        )
    config = draft.config.to_dict()
    native = {key: config[key] for key in _NATIVE_KEYS if config.get(key) is not None}
    native |= {"architectures": ["MuseGlimmerAssistantModel"], "model_type": "muse_glimmer_assistant"}
    # If these keys were absent, Muse's own ids would be used.
    native |= {key: config.get(key) for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    native["dtype"] = dtype_name(draft.dtype)
    native["torch_dtype"] = native["dtype"]
    tensors = {NATIVE_NAMES.get(name, name): tensor.contiguous() for name, tensor in draft.state_dict().items()}
    save_folder(folder, native, tensors)
