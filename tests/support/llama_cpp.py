"""llama.cpp's own server in this process, by the package `xllamacpp`; one thread, caches in fp32."""

import json
import urllib.request

import pytest
import torch
from transformers import LogitsProcessor


def write_target(target, path, tokenizer=None):
    """A tiny Qwen3 target as a GGUF file; without a tokenizer its tokens are the signs after the space."""
    gguf = pytest.importorskip("gguf")
    config = target.config
    writer = gguf.GGUFWriter(path, "qwen3")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    texts = [chr(256 + i) for i in range(config.vocab_size)]
    kinds = [gguf.TokenType.NORMAL] * config.vocab_size
    if tokenizer is not None:
        texts[: len(tokenizer)] = tokenizer.convert_ids_to_tokens(range(len(tokenizer)))
        kinds[len(tokenizer) :] = [gguf.TokenType.UNUSED] * (config.vocab_size - len(tokenizer))
    writer.add_token_list(texts)
    writer.add_token_types(kinds)
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(0)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN3, config.num_hidden_layers)
    for name, tensor in target.state_dict().items():
        writer.add_tensor(names.get_name(name, try_suffixes=(".weight",)), tensor.float().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def serve(target, draft=None, drafts: int = 7, context: int = 1024, kind: str = "DFLASH"):
    """A running `xllamacpp.Server`; it ends with the last reference to it."""
    llama = pytest.importorskip("xllamacpp")
    params = llama.CommonParams()
    params.model.path = str(target)
    params.n_ctx = context
    params.n_parallel = 1
    params.warmup = False
    f32 = llama.ggml_type.GGML_TYPE_F32
    params.cache_type_k = params.cache_type_v = f32
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
    if draft is not None:
        kinds = llama.common_speculative_type
        params.speculative.types = [getattr(kinds, f"COMMON_SPECULATIVE_TYPE_DRAFT_{kind}")]
        options = params.speculative.draft
        options.mparams.path = str(draft)
        options.n_max = drafts
        options.cache_type_k = options.cache_type_v = f32
        options.cpuparams.n_threads = options.cpuparams_batch.n_threads = 1
    return llama.Server(params)


def complete(server, prompt: list[int], tokens: int) -> tuple[list[int], list[int]]:
    """The greedy answer's ids, and the tokens that each verification committed."""
    body = {"prompt": prompt, "n_predict": tokens, "temperature": 0, "cache_prompt": False, "ignore_eos": True}
    body |= {"return_tokens": True, "stream": True, "timings_per_token": True}
    request = urllib.request.Request(f"{server.listening_address}/completion", json.dumps(body).encode())
    ids = []
    accepted = {0: 0}  # by the number of tokens drafted so far, those accepted so far
    with urllib.request.urlopen(request, timeout=600) as stream:
        for line in stream:
            if line.startswith(b"data: "):
                event = json.loads(line[6:])
                ids += event.get("tokens") or []
                accepted[event["timings"].get("draft_n", 0)] = event["timings"].get("draft_n_accepted", 0)
    sums = [accepted[drafted] for drafted in sorted(accepted)]
    return ids, [1 + after - before for before, after in zip(sums, sums[1:])]


class Dictated(LogitsProcessor):
    """Lets a model say given tokens and no others."""

    def __init__(self, ids: list[int]):
        self.ids = ids

    def __call__(self, input_ids, scores):
        forced = torch.full_like(scores, -torch.inf)
        forced[:, self.ids[input_ids.shape[1]]] = 0
        return forced


def our_lengths(target, draft, prompt: list[int], answer: list[int]) -> list[int]:
    """The tokens that each verification commits here, where the target says that answer."""
    ids = torch.tensor([prompt])
    options = {"max_new_tokens": len(answer), "do_sample": False, "eos_token_id": None}
    output = target.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        assistant_model=draft,
        logits_processor=[Dictated(prompt + answer)],
        return_dict_in_generate=True,
        **options,
    )
    assert output.sequences[0, len(prompt) :].tolist() == answer
    return list(output.acceptance_lengths[0])
