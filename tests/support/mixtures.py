"""Local stand-ins for the datasets of the paper's mixtures, with their columns, and a mixture of them."""

from pathlib import Path

import yaml


def save_sources(folder: Path, rows: int = 12) -> dict[str, dict]:
    """
    Save datasets as Nemotron-Post-Training-Dataset-v2, CodeAlpaca and UltraChat have them, with `rows` rows of each
    split. Each prompt says where it is from, as in `chat 3?`; some rows have none.

    Returns:
        `dict[str, dict]`: `data` and `split` of a source of a mixture, by the first word of its prompts.
    """
    import datasets

    def nemotron(split: str) -> list[dict]:
        made = []
        for number in range(rows):
            user = {"role": "user", "content": f"{split} {number}?"}
            answer = {"role": "assistant", "content": "<think>\n</think>\nOf another model."}
            messages = [{"role": "system", "content": ""}, user, answer]
            made.append(
                {"uuid": f"{split}-{number}", "license": "cc-by-4.0", "reasoning": "off", "messages": messages}
            )
        made[1]["messages"] = []
        return made

    code_alpaca = [
        {"instruction": f"alpaca {number}?", "input": "x = 1" if number % 2 else "", "output": "print(x)"}
        for number in range(rows)
    ]
    code_alpaca[2]["instruction"] = ""
    ultrachat = []
    for number in range(rows):
        turns = [f"ultrachat {number}?", "Yes.", "And then?", "No."]
        messages = [{"role": ("user", "assistant")[turn % 2], "content": text} for turn, text in enumerate(turns)]
        ultrachat.append({"prompt": turns[0], "prompt_id": str(number), "messages": messages})
    splits = {split: datasets.Dataset.from_list(nemotron(split)) for split in ("chat", "math")}
    datasets.DatasetDict(splits).save_to_disk(str(folder / "nemotron"))
    datasets.Dataset.from_list(code_alpaca).to_json(str(folder / "code_alpaca.jsonl"))
    datasets.Dataset.from_list(ultrachat).to_parquet(str(folder / "ultrachat.parquet"))
    return {
        "chat": {"data": str(folder / "nemotron"), "split": "chat"},
        "math": {"data": str(folder / "nemotron"), "split": "math"},
        "alpaca": {"data": str(folder / "code_alpaca.jsonl")},
        "ultrachat": {"data": str(folder / "ultrachat.parquet")},
    }


def write_mixture(path: Path, sources: dict[str, dict], counts: dict[str, int], seed: int = 0) -> Path:
    """Write the file of a mixture with `counts` rows of each source."""
    listed = [{**sources[name], "rows": count} for name, count in counts.items()]
    path.write_text(yaml.safe_dump({"seed": seed, "sources": listed}), encoding="utf-8")
    return path
