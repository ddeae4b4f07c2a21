"""`dflash prompts`: requests that a chat target writes itself, each once, whatever happens in between."""

import json
import random
import re

import pytest
import torch
from support.pairs import make_target
from support.tiny_chat import CHATML, END, THINKING, make_tokenizer
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from dflash_hf import PromptSettings, generate_prompts
from dflash_hf.cli import main
from dflash_hf.data.distinct import DistinctTexts, quality_issue
from dflash_hf.synthetic import magpie
from dflash_hf.synthetic.beginnings import whole_words
from dflash_hf.synthetic.continuous_batch import BatchCache
from dflash_hf.synthetic.magpie import KINDS, user_turn


WORDS = [a + b for a in ("ba", "du", "ki", "lo", "me", "na") for b in ("r", "st", "n", "x")]
SPECIAL = ["<|im_end|>", "<|im_start|>"]
BRIEF = PromptSettings(begin=("bar dust", "kin"), kinds=("chat",), max_new_tokens=24)


def word_tokenizer():
    """Words are tokens, so that a random target writes texts that pass as requests."""
    vocabulary = {word: i for i, word in enumerate([*SPECIAL, "system", "user", "assistant", *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=SPECIAL[0]))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {"pad_token": SPECIAL[0], "eos_token": SPECIAL[0], "extra_special_tokens": SPECIAL[1:]}
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)
    # A space behind each marker: without it a word is glued to the next.
    fast.chat_template = CHATML.replace("<|im_start|>", "<|im_start|> ").replace("<|im_end|>", " <|im_end|>")
    return fast


@pytest.fixture(scope="module")
def pair():
    tokenizer = word_tokenizer()
    target = make_target(vocab_size=len(tokenizer))
    target.generation_config.eos_token_id = target.generation_config.pad_token_id = 0
    target.lm_head.weight.data *= 0.3  # all tokens about as likely, the end of a turn among them
    return target, tokenizer


@pytest.fixture(scope="module")
def folder(pair, tmp_path_factory):
    path = tmp_path_factory.mktemp("target")
    for part in pair:
        part.save_pretrained(path)
    return path


# ------------------------------------------------------------------------------------------------------ a user's turn


def test_user_turn_is_read_from_the_template():
    assert user_turn(make_tokenizer(CHATML), PromptSettings()) == ("<|im_start|>user\n", END)
    settings = PromptSettings(chat_template_kwargs={"enable_thinking": False})
    assert user_turn(make_tokenizer(THINKING), settings) == ("<|im_start|>user\n", END)
    trimming = make_tokenizer("{% for m in messages %}USER: {{ m.content | trim }}\n<|im_end|>{% endfor %}")
    assert user_turn(trimming, PromptSettings()) == ("USER: ", END)


def test_base_model_begins_after_its_start_token():
    """It has no chat template: no kinds of requests, and no token that a prompt must end with."""
    base = make_tokenizer(None)
    assert user_turn(base, PromptSettings(begin=["Once"])) == ("", None)
    with pytest.raises(ValueError, match="neither a chat template nor a start token.*give `begin`"):
        user_turn(base, PromptSettings())
    with pytest.raises(ValueError, match="kinds=chat: these are kinds of users' requests"):
        user_turn(base, PromptSettings(kinds=["chat"], begin=["Once"]))
    base.bos_token = "<|im_start|>"
    assert user_turn(base, PromptSettings()) == ("<|im_start|>", None)


EACH = "{% for m in messages %}"


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (EACH + "[{{ m.content | upper }}]{% endfor %}", r"'Xq7 7qX' was rendered as '\[XQ7 7QX\]'"),
        (EACH + "{{ m.content }}<|im_end|>{% endfor %}", r"'Xq7 7qX' was rendered as 'Xq7 7qX<\|im_end\|>'"),
        (EACH + "Q: {{ m.content }}<|im_end|>{{ m.content }}{% endfor %}", "not once"),
        (EACH + "USER: {{ m.content }} ASSISTANT:{% endfor %}", "before an added token"),
        ("{{ raise_exception('No system role.') }}", r"rejects .*\(No system role"),
    ],
)
def test_templates_without_user_turn_are_refused(template, message):
    with pytest.raises(ValueError, match=message):
        user_turn(make_tokenizer(template), PromptSettings())


# ------------------------------------------------------------------------------------------------------ what is kept


def test_near_duplicates_equal_those_of_all_pairs():
    generator = random.Random(0)
    texts = ["Sort a list!", "sort, a LIST", "List?", "list", "Sort a list in place"]
    for _ in range(60):
        words = [generator.choice("abcd") * 2 for _ in range(generator.randrange(1, 30))]
        texts.append(" ".join(words))
        for _ in range(3):  # relatives at every distance
            words = [word if generator.random() < 0.95 else "zz" for word in words]
            texts.append(" ".join(words))
    grams = []
    distinct = DistinctTexts()
    for text in texts:
        words = re.findall(r"\w+", text.casefold())
        own = {tuple(words[i : i + 3]) for i in range(max(len(words) - 2, 1))}
        is_new = all(len(own & earlier) / len(own | earlier) < 0.7 for earlier in grams)
        assert distinct.add(text) == is_new, text
        if is_new:
            grams.append(own)
    assert len(texts) / 4 < len(grams) < len(texts) * 0.9


def test_quality_issues_have_names():
    assert quality_issue("Write a function that sorts a list.\n\n```python\ndef f(x):\n\treturn") is None
    assert quality_issue("如何用电脑学习一种新的语言并且记住它的词汇？") is None
    assert quality_issue("Hi there") == quality_issue("a b " * 500) == "too short or too long"
    assert quality_issue("What is the \x1b[31m red one?") == "not printable"
    assert quality_issue("What is \ufffd this word?") == "not printable"
    assert quality_issue("+-+-+-+- ??? ... x = 1") == "mostly punctuation"
    assert quality_issue("the same words again and " * 6) == "repeats itself"


def test_wrong_prompt_settings_are_named():
    for fields, message in (
        ({"kinds": ["chat", "poem"]}, "'poem' is unknown; choose from chat, code"),
        ({"kinds": "chat"}, "kinds='chat' is a text; give a list"),  # was "'c' is unknown"
        ({"temperature": 0.0}, "temperature=0.0 must be above 0"),
        ({"top_p": 0.0}, "top_p=0.0 must be above 0"),
        ({"max_new_tokens": 0}, "max_new_tokens=0 must be at least 1"),
    ):
        with pytest.raises(ValueError, match=re.escape(message)):
            PromptSettings(**fields)
    assert all(text == text.rstrip(" ") for texts in KINDS.values() for text in texts)
    kinds = [PromptSettings(kinds=("chat", "chat", "code"), begin=("a", "b")).kind_and_beginning(i) for i in range(8)]
    assert [kind for kind, _ in kinds] == ["chat", "chat", "code", "begin"] * 2
    assert [text for _, text in kinds] == ["", "", KINDS["code"][0], "a", "", "", KINDS["code"][1], "b"]


# ------------------------------------------------------------------------------------------------------ rows


def test_requests_follow_the_templates_prefix(pair, monkeypatch):
    """What the target reads is the user's turn and the beginning; what is kept is one text that ended by itself."""
    target, tokenizer = pair
    prefills = []
    original = BatchCache.prefill

    def spy(self, row, prompt, tokens_of_rows):
        prefills.append(tokenizer.decode(prompt))
        return original(self, row, prompt, tokens_of_rows)

    monkeypatch.setattr(BatchCache, "prefill", spy)
    torch.manual_seed(7)
    expected = torch.rand(1)
    torch.manual_seed(7)
    rows = generate_prompts(target, tokenizer, 12, BRIEF)
    assert torch.rand(1) == expected  # the caller's randomness is left alone
    assert all(text.startswith("<|im_start|> user") for text in prefills)
    assert {tuple(text.split()[2:]) for text in prefills[:6]} == {(), ("bar", "dust"), ("kin",)}
    assert [row["row"] for row in rows] == list(range(12))
    assert {row["kind"] for row in rows} == {"chat", "begin"}
    for row in rows:
        words = row["prompt"].split()
        assert not set(words) & set(SPECIAL)  # neither the end nor any other
        assert row["kind"] == "chat" or words[:2] == ["bar", "dust"] or words[0] == "kin"
        assert row["prompt"] not in ("bar dust", "kin")  # more than what was given
    assert len({row["prompt"] for row in rows}) == 12
    assert generate_prompts(target, tokenizer, 12, BRIEF) == rows
    other_seed = PromptSettings(**{**vars(BRIEF), "seed": 1})
    assert generate_prompts(target, tokenizer, 12, other_seed) != rows


def test_few_new_requests_end_with_an_error(pair, monkeypatch):
    target, tokenizer = pair
    monkeypatch.setattr(magpie, "_user_prompt", lambda *args: ("bar dust kin lost dun", None))
    with pytest.raises(
        ValueError, match=r"count=5: after 1 prompts the last 512 samples gave no new one .*512 like another"
    ):
        generate_prompts(target, tokenizer, 5, PromptSettings())


# ------------------------------------------------------------------------------------------------------ the command

OPTIONS = ("--kinds", "chat", "--begin", "bar dust", "--begin", "kin", "--max-new-tokens", "24", "--batch-size", "6")
OPTIONS = (*OPTIONS, "--device", "cpu", "--dtype", "float32")


def write(capsys, target, output, count, *options):
    code = main(
        ["prompts", "--target", str(target), "--output", str(output), "--count", str(count), *OPTIONS, *options]
    )
    printed = capsys.readouterr()
    return code, printed.out, (printed.err.strip().splitlines() or [""])[-1]


def rows_of(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_longer_file_begins_with_the_shorter_one(folder, pair, tmp_path, capsys):
    """Whatever is sampled together, and where a kill cut it off: in the end the file is that of a single run."""
    output = tmp_path / "out.jsonl"
    single_run = tmp_path / "whole.jsonl"
    assert write(capsys, folder, single_run, 15)[0] == 0 and rows_of(single_run) == generate_prompts(*pair, 15, BRIEF)
    for count in (1, 4, 9, 15):
        if output.exists():
            output.write_bytes(output.read_bytes()[: -7 * count])
        assert write(capsys, folder, output, count, "--batch-size", str(count % 5 + 1))[0] == 0
        assert output.read_bytes() == b"".join(single_run.read_bytes().splitlines(keepends=True)[:count])
    code, out, _ = write(capsys, folder, output, 10)  # fewer than there are
    assert code == 0 and "15 of 10 prompts are done" in out and len(rows_of(output)) == 15


def test_other_settings_and_other_files_are_not_mixed(folder, tmp_path, capsys):
    output = tmp_path / "out.jsonl"
    assert write(capsys, folder, output, 3)[0] == 0
    code, _, error = write(capsys, folder, output, 6, "--seed", "1")
    assert code == 1 and "was started with seed=0, not 1" in error
    template = tmp_path / "other.jinja"
    template.write_text((folder / "chat_template.jinja").read_text(encoding="utf-8") + " ", encoding="utf-8")
    code, _, error = write(capsys, folder, output, 6, "--chat-template", str(template))
    assert code == 1 and "was started with template=" in error
    foreign = tmp_path / "foreign.jsonl"
    notes = tmp_path / "foreign.jsonl.settings.json"
    foreign.write_text('{"row": 0, "prompt": "Hi", "completion": "Hello"}\n', encoding="utf-8")
    notes.write_text('{"raw": true}')
    code, _, error = write(capsys, folder, foreign, 6)
    assert notes.read_text() == '{"raw": true}'  # it got our settings before it was refused
    assert code == 1 and "Line 1 of" in error and "not a row of `dflash prompts`" in error
    code, _, error = write(capsys, folder, tmp_path / "new.jsonl", 6, "--kinds", "poem")
    assert code == 1 and "'poem' is unknown" in error and not (tmp_path / "new.jsonl").exists()


def test_regenerate_answers_the_requests(folder, tmp_path, capsys):
    pytest.importorskip("datasets")
    prompts = tmp_path / "prompts.jsonl"
    responses = tmp_path / "responses.jsonl"
    assert write(capsys, folder, prompts, 5)[0] == 0
    options = ("--output", responses, "--max-new-tokens", "8", "--device", "cpu")
    assert main(["regenerate", "--data", str(prompts), "--target", str(folder), *map(str, options)]) == 0
    requests = {row["row"]: [{"role": "user", "content": row["prompt"]}] for row in rows_of(prompts)}
    assert {row["row"]: row["messages"][:-1] for row in rows_of(responses)} == requests


@pytest.mark.slow
@pytest.mark.real
def test_real_target_writes_requests(real_target):
    target = AutoModelForCausalLM.from_pretrained(real_target, dtype="auto").eval()
    settings = PromptSettings(kinds=("chat", "code"), max_new_tokens=32)
    rows = generate_prompts(target, AutoTokenizer.from_pretrained(real_target), 4, settings, batch_size=4)
    assert {row["kind"] for row in rows} == {"chat", "code"}
    assert all(len(row["prompt"].split()) > 3 for row in rows)


# ------------------------------------------------------------------------------------------------------- base models


@pytest.fixture
def base_folder(pair, tmp_path):
    """The target without a chat template, with a start token."""
    target, _ = pair
    tokenizer = word_tokenizer()
    tokenizer.chat_template = None
    tokenizer.bos_token = SPECIAL[1]
    target.save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    return tmp_path / "base"


def test_base_model_writes_beginnings_of_texts(base_folder, tmp_path):
    """Cut after a whole word, without an end; the same after an interruption."""
    whole = tmp_path / "whole.jsonl"
    line = ["prompts", "--target", str(base_folder), "--max-new-tokens", "12", "--batch-size", "4", "--count", "5"]
    assert main([*line, "--output", str(whole)]) == 0
    rows = [json.loads(line) for line in whole.read_text(encoding="utf-8").splitlines()]
    assert [row["row"] for row in rows] == [0, 1, 2, 3, 4]
    assert all(4 <= len(row["prompt"].split()) <= 12 for row in rows)
    assert not any(special in row["prompt"] for row in rows for special in SPECIAL)
    part = tmp_path / "part.jsonl"
    assert main([*line[:-1], "2", "--output", str(part)]) == 0
    assert main([*line, "--output", str(part)]) == 0
    assert part.read_text(encoding="utf-8") == whole.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("cut", "whole"),
    [
        ("It rains in the nor", "It rains in the"),
        ("word", "word"),
        ("2024年 机器学习是人工智能的一个分支", "2024年 机器学习是人工智能的一个分支"),
        ("机器学习是人工智能\ufffd", "机器学习是人工智能"),
    ],
)
def test_cut_text_ends_with_a_whole_word(cut, whole):
    """Of texts with few spaces, all behind the last one was lost, or they ended with half of a character."""
    assert whole_words(cut) == whole


def test_texts_become_prompts(base_folder, tmp_path, capsys):
    """Their beginnings; short texts and repeated ones are left out, and what is missing is said."""
    texts = [" ".join(WORDS[i : i + 9]) for i in (0, 9, 0)]
    texts.append("bar")
    data = tmp_path / "texts.jsonl"
    data.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    output = tmp_path / "prompts.jsonl"
    line = ["prompts", "--target", str(base_folder), "--data", str(data), "--max-new-tokens", "6", "--count", "3"]
    assert main([*line, "--output", str(output)]) == 0
    rows = [json.loads(line) for line in output.read_text(encoding="utf-8").splitlines()]
    assert [row["prompt"] for row in rows] == [" ".join(WORDS[i : i + 5]) for i in (0, 9)]
    assert [row["sample"] for row in rows] == [0, 1]
    printed = capsys.readouterr()
    assert "has no more texts: 1 of 3 prompts are missing" in printed.err
    assert "like another" in printed.out
    assert "too short or too long" in printed.out
    assert main([*line, "--output", str(output), "--kinds", "chat"]) == 2
    assert "samples nothing: leave out --kinds" in capsys.readouterr().err
