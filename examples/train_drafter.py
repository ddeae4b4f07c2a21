"""
Train a DFlash drafter for any causal language model on the target's own responses, then decode with it.

    python examples/train_drafter.py --target Qwen/Qwen3-0.6B --prompts prompts.txt --output my-drafter

`prompts.txt` holds one user message per line. The mask token is an id inside the target's embedding that its tokenizer
never produces; most targets have spare rows after the last token.
"""

import argparse
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from dflash_hf import (
    DFlashDraftConfig,
    DFlashDraftModel,
    DFlashTrainer,
    DFlashTrainingArguments,
    generate_responses,
    make_example,
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True, help="Hub id or folder of the target.")
    parser.add_argument("--prompts", required=True, type=Path, help="Text file, one user message per line.")
    parser.add_argument("--output", required=True, help="Folder for the drafter.")
    parser.add_argument("--max-new-tokens", type=int, default=512)
    arguments = parser.parse_args()

    # 1. The target, frozen, and a mask token that its text never uses.
    tokenizer = AutoTokenizer.from_pretrained(arguments.target)
    target = AutoModelForCausalLM.from_pretrained(arguments.target, dtype="auto")
    mask_token_id = target.get_input_embeddings().num_embeddings - 1
    if mask_token_id < len(tokenizer):
        raise SystemExit(f"The embedding of {arguments.target} has no spare row; resize it by one first.")

    # 2. The target's own responses: a drafter learns what its own target writes.
    lines = [line for line in arguments.prompts.read_text(encoding="utf-8").splitlines() if line.strip()]
    prompts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": line}], add_generation_prompt=True, return_dict=False
        )
        for line in lines
    ]
    responses = generate_responses(target, prompts, arguments.max_new_tokens, mask_token_id)
    examples = [make_example(prompt, response) for prompt, response in zip(prompts, responses, strict=True)]

    # 3. A fresh drafter of five layers, trained against the frozen target.
    draft = DFlashDraftModel(DFlashDraftConfig.for_target(target.config, mask_token_id=mask_token_id))
    training = DFlashTrainingArguments(output_dir=arguments.output, per_device_train_batch_size=1)
    DFlashTrainer(model=draft, target=target, args=training, train_dataset=examples).train()
    draft.save_pretrained(arguments.output)

    # 4. The same text, faster.
    input_ids = torch.tensor([prompts[0]], device=target.device)
    output = target.generate(input_ids, assistant_model=draft, max_new_tokens=256, return_dict_in_generate=True)
    lengths = output.acceptance_lengths[0]
    print(tokenizer.decode(output.sequences[0]))
    print(f"{sum(lengths) / len(lengths):.2f} tokens for each verification by the target")


if __name__ == "__main__":
    main()
