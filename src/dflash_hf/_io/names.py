"""
Names that several packages share: engines, dtypes, layouts and files. This module imports nothing, because the help of
commands must not wait for torch.
"""

SERVERS = ("vllm", "sglang")  # engines with a launch line
ENGINES = (*SERVERS, "transformers")  # engines that read a drafter's folder
LLAMA_CPP = "llama.cpp"  # reads GGUF files: its rules are `dflash_hf.conversion.llama_cpp_limits`
OUTPUT_LAYOUTS = ("native", "z-lab", "gguf")  # layouts that a drafter can be written in
DTYPES = ("float32", "bfloat16", "float16")
SHORT_DTYPES = {"fp32": "float32", "f32": "float32", "bf16": "bfloat16", "fp16": "float16", "f16": "float16"}
Q8 = "q8_0"  # GGUF files only

# Files in a drafter's folder, besides its configuration, weights and code.
FACTS_FILE = "card_facts.json"  # what the model card says of the training: fields of `hub.card.CardFacts`
REPORT_FILE = "eval_report.json"
PLOT_FILE = "eval_report.png"


def dtype_name(dtype) -> str:
    """The name of a `torch.dtype` in configurations and options, such as `"bfloat16"`."""
    return str(dtype).removeprefix("torch.")
