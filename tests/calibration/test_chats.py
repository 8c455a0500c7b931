"""Chats and questions with answers: one reading for calibration, evaluation and recovery."""

import json
import logging
from typing import Any

import pytest
import torch
from datasets import Dataset

from optimum_prune import Pruner, PruningConfig, RecoveryConfig
from optimum_prune.calibration.data import load_samples
from optimum_prune.config import CalibrationConfig
from optimum_prune.errors import CalibrationError
from optimum_prune.recovery.data import load_training_data
from tests.models import llama, t5

TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
LONG = llama(vocab_size=280, max_position_embeddings=4096, num_hidden_layers=1)
NUMBERS = [str(i) for i in range(12)]


def turn(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def said(who: str, value: str) -> dict[str, str]:
    return {"from": who, "value": value}


USER, ANSWER = "jump, {}", "fox {}"
SHAPES: dict[str, Any] = {
    "messages": lambda n: {"messages": [turn("user", USER.format(n)), turn("assistant", ANSWER.format(n))]},
    "messages beside an id": lambda n: {
        "id": f"row {n}",
        "messages": [turn("user", USER.format(n)), turn("assistant", ANSWER.format(n))],
    },
    "parts": lambda n: {
        "messages": [
            {"role": role, "content": [{"type": "text", "text": text.format(n)}]}
            for role, text in (("user", USER), ("assistant", ANSWER))
        ]
    },
    "ShareGPT": lambda n: {"conversations": [said("human", USER.format(n)), said("gpt", ANSWER.format(n))]},
    "conversation": lambda n: {"conversation": [turn("user", USER.format(n)), turn("assistant", ANSWER.format(n))]},
    "another name": lambda n: {"thread": [turn("user", USER.format(n)), turn("assistant", ANSWER.format(n))]},
    "turns of prompt and completion": lambda n: {
        "prompt": [turn("user", USER.format(n))],
        "completion": [turn("assistant", ANSWER.format(n))],
    },
    "turns of prompt and chosen": lambda n: {
        "prompt": [turn("user", USER.format(n))],
        "chosen": [turn("assistant", ANSWER.format(n))],
        "rejected": [turn("assistant", "dog")],
    },
    "chosen holds the prompt": lambda n: {
        "prompt": USER.format(n),
        "chosen": [turn("user", USER.format(n)), turn("assistant", ANSWER.format(n))],
        "rejected": [turn("user", USER.format(n)), turn("assistant", "dog")],
    },
    "a prompt and turns of chosen": lambda n: {
        "prompt": USER.format(n),
        "chosen": [turn("assistant", ANSWER.format(n))],
        "rejected": [turn("assistant", "dog")],
    },
    "instruction and output": lambda n: {"instruction": USER.format(n), "output": ANSWER.format(n)},
    "blank input": lambda n: {"instruction": USER.format(n), "input": "", "output": ANSWER.format(n)},
    "prompt and completion": lambda n: {"prompt": USER.format(n), "completion": ANSWER.format(n)},
    "prompt, chosen, rejected": lambda n: {"prompt": USER.format(n), "chosen": ANSWER.format(n), "rejected": "dog"},
    "question and answer": lambda n: {"id": f"row {n}", "question": USER.format(n), "answer": ANSWER.format(n)},
    "question and response": lambda n: {"question": USER.format(n), "response": ANSWER.format(n)},
}


@pytest.fixture(params=[TEMPLATE, None], ids=["template", "plain"])
def templated(request, tokenizer):
    tokenizer.chat_template = request.param
    return tokenizer


def expected(tokenizer) -> list[str]:
    form = "<|user|>{}</s><|assistant|>{}</s>" if tokenizer.chat_template else "{}\n{}</s>"
    return sorted(form.format(USER.format(n), ANSWER.format(n)) for n in NUMBERS)


def decoded(tokenizer, samples) -> list[str]:
    return sorted(tokenizer.decode(ids) for ids in samples)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_one_reading_for_calibration_evaluation_and_recovery(templated, shape, tmp_path):
    rows = [shape(n) for n in NUMBERS]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for source in (Dataset.from_list(rows), str(tmp_path / "rows.jsonl")):
        config = CalibrationConfig(source, num_samples=12)
        for order in ("random", "first"):
            data = load_samples(config, LONG, templated, order=order)  # pyright: ignore[reportArgumentType]
            assert decoded(templated, data.samples) == expected(templated)
            assert data.texts == 12 and data.task is None
        trained = load_training_data(RecoveryConfig(source, num_samples=11), LONG, templated)
        samples = [*trained.train, *trained.held_out]
        assert decoded(templated, [sample["input_ids"] for sample in samples]) == expected(templated)
        answers = [sample["labels"][sample["labels"] != -100] for sample in samples]
        assert all(templated.decode(ids).lstrip().startswith("fox") for ids in answers)


def test_the_whole_conversation_is_read(templated):
    chat = [turn("system", "be quick"), turn("user", "the fox"), turn("assistant", "dog"), turn("user", "end")]
    data = load_samples(CalibrationConfig(Dataset.from_dict({"messages": [chat]})), LONG, templated)
    whole = "".join(f"<|{t['role']}|>{t['content']}</s>" for t in chat)
    assert decoded(templated, data.samples) == [whole if templated.chat_template else "be quick\nthe fox\ndog</s>end\n"]


def test_a_further_column_belongs_to_the_question(tokenizer):
    rows = {"instruction": ["sum up"], "input": ["the fox"], "output": ["fox"]}
    data = load_samples(CalibrationConfig(Dataset.from_dict(rows)), LONG, tokenizer)
    assert decoded(tokenizer, data.samples) == ["sum up\nthe fox\nfox</s>"]


def test_chats_are_cut_and_blank_ones_left_out(templated, caplog):
    caplog.set_level(logging.INFO, "optimum_prune")
    chats = [[turn("user", "the fox " * 20)], [turn("user", " ")], [], [turn("user", "the dog " * 20)]]
    data = load_samples(
        CalibrationConfig(Dataset.from_dict({"messages": chats}), seq_len=12), LONG, templated, order="first"
    )
    assert [len(sample) for sample in data.samples] == [12, 12]
    assert "2 texts, 2 blank ones left out" in caplog.text and "were cut to 12 tokens" in caplog.text
    assert "Reading 'messages' of the dataset as chats" in caplog.text


def test_a_template_that_refuses_is_warned_of(tokenizer, caplog):
    tokenizer.chat_template = "{{ raise_exception('no') }}"
    rows = Dataset.from_list([SHAPES["messages"](n) for n in NUMBERS])
    data = load_samples(CalibrationConfig(rows, num_samples=12), LONG, tokenizer)
    assert decoded(tokenizer, data.samples) == sorted(f"{USER}\n{ANSWER}</s>".format(n, n) for n in NUMBERS)
    assert "12 samples were written without the tokenizer's chat template" in caplog.text


def test_a_template_that_hides_prompts_is_used_all_the_same(tokenizer, caplog):
    tokenizer.chat_template = "{{ messages | length }}: {{ messages[-1].content }}"
    rows = Dataset.from_list([SHAPES["messages"](n) for n in NUMBERS])
    data = load_samples(CalibrationConfig(rows, num_samples=12), LONG, tokenizer)
    assert decoded(tokenizer, data.samples) == sorted(f"2: {ANSWER.format(n)}" for n in NUMBERS)
    assert "chat template" not in caplog.text


def test_columns_that_are_named_come_first(tokenizer):
    rows = Dataset.from_list([SHAPES["ShareGPT"](n) | {"words": f"only {n}", "text": "no"} for n in NUMBERS])
    data = load_samples(CalibrationConfig(rows, text_column="words", num_samples=1), LONG, tokenizer)
    assert "only" in tokenizer.decode(data.samples[0])
    both = rows.add_column("other", [[turn("user", "other")]] * 12)  # pyright: ignore[reportCallIssue]
    data = load_samples(CalibrationConfig(both, text_column="other", num_samples=1), LONG, tokenizer)
    assert decoded(tokenizer, data.samples) == ["other\n"]
    tokens = rows.add_column("input_ids", [[5, 6]] * 12)  # pyright: ignore[reportCallIssue]
    assert load_samples(CalibrationConfig(tokens, num_samples=1), LONG, tokenizer).samples[0].tolist() == [5, 6]


def test_chats_need_a_tokenizer():
    rows = Dataset.from_list([SHAPES["messages"]("1")])
    with pytest.raises(CalibrationError, match="Texts need a tokenizer"):
        load_samples(CalibrationConfig(rows), LONG)


def test_an_encoder_decoder_reads_pairs_of_the_usual_names(t5_tokenizer):
    rows = Dataset.from_list([{"question": "the quick fox", "answer": f"w{n}"} for n in NUMBERS])
    data = load_samples(CalibrationConfig(rows, num_samples=12), t5(eos_token_id=1), t5_tokenizer)
    named = load_samples(
        CalibrationConfig(rows, num_samples=12, target_column="answer"), t5(eos_token_id=1), t5_tokenizer
    )
    assert data.task == "pairs" and data.fingerprint == named.fingerprint


def test_a_whole_run_on_chats(tokenizer):
    tokenizer.chat_template = TEMPLATE
    model = llama(vocab_size=280)
    rows = Dataset.from_list([SHAPES["messages"](n) for n in NUMBERS])
    pruner = Pruner(model, tokenizer)
    pruner.prune(PruningConfig(scorer="taylor", sparsity=0.2, calibration=CalibrationConfig(rows, num_samples=4)))
    assert pruner.report is not None and pruner.report.calibration is not None
    assert pruner.report.calibration["samples"] == 4
    found = pruner.evaluate(rows, num_samples=12)
    assert found.sequences == 12 and found.exact_match is None
    lengths = [len(tokenizer.apply_chat_template(row["messages"], return_dict=False)) - 1 for row in rows]  # pyright: ignore[reportCallIssue, reportArgumentType, reportIndexIssue]
    assert found.tokens == sum(lengths)
    with torch.no_grad():
        assert torch.isfinite(model(torch.tensor([[5, 6]])).logits).all()
