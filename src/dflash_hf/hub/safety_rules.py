"""Rules against unsafe contents: foreign code, unknown quantisation, impossible numbers."""

from collections.abc import Iterator

from dflash_hf.hub.engine_rules import Drafter, Finding
from dflash_hf.names import ENGINES
from dflash_hf.terminal import one_line


def _foreign_code(drafter: Drafter) -> Iterator[Finding]:
    auto_map = drafter.config.get("auto_map")
    if auto_map is None:
        return
    if not isinstance(auto_map, dict):
        yield Finding("error", ("transformers",), "auto_map", "must map names of Auto classes to classes.")
        return
    for name, value in auto_map.items():
        for one in value if isinstance(value, list) else [value]:
            if one is None:
                continue
            if "--" in str(one):
                message = f"{name} is code from another repository ({one_line(one, 80)}), whose owner may change it; "
                yield Finding("error", ("transformers",), "auto_map", message + "save the drafter again.")
            elif str(one).count(".") != 1 or not all(part.isidentifier() for part in str(one).split(".")):
                message = f"{name} is {one_line(one, 80)!r}, not a file and a class like 'modeling_dflash.Name'."
                yield Finding("error", ("transformers",), "auto_map", message)


def _quantisation(drafter: Drafter) -> Iterator[Finding]:
    given = drafter.config.get("quantization_config")
    if given is None:
        return
    from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING

    method = given.get("quant_method") if isinstance(given, dict) else None
    known = {*AUTO_QUANTIZATION_CONFIG_MAPPING, "bitsandbytes"}
    if method not in known:
        message = f"quant_method {one_line(repr(method), 60)} is unknown; one of {', '.join(sorted(known))}."
        yield Finding("error", ENGINES, "quantization_config", one_line(message, 250))


def _dropout(drafter: Drafter) -> Iterator[Finding]:
    for key, value in drafter.config.items():
        if key.endswith("dropout") and value is not None:
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1:
                yield Finding("error", ENGINES, key, f"{one_line(value, 60)} must be at least 0 and below 1.")


SAFETY_RULES = (_foreign_code, _quantisation, _dropout)
