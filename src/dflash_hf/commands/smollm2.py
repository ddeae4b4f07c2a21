"""
`dflash smollm2`: print the local folder of SmolLM2-135M-Instruct.

    dflash smollm2
    dflash generate --target "$(dflash smollm2)" --prompt "Who are you?"
"""

from dflash_hf._io.terminal import Outcome


def add_arguments(parser) -> None:
    parser.add_argument("--gguf", action="store_true", help="print the path of its GGUF file instead, for llama.cpp")


def run(arguments, echo) -> Outcome:
    import os

    from dflash_hf.smollm2 import PIP_LINE, packaged_gguf, smollm2_folder

    if arguments.gguf:
        file = packaged_gguf()
        if file is None:
            raise FileNotFoundError(f"The GGUF file of SmolLM2-135M-Instruct is not installed: {PIP_LINE}")
        echo(os.fspath(file))
        return Outcome(facts={"file": os.fspath(file)})
    folder = os.fspath(smollm2_folder())
    echo(folder)
    return Outcome(facts={"folder": folder})
