"""
Run by `test_engine_code` in a process of its own: an engine's own configuration, loading and model code on a CPU.

What needs a GPU or a server is replaced: packages that are not installed by stubs, attention by the few lines of
`Attention`, process groups by one process. Prints a line of JSON for each folder.
"""

import abc
import contextlib
import importlib.abc
import importlib.machinery
import json
import os
import sys
import types
from pathlib import Path
from unittest.mock import MagicMock

import torch
import torch.nn.functional as F
import transformers.image_utils
from pydantic_core import core_schema
from safetensors.torch import load_file
from transformers.utils import import_utils


# Imported at the top of engine files and not used by a drafter.
STUBS = {
    "aiohttp",
    "cbor2",
    "cloudpickle",
    "compressed_tensors",
    "cpuinfo",
    "einops",
    "fastapi",
    "gguf",
    "IPython",
    "llguidance",
    "openai",
    "openai_harmony",
    "orjson",
    "partial_json_parser",
    "prometheus_client",
    "pybase64",
    "requests",
    "sentencepiece",
    "sgl_kernel",
    "starlette",
    "torchvision",
    "triton",
    "tvm_ffi",
    "urllib3",
    "uvloop",
    "uvicorn",
    "xgrammar",
    "zmq",
    "vllm.entrypoints",
    "sglang.srt.layers.quantization.compressed_tensors",
    "sglang.srt.managers.scheduler",
}


class StubClass(abc.ABCMeta):
    """The class of stubbed classes: they have every attribute."""

    def __getattr__(cls, name):
        if name.startswith("_"):
            raise AttributeError(name)
        return MagicMock(name=name)


class Stub(types.ModuleType):
    """A module that has every attribute: a class where the name begins in upper case."""

    __path__ = []
    __version__ = "3.6.0"

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        value = MagicMock(name=name)
        if name[0].isupper():
            body = {
                "__init_subclass__": classmethod(lambda cls, **kwargs: None),
                "__get_pydantic_core_schema__": classmethod(lambda cls, *args: core_schema.any_schema()),
            }
            value = StubClass(name, (MagicMock,), body)
        setattr(self, name, value)
        return value


class StubFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports a [`Stub`] for each package of `STUBS`, and for all inside of it."""

    def find_spec(self, name, path=None, target=None):
        if any(name == stub or name.startswith(f"{stub}.") for stub in STUBS):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        return Stub(spec.name)

    def exec_module(self, module):
        pass


class Attention(torch.nn.Module):
    """Queries of a block see the context that was kept and the block: within a window, causally or not, with sinks."""

    def __init__(self, heads, dim, scale, kv_heads, window, causal):
        super().__init__()
        self.heads = heads
        self.dim = dim
        self.scale = scale
        self.kv_heads = kv_heads
        self.window = window
        self.causal = causal
        self.context = None

    def attend(self, q, k, v, sinks):
        block = len(q)
        q = q.view(block, self.heads, self.dim)
        k = torch.cat([self.context[0], k.view(block, self.kv_heads, self.dim)])  # [C + B, kv, d]
        v = torch.cat([self.context[1], v.view(block, self.kv_heads, self.dim)])
        k, v = (x.repeat_interleave(self.heads // self.kv_heads, 1) for x in (k, v))
        weights = torch.einsum("qhd,khd->hqk", q, k) * self.scale
        keys = torch.arange(len(k))
        queries = keys[-block:, None]
        seen = (keys <= queries) | (not self.causal)
        if self.window is not None:
            seen &= keys > queries - self.window
        weights = weights.masked_fill(~seen, -1e30)
        if sinks is not None:
            weights = torch.cat([weights, sinks[:, None, None].expand(-1, block, 1)], -1)
        return torch.einsum("hqk,khd->qhd", weights.softmax(-1)[..., : len(k)], v).reshape(block, -1)


# ---------------------------------------------------------------------------------------------------------------- vLLM


def vllm(target_folder: str, trust: bool):
    """A function of a drafter's folder and the inputs: what vLLM reads, and its hidden states."""
    import vllm.platforms
    from vllm.platforms.cpu import CpuPlatform

    vllm.platforms._current_platform = CpuPlatform()
    from vllm.config import (
        CompilationConfig,
        DeviceConfig,
        ModelConfig,
        ParallelConfig,
        SpeculativeConfig,
        VllmConfig,
        set_current_vllm_config,
    )
    from vllm.distributed import parallel_state
    from vllm.model_executor.models import qwen3_dflash, qwen3_dflash2, registry
    from vllm.v1.worker.gpu.spec_decode.eagle.eagle3_utils import get_eagle3_aux_layers_from_config

    registry._run_in_subprocess = lambda function: function()
    parallel_state._TP = types.SimpleNamespace(world_size=1, rank_in_group=0, unique_name="tp")

    class VllmAttention(Attention):
        def __init__(self, heads, dim, scale, num_kv_heads, per_layer_sliding_window, prefix, sinks, **_):
            super().__init__(heads, dim, scale, num_kv_heads, per_layer_sliding_window, None)
            self.layer_name = prefix
            self.sinks = [sinks]
            self.kv_cache = None
            self.impl = types.SimpleNamespace(do_kv_cache_update=self.keep)

        def keep(self, layer, k, v, cache, slots):
            self.context = (k.clone(), v.clone())

        def forward(self, q, k, v):
            return self.attend(q, k, v, self.sinks[0])

    def rms_norm(out, x, weight, epsilon):
        weight = weight if weight.dim() == 1 else weight[:, None, None]
        out.copy_(x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + epsilon) * weight)

    def rotary_embedding(positions, q, k, size, table, neox):
        cos, sin = (half[:, None] for half in table[positions].chunk(2, -1))
        x = q.view(len(positions), -1, size)
        half = cos.shape[-1]
        first = x[..., :half].clone()
        second = x[..., half : 2 * half].clone()
        x[..., :half] = first * cos - second * sin
        x[..., half : 2 * half] = second * cos + first * sin

    qwen3_dflash.Attention = VllmAttention
    qwen3_dflash.ops = types.SimpleNamespace(rms_norm=rms_norm, rotary_embedding=rotary_embedding)
    target = ModelConfig(
        model=target_folder, skip_tokenizer_init=True, max_model_len=128, dtype="float32", trust_remote_code=trust
    )

    def configure(folder, runner):
        os.environ["VLLM_USE_V2_MODEL_RUNNER"] = runner
        speculative = SpeculativeConfig(
            method="dflash",
            model=folder,
            num_speculative_tokens=3,
            target_model_config=target,
            target_parallel_config=ParallelConfig(),
        )
        return VllmConfig(
            model_config=target,
            speculative_config=speculative,
            device_config=DeviceConfig("cpu"),
            compilation_config=CompilationConfig(mode=0, custom_ops=["none"]),
        )

    def read(folder, inputs):
        try:
            configure(folder, "0")
            needs_v2 = False
        except ValueError:
            needs_v2 = True
        config = configure(folder, "1")
        drafter = config.speculative_config.draft_model_config
        hf = drafter.hf_config
        values = {
            "class": type(hf.model).__module__,
            "architecture": drafter.architecture,
            "ids": [i - 1 for i in get_eagle3_aux_layers_from_config(config.speculative_config)],
            "needs_v2": needs_v2,
        }
        two = drafter.architecture == "DFlash2DraftModel"
        model_class = qwen3_dflash2.DFlash2Qwen3ForCausalLM if two else qwen3_dflash.DFlashQwen3ForCausalLM
        with set_current_vllm_config(config), torch.no_grad():
            values["layers"] = [qwen3_dflash._resolve_layer_attention(hf, i) for i in range(hf.num_hidden_layers)]
            model = model_class(vllm_config=config).eval()
            for module in model.modules():
                module.cpu_linear = F.linear  # made by the loader, from a compiled kernel
            model.load_weights(load_file(f"{folder}/model.safetensors").items())
            for layer in model.model.layers:
                layer.self_attn.attn.causal = layer.self_attn.causal
            model.model.embed_tokens.weight[: len(inputs["table"])] = inputs["table"]
            context = model.combine_hidden_states(inputs["features"])
            length = len(context)
            ids = inputs["ids"]
            model.precompute_and_store_context_kv(context, torch.arange(length), [0] * len(model.model.layers))
            hidden = model.model(ids, torch.arange(length, length + len(ids)))
        return values, hidden, getattr(model.model, "candidate_selector", None)

    return read


# -------------------------------------------------------------------------------------------------------------- SGLang


class Unset:
    """A namespace of server arguments, none of which is given."""

    def __getattr__(self, name):
        return Unset()

    def __bool__(self):
        return False

    def __eq__(self, other):
        return other is None

    __hash__ = None


def sglang(target_folder: str, trust: bool):
    """A function of a drafter's folder and the inputs: what SGLang reads, and its hidden states."""
    from sglang.srt import runtime_context

    runtime_context.RuntimeContext.config_bag = lambda self, name: Unset()

    def read_of_one_process(self, name):
        if name.endswith("size"):
            return 1
        if name.endswith("group"):
            return None
        return 0

    runtime_context.ParallelContext._read = read_of_one_process
    from sglang.srt.arg_groups import overrides
    from sglang.srt.models import dflash
    from sglang.srt.speculative.dflash_worker_v2 import DFlashWorkerV2
    from sglang.srt.utils.hf_transformers_utils import get_config

    class SglangAttention(Attention):
        def __init__(self, num_heads, head_dim, scaling, num_kv_heads, layer_id, sliding_window_size, attn_type, **_):
            window = sliding_window_size + 1 if sliding_window_size >= 0 else None  # stored without the query itself
            causal = attn_type == dflash.AttentionType.DECODER
            super().__init__(num_heads, head_dim, scaling, num_kv_heads, window, causal)

        def forward(self, q, k, v, forward_batch, sinks=None):
            return self.attend(q, k, v, sinks)

    dflash.RadixAttention = SglangAttention

    def read(folder, inputs):
        config = get_config(folder, trust_remote_code=trust)
        model = getattr(dflash, config.architectures[0])(config).eval()
        parsed = model.draft_config
        ids = parsed.resolve_target_layer_ids(target_num_layers=4)
        values = {"class": type(config).__module__, "architecture": config.architectures[0], "ids": ids}
        values["layers"] = [(layer.self_attn.attn.window, layer.self_attn.attn.causal) for layer in model.layers]
        model.load_weights(load_file(f"{folder}/model.safetensors").items())
        # The worker puts the mask's embedding into the target's table.
        embedding = torch.nn.Embedding.from_pretrained(inputs["table"].clone())
        runner = types.SimpleNamespace(model=types.SimpleNamespace(get_input_embeddings=lambda: embedding))
        worker = types.SimpleNamespace(
            server_args=None,
            device="cpu",
            _mask_token_id=parsed.mask_token_id,
            _target_worker=types.SimpleNamespace(model_runner=runner),
        )
        overrides.resolving_view = lambda args: types.SimpleNamespace(speculative_draft_model_path=folder)
        DFlashWorkerV2._maybe_merge_trained_mask_embedding(worker)
        with torch.no_grad():
            context = model.project_target_hidden(inputs["features"])
            length = len(context)
            ids = inputs["ids"]
            for layer in model.layers:
                attention = layer.self_attn
                k, v = attention.kv_proj_only(context)
                k = attention.apply_k_rope(torch.arange(length), attention.apply_k_norm(k))
                shape = (length, attention.num_kv_heads, attention.head_dim)
                attention.attn.context = (k.view(shape), v.view(shape))
            model.set_block_size(len(ids))
            positions = torch.arange(length, length + len(ids))
            hidden = model(ids, positions, None, input_embeds=embedding(ids)).hidden_states
        return values, hidden, model.candidate_selector if "2" in config.architectures[0] else None

    return read


def main(engine: str, trust: str, work: str, *names: str) -> None:
    """Read the drafters in the folders `names` of `work`, and save their hidden states there."""
    for name in dir(import_utils):  # asked before stubs make everything available
        if name.startswith("is_") and name.endswith("_available"):
            with contextlib.suppress(Exception):  # some want arguments
                getattr(import_utils, name)()
    assert transformers.image_utils
    sys.meta_path.insert(0, StubFinder())
    read = {"vllm": vllm, "sglang": sglang}[engine](f"{work}/target", trust == "trust")
    inputs = torch.load(f"{work}/inputs.pt")
    for name in names:
        try:
            values, hidden, selector = read(f"{work}/{name}", inputs)
            torch.save(hidden, f"{work}/{name}.{engine}.{trust}.pt")
            if selector is not None:
                for key, tensor in load_file(Path(work) / name / "model.safetensors").items():
                    if key.startswith("candidate_selector."):
                        assert torch.equal(selector.get_parameter(key.partition(".")[2]), tensor), key
        except Exception as error:  # the test says which are expected
            values = {"error": repr(error)}
        assert "dflash_hf" not in sys.modules  # its classes would answer for the files in the folder
        print("RESULT " + json.dumps({"name": name, **values}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
