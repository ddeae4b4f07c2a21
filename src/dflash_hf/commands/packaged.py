"""
`dflash packaged`: print the local folder of a target that a package on PyPI contains.

    dflash packaged smollm2
    dflash packaged gemma3-270m --gguf
"""

from dflash_hf._io.terminal import Outcome


NAMES = ("smollm2", "gemma3-270m")  # of `dflash_hf.pairs.packaged_targets`, whose import is slow


def add_arguments(parser) -> None:
    parser.add_argument("name", choices=NAMES, help="the target")
    parser.add_argument("--gguf", action="store_true", help="print the path of its GGUF file instead, for llama.cpp")


def run(arguments, echo) -> Outcome:
    import os

    from dflash_hf.pairs.packaged_targets import PACKAGED_TARGETS

    target = PACKAGED_TARGETS[arguments.name]
    if arguments.gguf:
        file = target.gguf()
        if file is None:
            raise FileNotFoundError(f"The GGUF file of {target.title} is not installed: {target.pip_line}")
        echo(os.fspath(file))
        return Outcome(facts={"file": os.fspath(file)})
    folder = os.fspath(target.folder())
    echo(folder)
    return Outcome(facts={"folder": folder})
