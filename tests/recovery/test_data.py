"""What a recovery trains on: sources by their shares, labels of the answers alone, samples that are held out."""

import json
import logging
from typing import Any

import pytest
import torch
from datasets import Dataset
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from optimum_prune.calibration.columns import Source
from optimum_prune.calibration.data import load_samples
from optimum_prune.calibration.passages import passages
from optimum_prune.calibration.request import resolve
from optimum_prune.config import CalibrationConfig
from optimum_prune.errors import CalibrationError
from optimum_prune.objectives import IGNORED
from optimum_prune.recovery.config import RecoveryConfig
from optimum_prune.recovery.data import TrainingData, load_training_data
from optimum_prune.recovery.recover import check_recovery
from optimum_prune.recovery.report import describe_training
from optimum_prune.recovery.responses import responses
from tests.calibration.conftest import WORDS, picture
from tests.models import IMAGE_TOKEN, PATCHES, llama, t5

BOS, END = 0, 1  # of the byte-level tokenizer
TEXTS = [f"{WORDS} {i}" for i in range(60)]
LISTS = [[5 + i, 6, 7 + i] for i in range(50)]
QUESTIONS = [f"what jumps over {i}" for i in range(20)]
ANSWERS = [f"the fox {i}" for i in range(20)]
TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
LONG = llama(vocab_size=280, max_position_embeddings=4096, num_hidden_layers=1)
SMALL: dict[str, Any] = {"max_steps": 5, "batch_size": 2}


@pytest.fixture(autouse=True)
def infos(caplog):
    caplog.set_level(logging.INFO, "optimum_prune")


@pytest.fixture
def load(model, tokenizer):
    def load(dataset=None, model=model, tokenizer=tokenizer, processor=None, calibration=None, dense=None, **options):
        config = RecoveryConfig(dataset, **SMALL | options)
        return load_training_data(config, model, tokenizer, processor, calibration=calibration, dense=dense)

    return load


@pytest.fixture
def text_file(tmp_path):
    path = tmp_path / "texts.txt"
    path.write_text("\n".join(TEXTS))
    return str(path)


def everything(data):
    return [*data.train, *data.held_out]


def spoken(data, tokenizer):
    """What is read, and what of it is asked for, as sorted text."""
    found = []
    for sample in everything(data):
        ids, labels = sample["input_ids"], sample["labels"]
        assert ids.shape == labels.shape and ids.dtype == labels.dtype == torch.int64
        asked = labels != IGNORED
        assert torch.equal(ids[asked], labels[asked])
        found.append((tokenizer.decode(ids), tokenizer.decode(ids[asked])))
    return sorted(found)


# How many, and which are held out


def test_as_many_as_the_steps_need_and_those_held_out_besides(load):
    data = load(LISTS, gradient_accumulation=2)
    assert (len(data.train), len(data.held_out)) == (20, 2)
    data = load(LISTS, num_samples=8, held_out=0.5)
    assert (len(data.train), len(data.held_out)) == (8, 8)
    data = load(LISTS, num_samples=1, held_out=0.001)
    assert (len(data.train), len(data.held_out)) == (1, 1)


def test_fewer_are_seen_several_times(load, caplog):
    data = load(LISTS[:10], held_out=0.2)
    assert (len(data.train), len(data.held_out)) == (8, 2)
    assert "The steps take 10 samples: each is seen 1.2 times" in caplog.text
    caplog.clear()
    load(LISTS)
    assert "each is seen" not in caplog.text and "Training on 10 samples: 20 of their 30 tokens" in caplog.text


def test_whole_samples_are_held_out_by_the_seed(load):
    def drawn(part, **options):
        return [sample["input_ids"].tolist() for sample in getattr(load(LISTS, **options), part)]

    both = drawn("train") + drawn("held_out")
    assert len({tuple(ids) for ids in both}) == len(both) and all(ids in LISTS for ids in both)
    assert drawn("held_out", held_out=0.3) == drawn("held_out", held_out=0.3)
    assert drawn("held_out", held_out=0.3) != drawn("held_out", held_out=0.3, seed=1)


def test_copies_of_what_is_held_out_are_not_trained_on(load, caplog):
    lists = [[5, 6, 7 + i % 3] for i in range(30)]
    data = load(lists, num_samples=20)
    held, train = ({tuple(s["input_ids"].tolist()) for s in part} for part in (data.held_out, data.train))
    assert held and train and not held & train
    assert "samples equal one that is held out" in caplog.text


def test_one_question_with_two_answers_is_no_copy(load):
    rows = {"prompt": ["the fox"] * 4, "response": ["a", "b", "c", "d"]}
    data = load(Dataset.from_dict(rows))
    assert len(everything(data)) == 4


def test_images_are_part_of_a_sample(load, llava_model, processor):
    rows = {"image": [picture(i * 50) for i in range(4)], "text": ["w5 w6"] * 4}
    data = load(Dataset.from_dict(rows), llava_model, None, processor)
    assert len(everything(data)) == 4


@pytest.mark.parametrize("lists", [[[5, 6]], [[5, 6]] * 9])
def test_too_few_to_hold_any_out(load, lists):
    with pytest.raises(CalibrationError, match=rf"at least two different samples.*; {len(lists)} were found"):
        load(lists)


def test_a_single_token_has_nothing_to_be_trained_on(load, caplog):
    data = load([[5], [5, 6], [6, 7], [8]])
    assert len(everything(data)) == 2
    assert "2 samples of in-memory: 4 token lists" in caplog.text and "nothing to be trained on" in caplog.text


def test_nothing_but_single_tokens(load, model):
    with pytest.raises(CalibrationError, match=r"no sample has a second token.* Use longer samples"):
        load([[5], [6], [7]])
    for dataset in (TEXTS, "self", [[5, 6, 7]]):
        with pytest.raises(CalibrationError, match=r"no sample has a second token.* Raise seq_len"):
            load(dataset, seq_len=1)
        with pytest.raises(CalibrationError, match=r"no sample has a second token.* Raise seq_len"):
            check_recovery(model, RecoveryConfig(dataset, seq_len=1))


# Sources


def test_by_default_half_is_the_dense_models_text_and_half_the_calibration(load, text_file, tokenizer):
    dense = llama(seed=1, vocab_size=280)
    data = load(calibration=text_file, dense=dense)
    assert [(s["source"], s["share"], s["samples"]) for s in data.to_dict()["sources"]] == [
        ("self", 0.5, pytest.approx(5, abs=1)),
        (text_file, 0.5, pytest.approx(5, abs=1)),
    ]
    assert len(data.train) == 10
    from_dense = load(dense=dense)
    assert len(everything(from_dense)) == 11 and len(from_dense.sources) == 1
    assert from_dense.fingerprint != load().fingerprint, "the pruned model writes another text"
    seen = {tuple(sample["input_ids"].tolist()) for sample in everything(from_dense)}
    assert any(tuple(sample["input_ids"].tolist()) in seen for sample in data.train)


def test_its_own_text_is_not_the_text_of_the_calibration(load, model):
    own = {tuple(sample["input_ids"].tolist()) for sample in everything(load(seq_len=12))}
    for seed in (0, 1):
        config = CalibrationConfig("self", num_samples=12, seq_len=12, seed=seed)
        assert not own & {tuple(sample.tolist()) for sample in load_samples(config, model).samples}
    assert not own & {tuple(sample["input_ids"].tolist()) for sample in everything(load(seq_len=12, seed=1))}


@pytest.mark.parametrize("calibration", [None, "self", "in-memory: 3 texts, sha256 0123456789abcdef"])
def test_where_no_calibration_data_is_left_its_own_text_is_all(load, calibration, caplog):
    assert [source["source"] for source in load(calibration=calibration).sources] == ["self"]
    assert "style" not in caplog.text


def test_its_own_text_needs_no_tokenizer_and_no_columns(load):
    assert load(tokenizer=None, target_column="answer").sources[0]["source"] == "self"


def test_an_encoder_decoder_by_default_has_the_calibration_alone(load, t5_tokenizer, text_file, caplog):
    data = load(model=t5(eos_token_id=1), tokenizer=t5_tokenizer, calibration=text_file, seq_len=16)
    assert [source["source"] for source in data.sources] == [text_file]
    assert f"nothing but {text_file}" in caplog.text
    with pytest.raises(CalibrationError, match=r"T5For.* writes no text of its own.*Set dataset"):
        load(model=t5(), tokenizer=t5_tokenizer)


def test_shares(load, tmp_path, text_file):
    lists = tmp_path / "lists.jsonl"
    lists.write_text("".join(json.dumps({"input_ids": ids}) + "\n" for ids in LISTS))
    with open(text_file, "w") as file:
        file.write(" ".join(map(str, range(1000))))  # no window is a copy of another
    data = load({text_file: 3, str(lists): 1, "self": 1}, num_samples=40, seq_len=8)
    assert [source["share"] for source in data.sources] == [0.6, 0.2, 0.2]
    assert [source["samples"] for source in data.sources] == [pytest.approx(n, abs=3) for n in (24, 8, 8)]
    assert sum(source["samples"] for source in data.sources) == len(data.train) == 40
    for kind in ("samples", "tokens", "trained_tokens"):
        assert sum(source[kind] for source in data.sources) == data.to_dict()[kind]
    assert data.fingerprint != load({text_file: 1, str(lists): 1}, num_samples=40, seq_len=8).fingerprint


def test_a_source_that_is_the_calibrations_and_alone_is_warned_of(load, text_file, caplog):
    load({text_file: 1, "self": 1}, calibration=text_file)
    load(text_file, calibration="self")
    load(text_file, calibration=None)
    assert "style" not in caplog.text
    load(text_file, calibration=text_file)
    assert caplog.text.count("gets better by learning its style alone") == 1


def test_the_calibration_is_the_same_file_by_another_path(load, text_file, tmp_path, monkeypatch, caplog):
    monkeypatch.chdir(tmp_path)
    load("texts.txt", calibration=text_file)
    load(text_file, calibration="texts.txt")
    assert caplog.text.count("learning its style") == 2


def test_a_source_that_does_not_exist(load):
    with pytest.raises(CalibrationError, match=r"'missing\.txt' does not exist"):
        load({"missing.txt": 1})


def test_a_folder_gives_the_split_that_is_asked_for(load, tmp_path):
    for split, first in (("train", 5), ("validation", 50)):
        lists = [{"input_ids": [first + i, 7]} for i in range(12)]
        (tmp_path / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in lists))
    (tmp_path / "README.md").write_text("The card.")
    for split, first in (("train", 5), ("validation", 50)):
        firsts = {int(sample["input_ids"][0]) for sample in everything(load(str(tmp_path), split=split))}
        assert firsts <= set(range(first, first + 12)) and len(firsts) == 11
    with pytest.raises(CalibrationError, match=r"Unknown split 'test'; supported: 'train', 'validation'"):
        load(str(tmp_path), split="test")


def test_options_without_effect_are_refused_where_they_have_none_on_any_source(load, model, text_file, tmp_path):
    wrong: list[dict[str, Any]] = [{"split": "test"}, {"text_column": "body"}]
    for options in wrong:
        with pytest.raises(CalibrationError, match=r"'(test|body)'"):
            load(text_file, **options)
        with pytest.raises(CalibrationError, match=r"source 'self'"):
            check_recovery(model, RecoveryConfig("self", **options))
    table = tmp_path / "table.jsonl"
    table.write_text("".join(json.dumps({"body": f"{text} again", "title": "x"}) + "\n" for text in TEXTS))
    data = load({text_file: 1, str(table): 1, "self": 1}, text_column="body", seq_len=8)
    assert all(source["samples"] for source in data.sources)


# Plain text


def test_text_is_cut_into_windows_and_trained_on_whole(load, tokenizer, model):
    data = load(TEXTS)
    config = CalibrationConfig(TEXTS, num_samples=12, seq_len=64)
    windows = load_samples(config, model, tokenizer).samples
    assert len(everything(data)) == 11
    assert {tuple(s["input_ids"].tolist()) for s in everything(data)} <= {tuple(w.tolist()) for w in windows}
    for sample in everything(data):
        assert sample["labels"][0] == IGNORED and torch.equal(sample["labels"][1:], sample["input_ids"][1:])


def test_windows_begin_with_bos_where_texts_do(load, tokenizer):
    tokenizer.add_bos_token = True
    data = load(TEXTS, seq_len=16)
    for sample in everything(data):
        assert len(sample["input_ids"]) <= 16
        assert sample["input_ids"][0] == BOS and BOS not in sample["input_ids"][1:]
        assert sample["labels"][0] == IGNORED
    assert data.sources[0]["begins_with"] == "<s>"
    assert describe_training(data.to_dict()).endswith("(100%), each window of text begins with `<s>`")


def test_lengths(load, tokenizer):
    def longest(**options):
        return max(len(sample["input_ids"]) for sample in everything(load(TEXTS * 9, **options)))

    assert longest() == 64
    assert longest(seq_len=20) == 20
    assert longest(model=LONG) == 512
    with pytest.raises(CalibrationError, match="at most the model's max_position_embeddings 64"):
        load(TEXTS, seq_len=65)


# Answers


@pytest.mark.parametrize(
    ("question", "answer", "options"),
    [
        ("prompt", "response", {}),
        ("prompt", "completion", {}),
        ("question", "answer", {}),
        ("instruction", "output", {}),
        ("input", "output", {}),
        ("text", "label", {"target_column": "label"}),
        ("output", "prompt", {"text_column": "output", "target_column": "prompt"}),
    ],
)
def test_the_answer_alone_is_trained_on(load, tokenizer, question, answer, options):
    dataset = Dataset.from_dict({question: QUESTIONS, answer: ANSWERS, "n": list(range(20))})
    data = load(dataset, num_samples=18, **options)
    expected = [(f"{q}\n{a}</s>", f"{a}</s>") for q, a in zip(QUESTIONS, ANSWERS, strict=True)]
    assert spoken(data, tokenizer) == sorted(expected)


def test_a_beginning_that_the_tokenizer_writes_is_written(load, tokenizer):
    tokenizer.add_bos_token = True
    dataset = Dataset.from_dict({"prompt": QUESTIONS, "response": ANSWERS})
    for sample in everything(load(dataset)):
        begins = sample["input_ids"].tolist()
        assert begins[0] == BOS and begins[1:].count(BOS) == 0


def test_a_beginning_that_the_question_has_is_not_written_twice(load, tokenizer):
    tokenizer.add_bos_token = True
    written, plain = (
        load(Dataset.from_dict({"prompt": [f"{bos}{question}" for question in QUESTIONS], "response": ANSWERS}))
        for bos in ("<s>", "")
    )
    assert written.fingerprint == plain.fingerprint


def test_a_question_may_have_further_columns(load, tokenizer):
    rows = {"instruction": ["sum up"] * 2, "input": ["the fox", " "], "output": ["fox", "dog"]}
    assert spoken(load(Dataset.from_dict(rows)), tokenizer) == [
        ("sum up\ndog</s>", "dog</s>"),
        ("sum up\nthe fox\nfox</s>", "fox</s>"),
    ]


def test_a_text_column_that_is_named_is_plain_text(load):
    dataset = Dataset.from_dict({"prompt": TEXTS, "response": TEXTS})
    assert all((sample["labels"][1:] != IGNORED).all() for sample in everything(load(dataset, text_column="prompt")))


def test_long_answers_are_cut_and_long_questions_left_out(load, tokenizer, caplog):
    rows = {"prompt": ["the fox", WORDS, "the dog", "the end"], "response": [WORDS, "dog", "the", " "]}
    data = load(Dataset.from_dict(rows), seq_len=12)
    long = tokenizer(f"the fox\n{WORDS}", add_special_tokens=False)["input_ids"][:12]
    short = tokenizer("the dog\nthe", add_special_tokens=False)["input_ids"] + [END]
    assert sorted(sample["input_ids"].tolist() for sample in everything(data)) == sorted([long, short])
    assert "1 samples of which no token would be trained on" in caplog.text
    assert "1 samples of in-memory: Dataset, columns: prompt, response were cut to 12 tokens" in caplog.text
    assert "3 texts, 1 blank ones left out" in caplog.text


def test_nothing_usable(load):
    dataset = Dataset.from_dict({"prompt": ["", WORDS], "response": ["dog", "fox"]})
    with pytest.raises(
        CalibrationError, match=r"no usable tokens \(1 empty entries, 1 samples of which no token would be trained on"
    ):
        load(dataset, seq_len=4)


def test_answers_need_a_tokenizer(load):
    with pytest.raises(CalibrationError, match="Texts need a tokenizer"):
        load(Dataset.from_dict({"prompt": ["a"], "response": ["b"]}), tokenizer=None)


def test_a_column_that_is_not_there(load):
    with pytest.raises(CalibrationError, match=r"target_column 'anwser' is no column .* its columns: 'prompt'"):
        load(Dataset.from_dict({"prompt": ["a"], "answer": ["b"]}), target_column="anwser", text_column="prompt")


TEXT = st.text(st.sampled_from("ab \n.,é🙂") | st.characters(exclude_categories=["Cs"]), max_size=30)
WORDED = TEXT.filter(str.strip)


def encoded(kind, item, tokenizer, seq_len):
    request = resolve(CalibrationConfig([[1]], num_samples=1, seq_len=seq_len), LONG, None, "first")
    return responses(Source(kind, [item]), tokenizer, request)


@pytest.mark.parametrize("template", [None, TEMPLATE])
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(question=WORDED, answer=WORDED)
def test_labels_of_any_pair(tokenizer, template, question, answer):
    tokenizer.chat_template = template
    [(ids, labels)] = encoded("text pairs", (question, answer), tokenizer, seq_len=4096)
    prompt = f"{question}\n" if template is None else f"<|user|>{question}</s><|assistant|>"
    assert tokenizer.decode(ids) == f"{prompt}{answer}</s>"
    asked = labels != IGNORED
    start = int(asked.int().argmax())
    assert not asked[:start].any() and asked[start:].all()
    assert torch.equal(labels[start:], ids[start:])
    # A token that holds the end of the question and the start of the answer is asked for too.
    assert tokenizer.decode(ids[:start]) == prompt[: len(tokenizer.decode(ids[:start]))]
    assert tokenizer.decode(ids[start:]).endswith(f"{answer}</s>")
    assert len(tokenizer.decode(ids[start:])) - len(f"{answer}</s>") <= 4
    cut = encoded("text pairs", (question, answer), tokenizer, seq_len=start + 1)
    assert [len(row) for row, _ in cut] == [start + 1]
    assert not start or encoded("text pairs", (question, answer), tokenizer, seq_len=start) == []


# Chats


CHAT = [
    {"role": "system", "content": "be the dog"},
    {"role": "user", "content": "the fox"},
    {"role": "assistant", "content": "jumps over"},
    {"role": "user", "content": "the end"},
    {"role": "assistant", "content": "12 times"},
    {"role": "user", "content": "lazy"},
]
OTHER = [{"role": "user", "content": "fox"}, {"role": "assistant", "content": "dog"}]
CHATS = Dataset.from_dict({"messages": [CHAT, OTHER]})


def test_the_turns_of_the_assistant_alone_are_trained_on(load, tokenizer, caplog):
    tokenizer.chat_template = TEMPLATE
    assert spoken(load(CHATS, LONG), tokenizer) == sorted(
        [
            (
                "<|system|>be the dog</s><|user|>the fox</s><|assistant|>jumps over</s>"
                "<|user|>the end</s><|assistant|>12 times</s>",
                "jumps over</s>12 times</s>",
            ),
            ("<|user|>fox</s><|assistant|>dog</s>", "dog</s>"),
        ]
    )
    assert "chat template" not in caplog.text


@pytest.mark.parametrize(
    "template",
    [
        None,
        "{% for m in messages %}{{ m.content }}</s>{% endfor %}{% if add_generation_prompt %}Answer:{% endif %}",
        "{{ raise_exception('no') }}",
        "{% for m in messages[-1:] %}{{ m.content }}</s>{% endfor %}",
    ],
)
def test_without_a_template_that_begins_with_its_prompt_turns_are_lines(load, tokenizer, template, caplog):
    tokenizer.chat_template = template
    assert spoken(load(CHATS, LONG), tokenizer) == sorted(
        [
            ("be the dog\nthe fox\njumps over</s>the end\n12 times</s>", "jumps over</s>12 times</s>"),
            ("fox\ndog</s>", "dog</s>"),
        ]
    )
    assert ("2 samples were written without the tokenizer's chat template" in caplog.text) == (template is not None)


def test_a_template_that_rewrites_earlier_answers_is_not_used(load, tokenizer, caplog):
    tokenizer.chat_template = TEMPLATE.replace(
        "{{ m.content }}", "{{ m.content if loop.last or m.role != 'assistant' }}"
    )
    asked = {asked for _, asked in spoken(load(CHATS, LONG), tokenizer)}
    assert asked == {"jumps over</s>12 times</s>", "dog</s>"}
    assert "1 samples were written without" in caplog.text


def test_a_column_that_is_named_comes_before_chats(load, tokenizer):
    data = load(CHATS.add_column("words", ["the fox", "the dog"]), text_column="words", seq_len=3)
    assert all("jumps" not in read for read, _ in spoken(data, tokenizer))


def test_what_an_assistant_says_first_is_read_alone(load, tokenizer, caplog):
    tokenizer.chat_template = TEMPLATE
    greeting = {"role": "assistant", "content": "the end"}
    data = load(Dataset.from_dict({"messages": [[greeting, *OTHER], OTHER, [greeting]]}), LONG)
    assert ("<|assistant|>the end</s><|user|>fox</s><|assistant|>dog</s>", "dog</s>") in spoken(data, tokenizer)
    assert len(everything(data)) == 2 and "chat template" not in caplog.text
    assert "1 samples of which no token would be trained on" in caplog.text


def test_pairs_go_through_the_template(load, tokenizer):
    tokenizer.chat_template = TEMPLATE
    data = load(Dataset.from_dict({"question": ["the fox", "a"], "answer": ["the dog", "b"]}))
    assert ("<|user|>the fox</s><|assistant|>the dog</s>", "the dog</s>") in spoken(data, tokenizer)


@pytest.mark.parametrize(
    ("chat", "message"),
    [
        (["fox", "dog"], r"its columns: 'messages' \(List\)\. Column 'messages' holds lists of texts"),
        ([1, 2], r"its columns: 'messages' \(List\)"),
        ([["fox"], ["dog"]], r"its columns: 'messages' \(List\)"),
        ([{"from": "human", "value": "fox"}], "holds no usable tokens"),
    ],
)
def test_messages_that_are_no_chats(load, chat, message):
    with pytest.raises(CalibrationError, match=message):
        load(Dataset.from_dict({"messages": [chat, chat]}))


def test_chats_without_an_answer_are_left_out(load, tokenizer, caplog):
    unanswered = [{"role": "user", "content": "fox"}]
    wordless = [{"role": "user", "content": "fox"}, {"role": "assistant", "content": None}]
    blank = [{"role": "user", "content": "fox"}, {"role": "assistant", "content": " "}]
    data = load(Dataset.from_dict({"messages": [CHAT, OTHER, unanswered, wordless, blank, [], None]}), LONG)
    assert len(everything(data)) == 2 and "2 texts, 5 blank ones left out" in caplog.text


def in_parts(chat, *more):
    def cut(text):
        return [{"type": "text", "text": part} for part in text.partition(" ") if part]

    return [turn | {"content": [*cut(turn["content"]), *more]} for turn in chat]


def test_contents_in_parts(load, tokenizer):
    """As processors of images have them, here of words alone."""
    tokenizer.chat_template = TEMPLATE
    parts = Dataset.from_dict({"messages": [in_parts(CHAT), in_parts(OTHER, {"type": "text", "text": None})]})
    assert spoken(load(parts, LONG), tokenizer) == spoken(load(CHATS, LONG), tokenizer)


def test_parts_that_are_no_text_are_refused(load):
    """Not left out in silence: the answer may speak of them. Nor are thoughts words of the answer."""
    pictures = Dataset.from_dict({"messages": [in_parts(CHAT, {"type": "image", "text": ""}), in_parts(OTHER)]})
    with pytest.raises(CalibrationError, match="a chat holds a part of type 'image', and words are of type 'text'"):
        load(pictures)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    turns=st.lists(st.tuples(st.sampled_from(["system", "user", "assistant"]), WORDED), min_size=1, max_size=5),
    template=st.sampled_from([None, TEMPLATE]),
)
def test_labels_of_any_chat(tokenizer, turns, template):
    tokenizer.chat_template = template
    chat = [{"role": role, "content": content} for role, content in turns]
    found = encoded("chats", chat, tokenizer, seq_len=4096)
    # What is said first answers nothing, and nothing predicts its first token.
    answers = [content for role, content in turns[1:] if role == "assistant"]
    assert bool(found) == bool(answers)
    for ids, labels in found:
        asked = labels != IGNORED
        assert torch.equal(ids[asked], labels[asked]) and not asked[0]
        answered = tokenizer.decode(ids[asked]).split("</s>")
        assert len(answered) == len(answers) + 1 and answered.pop() == ""
        for said, answer in zip(answered, answers, strict=True):
            assert said.endswith(answer) and len(said) - len(answer) <= 4


# Labels that the data brings


def test_labels_beside_token_ids(load):
    rows = {
        "input_ids": [[5, 6, 7, 0], [8, 9, 10, 11]],
        "attention_mask": [[1, 1, 1, 0], [1, 1, 1, 1]],
        "labels": [[-100, -100, 7, -100], [8, 9, -100, 11]],
    }
    data = load(Dataset.from_dict(rows), tokenizer=None)
    assert sorted((s["input_ids"].tolist(), s["labels"].tolist()) for s in everything(data)) == [
        ([5, 6, 7], [-100, -100, 7]),
        ([8, 9, 10, 11], [-100, 9, -100, 11]),
    ]
    other = Dataset.from_dict(rows).rename_column("labels", "asked")
    assert load(other, tokenizer=None, target_column="asked").fingerprint == data.fingerprint


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        ([5, 6], "a row has 3 input_ids, but not as many labels"),
        ([6, 7, -100], "has 6 beside token 5. Labels of a dec"),
    ],
)
def test_labels_of_another_kind_are_refused(load, labels, message):
    with pytest.raises(CalibrationError, match=message):
        load(Dataset.from_dict({"input_ids": [[5, 6, 7]], "labels": [labels]}), tokenizer=None)


def test_labels_of_classes_are_none(load):
    data = load(Dataset.from_dict({"input_ids": LISTS, "labels": [0] * 50}), tokenizer=None)
    assert len(data.train) == 10


# Batches


def loss_of(logits, labels):
    """Mean cross-entropy of what is asked, from the output that predicts it."""
    logits, labels = (torch.cat(rows) for rows in (logits, labels))
    asked = labels != IGNORED
    return F.cross_entropy(logits[asked], labels[asked])


@torch.no_grad()
def test_the_loss_of_a_batch_is_that_of_its_samples(load, tokenizer, model):
    data = load(
        Dataset.from_dict({"prompt": QUESTIONS, "response": [f"{a} {a}"[: 5 + i] for i, a in enumerate(ANSWERS)]})
    )
    samples = data.train[:4]
    batch = data.collate(samples)
    assert len({len(s["input_ids"]) for s in samples}) > 1 and batch.keys() == {"input_ids", "attention_mask", "labels"}
    assert batch["attention_mask"].sum() == sum(len(s["input_ids"]) for s in samples)
    logits = [model(s["input_ids"][None]).logits[0, :-1] for s in samples]
    torch.testing.assert_close(model(**batch).loss, loss_of(logits, [s["labels"][1:] for s in samples]))


@pytest.mark.parametrize("source", ["text", "pairs"])
@torch.no_grad()
def test_the_loss_of_a_batch_of_an_encoder_decoder(load, t5_tokenizer, source):
    model = t5(eos_token_id=1).eval()
    pairs = Dataset.from_dict(
        {"question": [f"w{i} the fox" for i in range(20)], "answer": ["w7 dog " * (i + 1) for i in range(20)]}
    )
    data = load({"text": TEXTS, "pairs": pairs}[source], model=model, tokenizer=t5_tokenizer, seq_len=24)
    samples = data.train[:4]
    batch = data.collate(samples)
    assert torch.equal(batch["decoder_input_ids"], model.prepare_decoder_input_ids_from_labels(batch["labels"]))
    assert source == "text" or (batch["labels"] == IGNORED).any()
    logits = [model(input_ids=s["input_ids"][None], labels=s["labels"][None]).logits[0] for s in samples]
    torch.testing.assert_close(model(**batch).loss, loss_of(logits, [s["labels"] for s in samples]))
    assert data.to_dict()["trained_tokens"] == sum(len(s["labels"]) for s in data.train)


@pytest.fixture
def pictures():
    rows = {"image": [picture(10 * i) for i in range(12)], "text": [" ".join(["w9"] * (1 + i)) for i in range(12)]}
    return Dataset.from_dict(rows)


@torch.no_grad()
def test_the_loss_of_images_with_text_is_that_of_the_words(load, llava_model, processor, pictures):
    data = load(pictures, llava_model, None, processor)
    samples = data.train[:4]
    batch = data.collate(samples)
    assert batch["pixel_values"].shape == (4, 3, 16, 16)
    assert (batch["input_ids"] == IMAGE_TOKEN).sum() == 4 * PATCHES and not (batch["labels"] == IMAGE_TOKEN).any()
    outputs = [llava_model(input_ids=s["input_ids"][None], pixel_values=s["pixel_values"]) for s in samples]
    expected = loss_of([output.logits[0, :-1] for output in outputs], [s["labels"][1:] for s in samples])
    torch.testing.assert_close(llava_model(**batch).loss, expected)


@torch.no_grad()
def test_images_and_its_own_text_go_into_one_batch(load, llava_model, processor, pictures, tmp_path, caplog):
    pictures.save_to_disk(str(tmp_path / "pictures"))
    data = load(None, llava_model, None, processor, calibration=str(tmp_path / "pictures"))
    assert {len(sample) for sample in data.train} == {2, 3} and "no images" not in caplog.text
    assert llava_model(**data.collate(data.train)).loss.isfinite()
    plain = data.collate([sample for sample in data.train if "pixel_values" not in sample])
    assert "pixel_values" not in plain and llava_model(**plain).loss.isfinite()


def test_training_without_images_is_warned_of(load, llava_model, processor, caplog):
    load({"self": 1}, llava_model, None, processor)
    load(["w5 w6 w7 w8 w9"] + ["w10"] * 99, llava_model, None, processor, seq_len=3)
    assert "Training shows no images" in caplog.text and "Calibration on" not in caplog.text


def test_a_model_that_writes_no_text_is_not_asked_for_any(load, t5_model, t5_tokenizer):
    with pytest.raises(CalibrationError, match="source='self' needs a decoder"):
        load("self", t5_model, t5_tokenizer)


def test_images_and_answers_do_not_go_together(load, llava_model, processor, pictures):
    with pytest.raises(CalibrationError, match="target_column='text' has no meaning for images with text"):
        load(pictures, llava_model, None, processor, target_column="text", text_column="x")
    with pytest.raises(CalibrationError, match="image_column='image' is for image-text models, and LlamaFor"):
        load(pictures, image_column="image")


def test_padding_is_the_models_own(load):
    def padding(token):
        model = llama(vocab_size=280)
        model.config.pad_token_id = token
        data = load(LISTS, model)
        return data.collate([{"input_ids": torch.tensor(ids), "labels": torch.tensor(ids)} for ids in ([5], [6, 7])])

    assert padding(9)["input_ids"].tolist() == [[5, 9], [6, 7]]
    assert padding(None)["input_ids"].tolist() == padding(-1)["input_ids"].tolist() == [[5, 0], [6, 7]]
    assert padding(9)["labels"].tolist() == [[5, IGNORED], [6, 7]]


# Description


def test_the_description_is_plain_json(load, text_file):
    data = load(text_file)
    described = data.to_dict()
    assert json.loads(json.dumps(described)) == described
    assert described == {
        "sources": [{"source": text_file, "share": 1.0, "samples": 10, "tokens": 640, "trained_tokens": 630}],
        "samples": 10,
        "tokens": 640,
        "trained_tokens": 630,
        "held_out": 1,
        "fingerprint": data.fingerprint,
        "passages": passages((sample["input_ids"],) for sample in everything(data)),
    }


def test_the_fingerprint_sees_order_labels_and_what_is_held_out(load):
    def fingerprint(**options):
        return load(LISTS, **options).fingerprint

    def answers(question, answer):
        return load(Dataset.from_dict({"prompt": question, "response": answer})).fingerprint

    assert fingerprint() == fingerprint()
    assert len({fingerprint(), fingerprint(seed=1), fingerprint(num_samples=9), fingerprint(held_out=0.5)}) == 4
    assert answers(["a\nb", "c"], ["d", "e"]) != answers(["a", "c"], ["b\nd", "e"])


def test_the_fingerprint_sees_where_one_thing_ends_and_the_next_begins():
    def fingerprint(*lists, held=1, pixels=(1, 3, 2, 8)):
        samples = [{"input_ids": torch.tensor(ids), "labels": torch.tensor(ids)} for ids in lists]
        samples[0]["pixel_values"] = torch.zeros(pixels)
        return TrainingData(samples[:held], samples[held:], [], 0).fingerprint

    alike = [fingerprint([5], [6], [7]), fingerprint([5], [6], [7], held=2), fingerprint([5], [6, 7])]
    assert len({*alike, fingerprint([5], [6], [7], pixels=(1, 3, 4, 4))}) == 4
