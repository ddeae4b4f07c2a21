"""Rows with images: what becomes of them, and from rows to a drafter for targets of three kinds."""

import base64
import io
import json
import pickle
import re

import pytest
import torch
from support.chat_stand_in import chat_server
from support.pairs import make_draft
from support.runs import make_trainer
from support.seeing import PLACE, picture, processor_of, save_seeing, target_of
from support.tiny_chat import make_tokenizer

from dflash_hf.cli import main
from dflash_hf.data.encode import RowEncoder
from dflash_hf.data.examples import DFlashCollator
from dflash_hf.data.images import ImageReader
from dflash_hf.data.messages import UnusableRow, image_uri, images_in, messages_of
from dflash_hf.data.prepare import prepare_dataset
from dflash_hf.data.sources import load_rows
from dflash_hf.data.template import ChatTemplate
from dflash_hf.evaluation import divergence
from dflash_hf.targets.features import FeatureTap
from dflash_hf.targets.frozen import target_forward
from dflash_hf.targets.generation import generate_one


datasets = pytest.importorskip("datasets")


def chat(part, answer="Hello.", **more):
    """A row with an image in the user's message."""
    user = {"role": "user", "content": [part, {"type": "text", "text": "Hi"}]}
    return {"messages": [user, {"role": "assistant", "content": [{"type": "text", "text": answer}]}], **more}


def llava(text):
    """A conversation as LLaVA's data have it: the place of an image is a mark in a text."""
    return [{"from": "human", "value": text}, {"from": "gpt", "value": "Hello."}]


TEXT = {"messages": [{"role": "user", "content": "Hi there"}, {"role": "assistant", "content": "Hm."}]}


def png(image) -> bytes:
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


def test_every_image_form_gives_the_same_pixels(tmp_path):
    image = picture(3, 20)
    path = tmp_path / "a.png"
    path.write_bytes(png(image))
    data = base64.b64encode(png(image)).decode()
    processor = processor_of("gemma3")
    encode = RowEncoder(ChatTemplate(processor.tokenizer, reader=ImageReader(processor)))
    rows = [
        chat({"type": "image", "image": image}),
        chat({"type": "image", "path": str(path)}),
        chat({"type": "image", "base64": data}),
        chat({"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}),
        chat({"type": "image"}, images=[image]),
        chat({"type": "image"}, image={"bytes": png(image), "path": None}),
        {"image": str(path), "conversations": llava("<image>\nHi")},
        {"images": [image], "messages": None, "conversations": llava("<image>Hi")},
    ]
    examples = [example for row in rows for example in encode(row)]
    collator = DFlashCollator(0, encode.template.reader)
    expected = collator.read_images(collator(examples[:1]))
    assert {tuple(example["input_ids"]) for example in examples} == {tuple(examples[0]["input_ids"])}
    for example in examples:
        images = collator.read_images(collator([example]))
        assert all(torch.equal(images[name], pixels) for name, pixels in expected.items())


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "GIF", "WEBP"])
def test_image_data_has_its_media_type(kind):
    """A JPEG file went to a server as a PNG, which strict ones refuse."""
    file = io.BytesIO()
    picture(1).save(file, kind)
    data = base64.b64encode(file.getvalue()).decode()
    uri = f"data:image/{kind.lower()};base64,{data}"
    assert image_uri(file.getvalue()) == uri
    (message,) = messages_of([{"role": "user", "content": [{"type": "image", "base64": data}]}], "messages")
    assert images_in([message]) == [uri]


def test_damaged_image_drops_only_its_row(tmp_path):
    """Nested in messages, it stopped the whole run: `datasets` decodes images when it reads them."""
    processor = processor_of("gemma3")
    encode = RowEncoder(ChatTemplate(processor.tokenizer, reader=ImageReader(processor)))
    image = picture(3, 20)
    image_feature = datasets.Image()
    expected = encode(chat({"type": "image", "image": image}))[0]["input_ids"]
    part = {"type": datasets.Value("string"), "text": datasets.Value("string"), "image": image_feature}
    message = {"role": datasets.Value("string"), "content": datasets.List(part)}
    contents = ({"bytes": png(image), "path": None}, {"bytes": png(image)[:60], "path": None})
    rows_with_column = [chat({"type": "image"}, images=[content]) for content in contents]
    nested_rows = [chat({"type": "image", "image": content}) for content in contents]
    for rows, features in (
        (rows_with_column, {"messages": datasets.List(message), "images": datasets.List(image_feature)}),
        (nested_rows, {"messages": datasets.List(message)}),
    ):
        table = datasets.Dataset.from_list(rows, features=datasets.Features(features))
        table.to_parquet(tmp_path / "rows.parquet")
        for source in (table, load_rows(tmp_path / "rows.parquet")):
            dataset, report = prepare_dataset(source, encode)
            assert [row["input_ids"] for row in dataset] == [expected] and sum(report.dropped.values()) == 1
            assert "an image cannot be read" in next(iter(report.dropped))


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (chat({"type": "image", "path": "absent.png"}), "there is no image file 'absent.png'"),
        (chat({"type": "image", "path": __file__}), "an image cannot be read"),
        (chat({"type": "image", "image": "iVBORw0KGgo" * 99}), "there is no image file 'iVBORw0KGgo"),
        (chat({"type": "image", "base64": "bm90aGluZw=="}), "an image cannot be read"),
        (chat({"type": "image", "url": "http://127.0.0.1:1/a.png"}), "an image is an address"),
        (chat({"type": "image"}), "an image that is not there"),
        (chat({"type": "image"}, images=[picture(1), picture(2)]), "more images than its `messages` has parts"),
        (chat({"type": "audio", "url": "a.wav"}), "'audio' that is neither text nor an image"),
        (chat({"type": "image", "image": picture(1)}, "long " * 40), "images and more than max_length=64 tokens"),
        (chat({"type": "text", "text": "<start_of_image>"}), "the token of an image where there is none"),
        (chat({"type": "image", "image": picture(1)}, "<image_soft_token>"), "the token of an image where"),
    ],
)
def test_rows_with_broken_images_are_left_out(row, reason):
    processor = processor_of("gemma3")
    encode = RowEncoder(ChatTemplate(processor.tokenizer, reader=ImageReader(processor)), max_length=64)
    with pytest.raises(UnusableRow, match=reason):
        encode(row)


def test_text_only_target_drops_rows_with_images():
    (example,) = RowEncoder(ChatTemplate(make_tokenizer()))(TEXT)
    with pytest.raises(UnusableRow, match="an image, which this target does not read"):
        RowEncoder(ChatTemplate(make_tokenizer()))(chat({"type": "image", "image": picture(1)}))
    with pytest.raises(UnusableRow, match="an image, which this target does not read"):
        RowEncoder(ChatTemplate(make_tokenizer()))({**example, "images": [picture(1)]})
    with_image = chat(
        {"type": "image", "image": f"data:image/png;base64,{base64.b64encode(png(picture(1))).decode()}"}
    )
    with pytest.raises(UnusableRow, match="an image, which this target does not read"):
        RowEncoder(ChatTemplate(make_tokenizer()))({**example, "messages": json.dumps(with_image["messages"])})


@pytest.mark.parametrize("kind", PLACE)
def test_training_features_equal_decoding_features(kind):
    """Features, positions of several axes and all, of a batch with a row of text."""
    processor = processor_of(kind)
    target = target_of(kind, processor)
    reader = ImageReader(processor)
    encode = RowEncoder(ChatTemplate(processor.tokenizer, reader=reader))
    examples = encode(chat({"type": "image", "image": picture(3, 20)})) + encode(TEXT)
    collator = DFlashCollator(0, reader)
    batch = pickle.loads(pickle.dumps(collator(examples)))  # as of a worker, which sent the processor with each
    masks = {"attention_mask": batch["attention_mask"], "images": collator.read_images(batch)}
    features = target_forward(target, [0, 2], batch["input_ids"], **masks, with_last_hidden_state=False).features
    user = [{"type": "image", "image": picture(3, 20)}, {"type": "text", "text": "Hi"}]
    answer = {"role": "assistant", "content": [{"type": "text", "text": "Hello."}]}
    options = {"tokenize": True, "return_dict": True, "return_tensors": "pt"}
    inputs = processor.apply_chat_template([{"role": "user", "content": user}, answer], **options)
    assert inputs["input_ids"][0].tolist() == examples[0]["input_ids"]
    with FeatureTap(target, [0, 2]) as tap, tap.running():
        target(**inputs, use_cache=False)
        torch.testing.assert_close(features[:1, : inputs["input_ids"].shape[1]], tap.take(), atol=1e-4, rtol=1e-4)
    text = torch.tensor([examples[1]["input_ids"]])
    text_features = target_forward(target, [0, 2], text, with_last_hidden_state=False).features
    torch.testing.assert_close(features[1:, : text.shape[1]], text_features, atol=1e-4, rtol=1e-4)


def test_images_are_read_when_their_batch_runs(tmp_path, monkeypatch):
    """Those of all batches of a step were held at once: 677 MB for eight rows of 16 images, now 175 MB."""
    processor = processor_of("gemma3")
    events = []
    inputs = ImageReader.inputs
    target = target_of("gemma3", processor)
    reader = ImageReader(processor)
    encode = RowEncoder(ChatTemplate(processor.tokenizer, reader=reader))
    rows = encode(chat({"type": "image", "image": picture(3)})) * 3
    options = {"gradient_accumulation_steps": 3, "per_device_train_batch_size": 1, "max_steps": 1}
    draft = make_draft(target, block_size=4)
    trainer = make_trainer(
        tmp_path, target, rows, draft, kwargs={"data_collator": DFlashCollator(0, reader)}, **options
    )
    monkeypatch.setattr(ImageReader, "inputs", lambda *of: events.append("read") or inputs(*of))
    compute = trainer.compute_loss
    trainer.compute_loss = lambda *args, **kwargs: events.append("batch") or compute(*args, **kwargs)
    trainer.train()
    assert events == ["batch", "read"] * 3


TRAINING = "max_steps=2 per_device_train_batch_size=2 num_anchors=4 block_size=4 mask_token_id=270 use_cpu=true"
TRAINING += " bf16=false target_dtype=float32 report_to=none"


@pytest.mark.parametrize("kind", ["qwen2_5_vl", "gemma3"])
def test_drafter_learns_from_rows_with_images(kind, tmp_path, capsys, monkeypatch):
    target, processor = save_seeing(tmp_path / "target", kind, monkeypatch)
    for number in range(6):
        picture(number, 16 + 4 * number).save(tmp_path / f"{number}.png")
    rows = [chat({"type": "image", "path": str(tmp_path / f"{number}.png")}) for number in range(6)]
    rows += [TEXT, chat({"type": "image", "path": str(tmp_path / "absent.png")})]
    data = tmp_path / "rows.jsonl"
    answers = tmp_path / "answers.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")

    def run(*words):
        status = main([str(word) for word in words])
        printed = capsys.readouterr()
        print(printed.err)
        return status, printed.out

    target_options = ("--target", tmp_path / "target")
    status, out = run(
        "regenerate",
        *target_options,
        "--data",
        data,
        "--output",
        answers,
        "--max-new-tokens",
        8,
        "--mask-token-id",
        270,
    )
    assert status == 0 and "7 of 7 rows are in" in out and "1 rows are left out: there is no image file" in out
    for row in map(json.loads, answers.read_text(encoding="utf-8").splitlines()):
        messages = [{**row["messages"][0], "content": rows[row["row"]]["messages"][0]["content"]}]
        if row["row"] < 6:
            messages[0]["content"] = [
                {"type": "image", "image": picture(row["row"], 16 + 4 * row["row"])},
                messages[0]["content"][1],
            ]
        else:
            messages[0]["content"] = [{"type": "text", "text": "Hi there"}]
        options = {"tokenize": True, "return_dict": True, "return_tensors": "pt", "add_generation_prompt": True}
        inputs = processor.apply_chat_template(messages, **options)
        expected = target.generate(**inputs, max_new_tokens=8, do_sample=False, suppress_tokens=[270])
        assert row["input_ids"] == expected[0].tolist(), row["row"]
    status, out = run("prepare", *target_options, "--data", answers, "--output", tmp_path / "ids.parquet")
    assert status == 0 and "examples          7" in out
    training = [f"target={target_options[1]}", *TRAINING.split()]
    rows = (f"data={tmp_path / 'ids.parquet'}", f"eval_data={answers}", "eval_strategy=steps", "eval_steps=2")
    assert run("train", *training, *rows, f"output_dir={tmp_path / 'draft'}")[0] == 0
    ids = json.loads((tmp_path / "draft" / "config.json").read_text())["dflash_config"]["target_layer_ids"]
    storing = ("--output", tmp_path / "features", "--target-layer-ids", *ids, "--store-dtype", "float32")
    assert run("features", *target_options, "--data", answers, *storing)[0] == 0
    folders = (f"features={tmp_path / 'features'}", f"draft={tmp_path / 'draft'}", f"output_dir={tmp_path / 'again'}")
    assert run("train", *training, *folders)[0] == 0
    pair = (*target_options, "--draft", tmp_path / "draft", "--data", answers, "--max-new-tokens", 8)
    status, out = run("eval", *pair, "--dtype", "float32", "--runs", 1)
    assert status == 0 and re.search(r"(\d+) of \1 outputs with the drafter equal the target's own", out)


@pytest.mark.parametrize("kind", PLACE)
def test_rounding_is_measured_with_the_images(kind, monkeypatch):
    """It was that of another context: the tokens of the images were read without them."""
    processor = processor_of(kind)
    target = target_of(kind, processor)
    reader = ImageReader(processor)
    (example,) = RowEncoder(ChatTemplate(processor.tokenizer, reader=reader))(
        chat({"type": "image", "image": picture(3, 20)})
    )
    prompt = reader.prompt(example["input_ids"][:-3], example["images"])
    answer = generate_one(target, prompt, do_sample=False, max_new_tokens=6).sequences[0, len(prompt) :].tolist()
    predictions = []
    two_best = divergence._two_best

    def noted(*arguments):
        result = two_best(*arguments)
        predictions.append(result[0][:, 0].tolist())
        return result

    monkeypatch.setattr(divergence, "_two_best", noted)
    rounding = divergence.measure_rounding(target, [(prompt, answer)], block_size=3)
    assert rounding.positions == len(answer) and rounding.size < 1e-3
    assert predictions == [answer] * 4


def test_server_receives_images_as_data(tmp_path):
    path = tmp_path / "a.png"
    path.write_bytes(png(picture(1)))
    data = tmp_path / "rows.jsonl"
    data.write_text(json.dumps(chat({"type": "image", "path": str(path)})), encoding="utf-8")
    with chat_server(lambda body: "A picture.") as (url, received):
        options = ("--target", "served", "--server", url, "--data", data, "--output", tmp_path / "out.jsonl")
        assert main(["regenerate", *map(str, options)]) == 0
    (body,) = received
    address = body["messages"][0]["content"][0]["image_url"]["url"]
    assert base64.b64decode(address.partition("base64,")[2]) == path.read_bytes()
    (row,) = load_rows(tmp_path / "out.jsonl")
    assert row["messages"][0]["content"][0] == {"type": "image", "image": str(path)}
