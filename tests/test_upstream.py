"""What we rely on in transformers and torch, by name: what a release moves fails here first."""

import inspect
import re
from pathlib import Path
from pkgutil import resolve_name

import pytest
import torch
from support.tiny_chat import make_tokenizer
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.generation.utils import ALL_CACHE_NAMES
from transformers.utils.import_utils import is_serve_available

from dflash_hf.modeling.candidates_dflash import CACHE_NAME
from dflash_hf.targets.features import cache_argument


# Wrapped, overridden, or called by position.
SIGNATURES = {
    "transformers:GenerationMixin._validate_generation_mode": "generation_mode generation_config "
    "generation_mode_kwargs",
    "transformers:GenerationMixin._assisted_decoding": "input_ids logits_processor stopping_criteria "
    "generation_config synced_gpus streamer inputs_tensor assistant_model assistant_tokenizer tokenizer model_kwargs",
    "transformers:GenerationMixin._prepare_generation_config": "generation_config kwargs",
    "transformers:GenerationMixin._prefill": "input_ids generation_config model_kwargs is_first_iteration",
    "transformers:GenerationMixin._sample": "input_ids logits_processor stopping_criteria generation_config "
    "synced_gpus streamer model_kwargs",
    "transformers:PreTrainedModel._get_files_timestamps": "working_dir",
    "transformers:Trainer._get_grad_norm": "model grad_norm",
    "transformers:Trainer._save_checkpoint": "model trial",
    "transformers:Trainer._get_output_dir": "trial",
    "transformers:Trainer._save_rng_state": "output_dir",
    "transformers.pipelines.base:load_assistant_model": "model assistant_model assistant_tokenizer",
}
SERVING = {
    "transformers.cli.serving.utils:BaseHandler": "model_manager generation_state chat_template_kwargs",
    "transformers.cli.serving.utils:BaseHandler._resolve_model": "body",
    "transformers.cli.serving.utils:BaseHandler.get_processor_inputs_from_messages": "messages modality",
    "transformers.cli.serving.utils:GenerateManager.generate_streaming": "model processor inputs gen_config "
    "request_id response_parser",
    "transformers.cli.serving.utils:GenerateManager.generate_non_streaming": "model processor inputs gen_config "
    "request_id",
    "transformers.cli.serving.utils:GenerationState.get_manager": "model_id use_cb",
    "transformers.cli.serving.utils:DirectStreamer": "tokenizer loop queue response_parser",
    "transformers.cli.serving.utils:_StreamError": "msg",
    "transformers.cli.serving.model_manager:ModelManager.get_model_modality": "model processor",
}
# Read, called by keyword, or replaced.
NAMES = [
    "transformers:AutoConfig.from_pretrained",
    "transformers:GenerationMixin._get_logits_processor",
    "transformers.generation.utils:MULTIMODAL_INPUTS_TO_DROP_OUTSIDE_PREFILL",
    "transformers.cache_utils:DynamicLayer",
    "transformers.cache_utils:DynamicSlidingWindowLayer",
    "transformers.masking_utils:create_masks_for_generate",
    "transformers.masking_utils:ALL_MASK_ATTENTION_FUNCTIONS",
    "transformers.masking_utils:eager_mask",
    "transformers.masking_utils:sdpa_mask",
    "transformers:PreTrainedModel._can_set_attn_implementation",
    "transformers.integrations.sdpa_attention:sdpa_attention_forward",
    "torch.nn.attention.bias:causal_lower_right",
    "torch.utils._python_dispatch:_disable_current_modes",
    "transformers.cache_utils:LinearAttentionCacheLayerMixin",
    "transformers.models.qwen3.modeling_qwen3:eager_attention_forward",
    "transformers.models.qwen3.modeling_qwen3:rotate_half",
    "transformers.models.glm.modeling_glm:GlmRotaryEmbedding",
    "torch.nn:Module._compiled_call_impl",
    "torch._dynamo.convert_frame:compile_lock",
    "torch._dynamo.exc:InvalidBackend",
    "torch.compiler:is_dynamo_compiling",
    "torch.nn.modules.module:_has_any_global_hook",
    "torch.utils._pytree:tree_map_only",
    "torch:ops.mkldnn._linear_pointwise",
    "torch:ops.mkldnn._reorder_linear_weight",
    "torch:ops.mkl._mkl_linear",
    "torch:ops.mkl._mkl_reorder_linear_weight",
    "torch:ops.mkldnn._is_mkldnn_bf16_supported",
    "torch:ops.mkldnn._is_mkldnn_fp16_supported",
    "torch:cpu._is_avx512_bf16_supported",
    "torch.optim.optimizer:register_optimizer_step_post_hook",
]


@pytest.mark.parametrize("name", [*SIGNATURES, *SERVING])
def test_canary_signature(name):
    if name in SERVING and not is_serve_available():
        pytest.skip("serving needs `pip install '.[serving]'`")
    parameters = [parameter for parameter in inspect.signature(resolve_name(name)).parameters if parameter != "self"]
    assert parameters == {**SIGNATURES, **SERVING}[name].split()


def test_canary_table_names_tests():
    """CONTRIBUTING's table of what we reach into names the test that notices, for each row."""
    tests = Path(__file__).parent
    table = (tests.parent / "CONTRIBUTING.md").read_text(encoding="utf-8").partition("| What we rely on")[2]
    rows = [line for line in table.partition("\n\n")[0].splitlines()[2:] if line.startswith("|")]
    assert rows and all((tests / re.search(r"`(\S+\.py)` \|$", row)[1]).is_file() for row in rows)


@pytest.mark.parametrize("name", NAMES)
def test_canary_name(name):
    resolve_name(name)  # raises where it is gone


def test_canary_name_of_a_cache():
    """`generate` passes a target its cache under the name that its forward takes; 5.24 renamed `past_key_values`."""
    name = cache_argument(LlamaForCausalLM(LlamaConfig(num_hidden_layers=1, hidden_size=32, intermediate_size=8)))
    assert name == CACHE_NAME in ALL_CACHE_NAMES
    assert "cache" not in ALL_CACHE_NAMES or name == "cache"


def test_canary_length_of_a_dropped_mask(target, monkeypatch):
    """A mask of ones may be dropped before the loop begins: its length tells how long the prompt is with its cache."""
    calls = []
    original = type(target)._sample

    def sample(self, input_ids, logits_processor, stopping_criteria, generation_config, **kwargs):
        calls.append((kwargs.get("attention_mask"), generation_config))
        return original(self, input_ids, logits_processor, stopping_criteria, generation_config, **kwargs)

    monkeypatch.setattr(type(target), "_sample", sample, raising=False)
    ids = torch.tensor([[5, 9, 17]])
    target.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=1, do_sample=False)
    ((mask, config),) = calls
    assert mask is not None or config._mask_length == 3


def test_canary_rust_tokenizer_of_a_tokenizer():
    """A streamer decodes with the Rust tokenizer inside of a fast one."""
    tokenizer = make_tokenizer()
    assert tokenizer._tokenizer.decode(tokenizer("abc")["input_ids"]) == "abc"
