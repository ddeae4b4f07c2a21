"""
Digests of weights: whether two models are the same, so that stored features, answers or measurements of one are not
used with another.

They read 64 values of each parameter, rounded to bf16: a model has the same digest in each dtype that it is loaded in,
and each training step changes it. A change of a few single values may leave it the same.
"""

import hashlib
from collections.abc import Iterable

import torch


_NUM_VALUES = 64  # values of a parameter that are read, evenly spaced


def digest_of_target(target) -> dict[str, str]:
    """
    Digests of a target: under `ends` of its embedding and LM head, the two ends of the model, and under `layers` of
    everything between them. A part on the meta device has no digest.
    """
    embedding_and_head = {id(target.get_input_embeddings().weight)}
    embedding_and_head |= {id(parameter) for parameter in target.get_output_embeddings().parameters()}
    parts: dict[str, list] = {"ends": [], "layers": []}  # the names in manifests of stored features
    for name, parameter in target.named_parameters():
        part = "ends" if id(parameter) in embedding_and_head else "layers"
        parts[part].append((name, parameter))
    digests = {}
    for part, parameters in parts.items():
        if not any(parameter.is_meta for _, parameter in parameters):
            digests[part] = digest_of_parameters(parameters)
    return digests


@torch.no_grad()
def digest_of_parameters(parameters: Iterable[tuple[str, torch.Tensor]]) -> str:
    """A digest of names, shapes and 64 values of each of `named_parameters()`, rounded to bf16."""
    digest = hashlib.sha256()
    for name, parameter in parameters:
        if type(parameter).dequantize is not torch.Tensor.dequantize:  # torchao's: most operations are missing
            parameter = parameter.dequantize()
        flat = parameter.reshape(-1)
        values = flat[:: max(1, len(flat) // _NUM_VALUES)][:_NUM_VALUES].to("cpu", torch.bfloat16)
        digest.update(f"{name}{tuple(parameter.shape)}{values.tolist()}".encode())
    return digest.hexdigest()[:16]
