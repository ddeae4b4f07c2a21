"""`dflash eval --server` against this package's own server."""

import json

from dflash_hf.cli import main


def test_own_server_counts_what_its_log_says(server, tmp_path, capsys):
    (tmp_path / "rows.txt").write_text("Say 3\nSay 5\nSay 7\n", encoding="utf-8")
    options = ["--data", str(tmp_path / "rows.txt"), "--max-new-tokens", "40", "--json"]
    assert main(["eval", "--server", server.url, *options]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["engine"] == "dflash serve" and facts["answers"] == 3 and facts["setting"]["model"] == server.model
    counts = facts["counts"]
    assert facts["tau"] == counts["verified_tokens"] / counts["verifications"] > 2
    # Each answer's first token comes from its prompt; each verification adds a token that was not drafted, except at
    # the end of an answer.
    assert counts["verified_tokens"] == counts["tokens"] - 3
    added = counts["verified_tokens"] - counts["accepted"]
    assert counts["verifications"] - 3 <= added <= counts["verifications"]
