"""The Hub's license identifiers, as of August 2026: https://huggingface.co/docs/hub/repositories-licenses."""

import difflib
from pathlib import Path


LICENSES = """
    afl-3.0 agpl-3.0 apache-2.0 apple-amlr apple-ascl artistic-2.0 bigcode-openrail-m bigscience-bloom-rail-1.0
    bigscience-openrail-m bsd bsd-2-clause bsd-3-clause bsd-3-clause-clear bsl-1.0 c-uda cc cc-by-2.0 cc-by-2.5
    cc-by-3.0 cc-by-4.0 cc-by-nc-2.0 cc-by-nc-3.0 cc-by-nc-4.0 cc-by-nc-nd-3.0 cc-by-nc-nd-4.0 cc-by-nc-sa-2.0
    cc-by-nc-sa-3.0 cc-by-nc-sa-4.0 cc-by-nd-4.0 cc-by-sa-3.0 cc-by-sa-4.0 cc0-1.0 cdla-permissive-1.0
    cdla-permissive-2.0 cdla-sharing-1.0 creativeml-openrail-m deepfloyd-if-license ecl-2.0 epl-1.0 epl-2.0
    etalab-2.0 eupl-1.1 eupl-1.2 fair-noncommercial-research-license gemma gfdl gpl gpl-2.0 gpl-3.0
    grok2-community h-research intel-research isc lgpl lgpl-2.1 lgpl-3.0 lgpl-lr llama2 llama3 llama3.1 llama3.2
    llama3.3 llama4 lppl-1.3c mit mpl-2.0 ms-pl ncsa odbl odc-by ofl-1.1 openmdw-1.0 openmdw-1.1 openrail
    openrail++ osl-3.0 other pddl postgresql unknown unlicense wtfpl zlib
""".split()


def check_license(metadata: dict, folder: Path) -> None:
    """
    Check the license of a card as the Hub does.

    Args:
        metadata (`dict`): The card's, with `license`, `license_name` and `license_link` if it has them.
        folder (`Path`): The folder that a link without `://` points into.

    Raises:
        `ValueError`: an unknown identifier, with the nearest ones; `other` without a name; or a link to no file.
    """
    given, name, link = (metadata.get(key) for key in ("license", "license_name", "license_link"))
    for license in given if isinstance(given, list) else [given] if given else []:
        if license not in LICENSES:
            wanted = str(license).lower().replace("license", "").strip().replace(" ", "-")
            near = ", ".join(difflib.get_close_matches(wanted, LICENSES, cutoff=0.4))
            raise ValueError(
                f"license={license!r} is not an identifier of the Hub{near and f'; the nearest are {near}'}. For any "
                "other license: --license other --license-name NAME --license-link LINK."
            )
    if given == "other" and not name:
        raise ValueError("license=other needs a name: --license-name NAME, and --license-link LINK to its text.")
    if (name or link) and not given:
        raise ValueError(f"license_name={name!r} with license_link={link!r} needs a license: --license other.")
    if link and "://" not in str(link) and not (folder / str(link)).is_file():
        raise ValueError(f"license_link='{link}' must be a URL, or a file in {folder}, such as LICENSE.")
