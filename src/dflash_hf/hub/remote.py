"""Reading a drafter's repository without its weights: the small files, and the headers of the large ones."""

import json
import shutil
import struct
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath

from dflash_hf.repositories import is_repository_id


# Read by the preflight. For other files it only checks whether they exist.
_READ = ("config.json", "model.safetensors.index.json", "mask_embedding.pt")


@contextmanager
def local_folder(name: str | Path, revision: str | None = None, subfolder: str = "") -> Iterator[Path]:
    """
    A local folder, or a temporary stand-in for a repository, whose safetensors files have the real headers and sizes
    but, being sparse, take no space.

    Args:
        name (`str` or `Path`): A local folder, or the id of a repository on the Hub.
        revision (`str`, *optional*): Branch, tag or commit of the repository.
        subfolder (`str`): The drafter's subfolder.

    Raises:
        `ValueError`: it may be a repository, but cannot be read.
    """
    if Path(name).is_dir() or not is_repository_id(str(name)):
        yield Path(name) / subfolder
        return
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, SafetensorsParsingError

    with tempfile.TemporaryDirectory() as scratch:
        try:
            _download(HfApi(), str(name), revision, subfolder, Path(scratch))
        except (ValueError, OSError, HfHubHTTPError, SafetensorsParsingError) as error:
            raise ValueError(f"{name} is neither a local folder nor a readable repository: {error}") from error
        except Exception as error:  # connection errors come from whichever HTTP library huggingface_hub uses
            raise ValueError(f"{name} is not a local folder, and the Hub cannot be reached: {error!r}") from error
        yield Path(scratch) / subfolder


def _download(api, repo: str, revision: str | None, subfolder: str, scratch: Path) -> None:
    info = api.repo_info(repo, revision=revision)
    (scratch / subfolder).mkdir(parents=True, exist_ok=True)
    for file in info.siblings or []:
        name = PurePosixPath(file.rfilename)
        if not name.is_relative_to(subfolder) or ".." in name.parts:
            continue
        path = scratch / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if name.name in _READ:
            shutil.copyfile(api.hf_hub_download(repo, str(name), revision=info.sha), path)
        elif name.suffix == ".safetensors":
            _write_header(path, api.parse_safetensors_file_metadata(repo, str(name), revision=info.sha))
        else:
            path.touch()


def _write_header(path: Path, file) -> None:
    """Write a sparse safetensors file with the header of a file on the Hub."""
    tensors = {
        name: {"dtype": one.dtype, "shape": one.shape, "data_offsets": one.data_offsets}
        for name, one in file.tensors.items()
    }
    header = json.dumps({"__metadata__": file.metadata, **tensors} if file.metadata else tensors).encode()
    with open(path, "wb") as stream:
        stream.write(struct.pack("<Q", len(header)) + header)
        stream.truncate(8 + len(header) + max((one.data_offsets[1] for one in file.tensors.values()), default=0))
