"""
Short names of the licences known to the Hub, from huggingface.co/docs/hub/repositories-licenses on 2026-08-22
(huggingface/hub-docs at 242f4a1). No library has them; before anything is uploaded the Hub itself validates the card.
"""

LICENCES = frozenset(
    """
    afl-3.0 agpl-3.0 apache-2.0 apple-amlr apple-ascl artistic-2.0 bigcode-openrail-m bigscience-bloom-rail-1.0
    bigscience-openrail-m bsd bsd-2-clause bsd-3-clause bsd-3-clause-clear bsl-1.0 c-uda cc cc-by-2.0 cc-by-2.5
    cc-by-3.0 cc-by-4.0 cc-by-nc-2.0 cc-by-nc-3.0 cc-by-nc-4.0 cc-by-nc-nd-3.0 cc-by-nc-nd-4.0 cc-by-nc-sa-2.0
    cc-by-nc-sa-3.0 cc-by-nc-sa-4.0 cc-by-nd-4.0 cc-by-sa-3.0 cc-by-sa-4.0 cc0-1.0 cdla-permissive-1.0
    cdla-permissive-2.0 cdla-sharing-1.0 creativeml-openrail-m deepfloyd-if-license ecl-2.0 epl-1.0 epl-2.0
    etalab-2.0 eupl-1.1 eupl-1.2 fair-noncommercial-research-license gemma gfdl gpl gpl-2.0 gpl-3.0 grok2-community
    h-research intel-research isc lgpl lgpl-2.1 lgpl-3.0 lgpl-lr llama2 llama3 llama3.1 llama3.2 llama3.3 llama4
    lppl-1.3c mit mpl-2.0 ms-pl ncsa odbl odc-by ofl-1.1 openmdw-1.0 openmdw-1.1 openrail openrail++ osl-3.0 other pddl
    postgresql unknown unlicense wtfpl zlib
    """.split()
)


def check_licence(metadata: dict) -> None:
    """
    Check that the Hub knows the licence of a card.

    Raises:
        `ValueError`: it does not, or the licence is `other` without a name.
    """
    given = metadata.get("license")
    for name in given if isinstance(given, list) else [given]:
        if name is not None and name not in LICENCES:
            near = [known for known in sorted(LICENCES) if known.split("-")[0] == str(name).lower().split("-")[0]]
            hint = f"such as {', '.join(near[:4])}" if near else "such as mit or apache-2.0"
            raise ValueError(
                f"license: {str(name)[:60]!r} is not a short name that the Hub knows, {hint}; or 'other'."
            )
    if given == "other" and not metadata.get("license_name"):
        raise ValueError(
            "license: 'other' needs license_name in the card's metadata, and the licence's text in a file LICENSE."
        )
