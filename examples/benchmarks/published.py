"""
The published implementation (a checkout of z-lab/dflash), timed next to ours: a separate process, optionally with
another interpreter, that answers one prompt per input line. As a script it imports nothing of ours.
"""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path


class Reference:
    """
    A callable from prompt ids to answer ids, for `evaluate`.

    Args:
        checkout (path): Folder with `dflash/model.py`.
        scratch (path): Folder with the target in `target/`.
        draft_folder (path): The drafter, in the published layout.
        target: Its dtype, device and end-of-text ids are used.
        max_new_tokens (`int`): Longest answer.
        texts (`list[torch.Tensor]`, *optional*): An oracle's draft for each prompt.
        python (`str`, *optional*): The interpreter; default: this one.

    Raises:
        `ValueError`: the checkout has no such file, or the process ends.
    """

    def __init__(self, checkout, scratch, draft_folder, target, max_new_tokens: int, texts=None, python=None):
        import torch

        source = Path(checkout) / "dflash" / "model.py"
        if not source.is_file():
            raise ValueError(f"reference={str(checkout)!r} has no dflash/model.py; name a checkout of z-lab/dflash.")
        stop = target.generation_config.eos_token_id
        if stop is not None:
            stop = [stop] if isinstance(stop, int) else list(stop)
        facts = {
            "source": str(source),
            "target": str(Path(scratch) / "target"),
            "draft": str(draft_folder),
            "dtype": str(target.dtype).removeprefix("torch."),
            "device": str(target.device),
            "threads": torch.get_num_threads(),
            "max_new_tokens": max_new_tokens,
            "stop": stop,
            "texts": None if texts is None else [text.tolist() for text in texts],
            "attention": target.config._attn_implementation,
        }
        path = Path(scratch) / "reference.json"
        path.write_text(json.dumps(facts), encoding="utf-8")
        self.process = subprocess.Popen(
            [python or sys.executable, __file__, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def __call__(self, prompt) -> list[int]:
        self.process.stdin.write(json.dumps(list(prompt)) + "\n")
        self.process.stdin.flush()
        for line in self.process.stdout:
            if line.startswith("answer "):
                return json.loads(line.removeprefix("answer "))
        raise ValueError(f"The reference's process ended with exit code {self.process.wait()}; its error is above.")

    def close(self) -> None:
        self.process.stdin.close()
        self.process.wait()


def _serve(path: str) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    facts = json.loads(Path(path).read_text(encoding="utf-8"))
    torch.set_num_threads(facts["threads"])
    spec = importlib.util.spec_from_file_location("reference_model", facts["source"])
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    device = facts["device"]
    options = {"attn_implementation": facts["attention"]}
    dtype = getattr(torch, facts["dtype"])
    target = AutoModelForCausalLM.from_pretrained(facts["target"], dtype=dtype, **options).to(device).eval()
    draft = module.DFlashDraftModel.from_pretrained(facts["draft"], dtype=dtype, **options).to(device).eval()
    if not torch.cuda.is_available():
        module._cuda_time = lambda: 0.0
    _allow_positive_crop()
    texts = [torch.tensor(text, device=device) for text in facts["texts"] or []]
    oracle = {}
    if texts:
        _install_oracle(module, draft, oracle)

    for line in sys.stdin:
        prompt = json.loads(line)
        if texts:
            oracle["text"] = next(text for text in texts if text[: len(prompt)].tolist() == prompt)
        ids = torch.tensor([prompt], device=device)
        output = module.dflash_generate(draft, target, ids, facts["max_new_tokens"], facts["stop"], 0.0)
        sys.stdout.write(f"answer {json.dumps(output[0, len(prompt) :].tolist())}\n")
        sys.stdout.flush()


def _allow_positive_crop() -> None:
    """Since transformers 5.20 `crop` only takes a negative count; the reference passes the length to keep."""
    from transformers import DynamicCache

    original = DynamicCache.crop

    def crop(self, length: int):
        original(self, length - self.get_seq_length() if length > 0 else length)

    DynamicCache.crop = crop


def _install_oracle(module, draft, oracle) -> None:
    sample = module.sample
    forward = draft.forward
    size = draft.block_size

    def remember(*args, position_ids, **kwargs):
        oracle["start"] = int(position_ids[0, -size]) if position_ids.device.type == "cpu" else position_ids[0, -size]
        return forward(*args, position_ids=position_ids, **kwargs)

    def drafted(logits, temperature=0.0):
        tokens = sample(logits, temperature)
        if tokens.shape[1] != size - 1:
            return tokens
        import torch

        positions = oracle["start"] + 1 + torch.arange(size - 1, device=tokens.device)
        return oracle["text"][positions.clamp(max=len(oracle["text"]) - 1)][None]

    draft.forward = remember
    module.sample = drafted


if __name__ == "__main__":
    _serve(sys.argv[1])
