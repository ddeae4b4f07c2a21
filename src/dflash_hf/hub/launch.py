"""Launch commands of the engines that serve a drafter, for the card and for `dflash serve`."""

import json

from dflash_hf.gguf_format import is_gguf
from dflash_hf.layouts.heads import engine_method
from dflash_hf.names import LLAMA_CPP
from dflash_hf.pairs import Loading


def launch_command(
    engine: str, target: str, draft: str, config, loading: Loading | None = None, template: dict | None = None
) -> tuple[dict[str, str], list[str]]:
    """
    The command that starts an engine's server for a target with its drafter.

    Args:
        engine (`str`): `"vllm"`, `"sglang"` or `"llama.cpp"`.
        target, draft (`str`): Folders or Hub names; for llama.cpp, GGUF files or Hub names.
        config (`DFlashDraftConfig`): The drafter's configuration.
        loading (`Loading`, *optional*): Dtype and revisions; devices are left to the engine. Its `trust_remote_code`
            is for both models there: neither vLLM nor SGLang has one for the target alone.
        template (`dict`, *optional*): Arguments of the chat template, for requests that give none. SGLang accepts them
            only in requests.

    Returns:
        `tuple[dict[str, str], list[str]]`: Required environment variables, and the command.
    """
    loading = loading or Loading()
    environment: dict[str, str] = {}
    method = engine_method(config)
    if engine == LLAMA_CPP:
        command = ["llama-server", "-m" if is_gguf(target) else "-hf", target]
        command += ["-md" if is_gguf(draft) else "-hfd", draft, "--spec-type", f"draft-{method}"]
        command += ["--spec-draft-n-max", str(config.block_tokens - 1)]  # its default is 3 for every block size
        if template:
            command += ["--chat-template-kwargs", json.dumps(template)]
        return environment, command
    if engine == "vllm":
        speculative = {"method": method, "model": draft, "num_speculative_tokens": config.block_tokens - 1}
        if loading.draft_revision:
            speculative["revision"] = loading.draft_revision
        if len(set(config.layer_types)) > 1:
            environment["VLLM_USE_V2_MODEL_RUNNER"] = "1"
        command = ["vllm", "serve", target, "--speculative-config", json.dumps(speculative)]
        if template:
            command += ["--default-chat-template-kwargs", json.dumps(template)]
    else:
        command = ["python", "-m", "sglang.launch_server", "--model-path", target]
        command += ["--speculative-algorithm", method.upper(), "--speculative-draft-model-path", draft]
        if method == "dflash":
            command += ["--speculative-num-draft-tokens", str(config.block_tokens)]
        else:
            command += [f"--speculative-{method}-block-size", str(config.block_tokens - 1)]
        if loading.draft_revision:
            command += ["--speculative-draft-model-revision", loading.draft_revision]
    if loading.dtype != "auto":
        command += ["--dtype", loading.dtype]
    if loading.revision:
        command += ["--revision", loading.revision]
    if loading.trust_remote_code:
        command.append("--trust-remote-code")
    return environment, command
