"""Launch commands of the engines that serve a drafter, for the card and for `dflash serve`."""

import json

from dflash_hf._io.names import LLAMA_CPP
from dflash_hf._io.repositories import is_gguf
from dflash_hf.layouts.head_schemas import engine_method
from dflash_hf.pairs.loading import Loading


def launch_command(
    engine: str, target: str, draft: str, config, loading: Loading | None = None, template: dict | None = None
) -> tuple[dict[str, str], list[str]]:
    """
    The command that starts an engine's server for a target with its drafter.

    Args:
        engine (`str`): `"vllm"`, `"sglang"` or `"llama.cpp"`.
        target, draft (`str`): Folders or Hub names; for llama.cpp, GGUF files or Hub names.
        config (`DFlashDraftConfig`): The drafter's configuration.
        loading (`Loading`, *optional*): Dtype and revisions; the engine chooses devices. `trust_remote_code` holds
            for both models: neither vLLM nor SGLang has an option for the target only.
        template (`dict`, *optional*): Default arguments of the chat template; ignored for SGLang, which accepts them
            only in requests.

    Returns:
        `tuple[dict[str, str], list[str]]`: Required environment variables, and the command.
    """
    loading = loading or Loading()
    if engine == LLAMA_CPP:
        return {}, _llama_cpp_command(target, draft, config, template)
    environment: dict[str, str] = {}
    if engine == "vllm":
        command = _vllm_command(target, draft, config, loading, template)
        if len(set(config.layer_types)) > 1:  # the V1 model runner has one kind of cache for all layers
            environment["VLLM_USE_V2_MODEL_RUNNER"] = "1"
    else:
        command = _sglang_command(target, draft, config, loading)
    if loading.dtype != "auto":
        command += ["--dtype", loading.dtype]
    if loading.revision:
        command += ["--revision", loading.revision]
    if loading.trust_remote_code:
        command.append("--trust-remote-code")
    return environment, command


def _llama_cpp_command(target: str, draft: str, config, template: dict | None) -> list[str]:
    """llama.cpp's server, whose options differ for local files and for repositories."""
    target_option = "-m" if is_gguf(target) else "-hf"
    draft_option = "-md" if is_gguf(draft) else "-hfd"
    command = ["llama-server", target_option, target, draft_option, draft]
    command += ["--spec-type", f"draft-{engine_method(config)}"]
    command += ["--spec-draft-n-max", str(config.max_block_tokens - 1)]  # its default is 3 for every block size
    if template:
        command += ["--chat-template-kwargs", json.dumps(template)]
    return command


def _vllm_command(target: str, draft: str, config, loading: Loading, template: dict | None) -> list[str]:
    """vLLM's server, without the options that SGLang has as well."""
    speculative_config = {
        "method": engine_method(config),
        "model": draft,
        "num_speculative_tokens": config.max_block_tokens - 1,
    }
    if loading.draft_revision:
        speculative_config["revision"] = loading.draft_revision
    command = ["vllm", "serve", target, "--speculative-config", json.dumps(speculative_config)]
    if template:
        command += ["--default-chat-template-kwargs", json.dumps(template)]
    return command


def _sglang_command(target: str, draft: str, config, loading: Loading) -> list[str]:
    """SGLang's server, without the options that vLLM has as well. Only DFlash's block size includes the anchor."""
    method = engine_method(config)
    command = ["python", "-m", "sglang.launch_server", "--model-path", target]
    command += ["--speculative-algorithm", method.upper(), "--speculative-draft-model-path", draft]
    if method == "dflash":
        command += ["--speculative-num-draft-tokens", str(config.max_block_tokens)]
    else:
        command += [f"--speculative-{method}-block-size", str(config.max_block_tokens - 1)]
    if loading.draft_revision:
        command += ["--speculative-draft-model-revision", loading.draft_revision]
    return command
